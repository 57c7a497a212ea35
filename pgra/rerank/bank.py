"""The representation bank: prompted states on disk, each computed once.

A passage's state does not depend on the query, so it is computed once for an LM, a prompt and a
corpus, whatever k, d, retriever, reader or seed asks for it. A bank grows: each shard of newly
wanted keys is one set of files, never changed again; its record is written last. A job that was
stopped goes on with the shards that are missing, and leaves the same bytes as an unbroken one.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm.auto import tqdm

from pgra.errors import ArtifactError
from pgra.io import (
    check_files,
    digest,
    file_checksum,
    is_finished,
    lock_folder,
    read_array,
    read_manifest,
    write_array,
    write_json,
    write_manifest,
)
from pgra.processes import Processes
from pgra.types import Json, Rows

logger = logging.getLogger(__name__)

STAGE = "bank"
_PARTS = ("keys", "states", "norms")

Advance = Callable[[int], object]
Encode = Callable[[Rows, Advance], Tensor]
"""Gives the states (n, H) of n keys, and tells how many more are done as it goes."""


@dataclass(frozen=True)
class _Shard:
    keys: Rows
    path: Path  # of its states (n, H), bfloat16 as its bits; mapped only while they are gathered,
    width: int  # for a map holds a file descriptor, and a large bank has thousands of shards
    norms: npt.NDArray[np.float32]


class Bank:
    """States by key: a passage's row, or a hash of a query's text.

    Attributes:
        folder: Where the shards are.
        fingerprint: All that a state depends on, besides the key.
    """

    def __init__(self, folder: Path, fingerprint: Mapping[str, Json]) -> None:
        """Open a bank, or begin an empty one, and check what is there.

        Raises:
            ArtifactError: If the bank was made from something else, or a shard is damaged.
        """
        self.folder, self.fingerprint = folder, dict(fingerprint)
        if is_finished(folder):
            read_manifest(folder, stage=STAGE, fingerprint=self.fingerprint)
        self._names: set[str] = set()
        self._shards: list[_Shard] = []
        self._load()

    def __len__(self) -> int:
        """Count the states."""
        return len(self._keys)

    @property
    def width(self) -> int:
        """Give H; 0 for an empty bank."""
        return self._shards[0].width if self._shards else 0

    def missing(self, keys: npt.ArrayLike) -> Rows:
        """Give the distinct keys that have no state yet, sorted."""
        wanted = np.unique(np.asarray(keys, dtype=np.int64))
        return wanted[~np.isin(wanted, self._keys, assume_unique=True)]

    def fill(
        self,
        keys: npt.ArrayLike,
        encode: Encode,
        *,
        shard_rows: int,
        processes: Processes = Processes(),  # noqa: B008 (frozen)
        progress: bool = False,
        title: str = "states",
    ) -> int:
        """Compute the states that are missing, shard by shard.

        Args:
            keys: What must be there afterwards; repeated ones count once.
            encode: Computes states.
            shard_rows: Keys in one shard, the unit that a stopped job does not repeat.
            processes: Who shares the shards.
            progress: Whether to show a bar.
            title: What the bar says.

        Returns:
            How many states were missing, over all processes.

        Raises:
            ArtifactError: If another job fills the bank.
        """
        worker, barrier = processes.worker, processes.barrier
        self._load()
        missing = self.missing(keys)
        barrier()  # all have looked before anyone writes
        if not len(missing):
            return 0
        shards = [missing[i : i + shard_rows] for i in range(0, len(missing), shard_rows)]
        if worker.is_main:
            with lock_folder(self.folder):
                self._begin()
                barrier()  # tidied
                self._fill_shards(worker.share(shards), encode, progress=progress, title=title)
                barrier()
        else:
            barrier()  # tidied by the main process
            self._fill_shards(worker.share(shards), encode, progress=False, title=title)
            barrier()
        self._load()
        return len(missing)

    def states(self, keys: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Give the states of keys, (n, H) float32, in the order given.

        Raises:
            KeyError: If a key has no state.
        """
        shard_of, place = self._find(keys)
        out = np.empty((len(shard_of), self.width), dtype=np.float32)
        for number in np.unique(shard_of):
            here = np.flatnonzero(shard_of == number)
            out[here] = _as_float32(read_array(self._shards[number].path)[place[here]])
        return out

    def norms(self, keys: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Give the Euclidean norms of keys' states, (n,) float32.

        Raises:
            KeyError: If a key has no state.
        """
        shard_of, place = self._find(keys)
        out = np.empty(len(shard_of), dtype=np.float32)
        for number in np.unique(shard_of):
            here = np.flatnonzero(shard_of == number)
            out[here] = self._shards[number].norms[place[here]]
        return out

    def _find(self, keys: npt.ArrayLike) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        wanted = np.asarray(keys, dtype=np.int64)
        at = np.minimum(np.searchsorted(self._keys, wanted), max(0, len(self._keys) - 1))
        if len(wanted) and (not len(self._keys) or (self._keys[at] != wanted).any()):
            raise KeyError(f"{self.folder} lacks the state of a key that is asked for")
        return self._shard_of[at], self._place[at]

    def _begin(self) -> None:
        for path in self.folder.glob(".*.partial*"):  # of a killed job: the lock is ours now
            path.unlink()
        if not is_finished(self.folder):
            write_manifest(
                self.folder, stage=STAGE, fingerprint=self.fingerprint, counts={}, seconds=0.0
            )

    def _load(self) -> None:
        """Take up the shards that appeared since the last look."""
        for path in sorted(self.folder.glob("[!.]*.json")):  # a killed job's parts are hidden
            if path.stem == "manifest" or path.stem in self._names:
                continue
            self._shards.append(_read_shard(self.folder, path))
            self._names.add(path.stem)
        sizes = [len(shard.keys) for shard in self._shards]
        keys = np.concatenate([np.empty(0, np.int64), *(shard.keys for shard in self._shards)])
        order = np.argsort(keys, kind="stable")
        self._keys: Rows = keys[order]
        self._shard_of = np.repeat(np.arange(len(sizes)), sizes)[order]
        places = [np.arange(size) for size in sizes]
        self._place = np.concatenate([np.empty(0, np.intp), *places])[order]

    def _fill_shards(
        self, shards: Sequence[Rows], encode: Encode, *, progress: bool, title: str
    ) -> None:
        total = sum(map(len, shards))
        with tqdm(total=total, unit="text", desc=title, disable=not progress) as bar:
            for keys in shards:
                self._write_shard(keys, encode(keys, bar.update))

    def _write_shard(self, keys: Rows, states: Tensor) -> None:
        name = digest([int(key) for key in keys])[:16]
        bits = states.view(torch.uint16) if states.dtype == torch.bfloat16 else states
        norms = torch.linalg.vector_norm(states.float(), dim=1)
        arrays = {"keys": keys, "states": bits.numpy(), "norms": norms.numpy()}
        files = {}
        for part in _PARTS:
            path = self.folder / f"{name}.{part}.npy"
            write_array(path, arrays[part])
            files[path.name] = {"bytes": path.stat().st_size, "checksum": file_checksum(path)}
        record = {"rows": len(keys), "files": files}  # no times: the same bytes from any run
        write_json(self.folder / f"{name}.json", record)


def _read_shard(folder: Path, record: Path) -> _Shard:
    try:
        files = json.loads(record.read_text())["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{record} is damaged ({error}): delete it, its states are computed again"
        ) from None
    try:
        check_files(folder, files)
    except ArtifactError as error:
        cause = str(error).split(": delete")[0]
        raise ArtifactError(
            f"{cause}: delete {record}, and only its {record.stem}.* states are computed again"
        ) from None
    keys, states, norms = (folder / f"{record.stem}.{part}.npy" for part in _PARTS)
    width = int(read_array(states).shape[1])
    return _Shard(np.array(read_array(keys)), states, width, np.array(read_array(norms)))


def _as_float32(states: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    if states.dtype == np.uint16:  # a bfloat16 is the upper half of a float32
        return (states.astype(np.uint32) << 16).view(np.float32)
    return states.astype(np.float32)
