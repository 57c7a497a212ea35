"""Exact search: queries against every vector of a collection, a block at a time."""

from collections.abc import Iterable

import faiss
import numpy as np
import numpy.typing as npt

from pgra.types import Candidates, Rows

Vectors = npt.NDArray[np.float32]

# FAISS 1.15 multiplies matrices only for large batches by default, which makes an exact search
# with few queries slow.
BLAS_THRESHOLD = 20
_QUERY_ROWS = 2048  # on a GPU the products of so many queries with one block are held at once


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
    faiss.cvar.distance_compute_blas_threshold = BLAS_THRESHOLD
    heap = faiss.ResultHeap(len(queries), depth, keep_max=True)
    for rows, vectors in blocks:
        count = min(depth, len(vectors))
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
