"""A run of a system that trains nothing, in a folder like any other run's.

runs/NAME/run.json           what determines the run; another is refused
runs/NAME/arguments.json     all resolved arguments
runs/NAME/predictions.jsonl, metrics.json
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pgra.config import PgraArguments
from pgra.evaluation.results import METRICS_FILE, RunRecord, write_results
from pgra.evaluation.run_files import read_object
from pgra.io import digest, write_json
from pgra.pipelines.found import Found
from pgra.pipelines.notes import run_notes
from pgra.pipelines.run import Outcome, resolved_arguments
from pgra.pipelines.run_folder import (
    ARGUMENTS_FILE,
    IDENTITY_FILE,
    TRAINING_FILE,
    check_same_run,
    check_writable,
)
from pgra.processes import Processes
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.types import Json, Prediction

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decisions:
    """What a system that trains nothing gives.

    Attributes:
        predictions: One for each test example, in order.
        notes: What a reader of the numbers must know.
        dev: What the dev set decided, with its metric and value there; empty if nothing.
    """

    predictions: Sequence[Prediction]
    notes: Sequence[str] = ()
    dev: Mapping[str, Json] = field(default_factory=dict)


def run_untrained(
    args: PgraArguments,
    training: ReaderTrainingArguments,
    found: Found,
    decide: Callable[[], Decisions],
    *,
    settings: Mapping[str, Json],
    models: Sequence[str],
    processes: Processes = Processes(),  # noqa: B008 (frozen)
) -> Outcome:
    """Decide the test examples and write what came out, or take up what is there.

    Args:
        args: Everything but the training.
        training: Its `output_dir` is the run, its `seed` the run's.
        found: The task's examples.
        decide: Decides; called in every process, and only if the run is not there.
        settings: What decides predictions besides the examples.
        models: Names of all models used.
        processes: Who shares the work; the main one writes.

    Raises:
        ArtifactError: If the folder holds another run.
        PgraError: As `decide`.
    """
    folder = Path(str(training.output_dir))
    identity = {
        "method": args.method,
        "task": found.task.name,
        "labels": list(found.task.labels),
        "metric": found.task.metric,
        **settings,
        "seed": training.seed,
        **found.fingerprints,
    }
    check_writable(folder)
    check_same_run(folder, identity)
    is_finished = (folder / METRICS_FILE).is_file() and (folder / IDENTITY_FILE).is_file()
    processes.barrier()  # all have looked before the main process writes
    if is_finished:
        logger.info("run: %s is finished (reused)", folder)
        return _outcome(folder, reused=True)
    decided = decide()
    found.fingerprints["run"] = digest(identity)
    record = RunRecord(
        task=found.task.name,
        split="test",
        metric=found.task.metric,
        labels=found.task.labels,
        seed=training.seed,
        seconds=found.seconds,
        fingerprints=found.fingerprints,
        notes=[*run_notes(args, found, models), *decided.notes],
        system=args.system,
    )
    if processes.worker.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / IDENTITY_FILE, identity)
        write_json(folder / ARGUMENTS_FILE, resolved_arguments(args, training))
        if decided.dev:
            write_json(folder / TRAINING_FILE, decided.dev)
        examples = found.examples("test")
        write_results(folder, record, examples, decided.predictions, [[] for _ in examples])
    processes.barrier()
    return _outcome(folder, reused=False)


def _outcome(folder: Path, *, reused: bool) -> Outcome:
    has_dev = (folder / TRAINING_FILE).is_file()
    dev = read_object(folder / TRAINING_FILE) if has_dev else {}
    return Outcome(folder, read_object(folder / METRICS_FILE), reused, dev)
