"""FAISS indexes from a factory string: made, trained, filled, measured and written."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from pgra.errors import ConfigError
from pgra.io import find_stage, load_manifest, write_aside
from pgra.retrieval.exact import Vectors
from pgra.retrieval.recall import Sample, depths_for, draw_rows, measure_recall, tune_search
from pgra.types import Json, Rows

INDEX_FILE = "index.faiss"
MAX_TRAINING_ROWS = 262_144
"""Most rows that train an IVF or PQ: 64 a centroid for IVF4096, 0.8 GB in float32 at D = 768."""
_MAX_TRAINING_BYTES = 2 << 30  # fewer rows where they are an LM's states, up to 5,120 wide
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


def build_faiss(
    source: VectorSource, factory: str, path: Path, *, begun: Path | None = None
) -> dict[str, Json]:
    """Write the index of a factory string, searched by inner product.

    Args:
        source: What is indexed.
        factory: FAISS factory string.
        path: The file.
        begun: An index of the first rows, up to where a block begins: the others are added to it,
            and it is not trained again.

    Returns:
        Counts for the manifest: rows, dim, is_exact, recall by depth, and the search setting.

    Raises:
        ConfigError: If FAISS does not know the factory, or there are too few rows for it.
        OSError: If the disk is full.
    """
    index = empty_index(factory, source.width, source.num_rows)
    if begun is not None:
        index = faiss.read_index(str(begun))
    elif not index.is_trained:
        _train(index, source, factory)
    start, num_there = 0, index.ntotal
    for vectors in source.blocks():
        if start >= num_there:
            index.add(vectors)
        start += len(vectors)
    assert index.ntotal == source.num_rows, "the index begun ends inside a block"
    counts = {"rows": source.num_rows, "dim": source.width, **_measure(index, source, factory)}
    _write_faiss(index, path)
    return counts


def find_faiss(folder: Path) -> Path:
    """Find a finished artefact's FAISS file: an index that grew has one of another name.

    Raises:
        ArtifactError: If the folder is not finished.
    """
    files = load_manifest(folder, stage=find_stage(folder)).files
    return folder / next((name for name in files if name.endswith(".faiss")), INDEX_FILE)


def empty_index(factory: str, width: int, num_rows: int) -> Any:
    """Make the index that a factory string names.

    Raises:
        ConfigError: If it cannot work for so many rows of this width.
    """
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
    ivf = faiss.try_extract_index_ivf(index)
    return None if ivf is None else int(ivf.nlist)


def _train(index: Any, source: VectorSource, factory: str) -> None:
    most = min(MAX_TRAINING_ROWS, _MAX_TRAINING_BYTES // (4 * source.width))
    size = min(source.num_rows, most)
    rows = np.random.default_rng(_SEED).choice(source.num_rows, size=size, replace=False)
    try:
        index.train(source.read(np.sort(rows).astype(np.int64)))
    except RuntimeError as error:
        reason = str(error).rsplit(": ", 1)[-1].strip()
        raise ConfigError(
            f"index_factory '{factory}' cannot be trained on {size} passages: {reason}. "
            "Use Flat, or a smaller index."
        ) from None


def _measure(index: Any, source: VectorSource, factory: str) -> dict[str, Json]:
    depths = depths_for(source.num_rows)
    if factory == "Flat" or not depths:
        return {"is_exact": factory == "Flat", "recall": {str(d): 1.0 for d in depths}}
    rows = draw_rows(source.num_rows, seed=_SEED)
    sample = Sample.search(rows, source.read(rows), source.blocks(), depths[-1])
    setting = tune_search(index, sample, depths[-1], num_lists=_count_lists(index))
    recall = {str(depth): measure_recall(index, sample, depth) for depth in depths}
    return {"is_exact": False, "recall": recall, "search": setting}


def _write_faiss(index: Any, path: Path) -> None:
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
            sink = faiss.PyCallbackIOWriter(write, _WRITE_BYTES)  # type: ignore[attr-defined]
            faiss.write_index(index, sink)
        except RuntimeError:
            if failures:
                raise failures[0] from None
            raise
        if failures:
            raise failures[0]
