"""Exact scores for what a lossy index finds: its hits and more are compared again, in float16."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from pgra.retrieval.exact import Hits, Vectors, most_hits
from pgra.types import MISSING_ROW, Candidates, Rows

# The vectors are float16's from the start; an IVF's scalar quantizer rounds differences instead.
_LOSSLESS = re.compile(r"SQfp16|(IVF\d+(_HNSW\d+)?,)?Flat|(HNSW|NSG)\d+(,Flat)?")
_GROUP_BYTES = 1 << 26  # of the vectors that are read at once


def is_lossy(factory: str) -> bool:
    """Say whether an index keeps less of a vector than the float16 shards do.

    What is not known to keep all of it counts as lossy: scoring again costs little.

    Args:
        factory: FAISS factory string.
    """
    return _LOSSLESS.fullmatch(factory) is None


class Rescored:
    """A lossy index whose hits are scored again by the vectors on disk.

    Attributes:
        index: The FAISS index.
        ntotal: Its rows.
    """

    def __init__(self, index: Any, read: Callable[[Rows], Vectors], *, factor: int) -> None:
        """Wrap an index.

        Args:
            index: The FAISS index.
            read: Gives the vectors (n, D) of n rising rows.
            factor: Hits taken from the index for each one that is kept.
        """
        self.index, self.ntotal = index, int(index.ntotal)
        self._read, self._factor = read, factor

    def search(self, queries: Vectors, k: int) -> Hits:
        """Give each query its best k of the index's best k times `factor`.

        Args:
            queries: (B, D).
            k: Hits a query.

        Returns:
            (B, k), best first, by the inner products with the vectors on disk.
        """
        _, rows = self.index.search(queries, min(k * self._factor, most_hits(self.index)))
        step = max(1, _GROUP_BYTES // (4 * queries.shape[1] * rows.shape[1]))
        scores = np.full(rows.shape, -np.inf, np.float32)
        for start in range(0, len(queries), step):
            group = slice(start, start + step)
            scores[group] = self._score(queries[group], rows[group])
        best = Candidates.best(rows, scores, k)
        return Hits(best.scores, best.rows)

    def _score(self, queries: Vectors, rows: Rows) -> Vectors:
        distinct, places = np.unique(rows, return_inverse=True)
        is_there = distinct != MISSING_ROW
        vectors = np.zeros((len(distinct), queries.shape[1]), np.float32)
        vectors[is_there] = self._read(distinct[is_there])
        # (b, 1, D) by (b, D, K): each query with its own hits only.
        return (queries[:, None] @ vectors[places.reshape(rows.shape)].swapaxes(1, 2))[:, 0]
