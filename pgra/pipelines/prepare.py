"""What runs that differ only in their training share: the stages before it, done once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pgra.checks import choose
from pgra.config import PgraArguments
from pgra.errors import ConfigError
from pgra.evaluation.metrics import LABEL_METRICS
from pgra.models.fid import FusionReader
from pgra.models.loading import ModelSource, choose_device, find_model, load_tokenizer
from pgra.models.lora import check_adapters
from pgra.pipelines.found import Found
from pgra.pipelines.inputs import label_decision, read_inputs, task_verbalizer
from pgra.pipelines.pgra import find_evidence, open_stages, read_task
from pgra.pipelines.run_folder import (
    check_same_checkpoint,
    check_same_run,
    check_writable,
    run_identity,
)
from pgra.pipelines.trained import Trained
from pgra.processes import Processes
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.reader.tokens import TokenizedInputs
from pgra.reader.train import check_batches, check_classes
from pgra.reader.trainer import check_trainer
from pgra.types import Json


@dataclass(frozen=True)
class Prepared:
    """What runs that differ only in their training share: the stages before it, done once.

    Attributes:
        args: Everything before the reader's training.
        found: The examples with their evidence.
        source: The reader that training starts from.
        tokenizer: Its tokenizer.
        processes: Who shares the work.
    """

    args: PgraArguments
    found: Found
    source: ModelSource
    tokenizer: Any
    processes: Processes

    @property
    def verbalizer(self) -> Verbalizer:
        """Give the reader's words and template."""
        return task_verbalizer(self.found.task, self.args.reader)

    def trained(self, reader: FusionReader, seed: int) -> Trained:
        """Give a reader with what it needs to decide."""
        decision = label_decision(self.args.reader)
        return Trained(reader, self.tokenizer, self.verbalizer, decision, seed)

    def open_reader(self, trained: Path | None = None) -> FusionReader:
        """Load the reader that training starts from, or a trained one from its folder."""
        return FusionReader.from_name(str(trained or self.args.reader.model_name_or_path))

    def inputs(self, split: str) -> TokenizedInputs:
        """Give what the reader reads of a split."""
        return read_inputs(self.found, split, self.args, self.tokenizer, self.processes)


def prepare_runs(
    args: PgraArguments,
    trainings: Sequence[ReaderTrainingArguments],
    processes: Processes = Processes(),  # noqa: B008 (frozen)
) -> Prepared:
    """Run the stages before the reader, once what can be refused was refused.

    Args:
        args: Everything before the reader's training.
        trainings: Of all runs that will follow, as far as they are known.
        processes: Who shares the work.

    Raises:
        ArtifactError: If a run's folder holds another run.
        PgraError: As each stage says.
    """
    for training in trainings:
        check_writable(Path(str(training.output_dir)))
        check_training(args, training)
    source = find_model(args.reader.model_name_or_path)
    check_adapters(args.reader, source)
    prepared = Prepared(args, read_task(args), source, load_tokenizer(source), processes)
    found = prepared.found
    prepared.verbalizer.audit(prepared.tokenizer, decode=args.reader.decode)
    for training in trainings:
        check_batches(len(found.splits.train), training)
    check_classes([str(example.label) for example in found.splits.train], found.task.labels)
    open_stages(found, args)
    for training in trainings:
        asked = run_identity(args, training, found, source)
        check_run(Path(str(training.output_dir)), asked, training, is_whole=False)
    find_evidence(found, args, processes)  # long
    return prepared


def check_run(
    folder: Path,
    identity: Mapping[str, Json],
    training: ReaderTrainingArguments,
    *,
    is_whole: bool = True,
) -> None:
    """Refuse another run's folder, and another run's checkpoint.

    Raises:
        ArtifactError: If it is; the first difference is named.
    """
    check_same_run(folder, identity, is_whole=is_whole)
    asked = str(training.resume_from_checkpoint or "")
    if asked.lower() not in ("", "true", "false"):
        check_same_checkpoint(Path(asked), identity, is_whole=is_whole)


def check_training(args: PgraArguments, training: ReaderTrainingArguments) -> None:
    """Refuse another device for the training, what cannot be made, and uploads of every checkpoint.

    Raises:
        ConfigError: If it is asked for.
    """
    _check_device(args.runtime.device, training)
    check_trainer(training)
    if training.metric_for_best_model is not None:
        name = training.metric_for_best_model.removeprefix("eval_")
        choose("metric_for_best_model", name, ["loss", *LABEL_METRICS])
    if training.push_to_hub:
        raise ConfigError(
            "push_to_hub would have the Trainer upload every checkpoint: take it out with "
            "pgra.pipelines.publish.take_target, and push the finished run with push_run"
        )


def _check_device(name: str, training: ReaderTrainingArguments) -> None:
    """Refuse to retrieve on one device and train on another."""
    asked = choose_device(name)
    if (asked.type, asked.index or 0) != (training.device.type, training.device.index or 0):
        raise ConfigError(
            f"device is '{name}', but the Trainer uses {training.device}: choose a GPU by "
            "CUDA_VISIBLE_DEVICES, or the CPU by --device cpu --use_cpu"
        )
