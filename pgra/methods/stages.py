"""PGRA's retrieval stages on a task: prompt, candidates, evidence (Guo et al. 2023, section 2).

    candidates = retriever(query)            k passages of a static index       (eq. 1)
    states     = LM(prefix + P(text))        of the query and each candidate    (eq. 2)
    evidence   = top d by state product                                         (eq. 3)

Any retriever finds the candidates.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Self

import numpy as np

from pgra.arrays import Rows
from pgra.artifacts import Inputs, artifact_dir, build_once, digest, read_array, write_array
from pgra.context import Context
from pgra.data.corpus import Corpus, open_corpus
from pgra.data.tasks import bare_task
from pgra.errors import ConfigError
from pgra.exemplars.selector import build_prompt
from pgra.methods.arguments import RunArguments
from pgra.methods.base import SPLITS, TaskData, Timed
from pgra.prompts import FewShotPrompt, prompt_template
from pgra.report.metrics import has_answer
from pgra.report.results import EvidenceLine
from pgra.rerank import (
    BaseReranker,
    FitData,
    ReadyReranker,
    RerankRequest,
    find_reranker,
    open_reranker,
)
from pgra.rerank.arguments import DrawnArguments
from pgra.rerank.base import RerankCost, query_key
from pgra.retrieval import Retriever, open_retriever
from pgra.retrieval.base import check_num_candidates, examples_digest
from pgra.types import MISSING_ROW, Candidates, Example, Json

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stored:
    """Candidates, (B, K), and the artifact they are in; `reused` if it was there already."""

    candidates: Candidates
    folder: Path
    reused: bool


class Stages(Timed):
    """Both retrieval stages of a task, for its splits and for new queries.

    Attributes:
        data: The task's examples; train without those in the prompt.
        prompt: The LM's; without exemplars where no LM reads one.
        candidates: The first stage's by split.
        evidence: The second stage's by split: all candidates in the new order.
        cost: Of the last search.
        finds_itself: Whether a passage that is a query's text, but for spaces, is its candidate.
    """

    cost = RerankCost()
    finds_itself = False

    def __init__(
        self,
        args: RunArguments,
        context: Context,
        prompt: FewShotPrompt,
        data: TaskData,
        *,
        reference: FitData | None = None,
        ready: ReadyReranker | None = None,
    ) -> None:
        """Open nothing yet; `data` is empty where a finished run decides new queries.

        `reference` is what a similarity is fitted to; None is the task's training examples. `ready`
        replaces the reranker that the arguments name.
        """
        super().__init__()
        self.args = args
        self.context = args.place(context)
        self.prompt = prompt
        self.data = data
        self.reference = reference or FitData(data.train, data.task.prompt_words)
        self.ready = ready
        self.candidates: dict[str, Stored] = {}
        self.evidence: dict[str, Stored] = {}

    @classmethod
    def read(cls, args: RunArguments, context: Context, ready: ReadyReranker | None = None) -> Self:
        """Read a task's data and write its prompt; a `ready` reranker has one.

        Raises:
            ConfigError: If no task is named, or there are too few examples for the prompt.
            DataError: If the data cannot be read.
        """
        data = TaskData.read(args)
        prompt = FewShotPrompt(prompt_template(data.task))
        in_prompt: set[str] = set()
        if ready is not None:
            if not args.rerank.num_evidence:
                raise ConfigError(f"method '{args.method}' reads no evidence: leave reranker out")
            bare = prompt.template
            prompt = ready.prompt or prompt
            if prompt.template.inputs != bare.inputs:
                raise ConfigError("the reranker's prompt has other inputs: make it with this task")
            in_prompt = {e.id for e in data.train if query_key(e) in ready.exemplar_keys}
        elif reads_prompt(args):
            prompt = write_prompt(data, args.rerank)
            in_prompt = set(prompt.exemplar_ids)
        elif getattr(args.reader, "same_train", False):
            in_prompt = set(write_prompt(data, args.rerank).exemplar_ids)
        data = set_aside(data, in_prompt)
        if not data.train:
            raise ConfigError(f"the prompt has all {len(in_prompt)} examples: lower num_exemplars")
        stages = cls(args, context, prompt, data, ready=ready)
        stages.fingerprints |= data.fingerprints()
        return stages

    @classmethod
    def without_task(cls, args: RunArguments, context: Context, corpus: Corpus | None) -> Self:
        """Search for texts, ordered by a reranker that reads no prompt; k is at most the corpus.

        That is the arguments' if None.

        Raises:
            ConfigError: If the reranker reads a task's prompt.
            DataError: If the corpus cannot be read.
        """
        if reads_prompt(args):
            raise ConfigError(
                f"--task is missing, whose prompt reranker '{args.rerank.reranker}' reads: name "
                "one (pgra list lists them), or take --reranker likelihood, which reads none"
            )
        task = bare_task("texts", ["text"])
        prompt = FewShotPrompt(prompt_template(task))
        stages = cls(args, context, prompt, TaskData(task, (), (), ()))
        if corpus is not None:
            stages.corpus = corpus
        count = min(args.retriever.num_candidates, len(stages.corpus))
        args = args.change("rerank", num_evidence=min(args.rerank.num_evidence, count))
        stages.args = args.change("retriever", num_candidates=count)
        return stages

    @property
    def depth(self) -> int:
        """The number of evidence a query, the paper's d."""
        return self.args.rerank.num_evidence

    @cached_property
    def corpus(self) -> Corpus:
        """The passages that are searched."""
        with self.timed("corpus"):
            return open_corpus(self.args.corpus, self.context.artifacts)

    @cached_property
    def reranker(self) -> BaseReranker:
        """The second stage; its LM's weights are loaded at the first use."""
        args = self.args.rerank
        if args.reranker == "likelihood" and "dense" not in self.args.retriever.retriever:
            args = replace(args, topic_weight=args.topic_weight or 0.0)  # BM25's add nothing
        request = RerankRequest(
            args=args,
            prompt=self.prompt,
            corpus=self.corpus,
            context=self.context,
            options=self.args.rerank_options,
            fit_data=self.reference,
        )
        return open_reranker(request) if self.ready is None else self.ready.open(request)

    @cached_property
    def retriever(self) -> Retriever:
        """The first stage; its index is built if it is missing."""
        return open_retriever(
            self.args.retriever,
            self.corpus,
            self.context.unshared(),  # parts share the LM's work alone
            options=self.args.retriever_options,
        )

    def open(self) -> None:
        """Open corpus and reranker, so that errors come before the long stages.

        Raises:
            PgraError: If one cannot be opened, or k exceeds the corpus.
        """
        if not self.depth:
            return
        check_num_candidates(self.args.retriever.num_candidates, len(self.corpus))
        self.fingerprints["corpus"] = self.corpus.fingerprint["corpus_sha256"]
        self.fingerprints["reranker"] = dict(self.reranker.fingerprint)

    def find(self, splits: Sequence[str] = SPLITS) -> None:
        """Find or load the evidence of splits; no LM is in memory afterwards."""
        try:
            self.open()
            if self.depth and splits:
                self._find(splits)
        finally:
            self.release()

    def release(self) -> None:
        """Free the reranker's models; the next use loads them again."""
        if "reranker" in vars(self):
            self.reranker.release()

    def _find(self, splits: Sequence[str]) -> None:
        rows = self.find_candidates(splits)
        with self.timed("states"):  # the LM reads the union of all candidates, each passage once
            work = self.reranker.prepare(self._examples(splits), rows)
            if self.args.rerank.reranker != "none":
                pairs = int((rows != MISSING_ROW).sum())
                logger.info("reranker: %d query-candidate pairs; %s", pairs, work)
        with self.timed("evidence"):
            for split in splits:
                first = self.candidates[split]
                candidates = self.fingerprints[f"candidates/{split}"]
                fields = {**self.reranker.fingerprint, "candidates": candidates}
                queries = self.data.examples(split)
                make = partial(self.reranker.rerank, queries, first.candidates)
                self.evidence[split] = self._store("evidence", split, fields, make)

    def wanted(self, queries: Sequence[Example] = ()) -> tuple[Sequence[Example], Rows]:
        """Return what the reranker reads: queries, else all splits', and candidates, (B, K)."""
        rows = self._retrieve(queries).rows if queries else self.find_candidates()
        return queries or self._examples(SPLITS), rows

    def _examples(self, splits: Sequence[str]) -> list[Example]:
        return list(chain.from_iterable(self.data.examples(split) for split in splits))

    def find_candidates(self, splits: Sequence[str] = SPLITS) -> Rows:
        """Return all queries' candidates, (B, K), stored by split."""
        k = self.args.retriever.num_candidates
        with self.timed("index"):
            retriever = self.retriever
        self.fingerprints["index"] = dict(retriever.fingerprint)
        with self.timed("candidates"):
            for split in splits:
                examples = self.data.examples(split)
                fields = {
                    **retriever.fingerprint,
                    "retriever": self.args.retriever.retriever,
                    "num_candidates": k,
                    "queries": examples_digest(examples),
                }
                make = partial(self._retrieve, examples)
                stored = self._store("candidates", split, fields, make, retriever.inputs)
                self.candidates[split] = stored
        logger.info("%s: %d candidates for each query", self.args.retriever.retriever, k)
        del retriever, self.retriever  # the LM may need the memory of index and encoder
        return np.concatenate([self.candidates[split].candidates.rows for split in splits])

    def search(self, queries: Sequence[Example]) -> tuple[Candidates, Candidates]:
        """Return new queries' candidates, (B, K), and the second stage's order of them.

        The LM's states are kept in its banks.
        """
        first = self._retrieve(queries)
        self.cost = self.reranker.prepare(queries, first.rows)
        return first, self.reranker.rerank(queries, first)

    def write_queries(self, texts: Sequence[str], *, drop_self: bool = False) -> list[Example]:
        """Return texts as new queries, of which each may find itself unless `drop_self`."""
        self.finds_itself = not drop_self
        write = self.prompt.template.passage_fields
        return [Example(f"text-{number}", write(text)) for number, text in enumerate(texts)]

    def _retrieve(self, examples: Sequence[Example]) -> Candidates:
        """Return the first stage's candidates, (B, K); see `finds_itself`."""
        k = self.args.retriever.num_candidates
        first = self.retriever.retrieve([example.text for example in examples], k)
        if self.finds_itself:
            return first
        texts = {row: " ".join(text.split()) for row, text in self._texts(first.rows).items()}
        rows = first.rows.copy()
        for line, example in zip(rows, examples, strict=True):
            query = " ".join(example.text.split())
            line[[texts.get(row) == query for row in line.tolist()]] = MISSING_ROW
        return Candidates.best(rows, first.scores, k)

    def lines(self, first: Candidates, best: Candidates) -> list[list[EvidenceLine]]:
        """Return each query's top d of `best` with its text, and its rank and score in both stages.

        `first` are the candidates, (B, K), `best` their order; missing ones are left out.
        """
        best = best.top(self.depth)
        texts = self._texts(best.rows)
        lines = []
        for number, rows in enumerate(best.rows.tolist()):
            candidates = first.rows[number].tolist()
            evidence = []
            for row, score in zip(rows, best.scores[number].tolist(), strict=True):
                if row != MISSING_ROW:
                    rank = candidates.index(row)
                    first_score = float(first.scores[number, rank])
                    evidence.append(EvidenceLine(row, texts[row], rank + 1, first_score, score))
            lines.append(evidence)
        return lines

    def _texts(self, rows: Rows) -> dict[int, str]:
        """Return passages by row; missing rows are left out."""
        distinct = np.unique(rows[rows != MISSING_ROW])
        return dict(zip(distinct.tolist(), self.corpus.texts(distinct), strict=True))

    def find_answers(
        self, split: str, lines: Sequence[Sequence[EvidenceLine]]
    ) -> dict[str, list[float]]:
        """Return by question of a split whether an answer stands in what was found for it.

        That is in its first evidence ("hit@1"), in all (`lines`, "recall@d") and in the candidates
        ("recall@k"); by name 0 or 1 for each, (B,). Nothing where nothing was read, or of tables.
        """
        questions = self.data.answered(split)
        if not self.depth or any(question.table for question in questions):
            return {}
        rows = self.candidates[split].candidates.rows
        texts = self._texts(rows)
        outcomes = []
        for question, evidence, candidates in zip(questions, lines, rows.tolist(), strict=True):
            right = [has_answer(line.text, question.answers) for line in evidence]
            passages = [texts[row] for row in candidates if row in texts]
            is_in_reach = any(has_answer(text, question.answers) for text in passages)
            outcomes.append([any(right[:1]), any(right), is_in_reach])
        first, in_all, in_reach = np.array(outcomes, np.float64).T.tolist()
        of_all = "hit@1" if self.depth == 1 else f"recall@{self.depth}"
        return {"hit@1": first, of_all: in_all, f"recall@{rows.shape[1]}": in_reach}

    def evidence_lines(self, split: str) -> list[list[EvidenceLine]]:
        """Return the evidence of a split's examples; empty lists where d is 0."""
        if not self.depth:
            return [[] for _ in self.data.examples(split)]
        return self.lines(self.candidates[split].candidates, self.evidence[split].candidates)

    def new_lines(self, examples: Sequence[Example]) -> list[list[EvidenceLine]]:
        """Find the evidence of new examples; empty lists where d is 0."""
        if not self.depth or not examples:
            return [[] for _ in examples]
        return self.lines(*self.search(examples))

    def _store(
        self,
        stage: str,
        split: str,
        fields: Mapping[str, Json],
        make: Callable[[], Candidates],
        inputs: Sequence[Inputs] = (),
    ) -> Stored:
        """Read a split's candidates, or make them, in the main process, and write them."""
        self.fingerprints[f"{stage}/{split}"] = digest(fields)
        folder = artifact_dir(self.context.artifacts / stage / self.data.task.name, split, fields)

        def build(aside: Path) -> Mapping[str, Json]:
            candidates = make()
            write_array(aside / "rows.npy", candidates.rows)
            write_array(aside / "scores.npy", candidates.scores)
            return {"queries": len(candidates), "candidates": candidates.rows.shape[1]}

        built = build_once(
            folder,
            stage=stage,
            fingerprint=fields,
            build=build,
            context=self.context,
            inputs=inputs,
        )
        rows = np.asarray(read_array(folder / "rows.npy"))
        scores = np.asarray(read_array(folder / "scores.npy"))
        return Stored(Candidates(rows, scores), folder, bool(built.reused))


def reads_prompt(args: RunArguments) -> bool:
    """Whether an LM reads a few-shot prompt, whose exemplars are left out of training."""
    return args.rerank.num_evidence > 0 and find_reranker(args.rerank.reranker).reads_prompt


def write_prompt(data: TaskData, args: DrawnArguments) -> FewShotPrompt:
    """Draw training examples of a task for a prompt."""
    task = data.task
    return build_prompt(
        prompt_template(task),
        data.train,
        task.prompt_words,
        num_exemplars=args.num_exemplars,
        method=args.exemplars,
        seed=args.exemplar_seed,
    )


def set_aside(data: TaskData, ids: Collection[str]) -> TaskData:
    """Return a task's data without the training examples of these ids, those of a prompt."""
    train = [example for example in data.train if example.id not in ids]
    return replace(data, train=train, set_aside=[e for e in data.train if e.id in ids])
