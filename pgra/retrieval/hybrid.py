"""First stage by meaning and by words: dense and BM25, fused by reciprocal rank."""

from collections.abc import Sequence
from typing import Self

import numpy as np

from pgra.core import MISSING_ROW, Candidates, Json
from pgra.retrieval.base import (
    IndexRequest,
    Retriever,
    check_num_candidates,
)
from pgra.retrieval.bm25 import BM25Retriever
from pgra.retrieval.dense import Index

FUSION_CONSTANT = 60
MIN_DEPTH = 100


class HybridRetriever(Retriever):
    """Dense and BM25, each asked for max(k, 100) candidates, fused by `fuse_by_rank`.

    `index_dir` and `output_dir` are the dense one's.
    """

    encodes = True

    def __init__(self, dense: Index, bm25: BM25Retriever, num_passages: int) -> None:
        settings: dict[str, Json] = {"fusion_constant": FUSION_CONSTANT, "min_depth": MIN_DEPTH}
        self.fingerprint = {"dense": dense.fingerprint, "bm25": bm25.fingerprint, **settings}
        self._parts = (dense, bm25)
        self.inputs, self.built = dense.inputs, [*dense.built, *bm25.built]
        self._num_passages = num_passages

    @classmethod
    def open(cls, request: IndexRequest) -> Self:
        dense, bm25 = Index.open(request), BM25Retriever.open(request)
        return cls(dense, bm25, len(request.corpus))

    def retrieve(self, queries: Sequence[str], k: int) -> Candidates:
        """Return each query's best k passages; scores are sums of reciprocal ranks."""
        check_num_candidates(k, self._num_passages)
        depth = min(max(k, MIN_DEPTH), self._num_passages)
        return fuse_by_rank([part.retrieve(queries, depth) for part in self._parts], k)


def fuse_by_rank(rankings: Sequence[Candidates], k: int) -> Candidates:
    """Fuse rankings of the same queries by reciprocal rank (Cormack et al. 2009, k = 60): (B, k).

    A passage's score is the sum, over the rankings that hold it, of 1 / (60 + rank), the first rank
    being 1. Missing entries add nothing; ties go by row.
    """
    rows = np.concatenate([ranking.rows for ranking in rankings], axis=1)  # (B, sum of K)
    gains = np.concatenate(
        [1.0 / (FUSION_CONSTANT + 1 + np.arange(ranking.rows.shape[1])) for ranking in rankings]
    )
    # Equal rows side by side: each run's gains are summed at its first entry, in the order of the
    # rankings, and the others made missing. A run is no longer than there are rankings.
    order = np.argsort(rows, axis=1, kind="stable")
    rows, gains = np.take_along_axis(rows, order, 1), gains[order]
    sums = gains.copy()
    for shift in range(1, len(rankings)):
        is_same = rows[:, shift:] == rows[:, :-shift]
        sums[:, :-shift] += np.where(is_same, gains[:, shift:], 0)
    rows[:, 1:][rows[:, 1:] == rows[:, :-1]] = MISSING_ROW
    return Candidates.best(rows, sums.astype(np.float32), k)
