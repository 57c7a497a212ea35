"""Stopping and resuming a training: checkpoints, signals, time limits.

All processes leave after the same step, with a whole checkpoint. Exit codes: 128 + the signal's
number (SIGINT 130, SIGUSR1 138, SIGTERM 143), and 124 when time is up, as of `timeout`.

    checkpoint-N/         a plain model folder, and in it
      state.json             the step, the best measurement, the log, the losses
      training.safetensors   states of optimizer and random generators
      checksums.json         written last: a checkpoint without it does not count
"""

import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from pgra.artifacts import CHECKSUMS_FILE, find_changes, write_aside, write_checksums, write_json
from pgra.core import Worker, cpu_group, gather
from pgra.errors import ArtifactError, DamageError, Stopped, reading
from pgra.reader.module import ReaderModule, Trainable

logger = logging.getLogger(__name__)

OUT_OF_TIME = 124
# Slurm sends SIGTERM, and SIGUSR1 where `--signal` asks for it.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# A launcher passes on a signal that the system sent to all processes of the job anyway: what comes
# twice within so many seconds was sent once.
_ECHO_SECONDS = 5.0


class Stopper:
    """Knows whether training is to stop.

    `code` is the exit code of the signal that asked for it; 0 if none did.
    """

    def __init__(self, *, world: int = 1, minutes: float | None = None) -> None:
        """Begin to count the time; `world` processes must agree; minutes of None are no limit."""
        self.code = 0
        self._world = world
        self._end = None if minutes is None else time.monotonic() + 60 * minutes
        self._first_signal = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch signals meanwhile; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._previous = {number: signal.signal(number, self._hear) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 (signal's own)
        echo = _ECHO_SECONDS if self._world > 1 else 0.0
        now = time.monotonic()
        if self.code and now - self._first_signal >= echo:  # twice: leave at once, whatever runs
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not self.code:
            self.code, self._first_signal = 128 + number, now
            logger.info(
                "%s: training stops after this step, saved; once more leaves at once",
                signal.Signals(number).name,
            )

    def agreed(self, *, has_more: bool) -> int:
        """Return the largest exit code of all processes, 0 to continue; all must call it together.

        Time that is up stops a training that has more steps.
        """
        code = self.code
        if not code and has_more and self._end is not None and time.monotonic() >= self._end:
            code = OUT_OF_TIME
        if self._world == 1:
            return code
        shared = torch.tensor(code)  # on the CPU: no GPU waits for it
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=cpu_group())
        return int(shared)


def stopped(code: int, where: str) -> Stopped:
    """Return what ends a training that the processes agreed to stop."""
    reason = "time is up" if code == OUT_OF_TIME else signal.Signals(code - 128).name
    return Stopped(f"stopped ({reason}) {where}; the same command resumes from there", code=code)


@dataclass
class Progress:
    """How far a training is.

    Attributes:
        step: Steps that are done.
        best_step: That of the best measurement on the dev set; None before the first.
        losses: The loss of each step, over the target tokens of all processes and batches.
        rates: The learning rate of each.
        history: The log: a line for each mean loss and each measurement, with its "step".
    """

    step: int = 0
    best_step: int | None = None
    best_value: float | None = None
    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)

    def add(self, line: Mapping[str, float]) -> None:
        """Add a line of this step to the log."""
        self.history.append({**line, "step": self.step})

    def keep_best(self, value: float) -> None:
        """Note a measurement; of equals the first is the best."""
        if self.best_value is None or value > self.best_value:
            self.best_step, self.best_value = self.step, value


_STATE_FILE = "state.json"
_TENSORS_FILE = "training.safetensors"
_RANDOM = "random"  # states of generators: random/RANK/DEVICE


@dataclass(frozen=True)
class Updates:
    """What changes the weights, step by step."""

    optimizer: torch.optim.Optimizer
    schedule: Any

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return its tensors by name, and all else as JSON takes it."""
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {"schedule": self.schedule.state_dict()}
        for number, own in self.optimizer.state_dict()["state"].items():
            for name, value in own.items():
                kept: dict[str, Any] = tensors if isinstance(value, Tensor) else values
                kept[f"{number}/{name}"] = value
        return tensors, values

    def restore(self, tensors: Mapping[str, Tensor], values: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        self.schedule.load_state_dict(values.pop("schedule"))
        state: dict[int, dict[str, Any]] = {}
        for key, value in {**tensors, **values}.items():
            number, _, name = key.partition("/")
            state.setdefault(int(number), {})[name] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        for group, rate in zip(
            self.optimizer.param_groups, self.schedule.get_last_lr(), strict=True
        ):
            group["lr"] = rate


def checkpoint_folder(home: Path, step: int) -> Path:
    return home / f"checkpoint-{step}"


def save_checkpoint(
    home: Path,
    trainable: Trainable,
    progress: Progress,
    updates: Updates,
    worker: Worker,
) -> None:
    """Write a checkpoint, and delete older ones but the best; all processes call it together."""
    device = trainable.module.device
    random = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(device)
    everyones = gather([random], worker)
    if not worker.is_main:
        return
    tensors, values = updates.state()
    for rank, states in enumerate(everyones):
        tensors |= {f"{_RANDOM}/{rank}/{kind}": state for kind, state in states.items()}

    with write_aside(checkpoint_folder(home, progress.step)) as aside:
        trainable.save(aside)
        save_file({n: t.contiguous() for n, t in tensors.items()}, aside / _TENSORS_FILE)
        write_json(aside / _STATE_FILE, {"progress": asdict(progress), "updates": values})
        write_checksums(aside)
    for step, folder in _checkpoints(home):
        if step not in (progress.step, progress.best_step):
            shutil.rmtree(folder)


def resume(
    home: Path, module: ReaderModule, updates: Updates, worker: Worker, *, needs_best: bool
) -> Progress:
    """Load the last whole checkpoint, and return its progress; there may be none.

    Raises:
        ArtifactError: If a better checkpoint, which `needs_best` asks for, is gone or damaged.
    """
    folder = last_checkpoint(home)
    if folder is None:
        return Progress()
    logger.info("run: resuming from %s", folder)
    with reading(folder, DamageError):
        state = json.loads((folder / _STATE_FILE).read_text("utf-8"))
        progress, tensors = Progress(**state["progress"]), load_file(folder / _TENSORS_FILE)
    if needs_best and progress.best_step is not None:
        best = checkpoint_folder(home, progress.best_step)
        if (fault := _fault(best)) is not None:
            raise ArtifactError(
                f"{best}, the best on the dev set, is gone or damaged ({fault}): bring it back, or "
                "choose another output_dir"
            )
    module.load_weights(folder)
    random = {key: tensors.pop(key) for key in list(tensors) if key.startswith(_RANDOM)}
    torch.set_rng_state(random[f"{_RANDOM}/{worker.rank}/cpu"])
    if module.device.type == "cuda":
        torch.cuda.set_rng_state(random[f"{_RANDOM}/{worker.rank}/cuda"], module.device)
    updates.restore(tensors, state["updates"])
    return progress


def _checkpoints(home: Path) -> list[tuple[int, Path]]:
    """Return checkpoints by their steps, in order."""
    folders = home.glob("checkpoint-*")
    numbers = {folder.name.rpartition("-")[2]: folder for folder in folders}
    return sorted((int(number), folder) for number, folder in numbers.items() if number.isdigit())


def last_checkpoint(home: Path) -> Path | None:
    """Find the last whole checkpoint; damaged and unfinished ones are skipped."""
    for _, folder in reversed(_checkpoints(home)):
        if (fault := _fault(folder)) is None:
            return folder
        logger.warning("%s is passed over: %s", folder, fault)
    return None


def _fault(checkpoint: Path) -> str | None:
    """Return why a checkpoint cannot be resumed from; None if it is whole."""
    if not (checkpoint / CHECKSUMS_FILE).is_file():
        return f"it was not finished (it has no {CHECKSUMS_FILE})"
    change = next(find_changes(checkpoint), None)
    return " ".join(change) if change else None
