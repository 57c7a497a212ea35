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
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pgra.arrays import Indices, Scores, Values, log_softmax
from pgra.artifacts import digest
from pgra.config import choose
from pgra.context import ALONE, Context
from pgra.data.examples import ExampleRows, open_rows, read_split
from pgra.data.tasks import METRICS, TEXT_METRICS, load_any_task
from pgra.data.text import copy_key
from pgra.errors import ConfigError, ModelError
from pgra.lm import load
from pgra.lm.base import Completion
from pgra.lm.cache import AnswersCache
from pgra.methods.arguments import SOURCES, RunArguments, WorthArguments
from pgra.methods.base import TaskData, arguments_from, arguments_of, open_method
from pgra.methods.ralm import Ralm
from pgra.methods.stages import Stages
from pgra.reader.calibration import centred, fit_scale_and_bias
from pgra.report.betting import find_bounds, gaps, judge
from pgra.report.compare import LEVEL
from pgra.report.results import EvidenceLine
from pgra.report.tables import Table
from pgra.rerank import FitData, ReadyReranker, find_reranker
from pgra.rerank.head import stratified_folds
from pgra.rerank.similarity import learns_labels
from pgra.rerank.states import BankedReranker
from pgra.types import Example

logger = logging.getLogger(__name__)

BITS = "bits"
WITHOUT = "without"
_FILE = "worth.json"
_SEED = 0
_ROUND = 20  # queries that an arm is asked before it is judged again: fewer say nothing
_PRIOR = 10.0  # with less, what calibration by 20 queries gives is noise, and costs queries
_RIGHT = 0.5
_MOST_BITS = 2.0  # that a query gains or loses; more counts as that
Lines = Sequence[Sequence[EvidenceLine]]


def measure_worth(args: RunArguments, options: WorthArguments) -> dict[str, Any]:
    """Measure what each source of evidence is worth; what LMs read and answered is kept.

    Returns:
        "rows", one a source and number of evidence, with gains in "unit" by "measure"; "best", the
        row to take if it surely gains, else None; "changes" of the run's arguments to take it, or
        no evidence; "why", a sentence with the flags; "queries" that were compared, and "without",
        their values; "calls", "tokens", "seconds" and "notes".

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
    arms: Mapping[str, Sequence[Sequence[str]]],
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
        PgraError: If the LM, or a question, cannot be read, or there are fewer than 20.
    """
    named = {"method": "ralm", "task": task, "reader_lm": reader}
    args = arguments_of(named, (), caller="pgra.worth")
    task_read = load_any_task(task)
    queries = read_split(task_read, open_rows(task_read, questions, "questions"), "train")
    method = Ralm(args, ALONE)
    method.data = TaskData(task_read, queries, (), ())
    method.source = load.find_model(reader)
    method.open_tokenizer()
    choices = []
    for name, passages in arms.items():
        if len(passages) != len(queries):
            raise ConfigError(f"{name} has {len(passages)} lists: give one a question")
        lines = [[EvidenceLine(0, text, 1, 0.0, 0.0) for text in texts] for texts in passages]
        choices += [Arm(name, depth, lines) for depth in depths]
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
        most = args.retriever.num_candidates
        self.depths = sorted({min(depth, most) for depth in options.depths})
        named = args.rerank.reranker
        every = list(SOURCES) if args.trains else ["first_stage", "random"]
        if named not in {"none", "prompted", "likelihood"}:
            every.append("given")
        self.sources: dict[str, Mapping[str, Any]] = {}
        for name in options.sources or every:
            changes: dict[str, Any] = {"topic_weight": 0.0, "reranker": "none"}
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
        self.context = Context(
            artifacts=Path(args.runtime.artifacts_dir), device=args.runtime.device
        )
        names = {source.get("reranker", named) for source in self.sources.values()}
        reads_lm = any(find_reranker(name).reads_lm for name in names)
        first = {"reranker": "prompted" if reads_lm else "none", "similarity": "dot"}
        self.method: Any = open_method(take_evidence(self.args, first), self.context)
        data = self.method.data
        pool = data.test if options.questions else data.train
        order = np.random.default_rng(_SEED).permutation(len(pool))
        self.queries = [pool[row] for row in order[: options.num_queries]]
        labels: Any = np.array([str(query.label) for query in self.queries])
        self.folds = stratified_folds(labels, [query.text for query in self.queries])

    def _stages(self, args: RunArguments, train: Sequence[Example]) -> Stages:
        """Return the stages of the queries, with a reranker fitted to `train`; one LM for all."""
        opened = self.method.stages
        data = self.method.data
        reference = FitData(train, data.task.prompt_words)
        ready = None
        if args.rerank.reranker == "prompted":
            ready = ReadyReranker({}, partial(BankedReranker, encoder=opened.reranker.encoder))
        return Stages(args, self.context, opened.prompt, data, reference=reference, ready=ready)

    def measure(self) -> dict[str, Any]:
        """Measure all sources: what `measure_worth` returns."""
        began = time.perf_counter()
        arms = []
        notes = []
        for name in self.sources:
            try:
                lines = self.find_evidence(name)
            except (ConfigError, ModelError) as error:
                notes.append(f"{name} is left out: {error}")
                continue
            longest = max(map(len, lines))
            arms += [Arm(name, depth, lines) for depth in self.depths if depth <= longest]
            if longest < self.depths[-1]:
                notes.append(f"{name} has at most {longest} passages a query: no more are tried")
        self.method.stages.release()
        if not arms:
            raise ConfigError("; ".join(notes))
        if self.args.trains:
            self.method.open_reader()
        result = Race(self.method, self.queries, arms, self.options).result()
        changes: dict[str, Any] = {"num_evidence": 0}
        flags = ["--num_evidence 0"]
        if best := result["best"]:
            changes = {**self.sources[best["source"]], "num_evidence": best["d"]}
            flags = [f"--{name} {value}" for name, value in changes.items() if value]
        result["why"] += f": go on with {' '.join(flags)}"
        result |= {"changes": changes, "notes": notes}
        return result | {"seconds": round(time.perf_counter() - began, 1)}

    def find_evidence(self, name: str) -> Lines:
        """Return each query's evidence.

        A similarity that learns labels is fitted, for the queries of a fold, to all examples but
        them.
        """
        args = take_evidence(self.args, self.sources[name])
        is_prompted = args.rerank.reranker == "prompted"
        learns = is_prompted and learns_labels(args.rerank.similarity)
        folds = self.folds if learns else np.zeros_like(self.folds)
        lines: list[list[EvidenceLine]] = [[] for _ in self.queries]
        for fold in np.unique(folds):
            members = np.flatnonzero(folds == fold)
            queries = [self.queries[i] for i in members]
            hidden = {copy_key(query.text) for query in queries} if learns else ()
            train = [x for x in self.method.data.train if copy_key(x.text) not in hidden]
            stages = self._stages(args, train)
            for i, evidence in zip(members, stages.new_lines(queries), strict=True):
                lines[i] = evidence
            if stages.ready is None:  # its LM serves no other source
                stages.release()
        return lines


@dataclass
class Arm:
    """A source of evidence, and how many of its passages are read.

    Attributes:
        lines: Each query's evidence.
        values: By measure, of the queries that it was asked, in their order.
        scores: Of labels, by round.
    """

    source: str
    d: int
    lines: Lines
    values: dict[str, Values] = field(default_factory=dict)
    scores: list[Scores] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.source}, d = {self.d}" if self.d else self.source


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
        method.context = replace(method.context, progress=False)
        self.method = method
        self.data = method.data
        self.queries = queries
        gives_bits = labels or method.args.trains
        self.measure = options.measure or (BITS if gives_bits else method.data.metric)
        is_bits = self.measure == BITS
        self.scale = _MOST_BITS if is_bits else 1.0
        self.shown = _MOST_BITS if is_bits else 100.0  # what a difference of 1 is in the unit
        self.unit = "bits a query" if is_bits else "points"
        self.right = "accuracy" if labels else self.measure
        self.least = options.least_gain
        self.arms = [Arm(WITHOUT, 0, [()] * count), *arms]
        self.calls = 0
        self.tokens = 0
        self.kept = AnswersCache(method.context.artifacts / "answers")
        training = method.args.sections.get("training")
        fields = method.identity().items()
        self.reader = {name: value for name, value in fields if not hasattr(training, name)}
        self.reader["num_evidence"] = None  # each arm has its own
        order = np.random.default_rng(_SEED).permutation(count)
        live = self.arms
        start = 0
        for stop in [*range(first, count, _ROUND), count]:
            calls = self.calls + len(live) * (stop - start)
            if start and calls > (options.budget or math.inf):
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
        queries = [self.queries[row] for row in rows[start:]]
        lines = [arm.lines[row][: arm.d] for row in rows[start:]]
        answers = self._answers(queries, lines)
        new: dict[str, Any] = {}
        if self.data.labels:
            arm.scores.append(np.array(answers, np.float32))
            truth = [self.data.labels.index(str(self.queries[row].label)) for row in rows]
            targets = np.array(truth)
            chances = calibrate(np.concatenate(arm.scores), targets, max(start, _ROUND))
            targets = targets[-len(chances) :]
            new["accuracy"] = chances.argmax(axis=1) == targets
            new[BITS] = chances[np.arange(len(chances)), targets] / np.log(2)
        elif self.measure == BITS:
            new[BITS] = np.array(answers) / np.log(2)
        else:
            new |= self.data.task.measure(answers, queries).by_text
        choose("measure", self.measure, new)
        for name, values in new.items():
            arm.values[name] = np.append(arm.values.get(name, ()), values)

    def _answers(self, queries: Sequence[Example], lines: Lines) -> list[Any]:
        """Return the reader's answers, (B,), of which an LM keeps its own."""
        if not self.method.args.trains:
            return self._read(queries, lines)
        keys = []
        for query, evidence in zip(queries, lines, strict=True):
            texts = [line.text for line in evidence]
            right = list(getattr(query, "answers", ())) if self.measure == BITS else []
            keys.append(digest([self.reader, dict(query.fields), texts, right]))

        def ask(_: Any, rows: list[int]) -> dict[str, Completion]:
            if not rows:
                return {}
            new = self._read([queries[row] for row in rows], [lines[row] for row in rows])
            pairs = zip(rows, new, strict=True)
            answers = {keys[row]: Completion(json.dumps(answer)) for row, answer in pairs}
            self.kept.keep(answers, model=self.method.source.name)
            return answers

        answered = self.kept.find_or_ask([(key,) for key in keys], ask, int)
        return [json.loads(answer.text) for (answer,) in answered]

    def _read(self, queries: Sequence[Example], lines: Lines) -> list[Any]:
        """Return scores of labels, or of the likeliest right answer, or what is written."""
        inputs = self.method.new_inputs(queries, lines)
        if hasattr(self.method, "lm"):
            self.tokens += sum(self.method.lm.count_tokens(inputs))
        if self.data.labels:
            answers = self.method.score(inputs)
        elif self.measure == BITS:
            answers = self.method.score_answers(inputs, queries)
        else:
            answers = self.method.write(inputs)
        plain: list[Any] = np.asarray(answers).tolist()
        return plain

    @property
    def values(self) -> list[Values]:
        """Each arm's values, which differ by 1 at most."""
        return [arm.values[self.measure] / self.scale for arm in self.arms]

    def row(self, number: int) -> dict[str, Any]:
        """Describe what an arm gains, and of right and wrong answers how many it changes."""
        arm = self.arms[number]
        differences = gaps(self.values, number, 0)
        low, high = find_bounds(differences)
        row: dict[str, Any] = {"source": arm.source, "d": arm.d, "queries": len(differences)}
        row["gain"] = self.shown * float(differences.mean())
        row |= {"low": self.shown * low, "high": self.shown * high, "p": self.verdict.p[number]}
        row["helped"] = float((differences > self.least).mean())
        row["hurt"] = float((differences < -self.least).mean())
        row |= _means(arm)
        if self.right != BITS:
            is_right = arm.values[self.right] >= _RIGHT
            is_known = self.arms[0].values[self.right][: len(is_right)] >= _RIGHT
            row["known"] = int(is_known.sum())
            row |= _share("destroyed", ~is_right[is_known])
            row |= _share("gained", is_right[~is_known])
        return row

    def result(self) -> dict[str, Any]:
        """Return what `measure_worth` does, but for flags."""
        best = self.verdict.best
        rows = [self.row(number) for number in range(1, len(self.arms))]
        best_row = rows[best - 1] if best else None
        why = f"no retrieval: no source gains {self.shown * self.least:.3g} {self.unit} or more"
        if best_row:
            why = f"{self.arms[best].name}: {best_row['gain']:+.3g} {self.unit} "
            why += f"({best_row['low']:+.3g} to {best_row['high']:+.3g})"
        if not self.verdict.is_sure:
            why = f"{why}; {self._doubt()}" if best else self._doubt()
        result: dict[str, Any] = {"why": why, "best": best_row, "rows": rows, "notes": []}
        result |= {"measure": self.measure, "unit": self.unit, "queries": len(self.values[0])}
        result |= {"without": _means(self.arms[0]), "calls": self.calls, "tokens": self.tokens}
        return result

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


def _share(name: str, values: Any) -> dict[str, float | None]:
    """Return a share of true values, and its interval; None if there are none."""
    low, high = ((bound + 1) / 2 for bound in find_bounds(2.0 * values - 1))
    return {
        name: float(values.mean()) if len(values) else None,
        f"{name}_low": low,
        f"{name}_high": high,
    }


def calibrate(scores: Scores, targets: Indices, start: int) -> Values:
    """Return log-probabilities of labels from query `start` on, fitted to those before it.

    Scores are (n, C), the result (n - start, C). A ModelError if a score is not a finite number.
    """
    scale, bias = fit_scale_and_bias(scores[:start], targets[:start], _PRIOR)
    return log_softmax(scale * centred(scores[start:]) + bias)


def worth_table(worth: Mapping[str, Any]) -> Table:
    """Return the rows as a table; the choice and the flags stand below it."""
    forms = {
        "source": "",
        "d": "",
        "queries": "",
        "gain": "+.2f",
        "low": "+.2f",
        "high": "+.2f",
        "p": ".3f",
        "helped": ".0%",
        "hurt": ".0%",
        BITS: ".2f",
        **dict.fromkeys({**METRICS, **TEXT_METRICS}, ".1%"),
        "known": "",
        "destroyed": ".0%",
        "gained": ".0%",
    }
    title = f"Evidence for the reader as it is: gain in {worth['unit']}, by {worth['measure']}"
    rows = [{"source": WITHOUT, **worth["without"]}, *worth["rows"]]
    cost = f"{worth['calls']} calls of the reader, {worth['tokens']} tokens read by an LM"
    return Table.of(title, rows, forms, [*worth["notes"], _MEANING, cost, worth["why"]])


_MEANING = (
    "low to high: 95 % interval of this row alone, which held after each query; p of no gain, by "
    f"betting and Holm over all rows, decides (at most {LEVEL}); helped, hurt: queries that gain "
    "or lose what matters; known: answered rightly without evidence; of these it destroyed, of the "
    "others it gained; random is the control."
)
