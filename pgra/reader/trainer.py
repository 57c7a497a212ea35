"""The Trainer of a reader: what it measures, records, saves, and when it stops."""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DynamoBackend
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import Trainer, TrainerCallback, get_scheduler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from pgra.errors import ConfigError, ModelError
from pgra.models.fid import FusionReader
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.reader.losses import LossLog, last_logged
from pgra.reader.predict import Decision, decide, score_inputs
from pgra.reader.stopping import Stopper
from pgra.reader.tokens import TokenizedInputs
from pgra.types import Worker

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
