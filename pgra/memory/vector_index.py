"""The FAISS index of a memory's many vectors: lists, a byte a dimension, memory-mapped."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pgra.retrieval.choice import import_faiss
from pgra.retrieval.factory import empty_index, map_faiss

_SHARE_OF_LISTS = 16  # one list in so many is looked into
_MOST_LISTS = 4096
_POINTS_A_LIST = 64  # that train it
_TURNS = 10  # of k-means
_BLOCK = 65_536  # rows read at once


def train_index(vectors: npt.NDArray[np.float16]) -> Any:
    """Make an index of vectors (n, D): about sqrt(n) lists, trained on a fixed sample."""
    rows, width = vectors.shape
    lists = min(_MOST_LISTS, 1 << round(np.log2(rows) / 2))
    index = empty_index(f"IVF{lists},SQ8", width, rows)
    clustering = import_faiss().extract_index_ivf(index).cp
    clustering.niter, clustering.max_points_per_centroid = _TURNS, _POINTS_A_LIST
    clustering.min_points_per_centroid = 1  # small ones are for tests: no warning
    draw = np.random.default_rng(0)
    sample = draw.choice(rows, min(rows, lists * _POINTS_A_LIST), replace=False)
    index.train(vectors[np.sort(sample)].astype(np.float32))
    for start in range(0, rows, _BLOCK):
        index.add(vectors[start : start + _BLOCK].astype(np.float32))
    return index


def map_index(path: Path) -> Any:
    """Open an index on disk, to look into one list in sixteen."""
    index = map_faiss(path)
    ivf = import_faiss().extract_index_ivf(index)
    ivf.nprobe = max(1, ivf.nlist // _SHARE_OF_LISTS)
    return index
