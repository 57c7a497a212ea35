"""KATE (Liu et al. 2022, section 2.3): exemplars near the query, and a frozen LM's answer.

    exemplars = the pool's k nearest to the query        or drawn, for the baseline
    prompt    = exemplars, nearest first + query         as many as fit the LM's window
    label     = LM(prompt)                               a label word's probability, or its text

Exemplars and answers are stored in the artifacts folder, so a stopped run resumes where it was.
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from pgra.artifacts import digest
from pgra.core import UNDECIDED, Example, Json, Prediction
from pgra.data.examples import AnsweredExample, load_splits
from pgra.data.tasks import GenerationTask, load_any_task
from pgra.errors import ConfigError
from pgra.exemplars import SelectionArguments
from pgra.exemplars.selection import Chosen, ExemplarPool, arrange, open_similarity, vote
from pgra.exemplars.selector import ExemplarSelector
from pgra.lm import open_lm
from pgra.lm.base import Advance, Completion, LanguageModel
from pgra.lm.remote import RemoteLM
from pgra.methods.arguments import METHODS, AnswerArguments, RunArguments
from pgra.methods.base import Decisions, Method, TaskData, bundled_notes, task_name
from pgra.progress import Bar
from pgra.prompts import Fit, PromptFormat, Verbalizer, answer_words, fit_prompts, task_format
from pgra.reader.calibrate import decide
from pgra.report.metrics import Written, measure_written, normalize_answer
from pgra.retrieval.neighbors import LEAK_RULE

_WRITTEN_TOKENS = 10  # KATE's max_tokens
_BOOTSTRAP_SEED = 0
_DRAWS = 2000
_EXACT = "exact_match"
# The note of each count that is not 0.
_NOTES = {
    "copies_in_pool": "{copies_in_pool} of {pool} examples of the pool are copies of an earlier "
    "one, text and label, and were not shown",
    "near_duplicates": "leak guard: {near_duplicates} examples, nearly the text of "
    "{queries_with_near_duplicates} of {queries} queries, were not shown to them",
    "over_budget": "{queries_over_budget} of {queries} prompts hold fewer exemplars than asked "
    "for, {over_budget} in all, to fit the LM's window",
    "undecided": "{undecided} of {queries} answers are no label's word, and count as wrong",
}


@dataclass
class PoolData(TaskData):
    """A pool of examples to choose from (train), and queries (test)."""

    @classmethod
    def read(cls, args: RunArguments) -> Self:
        """Read a task's pool and queries; errors as of `TaskData.read`."""
        task, other = load_any_task(task_name(args)), args["icl"].query_dataset_name
        splits = load_splits(task, args.data, is_trained=False, query_dataset_name=other)
        return cls(task, splits.train, [], splits.test, splits.notes)

    @property
    def references(self) -> list[AnsweredExample]:
        """The queries with their right answers, where answers are written; else none."""
        return [query for query in self.test if isinstance(query, AnsweredExample)]


@dataclass(frozen=True)
class ExemplarPrompts:
    """The prompts of B queries; `texts` is empty and `fit` None with a vote.

    `rows` are each query's exemplars in the prompt's order, rows of the pool.
    """

    chosen: Chosen
    rows: Sequence[Sequence[int]]
    fit: Fit | None = None
    texts: Sequence[str] = ()


# How an LM's answer becomes a label: by its label words' probabilities, or by the text it writes.
#
# Brown et al. 2020, section 2.4, score each candidate answer. KATE lets GPT-3 write and compares
# the text with the label.


@dataclass(frozen=True)
class LMAnswer:
    """An LM's answer to a query: its label, or its text where there are no labels.

    `details` are further entries of `predictions.jsonl`.
    """

    prediction: Prediction
    details: Mapping[str, Json]


@dataclass(frozen=True, kw_only=True)
class Answerer:
    r"""Asks an LM for the labels of queries.

    By default it takes the label whose word is likeliest after the prompt, all its tokens counted.
    With `max_new_tokens` the LM writes until `stop`; the answer is the text, or the label whose
    word it wrote.

    Attributes:
        format: Writes prompts and has each label's word; without words the text is the answer.
    """

    lm: LanguageModel
    format: PromptFormat
    max_new_tokens: int | None = None
    stop: str = "\n"
    progress: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens is None:  # either refuses ambiguous words, before anything
            answer_words(self.format.words)
        else:
            self._verbalizer  # noqa: B018

    @cached_property
    def _verbalizer(self) -> Verbalizer:
        return Verbalizer(self.format.words, template="")

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """All that decides, besides the LM, exemplars and queries."""
        if self.max_new_tokens is None:
            return {**self.format.fingerprint, "decide_by": "score"}
        how: dict[str, Json] = {"max_new_tokens": self.max_new_tokens, "stop": self.stop}
        return {**self.format.fingerprint, "decide_by": "generation", **how}

    @property
    def num_new_tokens(self) -> int:
        """The room that an answer needs: of words the longest, without what opens every text."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        opening, *whole = self.lm.count_tokens(["", *answer_words(self.format.words)])
        return max(1, max(whole) - opening)

    def answer(self, queries: Sequence[Example], prompts: Sequence[str]) -> list[LMAnswer]:
        """Ask the LM each of B queries' prompt."""
        words, most, ids = self.format.words, self.max_new_tokens, [query.id for query in queries]
        with progress_bar(prompts, progress=self.progress) as advance:
            if most is None:
                logs = self.lm.score(prompts, answer_words(words), advance=advance)
                scores = np.array(logs, np.float32).reshape(len(queries), len(words))
                return [LMAnswer(one, {}) for one in decide(ids, scores, list(words))]
            how: Any = {"max_new_tokens": most, "stop": self.stop, "advance": advance}
            written = self.lm.complete(prompts, **how)
        return [self._read(*pair) for pair in zip(ids, written, strict=True)]

    def _read(self, query: str, completion: Completion) -> LMAnswer:
        words, text = self.format.words, completion.text.strip()
        if not words:
            return LMAnswer(Prediction(query, text, {}), {})
        label = self._verbalizer.label_of_word(text)
        scores = {name: float(name == label) for name in words}
        return LMAnswer(Prediction(query, label or UNDECIDED, scores), {"written": text})


@contextlib.contextmanager
def progress_bar(prompts: Sequence[str], *, progress: bool) -> Iterator[Advance]:
    """Show how many of the distinct prompts are answered."""
    total = len(set(prompts))
    with Bar(total=total, desc="answers", unit="prompt", disable=not progress) as bar:
        yield bar.update


class Kate(Method):
    """Lets a frozen LM decide queries after labelled examples.

    `selection` and `icl` are the arguments, with what the task and the run's seed decide.
    """

    SECTIONS = METHODS["kate"].sections

    data: PoolData
    selection: SelectionArguments
    icl: AnswerArguments

    @classmethod
    def name(cls, args: RunArguments) -> str:
        """Return icl-knn, icl-farthest, ...; vote-knn with a vote."""
        kind = "vote" if args["icl"].decide_by == "vote" else "icl"
        selection = args["selection"]
        who = "farthest" if selection.farthest else selection.exemplars.rpartition(":")[2]
        return f"{kind}-{who}"

    def open(self) -> None:
        """Open pool, comparison and LM; weights are loaded when they are first needed."""
        self.data = self.read_data()
        self._settle()
        root = self.context.artifacts / "neighbors" / self.data.task.name
        chosen, train = self.selection, self.data.train
        pool = ExemplarPool(train, chosen.leak_jaccard)
        similarity = open_similarity(chosen, train, root, device=self.context.device)
        self.exemplars = ExemplarSelector.of(chosen, pool, similarity)
        self.selector = self.exemplars.under(self.selection)  # refuses what the pool does not have
        self._known: tuple[list[Example], ExemplarPrompts] | None = None
        self.fingerprints |= {split: self.data.fingerprint(split) for split in ("train", "test")}
        if self.data.references:
            answers = [list(reference.answers) for reference in self.data.references]
            self.fingerprints["answers"] = digest(answers)
        self._answerer: Answerer | None = None
        if self.icl.decide_by != "vote":
            self.completer = self._open_lm()
            if not isinstance(self.completer, RemoteLM):
                self._answerer = self._open_answerer(self.completer)

    def read_data(self) -> PoolData:
        """Read all of train as a pool, and the queries."""
        return PoolData.read(self.args)

    def _settle(self) -> None:
        """Fill in what the task decides where the user does not; refuse what it does not have."""
        task, icl, selection = self.data.task, self.args["icl"], self.args["selection"]
        format_ = icl.prompt_format or "task"
        # What an endpoint offers is seen when it is first needed.
        decide_by = icl.decide_by or (None if self.args["completer"].is_remote else "score")
        count = selection.count
        if isinstance(task, GenerationTask):
            for name, value, own in (
                ("decide_by", icl.decide_by, "score"),
                ("exemplars", selection.exemplars, "balanced"),
                ("prompt_format", icl.prompt_format, "task"),
            ):
                if value == own:
                    raise ConfigError(
                        f"{name} {own} is for tasks with labels, and answers of '{task.name}' are "
                        "written: leave it out"
                    )
            count = task.num_exemplars if selection.num_exemplars is None else count
            decide_by, format_ = icl.decide_by or "generation", "kate"
        args = self.args.change("selection", num_exemplars=count)
        self.args = args.change("icl", decide_by=decide_by, prompt_format=format_)
        if decide_by != "vote":
            self.args["completer"].check_named()
        self.selection, self.icl = self.args["selection"], self.args["icl"]
        if self.selection.exemplar_seed is None:
            self.selection = replace(self.selection, exemplar_seed=self.seed)
        if decide_by == "vote" and not self.selection.compares:
            raise ConfigError(
                f"decide_by 'vote' is the neighbors' vote, and exemplars "
                f"'{self.selection.exemplars}' with --num_exemplars {count} are none: use "
                "--exemplars knn"
            )

    def _open_lm(self) -> LanguageModel:
        """Open the LM, or share that of the run before; two LMs are never in memory together."""
        asked = json.dumps([asdict(self.args["completer"]), str(self.context.artifacts)])
        shared = self.context.shared
        before, lm = shared.get("lm", ("", None))
        if before != asked:
            del lm
            shared.pop("lm", None)
            completer = open_lm(self.args["completer"], self.context)
            shared["lm"] = (asked, completer)
        found: LanguageModel = shared["lm"][1]
        return found

    @property
    def answerer(self) -> Answerer | None:
        """What asks the LM; None with the vote. The first use may call an endpoint."""
        if self._answerer is None and self.icl.decide_by != "vote":
            assert isinstance(self.completer, RemoteLM)
            self.completer = self.completer.settle(self.icl.decide_by)
            self._note_way()
            self._answerer = self._open_answerer(self.completer)
        return self._answerer

    def _note_way(self) -> None:
        """Fill in how an endpoint is asked, once it is chosen."""
        if isinstance(self.completer, RemoteLM):
            way = self.completer.way
            args = self.args.change("completer", endpoint=way.endpoint)
            self.args = args.change("icl", decide_by=way.decide_by)
            self.icl = self.args["icl"]

    def _open_answerer(self, lm: LanguageModel) -> Answerer:
        icl, task, progress = self.icl, self.data.task, self.context.shows_progress
        how, most, stop = task_format(task, icl.prompt_format or "task"), icl.max_new_tokens, "\n"
        if isinstance(task, GenerationTask):
            most, stop = most or task.max_new_tokens, task.stop
        if icl.decide_by == "generation":
            most = most or _WRITTEN_TOKENS
        elif most is not None:
            raise ConfigError(
                f"max_new_tokens is {most}, and label words are scored, not written: leave it out, "
                "or use --decide_by generation"
            )
        return Answerer(lm=lm, format=how, max_new_tokens=most, stop=stop, progress=progress)

    def identity(self) -> dict[str, Json]:
        named: dict[str, Json] = {
            **self.selector.fingerprint,
            "order": self.selection.order,
            "leak_jaccard": self.selection.leak_jaccard,
            "leak_rule": LEAK_RULE,
        }
        if self.exemplars.similarity is not None:
            named["similarity"] = dict(self.exemplars.similarity.fingerprint)
        if self.answerer is not None:
            named["prompt"] = dict(self.answerer.fingerprint)
            named["lm"] = dict(self.completer.fingerprint)
            named["window"] = self.completer.window
        return named

    def models(self) -> list[str]:
        models = [self.args["completer"].lm] if self.answerer is not None else []
        return [*models, *([self.selection.encoder] if self.selection.compares else [])]

    def notes(self) -> list[str]:
        return [*super().notes(), *bundled_notes([], [self.icl.query_dataset_name or ""])]

    def sample_prompt(self) -> str | None:
        if self.answerer is None:
            return None
        return f"{self._prompts(self.data.test).texts[0]}\n"

    def with_seed(self, args: RunArguments) -> Self:
        """Return the method of another draw, sharing pool, comparison and LM."""
        if args["selection"].exemplar_seed is not None and args.seed != self.args.seed:
            raise ConfigError(
                f"exemplar_seed is {args['selection'].exemplar_seed}, and --seeds names several: "
                "leave one of them out"
            )
        other = super().with_seed(args)
        other._known = None
        other._settle()
        if other._answerer is not None:
            other._note_way()
        other.selector = other.exemplars.under(other.selection)
        return other

    def decide(self, examples: Sequence[Example]) -> Decisions:
        prompts = self._prompts(examples)
        if self.answerer is None:
            answers = self._vote(examples, prompts.chosen)
        else:
            with self.timed("answers"):
                answers = self.answerer.answer(examples, prompts.texts)
        decided = self._report(examples, prompts, answers)
        if self.answerer is not None and isinstance(self.completer, RemoteLM):
            paid = {"endpoint": self.completer.describe_spending()}
            decided = replace(decided, metrics={**decided.metrics, **paid})
        if list(examples) != list(self.data.test):
            return decided
        return self._with_texts(decided) if self.data.references else decided

    def _prompts(self, examples: Sequence[Example]) -> ExemplarPrompts:
        """Choose exemplars, leave out what does not fit, and render; remembered for these."""
        asked = list(examples)  # whole: other new queries have the same ids
        if self._known is None or self._known[0] != asked:
            self._known = asked, self._render(asked)
        return self._known[1]

    def _render(self, examples: Sequence[Example]) -> ExemplarPrompts:
        with self.timed("exemplars"):
            chosen = self.selector.choose(examples)
        wanted = [chosen.of(i) for i in range(len(examples))]
        if self.answerer is None:
            return ExemplarPrompts(chosen, wanted)
        answerer, order, seed = self.answerer, self.selection.order, self.selection.exemplar_seed

        def shown(i: int, count: int) -> list[int]:
            return arrange(wanted[i][:count], order, query=examples[i].text, seed=seed or 0)

        def render(i: int, count: int) -> list[str]:
            exemplars = [self.data.train[row] for row in shown(i, count)]
            return [answerer.format.write(exemplars, examples[i].fields)]

        with self.timed("prompts"):
            fit = fit_prompts(
                self.completer.count_tokens,
                render,
                [len(rows) for rows in wanted],
                names=[example.id for example in examples],
                window=self.completer.window,
                num_new_tokens=answerer.num_new_tokens,
            )
            counts = fit.counts.tolist()
            rows = [shown(i, count) for i, count in enumerate(counts)]
            texts = [render(i, count)[0] for i, count in enumerate(counts)]
        return ExemplarPrompts(chosen, rows, fit, texts)

    def _report(
        self, examples: Sequence[Example], prompts: ExemplarPrompts, answers: Sequence[LMAnswer]
    ) -> Decisions:
        """Report exemplars: in each query's line, in counts and in notes."""
        chosen, fit, dropped = prompts.chosen, prompts.fit, prompts.chosen.num_dropped
        exemplars = [[self.data.train[row] for row in rows] for rows in prompts.rows]
        predictions = [answer.prediction for answer in answers]
        details: list[dict[str, Json]] = []
        for i, rows in enumerate(prompts.rows):
            near = dict(zip(chosen.of(i), chosen.similarity[i].tolist(), strict=False))
            shown = [
                {"id": one.id, "similarity": _rounded(near.get(row, math.nan))}
                for one, row in zip(exemplars[i], rows, strict=True)
            ]
            line = {**answers[i].details, "exemplars": shown, "near_duplicates": int(dropped[i])}
            if fit is not None:
                line["over_budget"] = int(fit.num_dropped[i])
                line["prompt_tokens"] = int(fit.num_tokens[i])
            details.append(line)
        counts: dict[str, Json] = {
            "exemplars": sum(map(len, prompts.rows)),
            "near_duplicates": int(dropped.sum()),
            "queries_with_near_duplicates": int((dropped > 0).sum()),
            "copies_in_pool": self.exemplars.pool.guard.num_copies if self.selection.count else 0,
        }
        if fit is not None:
            counts |= {
                "over_budget": int(fit.num_dropped.sum()),
                "queries_over_budget": int((fit.num_dropped > 0).sum()),
                "mean_prompt_tokens": round(float(fit.num_tokens.mean()), 1),
            }
        metrics: dict[str, Json] = {"exemplars": counts}
        told = {
            **counts,
            "pool": len(self.data.train),
            "queries": len(examples),
            "undecided": sum(prediction.label == UNDECIDED for prediction in predictions),
        }
        notes = [note.format(**told) for name, note in _NOTES.items() if told.get(name)]
        notes.append(
            "no LM: the majority of the exemplars; of a tie the nearest's"
            if self.answerer is None
            else "the LM is frozen: seeds are of the exemplars"
        )
        return Decisions(
            predictions, exemplars=exemplars, details=details, notes=notes, metrics=metrics
        )

    # The neighbors' vote, and what is measured on texts.

    def _vote(self, examples: Sequence[Example], chosen: Chosen) -> list[LMAnswer]:
        """Let exemplars vote (KATE's kNN baseline); answers count as equal as in exact match."""
        answers, labels = [], self.data.labels
        for i, query in enumerate(examples):
            targets = [str(self.data.train[row].label) for row in chosen.of(i)]
            shares = vote(targets)
            label = next(iter(shares), UNDECIDED)
            if self.data.references:
                plain = [normalize_answer(target) for target in targets]
                label = next((targets[plain.index(first)] for first in vote(plain)), "")
            scores = {name: shares.get(name, 0.0) for name in labels}
            answers.append(LMAnswer(Prediction(query.id, label, scores), {}))
        return answers

    def _measure(self, texts: Sequence[str]) -> Written:
        assert isinstance(self.data.task, GenerationTask)
        return measure_written(self.data.task, texts, self.data.references)

    def _with_texts(self, decided: Decisions) -> Decisions:
        """Add what is measured on texts: each query's own values, and all metrics."""
        found = self._measure([prediction.label for prediction in decided.predictions])
        details: list[Mapping[str, Json]] = []
        for i, reference in enumerate(self.data.references):
            values = {name: round(each[i], 6) for name, each in found.each.items()}
            details.append(
                {
                    "answers": list(reference.answers),
                    **({"is_right": values.pop(_EXACT) == 1} if _EXACT in values else {}),
                    **values,
                    **({"bleu_counts": list(found.counts[i])} if found.counts else {}),
                    **({"is_overlap": reference.table.is_overlap} if reference.table else {}),
                    **decided.details[i],
                }
            )
        interval = None  # BLEU is of all texts together and has none
        if self.data.metric in found.each:
            each = np.array(found.each[self.data.metric])
            generator = np.random.default_rng(_BOOTSTRAP_SEED)
            rows = generator.integers(len(each), size=(_DRAWS, len(each)))
            interval = np.percentile(each[rows].mean(axis=1), [2.5, 97.5]).tolist()
        return replace(decided, details=details, values=found.values, interval=interval)

    @classmethod
    def uses_seed(cls, args: RunArguments) -> bool:
        draws: bool = args["selection"].draws
        return draws


class Icl(Kate):
    """The frozen LM as PGRA's baseline: the reranker's LM, template and exemplars.

    Guo et al. 2023, section 3.1, baseline 1 (8 shots). Their "generate answers" is here the
    likeliest label word, all its tokens counted, so that every query gets a label.
    """

    SECTIONS = METHODS["icl"].sections

    @classmethod
    def name(cls, args: RunArguments) -> str:
        return args.runtime.method

    @classmethod
    def uses_seed(cls, args: RunArguments) -> bool:
        """Whether the seed draws exemplars: only without an `exemplar_seed`."""
        return super().uses_seed(args) and args["selection"].exemplar_seed is None

    def read_data(self) -> PoolData:
        """Read the splits that readers are trained on: exemplars are drawn from train."""
        data = TaskData.read(self.args)
        return PoolData(data.task, data.train, [], data.test, data.notes)


def _rounded(value: float) -> float | None:
    """Round a similarity for JSON: None where nothing was compared."""
    return None if math.isnan(value) else round(float(value), 6)
