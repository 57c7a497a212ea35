"""How much an approximate index loses: its answers beside an exact search, on a sample."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np

from pgra.retrieval.choice import import_faiss
from pgra.retrieval.exact import Vectors, ask, nearest, numbered
from pgra.types import MISSING_ROW, Rows

SAMPLE = 200
DEPTHS = (10, 150)
GOOD_RECALL = 0.95
_WORTH_IT = 0.005
_FIRST_VALUES = {"nprobe": 1, "efSearch": 16}
_LAST_VALUE = 1024


class Index(Protocol):
    """What is searched: a FAISS index, or what scores its hits again."""

    def search(self, queries: Vectors, k: int) -> tuple[Vectors, Rows]:
        """Give scores and rows, (B, k) each, best first."""
        ...


@dataclass(frozen=True)
class Sample:
    """Queries with their true neighbours: passages of the corpus, or texts from elsewhere.

    Attributes:
        rows: (n,) which passages they are; -1 for a text that is none.
        vectors: (n, D) their vectors.
        neighbours: (n, K) the rows nearest to each, best first, itself left out.
    """

    rows: Rows
    vectors: Vectors
    neighbours: Rows

    def part(self, places: slice) -> Self:
        """Give some of the queries."""
        kept = self.rows[places], self.vectors[places], self.neighbours[places]
        return type(self)(*kept)

    @classmethod
    def search(cls, rows: Rows, vectors: Vectors, blocks: Iterable[Vectors], depth: int) -> Self:
        """Find the true neighbours by comparing with every vector.

        Args:
            rows: Which passages the queries are, -1 for none.
            vectors: Theirs.
            blocks: The whole corpus's vectors, in order.
            depth: Neighbours a row.
        """
        best = nearest(vectors, numbered(blocks), depth + 1)
        return cls(rows, vectors, without_own(best.rows, rows)[:, :depth])


def draw_rows(num_rows: int, size: int, *, seed: int) -> Rows:
    """Draw up to `size` rows, rising."""
    size = min(size, num_rows)
    rows = np.random.default_rng(seed).choice(num_rows, size=size, replace=False)
    return np.sort(rows).astype(np.int64)


def without_own(found: Rows, own: Rows) -> Rows:
    """Drop each query's own row (or its last one, where it is not there): (n, K) to (n, K - 1)."""
    is_own = found == own[:, None]
    drop = np.where(is_own.any(axis=1), is_own.argmax(axis=1), found.shape[1] - 1)
    keep = np.arange(found.shape[1]) != drop[:, None]
    kept: Rows = found[keep].reshape(len(found), -1)
    return kept


def measure_recall(index: Index, sample: Sample, depth: int) -> float:
    """Give the share of the true `depth` neighbours that the index finds among as many."""
    found = ask(index, sample.vectors, depth + 1).rows
    found, true = without_own(found, sample.rows), sample.neighbours[:, :depth]
    hits = [len(np.intersect1d(a[a != MISSING_ROW], b)) for a, b in zip(found, true, strict=True)]
    return round(float(np.mean(hits)) / depth, 4)


def measure_speed(index: Index, queries: Vectors, depth: int) -> float:
    """Give the queries a second of one call with all of these."""
    start = time.perf_counter()
    ask(index, queries, depth)
    return round(len(queries) / (time.perf_counter() - start), 1)


def tune_search(
    index: Any, searched: Index, sample: Sample, *, depth: int, num_lists: int | None
) -> dict[str, int]:
    """Widen an approximate index's search until it finds 95 % of the true neighbours.

    Doubles `nprobe` (IVF) or `efSearch` (HNSW), and stops early where that no longer helps, as a
    PQ's loss cannot be searched away. The index keeps the setting, on disk too.

    Args:
        index: The FAISS index, which is set.
        searched: What is asked: the index, or what scores its hits again.
        sample: Queries.
        depth: Neighbours that count.
        num_lists: Of an IVF.

    Returns:
        The setting by name; empty where there is nothing to set.
    """
    name = _parameter(index)
    if name is None:
        return {}
    last = min(num_lists, _LAST_VALUE) if num_lists else _LAST_VALUE
    value, recall = _FIRST_VALUES[name], 0.0
    while True:
        _set(index, name, value)
        before, recall = recall, measure_recall(searched, sample, depth)
        is_stuck = recall - before < _WORTH_IT and before > 0
        if recall >= GOOD_RECALL or is_stuck or value >= last:
            return {name: value}
        value = min(2 * value, last)


def _parameter(index: Any) -> str | None:
    for name, value in _FIRST_VALUES.items():
        try:
            _set(index, name, value)
        except RuntimeError:
            continue
        return name
    return None


def _set(index: Any, name: str, value: int) -> None:
    import_faiss().ParameterSpace().set_index_parameter(index, name, value)


def depths_for(num_rows: int) -> Sequence[int]:
    """Give the depths to measure at: 10 and 150, or what a small corpus allows."""
    return sorted({min(depth, num_rows - 1) for depth in DEPTHS} - {0})
