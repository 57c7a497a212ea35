"""Trains the reader: `transformers.Trainer`, wired once; losses, measurements, the bar.

A run can be stopped at any time and resumed from its last whole checkpoint, bit for bit on a CPU.
The order of examples depends on the seed alone, not on the evidence, so readers with different
numbers of evidence see the same examples in the same steps.
"""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, gather_object
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PrinterCallback, Trainer, TrainerCallback, get_scheduler
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from pgra.artifacts import write_text
from pgra.core import Worker
from pgra.errors import ConfigError, DataError, ModelError, Stopped
from pgra.lm.batching import GroupCost
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.reader.fid import FusionReader
from pgra.reader.inputs import Collator, TokenizedInputs, check_labels
from pgra.reader.predict import Decision, decide, score_inputs
from pgra.reader.rag import PooledInputs, collate_pooled
from pgra.reader.record import READER_FOLDER
from pgra.reader.resume import (
    EarlyStopping,
    Stopper,
    best_checkpoint,
    checkpoint_to_resume,
    is_finished,
    last_checkpoint,
    load_weights,
    read_state,
    save_reader,
)

# The loss of every step, in `losses.jsonl`: the same bytes whether or not a run was stopped.
#
# A loss stays on its device until several are copied at once, so that no step waits for a number.
# One that is none stops the training at the next copy, and on a CPU at once.


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


# The Trainer of a reader: what it measures, records, saves, and when it stops.


Measure = Callable[[Sequence[str], Sequence[str]], Mapping[str, float]]
"""Labels and predictions to metrics by name."""


@dataclass(frozen=True)
class DevSet:
    """What a checkpoint is chosen on, and how it is decided."""

    inputs: TokenizedInputs
    verbalizer: Verbalizer
    measure: Measure
    decision: Decision
    batch_tokens: int


class ReaderTrainer(Trainer):  # type: ignore[misc]  # transformers is not followed by mypy
    """Measures by deciding labels, not by generating text, and keeps every step's loss.

    Attributes:
        dev: What is measured.
        losses: Every step's loss.
    """

    dev: DevSet
    losses: LossLog

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,  # noqa: FBT001, FBT002  the Trainer's own signature
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Give a batch's loss, and note it."""
        ids = inputs.pop("example_ids")  # the reader does not take them
        result = super().compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )
        self.losses.add(result[0] if return_outputs else result, ids)
        return result

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log; mean losses are those of a run that was never stopped.

        The Trainer's own begin anew where a run is resumed.
        """
        if "train_loss" in logs:
            logs["train_loss"] = self.losses.mean()
        if "loss" in logs:
            self.losses.flush()
            logs["loss"] = self.losses.mean(after=last_logged(self.state.log_history))
        super().log(logs, start_time)

    def evaluate(
        self,
        eval_dataset: Any = None,  # noqa: ARG002  the Trainer's own signature
        ignore_keys: list[str] | None = None,  # noqa: ARG002
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Decide the dev set, each example once whatever the number of processes."""
        dev, start = self.dev, time.monotonic()
        worker = Worker(self.accelerator.process_index, self.accelerator.num_processes)
        with (
            self.accelerator.autocast() if self.args.bf16 else nullcontext(),
            torch.compiler.set_stance("force_eager"),  # compiled blocks are for training
        ):
            scores = score_inputs(
                self.model,
                self.processing_class,
                dev.inputs,
                dev.verbalizer,
                decision=dev.decision,
                batch_tokens=dev.batch_tokens,
                progress=not self.args.disable_tqdm,
                worker=worker,
            )
        predictions = [p.label for p in decide(dev.inputs.example_ids, scores, dev.verbalizer)]
        labels = [str(label) for label in dev.inputs.labels]
        metrics = {
            f"{metric_key_prefix}_{k}": v for k, v in dev.measure(labels, predictions).items()
        }
        metrics[f"{metric_key_prefix}_runtime"] = round(time.monotonic() - start, 3)
        self.log(metrics)
        handler, control = self.callback_handler, self.control
        self.control: Any = handler.on_evaluate(self.args, self.state, control, metrics)
        return metrics


_UNUSABLE = (ImportError, ValueError, TypeError, KeyError, RuntimeError, AssertionError)


def check_trainer(arguments: ReaderTrainingArguments) -> None:
    """Make what the Trainer will make, of nothing, so that a value it cannot use is refused early.

    Raises:
        ConfigError: If it cannot be made; names, values and the reason are told.
    """
    for make, names in _MAKERS.items():
        try:
            make(arguments)
        except (
            ImportError,
            ValueError,
            TypeError,
            KeyError,
            RuntimeError,
            AssertionError,
        ) as error:
            values = [getattr(arguments, name, None) for name in names]
            told = [f"{n} {getattr(v, 'value', v)}" for n, v in zip(names, values, strict=True)]
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(f"{', '.join(told)} cannot be used: {reason}") from None


def _make_optimizer(arguments: ReaderTrainingArguments) -> torch.optim.Optimizer:
    kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
    optimizer: torch.optim.Optimizer = kind(torch.nn.Linear(1, 1).parameters(), **options)
    return optimizer


def _make_schedule(arguments: ReaderTrainingArguments) -> None:
    steps = arguments.max_steps if arguments.max_steps > 0 else 1000  # else known by the examples
    get_scheduler(
        arguments.lr_scheduler_type,
        optimizer=torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=arguments.learning_rate),
        num_warmup_steps=arguments.get_warmup_steps(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,
    )


def _make_batches(arguments: ReaderTrainingArguments) -> None:
    DataLoader[int](
        [0],  # type: ignore[arg-type]  # anything with a length will do
        num_workers=arguments.dataloader_num_workers,
        prefetch_factor=arguments.dataloader_prefetch_factor,
        multiprocessing_context=arguments.dataloader_multiprocessing_context,
    )


def _make_compiled(arguments: ReaderTrainingArguments) -> None:
    if arguments.torch_compile:
        backend, mode = arguments.torch_compile_backend, arguments.torch_compile_mode
        DynamoBackend(str(backend).upper())
        torch.compile(torch.nn.Identity(), backend=str(backend), mode=mode)


def _make_checkpointed(arguments: ReaderTrainingArguments) -> None:
    options = {"use_reentrant": False, **(arguments.activation_checkpointing_kwargs or {})}
    checkpoint(torch.nn.Identity(), torch.zeros(1, requires_grad=True), **options)


_MAKERS: dict[Callable[[ReaderTrainingArguments], object], tuple[str, ...]] = {
    _make_optimizer: ("optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon"),
    _make_schedule: ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    _make_batches: ("dataloader_num_workers", "dataloader_multiprocessing_context"),
    _make_compiled: ("torch_compile_backend", "torch_compile_mode"),
    _make_checkpointed: ("activation_checkpointing_kwargs",),
}


class Steps(TrainerCallback):  # type: ignore[misc]
    """What happens at each step, in its order: agree, record, check, save, leave."""

    def __init__(
        self,
        reader: FusionReader,
        losses: LossLog,
        stopper: Stopper,
        *,
        source: Path | None,
        way_out: Callable[[], str],
    ) -> None:
        """Take what acts.

        Args:
            reader: Its weights are checked before they are saved.
            losses: Closed at each step, written before each checkpoint.
            stopper: Says when to leave.
            source: The file of losses beside the checkpoint; None at the start.
            way_out: Words what the message of a broken weight goes on with.
        """
        self.reader = reader
        self.losses = losses
        self.stopper = stopper
        self.source = source
        self.way_out = way_out

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Go on with the losses where the checkpoint stands."""
        self.losses.begin(state.global_step, self.source)

    def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
        """Note the rate before the schedule goes on."""
        self.losses.set_rate(optimizer.param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Agree on what comes next; let no broken number into a checkpoint."""
        self.losses.end_step()
        code, is_broken = self.stopper.agree(self.stopper.wish, int(self.losses.looks_broken))
        self.stopper.end_step(args, state, control, code=code)
        if is_broken or control.should_log or control.should_evaluate or control.should_save:
            self.losses.flush()
        if control.should_save and not all(math.isfinite(t) for t in _sums(self.reader)):
            raise ModelError(
                f"a weight is not a number after step {state.global_step}: {self.way_out()}"
            )

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Write what there is: an epoch's end may be measured and saved."""
        self.losses.flush()
        self.stopper.end_epoch(control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Make the checkpoint a T5 folder by itself, then leave if that was asked for."""
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            self.reader.t5.config.save_pretrained(folder)
        self.stopper.after_save(state)


class TrainingBar(TrainerCallback):  # type: ignore[misc]
    """Shows steps and loss on one line; the Trainer's own bar prints its log between."""

    def __init__(self, title: str, *, progress: bool = True) -> None:
        """Take what stands before the bar; only the main process shows one, and none if told so."""
        self._title = title
        self._progress = progress
        self._bar = tqdm(disable=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Open it where the run stands."""
        self._bar = tqdm(
            total=state.max_steps,
            initial=state.global_step,
            desc=self._title,
            unit="step",
            disable=not (self._progress and state.is_world_process_zero),
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Go on by one."""
        self._bar.update(state.global_step - self._bar.n)

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        """Show the mean loss since the last time."""
        if "loss" in logs:
            self._bar.set_postfix(loss=f"{float(logs['loss']):.3f}")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Write what was measured on the dev set above the bar."""
        told = ", ".join(
            f"{name.removeprefix('eval_')} {value:.4f}"
            for name, value in kwargs["metrics"].items()
            if name.startswith("eval_") and not name.endswith("_runtime")
        )
        if not self._bar.disable:
            self._bar.write(f"step {state.global_step}: dev {told}", file=sys.stderr)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Close it, also after a training that failed: its error is then the last line."""
        self._bar.close()


def _sums(reader: FusionReader) -> list[float]:
    """Sum each tensor: NaN and infinity survive a sum. One copy from the device for all."""
    parts = [parameter.detach().float().sum() for parameter in reader.parameters()]
    totals: list[float] = torch.stack(parts).tolist()
    return totals


def set_dropout(reader: FusionReader, rate: float) -> None:
    """Set a T5's dropout, which its configuration fixed when it was loaded."""
    for module in reader.t5.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = rate
        elif isinstance(getattr(module, "dropout", None), float):  # attention keeps the bare rate
            module.dropout = rate
        config: Any = getattr(module, "config", None)
        if hasattr(config, "dropout_rate"):
            config.dropout_rate = rate


# `--torch_compile`, an encoder block at a time.
#
# The Trainer compiles a model whole. A reader's whole graph differs with each number of groups in a
# batch, and was compiled anew for each, for minutes. Its encoder's blocks are alike, whatever the
# batch: one of them is compiled once, for any shape ("regional compilation" in PyTorch's recipes).


@contextmanager
def compiled_blocks(
    reader: FusionReader, arguments: ReaderTrainingArguments, accelerator: Accelerator
) -> Iterator[None]:
    """Train with compiled blocks, where `--torch_compile` asks for it.

    Args:
        reader: Its modules and weights keep their names; afterwards it is as it was.
        arguments: Say with what backend and in what mode.
        accelerator: Made by the Trainer; it then compiles nothing itself.
    """
    blocks: list[Any] = []
    if arguments.torch_compile:
        accelerator.state.dynamo_plugin.backend = DynamoBackend.NO
        blocks = list(reader.t5.get_encoder().block)
    for block in blocks:
        block.compile(
            dynamic=True,
            backend=arguments.torch_compile_backend,
            mode=arguments.torch_compile_mode,
        )
    try:
        yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None


@dataclass(frozen=True)
class TrainResult:
    """What a training run gave.

    Attributes:
        folder: The best reader and its tokenizer: a plain T5 folder.
        steps: Steps done, those before a resume included.
        best_step: Step of the best measurement on the dev set; None without measurements.
        best_metric: Its value.
        train_loss: Mean loss over all steps.
        seconds: Wall-clock time of this call.
        history: What was logged, by step.
    """

    folder: Path
    steps: int
    best_step: int | None
    best_metric: float | None
    train_loss: float
    seconds: float
    history: list[dict[str, float]]


def train_reader(
    reader: FusionReader,
    tokenizer: Any,
    train: TokenizedInputs,
    dev: TokenizedInputs,
    *,
    verbalizer: Verbalizer,
    measure: Measure,
    metric: str,
    arguments: ReaderTrainingArguments,
    decision: Decision = Decision(),  # noqa: B008 (frozen)
    batch_tokens: int = 8192,
    callbacks: Sequence[TrainerCallback] = (),
) -> TrainResult:
    """Train a reader and write the one that is best on the dev set.

    Args:
        reader: Trained in place; holds the best weights afterwards.
        tokenizer: The reader's.
        train: Examples to learn from, with labels.
        dev: Examples to choose a checkpoint on, with labels; never the test set.
        verbalizer: Gives each label its words.
        measure: Gives metrics; `metric` must be among them.
        metric: The metric that chooses the checkpoint, unless `metric_for_best_model` names one.
        arguments: The Trainer's. `resume_from_checkpoint` is a folder, or "true" for the last.
        decision: How dev examples are decided.
        batch_tokens: Most tokens of a batch of dev examples.
        callbacks: Further ones for the Trainer.

    Returns:
        The result, on every process; files are written by the main one.

    Raises:
        ArtifactError: If the output folder holds another run's checkpoints, or none to resume from.
        ConfigError: If there are too few examples, or the verbalizer does not suit the tokenizer.
        DataError: If an example has no known label, or a label no training example.
        ModelError: If the loss or a weight stops being a number.
        Stopped: If a signal or the time limit asked for it; the same call with
            `resume_from_checkpoint="true"` then goes on.
    """
    resume = checkpoint_to_resume(arguments)
    _check(train, dev, verbalizer, arguments)
    verbalizer.audit(tokenizer, decode=decision.decode)
    arguments.choose_metric(metric)
    start = time.monotonic()
    trainer = ReaderTrainer(
        model=reader,
        args=arguments,
        train_dataset=train,
        eval_dataset=dev,
        data_collator=_collator(train, tokenizer.pad_token_id, arguments),
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )
    for stock in (DEFAULT_PROGRESS_CALLBACK, PrinterCallback):
        trainer.remove_callback(stock)
    trainer.dev = DevSet(dev, verbalizer, measure, decision, batch_tokens)
    trainer.losses = LossLog(
        Path(str(arguments.output_dir)) / LOSSES_FILE,
        trainer.accelerator,
        way_out=lambda: _last_good(arguments),
    )
    stopper = Stopper(world=arguments.world_size, minutes=arguments.max_train_minutes)
    with stopper.listening():
        with compiled_blocks(reader, arguments, trainer.accelerator):
            _go_on(trainer, reader, stopper, resume)
        folder = trainer.losses.path.with_name(READER_FOLDER)
        if trainer.is_world_process_zero():
            save_reader(reader, tokenizer, folder)
        trainer.accelerator.wait_for_everyone()
        stopper.after_training()
    return TrainResult(
        folder=folder,
        steps=trainer.state.global_step,
        best_step=trainer.state.best_global_step,
        best_metric=trainer.state.best_metric,
        train_loss=trainer.losses.mean(),
        seconds=time.monotonic() - start,
        history=trainer.state.log_history,
    )


def _collator(
    train: TokenizedInputs, pad_token_id: int, arguments: ReaderTrainingArguments
) -> Callable[[Any], dict[str, Any]]:
    cost = GroupCost.on(arguments.device, is_training=True)
    if isinstance(train, PooledInputs):
        return partial(collate_pooled, pad_token_id=pad_token_id, cost=cost)
    return Collator(pad_token_id, cost).as_inputs


def _go_on(
    trainer: ReaderTrainer, reader: FusionReader, stopper: Stopper, resume: Path | None
) -> None:
    """Train from a checkpoint or the start; one of the last step only gives its best weights."""
    arguments, losses = trainer.args, trainer.losses
    source = None if resume is None else resume.parent / LOSSES_FILE
    if resume is not None and is_finished(resume, arguments):
        trainer.state = read_state(resume)
        losses.begin(trainer.state.global_step, source)
        best = best_checkpoint(resume) if arguments.load_best_model_at_end else None
        load_weights(reader, best or resume)
        return
    if arguments.early_stopping_patience is not None:
        patience, threshold = arguments.early_stopping_patience, arguments.early_stopping_threshold
        trainer.add_callback(EarlyStopping(patience, threshold))
    trainer.add_callback(
        Steps(reader, losses, stopper, source=source, way_out=lambda: _last_good(arguments))
    )
    bar = TrainingBar("train", progress=not arguments.disable_tqdm)
    trainer.add_callback(bar)
    try:
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    except Stopped:  # a tracker's run ends here
        trainer.callback_handler.on_train_end(arguments, trainer.state, trainer.control)
        raise
    finally:
        bar.close()


def _check(
    train: TokenizedInputs,
    dev: TokenizedInputs,
    verbalizer: Verbalizer,
    arguments: ReaderTrainingArguments,
) -> None:
    check_labels(train, verbalizer.labels)
    check_labels(dev, verbalizer.labels)
    check_classes([str(label) for label in train.labels], verbalizer.labels)
    if not dev:
        raise DataError("there is no dev example to choose a checkpoint on")
    check_batches(len(train), arguments)


def check_classes(present: Sequence[str], known: Sequence[str]) -> None:
    """Refuse to train on a task one of whose labels no example shows.

    Args:
        present: Each training example's label.
        known: The task's labels.

    Raises:
        DataError: If a label is absent, with its name.
    """
    absent = [label for label in known if label not in set(present)]
    if absent:
        raise DataError(
            f"no training example has label {', '.join(map(repr, absent))} (of {len(present)} "
            "examples): add some, raise max_train_samples or lower num_exemplars, or take the "
            "label out of the task's verbalizer"
        )


def check_batches(num_train: int, arguments: ReaderTrainingArguments) -> None:
    """Refuse batches that the training set does not fill once.

    Raises:
        ConfigError: If it does not, with the numbers.
    """
    batch = arguments.per_device_train_batch_size * arguments.world_size
    if num_train < (batch if arguments.dataloader_drop_last else 1):
        raise ConfigError(
            f"per_device_train_batch_size ({arguments.per_device_train_batch_size}) times "
            f"{arguments.world_size} processes exceeds the {num_train} training examples: lower it"
        )


def _last_good(arguments: ReaderTrainingArguments) -> str:
    last = last_checkpoint(Path(str(arguments.output_dir)))
    found = "there is no checkpoint yet." if last is None else f"the last good one is {last}."
    return f"{found} Lower the learning rate ({arguments.learning_rate})"
