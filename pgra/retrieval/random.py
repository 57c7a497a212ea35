"""First stage by chance: the control that measures the value of reading any passages.

Guo et al. 2023 have no such row; without it a gain of Fusion-in-Decoder over the plain reader may
come from the extra text alone.
"""

from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
import xxhash

from pgra.core import Candidates, Json, Rows
from pgra.retrieval.base import IndexRequest, Retriever, check_num_candidates

_SEED = 0
_BLOCK = 256  # rows drawn at a time: a fixed number, so that a larger k begins with a smaller one's
_SMALL = 1 << 15  # a corpus of at most so many rows is shuffled whole: it may be drawn to its end


class RandomRetriever(Retriever):
    """Draws passages uniformly without repeats, seeded by the query's text alone."""

    def __init__(self, num_passages: int, fingerprint: Mapping[str, Json]) -> None:
        self.fingerprint = fingerprint
        self._num_passages = num_passages

    @classmethod
    def open(cls, request: IndexRequest) -> Self:
        drawn: dict[str, Json] = {"drawn": "uniformly, by the query's text", "seed": _SEED}
        return cls(len(request.corpus), {**request.corpus.fingerprint, **drawn})

    def retrieve(self, queries: Sequence[str], k: int) -> Candidates:
        """Draw k passages for each query, (B, k); equal texts get equal ones.

        Scores are 0, -1, -2, ..., in the order drawn. A larger k begins with a smaller one's
        passages.
        """
        check_num_candidates(k, self._num_passages)
        rows = np.empty((len(queries), k), dtype=np.int64)
        for line, query in enumerate(queries):
            rows[line] = self._draw(query, k)
        places = np.arange(0, -k, -1, dtype=np.float32)
        return Candidates(rows, np.tile(places, (len(queries), 1)))

    def _draw(self, query: str, k: int) -> Rows:
        rng = np.random.default_rng([_SEED, xxhash.xxh3_64_intdigest(query.encode())])
        if self._num_passages <= _SMALL:
            return rng.permutation(self._num_passages)[:k]
        drawn: dict[int, None] = {}  # keeps the order
        while len(drawn) < k:
            drawn.update(dict.fromkeys(rng.integers(self._num_passages, size=_BLOCK).tolist()))
        return np.array(list(drawn)[:k], dtype=np.int64)
