"""The second stage's contract: candidates in, the same candidates in another order out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pgra.core import ALONE, Candidates, Context, Example, Json, Rows


@dataclass(frozen=True)
class Work:
    """What preparing a rerank cost.

    Attributes:
        num_passages: Distinct passages asked for: the candidates and what a similarity is fitted
            to, or the whole corpus.
        num_new: Of them and of the queries, how many the LM read now, in all processes.
        num_tokens: Tokens the LM read now in this process, padding not counted.
        num_cut: Texts cut to fit the LM's window, in this process.
        seconds: Wall-clock time.
    """

    num_passages: int = 0
    num_new: int = 0
    num_tokens: int = 0
    num_cut: int = 0
    seconds: float = 0.0


class Reranker(Protocol):
    """Orders each query's candidates."""

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """All that the order depends on, besides queries and candidates."""
        ...

    def prepare(
        self,
        examples: Sequence[Example],
        rows: Rows,
        *,
        context: Context = ALONE,
        progress: bool = False,
    ) -> Work:
        """Do what is worth doing once for all splits, over all processes."""
        ...

    def rerank(self, examples: Sequence[Example], candidates: Candidates) -> Candidates:
        """Give each query the same rows in a new order: (B, K), best first, ties by row."""
        ...


class FirstStageOrder:
    """Keeps the first stage's order: FiD on its best hits, the paper's main baseline."""

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give the name; nothing else matters."""
        return {"reranker": "none"}

    def prepare(
        self,
        examples: Sequence[Example],  # noqa: ARG002 (the contract's)
        rows: Rows,  # noqa: ARG002
        *,
        context: Context = ALONE,  # noqa: ARG002
        progress: bool = False,  # noqa: ARG002
    ) -> Work:
        """Do nothing."""
        return Work()

    def rerank(self, examples: Sequence[Example], candidates: Candidates) -> Candidates:  # noqa: ARG002
        """Give the candidates as they are."""
        return candidates
