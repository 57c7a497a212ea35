"""PGRA whole (Guo et al. 2023, section 2): candidates, evidence, reader.

    candidates = retriever(query)            k passages of a static index       (eq. 1)
    states     = LM(prefix + P(text))        of the query and each candidate    (eq. 2)
    evidence   = top d by state product                                         (eq. 3)
    label      = reader(query, evidence)     Fusion-in-Decoder

Each stage's product lies under the artefacts folder by fingerprint and is made once.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from pgra.config import PgraArguments
from pgra.data.corpus import Corpus, open_corpus
from pgra.data.splits import Splits, load_splits
from pgra.data.tasks import Task, load_task
from pgra.errors import ConfigError
from pgra.evaluation.results import EvidenceLine
from pgra.io import digest
from pgra.processes import Processes
from pgra.prompts.fewshot import FewShotPrompt, build_prompt
from pgra.prompts.template import PromptTemplate
from pgra.rerank import Reranker, open_reranker
from pgra.retrieval import Retriever, open_retriever
from pgra.retrieval.base import check_num_candidates
from pgra.retrieval.store import Stored, examples_digest, store_candidates
from pgra.types import MISSING_ROW, Example, Json

logger = logging.getLogger(__name__)

SPLITS = ("train", "dev", "test")


@dataclass
class Found:
    """A task's examples with their evidence.

    Attributes:
        task: The task.
        splits: Its examples; training examples that stand in the prompt are left out.
        prompt: The LM's prompt.
        corpus: What was searched; None where nothing was.
        reranker: The second stage; None where nothing was searched.
        candidates: First stage, by split.
        evidence: Second stage, by split: all candidates in the new order.
        depth: How many the reader gets, the paper's d.
        seconds: Wall-clock time by stage.
        fingerprints: Of each stage's input.
    """

    task: Task
    splits: Splits
    prompt: FewShotPrompt
    corpus: Corpus | None = None
    reranker: Reranker | None = None
    candidates: dict[str, Stored] = field(default_factory=dict)
    evidence: dict[str, Stored] = field(default_factory=dict)
    depth: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    fingerprints: dict[str, Json] = field(default_factory=dict)

    def examples(self, split: str) -> list[Example]:
        """Give a split's examples."""
        by_name = {"train": self.splits.train, "dev": self.splits.dev, "test": self.splits.test}
        return by_name[split]

    def evidence_texts(self, split: str) -> list[list[str]]:
        """Give what the reader reads beside each example of a split; missing rows are left out."""
        return [[line.text for line in lines] for lines in self.evidence_lines(split)]

    def evidence_lines(self, split: str) -> list[list[EvidenceLine]]:
        """Give each example's top evidence with its standing in both stages."""
        if self.corpus is None:
            return [[] for _ in self.examples(split)]
        first = self.candidates[split].candidates
        best = self.evidence[split].candidates.top(self.depth)
        distinct = np.unique(best.rows[best.rows != MISSING_ROW])
        texts = dict(zip(distinct.tolist(), self.corpus.texts(distinct), strict=True))
        lines = []
        for query in range(len(best)):
            rank = {int(row): place for place, row in enumerate(first.rows[query])}
            pairs = zip(best.rows[query].tolist(), best.scores[query].tolist(), strict=True)
            lines.append(
                [
                    EvidenceLine(
                        row,
                        texts[row],
                        rank[row] + 1,
                        float(first.scores[query, rank[row]]),
                        score,
                    )
                    for row, score in pairs
                    if row != MISSING_ROW
                ]
            )
        return lines


def read_task(args: PgraArguments) -> Found:
    """Read a task's data and write its prompt.

    Raises:
        ConfigError: If no task is named, or there are too few examples for the prompt.
        DataError: If the data cannot be read.
    """
    if args.data.task is None:
        raise ConfigError("--task is missing: name one (pgra data lists them), or give a YAML")
    task = load_task(args.data.task)
    splits = load_splits(task, args.data)
    prompt = build_prompt(
        prompt_template(task),
        splits.train,
        task.prompt_words,
        num_exemplars=args.rerank.num_exemplars,
        method=args.rerank.exemplars,
        seed=args.rerank.exemplar_seed,
    )
    shown = set(prompt.exemplar_ids)
    # Systems without a prompt leave the same examples out, so that all train on equal data.
    train = [example for example in splits.train if example.id not in shown]
    if not train:
        raise ConfigError(
            f"all {len(splits.train)} training examples stand in the prompt: "
            "lower --num_exemplars, or give more examples"
        )
    splits = Splits(train, splits.dev, splits.test, splits.notes)
    found = Found(task, splits, prompt, depth=args.rerank.num_evidence)
    for split in SPLITS:
        found.fingerprints[split] = digest(
            [examples_digest(found.examples(split)), [e.label for e in found.examples(split)]]
        )
    return found


def find_evidence(
    found: Found,
    args: PgraArguments,
    processes: Processes = Processes(),  # noqa: B008 (frozen)
    *,
    splits: Sequence[str] = SPLITS,
) -> None:
    """Run both stages for a task's splits, or take up what is there.

    Args:
        found: The task's examples and prompt; candidates and evidence are added to it.
        args: What to do.
        processes: Who shares the work.
        splits: Which splits get evidence.

    Raises:
        PgraError: As each stage says.
    """
    open_stages(found, args)
    if found.corpus is None or found.reranker is None:
        return
    with timed(found, "index"):
        retriever = open_retriever(
            args.retriever,
            found.corpus,
            args.artifacts,
            device=args.runtime.device,
            processes=processes,
            progress=processes.worker.is_main,
        )
    with timed(found, "candidates"):
        _retrieve(found, retriever, args, processes, splits)
    del retriever  # the LM may need the memory of index and encoder
    with timed(found, "states"):
        _read(found, found.reranker, processes, splits)
    with timed(found, "evidence"):
        _rerank(found, found.reranker, args, processes, splits)


def open_stages(found: Found, args: PgraArguments) -> None:
    """Open what is quick to open, so that what can be refused is refused before the long stages.

    Adds the corpus, the reranker (with its prompt checked against the LM's window; the weights are
    not loaded yet) and their fingerprints to `found`; a second call does nothing.

    Raises:
        PgraError: As `open_corpus` and `open_reranker`; also if k exceeds the corpus.
    """
    if args.rerank.num_evidence == 0 or found.corpus is not None:
        return
    with timed(found, "corpus"):
        found.corpus = open_corpus(args.corpus, args.artifacts)
    check_num_candidates(args.retriever.num_candidates, len(found.corpus))
    found.reranker = open_reranker(
        args.rerank, found.prompt, found.corpus, args.artifacts, device=args.runtime.device
    )
    found.fingerprints["corpus"] = found.corpus.fingerprint["corpus_sha256"]
    found.fingerprints["reranker"] = dict(found.reranker.fingerprint)


def prompt_template(task: Task) -> PromptTemplate:
    """Give a task's template as the LM sees it."""
    return PromptTemplate(task.prompt, task.answer, task.inputs)


@contextmanager
def timed(found: Found, stage: str) -> Iterator[None]:
    """Keep a stage's wall-clock time."""
    start = time.perf_counter()
    yield
    found.seconds[stage] = time.perf_counter() - start


def _retrieve(
    found: Found,
    retriever: Retriever,
    args: PgraArguments,
    processes: Processes,
    splits: Sequence[str],
) -> None:
    k = args.retriever.num_candidates
    for split in splits:
        examples = found.examples(split)
        fields: Mapping[str, Json] = {
            **retriever.fingerprint,
            "retriever": args.retriever.retriever,
            "num_candidates": k,
            "queries": examples_digest(examples),
        }
        queries = [example.text for example in examples]
        found.candidates[split] = store_candidates(
            args.artifacts / "candidates" / found.task.name,
            split,
            fields,
            lambda queries=queries: retriever.retrieve(queries, k),  # type: ignore[misc]
            stage="candidates",
            processes=processes,
        )
        found.fingerprints[f"candidates/{split}"] = digest(fields)
    reused = all(found.candidates[split].reused for split in splits)
    logger.info(
        "%s: %d candidates for each of %d queries%s",
        args.retriever.retriever,
        k,
        sum(len(found.examples(split)) for split in splits),
        " (reused)" if reused else "",
    )


def _read(found: Found, reranker: Reranker, processes: Processes, splits: Sequence[str]) -> None:
    """Let the LM read the union of all splits' candidates, each passage once."""
    examples = [example for split in splits for example in found.examples(split)]
    rows = np.concatenate([found.candidates[split].candidates.rows.ravel() for split in splits])
    work = reranker.prepare(examples, rows, processes=processes, progress=processes.worker.is_main)
    if not work.num_passages:
        return
    logger.info(
        "reranker: %d query-candidate pairs; %s",
        int((rows != MISSING_ROW).sum()),
        f"the LM read {work.num_new} texts in {work.seconds:.0f} s ({work.num_tokens} tokens here, "
        f"{work.num_cut} texts cut)"
        if work.num_new
        else "no text was left for the LM to read (reused)",
    )


def _rerank(
    found: Found,
    reranker: Reranker,
    args: PgraArguments,
    processes: Processes,
    splits: Sequence[str],
) -> None:
    for split in splits:
        first = found.candidates[split]
        fields = {**reranker.fingerprint, "candidates": digest(first.fingerprint)}
        examples = found.examples(split)
        found.evidence[split] = store_candidates(
            args.artifacts / "evidence" / found.task.name,
            split,
            fields,
            lambda examples=examples, first=first: reranker.rerank(  # type: ignore[misc]
                examples, first.candidates
            ),
            stage="evidence",
            processes=processes,
        )
        found.fingerprints[f"evidence/{split}"] = digest(fields)
