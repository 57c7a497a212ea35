"""The representation bank: prompted states on disk, each computed once.

A passage's state does not depend on the query, so it is computed once for an LM, a prompt and a
corpus, whatever k, d, retriever, reader or seed asks for it. Each fill adds shards, never changed
again; a shard's record is written last. A stopped job continues with the missing shards, and leaves
the same bytes as an unbroken one.

In memory are keys, 12 bytes a state; states are mapped a shard at a time.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from pgra.artifacts import (
    MANIFEST,
    NO_INPUTS,
    FileRecords,
    Inputs,
    canonical_json,
    digest,
    find_damage,
    is_finished,
    lock_folder,
    read_array,
    read_manifest,
    record_files,
    set_aside,
    write_array,
    write_json,
    write_manifest,
)
from pgra.core import ALONE, Context, Example, Json, Rows, run_overlapped
from pgra.errors import DamageError, ModelError, reading
from pgra.progress import Bar

# One shard of states on disk: written once, checked before it is used.
#
#     NAME.keys.npy    (n,) int64, rising
#     NAME.states.npy  (n, H): as the LM gave them (bfloat16 as its bits)
#     NAME.json        the record, written last: sizes and checksums of these
#
# All but the states is small, and compared when a bank is opened. Of the states only the size is
# compared then, and their checksum before they are first used in a process. So no byte that is used
# goes unchecked, and opening a bank does not read all of it.


Floats = npt.NDArray[np.float32]


class BankShard:
    """States of some keys, which stay on disk; mapped only while they are read.

    Its width is H; keys are (n,) int64, rising, and a bank deletes them once it has them.
    """

    def __init__(self, record: Path, *, bank: str = "") -> None:
        """Read record and keys; a file that was changed or is of another bank is a DamageError."""
        self.record, self._is_compared = record, False
        with reading(record, DamageError):
            found = json.loads(record.read_text(encoding="utf-8"))
            self.files: FileRecords = found["files"]
            if found["bank"] != bank:
                raise ValueError("it belongs to another bank")
            keys = self.path("keys").name
            self._compare({keys: self.files[keys]})
            self._compare(self.files, most_bytes=0)
        self.keys: Rows = np.load(self.path("keys"), allow_pickle=False)
        self.width = int(read_array(self.path("states")).shape[1])

    def path(self, part: str) -> Path:
        return self.record.with_name(f"{self.record.stem}.{part}.npy")

    def compare(self) -> None:
        """Compare all files with their checksums, once a process; damage is a DamageError."""
        if not self._is_compared:
            with reading(self.record, DamageError):
                self._compare(self.files)
            self._is_compared = True

    def _compare(self, files: FileRecords, *, most_bytes: float = float("inf")) -> None:
        for name, what in find_damage(self.record.parent, files, most_bytes=most_bytes):
            way_out = "give the same command again, which computes these states again"
            raise DamageError(f"{self.record.with_name(name)} {what}", way_out)

    @staticmethod
    def move(record: Path, why: str) -> None:
        """Move a shard's files to NAME.damaged, so that its states are computed again."""
        set_aside(record, why)
        for path in record.parent.glob(f"{record.stem}.*.npy"):
            path.rename(path.with_name(f"{path.name}.damaged"))

    def states(self, places: npt.NDArray[np.integer[Any]]) -> Floats:
        """Return the states at these places, (n, H) float32; damage is a DamageError."""
        self.compare()
        taken = torch.from_numpy(np.asarray(read_array(self.path("states")))[places])
        if taken.dtype == torch.uint16:  # a bfloat16's bits
            taken = taken.view(torch.bfloat16)
        return taken.float().numpy()


def write_shard(folder: Path, keys: Rows, states: Tensor, *, bank: str = "") -> Path:
    """Write states (n, H), on the CPU, with their rising keys (n,), and return the record's path.

    Raises:
        ModelError: If a state is not finite, or so large that its norm is not.
    """
    finite = torch.isfinite(torch.linalg.vector_norm(states.float(), dim=1))
    if not finite.all():
        key = int(keys[int(torch.nonzero(~finite)[0])])
        raise ModelError(
            f"the state of key {key} in {folder} is not finite: use another --lm_dtype"
        )
    bits = states.view(torch.uint16) if states.dtype == torch.bfloat16 else states
    name = digest(keys.tolist())[:16]
    arrays = {f"{name}.keys.npy": keys, f"{name}.states.npy": bits.numpy()}
    for file, array in arrays.items():
        write_array(folder / file, array)
    record = folder / f"{name}.json"  # without times: the same bytes from any run
    write_json(record, {"bank": bank, "files": record_files(folder, arrays)})
    return record


_STAGE = "bank"
T = TypeVar("T")
Advance = Callable[[int], object]


class Bank:
    """States by key: a passage's row, or a hash of a query's text.

    A damaged shard is set aside, and its states are computed again. `fingerprint` is all that a
    state depends on, besides the key.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: Mapping[str, Json],
        *,
        inputs: Inputs = NO_INPUTS,
    ) -> None:
        """Open a bank, or begin an empty one, and check what is there.

        `inputs` are the files of the model; no shard is kept once they changed.

        Raises:
            ArtifactError: If the bank was made from something else.
        """
        self.folder, self.fingerprint = folder, dict(fingerprint)
        self._name, self._inputs = digest(self.fingerprint), inputs
        try:
            if is_finished(folder):
                read_manifest(folder, stage=_STAGE, fingerprint=self.fingerprint)
        except DamageError as error:  # it says nothing that a shard does not
            set_aside(folder / MANIFEST, error.what)
        self._forget()
        self._look()

    def _forget(self) -> None:
        self._shards: list[BankShard] = []
        # A state's slot is its place when all shards are laid end to end.
        self._starts = np.zeros(1, dtype=np.int64)  # the first slot of each shard, and the end
        self._keys: Rows = np.empty(0, dtype=np.int64)  # rising
        self._slots = np.empty(0, dtype=np.int32)  # of these keys

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def width(self) -> int:
        """Return H; 0 for an empty bank."""
        return self._shards[0].width if self._shards else 0

    def missing(self, keys: npt.ArrayLike) -> Rows:
        """Return the distinct keys that have no state yet, sorted."""
        wanted = np.unique(np.asarray(keys, dtype=np.int64))
        at = np.searchsorted(self._keys, wanted)
        known = at < len(self._keys)
        known[known] = self._keys[at[known]] == wanted[known]
        return wanted[~known]

    def fill(
        self,
        keys: npt.ArrayLike,
        prepare: Callable[[Rows], T],
        encode: Callable[[T, Advance], Tensor | Callable[[], Tensor]],
        *,
        shard_rows: int,
        context: Context = ALONE,
        cut: Callable[[Rows, int], Sequence[Rows]] | None = None,
        title: str = "states",
    ) -> int:
        """Compute the states that are missing, shard by shard.

        The next shard is prepared while this one is encoded and the last one is written.

        Args:
            keys: What must be there afterwards; repeated ones count once.
            prepare: Reads a shard's keys, in another thread.
            encode: Computes states (n, H) from what `prepare` returned, and reports how many more
                are done by `Advance`. It may return a function that waits for them, which the
                writing thread calls.
            shard_rows: Most keys in one shard, the unit that a stopped job does not repeat.
            context: The processes that share the shards evenly.
            cut: Makes shards of the missing keys, each rising and of about so many; None: just so.
            title: The bar's.

        Returns:
            The number of states that were missing, over all processes.

        Raises:
            ModelError: If a state is not finite.
            ArtifactError: If the model's files changed meanwhile.
        """
        if not len(self._look_for(keys, context)):
            return 0

        def compute(ready: T) -> Tensor | Callable[[], Tensor]:
            return encode(ready, bar.update)

        def keep(keys: Rows, states: Tensor | Callable[[], Tensor]) -> None:
            states = states() if callable(states) else states
            self._inputs.check()
            write_shard(self.folder, keys, states, bank=self._name)

        # The main process holds the lock for all, and tidies before any of them writes.
        with lock_folder(self.folder, wait=True) if context.is_main else nullcontext():
            if context.is_main:
                self._begin()
            context.barrier()
            missing = self._look_for(keys, context)  # fewer, where another job was waited for
            share = _share_out(missing, shard_rows, context, cut)
            total, hidden = sum(map(len, share)), not context.shows_progress
            with Bar(total=total, unit="text", desc=title, disable=hidden) as bar:
                run_overlapped(share, prepare, compute, keep=keep)
            context.barrier()
        self._look()
        return len(missing)

    def _look_for(self, keys: npt.ArrayLike, context: Context) -> Rows:
        """Return the missing keys, those of damaged shards among them; all processes call it."""
        self._look()
        if context.is_main:
            self._set_damaged_aside(keys)
        context.barrier()
        self._look()
        missing = self.missing(keys)
        context.barrier()
        return missing

    def _set_damaged_aside(self, keys: npt.ArrayLike) -> None:
        wanted = np.isin(self._keys, np.asarray(keys, dtype=np.int64))
        numbers = np.searchsorted(self._starts, self._slots[wanted], side="right") - 1
        for number in np.unique(numbers):
            try:
                self._shards[number].compare()
            except DamageError as error:
                BankShard.move(self._shards[number].record, error.what)

    def _begin(self) -> None:
        if not is_finished(self.folder):
            write_manifest(
                self.folder, stage=_STAGE, fingerprint=self.fingerprint, counts={}, seconds=0.0
            )

    def states(self, keys: npt.ArrayLike) -> Floats:
        """Return the states of keys, (n, H) float32, in the order given.

        Raises:
            KeyError: If a key has no state.
            DamageError: If a shard's states are not what was written.
        """
        return self._gather(self._find(keys))

    def blocks(self, keys: Rows | None = None, *, rows: int) -> Iterator[tuple[Rows, Floats]]:
        """Yield keys and states in the order in which they lie on disk, `rows` at a time.

        `keys` are distinct, in any order; None is all. Errors as of `states`.
        """
        wanted = self._keys if keys is None else np.asarray(keys, dtype=np.int64)
        slots = self._find(wanted)
        order = np.argsort(slots, kind="stable")
        for start in range(0, len(wanted), rows):
            part = order[start : start + rows]
            yield wanted[part], self._gather(slots[part])

    def _find(self, keys: npt.ArrayLike) -> npt.NDArray[np.int32]:
        wanted = np.asarray(keys, dtype=np.int64)
        at = np.minimum(np.searchsorted(self._keys, wanted), max(0, len(self._keys) - 1))
        if len(wanted) and (not len(self._keys) or (self._keys[at] != wanted).any()):
            raise KeyError(f"{self.folder} lacks the state of a key that is asked for")
        return self._slots[at]

    def _gather(self, slots: npt.NDArray[np.int32]) -> Floats:
        """Return the states at slots, each shard mapped once."""
        order = np.argsort(slots, kind="stable")
        cuts = np.searchsorted(slots[order], self._starts)
        out = np.empty((len(slots), self.width), dtype=np.float32)
        for number in np.flatnonzero(np.diff(cuts)):
            here = order[cuts[number] : cuts[number + 1]]
            out[here] = self._shards[number].states(slots[here] - self._starts[number])
        return out

    def _look(self) -> None:
        """Open the shards on disk that are not known yet."""
        there = {*self.folder.glob("[!.]*.json")} - {self.folder / MANIFEST}
        if not {shard.record for shard in self._shards} <= there:  # one was set aside
            self._forget()
        records = there - {shard.record for shard in self._shards}
        # By first key: shards of one fill then lie in the order of their keys.
        shards = (self._open_shard(record) for record in records)
        found = sorted(
            (shard for shard in shards if shard is not None),
            key=lambda shard: (int(shard.keys[0]), shard.record),
        )
        if not found:
            return
        self._shards += found
        rows = np.cumsum([len(shard.keys) for shard in found])
        first = self._starts[-1]
        self._starts = np.concatenate([self._starts, first + rows])
        keys = np.concatenate([self._keys, *(shard.keys for shard in found)])
        for shard in found:
            del shard.keys
        new = np.arange(first, self._starts[-1], dtype=np.int32)
        # Two jobs may have computed one key; the first of its states is the one that counts.
        self._keys, order = np.unique(keys, return_index=True)
        self._slots = np.concatenate([self._slots, new])[order]

    def _open_shard(self, record: Path) -> BankShard | None:
        """Open a shard; a damaged one is set aside, and its states are missing."""
        try:
            return BankShard(record, bank=self._name)
        except DamageError as error:
            if record.exists():  # another process may have been first
                BankShard.move(record, error.what)
            return None


_KEPT_BYTES = 1 << 30


class MemoryBank:
    """States by key in memory, up to a gigabyte; those kept longest go first. Used as a `Bank`."""

    def __init__(self, width: int) -> None:
        self.width, self._states = width, dict[int, Floats]()

    def missing(self, keys: npt.ArrayLike) -> Rows:
        new = [key for key in np.unique(np.asarray(keys)).tolist() if key not in self._states]
        return np.array(new, np.int64)

    def fill(
        self,
        keys: Rows,
        prepare: Callable[[Rows], T],
        encode: Callable[[T, Advance], Callable[[], Tensor]],
        *,
        title: str = "states",
        **shared: object,  # noqa: ARG002 (of a bank that processes share)
    ) -> int:
        missing, wanted = self.missing(keys), {*keys.tolist()}
        if not len(missing):
            return 0
        with Bar(total=len(missing), unit="text", desc=title, leave=False) as bar:
            states = encode(prepare(missing), bar.update)()
        most = max(0, _KEPT_BYTES // (4 * self.width) - len(missing))
        for key in list(self._states)[: max(0, len(self._states) - most)]:
            if key not in wanted:
                del self._states[key]
        self._states.update(zip(missing.tolist(), states.float().numpy(), strict=True))
        return len(missing)

    def states(self, keys: npt.ArrayLike) -> Floats:
        found = [self._states[key] for key in np.asarray(keys).tolist()]
        return np.array(found, np.float32).reshape(len(found), self.width)

    def blocks(self, keys: Rows, *, rows: int) -> Iterator[tuple[Rows, Floats]]:
        for start in range(0, len(keys), rows):
            part = keys[start : start + rows]
            yield part, self.states(part)


States = Bank | MemoryBank

# Each process' share of the shards, names of banks, keys of queries' states.


def _share_out(
    keys: Rows,
    shard_rows: int,
    context: Context,
    cut: Callable[[Rows, int], Sequence[Rows]] | None,
) -> Sequence[Rows]:
    """Return the shards that this process makes of keys: see `Bank.fill`."""
    world, wanted, count = context.worker.world, shard_rows, 1
    if not len(keys):
        return []
    if world > 1:
        count = min(len(keys), world * -(-len(keys) // (world * shard_rows)))
        wanted = -(-len(keys) // count)
    if cut is not None:
        shards = cut(keys, wanted)
    elif world > 1:
        shards = np.array_split(keys, count)
    else:
        shards = np.split(keys, range(shard_rows, len(keys), shard_rows))
    return context.worker.share(shards)


def bank_name(model: str) -> str:
    """Return how the folders of a model's banks begin."""
    return model.removeprefix("bundled:").rstrip("/").split("/")[-1]


def query_key(example: Example) -> int:
    """Return the key of a query's state: a hash of its fields."""
    text = canonical_json(dict(example.fields))
    unsigned = np.uint64(xxhash.xxh3_64_intdigest(text.encode()))
    return int(unsigned.astype(np.int64))
