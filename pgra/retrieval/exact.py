"""Exact search: queries against every vector of a collection, a block at a time."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pgra.retrieval.choice import import_faiss
from pgra.types import Candidates, Rows

Vectors = npt.NDArray[np.float32]


class Hits(NamedTuple):
    """What FAISS gives, in its order.

    Attributes:
        scores: (B, k) float32.
        rows: (B, k) int64, -1 where there is none.
    """

    scores: Vectors
    rows: Rows


# FAISS 1.15 multiplies matrices only where queries times dimensions reach 128,000, and else
# compares vector by vector: with 64 queries of 768 dimensions 11 times slower (one thread, 50,000
# passages, 150 hits: 96 queries/s against 1,031). From two queries on the product is as fast, and
# for one the comparison is (91 against 53).
_LEAST_QUERIES = 2
_ALWAYS, _NEVER = 1, 1 << 30
GPU_MAX_K = 2048
"""Most hits a query that FAISS finds on a GPU."""
_QUERY_ROWS = 2048  # on a GPU the products of so many queries with one block are held at once


@contextlib.contextmanager
def quick_products(num_queries: int) -> Iterator[None]:
    """Let FAISS compare so many queries with all vectors in the quicker way, inside the block.

    The setting is one for the whole process, so it is put back. An IVF's choice of lists reads it
    too.

    Args:
        num_queries: Queries of one call.
    """
    settings = import_faiss().cvar
    before = settings.distance_compute_blas_threshold
    wanted = _ALWAYS if num_queries >= _LEAST_QUERIES else _NEVER
    settings.distance_compute_blas_threshold = wanted
    try:
        yield
    finally:
        settings.distance_compute_blas_threshold = before


def ask(index: Any, queries: Vectors, k: int) -> Hits:
    """Ask a FAISS index, or what is searched like one, in the quicker way.

    Args:
        index: Has `search(queries, k)`, which gives scores and rows, (B, k) each.
        queries: (B, D).
        k: Hits a query.
    """
    with quick_products(len(queries)):
        scores, rows = index.search(queries, k)
    return Hits(scores, rows)


def most_hits(index: Any) -> int:
    """Give the hits a query that an index can find: its rows, on a GPU no more than 2,048."""
    inner = getattr(index, "index", index)  # of a wrapper
    is_on_gpu = type(inner).__name__.startswith("Gpu")
    return min(index.ntotal, GPU_MAX_K) if is_on_gpu else int(index.ntotal)


def numbered(blocks: Iterable[Vectors]) -> Iterator[tuple[Rows, Vectors]]:
    """Give blocks of vectors with their rows, from 0."""
    start = 0
    for block in blocks:
        yield np.arange(start, start + len(block)), block
        start += len(block)


def nearest(
    queries: Vectors, blocks: Iterable[tuple[Rows, Vectors]], depth: int, *, device: str = "cpu"
) -> Candidates:
    """Find each query's largest inner products with all vectors.

    Takes the memory of the queries, of one block, and of `depth` hits a query, whatever the
    collection's size.

    Args:
        queries: (B, D), finite.
        blocks: The collection: rows (n,) with their vectors (n, D), in any order, each row once.
        depth: Hits a query.
        device: What multiplies: "cpu", "cuda", "cuda:1", ...

    Returns:
        (B, depth), best first; missing where the collection has fewer rows. Of rows whose products
        differ by less than float32's rounding, either may come first or be the one left out.
    """
    # On a CPU FAISS looks at the products while they are in the cache, where torch and numpy write
    # them all out before they choose. faiss-cpu cannot use a GPU; torch can.
    if device == "cpu":
        rows, scores = _search_by_faiss(queries, blocks, depth)
    else:
        rows, scores = _search_by_torch(queries, blocks, depth, device)
    return Candidates.best(rows, scores, depth)


def _search_by_faiss(
    queries: Vectors, blocks: Iterable[tuple[Rows, Vectors]], depth: int
) -> tuple[Rows, Vectors]:
    faiss = import_faiss()
    heap = faiss.ResultHeap(len(queries), depth, keep_max=True)
    for rows, vectors in blocks:
        count = min(depth, len(vectors))
        with quick_products(len(queries)):  # not around the loop: blocks are made in between
            scores, places = faiss.knn(queries, vectors, count, metric=faiss.METRIC_INNER_PRODUCT)
        heap.add_result(scores, rows[places])
    return heap.I, heap.D


def _search_by_torch(
    queries: Vectors, blocks: Iterable[tuple[Rows, Vectors]], depth: int, device: str
) -> tuple[Rows, Vectors]:
    import torch

    asked = torch.from_numpy(queries).to(device)
    scores = torch.full((len(asked), depth), -torch.inf, device=device)
    rows = torch.full((len(asked), depth), -1, device=device)
    for block_rows, vectors in blocks:
        block = torch.from_numpy(vectors).to(device)
        names = torch.from_numpy(block_rows).to(device)
        count = min(depth, len(block))
        for start in range(0, len(asked), _QUERY_ROWS):
            part = slice(start, start + _QUERY_ROWS)
            new, places = (asked[part] @ block.T).topk(count, dim=1)
            merged, order = torch.cat([scores[part], new], dim=1).topk(depth, dim=1)
            scores[part] = merged
            rows[part] = torch.cat([rows[part], names[places]], dim=1).gather(1, order)
    return rows.cpu().numpy(), scores.cpu().numpy()
