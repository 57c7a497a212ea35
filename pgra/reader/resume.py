"""Stopping and resuming a training: checkpoints, signals, time limits, the finished reader."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy

from pgra.artifacts import CHECKSUMS_FILE, find_changes
from pgra.core import cpu_group, wait_for_all
from pgra.errors import ArtifactError, DamageError, Stopped, reading
from pgra.reader.module import ReaderModule
from pgra.reader.trainer_arguments import ReaderTrainingArguments

# Stops a training so that the same command resumes it: at a signal, or when its time is up.
#
# All processes leave after the same step, with a whole checkpoint. Exit codes: 128 + the signal's
# number (SIGINT 130, SIGUSR1 138, SIGTERM 143), and 124 when time is up, as of `timeout`.


logger = logging.getLogger(__name__)

OUT_OF_TIME = 124
# Slurm sends SIGTERM, and SIGUSR1 where `--signal` asks for it.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# A launcher passes on a signal that the system sent to all processes of the job anyway: what comes
# twice within so many seconds was sent once.
_ECHO_SECONDS = 5.0


class Stopper:
    """Knows whether training is to stop, and when it may.

    `code` is the exit code of what asked for a stop; 0 if nothing did.
    """

    def __init__(self, *, world: int = 1, minutes: float | None = None) -> None:
        """Begin to count the time; `world` processes must agree; minutes of None are no limit."""
        self.code = 0
        self._world = world
        self._end = None if minutes is None else time.monotonic() + 60 * minutes
        self._first_signal = 0.0
        self._agreed = 0
        self._awaits_epoch_end = False
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

    def agree(self, code: int) -> int:
        """Return the largest exit code of all processes; all must call it together."""
        if self._world == 1:
            return code
        shared = torch.tensor(code)  # on the CPU: no GPU waits for it
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=cpu_group())
        return int(shared)

    @property
    def wish(self) -> int:
        """The exit code with which this process alone wants to stop; 0 if it does not."""
        if not self.code and self._end is not None and time.monotonic() >= self._end:
            return OUT_OF_TIME
        return self.code

    def end_step(self, args: Any, state: Any, control: Any, *, code: int) -> None:
        """Ask the Trainer (by `control`) to save and leave if the processes agreed on a code."""
        is_last = state.global_step >= state.max_steps
        if not code or (is_last and code == OUT_OF_TIME):  # all is done: let it be measured
            return
        self._agreed = code
        # What is due at an epoch's end comes before the checkpoint, or a resumed run, which begins
        # with the next epoch, would leave it out.
        by_epoch = IntervalStrategy.EPOCH in (args.eval_strategy, args.logging_strategy)
        self._awaits_epoch_end = float(state.epoch).is_integer() and (
            by_epoch or args.save_strategy == "epoch"
        )
        control.should_training_stop = True
        control.should_save = control.should_save or not self._awaits_epoch_end

    def end_epoch(self, control: Any) -> None:
        """Save at an epoch's end, where the stop waited for it."""
        if self._agreed and self._awaits_epoch_end:
            self._awaits_epoch_end = False
            control.should_save = True

    def after_save(self, state: Any) -> None:
        """Raise `Stopped` if the processes agreed so, once the checkpoint is whole on all."""
        if not self._agreed or self._awaits_epoch_end:
            return
        if self._world > 1:
            # The first that leaves makes a launcher kill the others.
            wait_for_all()
        raise _stopped(self._agreed, f"after step {state.global_step} of {state.max_steps}")

    def after_training(self) -> None:
        """Raise `Stopped` if a signal came to any process when no step was left."""
        if code := self.agree(self.code):
            raise _stopped(code, "after training")


def _stopped(code: int, where: str) -> Stopped:
    reason = "time is up" if code == OUT_OF_TIME else signal.Signals(code - 128).name
    return Stopped(f"stopped ({reason}) {where}; the same command goes on from there", code=code)


_STATE_FILE = "trainer_state.json"


def last_checkpoint(output_dir: Path, *, num_processes: int | None = None) -> Path | None:
    """Find the last whole checkpoint, which has the random states of `num_processes` (None: any).

    Damaged and unfinished ones are skipped.
    """
    numbered = {
        int(number): folder
        for folder in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if (number := folder.name.rpartition("-")[2]).isdigit()
    }
    for _, folder in sorted(numbered.items(), reverse=True):
        if (fault := _fault(folder, num_processes)) is None:
            return folder
        logger.warning("%s is passed over: %s", folder, fault)
    return None


def _fault(checkpoint: Path, num_processes: int | None = None) -> str | None:
    """Return why a checkpoint cannot be resumed from; None if it is whole."""
    if not (checkpoint / CHECKSUMS_FILE).is_file():
        return f"it was not finished (it has no {CHECKSUMS_FILE})"
    if change := next(find_changes(checkpoint), None):
        return " ".join(change)
    random = [f"rng_state_{rank}.pth" for rank in range(num_processes or 0)]
    if num_processes == 1:
        random = ["rng_state.pth"]
    missing = (name for name in random if not (checkpoint / name).is_file())
    return next((f"{name} is missing" for name in missing), None)


def checkpoint_to_resume(arguments: ReaderTrainingArguments) -> Path | None:
    """Find the last whole checkpoint, None at the start; a lost best one is an ArtifactError."""
    checkpoint = last_checkpoint(
        Path(str(arguments.output_dir)), num_processes=arguments.world_size
    )
    if checkpoint is None:
        return None
    logger.info("run: going on from %s", checkpoint)
    best = read_state(checkpoint).best_model_checkpoint
    if arguments.load_best_model_at_end and best and best_checkpoint(checkpoint) is None:
        raise ArtifactError(
            f"{checkpoint} tells of a better one, {best}, that is gone or "
            "damaged: bring it back, or choose another output_dir"
        )
    return checkpoint


def read_state(checkpoint: Path) -> Any:
    """Read the Trainer's state in a checkpoint; if it cannot be read, that is a DamageError."""
    with reading(checkpoint / _STATE_FILE, DamageError):
        return TrainerState.load_from_json(str(checkpoint / _STATE_FILE))


def best_checkpoint(checkpoint: Path) -> Path | None:
    """Find the checkpoint with the best weights up to this one; None if there is none."""
    state = read_state(checkpoint)
    if not state.best_model_checkpoint:
        return None
    best = Path(state.best_model_checkpoint)
    places = (checkpoint.with_name(best.name), best)
    return next((place for place in places if _fault(place) is None), None)


def is_finished(checkpoint: Path) -> bool:
    """Return whether no step is left after a checkpoint: the Trainer would do one more."""
    state = read_state(checkpoint)
    return bool(state.global_step >= state.max_steps)


def load_weights(module: ReaderModule, checkpoint: Path) -> None:
    weights: dict[str, Any] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        weights.update(load_file(path))
    module.load_state_dict(weights)
