"""The representation bank: prompted states on disk, each computed once.

A passage's state does not depend on the query, so it is computed once for an LM, a prompt and a
corpus, whatever k, d, retriever, reader or seed asks for it. A bank grows: each shard of newly
wanted keys is one set of files, never changed again; its record is written last. A job that was
stopped goes on with the shards that are missing, and leaves the same bytes as an unbroken one.

In memory are keys and norms, 16 bytes a state; states are mapped a shard at a time.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor
from tqdm.auto import tqdm

from pgra.io import MANIFEST, digest, is_finished, lock_folder, read_manifest, write_manifest
from pgra.processes import Processes
from pgra.rerank.overlap import run_overlapped
from pgra.rerank.storage import Floats, OpenShard, Shard, read_shard, write_shard
from pgra.types import Json, Rows

logger = logging.getLogger(__name__)

STAGE = "bank"

T = TypeVar("T")
Advance = Callable[[int], object]
Prepare = Callable[[Rows], T]
"""Reads what is to be encoded, ahead and in another thread: keys to tokenised prompts."""
Encode = Callable[[T, Advance], Tensor]
"""Gives the states (n, H) of n prepared keys, and tells how many more are done as it goes."""


@dataclass(frozen=True)
class Block:
    """Some of a bank's states.

    Attributes:
        keys: (n,) int64.
        states: (n, H) float32.
        norms: (n,) float32, of these states.
    """

    keys: Rows
    states: Floats
    norms: Floats


class Bank:
    """States by key: a passage's row, or a hash of a query's text.

    Opening compares the sizes of all files, and the checksums of all but the states; a shard's
    states are compared with theirs when they are first read (`pgra.rerank.storage`).

    Attributes:
        folder: Where the shards are.
        fingerprint: All that a state depends on, besides the key.
    """

    def __init__(
        self, folder: Path, fingerprint: Mapping[str, Json], *, dtype: str = "auto"
    ) -> None:
        """Open a bank, or begin an empty one, and check what is there.

        Args:
            folder: Where the shards are.
            fingerprint: All that a state depends on, besides the key; `dtype` must be told by it.
            dtype: How new states are kept: "auto" (as they come), "float16" or "int8".

        Raises:
            ArtifactError: If the bank was made from something else, or a shard is damaged.
        """
        self.folder, self.fingerprint = folder, dict(fingerprint)
        self._dtype, self._name = dtype, digest(self.fingerprint)
        if is_finished(folder):
            read_manifest(folder, stage=STAGE, fingerprint=self.fingerprint)
        self._shards: list[Shard] = []
        # A state's slot is its place when all shards are laid end to end.
        self._starts = np.zeros(1, dtype=np.int64)  # the first slot of each shard, and the end
        self._keys: Rows = np.empty(0, dtype=np.int64)  # rising
        self._slots = np.empty(0, dtype=np.int32)  # of these keys
        self._norms: Floats = np.empty(0, dtype=np.float32)  # by slot
        self._look()

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
        at = np.searchsorted(self._keys, wanted)
        known = at < len(self._keys)
        known[known] = self._keys[at[known]] == wanted[known]
        return wanted[~known]

    def fill(
        self,
        keys: npt.ArrayLike,
        prepare: Prepare[T],
        encode: Encode[T],
        *,
        shard_rows: int,
        cut: Callable[[Rows], Sequence[Rows]] | None = None,
        processes: Processes = Processes(),  # noqa: B008 (frozen)
        progress: bool = False,
        title: str = "states",
    ) -> int:
        """Compute the states that are missing, shard by shard.

        The next shard is prepared while this one is encoded and the last one is written.

        Args:
            keys: What must be there afterwards; repeated ones count once.
            prepare: Reads a shard's keys; called in another thread, one shard ahead.
            encode: Computes states from what `prepare` gave; called in this thread.
            shard_rows: Keys in one shard, the unit that a stopped job does not repeat.
            cut: Makes shards of the missing keys, each rising; None takes `shard_rows` at a time.
            processes: Who shares the shards.
            progress: Whether to show a bar.
            title: What the bar says.

        Returns:
            How many states were missing, over all processes.

        Raises:
            ArtifactError: If another job fills the bank.
            ConfigError: If a state is too large for the bank's dtype.
            ModelError: If a state is not finite.
        """
        worker, barrier = processes.worker, processes.barrier
        self._look()
        missing = self.missing(keys)
        barrier()  # all have looked before anyone writes
        if not len(missing):
            return 0
        if cut is None:
            shards = [missing[i : i + shard_rows] for i in range(0, len(missing), shard_rows)]
        else:
            shards = list(cut(missing))
        share, show = worker.share(shards), progress and worker.is_main
        with tqdm(total=sum(map(len, share)), unit="text", desc=title, disable=not show) as bar:

            def work() -> None:
                self._fill_shards(share, prepare, lambda ready: encode(ready, bar.update))

            self._fill_together(work, processes)
        self._look()  # at the other processes' shards
        return len(missing)

    def _fill_together(self, work: Callable[[], None], processes: Processes) -> None:
        """Fill in all processes at once, under one lock, once the folder is tidied."""
        if not processes.worker.is_main:
            processes.barrier()  # tidied by the main process
            work()
            processes.barrier()
            return
        with lock_folder(self.folder):
            self._begin()
            processes.barrier()
            work()
            processes.barrier()

    def _begin(self) -> None:
        for path in self.folder.glob(".*.partial*"):  # of a killed job: the lock is ours now
            path.unlink()
        if not is_finished(self.folder):
            write_manifest(
                self.folder, stage=STAGE, fingerprint=self.fingerprint, counts={}, seconds=0.0
            )

    def _fill_shards(
        self, shards: Sequence[Rows], prepare: Prepare[T], encode: Callable[[T], Tensor]
    ) -> None:
        def keep(keys: Rows, states: Tensor) -> OpenShard:
            return write_shard(self.folder, keys, states, dtype=self._dtype, bank=self._name)

        self._take_up(run_overlapped(shards, prepare, encode, keep=keep))

    def states(self, keys: npt.ArrayLike) -> Floats:
        """Give the states of keys, (n, H) float32, in the order given.

        Raises:
            KeyError: If a key has no state.
            ArtifactError: If a shard's states are not what was written.
        """
        return self._gather(self._find(keys))

    def norms(self, keys: npt.ArrayLike) -> Floats:
        """Give the Euclidean norms of keys' states as they are kept, (n,) float32.

        Raises:
            KeyError: If a key has no state.
        """
        return self._norms[self._find(keys)]

    def blocks(self, keys: Rows | None = None, *, rows: int) -> Iterator[Block]:
        """Give states in the order in which they lie on disk, never all at once.

        Args:
            keys: Distinct keys, in any order; None is all.
            rows: States in a block; the last has the rest.

        Raises:
            KeyError: If a key has no state.
            ArtifactError: If a shard's states are not what was written.
        """
        wanted = self._keys if keys is None else np.asarray(keys, dtype=np.int64)
        slots = self._find(wanted)
        order = np.argsort(slots, kind="stable")
        for start in range(0, len(wanted), rows):
            part = order[start : start + rows]
            here = slots[part]
            yield Block(wanted[part], self._gather(here), self._norms[here])

    def _find(self, keys: npt.ArrayLike) -> npt.NDArray[np.int32]:
        """Give the slots of keys."""
        wanted = np.asarray(keys, dtype=np.int64)
        at = np.minimum(np.searchsorted(self._keys, wanted), max(0, len(self._keys) - 1))
        if len(wanted) and (not len(self._keys) or (self._keys[at] != wanted).any()):
            raise KeyError(f"{self.folder} lacks the state of a key that is asked for")
        return self._slots[at]

    def _gather(self, slots: npt.NDArray[np.int32]) -> Floats:
        """Give the states at slots, each shard mapped once."""
        order = np.argsort(slots, kind="stable")
        cuts = np.searchsorted(slots[order], self._starts)
        out = np.empty((len(slots), self.width), dtype=np.float32)
        for number in np.flatnonzero(np.diff(cuts)):
            here = order[cuts[number] : cuts[number + 1]]
            out[here] = self._shards[number].states(slots[here] - self._starts[number])
        return out

    def _look(self) -> None:
        """Take up the shards on disk that are not known yet."""
        known = {shard.record for shard in self._shards}
        records = set(self.folder.glob("[!.]*.json"))  # a killed job's parts are hidden
        records -= {self.folder / MANIFEST, *known}
        self._take_up([read_shard(record, bank=self._name) for record in sorted(records)])

    def _take_up(self, found: Sequence[OpenShard]) -> None:
        if not found:
            return
        # By first key: shards of one fill then lie in the order of their keys.
        found = sorted(found, key=lambda shard: (int(shard.keys[0]), shard.shard.record))
        self._shards += [shard.shard for shard in found]
        rows = np.cumsum([len(shard.keys) for shard in found])
        first = self._starts[-1]
        self._starts = np.concatenate([self._starts, first + rows])
        self._norms = np.concatenate([self._norms, *(shard.norms for shard in found)])
        keys = np.concatenate([self._keys, *(shard.keys for shard in found)])
        new = np.arange(first, self._starts[-1], dtype=np.int32)
        # Two jobs may have computed one key; the first of its states is the one that counts.
        self._keys, order = np.unique(keys, return_index=True)
        self._slots = np.concatenate([self._slots, new])[order]
