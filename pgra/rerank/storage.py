"""One shard of states on disk: written once, in the dtype asked for, checked before it is used.

    NAME.keys.npy    (n,) int64, rising
    NAME.states.npy  (n, H): as the LM gave them (bfloat16 as its bits), float16, or int8
    NAME.scales.npy  (2, H) float32, for int8 only: the middle and the step of each column
    NAME.norms.npy   (n,) float32: of the states as they are kept
    NAME.json        the record, written last: sizes and checksums of these

All but the states is small, and read and checked when a bank is opened. Of the states only the size
is looked at then: their checksum is compared when they are first read in a process. So no byte
that is used goes unchecked, and opening a bank does not read all of it.

Prompted states are nearly one vector (SmolLM2-135M: a common part of norm 41, a text's own part of
norm 4), with a few columns far larger than the rest. So int8 counts steps from the middle of each
column of the shard: one scale a row changed several times as many of the 16 best by product.
And norms are those of the states as kept: with the norms of the given ones, rounding along the
common part, which a cosine should not see, cost float16 some of the 16 best, and now none.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pgra.errors import ArtifactError, ConfigError, ModelError
from pgra.io import check_files, digest, file_checksum, read_array, write_array, write_text
from pgra.types import Json, Rows

Floats = npt.NDArray[np.float32]

_FLOAT16_MAX = float(torch.finfo(torch.float16).max)
_INT8_MAX = 127


@dataclass
class Shard:
    """States of some keys, which stay on disk.

    They are mapped only while they are read, for a map holds a file descriptor, and a large bank
    has thousands of shards.

    Attributes:
        record: Path of the record.
        files: Size and checksum of each file, by name.
        rows: How many states.
        width: H.
        is_checked: Whether this process has compared the states with their checksum.
    """

    record: Path
    files: Mapping[str, Mapping[str, Any]]
    rows: int
    width: int
    is_checked: bool = False

    def path(self, part: str) -> Path:
        """Give the file of a part."""
        return self.record.with_name(f"{self.record.stem}.{part}.npy")

    @property
    def state_parts(self) -> list[str]:
        """Name the parts that states are read from."""
        return [part for part in ("states", "scales") if self.path(part).name in self.files]

    def states(self, places: npt.NDArray[np.integer[Any]]) -> Floats:
        """Give the states at these places of the shard, (n, H) float32.

        Raises:
            ArtifactError: If the states are not what was written.
        """
        if not self.is_checked:
            self.check(*self.state_parts)
            self.is_checked = True
        taken = torch.from_numpy(np.asarray(read_array(self.path("states")))[places])
        if taken.dtype != torch.int8:
            return _as_floats(taken).numpy()
        return _as_floats(
            taken, torch.from_numpy(np.array(read_array(self.path("scales"))))
        ).numpy()

    def check(self, *parts: str, verify: bool = True) -> None:
        """Compare files with the record: their sizes and, if `verify`, their checksums.

        Raises:
            ArtifactError: If one is missing or is not what was written; it is named.
        """
        names = [self.path(part).name for part in parts]
        try:
            check_files(
                self.record.parent, {name: self.files[name] for name in names}, verify=verify
            )
        except ArtifactError as error:
            cause = str(error).split(": delete")[0]
            raise ArtifactError(f"{cause}: {_way_out(self.record)}") from None


@dataclass(frozen=True)
class OpenShard:
    """A shard with what is kept of it in memory.

    Attributes:
        shard: Where its states are.
        keys: (n,) int64, rising.
        norms: (n,) float32.
    """

    shard: Shard
    keys: Rows
    norms: Floats


def write_shard(
    folder: Path, keys: Rows, states: Tensor, *, dtype: str, bank: str = ""
) -> OpenShard:
    """Write states with their keys; the record last, so that a shard with a record is whole.

    Args:
        folder: The bank.
        keys: (n,), rising.
        states: (n, H), on the CPU.
        dtype: "auto" (as they are), "float16" or "int8".
        bank: What says which bank the shard belongs to; kept in the record.

    Raises:
        ConfigError: If a state is too large for float16.
        ModelError: If a state is not finite, or so large that its norm is not.
    """
    finite = torch.isfinite(torch.linalg.vector_norm(states.float(), dim=1))
    if not finite.all():
        key = int(keys[int(torch.nonzero(~finite)[0])])
        raise ModelError(
            f"the state of key {key} in {folder} is not finite: use another --lm_dtype"
        )
    packed = _pack(keys, states, dtype)
    norms = torch.linalg.vector_norm(_as_floats(**packed), dim=1).numpy()
    arrays = {
        "keys": keys,
        **{part: array.numpy() for part, array in packed.items()},
        "norms": norms,
    }
    name = digest(keys.tolist())[:16]
    files: dict[str, Mapping[str, Any]] = {}
    for part, array in arrays.items():
        path = folder / f"{name}.{part}.npy"
        write_array(path, array)
        files[path.name] = {"bytes": path.stat().st_size, "checksum": file_checksum(path)}
    record = folder / f"{name}.json"
    write_text(record, _sealed(files, *states.shape, bank=bank))
    return OpenShard(Shard(record, files, *states.shape), keys, norms)


def read_shard(record: Path, *, bank: str = "") -> OpenShard:
    """Read a shard's record, keys and norms; of its states, only the size is looked at.

    Raises:
        ArtifactError: If any of it is not what was written, or was written for another bank than
            `bank`; the file is named.
    """
    shard = _read_record(record, bank)
    shard.check("keys", "norms")
    shard.check(*shard.state_parts, verify=False)
    keys, norms = (np.load(shard.path(part), allow_pickle=False) for part in ("keys", "norms"))
    return OpenShard(shard, keys, norms)


def _pack(keys: Rows, states: Tensor, dtype: str) -> dict[str, Tensor]:
    """Give the arrays that states are kept in."""
    if dtype == "auto":
        return {"states": states.view(torch.uint16) if states.dtype == torch.bfloat16 else states}
    states = states.float()
    if dtype == "int8":
        low, high = states.amin(0), states.amax(0)
        middle, step = (low + high) / 2, (high - low) / (2 * _INT8_MAX)
        counts = (states - middle) / torch.where(step == 0, 1, step)
        return {"states": counts.round().to(torch.int8), "scales": torch.stack([middle, step])}
    largest = states.abs().amax(1)
    if largest.max() > _FLOAT16_MAX:
        key, most = int(keys[int(largest.argmax())]), float(largest.max())
        raise ConfigError(
            f"the state of key {key} reaches {most:.6g}, and float16 holds at most "
            f"{_FLOAT16_MAX:.0f}: use --bank_dtype auto or int8"
        )
    return {"states": states.to(torch.float16)}


def _as_floats(states: Tensor, scales: Tensor | None = None) -> Tensor:
    """Give packed states as float32, (n, H)."""
    if states.dtype == torch.uint16:  # a bfloat16's bits
        states = states.view(torch.bfloat16)
    if scales is None:
        return states.float()
    middle, step = scales
    return torch.addcmul(middle, states.float(), step)


def _read_record(record: Path, bank: str) -> Shard:
    try:
        text = record.read_text(encoding="utf-8")
        found = json.loads(text)
        shard = Shard(record, found["files"], found["rows"], found["width"])
        made_for = found["bank"]
        if any(not name.startswith(f"{record.stem}.") for name in shard.files):
            raise ValueError("it tells of the files of another record")
        whole = text == _sealed(shard.files, shard.rows, shard.width, bank=made_for)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{record} is damaged ({error!r}): {_way_out(record)}") from None
    if not whole:
        raise ArtifactError(f"{record} is damaged (it is not what was written): {_way_out(record)}")
    if made_for != bank:
        raise ArtifactError(f"{record} belongs to another bank: {_way_out(record)}")
    return shard


def _way_out(record: Path) -> str:
    return f"delete {record}, and only its {record.stem}.* states are computed again"


def _sealed(files: Json, rows: int, width: int, *, bank: str) -> str:
    """Give a record's text. It ends with its own digest, so that no byte of it can change."""
    fields: dict[str, Json] = {"rows": rows, "width": width, "bank": bank, "files": files}
    sealed = {**fields, "digest": digest(fields)}  # no times: the same bytes from any run
    return json.dumps(sealed, indent=2) + "\n"
