"""One run: a reader trained on a task's evidence and measured, in a folder that can be resumed.

runs/NAME/run.json           what determines the run; the same command goes on, another is refused
runs/NAME/arguments.json     all resolved arguments
runs/NAME/prompt.txt         the prompt as the LM sees it
runs/NAME/losses.jsonl       the loss and the learning rate of every step
runs/NAME/checkpoint-N/      the Trainer's
runs/NAME/training.json      what training gave on the dev set
runs/NAME/reader/            the best reader: a plain T5 folder with pgra.json and its model card
runs/NAME/predictions.jsonl, metrics.json
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pgra.config import PgraArguments
from pgra.errors import ArtifactError
from pgra.evaluation.metrics import measure
from pgra.evaluation.results import (
    METRICS_FILE,
    PREDICTIONS_FILE,
    RunRecord,
    add_attention,
    write_results,
)
from pgra.evaluation.run_files import read_object
from pgra.io import digest, write_json, write_text
from pgra.models.fid import FusionReader
from pgra.models.loading import choose_device, find_model, load_tokenizer
from pgra.models.lora import AdaptedReader, add_adapters
from pgra.pipelines.card import write_card
from pgra.pipelines.found import Found, timed
from pgra.pipelines.inputs import label_decision, read_inputs, task_verbalizer
from pgra.pipelines.notes import evidence_models, run_notes
from pgra.pipelines.pgra import find_evidence, open_stages, read_task
from pgra.pipelines.prepare import Prepared, check_run, prepare_runs
from pgra.pipelines.run_folder import (
    ARGUMENTS_FILE,
    IDENTITY_FILE,
    check_reader,
    check_same_inputs,
    check_writable,
    load_run_arguments,
    read_training,
    reader_checksum,
    run_identity,
    task_identity,
    write_training,
)
from pgra.pipelines.trained import Trained, describe_reader
from pgra.processes import Processes
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.reader.checkpoints import last_checkpoint
from pgra.reader.predict import batch_tokens_on
from pgra.reader.record import (
    READER_FOLDER,
    RECORD_FILE,
    check_reads_any,
    read_record,
    write_record,
)
from pgra.reader.tokens import TokenizedInputs
from pgra.reader.trackers import finish_trackers
from pgra.reader.train import TrainResult, train_reader
from pgra.reader.trainer import set_dropout
from pgra.rerank import NeighborReranker
from pgra.types import Json

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """A finished run.

    Attributes:
        folder: Where it is.
        metrics: The content of its `metrics.json`; empty if it was not measured on the test set.
        reused: Whether it was there already.
        training: The content of its `training.json`: the dev set's value, and when.
    """

    folder: Path
    metrics: Mapping[str, Any]
    reused: bool
    training: Mapping[str, Any] = field(default_factory=dict)


def train_run(
    args: PgraArguments,
    training: ReaderTrainingArguments,
    processes: Processes = Processes(),  # noqa: B008 (frozen)
) -> Outcome:
    """Find evidence, train a reader on it, and measure it on the test set.

    Args:
        args: Everything before the reader's training.
        training: The Trainer's arguments; `output_dir` is the run.
        processes: Who shares the work.

    Raises:
        ArtifactError: If the folder holds another run.
        PgraError: As each stage says.
    """
    return run_reader(prepare_runs(args, [training], processes), training)


def run_reader(
    prepared: Prepared, training: ReaderTrainingArguments, *, is_measured: bool = True
) -> Outcome:
    """Train a reader on evidence that is found, or take up what is there.

    Args:
        prepared: As `prepare_runs` gives it.
        training: The Trainer's arguments; `output_dir` is the run.
        is_measured: Whether it is measured on the test set too.

    Raises:
        ArtifactError: If the folder holds another run.
        PgraError: As training says.
    """
    args, processes = prepared.args, prepared.processes
    folder = Path(str(training.output_dir))
    found = prepared.found.copy()
    identity = run_identity(args, training, found, prepared.source)
    check_run(folder, identity, training)
    if (folder / METRICS_FILE).is_file() and (folder / READER_FOLDER / RECORD_FILE).is_file():
        return _reuse(folder, args)
    reader, is_reused = _trained_reader(prepared, training, identity)
    record = read_training(folder) or {}
    if not is_measured:
        return Outcome(folder, {}, is_reused, record)
    found.seconds["training"] = float(record["seconds"])
    found.fingerprints["run"] = digest(identity)
    reader = reader or prepared.open_reader(folder / READER_FOLDER).to(training.device)
    trained = prepared.trained(reader, training.seed)
    with timed(found, "calibration"):
        trained = trained.calibrated(prepared.inputs("dev"), processes)
    if processes.worker.is_main:
        described = describe_reader(trained, found, args, prepared.source)
        write_record(folder / READER_FOLDER, described)
    found.fingerprints["reader"] = reader_checksum(folder)
    metrics = _measure(trained, found, prepared.inputs("test"), "test", args, folder, processes)
    if processes.worker.is_main:
        write_card(folder)
    return Outcome(folder, metrics, reused=False, training=record)


def _trained_reader(
    prepared: Prepared, training: ReaderTrainingArguments, identity: Mapping[str, Json]
) -> tuple[FusionReader | None, bool]:
    """Train, unless that is done already: then there is no reader in memory."""
    args, processes, found = prepared.args, prepared.processes, prepared.found
    folder = Path(str(training.output_dir))
    if read_training(folder) is not None:
        logger.info("run: %s is trained (reused)", folder)
        return None, True
    inputs = {split: prepared.inputs(split) for split in ("train", "dev")}
    reader = prepared.open_reader()
    if args.reader.dropout_rate is not None:
        set_dropout(reader, args.reader.dropout_rate)
    if args.reader.lora_rank is not None:
        reader = add_adapters(reader, args.reader, seed=training.seed)
    if processes.worker.is_main:
        _begin(folder, identity, args, training, found)
    processes.barrier()
    trained = prepared.trained(reader, training.seed)
    result = _train(trained, inputs, found, training)
    finish_trackers(training.report_to)
    if isinstance(reader, AdaptedReader):
        reader.merge()  # on every process as in the folder
    if processes.worker.is_main:
        write_training(folder, result, training)
    processes.barrier()
    return reader, False


def _reuse(folder: Path, args: PgraArguments) -> Outcome:
    """Take up a finished run."""
    check_reader(folder)
    logger.info("run: %s is finished (reused)", folder)
    if args.reader.evidence_attention and not _tells_attention(folder):
        logger.warning("attention: pgra evaluate --run %s --evidence_attention adds it", folder)
    metrics, training = read_object(folder / METRICS_FILE), read_training(folder) or {}
    return Outcome(folder, metrics, reused=True, training=training)


def _tells_attention(folder: Path) -> bool:
    with (folder / PREDICTIONS_FILE).open(encoding="utf-8") as lines:
        return '"attention": ' in lines.readline()


def _begin(
    folder: Path,
    identity: Mapping[str, Json],
    args: PgraArguments,
    training: ReaderTrainingArguments,
    found: Found,
) -> None:
    """Say in the run's folder what it is."""
    write_json(folder / IDENTITY_FILE, identity)
    write_json(folder / ARGUMENTS_FILE, resolved_arguments(args, training))
    query, prompt = found.splits.test[0], found.prompt
    if isinstance(found.reranker, NeighborReranker):  # as it is read, where not all of it fits
        reranker = found.reranker
        prompt = reranker.exemplars.encoder_for(reranker.encoder, query).prompt
    told = [one.prefix + one.suffix(query.fields) for one in (prompt, *prompt.others)]
    write_text(folder / "prompt.txt", "\n\n--- the next prefix ---\n\n".join(told))


def _train(
    trained: Trained,
    inputs: Mapping[str, TokenizedInputs],
    found: Found,
    training: ReaderTrainingArguments,
) -> TrainResult:
    """Train in place, going on from the last whole checkpoint if the run was stopped."""
    checkpoint = last_checkpoint(Path(str(training.output_dir)), processes=training.world_size)
    if training.resume_from_checkpoint is None and checkpoint is not None:
        training.resume_from_checkpoint = "true"
        logger.info("run: going on from %s", checkpoint)
    labels, metric = found.task.labels, found.task.metric
    return train_reader(
        trained.reader,
        trained.tokenizer,
        inputs["train"],
        inputs["dev"],
        verbalizer=trained.verbalizer,
        measure=lambda truth, decided: measure(metric, truth, decided, labels),
        metric=metric,
        arguments=training,
        decision=trained.decision,
        batch_tokens=batch_tokens_on(training.device),
    )


def evaluate_run(
    run: Path,
    processes: Processes = Processes(),  # noqa: B008 (frozen)
    *,
    split: str = "test",
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    output_dir: Path | None = None,
) -> Outcome:
    """Measure a trained run again, on its own split or on another file.

    Args:
        run: A folder that `train_run` left.
        processes: Who shares the work.
        split: "test" or "dev".
        changes: Arguments to change, by section, such as {"data": {"test_file": ...}}.
        output_dir: Where results go; default: the run.

    Raises:
        ArtifactError: If the folder holds no finished reader, a damaged one, or `output_dir` is
            another run's.
        PgraError: As each stage says.
    """
    folder = output_dir or run
    check_writable(folder)
    args, seed = load_run_arguments(run, changes or {})
    weights, record = check_reader(run), read_record(run, verify=False)
    check_reads_any(record)
    if folder != run and (folder / IDENTITY_FILE).is_file():
        raise ArtifactError(f"{folder} is a run of train.py itself: choose another --output_dir")
    tokenizer = load_tokenizer(find_model(str(run / READER_FOLDER)))
    found = read_task(args)
    open_stages(found, args)
    free = _free_fields(folder != run, split, changes or {})
    check_same_inputs(run, task_identity(args, found), free=free)  # before the long stages
    find_evidence(found, args, processes, splits=(split,))
    check_same_inputs(run, task_identity(args, found), free=free)
    reader = FusionReader.from_name(str(run / READER_FOLDER))
    reader.to(choose_device(args.runtime.device))
    found.fingerprints["run"] = digest(read_object(run / IDENTITY_FILE))
    found.fingerprints["reader"] = weights
    if folder == run and (run / METRICS_FILE).is_file():  # it goes on telling what the run cost
        before = read_object(run / METRICS_FILE)
        found.fingerprints = {**before["fingerprints"], **found.fingerprints}
        found.seconds = {**found.seconds, **before["seconds"]}
    verbalizer, decision = task_verbalizer(found.task, args.reader), label_decision(args.reader)
    trained = Trained(reader, tokenizer, verbalizer, decision, seed)
    trained = trained.with_calibration(record.calibration)
    inputs = read_inputs(found, split, args, tokenizer, processes)
    metrics = _measure(trained, found, inputs, split, args, folder, processes)
    return Outcome(folder, metrics, reused=False)


def _free_fields(
    is_elsewhere: bool,  # noqa: FBT001 (private)
    split: str,
    changes: Mapping[str, Mapping[str, Any]],
) -> set[str]:
    """Give the fields of a run's identity in which a new measurement may differ from it."""
    free = {name for section in changes.values() for name in section}
    if is_elsewhere:
        free |= {split, f"candidates/{split}", f"evidence/{split}"}
    return free


def _measure(
    trained: Trained,
    found: Found,
    inputs: TokenizedInputs,
    split: str,
    args: PgraArguments,
    folder: Path,
    processes: Processes,
) -> dict[str, Any]:
    """Decide a split's examples and write what came out."""
    attention = args.reader.evidence_attention and found.depth > 0
    with timed(found, "evaluation"):
        decided = trained.decide(inputs, processes, attention=attention)
    models = [args.reader.model_name_or_path, *evidence_models(args)]
    record = RunRecord(
        task=found.task.name,
        split=split,
        metric=found.task.metric,
        labels=found.task.labels,
        seed=trained.seed,
        seconds=found.seconds,
        fingerprints=found.fingerprints,
        notes=[*run_notes(args, found, models), *trained.notes],
        calibration=decided.calibration,
        system=args.system,
    )
    examples, lines = found.examples(split), found.evidence_lines(split, decided.best)
    if decided.shares is not None:
        lines = add_attention(lines, decided.shares)
    if processes.worker.is_main:
        write_results(folder, record, examples, decided.predictions, lines)
    processes.barrier()
    return read_object(folder / METRICS_FILE)


def resolved_arguments(args: PgraArguments, training: ReaderTrainingArguments) -> dict[str, Json]:
    """Give what `arguments.json` holds: all arguments by section, the Trainer's too."""
    return {**asdict(args), "training": training.to_dict()}
