"""What the stages before the reader leave: a task's examples with their evidence."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from pgra.data.corpus import Corpus
from pgra.data.splits import Splits
from pgra.data.tasks import Task
from pgra.evaluation.results import EvidenceLine
from pgra.prompts.fewshot import FewShotPrompt
from pgra.rerank import NearestExemplars, Reference, Reranker
from pgra.retrieval.store import Stored
from pgra.types import MISSING_ROW, Candidates, Example, Json

SPLITS = ("train", "dev", "test")


@dataclass
class Found:
    """A task's examples with their evidence.

    Attributes:
        task: The task.
        splits: Its examples; training examples that stand in the prompt are left out.
        prompt: The LM's prompt; without exemplars where each query has its own.
        exemplars: Chooses each query's own; None where one prompt serves all.
        corpus: What was searched; None where nothing was.
        reranker: The second stage; None where nothing was searched.
        candidates: First stage, by split; the evidence itself where there is no first stage.
        evidence: Second stage, by split: all candidates in the new order.
        depth: How many the reader gets, the paper's d.
        seconds: Wall-clock time by stage.
        fingerprints: Of each stage's input.
    """

    task: Task
    splits: Splits
    prompt: FewShotPrompt
    exemplars: NearestExemplars | None = None
    corpus: Corpus | None = None
    reranker: Reranker | None = None
    candidates: dict[str, Stored] = field(default_factory=dict)
    evidence: dict[str, Stored] = field(default_factory=dict)
    depth: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    fingerprints: dict[str, Json] = field(default_factory=dict)

    def copy(self) -> "Found":
        """Give one for another run: times and fingerprints of its own, the same evidence."""
        return replace(self, seconds=dict(self.seconds), fingerprints=dict(self.fingerprints))

    @property
    def reference(self) -> Reference:
        """Give what a similarity is fitted to."""
        return Reference(self.splits.train, self.task.prompt_words)

    def examples(self, split: str) -> list[Example]:
        """Give a split's examples."""
        by_name = {"train": self.splits.train, "dev": self.splits.dev, "test": self.splits.test}
        return by_name[split]

    def evidence_texts(self, split: str) -> list[list[str]]:
        """Give what the reader reads beside each example of a split; missing rows are left out."""
        return [[line.text for line in lines] for lines in self.evidence_lines(split)]

    def evidence_lines(
        self, split: str, best: Candidates | None = None
    ) -> list[list[EvidenceLine]]:
        """Give each example's top evidence with its standing in both stages.

        Args:
            split: Which examples.
            best: What they were read with, where that is not the second stage's best.
        """
        if self.corpus is None:
            return [[] for _ in self.examples(split)]
        if best is None:
            best = self.evidence[split].candidates.top(self.depth)
        return evidence_lines(self.corpus, self.candidates[split].candidates, best)


def evidence_lines(corpus: Corpus, first: Candidates, best: Candidates) -> list[list[EvidenceLine]]:
    """Give each query's evidence with its text and its standing in both stages.

    Args:
        corpus: What rows stand for.
        first: The first stage's candidates, (B, K).
        best: The second stage's, (B, N), of the same rows; missing ones are left out.
    """
    distinct = np.unique(best.rows[best.rows != MISSING_ROW])
    texts = dict(zip(distinct.tolist(), corpus.texts(distinct), strict=True))
    lines = []
    for query in range(len(best)):
        rank = {int(row): place for place, row in enumerate(first.rows[query])}
        pairs = zip(best.rows[query].tolist(), best.scores[query].tolist(), strict=True)
        lines.append(
            [
                EvidenceLine(
                    row, texts[row], rank[row] + 1, float(first.scores[query, rank[row]]), score
                )
                for row, score in pairs
                if row != MISSING_ROW
            ]
        )
    return lines


@contextmanager
def timed(found: Found, stage: str) -> Iterator[None]:
    """Keep a stage's wall-clock time."""
    start = time.perf_counter()
    yield
    found.seconds[stage] = time.perf_counter() - start
