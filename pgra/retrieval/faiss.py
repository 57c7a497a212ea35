"""FAISS indexes: made from a factory string, exact search, recall, exact scores for lossy hits."""

import contextlib
import logging
import re
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from pgra.artifacts import load_manifest, write_aside
from pgra.core import MISSING_ROW, Candidates, Json, Rows, machine_memory
from pgra.errors import ConfigError
from pgra.retrieval.base import EXACT, import_faiss

# Exact search: queries against every vector of a collection, a block at a time.


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


# Exact indexes of a corpus: FAISS' file written a block at a time, and search without that file.
#
# In memory an exact index is float32, twice the shards' size. A file of it is written where it
# fits in memory, and then mapped; beyond, queries are compared with the float16 shards one after
# another.


_ROWS_AT = 8  # of the number of rows: behind the kind and the width, 4 bytes each
_NUMBER = struct.Struct("<q")


class BlockSearch:
    """Exact search of vectors that are read anew each time, a block in memory at once.

    Attributes:
        ntotal: Rows.
    """

    def __init__(
        self, blocks: Callable[[], Iterable[Vectors]], num_rows: int, *, device: str = "cpu"
    ) -> None:
        """Open an index.

        Args:
            blocks: Gives all vectors in the order of rows.
            num_rows: How many there are.
            device: What multiplies.
        """
        self.ntotal = num_rows
        self._blocks, self._device = blocks, device

    def search(self, queries: Vectors, k: int) -> Hits:
        """Find each query's best k, as FAISS does in memory but for float32's rounding.

        Every call reads all vectors: ask for many queries at once.

        Args:
            queries: (B, D).
            k: Hits a query.
        """
        best = nearest(queries, numbered(self._blocks()), k, device=self._device)
        return Hits(best.scores, best.rows)


def write_flat(blocks: Iterable[Vectors], path: Path, *, header: bytes) -> None:
    """Write FAISS' file of an exact index, holding one block at a time.

    Args:
        blocks: All vectors, (n, D) each, in the order of rows.
        path: The file.
        header: What `flat_header` gives for them.

    Raises:
        OSError: If the disk is full.
    """
    with write_aside(path) as aside, aside.open("wb") as file:
        file.write(header)
        for vectors in blocks:
            file.write(np.ascontiguousarray(vectors, np.float32).data)


def flat_header(num_rows: int, width: int) -> bytes | None:
    """Give what stands in FAISS' file of an exact index before the vectors.

    FAISS' own words for an empty index with both its counts set: of rows, and of numbers. Whether
    that still is the form of the file is tried on one row.

    Args:
        num_rows: P.
        width: D.

    Returns:
        The bytes, or None where this FAISS writes another form.
    """
    faiss = import_faiss()
    index = faiss.IndexFlatIP(width)
    empty = faiss.serialize_index(index).tobytes()
    index.add(np.zeros((1, width), np.float32))
    one = faiss.serialize_index(index).tobytes()
    if _count(empty, 1, width) + bytes(4 * width) != one:
        return None
    return _count(empty, num_rows, width)


def _count(empty: bytes, num_rows: int, width: int) -> bytes:
    words = bytearray(empty)
    _NUMBER.pack_into(words, _ROWS_AT, num_rows)
    _NUMBER.pack_into(words, len(words) - _NUMBER.size, num_rows * width)
    return bytes(words)


# How much an approximate index loses: its answers beside an exact search, on a sample.


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


# Exact scores for what a lossy index finds: its hits and more are compared again, in float16.


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


logger = logging.getLogger(__name__)

INDEX_FILE = "index.faiss"
MAX_TRAINING_ROWS = 262_144
"""Most rows that train an IVF or PQ: 64 a centroid for IVF4096, 0.8 GB in float32 at D = 768."""
_ROWS_A_LIST = 39  # the fewest that FAISS wants; an IVF of more lists than 6,721 is trained on more
_TRAINING_BYTES = 2 << 30  # fewer rows where they are an LM's states, up to 5,120 wide
_TRAINING_SHARE = 4  # or a quarter of the machine's memory, where that is more
_SEED = 0
_WRITE_BYTES = 1 << 20


@dataclass(frozen=True)
class VectorSource:
    """Vectors that lie on disk, one for each row.

    Attributes:
        num_rows: P.
        width: D.
        read: Gives the vectors (n, D) of n rising rows.
        blocks: Gives all vectors in the order of rows, a block at a time.
    """

    num_rows: int
    width: int
    read: Callable[[Rows], Vectors]
    blocks: Callable[[], Iterator[Vectors]]


@dataclass(frozen=True, kw_only=True)
class IndexPlan:
    """How an index is made and asked.

    Attributes:
        factory: FAISS factory string.
        memory: Bytes that it may take; an exact one that takes more gets no file of its own.
        rescore_factor: Hits that a lossy one gives for each one kept, scored again exactly; 0: its
            own scores.
        queries: Vectors (n, D) of texts from elsewhere to measure the recall with; None: passages.
    """

    factory: str
    memory: int | None = None
    rescore_factor: int = 0
    queries: Vectors | None = None

    @property
    def is_exact(self) -> bool:
        """Say whether every passage is compared."""
        return self.factory == EXACT

    @property
    def is_rescored(self) -> bool:
        """Say whether hits are scored again."""
        return self.rescore_factor > 0 and is_lossy(self.factory)


def build_faiss(
    source: VectorSource, plan: IndexPlan, path: Path, *, begun: Path | None = None
) -> dict[str, Json]:
    """Write the index of a factory string, searched by inner product.

    Args:
        source: What is indexed.
        plan: How.
        path: The file; none is written for an exact index beyond the memory.
        begun: An index of the first rows, up to where a block begins: the others are added to it,
            and it is not trained again. An exact one is written anew, which takes no longer.

    Returns:
        Counts for the manifest: rows, dim, is_exact, recall by depth (of a lossy index with and
        without scoring its hits again) and of what, the search setting, the passages it was
        trained on and how long, and how many queries a second it answered in one call.

    Raises:
        ConfigError: If FAISS does not know the factory, or there are too few rows for it.
        OSError: If the disk is full.
    """
    counts: dict[str, Json] = {"rows": source.num_rows, "dim": source.width}
    if plan.is_exact:
        return {**counts, **_build_exact(source, plan, path)}
    index = empty_index(plan.factory, source.width, source.num_rows)
    if begun is not None:
        index = import_faiss().read_index(str(begun))
    elif not index.is_trained:
        counts |= _train(index, source, plan.factory)
    start, num_there = 0, index.ntotal
    # disable=None: a bar is for a terminal.
    with tqdm(total=source.num_rows, desc="index", unit="passage", disable=None) as bar:
        for vectors in source.blocks():
            if start >= num_there:
                index.add(vectors)
            start += len(vectors)
            bar.update(len(vectors))
    assert index.ntotal == source.num_rows, "the index begun ends inside a block"
    counts |= _measure(index, source, plan)
    write_faiss(index, path)
    return counts


def _build_exact(source: VectorSource, plan: IndexPlan, path: Path) -> dict[str, Json]:
    index: Any = BlockSearch(source.blocks, source.num_rows)
    if plan.memory is None or 4 * source.num_rows * source.width <= plan.memory:
        header = flat_header(source.num_rows, source.width)
        if header is None:
            index = empty_index(plan.factory, source.width, source.num_rows)
            for vectors in source.blocks():
                index.add(vectors)
            write_faiss(index, path)
        else:
            write_flat(source.blocks(), path, header=header)
            index = map_faiss(path)
    depths = depths_for(source.num_rows)
    counts: dict[str, Json] = {"is_exact": True, "recall": {str(d): 1.0 for d in depths}}
    if depths:
        rows = draw_rows(source.num_rows, SAMPLE, seed=_SEED)
        counts["queries_per_second"] = measure_speed(index, source.read(rows), depths[-1])
    return counts


def find_faiss(folder: Path) -> Path | None:
    """Find a finished artefact's FAISS file: an index that grew has one of another name.

    Returns:
        The file, or None for an exact index that is searched from its shards.

    Raises:
        ArtifactError: If the folder is not finished.
    """
    files = load_manifest(folder).files
    return next((folder / name for name in files if name.endswith(".faiss")), None)


def map_faiss(path: Path) -> Any:
    """Open an index on disk; an exact one is mapped, so that processes share its pages."""
    faiss = import_faiss()
    return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)


def empty_index(factory: str, width: int, num_rows: int) -> Any:
    """Make the index that a factory string names.

    Raises:
        ConfigError: If it cannot work for so many rows of this width, or there is no FAISS.
    """
    faiss = import_faiss()
    try:
        index = faiss.index_factory(width, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        reason = str(error).rsplit(": ", 1)[-1].strip()
        raise ConfigError(
            f"index_factory '{factory}' does not work for {width}-wide vectors: {reason}. "
            "Use Flat, or another factory string of FAISS, such as IVF4096,Flat or HNSW32."
        ) from None
    num_lists = _count_lists(index)
    if num_lists is not None and num_lists > num_rows:
        raise ConfigError(
            f"index_factory '{factory}' has {num_lists} lists, the corpus {num_rows} passages: "
            "use Flat, or fewer lists"
        )
    return index


def _count_lists(index: Any) -> int | None:
    ivf = import_faiss().try_extract_index_ivf(index)
    return None if ivf is None else int(ivf.nlist)


def _train(index: Any, source: VectorSource, factory: str) -> dict[str, Json]:
    """Train an index; give the number of passages, and the seconds."""
    wanted = max(MAX_TRAINING_ROWS, _ROWS_A_LIST * (_count_lists(index) or 0))
    room = max(_TRAINING_BYTES, machine_memory() // _TRAINING_SHARE)
    size = min(source.num_rows, wanted, room // (4 * source.width))
    rows = np.random.default_rng(_SEED).choice(source.num_rows, size=size, replace=False)
    logger.info("training %s on %d of %d passages", factory, size, source.num_rows)
    start = time.perf_counter()
    try:
        index.train(source.read(np.sort(rows).astype(np.int64)))
    except RuntimeError as error:
        reason = str(error).rsplit(": ", 1)[-1].strip()
        raise ConfigError(
            f"index_factory '{factory}' cannot be trained on {size} passages: {reason}. "
            "Use Flat, or a smaller index."
        ) from None
    return {"trained_on": size, "training_seconds": round(time.perf_counter() - start, 1)}


def _measure(index: Any, source: VectorSource, plan: IndexPlan) -> dict[str, Json]:
    """Set the search by some passages; give the recall by others, or by queries."""
    depths = depths_for(source.num_rows)
    if not depths:
        return {"is_exact": False, "recall": {}, "search": {}}
    logger.info("measuring recall against an exact search of all %d passages", source.num_rows)
    searched = Rescored(index, source.read, factor=plan.rescore_factor)
    asked = searched if plan.is_rescored else index
    rows = draw_rows(source.num_rows, 2 * SAMPLE, seed=_SEED)
    seen, held_out = _samples(source, rows, depths[-1], queries=plan.queries)
    setting = tune_search(index, asked, seen, depth=depths[-1], num_lists=_count_lists(index))
    counts: dict[str, Json] = {"is_exact": False, "search": setting}
    counts["recall"] = _recall(asked, held_out, depths)
    counts["recall_of"] = f"{len(held_out.rows)} {_kind_of(plan)}"
    if plan.is_rescored:
        counts["rescore_factor"] = plan.rescore_factor
        counts["recall_without_rescoring"] = _recall(index, held_out, depths)
    counts["queries_per_second"] = measure_speed(asked, held_out.vectors, depths[-1])
    return counts


def _kind_of(plan: IndexPlan) -> str:
    return "passages not tuned on" if plan.queries is None else "queries"


def _recall(index: Any, sample: Sample, depths: Sequence[int]) -> dict[str, Json]:
    return {str(depth): measure_recall(index, sample, depth) for depth in depths}


def _samples(
    source: VectorSource, rows: Rows, depth: int, *, queries: Vectors | None
) -> tuple[Sample, Sample]:
    """Find the true neighbours of two samples in one pass: to set the search by, and to measure."""
    vectors = source.read(rows)
    if queries is None:
        both = Sample.search(rows, vectors, source.blocks(), depth)
        return both.part(slice(0, None, 2)), both.part(slice(1, None, 2))
    both = Sample.search(
        np.concatenate([rows[::2], np.full(len(queries), MISSING_ROW)]),
        np.concatenate([vectors[::2], queries]),
        source.blocks(),
        depth,
    )
    cut = len(rows[::2])
    return both.part(slice(0, cut)), both.part(slice(cut, None))


def write_faiss(index: Any, path: Path) -> None:
    """Write an index, aside and renamed.

    Raises:
        OSError: If the disk is full.
    """
    faiss = import_faiss()
    # By Python's own write: FAISS' misses a disk that fills up when the file is closed.
    failures: list[OSError] = []
    with write_aside(path) as aside, aside.open("wb") as file:

        def write(block: bytes) -> int:
            try:
                return file.write(block)
            except OSError as error:
                failures.append(error)
                return 0

        try:
            sink = faiss.PyCallbackIOWriter(write, _WRITE_BYTES)
            faiss.write_index(index, sink)
        except RuntimeError:
            if failures:
                raise failures[0] from None
            raise
        if failures:
            raise failures[0]
