"""Trains any model that has a loss, by `transformers.Trainer`.

Two calls, from general to special:

    fit(model, rows, arguments, folder=..., evaluate=...)    any `Trainable`: a causal LM too
    train_reader(classifier, train, dev, ...)                a `T5Classifier`: measured by labels

A run can be stopped at any time (signals, `max_train_minutes`) and resumes from its last whole
checkpoint, bit for bit on a CPU. The order of examples depends on the seed alone, not on the
evidence.

    OUTPUT_DIR/losses.jsonl      every step's loss: the same bytes whether or not it was stopped
    OUTPUT_DIR/checkpoint-N/     the Trainer's, each a plain model folder too
"""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from pgra.artifacts import (
    CHECKSUMS_FILE,
    replace_folder,
    write_checksums,
    write_text,
)
from pgra.core import Context, Worker, wait_for_all
from pgra.errors import (
    ConfigError,
    ModelError,
    Stopped,
)
from pgra.progress import Bar
from pgra.reader import READER_FOLDER
from pgra.reader.arguments import LOSSES_FILE
from pgra.reader.calibrate import decide
from pgra.reader.module import ReaderModule, Trainable
from pgra.reader.predict import T5Classifier
from pgra.reader.resume import (
    Stopper,
    best_checkpoint,
    checkpoint_to_resume,
    is_finished,
    last_checkpoint,
    load_weights,
    read_state,
)
from pgra.reader.trainer_arguments import ReaderTrainingArguments

logger = logging.getLogger(__name__)

_CHUNK = 50  # steps copied from the device at once, and at most lost after a loss that is none


@dataclass(frozen=True)
class TrainResult:
    """The outcome of a training: the best model's folder, and numbers over all its resumed parts.

    `best_step` is that of the best measurement on the dev set, None without measurements;
    `train_loss` the mean over all steps, NaN without any; `seconds` only of this call.
    """

    folder: Path
    steps: int
    best_step: int | None
    best_metric: float | None
    train_loss: float
    seconds: float
    history: list[dict[str, float]]


def train_reader(
    classifier: T5Classifier,
    train: Any,
    dev: Any,
    *,
    measure: Callable[[Sequence[str], Sequence[str]], Mapping[str, float]],
    metric: str,
    arguments: ReaderTrainingArguments,
    callbacks: Sequence[TrainerCallback] = (),
) -> TrainResult:
    """Train a classifier in place and write the best on the dev set to the run's `reader`.

    `train` has rows for the collator; `dev` has `example_ids` and `labels` too, and is never the
    test set. `measure` turns true labels and predictions into metrics, and `metric` chooses the
    checkpoint, unless `metric_for_best_model` names another. Errors as of `fit`.
    """
    arguments.choose_metric(metric)

    def evaluate(context: Context) -> Mapping[str, float]:
        scores = classifier.score(dev, context)
        decided = [p.label for p in decide(dev.example_ids, scores, classifier.labels)]
        return measure([str(label) for label in dev.labels], decided)

    folder = Path(str(arguments.output_dir)) / READER_FOLDER
    return fit(classifier, train, arguments, folder=folder, evaluate=evaluate, callbacks=callbacks)


def fit(
    trainable: Trainable,
    rows: Any,
    arguments: ReaderTrainingArguments,
    *,
    folder: Path,
    evaluate: Callable[[Context], Mapping[str, float]] | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> TrainResult:
    """Train a model, resuming where an earlier call was stopped, and write it.

    Args:
        trainable: Trained in place; holds the best weights afterwards, or the last where nothing
            is measured.
        rows: The training set: has `len`, gives rows by number.
        arguments: The Trainer's; with `max_steps` 0 the model is written as it is.
        folder: Where the main process writes the finished model.
        evaluate: Measures the model as it is, each example once whatever the number of processes;
            None where `eval_strategy` is "no".
        callbacks: Further ones for the Trainer.

    Raises:
        ArtifactError: If the run's best checkpoint is lost.
        ConfigError: If there are too few examples.
        ModelError: If the loss or a weight stops being a number.
        Stopped: If a signal or the time limit asked for it; the same call then resumes.
    """
    check_batches(len(rows), arguments)
    resume = checkpoint_to_resume(arguments)
    start = time.monotonic()
    trainable.module.precision = arguments.precision
    trainer = MeasuredTrainer(
        model=trainable.module,
        args=arguments,
        train_dataset=rows,
        eval_dataset=[],  # `evaluate` has its own
        data_collator=trainable.collator(arguments.device),
        processing_class=trainable.tokenizer,
        callbacks=list(callbacks),
    )
    for stock in (DEFAULT_PROGRESS_CALLBACK, PrinterCallback):
        trainer.remove_callback(stock)
    trainer.measure = evaluate
    trainer.stopper = Stopper(world=arguments.world_size, minutes=arguments.max_train_minutes)
    trainer.losses = LossLog(
        Path(str(arguments.output_dir)) / LOSSES_FILE,
        trainer.accelerator,
        way_out=lambda: _last_good(arguments),
    )
    with trainer.stopper.listening():
        with trainable.module.rounding():
            _go_on(trainer, trainable.module, resume)
        if trainer.is_world_process_zero():
            replace_folder(folder, trainable.save)
        if arguments.world_size > 1:
            wait_for_all()
        trainer.stopper.after_training()
    if "wandb" in (arguments.report_to or ()):  # or the next training would join its run
        sys.modules["wandb"].finish()
    return TrainResult(
        folder=folder,
        steps=trainer.state.global_step,
        best_step=trainer.state.best_global_step,
        best_metric=trainer.state.best_metric,
        train_loss=trainer.losses.mean(),
        seconds=time.monotonic() - start,
        history=trainer.state.log_history,
    )


def _go_on(trainer: "MeasuredTrainer", module: ReaderModule, resume: Path | None) -> None:
    """Train from a checkpoint or the start; one of the last step only gives its best weights."""
    arguments = trainer.args
    if arguments.max_steps == 0:  # the Trainer would take that for num_train_epochs
        trainer.losses.begin(0, None)
        return
    source = None if resume is None else resume / LOSSES_FILE
    if resume is not None and is_finished(resume):
        trainer.state = read_state(resume)
        trainer.losses.begin(trainer.state.global_step, source)
        best = best_checkpoint(resume) if arguments.load_best_model_at_end else None
        load_weights(module, best or resume)
        return
    trainer.add_callback(Steps(trainer, module, source))
    if trainer.is_world_process_zero():
        logger.info(
            "training: %d examples a step (%d processes, %d at once on each) in %s",
            *(arguments.examples_per_step, arguments.world_size),
            *(arguments.per_device_train_batch_size, arguments.precision),
        )
    bar = TrainingBar()
    if not arguments.disable_tqdm:
        trainer.add_callback(bar)
    try:
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    except Stopped:  # a tracker's run ends here
        trainer.callback_handler.on_train_end(arguments, trainer.state, trainer.control)
        raise
    finally:
        bar.close()


def _last_good(arguments: ReaderTrainingArguments) -> str:
    last = last_checkpoint(Path(str(arguments.output_dir)))
    found = "there is no checkpoint yet." if last is None else f"the last good one is {last}."
    return f"{found} Lower the learning rate ({arguments.learning_rate})"


def check_batches(num_train: int, arguments: ReaderTrainingArguments) -> None:
    """Refuse, with a ConfigError, batches that the training set does not fill once."""
    batch = arguments.per_device_train_batch_size * arguments.world_size
    if num_train < (batch if arguments.dataloader_drop_last else 1):
        raise ConfigError(
            f"per_device_train_batch_size ({arguments.per_device_train_batch_size}) times "
            f"{arguments.world_size} processes exceeds the {num_train} training examples: lower it"
        )


# The loss of every step.
#
# A loss stays on its device until several are copied at once, so that no step waits for a number.
# One that is none stops the training at the next copy.


@dataclass(frozen=True)
class LossRecord:
    """One step's loss (steps from 1), over the target tokens of all processes and batches."""

    step: int
    loss: float
    learning_rate: float


class LossLog:
    """Keeps every step's loss and writes them by the chunk.

    Each process adds its part of each accumulated batch; all must call `end_step` and `flush`
    together. The main process writes. `way_out` ends the message of a broken loss.
    """

    def __init__(self, path: Path, accelerator: Any, *, way_out: Callable[[], str]) -> None:
        """Begin empty; the Trainer's accelerator gathers over the processes."""
        self.path = path
        self.records: list[LossRecord] = []
        self.way_out = way_out
        self._accelerator = accelerator
        self._parts: list[Tensor] = []  # of the running step
        self._rate = 0.0
        self._pending: list[tuple[Tensor, float]] = []  # steps, still on the device

    def begin(self, step: int, source: Path | None) -> None:
        """Cut back to `step`, the checkpoint's, by its file of losses; None at the start."""
        self.records = read_losses(source, step) if source is not None else []
        if len(self.records) < step:
            logger.warning(
                "%s lacks losses up to step %d: the file goes on without them", source, step
            )
        self._first = step + 1  # of the pending ones
        if self._accelerator.is_main_process:
            write_text(self.path, _lines(self.records))

    def add(self, loss: Tensor) -> None:
        """Take this process's part of one accumulated batch, as the Trainer trains on it, ().

        Summed over its target tokens, divided by those of all processes and accumulated batches,
        times the number of processes.
        """
        self._parts.append(loss.detach())

    def set_rate(self, learning_rate: float) -> None:
        """Take the running step's learning rate, before the scheduler changes it."""
        self._rate = float(learning_rate)

    def end_step(self) -> None:
        self._pending.append((torch.stack(self._parts).float().sum(), self._rate))
        self._parts = []
        if len(self._pending) >= _CHUNK:
            self.flush()

    def flush(self) -> None:
        """Gather and write the new losses; one that is no number is a ModelError."""
        if not self._pending:
            return
        pending, first = self._pending, self._first
        parts = torch.stack([total for total, _ in pending])  # (n,)
        # Gathered and then summed in the order of processes: a sum over the wire would depend on
        # how many steps are sent at once, and so on where a run was stopped.
        world = self._accelerator.num_processes
        shares = self._accelerator.gather(parts).reshape(world, -1).double().cpu()  # (W, n)
        losses = shares.mean(dim=0).tolist()
        broken = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
        fresh = [
            LossRecord(first + i, loss, pending[i][1]) for i, loss in enumerate(losses[:broken])
        ]
        self.records += fresh
        if self._accelerator.is_main_process:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_lines(fresh))
        if broken is not None:
            step = first + broken
            raise ModelError(f"the loss is {losses[broken]} at step {step}: {self.way_out()}")
        self._pending, self._first = [], first + len(losses)

    def mean(self, after: int = 0) -> float:
        """Return the mean loss of the written steps after a step."""
        losses = [record.loss for record in self.records if record.step > after]
        return math.fsum(losses) / len(losses) if losses else math.nan


def read_losses(path: Path, up_to: int) -> list[LossRecord]:
    """Read the losses of steps 1 to `up_to`, as far as there are whole lines."""
    found: list[LossRecord] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            record = LossRecord(**json.loads(line))
        except (ValueError, TypeError):
            break
        if record.step > up_to:
            break
        found.append(record)
    return found


def _lines(records: Iterable[LossRecord]) -> str:
    """Write records; a float's repr is exact."""
    return "".join(json.dumps(asdict(record)) + "\n" for record in records)


# The Trainer: what it measures, records, saves, and when it stops.


class MeasuredTrainer(Trainer):  # type: ignore[misc]  # transformers is not followed by mypy
    """Measures by `measure`, not by generating text, and keeps every step's loss."""

    measure: Callable[[Context], Mapping[str, float]] | None
    losses: LossLog
    stopper: Stopper

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,  # noqa: FBT001, FBT002  the Trainer's own signature
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        result = super().compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )
        self.losses.add(result[0] if return_outputs else result)
        return result

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log; mean losses are those of a run that was never stopped."""
        if "train_loss" in logs:
            logs["train_loss"] = self.losses.mean()
        if "loss" in logs:
            self.losses.flush()
            logged = [line["step"] for line in self.state.log_history if "loss" in line]
            logs["loss"] = self.losses.mean(after=max(logged, default=0))
        super().log(logs, start_time)

    def evaluate(
        self,
        eval_dataset: Any = None,  # noqa: ARG002  the Trainer's own signature
        ignore_keys: list[str] | None = None,  # noqa: ARG002
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        assert self.measure is not None  # or nothing asks for it
        start = time.monotonic()
        worker = Worker(self.accelerator.process_index, self.accelerator.num_processes)
        with self.model.deciding():
            measured = self.measure(Context(worker=worker, progress=not self.args.disable_tqdm))
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in measured.items()}
        metrics[f"{metric_key_prefix}_runtime"] = round(time.monotonic() - start, 3)
        self.log(metrics)
        handler, control = self.callback_handler, self.control
        self.control: Any = handler.on_evaluate(self.args, self.state, control, metrics)
        return metrics


class Steps(TrainerCallback):  # type: ignore[misc]
    """What happens at each step, in its order: agree, record, check, save, leave."""

    def __init__(self, trainer: MeasuredTrainer, module: ReaderModule, source: Path | None) -> None:
        self.losses, self.stopper = trainer.losses, trainer.stopper
        self.module, self.source = module, source
        self._saved = -1  # the step of the last checkpoint

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        self.losses.begin(state.global_step, self.source)

    def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
        """Keep the rate before the scheduler changes it."""
        self.losses.set_rate(optimizer.param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Agree on what comes next; let no broken number into a checkpoint."""
        self.losses.end_step()
        self.stopper.end_step(args, state, control, code=self.stopper.agree(self.stopper.wish))
        if control.should_log or control.should_evaluate or control.should_save:
            self.losses.flush()
        if control.should_save:
            # NaN and infinity survive a sum. One copy from the device for all.
            sums = [p.detach().float().sum() for p in self.module.parameters() if p.requires_grad]
            if not torch.stack(sums).isfinite().all():
                raise ModelError(
                    f"a weight is not a number after step {state.global_step}: "
                    f"{self.losses.way_out()}"
                )

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the losses: an epoch's end may be measured and saved."""
        self.losses.flush()
        self.stopper.end_epoch(control)
        if control.should_save and self._saved == state.global_step and args.should_save:
            # The same files are written once more.
            (self._folder(args, state) / CHECKSUMS_FILE).unlink(missing_ok=True)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Make the checkpoint a model folder by itself, then leave if that was asked for."""
        folder, self._saved = self._folder(args, state), state.global_step
        if args.world_size > 1:
            wait_for_all()  # each process wrote its random state
        if state.is_world_process_zero and folder.is_dir():
            self.module.model.config.save_pretrained(folder)
            write_text(folder / LOSSES_FILE, _lines(self.losses.records))
            write_checksums(folder)
        self.stopper.after_save(state)

    def _folder(self, args: Any, state: Any) -> Path:
        return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


class TrainingBar(TrainerCallback):  # type: ignore[misc]
    """A bar with the loss on its line, in the main process; the stock one prints its log."""

    def __init__(self) -> None:
        self.bar: Bar | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if state.is_world_process_zero:
            done, steps = state.global_step, state.max_steps
            self.bar = Bar(total=steps, initial=done, desc="train", unit="step")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.bar is not None:
            self.bar.update()

    def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
        """Show the mean loss of the steps since the line before."""
        if self.bar is not None and "loss" in logs:
            self.bar.set_postfix(loss=f"{logs['loss']:.3f}", refresh=False)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Write what was measured on the dev set above the bar."""
        measured = ", ".join(
            f"{name.removeprefix('eval_')} {value:.4f}"
            for name, value in kwargs["metrics"].items()
            if name.startswith("eval_") and not name.endswith("_runtime")
        )
        if self.bar is not None:
            self.bar.tell(f"step {state.global_step}: dev {measured}")

    def close(self) -> None:
        """Close it, also after a training that failed: its error is then the last line."""
        if self.bar is not None:
            self.bar.close()
