"""All that uses FAISS: indexes are made, searched, and measured.

In memory an exact index is float32, twice the size of the float16 shards. Where it fits, a file of
it is written and mapped; beyond, queries are compared with the shards one after another. On a GPU
torch compares them with the float16 shards, without FAISS. The hits of a lossy index are scored
again by the vectors on disk.
"""

import contextlib
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pgra.arrays import Rows, Vectors
from pgra.artifacts import write_aside
from pgra.context import machine_memory
from pgra.errors import ConfigError, show
from pgra.progress import Bar
from pgra.types import MISSING_ROW, Candidates, Json

logger = logging.getLogger(__name__)


EXACT = "Flat"
_CRASHING = re.compile(r"[A-Za-z]+0+(?!\d)|(HNSW|NSG)1(?!\d)")
_SHARE = 0.5  # of the machine's memory: an exact index that takes more gets no file of its own


# Exact search: queries against every vector of a collection, a block at a time.


# FAISS 1.15 multiplies matrices only where queries times dimensions reach 128,000, and else
# compares vector by vector: with 64 queries of 768 dimensions 11 times slower (one thread, 50,000
# passages, 150 hits: 96 queries/s against 1,031). From two queries on the product is as fast, and
# for one the comparison is (91 against 53).
_LEAST_QUERIES = 2
_ALWAYS = 1
_NEVER = 1 << 30
_SPARE = 32  # hits beyond those asked for that are scored again
_GATHERED = 1 << 28  # numbers that are scored again at once
_GPU_ROWS = 1 << 17  # vectors that are multiplied at once


def _choose_products(num_queries: int) -> None:
    """Let FAISS compare so many queries with all vectors in the quicker way, from now on."""
    import faiss

    wanted = _ALWAYS if num_queries >= _LEAST_QUERIES else _NEVER
    faiss.cvar.distance_compute_blas_threshold = wanted


Block = tuple[Rows, Any]  # rows (n,) of a collection, and their vectors (n, D)


def nearest(queries: Vectors, blocks: Sequence[Block], k: int) -> Candidates:
    """Return each query's k largest inner products, (B, k), ties by row at the border too.

    With fewer vectors than k the rest is missing. The blocks are as those of `scan`.
    """
    size = sum(len(rows) for rows, _ in blocks)
    depth = min(k + 1, size)
    while True:
        best = scan(queries, blocks, depth)
        is_whole = depth == size or k == 0
        if is_whole or (best.scores[:, k - 1] > best.scores[:, -1]).all():
            return Candidates.best(best.rows, best.scores, k)
        depth = min(2 * depth, size)


def scan(
    queries: Vectors, blocks: Iterable[Block], depth: int, *, device: str = "cpu"
) -> Candidates:
    """Return each query's largest inner products, (B, depth), in one pass over blocks.

    Memory holds the queries, one block, and the hits. Of rows whose products differ by less than
    float32's rounding, either may be left out at the border.

    Args:
        queries: (B, D) float32, finite.
        blocks: The collection, in any order, each row once.
        depth: Hits a query; missing ones where there are fewer vectors.
        device: What multiplies: "cpu", "cuda", "cuda:1", ...
    """
    # On a CPU FAISS looks at the products while they are in the cache, where torch and numpy write
    # them all out before they choose. faiss-cpu cannot use a GPU; torch can.
    search = _search_by_faiss if device == "cpu" else _search_by_torch
    rows, scores = search(queries, blocks, depth, device)
    return Candidates.best(rows, scores, depth)


def _search_by_faiss(
    queries: Vectors, blocks: Iterable[Block], depth: int, _device: str
) -> tuple[Rows, Vectors]:
    import faiss

    _choose_products(len(queries))
    heap = faiss.ResultHeap(len(queries), depth, keep_max=True)
    for rows, vectors in blocks:
        count = min(depth, len(vectors))
        scores, places = faiss.knn(queries, vectors, count, metric=faiss.METRIC_INNER_PRODUCT)
        heap.add_result(scores, rows[places])
    return heap.I, heap.D


def _search_by_torch(
    queries: Vectors, blocks: Iterable[Block], depth: int, device: str
) -> tuple[Rows, Vectors]:
    """Select by products in the blocks' dtype; score a few more than asked for in float32."""
    import torch

    wide = torch.from_numpy(queries).to(device)
    unit = torch.nn.functional.normalize(wide, dim=1)  # so that no product overflows float16
    scores = torch.full((len(wide), depth), -torch.inf, device=device)
    rows = torch.full((len(wide), depth), MISSING_ROW, device=device)
    for block_rows, vectors in blocks:
        block = torch.as_tensor(vectors, device=device)
        names = torch.from_numpy(block_rows).to(device)
        count = min(depth + _SPARE, len(block))
        step = max(1, _GATHERED // (count * block.shape[1]))
        for start in range(0, len(wide), step):
            group = slice(start, start + step)
            places = (unit[group].to(block.dtype) @ block.T).topk(count, dim=1).indices
            new = (wide[group, None] @ block[places].float().swapaxes(1, 2))[:, 0]
            merged, order = torch.cat([scores[group], new], dim=1).topk(depth, dim=1)
            scores[group] = merged
            rows[group] = torch.cat([rows[group], names[places]], dim=1).gather(1, order)
    return rows.cpu().numpy(), scores.cpu().numpy()


@dataclass
class VectorSource:
    """Vectors on disk, one for each row: read, or searched exactly with one block in memory.

    A GPU keeps their float16 where that takes no more than half of its free memory. Else every
    search reads all vectors: search many queries at once.

    Attributes:
        num_rows: P.
        width: D.
        read: Returns the vectors (n, D) of n rising rows.
        halves: Yields all vectors in the order of rows, float16 as stored, a block at a time.
        device: What multiplies in a search.
    """

    num_rows: int
    width: int
    read: Callable[[Rows], Vectors]
    halves: Callable[[], Iterator[npt.NDArray[np.float16]]]
    device: str = "cpu"

    @property
    def fits_in_memory(self) -> bool:
        """Whether all vectors in float32 take no more than half of the machine's memory."""
        return 4 * self.num_rows * self.width <= _SHARE * machine_memory()

    def blocks(self) -> Iterator[Vectors]:
        return (block.astype(np.float32) for block in self.halves())

    def search(self, queries: Vectors, k: int) -> Candidates:
        """Return each query's best k, (B, k), as `scan`."""
        if self.device == "cpu":
            blocks: Iterable[Block] = numbered(self.blocks())
        else:
            blocks = self._held or numbered(self.halves())
        return scan(queries, blocks, k, device=self.device)

    @cached_property
    def _held(self) -> list[Block]:
        """The float16 vectors on the GPU, in large blocks; none where they do not fit."""
        import torch

        where = torch.device(self.device)
        free = torch.cuda.mem_get_info(where)[0] if where.type == "cuda" else math.inf
        if 2 * self.num_rows * self.width > free / 2:
            return []
        blocks = list(map(torch.from_numpy, map(np.copy, self.halves())))
        whole = torch.cat(blocks).to(where)
        return list(numbered(torch.split(whole, _GPU_ROWS)))


def numbered(blocks: Iterable[Any]) -> Iterator[Block]:
    """Yield blocks of vectors with their rows, from 0."""
    start = 0
    for block in blocks:
        yield np.arange(start, start + len(block)), block
        start += len(block)


# Exact scores for what a lossy index finds: its hits and more are compared again, in float16.


# The vectors are float16's from the start; an IVF's scalar quantizer rounds differences instead.
_LOSSLESS = re.compile(r"SQfp16|(IVF\d+(_HNSW\d+)?,)?Flat|(HNSW|NSG)\d+(,Flat)?")
RESCORED = 4  # hits for each one kept
_GROUP_BYTES = 1 << 26  # of the vectors that are read at once


def is_lossy(factory: str) -> bool:
    """Return whether an index keeps less of a vector than float16 does.

    A factory string that is not known to keep all of it counts as lossy: rescoring costs little.
    """
    return _LOSSLESS.fullmatch(factory) is None


class FaissIndex:
    """A FAISS index; the hits of a lossy one are scored again by the vectors on disk.

    `read` returns the vectors (n, D) of n rising rows; `RESCORED` hits are taken for each one kept.
    """

    def __init__(self, index: Any, factory: str, read: Callable[[Rows], Vectors]) -> None:
        self._index = index
        self._read = read
        self._is_lossy = is_lossy(factory)

    def search(self, queries: Vectors, k: int) -> Candidates:
        """Return each query's best k, (B, k).

        Of rows whose scores differ by less than float32's rounding, either may be left out.
        """
        _choose_products(len(queries))
        depth = min(k * RESCORED, self._index.ntotal) if self._is_lossy else k
        scores, rows = self._index.search(queries, depth)
        if self._is_lossy:
            step = max(1, _GROUP_BYTES // (4 * queries.shape[1] * depth))
            for start in range(0, len(queries), step):
                group = slice(start, start + step)
                scores[group] = self._score(queries[group], rows[group])
        return Candidates.best(rows, scores, k)

    def _score(self, queries: Vectors, rows: Rows) -> Vectors:
        distinct, places = np.unique(rows, return_inverse=True)
        is_there = distinct != MISSING_ROW
        vectors = np.zeros((len(distinct), queries.shape[1]), np.float32)
        vectors[is_there] = self._read(distinct[is_there])
        # (b, 1, D) by (b, D, K): each query with its own hits only.
        return (queries[:, None] @ vectors[places.reshape(rows.shape)].swapaxes(1, 2))[:, 0]


# How much an approximate index loses: its answers beside an exact search, on a sample.


SAMPLE = 200
DEPTH = 100
GOOD_RECALL = 0.95
_WORTH_IT = 0.005
_FIRST_VALUES = {"nprobe": 1, "efSearch": 16}
_LAST_VALUE = 1024


def measure_recall(index: FaissIndex, queries: Vectors, neighbors: Rows) -> float:
    """Return the share of the true neighbors (n, K) that an index finds among as many."""
    import faiss

    hits = index.search(queries, neighbors.shape[1]).rows
    return round(faiss.eval_intersection(neighbors, hits) / neighbors.size, 4)


def _draw_rows(num_rows: int, size: int) -> Rows:
    """Draw up to so many rows, rising."""
    rng = np.random.default_rng(_SEED)
    return np.sort(rng.choice(num_rows, size=min(size, num_rows), replace=False))


def tune_search(index: Any, recall: Callable[[], float]) -> dict[str, int]:
    """Widen an approximate index's search until it finds 95 % of the true neighbours.

    Doubles `nprobe` (IVF) or `efSearch` (HNSW), and stops early where that no longer helps, as with
    a PQ's loss. The index keeps the setting, on disk too. Returns it by name; empty where there is
    none. `recall` measures the index as it is set.
    """
    import faiss

    space = faiss.ParameterSpace()
    for name, value in _FIRST_VALUES.items():
        with contextlib.suppress(RuntimeError):  # it has no such parameter
            space.set_index_parameter(index, name, value)
            break
    else:
        return {}
    last = min(_count_lists(index) or _LAST_VALUE, _LAST_VALUE)
    share = 0.0
    while True:
        space.set_index_parameter(index, name, value)
        before = share
        share = recall()
        is_stuck = share - before < _WORTH_IT and before > 0
        if share >= GOOD_RECALL or is_stuck or value >= last:
            return {name: value}
        value = min(2 * value, last)


# An index of a corpus' vectors: made, measured, written, and opened again.


# Most rows that train an IVF or PQ: 64 a centroid for IVF4096, 0.8 GB in float32 at D = 768.
MAX_TRAINING_ROWS = 262_144
_ROWS_A_LIST = 39  # the fewest that FAISS wants; an IVF of more lists than 6,721 is trained on more
_TRAINING_SHARE = 4  # of the machine's memory: fewer rows where they are wide
_SEED = 0
_WRITE_BYTES = 1 << 20


def build_faiss(source: VectorSource, factory: str, path: Path) -> dict[str, Json]:
    """Write the index of a factory string, searched by inner product; return the manifest's counts.

    Args:
        source: What is indexed.
        factory: FAISS factory string.
        path: The file; none is written for an exact index beyond the memory.

    Raises:
        ConfigError: If FAISS does not know the factory, or it has more lists than there are rows.
        OSError: If the disk is full.
    """
    import faiss

    is_exact = factory == EXACT
    counts: dict[str, Json] = {"rows": source.num_rows, "dim": source.width, "is_exact": is_exact}
    if is_exact and not source.fits_in_memory:
        return counts
    index = empty_index(factory, source.width, source.num_rows)
    if not index.is_trained:
        counts |= _train(index, source, factory)
    with Bar(total=source.num_rows, desc="index", unit="passage") as bar:
        for vectors in source.blocks():
            index.add(vectors)
            bar.update(len(vectors))
    if not is_exact:
        counts |= _measure(index, source, factory)
    # By Python's own write: FAISS' misses a disk that fills up when the file is closed.
    with write_aside(path) as aside, aside.open("wb") as file:
        writer = faiss.PyCallbackIOWriter(file.write, _WRITE_BYTES)  # type: ignore[attr-defined]
        faiss.write_index(index, writer)
    return counts


def empty_index(factory: str, width: int, num_rows: int) -> Any:
    """Make the index that a factory string names; ConfigError if it cannot work for these rows."""
    import faiss

    if wrong := _CRASHING.search(factory):  # FAISS builds it, and ends the process when it is used
        raise ConfigError(f"index_factory {show(factory)}: '{wrong[0]}' is too small a number")
    try:
        index = faiss.index_factory(width, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        reason = str(error).rsplit(": ", 1)[-1].strip()
        raise ConfigError(f"index_factory '{factory}' fails at width {width}: {reason}") from None
    num_lists = _count_lists(index)
    if num_lists > num_rows:
        raise ConfigError(
            f"index_factory '{factory}' has {num_lists} lists for {num_rows} passages: use Flat"
        )
    return index


def _count_lists(index: Any) -> int:
    import faiss

    ivf = faiss.try_extract_index_ivf(index)
    return 0 if ivf is None else int(ivf.nlist)


def _train(index: Any, source: VectorSource, factory: str) -> dict[str, Json]:
    wanted = max(MAX_TRAINING_ROWS, _ROWS_A_LIST * _count_lists(index))
    room = machine_memory() // _TRAINING_SHARE
    rows = _draw_rows(source.num_rows, min(wanted, room // (4 * source.width)))
    logger.info("training %s on %d of %d passages", factory, len(rows), source.num_rows)
    index.train(source.read(rows))
    return {"trained_on": len(rows)}


def _measure(index: Any, source: VectorSource, factory: str) -> dict[str, Json]:
    """Tune the search on some passages; return the recall on others."""
    logger.info("measuring recall against an exact search of all %d passages", source.num_rows)
    searched = FaissIndex(index, factory, source.read)
    vectors = source.read(_draw_rows(source.num_rows, 2 * SAMPLE))
    true = scan(vectors, numbered(source.blocks()), min(DEPTH, source.num_rows)).rows
    setting = tune_search(index, lambda: measure_recall(searched, vectors[::2], true[::2]))
    others = slice(min(1, len(vectors) - 1), None, 2)
    recall = measure_recall(searched, vectors[others], true[others])
    return {"search": setting, f"recall@{true.shape[1]}": recall}
