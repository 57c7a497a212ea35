"""The representation bank: prompted states on disk, each computed once.

A passage's state does not depend on the query, so it is computed once for an LM, a prompt and a
corpus, whatever k, d, retriever, reader or seed asks for it. Each fill adds shards, never changed
again; a shard's record is written last. A stopped job continues with the missing shards, and leaves
the same bytes as an unbroken one.

In memory are keys, 24 bytes a state; states are mapped a shard at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TypeVar

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from pgra.arrays import Array, Rows, Vectors
from pgra.artifacts import (
    MANIFEST,
    NO_INPUTS,
    Inputs,
    artifact_dir,
    digest,
    find_damage,
    is_finished,
    lock_folder,
    read_sealed,
    record_files,
    set_aside,
    write_aside,
    write_manifest,
    write_sealed,
)
from pgra.context import ALONE, Context
from pgra.errors import DamageError, ModelError, reading
from pgra.lm.load import ModelSource
from pgra.parallel import claim_path, run_overlapped
from pgra.progress import Bar
from pgra.types import Fields

T = TypeVar("T")
Advance = Callable[[int], object]
_CHECKED = 16  # states that are there, when others are computed beside them


class BankShard:
    """States of some keys on disk, mapped only while they are read.

    NAME.safetensors has `keys` (n,) int64, rising, and `states` (n, H) as the LM gave them;
    NAME.json, written last, its checksum. That is compared before states are first used in a
    process, so opening a bank does not read all of it.
    """

    def __init__(self, record: Path, *, bank: str = "") -> None:
        """Read record and keys; what is damaged or of another bank is a DamageError."""
        self.record = record
        self._file = record.with_suffix(".safetensors")
        self._is_compared = False
        with reading(record, DamageError):
            values = read_sealed(record)
            self._files = values["files"]
            if values["bank"] != bank:
                raise ValueError("it belongs to another bank")
            with safetensors.safe_open(self._file, "np") as tensors:
                self.keys: Rows = tensors.get_tensor("keys")
                self.width = int(tensors.get_slice("states").get_shape()[1])

    def compare(self) -> None:
        """Compare the file with its checksum, once a process; damage is a DamageError."""
        if self._is_compared:
            return
        for name, damage in find_damage(self.record.parent, self._files):
            way_out = "give the same command again, which computes these states again"
            raise DamageError(f"{self.record.with_name(name)} {damage}", way_out)
        self._is_compared = True

    def states(self, indices: Array) -> Vectors:
        """Return the states at these indices, (n, H) float32; damage is a DamageError."""
        self.compare()
        with safetensors.safe_open(self._file, "pt") as tensors:
            states: Tensor = tensors.get_tensor("states")[torch.from_numpy(indices)]
        return states.float().numpy()


def write_shard(folder: Path, keys: Rows, states: Tensor, *, bank: str = "") -> Path:
    """Write states (n, H), on the CPU, with their rising keys (n,), and return the record's path.

    Raises:
        ModelError: If a state is not finite, or so large that its norm is not.
    """
    finite = torch.isfinite(torch.linalg.vector_norm(states.float(), dim=1))
    if not finite.all():
        key = int(keys[int(torch.nonzero(~finite)[0])])
        raise ModelError(f"the state of key {key} in {folder} is not finite: use another lm_dtype")
    record = folder / f"{_shard_name(keys)}.json"
    file = record.with_suffix(".safetensors")
    tensors = {"keys": torch.from_numpy(keys), "states": states.contiguous()}
    with write_aside(file) as aside:
        aside.write_bytes(safetensors.torch.save(tensors))
    # Without times: the same bytes from any run.
    write_sealed(record, {"bank": bank, "files": record_files(folder, [file.name])})
    return record


def _shard_name(keys: Rows) -> str:
    return digest(keys.tolist())[:16]


class Bank:
    """States by key: a passage's row, or a hash of a query's text.

    A damaged shard is set aside, and its states are computed again. `fingerprint` is all that a
    state depends on, besides the key.
    """

    def __init__(self, folder: Path, fingerprint: Fields, *, inputs: Inputs = NO_INPUTS) -> None:
        """Open a bank, or begin an empty one.

        `inputs` are the files of the model; no shard is kept once they changed.
        """
        self.folder = folder
        self.fingerprint = dict(fingerprint)
        self._name = digest(self.fingerprint)
        self._inputs = inputs
        self._records: set[Path] | None = None
        self._shards: list[BankShard] = []
        self._look()

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def width(self) -> int:
        """Return H; 0 for an empty bank."""
        return self._shards[0].width if self._shards else 0

    def missing(self, keys: Rows) -> Rows:
        """Return the distinct keys that have no state yet, sorted."""
        return np.setdiff1d(keys, self._keys)

    def compute_missing(
        self,
        keys: Rows,
        prepare: Callable[[Rows], T],
        encode: Callable[[T, Advance], Callable[[], Tensor]],
        *,
        shard_rows: int,
        context: Context = ALONE,
        cut: Callable[[Rows, int], Sequence[Rows]] | None = None,
        check: Callable[[T, Vectors], object] | None = None,
        title: str = "states",
    ) -> int:
        """Compute the states that are missing, shard by shard.

        The next shard is prepared while this one is encoded and the last one is written.

        Args:
            keys: What must be there afterwards; repeated ones count once.
            prepare: Reads a shard's keys, in another thread.
            encode: Begins to compute states from what `prepare` returned, and reports how many more
                are done by `Advance`; returns a function that waits for them, (n, H).
            shard_rows: Most keys in one shard, the unit that a stopped job does not repeat.
            context: The processes that share the shards.
            cut: Makes shards of the missing keys, each rising and of about so many; None: just so.
            check: Compares some states that are there with what would be computed now.
            title: The bar's.

        Returns:
            The number of states that were missing, over all processes.

        Raises:
            ModelError: If a state is not finite.
            ArtifactError: If the model's files changed meanwhile.
        """
        wanted = np.unique(keys)
        if not len(self._find_missing(wanted, context)):
            return 0

        def keep(keys: Rows, finish: Callable[[], Tensor]) -> None:
            states = finish()
            self._inputs.check()
            written = write_shard(self.folder, keys, states, bank=self._name)
            claim_path(written).unlink(missing_ok=True)

        def record(keys: Rows) -> Path:
            return self.folder / f"{_shard_name(keys)}.json"

        # The main process holds the lock for all, and tidies before any of them writes.
        worker = context.worker
        is_sole = worker.is_main and not worker.is_part
        with lock_folder(self.folder, wait=True) if is_sole else nullcontext():
            if context.is_main and not is_finished(self.folder):  # for people
                write_manifest(
                    self.folder,
                    stage="bank",
                    fingerprint=self.fingerprint,
                    counts={},
                    seconds=0.0,
                    files={},
                )
            missing = self._find_missing(wanted, context)  # fewer, where another was waited for
            present = np.intersect1d(wanted, self._keys)
            if check is not None and len(missing) and len(present):
                some = present[:: -(-len(present) // _CHECKED)]
                check(prepare(some), self.states(some))
            rows = shard_rows
            if worker.world > 1 and not worker.is_part:  # of like size, as many for each process
                rounds = -(-len(missing) // (worker.world * shard_rows))
                rows = -(-len(missing) // max(1, worker.world * rounds))
            whole = wanted if worker.is_part else missing  # cut alike whenever a part begins
            ends = range(rows, len(whole), max(1, rows))
            shards = np.split(whole, ends) if cut is None else cut(whole, rows)
            left = [np.intersect1d(shard, missing) for shard in shards]
            units = [shard for shard in left if len(shard)]
            total = sum(map(len, worker.share(units)))
            bar = Bar(total=total, unit="text", desc=title, disable=not context.shows_progress)
            with bar:
                claimed = worker.claim(units, record)
                run_overlapped(
                    claimed, prepare, lambda inputs: encode(inputs, bar.update), keep=keep
                )
            context.barrier()
        self._look()
        return len(missing) - len(self.missing(missing))

    def _find_missing(self, keys: Rows, context: Context) -> Rows:
        """Return the missing keys, those of damaged shards among them; all processes call it."""
        self._look()
        if context.is_main:
            wanted = np.isin(self._keys, keys)
            numbers = np.searchsorted(self._starts, self._slots[wanted], side="right") - 1
            for number in np.unique(numbers):
                try:
                    self._shards[number].compare()
                except DamageError as error:
                    _set_shard_aside(self._shards[number].record, error.what)
        context.barrier()
        self._look()
        missing = self.missing(keys)
        context.barrier()
        return missing

    def states(self, keys: Rows) -> Vectors:
        """Return the states of keys, (n, H) float32, in the order given.

        Raises:
            KeyError: If a key has no state.
            DamageError: If a shard's states are not what was written.
        """
        return self._gather(self._find(keys))

    def blocks(self, keys: Rows, *, rows: int) -> Iterator[tuple[Rows, Vectors]]:
        """Yield keys and states in the order in which they lie on disk, `rows` at a time.

        `keys` are distinct, in any order. Errors as of `states`.
        """
        slots = self._find(keys)
        order = np.argsort(slots, kind="stable")
        for start in range(0, len(keys), rows):
            block = order[start : start + rows]
            yield keys[block], self._gather(slots[block])

    def _find(self, keys: Rows) -> Rows:
        """Return the slots of keys: their places when all shards are laid end to end."""
        at = np.minimum(np.searchsorted(self._keys, keys), max(0, len(self._keys) - 1))
        if len(keys) and (not len(self._keys) or (self._keys[at] != keys).any()):
            raise KeyError(f"{self.folder} lacks the state of a key that is asked for")
        return self._slots[at]

    def _gather(self, slots: Rows) -> Vectors:
        """Return the states at slots, each shard mapped once."""
        order = np.argsort(slots, kind="stable")
        cuts = np.searchsorted(slots[order], self._starts)
        out = np.empty((len(slots), self.width), dtype=np.float32)
        for number in np.flatnonzero(np.diff(cuts)):
            here = order[cuts[number] : cuts[number + 1]]
            out[here] = self._shards[number].states(slots[here] - self._starts[number])
        return out

    def _look(self) -> None:
        """Open the shards on disk that are new."""
        records = {*self.folder.glob("[!.]*.json")} - {self.folder / MANIFEST}
        if records == self._records:
            return
        before = {shard.record: shard for shard in self._shards}
        opened = (before.get(record) or self._open_shard(record) for record in records)
        # By first key: shards of one fill then lie in the order of their keys.
        self._shards = sorted(
            (shard for shard in opened if shard is not None),
            key=lambda shard: (int(shard.keys[0]), shard.record),
        )
        self._records = {shard.record for shard in self._shards}
        keys = [shard.keys for shard in self._shards]
        self._starts = np.cumsum([0, *map(len, keys)])
        # Two jobs may have computed one key; the first of its states is the one that counts.
        self._keys, self._slots = np.unique(
            np.concatenate([np.empty(0, np.int64), *keys]), return_index=True
        )

    def _open_shard(self, record: Path) -> BankShard | None:
        """Open a shard; a damaged one is set aside, and its states are missing."""
        try:
            return BankShard(record, bank=self._name)
        except DamageError as error:
            _set_shard_aside(record, error.what)
            return None


def _set_shard_aside(record: Path, why: str) -> None:
    for path in (record, record.with_suffix(".safetensors")):
        if path.exists():  # another process may have been first
            set_aside(path, why)


def bank_name(model: str) -> str:
    """Return how the folders of a model's banks begin."""
    return model.removeprefix("bundled:").rstrip("/").split("/")[-1]


def bank_folder(source: ModelSource, context: Context, fields: Fields, suffix: str) -> Path:
    """Return the folder of a model's bank among a run's artifacts."""
    return artifact_dir(context.artifacts / "banks", bank_name(source.name) + suffix, fields)
