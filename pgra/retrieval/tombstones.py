"""Rows removed from a dense index, and what else of its past decides what it finds.

A removed row stays in the shards and in the FAISS file: the manifest names a list of removed rows,
and a search passes over them. Rows keep their numbers. The list's digest is a field of the index's
fingerprint beside those that a build has, so that candidates made before are not taken for its own.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pgra.errors import ArtifactError, ConfigError
from pgra.io import (
    Manifest,
    digest,
    load_manifest,
    lock_folder,
    read_array,
    record_file,
    write_array,
    write_manifest,
)
from pgra.types import MISSING_ROW, Candidates, Json, Rows

STAGE = "dense_index"
HISTORY = ("removed", "trained_rows")
"""Fields of a fingerprint that an index has from its past; nobody asks for them."""
GROWN_FILES = ("index-*.faiss", "removed-*.npy")
"""Files that `pgra index add` and `remove` leave in the folder of an index."""
_NONE: Rows = np.empty(0, dtype=np.int64)

Vectors = npt.NDArray[np.float32]
FaissSearch = Callable[[Vectors, int], tuple[Any, Any]]
"""Takes queries (B, D) and a depth; gives scores and rows, both (B, depth)."""


def with_history(folder: Path, fields: Mapping[str, Json]) -> dict[str, Json]:
    """Add to the fields asked for what an index in this folder has from its past."""
    try:
        made = load_manifest(folder, stage=STAGE).fingerprint
    except ArtifactError:  # told when it is read
        return dict(fields)
    return {**fields, **{name: made[name] for name in HISTORY if name in made}}


def read_removed(folder: Path, manifest: Manifest) -> Rows:
    """Give an index's removed rows, rising.

    Raises:
        ArtifactError: If their list cannot be read.
    """
    name = _find_list(manifest)
    return _NONE if name is None else np.asarray(read_array(folder / name))


def _find_list(manifest: Manifest) -> str | None:
    return next((name for name in manifest.files if name.startswith("removed-")), None)


def remove_rows(folder: Path, rows: Sequence[int]) -> Manifest:
    """Remove rows from a finished index: no search will give them. Its vectors stay as they are.

    The list is written under a name of its own and the manifest is replaced last, so that a killed
    job leaves the index as it was.

    Args:
        folder: The index.
        rows: Which rows; those removed before may be among them.

    Returns:
        The new manifest.

    Raises:
        ArtifactError: If the folder is no finished dense index, or in use by another job.
        ConfigError: If there is no such row, or none would be left.
        OSError: If the disk is full.
    """
    load_manifest(folder, stage=STAGE)  # before a lock is left where there is no index
    with lock_folder(folder):
        manifest = load_manifest(folder, stage=STAGE)
        num_rows = int(str(manifest.counts["rows"]))
        wrong = [row for row in rows if not 0 <= row < num_rows]
        if wrong:
            raise ConfigError(f"row {wrong[0]} is not in {folder}: it has rows 0 to {num_rows - 1}")
        before = read_removed(folder, manifest)
        removed = np.union1d(before, np.asarray(rows, dtype=np.int64))
        if len(removed) == num_rows:
            raise ConfigError(f"these are all {num_rows} rows of {folder}: one must stay")
        return manifest if len(removed) == len(before) else _write(folder, manifest, removed)


def _write(folder: Path, manifest: Manifest, removed: Rows) -> Manifest:
    made_of, old = digest(removed.tolist()), _find_list(manifest)
    path = folder / f"removed-{made_of[:12]}.npy"
    write_array(path, removed)
    kept = {name: record for name, record in manifest.files.items() if name != old}
    written = write_manifest(
        folder,
        stage=STAGE,
        fingerprint={**manifest.fingerprint, "removed": made_of},
        counts={**manifest.counts, "removed": len(removed)},
        seconds=manifest.seconds,
        files={**kept, path.name: record_file(path)},
    )
    if old is not None:
        (folder / old).unlink(missing_ok=True)
    return written


def search_kept(
    search: FaissSearch, queries: Vectors, k: int, *, removed: Rows, most: int
) -> Candidates:
    """Search an index that has removed rows, deeper until each query has its k others.

    Works with every kind of index and on every device, as a selector of FAISS does not.

    Args:
        search: Searches the index.
        queries: (B, D).
        k: Candidates a query; at most the rows that are left.
        removed: Rows to pass over, rising.
        most: Deepest search that is possible: the index's rows, or a GPU's limit.

    Returns:
        (B, k), best first, ties by row.

    Raises:
        ConfigError: If the deepest search is not deep enough, which only a GPU's may be.
    """
    if not len(removed):
        found_scores, found = search(queries, k)
        return Candidates.best(found, found_scores, k)
    rows = np.full((len(queries), k), MISSING_ROW, dtype=np.int64)
    scores = np.full((len(queries), k), -np.inf, dtype=np.float32)
    left = np.arange(len(queries))
    depth = min(most, k + math.ceil(1.5 * k * len(removed) / most))
    while len(left):
        found_scores, found = search(queries[left], depth)
        is_kept = ~np.isin(found, removed) & (found != MISSING_ROW)
        is_over = (found == MISSING_ROW).any(axis=1)  # an approximate index has no more to give
        is_done = (is_kept.sum(axis=1) >= k) | is_over
        best = Candidates.best(np.where(is_kept, found, MISSING_ROW), found_scores, k)
        rows[left[is_done]], scores[left[is_done]] = best.rows[is_done], best.scores[is_done]
        left = left[~is_done]
        if len(left) and depth == most:
            raise ConfigError(
                f"the {most} nearest passages of a query are nearly all removed, and a GPU finds "
                "no more: use --device cpu, or build the index without them"
            )
        depth = min(2 * depth, most)
    return Candidates(rows, scores)
