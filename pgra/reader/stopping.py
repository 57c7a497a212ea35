"""Stops a training so that the same command goes on: at a signal, or when its time is up.

All processes leave after the same step, with a whole checkpoint. Exit codes: 128 + the signal's
number (SIGINT 130, SIGUSR1 138, SIGTERM 143), and 124 when time is up, as of `timeout`.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from transformers import EarlyStoppingCallback
from transformers.trainer_utils import IntervalStrategy

from pgra.errors import Stopped
from pgra.processes import cpu_group

logger = logging.getLogger(__name__)

OUT_OF_TIME = 124
# Slurm sends SIGTERM, and SIGUSR1 where `--signal` asks for it.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# A launcher passes on a signal that the system sent to all processes of the job anyway: what comes
# twice within so many seconds was sent once.
_ECHO_SECONDS = 5.0


class Stopper:
    """Knows whether training is to stop, and when it may.

    Attributes:
        code: Exit code of what asked for a stop; 0 if nothing did.
    """

    def __init__(self, *, world: int = 1, minutes: float | None = None) -> None:
        """Begin to count the time.

        Args:
            world: How many processes must agree.
            minutes: Time for training; None is no limit.
        """
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

    def agree(self, *flags: int) -> list[int]:
        """Give the largest of each flag over all processes; all must call it together."""
        if self._world == 1:
            return list(flags)
        shared = torch.tensor(flags)  # on the CPU: no GPU waits for it
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=cpu_group())
        return [int(flag) for flag in shared]

    @property
    def wish(self) -> int:
        """Give the exit code of a wish to stop, of this process alone; 0 if there is none."""
        if not self.code and self._end is not None and time.monotonic() >= self._end:
            return OUT_OF_TIME
        return self.code

    def end_step(self, args: Any, state: Any, control: Any, *, code: int) -> None:
        """Ask the Trainer to save and leave, if the processes agreed so.

        Args:
            args: The Trainer's arguments.
            state: Its state.
            control: Changed in place.
            code: What they agreed on.
        """
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
        """Leave, once the checkpoint is whole on all processes.

        Raises:
            Stopped: If the processes agreed to stop.
        """
        if not self._agreed or self._awaits_epoch_end:
            return
        if self._world > 1:
            # The first that leaves makes a launcher kill the others.
            dist.barrier(group=cpu_group())
        raise _stopped(self._agreed, f"after step {state.global_step} of {state.max_steps}")

    def after_training(self) -> None:
        """Leave if a signal came when no step was left.

        Raises:
            Stopped: If it came, to any process.
        """
        (code,) = self.agree(self.code)
        if code:
            raise _stopped(code, "after training")


def _stopped(code: int, where: str) -> Stopped:
    reason = "time is up" if code == OUT_OF_TIME else signal.Signals(code - 128).name
    return Stopped(f"stopped ({reason}) {where}; the same command goes on from there", code=code)


class EarlyStopping(EarlyStoppingCallback):  # type: ignore[misc]  # not followed by mypy
    """Transformers' own, whose count of measurements without progress outlives a resume."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take up the count that the checkpoint holds."""
        super().on_train_begin(args, state, control, **kwargs)
        self.early_stopping_patience_counter = early_stopping_count(state.stateful_callbacks)


def early_stopping_count(saved: Any) -> int:
    """Give the measurements without progress that a checkpoint's state tells of."""
    values = (saved or {}).get(EarlyStopping.__name__) or {}
    return int(values.get("attributes", {}).get("early_stopping_patience_counter", 0))
