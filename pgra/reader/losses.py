"""The loss of every step, in `losses.jsonl`: the same bytes whether or not a run was stopped.

A loss stays on its device until several are copied at once, so that no step waits for a number. One
that is none stops the training at the next copy, and on a CPU at once.
"""

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from pgra.errors import ModelError
from pgra.io import write_text

logger = logging.getLogger(__name__)

LOSSES_FILE = "losses.jsonl"
_CHUNK = 50  # steps copied from the device at once, and at most lost after a loss that is none
_NAMED = 16  # examples of a broken batch that a message names


@dataclass(frozen=True)
class LossRecord:
    """One step's loss.

    Attributes:
        step: From 1.
        loss: Mean over the target tokens of all processes and accumulated batches.
        learning_rate: The one this step was made with.
    """

    step: int
    loss: float
    learning_rate: float


@dataclass
class _Pending:
    """A step whose loss is still on the device."""

    parts: list[Tensor] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    learning_rate: float = 0.0

    def total(self) -> Tensor:
        return torch.stack(self.parts).float().sum()


class LossLog:
    """Keeps every step's loss and writes them by the chunk.

    Each process adds its part of each accumulated batch; all must call `end_step` and `flush`
    together, for the parts are then gathered. The main process writes.
    """

    def __init__(self, path: Path, accelerator: Any, *, way_out: Callable[[], str]) -> None:
        """Begin empty.

        Args:
            path: The file.
            accelerator: The Trainer's; gathers over the processes.
            way_out: Words what the message of a broken loss goes on with.
        """
        self.path = path
        self.records: list[LossRecord] = []
        self._accelerator = accelerator
        self._way_out = way_out
        self._current = _Pending()
        self._pending: list[_Pending] = []
        self._first = 1  # step of the first pending loss

    def begin(self, step: int, source: Path | None) -> None:
        """Cut back to a step: what a stopped run wrote after its checkpoint is made again.

        Args:
            step: Steps done.
            source: The file that tells of them; None at the start.
        """
        self.records = read_losses(source, step) if source is not None else []
        if len(self.records) < step:
            logger.warning(
                "%s lacks losses up to step %d: the file goes on without them", source, step
            )
        self._current, self._pending, self._first = _Pending(), [], step + 1
        if self._accelerator.is_main_process:
            write_text(self.path, _lines(self.records))

    def add(self, loss: Tensor, ids: Sequence[str]) -> None:
        """Take this process's part of one accumulated batch.

        Args:
            loss: Summed over its target tokens, divided by those of all processes and accumulated
                batches, times the number of processes: as the Trainer trains on it. ().
            ids: Its examples.
        """
        self._current.parts.append(loss.detach())
        self._current.ids += ids

    def set_rate(self, learning_rate: float) -> None:
        """Take the running step's learning rate, before the schedule goes on."""
        self._current.learning_rate = float(learning_rate)

    def end_step(self) -> None:
        """Close a step."""
        self._pending.append(self._current)
        self._current = _Pending()
        if len(self._pending) >= _CHUNK:
            self.flush()

    @property
    def looks_broken(self) -> bool:
        """Say whether this process's last loss is none; always False on a GPU, for it would wait.

        The next `flush` tells there.
        """
        if not self._pending or self._pending[-1].parts[0].device.type != "cpu":
            return False
        return not bool(torch.isfinite(self._pending[-1].total()))

    def flush(self) -> None:
        """Gather and write the losses that are not written yet.

        Raises:
            ModelError: If one is no number, on all processes; names its step and its examples.
        """
        if not self._pending:
            return
        parts = torch.stack([step.total() for step in self._pending])  # (n,)
        # Gathered and then summed in the order of processes: a sum over the wire would depend on
        # how many steps are sent at once, and so on where a run was stopped.
        world = self._accelerator.num_processes
        shares = self._accelerator.gather(parts).reshape(world, -1).double().cpu()  # (W, n)
        losses = shares.mean(dim=0).tolist()
        pending, first = self._pending, self._first
        broken = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
        self._write(
            [
                LossRecord(first + place, loss, pending[place].learning_rate)
                for place, loss in enumerate(losses[:broken])
            ]
        )
        if broken is not None:
            is_mine = not math.isfinite(float(parts[broken]))
            raise self._error(
                losses[broken], first + broken, pending[broken].ids if is_mine else []
            )
        self._pending, self._first = [], first + len(losses)

    def _write(self, fresh: Sequence[LossRecord]) -> None:
        self.records += fresh
        if self._accelerator.is_main_process:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_lines(fresh))

    def _error(self, loss: float, step: int, ids: list[str]) -> ModelError:
        if self._accelerator.num_processes > 1:
            ids = gather_object(ids)  # of those processes whose batch it was
        shown = ", ".join(ids[:_NAMED]) + (f" and {len(ids) - _NAMED} more" * (len(ids) > _NAMED))
        return ModelError(
            f"the loss is {loss} at step {step} (examples {shown}): {self._way_out()}"
        )

    def mean(self, after: int = 0) -> float:
        """Give the mean loss of the written steps after a step."""
        losses = [record.loss for record in self.records if record.step > after]
        return math.fsum(losses) / len(losses) if losses else math.nan


def last_logged(history: Sequence[Mapping[str, Any]]) -> int:
    """Give the step of the Trainer's last log line with a loss, 0 before the first."""
    return max((int(entry["step"]) for entry in history if "loss" in entry), default=0)


def read_losses(path: Path, up_to: int) -> list[LossRecord]:
    """Read the losses of steps 1 to `up_to`; what follows them, or a line cut short, is left out.

    Raises:
        OSError: If the file is there and cannot be read.
    """
    found: list[LossRecord] = []
    if not path.is_file():
        return found
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            values = json.loads(line)
            record = LossRecord(values["step"], values["loss"], values["learning_rate"])
        except (ValueError, TypeError, KeyError):
            break
        if record.step > up_to:
            break
        found.append(record)
    return found


def _lines(records: Iterable[LossRecord]) -> str:
    """Word records; a float's repr is exact."""
    return "".join(
        json.dumps({"step": r.step, "loss": r.loss, "learning_rate": r.learning_rate}) + "\n"
        for r in records
    )
