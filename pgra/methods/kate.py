"""KATE (Liu et al. 2022, section 2.3): exemplars near the query, and a frozen LM's answer.

    exemplars = the pool's k nearest to the query        or drawn, for the baseline
    prompt    = exemplars, nearest first + query         as many as fit the LM's window
    label     = LM(prompt)                               a label word's probability, or its text

Exemplars and answers are stored in the artifacts folder, so a stopped run resumes where it was.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np

from pgra.arrays import Scores
from pgra.context import Context
from pgra.errors import ConfigError
from pgra.exemplars import BM25, SelectionArguments
from pgra.exemplars.selection import Chosen, ExemplarPool, arrange, open_similarity, vote
from pgra.lm import open_lm
from pgra.lm.base import LanguageModel
from pgra.lm.endpoint import EndpointLM
from pgra.methods.arguments import METHODS, AnswerArguments, RunArguments
from pgra.methods.base import (
    Decisions,
    Method,
    TaskData,
    decide_labels,
    label_shares,
    measure_answers,
)
from pgra.progress import Bar
from pgra.prompts import Fit, Verbalizer, answer_words, fit_prompts, task_format
from pgra.reader.calibration import Calibration, fit_calibration
from pgra.retrieval.neighbors import LEAK_RULE
from pgra.types import UNDECIDED, Example, Json, Prediction

_NUM_BIAS_EXAMPLES = 128  # of the pool, which the LM decides to show its label bias
# The note of each count that is not 0.
_NOTES = {
    "near_duplicates": "leak guard: {near_duplicates} examples, nearly the text of a query, were "
    "not shown to it",
    "over_budget": "{over_budget} exemplars were left out of prompts, to fit the LM's window",
    "undecided": "{undecided} of {queries} answers are no label's word, and count as wrong",
}


@dataclass(frozen=True)
class ExemplarPrompts:
    """The prompts of B queries; `texts` is empty and `fit` None with a vote.

    `rows` are each query's exemplars in the prompt's order, rows of the pool.
    """

    chosen: Chosen
    rows: Sequence[Sequence[int]]
    fit: Fit | None = None
    texts: Sequence[str] = ()


def answer_bar(prompts: Sequence[str], context: Context) -> Bar:
    """Return a bar that shows how many of the distinct prompts are answered."""
    is_off = not context.shows_progress
    return Bar(total=len(set(prompts)), desc="answers", unit="prompt", disable=is_off)


def count_word_tokens(lm: LanguageModel, words: Mapping[str, str]) -> int:
    """Return the tokens of the longest label word after a prompt."""
    opening, *whole = lm.count_tokens(["", *answer_words(words)])  # what opens every text
    return max(1, max(whole) - opening)


def score_words(
    lm: LanguageModel, prompts: Sequence[str], words: Mapping[str, str], context: Context
) -> Scores:
    """Return the log-probability of each label's word after each prompt, (B, C)."""
    answers = answer_words(words)
    with answer_bar(prompts, context) as bar:
        scores = lm.score(prompts, answers, advance=bar.update)
    return np.array(scores, np.float32).reshape(len(prompts), len(answers))


def write_answers(
    lm: LanguageModel, prompts: Sequence[str], max_new_tokens: int, stop: str, context: Context
) -> list[str]:
    """Return what the LM writes after each prompt, greedily, (B,)."""
    with answer_bar(prompts, context) as bar:
        completions = lm.complete(
            prompts, max_new_tokens=max_new_tokens, stop=stop, advance=bar.update
        )
    return [completion.text.strip() for completion in completions]


class Kate(Method):
    """Lets a frozen LM decide queries after labelled examples.

    It takes the label whose word is likeliest after the prompt (Brown et al. 2020, section 2.4), or
    writes, as KATE, whose text is the answer, or the label whose word it wrote.

    `selection` and `icl` are the arguments, with what the task and the run's seed decide.
    """

    SECTIONS = METHODS["kate"].sections

    selection: SelectionArguments
    icl: AnswerArguments
    lm: LanguageModel | None = None  # none where exemplars vote
    calibration = Calibration()

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
        self._fill_in()
        root = self.context.artifacts / "neighbors" / self.data.task.name
        chosen = self.selection
        train = self.data.train
        self.pool = ExemplarPool(train, chosen.leak_jaccard)
        self.similarity = open_similarity(chosen, train, root, device=self.context.device)
        self.selector = chosen.open(self.pool, self.similarity)
        self.fingerprints |= self.data.fingerprints(("train", "test"))
        if self.icl.decide_by != "vote":
            lm = open_lm(self.args["completer"], self.context)
            self.lm = lm.resolve(self.icl.decide_by) if isinstance(lm, EndpointLM) else lm
            self._fill_in()
            if self.icl.decide_by == "score":
                answer_words(self.format.words)  # refuses ambiguous words, as the next does
            else:
                self.verbalizer = Verbalizer(self.format.words, template="")

    def read_data(self) -> TaskData:
        """Read all of train as a pool, and the queries."""
        return TaskData.read(self.args, is_trained=False)

    def _fill_in(self) -> None:
        """Fill in what the task and the LM decide where the user does not."""
        task = self.data.task
        icl = self.args["icl"]
        selection = self.args["selection"]
        decide_by = icl.decide_by
        if not task.labels:
            is_balanced = selection.exemplars == "balanced"
            if decide_by == "score" or is_balanced or icl.prompt_format == "task":
                raise ConfigError(
                    f"answers of '{task.name}' are written: decide_by score, exemplars balanced "
                    "and prompt_format task are for tasks with labels"
                )
            decide_by = decide_by or "generation"
        elif decide_by is None and not self.args["completer"].is_remote:
            decide_by = "score"
        count = selection.count
        if selection.num_exemplars is None and task.num_exemplars is not None:
            count = task.num_exemplars
        if isinstance(self.lm, EndpointLM):
            decide_by = self.lm.mode.decide_by
            self.args = self.args.change("completer", endpoint=self.lm.mode.endpoint)
        format_ = icl.prompt_format or task.prompt_style
        args = self.args.change("selection", num_exemplars=count)
        self.args = args.change("icl", decide_by=decide_by, prompt_format=format_)
        self.selection = self.args["selection"]
        self.icl = self.args["icl"]
        self.format = task_format(task, format_)
        if icl.chat_template != "off" and self.lm is not None:
            inner = getattr(self.lm, "inner", None)
            if inner is None:
                raise ConfigError("chat_template is for an LM here: see --endpoint for another")
            self.format = replace(self.format, chat=inner.chat(icl.chat_template))
        if self.selection.exemplar_seed is None:
            self.selection = replace(self.selection, exemplar_seed=self.seed)
        if decide_by == "vote" and not self.selection.compares:
            raise ConfigError("decide_by 'vote' is the neighbors' vote: use --exemplars knn")
        if decide_by == "score" and icl.max_new_tokens is not None:
            raise ConfigError("max_new_tokens is of --decide_by generation: leave it out")
        self.max_new_tokens = icl.max_new_tokens or task.max_new_tokens

    def identity(self) -> dict[str, Json]:
        named: dict[str, Json] = {
            **self.selector.fingerprint,
            "order": self.selection.order,
            "leak_jaccard": self.selection.leak_jaccard,
            "leak_rule": LEAK_RULE,
        }
        if self.similarity is not None:
            named["similarity"] = dict(self.similarity.fingerprint)
        if self.lm is not None:
            prompt: dict[str, Json] = {**self.format.fingerprint, "decide_by": self.icl.decide_by}
            if self.icl.decide_by == "generation":
                prompt |= {"max_new_tokens": self.max_new_tokens, "stop": self.data.task.stop}
            named |= {"prompt": prompt, "lm": dict(self.lm.fingerprint), "window": self.lm.window}
        return named

    @classmethod
    def sources(cls, args: RunArguments) -> list[tuple[str, str]]:
        sources = super().sources(args)
        if args["icl"].query_dataset_name:
            sources.append(("task", args["icl"].query_dataset_name))
        if args["icl"].decide_by != "vote":
            sources.append(("model", args["completer"].lm))
        selection = args["selection"]
        if selection.compares and selection.encoder != BM25:
            sources.append(("model", selection.encoder))
        return sources

    def sample_prompt(self) -> str | None:
        return f"{self._render(self.data.test[:1]).texts[0]}\n" if self.lm is not None else None

    def with_seed(self, args: RunArguments) -> Self:
        """Return the method of another draw, sharing pool, comparison and LM."""
        if args["selection"].exemplar_seed is not None and args.seed != self.args.seed:
            raise ConfigError("exemplar_seed is one, and --seeds names several: leave one out")
        other = super().with_seed(args)
        other._fill_in()
        other.selector = other.selection.open(other.pool, other.similarity)
        return other

    def fit(self, folder: Path) -> None:  # noqa: ARG002 (answers are kept, and asked again to load)
        """See how the LM leans to labels, from examples of the pool under prompts of their own."""
        if self.lm is None or self.icl.decide_by != "score" or self.icl.label_bias == "none":
            return
        pool = self.data.train
        rows = np.random.default_rng(0).permutation(len(pool))[:_NUM_BIAS_EXAMPLES]
        examples = [pool[row] for row in np.sort(rows).tolist()]
        with self.timed("calibration"):
            scores = self._score(self.lm, self._render(examples))
        truth = [self.data.labels.index(str(example.label)) for example in examples]
        shares = label_shares(self.data)
        self.calibration = fit_calibration(
            self.icl.label_bias, scores, truth, shares, lambda: scores
        )
        if self.calibration.bias_from == "dev":
            self.calibration = replace(self.calibration, bias_from="pool")

    def decide(self, examples: Sequence[Example]) -> Decisions:
        prompts = self._render(examples)
        texts: list[str] = []
        if self.lm is None:
            decided = Decisions(self._vote(examples, prompts.chosen))
        elif self.icl.decide_by == "score":
            with self.timed("answers"):
                scores = self._score(self.lm, prompts)
            decided = decide_labels(
                examples, scores, self.data, self.calibration, self.icl.label_bias
            )
        else:
            with self.timed("answers"):
                stop = self.data.task.stop
                texts = write_answers(
                    self.lm, prompts.texts, self.max_new_tokens, stop, self.context
                )
            decided = Decisions(self._read_answers(examples, texts))
        decided = self._report(examples, prompts, decided, texts if self.data.labels else ())
        if isinstance(self.lm, EndpointLM):
            paid = {"endpoint": self.lm.describe_spending()}
            decided = replace(decided, metrics={**decided.metrics, **paid})
        if not self.data.labels and list(examples) == list(self.data.test):
            return measure_answers(self.data.task, self.data.answered("test"), decided)
        return decided

    def _read_answers(self, queries: Sequence[Example], texts: Sequence[str]) -> list[Prediction]:
        """Return written texts as answers, or as the labels whose words they are."""
        predictions = []
        for query, text in zip(queries, texts, strict=True):
            label = text
            if self.data.labels:
                label = self.verbalizer.label_of_word(text) or UNDECIDED
            predictions.append(self.data.make_prediction(query, label, {label: 1.0}))
        return predictions

    def _score(self, lm: LanguageModel, prompts: ExemplarPrompts) -> Scores:
        return score_words(lm, prompts.texts, self.format.words, self.context)

    def _render(self, examples: Sequence[Example]) -> ExemplarPrompts:
        """Choose exemplars, leave out what does not fit, and write the prompts."""
        with self.timed("exemplars"):
            chosen = self.selector.choose(examples)
        wanted = [chosen.of(i) for i in range(len(examples))]
        if self.lm is None:
            return ExemplarPrompts(chosen, wanted)
        order = self.selection.order
        seed = self.selection.exemplar_seed or 0
        room = self.max_new_tokens
        if self.icl.decide_by == "score":
            room = count_word_tokens(self.lm, self.format.words)

        def arranged(i: int, count: int) -> list[int]:
            return arrange(wanted[i][:count], order, query=examples[i].text, seed=seed)

        def render(i: int, count: int) -> str:
            exemplars = [self.data.train[row] for row in arranged(i, count)]
            return self.format.write(exemplars, examples[i].fields)

        with self.timed("prompts"):
            fit = fit_prompts(
                self.lm.count_tokens,
                render,
                [len(rows) for rows in wanted],
                names=[example.id for example in examples],
                window=self.lm.window,
                num_new_tokens=room,
            )
            counts = fit.counts.tolist()
            rows = [arranged(i, count) for i, count in enumerate(counts)]
            texts = [render(i, count) for i, count in enumerate(counts)]
        return ExemplarPrompts(chosen, rows, fit, texts)

    def _report(
        self,
        examples: Sequence[Example],
        prompts: ExemplarPrompts,
        decided: Decisions,
        texts: Sequence[str],
    ) -> Decisions:
        """Add exemplars to decisions: to each query's line, in counts and in notes."""
        chosen = prompts.chosen
        fit = prompts.fit
        exemplars = [[self.data.train[row] for row in rows] for rows in prompts.rows]
        details: list[dict[str, Json]] = []
        for i, rows in enumerate(prompts.rows):
            compared = zip(chosen.of(i), chosen.similarity[i].tolist(), strict=False)
            near = {row: round(value, 6) for row, value in compared if not math.isnan(value)}
            line: dict[str, Json] = {"written": texts[i]} if texts else {}
            line["exemplars"] = [
                {"id": self.data.train[row].id, "similarity": near.get(row)} for row in rows
            ]
            line["near_duplicates"] = int(chosen.num_dropped[i])
            if fit is not None:
                line["over_budget"] = int(fit.num_dropped[i])
                line["prompt_tokens"] = int(fit.num_tokens[i])
            details.append(line)
        undecided = [p for p in decided.predictions if p.label == UNDECIDED]
        counts = {
            "exemplars": sum(map(len, prompts.rows)),
            "near_duplicates": int(chosen.num_dropped.sum()),
            "over_budget": 0 if fit is None else int(fit.num_dropped.sum()),
            "queries": len(examples),
            "undecided": len(undecided),
        }
        notes = [note.format_map(counts) for name, note in _NOTES.items() if counts[name]]
        if self.lm is None:
            notes.append("no LM: the majority of the exemplars; of a tie the nearest's")
        else:
            notes.append("the LM is frozen: seeds are of the exemplars")
        return replace(
            decided,
            exemplars=exemplars,
            details=details,
            notes=[*notes, *decided.notes],
            metrics={**decided.metrics, "exemplars": counts},
        )

    def _vote(self, examples: Sequence[Example], chosen: Chosen) -> list[Prediction]:
        """Let exemplars vote (KATE's kNN baseline); answers count as equal as in exact match."""
        predictions = []
        for i, query in enumerate(examples):
            targets = [str(self.data.train[row].label) for row in chosen.of(i)]
            keys = [self.data.task.answer_key(target) for target in targets]
            shares = vote(keys)
            label = UNDECIDED if self.data.labels else ""
            if targets:
                label = targets[keys.index(next(iter(shares)))]
            predictions.append(self.data.make_prediction(query, label, shares))
        return predictions

    @classmethod
    def uses_seed(cls, args: RunArguments) -> bool:
        return bool(args["selection"].draws)


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

    def read_data(self) -> TaskData:
        """Read the splits that readers are trained on: exemplars are drawn from train."""
        return replace(TaskData.read(self.args), dev=[])
