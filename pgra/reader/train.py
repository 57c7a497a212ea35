"""Trains the reader: `transformers.Trainer`, wired once.

A run can be stopped at any time and resumed from its last whole checkpoint, bit for bit. The order
of examples depends on the seed alone, not on the evidence, so readers with different numbers of
evidence see the same examples in the same steps.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from pgra.errors import ConfigError, DataError, Stopped
from pgra.models.fid import FusionReader
from pgra.models.segments import GroupCost
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.reader.checkpoints import (
    best_checkpoint,
    checkpoint_to_resume,
    is_finished,
    last_checkpoint,
    load_weights,
    read_state,
    save_reader,
)
from pgra.reader.collate import Collator
from pgra.reader.compiling import compiled_blocks
from pgra.reader.inputs import check_labels
from pgra.reader.losses import LOSSES_FILE, LossLog
from pgra.reader.pools import PooledInputs, collate_pooled
from pgra.reader.predict import Decision
from pgra.reader.record import READER_FOLDER
from pgra.reader.stopping import EarlyStopping, Stopper
from pgra.reader.tokens import TokenizedInputs
from pgra.reader.trainer import DevSet, Measure, ReaderTrainer, Steps, TrainingBar


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
