"""Stopping and resuming a training: checkpoints, signals, time limits.

All processes leave after the same step, with a whole checkpoint. Exit codes: 128 + the signal's
number (SIGINT 130, SIGUSR1 138, SIGTERM 143), and 124 when time is up, as of `timeout`.

    checkpoint-N/         a plain model folder, and in it
      state.json             its progress; states of optimizer, schedule and random generators
      training.safetensors   their tensors
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
from accelerate.utils.operations import recursively_apply
from safetensors.torch import load_file, save_file
from torch import Tensor

from pgra.artifacts import CHECKSUMS_FILE, find_changes, write_aside, write_checksums, write_json
from pgra.errors import ArtifactError, DamageError, Stopped, reading
from pgra.parallel import Worker, cpu_group, gather
from pgra.reader.fid import FusionReader

logger = logging.getLogger(__name__)

OUT_OF_TIME = 124
# Slurm sends SIGTERM, and SIGUSR1 where `--signal` asks for it.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# A launcher passes on a signal that the system sent to all processes of the job anyway: what comes
# twice within so many seconds was sent once.
_ECHO_SECONDS = 5.0
_STATE_FILE = "state.json"
_TENSORS_FILE = "training.safetensors"


class Stopper:
    """Knows whether training is to stop.

    `code` is the exit code of the signal that asked for it; 0 without a signal.
    """

    def __init__(self, *, world: int = 1, minutes: float | None = None) -> None:
        """Begin to count the time; `world` processes must agree; minutes of None are no limit."""
        self.code = 0
        self._world = world
        self._end = time.monotonic() + 60 * minutes if minutes else float("inf")
        self._first_signal = 0.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch signals meanwhile; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self._hear) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 (signal's own)
        now = time.monotonic()
        if not self.code:
            self.code = 128 + number
            self._first_signal = now
            name = signal.Signals(number).name
            logger.info("%s: training stops after this step; once more leaves at once", name)
        elif self._world == 1 or now - self._first_signal >= _ECHO_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def stop_code(self, *, has_more: bool) -> int:
        """Return the largest exit code of all processes, 0 to continue; all must call it together.

        Time that is up stops a training that has more steps.
        """
        code = self.code
        if not code and has_more and time.monotonic() >= self._end:
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
    """

    step: int = 0
    best_step: int | None = None
    best_value: float | None = None
    losses: list[float] = field(default_factory=list)

    def keep_best(self, value: float) -> None:
        """Note a measurement; of equals the first is the best."""
        if self.best_value is None or value > self.best_value:
            self.best_step = self.step
            self.best_value = value


def checkpoint_folder(home: Path, step: int) -> Path:
    return home / f"checkpoint-{step}"


def save_checkpoint(
    home: Path, trainable: Any, progress: Progress, updates: Mapping[str, Any], worker: Worker
) -> None:
    """Write a checkpoint, and delete older ones but the best; all processes call it together.

    `updates` are the optimizer and the schedule, by name.
    """
    device = trainable.module.device
    random = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(device)
    everyones = gather([random], worker)
    if not worker.is_main:
        return
    states = {"progress": asdict(progress), "random": everyones}
    states |= {name: update.state_dict() for name, update in updates.items()}

    tensors: dict[str, Tensor] = {}

    def name(tensor: Tensor) -> str:
        key = f"tensor {len(tensors)}"
        tensors[key] = tensor.contiguous()
        return key

    with write_aside(checkpoint_folder(home, progress.step)) as aside:
        trainable.save(aside)
        write_json(aside / _STATE_FILE, recursively_apply(name, states))
        save_file(tensors, aside / _TENSORS_FILE)
        write_checksums(aside)
    for step in _steps(home):
        if step not in (progress.step, progress.best_step):
            shutil.rmtree(checkpoint_folder(home, step))


def resume(
    home: Path,
    module: FusionReader,
    updates: Mapping[str, Any],
    worker: Worker,
    *,
    needs_best: bool,
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
        tensors = load_file(folder / _TENSORS_FILE)
        named = json.loads((folder / _STATE_FILE).read_text("utf-8"), object_hook=_with_numbers)
        states = recursively_apply(tensors.get, named, test_type=tensors.__contains__)
        progress = Progress(**states["progress"])
    if needs_best and progress.best_step is not None:
        best = checkpoint_folder(home, progress.best_step)
        if (fault := _fault(best)) is not None:
            raise ArtifactError(f"{best}, the dev set's best, is damaged ({fault}): bring it back")
    module.load_weights(folder)
    for name, update in updates.items():
        update.load_state_dict(states[name])
    random = states["random"][worker.rank % len(states["random"])]  # of fewer processes, perhaps
    torch.set_rng_state(random["cpu"])
    if module.device.type == "cuda":
        torch.cuda.set_rng_state(random["cuda"], module.device)
    return progress


def _with_numbers(values: dict[str, Any]) -> dict[int | str, Any]:
    """Return an object of JSON with its numbers as keys, such as an optimizer's of weights."""
    return {int(key) if key.isdigit() else key: value for key, value in values.items()}


def _steps(home: Path) -> list[int]:
    """Return the steps of the checkpoints, in order."""
    names = [folder.name.removeprefix("checkpoint-") for folder in home.glob("checkpoint-*")]
    return sorted(int(name) for name in names if name.isdigit())


def last_checkpoint(home: Path) -> Path | None:
    """Find the last whole checkpoint; damaged and unfinished ones are skipped."""
    for step in reversed(_steps(home)):
        folder = checkpoint_folder(home, step)
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
