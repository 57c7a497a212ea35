"""Will retrieval help a reader, as it is? `pgra worth`.

    gain(x) = value of the answer to x with evidence - value of the answer without

A value is bits, log2 p(y | x, evidence), where the reader gives probabilities, else whether a right
answer is written (`contains`, `exact_match`, `f1`). The mean of bits estimates the V-information
that evidence has for this reader beside the query (Xu et al. 2020, "A Theory of Usable Information
under Computational Constraints", arXiv 2002.10689). Questions are asked in rounds, in a random
order: without evidence, and with that of each arm, a source and a number d of its passages. After
each round `pgra.report.betting` judges: a beaten arm is asked no more, and what is sure ends it.

Scores s of C labels become the probabilities softmax(a s + b), with a temperature and a bias a
label that are fitted to the rounds before, with evidence and without alike: what calibration gives
is no gain, and a query's own label is not seen. A similarity that learns labels is fitted to other
folds. Where answers are written p is that of the likeliest right one.
"""

import copy
import json
import logging
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from subprocess import PIPE, SubprocessError, run
from typing import Any

import msgspec
import numpy as np

from pgra.arrays import Indices, Scores, Values, log_softmax
from pgra.artifacts import digest
from pgra.config import choose
from pgra.context import ALONE
from pgra.data.examples import ExampleRows, open_rows, read_split
from pgra.data.tasks import load_any_task
from pgra.data.text import copy_key
from pgra.errors import ConfigError, one_line
from pgra.lm import load
from pgra.lm.base import Completion
from pgra.lm.cache import AnswersCache
from pgra.lm.endpoint import SCORE, EndpointLM
from pgra.methods.arguments import SOURCES, RunArguments, WorthArguments
from pgra.methods.base import TaskData, arguments_from, arguments_of, open_method
from pgra.methods.ralm import Ralm
from pgra.methods.stages import Stages
from pgra.reader.calibration import centred, fit_scale_and_bias
from pgra.report.betting import find_bounds, gaps, judge
from pgra.report.results import EvidenceLine
from pgra.report.tables import BITS, WITHOUT
from pgra.rerank import FitData, ReadyReranker, find_reranker
from pgra.rerank.head import stratified_folds
from pgra.rerank.similarity import learns_labels
from pgra.rerank.states import BankedReranker
from pgra.types import Example

logger = logging.getLogger(__name__)

COMMAND = "command:"
_SEED = 0
_ROUND = 20  # queries that an arm is asked before it is judged again: fewer say nothing
_PRIOR = 10.0  # with less, what calibration by 20 queries gives is noise, and costs queries
_RIGHT = 0.5
_LEAST_GAIN = 0.05  # that matters: 5 points, or 0.1 bits
Passages = Sequence[Sequence[str]]  # each query's, best first


def measure_worth(args: RunArguments, options: WorthArguments) -> dict[str, Any]:
    """Measure what each source of evidence is worth; what a reader answered is kept.

    Returns:
        "rows", one a source and number of evidence, with gains in "unit" by "measure"; "best", the
        row to take if it surely gains, else None; "changes" of the run's arguments to take it, or
        no evidence; "why", a sentence with the flags; "queries" that were compared, and "without",
        their values; the reader's "calls", "tokens" and "seconds"; "notes". Gains and shares have
        a "mean" and its bounds, "low" and "high".

    Raises:
        ConfigError: If the method reads no evidence of several sources, or examples are too few.
        PgraError: If method or first stage cannot be opened.
    """
    method = args.runtime.method
    if method not in ("pgra", "ralm"):
        raise ConfigError(f"worth compares the evidence of --method pgra and ralm, not of {method}")
    return WorthStudy(args, options).measure()


def worth(
    reader: str,
    questions: ExampleRows,
    arms: Mapping[str, Passages],
    *,
    depths: Sequence[int] = (1, 3, 5),
    measure: str | None = None,
    budget: int | None = None,
    task: str = "questions",
) -> dict[str, Any]:
    """Measure whether passages help an LM to answer questions, as `pgra worth` does.

    Args:
        reader: As --reader_lm: a hub id, folder, bundled:NAME, openai:MODEL, http://HOST:PORT.
        questions: Rows of "question" and "answers", or of another task; or a file.
        arms: By name, each question's passages, best first.
        depths: Numbers of passages that are tried.
        measure: As --measure.
        budget: Most calls of the LM.
        task: Whose prompt and columns are used; of labels, those are decided.

    Returns:
        What `measure_worth` does, without flags.

    Raises:
        PgraError: If the LM, or a question, cannot be read, there are fewer than 20, or arms lack
            passages.
    """
    args = arguments_of(
        {"method": "ralm", "task": task, "reader_lm": reader}, (), caller="pgra.worth"
    )
    task_read = load_any_task(task)
    queries = read_split(task_read, open_rows(task_read, questions, "questions"), "train")
    method = Ralm(args, ALONE)
    method.data = TaskData(task_read, queries, (), ())
    method.source = load.find_model(reader)
    method.open_tokenizer()
    choices = []
    for name, passages in arms.items():
        choices += open_arms(name, passages, len(queries), depths)
    return Race(method, queries, choices, WorthArguments(measure=measure, budget=budget)).result()


def take_evidence(args: RunArguments, changes: Mapping[str, Any]) -> RunArguments:
    """Return a run's arguments with others of its stages; a new stage has its own options."""
    values = args.as_json()
    for kind, options in (("retriever", "retriever_options"), ("reranker", "rerank_options")):
        if kind in changes:
            values[options] = {}
    return arguments_from(values, changes)


class WorthStudy:
    """Training queries of a run, its reader as it is, and sources of evidence; no LM has read yet.

    Attributes:
        folds: Each query's, (n,).
        sources: By name, what a run's arguments become.
    """

    def __init__(self, args: RunArguments, options: WorthArguments) -> None:
        """Open the method, and draw queries.

        Errors are those of `measure_worth`.
        """
        self.options = options
        self.depths = sorted({min(d, args.retriever.num_candidates) for d in options.depths})
        named = args.rerank.reranker
        every = list(SOURCES) if args.trains else ["first_stage", "random"]
        if named not in {"none", "prompted", "likelihood"}:
            every.append("given")
        self.sources: dict[str, Mapping[str, Any]] = {}
        for name in options.sources or every:
            changes: dict[str, Any] = {"topic_weight": 0.0, "reranker": "none"}
            if not name.startswith(COMMAND):
                changes |= SOURCES.get(name, {"retriever": name, "index_dir": None})
            if name.startswith("run:"):
                changes["run_queries"] = options.queries or options.questions or ""
            self.sources[name] = {} if name == "given" else changes
        # Opening a method fills in what is not given.
        args = RunArguments(copy.deepcopy(args.sections))
        if file := options.questions:  # all of them are asked
            args = args.change(
                "data", train_file=file, test_file=file, max_dev_samples=1, allow_test_in_train=True
            )
        if hasattr(args.reader, "decode"):  # the other way has no probabilities
            args = args.change("reader", decode="verbalizer")
        self.args = args.change("rerank", num_evidence=self.depths[-1])
        names = {source.get("reranker", named) for source in self.sources.values()}
        reads_lm = any(find_reranker(name).reads_lm for name in names)
        first: dict[str, Any] = {
            "reranker": "prompted" if reads_lm else "none",
            "similarity": "dot",
        }
        if all(name.startswith(COMMAND) for name in self.sources):
            first["num_evidence"] = 0  # nothing is searched
        self.method: Any = open_method(take_evidence(self.args, first), args.place(ALONE))
        data = self.method.data
        pool = data.test if options.questions else data.train
        order = np.random.default_rng(_SEED).permutation(len(pool))
        self.queries = [pool[row] for row in order[: options.num_queries]]
        labels: Any = np.array([str(query.label) for query in self.queries])
        self.folds = stratified_folds(labels, [query.text for query in self.queries])

    def _stages(self, args: RunArguments, train: Sequence[Example]) -> Stages:
        """Return the stages of the queries, with a reranker fitted to `train`; one LM for all."""
        opened = self.method.stages
        reference = FitData(train, opened.data.task.prompt_words)
        ready = None
        if args.rerank.reranker == "prompted":
            ready = ReadyReranker({}, partial(BankedReranker, encoder=opened.reranker.encoder))
        return Stages(
            args, opened.context, opened.prompt, opened.data, reference=reference, ready=ready
        )

    def measure(self) -> dict[str, Any]:
        """Measure all sources: what `measure_worth` returns."""
        arms = []
        notes = []
        for name in self.sources:
            try:
                passages = self.find_evidence(name)
            except ConfigError as error:
                if self.options.sources:
                    raise
                notes.append(f"{name} is left out: {error}")
                continue
            arms += open_arms(name, passages, len(self.queries), self.depths)
        self.method.stages.release()
        if self.args.trains:
            self.method.open_reader()
        result = Race(self.method, self.queries, arms, self.options).result()
        changes: dict[str, Any] = {"num_evidence": 0}
        if best := result["best"]:
            changes = {**self.sources[best["source"]], "num_evidence": best["d"]}
        flags = [f"--{name} {value}" for name, value in changes.items() if value]
        advice = " ".join(flags) or "--num_evidence 0"
        if best and best["source"].startswith(COMMAND):
            advice = f"its first {best['d']} passages"
        result["why"] += f": go on with {advice}"
        return result | {"changes": changes, "notes": notes}

    def find_evidence(self, name: str) -> Passages:
        """Return each query's evidence.

        A similarity that learns labels is fitted, for the queries of a fold, to all examples but
        them.
        """
        if name.startswith(COMMAND):
            return run_command(name.removeprefix(COMMAND), self.queries)
        args = take_evidence(self.args, self.sources[name])
        is_prompted = args.rerank.reranker == "prompted"
        learns = is_prompted and learns_labels(args.rerank.similarity)
        folds = self.folds if learns else np.zeros_like(self.folds)
        passages: list[list[str]] = [[] for _ in self.queries]
        for fold in np.unique(folds):
            members = np.flatnonzero(folds == fold)
            queries = [self.queries[i] for i in members]
            hidden = {copy_key(query.text) for query in queries} if learns else ()
            train = [x for x in self.method.data.train if copy_key(x.text) not in hidden]
            stages = self._stages(args, train)
            for i, evidence in zip(members, stages.new_lines(queries), strict=True):
                passages[i] = [line.text for line in evidence]
            if stages.ready is None:  # its LM serves no other source
                stages.release()
        return passages


def run_command(command: str, queries: Sequence[Example]) -> Passages:
    """Return the passages that a command finds for queries.

    It reads the queries from its standard input, a line each, and writes as many lines of JSON,
    lists of texts. A ConfigError if it fails, or writes something else.
    """
    try:
        texts = "".join(f"{one_line(query.text)}\n" for query in queries)
        done = run(shlex.split(command), input=texts.encode(), stdout=PIPE, check=True)
        return [msgspec.json.decode(line, type=list[str]) for line in done.stdout.splitlines()]
    except (OSError, SubprocessError, ValueError) as error:
        raise ConfigError(f"'{command}': {one_line(error)}") from None


@dataclass
class Arm:
    """A source of evidence, and how many of its passages are read.

    Attributes:
        passages: Each query's.
        values: By measure, of the queries that it was asked, in their order.
        scores: Of labels, the same.
    """

    source: str
    d: int
    passages: Passages
    values: dict[str, Values] = field(default_factory=dict)
    scores: list[Any] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.source}, d = {self.d}" if self.d else self.source


def open_arms(source: str, passages: Passages, count: int, depths: Sequence[int]) -> list[Arm]:
    """Return the arms of a source, one a depth; a ConfigError if it lacks passages of queries."""
    if len(passages) != count:
        raise ConfigError(
            f"{source} has {len(passages)} lists of passages, not {count}: one a query"
        )
    longest = max(map(len, passages))
    if longest < max(depths):
        raise ConfigError(
            f"{source} has {longest} passages a query at most: lower --depths to that"
        )
    return [Arm(source, depth, passages) for depth in depths]


class Race:
    """A method's reader, asked the same queries without evidence and with each arm's.

    Attributes:
        arms: The first one is without evidence.
        verdict: What is sure now.
        calls: Of the reader, with the `tokens` that an LM read.
    """

    def __init__(
        self, method: Any, queries: Sequence[Example], arms: Sequence[Arm], options: WorthArguments
    ) -> None:
        """Ask in rounds, until it is sure what is best, or the budget is spent.

        Raises:
            ConfigError: If there are too few queries, or there is no such measure.
        """
        labels = method.data.labels
        first = 2 * _ROUND if labels else _ROUND  # labels need a round to calibrate
        count = len(queries)
        if count < first:
            raise ConfigError(f"worth asks {first} examples or more, not {count}: give more")
        self.began = time.perf_counter()
        method.context = replace(method.context, progress=False)
        self.method = method
        self.queries = queries
        self.answers = AnswersCache(method.context.artifacts / "answers")
        self.lm = getattr(method, "lm", None)
        gives_bits = bool(labels) or method.args.trains
        if labels and isinstance(self.lm, EndpointLM):
            gives_bits = self.lm.resolve(None).mode.decide_by == SCORE
        self.right = "accuracy" if labels else method.data.metric
        self.measure = options.measure or (BITS if gives_bits else self.right)
        is_bits = self.measure == BITS
        self.writes = not (gives_bits if labels else is_bits)
        self.shown = 1.0 if is_bits else 100.0  # what a difference of 1 is in the unit
        self.unit = "bits a query" if is_bits else "points"
        self.least = 2 * _LEAST_GAIN if is_bits else _LEAST_GAIN
        self.arms = [Arm(WITHOUT, 0, [()] * count), *arms]
        self.calls = 0
        self.tokens = 0
        order = np.random.default_rng(_SEED).permutation(count)
        live = self.arms
        start = 0
        for stop in [*range(first, count, _ROUND), count]:
            calls = self.calls + len(live) * (stop - start)
            if start and calls > (options.budget or calls):
                break
            for arm in live:
                self._ask(arm, order[:stop], start)
            self.calls = calls
            start = stop
            self.verdict = judge(self.values, self.least)
            logger.info("worth: %d queries, %d calls so far", stop, calls)
            if self.verdict.is_sure:
                break
            live = [arm for n, arm in enumerate(self.arms) if n not in self.verdict.beaten - {0}]

    def _ask(self, arm: Arm, rows: Indices, start: int) -> None:
        """Ask an arm the queries `rows[start:]`; it was asked the others."""
        data = self.method.data
        queries = [self.queries[row] for row in rows[start:]]
        answers = self._answer(queries, [arm.passages[row][: arm.d] for row in rows[start:]])
        new: dict[str, Any] = {}
        if self.writes and data.labels:
            words = [self.method.verbalizer.label_of_word(text) for text in answers]
            new["accuracy"] = [
                word == query.label for word, query in zip(words, queries, strict=True)
            ]
        elif self.writes:
            new |= data.task.measure(answers, queries).by_text
        elif data.labels:
            arm.scores += answers
            targets = np.array([data.labels.index(str(self.queries[row].label)) for row in rows])
            chances = calibrate(np.array(arm.scores, np.float32), targets, max(start, _ROUND))
            targets = targets[-len(chances) :]
            new["accuracy"] = chances.argmax(axis=1) == targets
            new[BITS] = chances[np.arange(len(chances)), targets] / np.log(2)
        else:
            new[BITS] = np.array(answers) / np.log(2)
        choose("measure", self.measure, new)
        for name, values in new.items():
            arm.values[name] = np.append(arm.values.get(name, ()), values)

    def _answer(self, queries: Sequence[Example], passages: Passages) -> list[Any]:
        """Return the reader's answers, (B,): scores, or texts. A T5's are kept, as an LM keeps its.

        Scores are of labels, (B, C), or of the likeliest right answer.
        """
        method = self.method
        key = ""
        if method.args.trains:
            reader = [method.source.identity, vars(method.layout), dict(method.verbalizer.words)]
            data = replace(method.data, test=queries).fingerprints(["test"])
            key = digest([self.writes, reader, data, passages])
            if stored := self.answers.find([key]):
                return list(json.loads(stored[key].text))
        lines = [[EvidenceLine(0, text, 1, 0.0, 0.0) for text in texts] for texts in passages]
        inputs = method.new_inputs(queries, lines)
        if self.lm:
            self.tokens += sum(self.lm.count_tokens(inputs))
        if self.writes:
            answers = method.write(inputs)
        elif method.data.labels:
            answers = method.score(inputs).tolist()
        else:
            answers = method.score_answers(inputs, queries)
        if key:
            self.answers.keep({key: Completion(json.dumps(answers))}, model=method.source.name)
        return list(answers)

    @property
    def values(self) -> list[Values]:
        """Each arm's values; where they differ by more than 1 (bit), it counts as 1."""
        return [arm.values[self.measure] for arm in self.arms]

    def row(self, number: int) -> dict[str, Any]:
        """Describe what an arm gains, and of right and wrong answers how many it changes."""
        arm = self.arms[number]
        differences = gaps(self.values, number, 0)
        row: dict[str, Any] = {
            "source": arm.source,
            "d": arm.d,
            "queries": len(differences),
            "gain": _bounded(differences, self.shown),
            "p": self.verdict.p[number],
        }
        row["helped"] = float((differences > self.least).mean())
        row["hurt"] = float((differences < -self.least).mean())
        row |= _means(arm)
        if self.right in arm.values:
            is_right = arm.values[self.right] >= _RIGHT
            is_known = self.arms[0].values[self.right][: len(is_right)] >= _RIGHT
            row["known"] = int(is_known.sum())
            row["destroyed"] = _bounded(1 - 2.0 * is_right[is_known], 0.5, 0.5)
            row["gained"] = _bounded(2.0 * is_right[~is_known] - 1, 0.5, 0.5)
        return row

    def result(self) -> dict[str, Any]:
        """Return what `measure_worth` does, but for flags."""
        best = self.verdict.best
        rows = [self.row(number) for number in range(1, len(self.arms))]
        best_row = rows[best - 1] if best else None
        why = f"no retrieval: no source gains {self.shown * self.least:.3g} {self.unit} or more"
        if best_row:
            why = "{}: {mean:+.3g} {} ({low:+.3g} to {high:+.3g})"
            why = why.format(self.arms[best].name, self.unit, **best_row["gain"])
        if not self.verdict.is_sure:
            why = f"{why}; {self._doubt()}" if best else self._doubt()
        result = {"why": why, "best": best_row, "rows": rows, "without": _means(self.arms[0])}
        return result | {
            "measure": self.measure,
            "unit": self.unit,
            "queries": len(self.values[0]),
            "calls": self.calls,
            "tokens": self.tokens,
            "seconds": round(time.perf_counter() - self.began, 1),
        }

    def _doubt(self) -> str:
        """Say between which two arms it is not sure, and what such a race can show."""
        best = self.verdict.best
        others = {*range(len(self.arms))} - self.verdict.beaten - {best}
        bounds = {other: find_bounds(gaps(self.values, best, other)) for other in others}
        rival = min(bounds, key=lambda other: bounds[other][0])
        low, high = bounds[rival]
        arms = f"{self.arms[best].name} and {self.arms[rival].name}"
        return (
            f"not decided after {len(self.values[0])} queries: between {arms} at most "
            f"{-self.shown * low:.3g} {self.unit} (so many queries show differences from about "
            f"{self.shown * (high - low) / 2:.3g} on)"
        )


def _means(arm: Arm) -> dict[str, float]:
    return {name: float(values.mean()) for name, values in arm.values.items()}


def _bounded(values: Any, factor: float, shift: float = 0.0) -> dict[str, float]:
    """Return the mean of values in [-1, 1] and its bounds, in another unit; nothing of none."""
    ends = [float(values.mean()), *find_bounds(values)] if len(values) else []
    names = ("mean", "low", "high")
    return {name: factor * end + shift for name, end in zip(names, ends, strict=False)}


def calibrate(scores: Scores, targets: Indices, start: int) -> Values:
    """Return log-probabilities of labels from query `start` on, fitted to those before it.

    Scores are (n, C), the result (n - start, C). A ModelError if a score is not a finite number.
    """
    scale, bias = fit_scale_and_bias(scores[:start], targets[:start], _PRIOR)
    return log_softmax(scale * centred(scores[start:]) + bias)
