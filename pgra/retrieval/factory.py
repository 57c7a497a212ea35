"""FAISS indexes from a factory string: made, trained, filled, measured and written."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from pgra.errors import ConfigError
from pgra.io import find_stage, load_manifest, write_aside
from pgra.processes import machine_memory
from pgra.retrieval.choice import EXACT, import_faiss
from pgra.retrieval.exact import Vectors
from pgra.retrieval.flat import BlockSearch, flat_header, write_flat
from pgra.retrieval.recall import (
    SAMPLE,
    Sample,
    depths_for,
    draw_rows,
    measure_recall,
    measure_speed,
    tune_search,
)
from pgra.retrieval.rescore import Rescored, is_lossy
from pgra.types import MISSING_ROW, Json, Rows

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
    files = load_manifest(folder, stage=find_stage(folder)).files
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
