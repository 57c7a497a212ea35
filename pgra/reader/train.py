"""Trains the reader: `transformers.Trainer`, wired once.

A run can be stopped at any time and resumed from its last whole checkpoint, bit for bit. The order
of examples depends on the seed alone, not on the evidence, so readers with different numbers of
evidence see the same examples in the same steps.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from pgra.errors import ConfigError, DataError, ModelError
from pgra.models.fid import FusionReader
from pgra.models.segments import GroupCost
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.reader.checkpoints import checkpoint_to_resume, last_checkpoint, save_reader
from pgra.reader.collate import Collator
from pgra.reader.inputs import check_labels
from pgra.reader.predict import Decision, decide, score_inputs
from pgra.reader.tokens import TokenizedInputs
from pgra.types import Worker

logger = logging.getLogger(__name__)

READER_FOLDER = "reader"
Measure = Callable[[Sequence[str], Sequence[str]], Mapping[str, float]]
"""Labels and predictions to metrics by name."""


@dataclass(frozen=True)
class TrainResult:
    """What a training run gave.

    Attributes:
        folder: The best reader and its tokenizer: a plain T5 folder.
        steps: Steps done, those before a resume included.
        best_step: Step of the best measurement on the dev set; None without measurements.
        best_metric: Its value.
        train_loss: Mean loss over the steps of this call.
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
        DataError: If an example has no known label.
        ModelError: If the loss or a weight stops being a number.
    """
    resume = checkpoint_to_resume(arguments)
    _check(train, dev, verbalizer, arguments)
    verbalizer.audit(tokenizer, decode=decision.decode)
    if arguments.metric_for_best_model in (None, "loss"):
        arguments.metric_for_best_model, arguments.greater_is_better = metric, True
    trainer = _ReaderTrainer(
        model=reader,
        args=arguments,
        train_dataset=train,
        eval_dataset=dev,
        data_collator=Collator(tokenizer.pad_token_id, GroupCost.on(arguments.device)).as_inputs,
        processing_class=tokenizer,
        callbacks=[_KeepWhole(reader), *callbacks],
    )
    trainer.dev = _DevSet(dev, verbalizer, measure, decision, batch_tokens)
    start = time.monotonic()
    outcome = trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    folder = Path(str(arguments.output_dir)) / READER_FOLDER
    if trainer.is_world_process_zero():
        save_reader(reader, tokenizer, folder)
    trainer.accelerator.wait_for_everyone()
    return TrainResult(
        folder=folder,
        steps=outcome.global_step,
        best_step=trainer.state.best_global_step,
        best_metric=trainer.state.best_metric,
        train_loss=outcome.training_loss,
        seconds=time.monotonic() - start,
        history=trainer.state.log_history,
    )


def _check(
    train: TokenizedInputs,
    dev: TokenizedInputs,
    verbalizer: Verbalizer,
    arguments: ReaderTrainingArguments,
) -> None:
    check_labels(train, verbalizer.labels)
    check_labels(dev, verbalizer.labels)
    if not dev:
        raise DataError("there is no dev example to choose a checkpoint on")
    check_batches(len(train), arguments)


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


@dataclass(frozen=True)
class _DevSet:
    inputs: TokenizedInputs
    verbalizer: Verbalizer
    measure: Measure
    decision: Decision
    batch_tokens: int


class _ReaderTrainer(Trainer):  # type: ignore[misc]  # transformers is not followed by mypy
    """Measures by deciding labels, not by generating text, and stops at a loss that is none."""

    dev: _DevSet

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,  # noqa: FBT001, FBT002  the Trainer's own signature
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        inputs = {name: value for name, value in inputs.items() if name != "example_ids"}
        result = super().compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )
        loss = result[0] if return_outputs else result
        if not torch.isfinite(loss):
            raise ModelError(
                f"the loss is {loss.item()} at step {self.state.global_step + 1}: "
                f"{_last_good(self.args)} Lower the learning rate ({self.args.learning_rate})"
            )
        return result

    def evaluate(
        self,
        eval_dataset: Any = None,  # noqa: ARG002  the Trainer's own signature
        ignore_keys: list[str] | None = None,  # noqa: ARG002
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        dev, start = self.dev, time.monotonic()
        worker = Worker(self.accelerator.process_index, self.accelerator.num_processes)
        with self.accelerator.autocast() if self.args.bf16 else nullcontext():
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


class _KeepWhole(TrainerCallback):  # type: ignore[misc]
    """Lets no broken weights into a checkpoint, and makes each one a T5 folder by itself."""

    def __init__(self, reader: FusionReader) -> None:
        self.reader = reader

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_save and not all(
            math.isfinite(total) for total in _sums(self.reader.parameters())
        ):
            raise ModelError(
                f"a weight is not a number after step {state.global_step}: {_last_good(args)} "
                f"Lower the learning rate ({args.learning_rate})"
            )

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            self.reader.t5.config.save_pretrained(folder)


def _sums(parameters: Any) -> list[float]:
    """Sum each tensor: NaN and infinity survive a sum. One copy from the device for all."""
    totals: list[float] = torch.stack([p.detach().float().sum() for p in parameters]).tolist()
    return totals


def _last_good(arguments: Any) -> str:
    last = last_checkpoint(Path(arguments.output_dir))
    return "there is no checkpoint yet." if last is None else f"the last good one is {last}."
