"""Runs a grid: points that share work share it, and what is finished is taken up.

    NAME/grid.json              the points and where their runs are, written before anything runs
    NAME/POINT/seed-N/          a run each; NAME/TASK/POINT/seed-N/ with several tasks

All points of a grid share one artefacts folder, so one LM with one prompt has one bank. The points
with the most candidates run first: the candidates of fewer are the first of more, so that those
runs add no forward of the LM; how many become evidence is a cut of one ranking.
"""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from pgra.config import READER_SYSTEMS, PgraArguments
from pgra.errors import ArtifactError, ConfigError, DataError, PgraError
from pgra.evaluation.results import METRICS_FILE
from pgra.evaluation.run_files import read_object
from pgra.io import write_json
from pgra.pipelines.grid import PROFILE, Grid, Point, argument_sections
from pgra.pipelines.grid_run import AnyRun, cells, name_run
from pgra.pipelines.prepare import check_run, prepare_runs
from pgra.pipelines.run import Outcome
from pgra.pipelines.run_folder import (
    IDENTITY_FILE,
    WEIGHTS_FILE,
    check_writable,
    run_identity,
)
from pgra.pipelines.seeds import variant
from pgra.pipelines.systems import run_system
from pgra.processes import Processes
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.reader.record import READER_FOLDER
from pgra.types import Json

logger = logging.getLogger(__name__)

GRID_FILE = "grid.json"
_Run = TypeVar("_Run", bound=AnyRun)
Resolve = Callable[[str | None, Point], tuple[PgraArguments, ReaderTrainingArguments]]


@dataclass(frozen=True)
class GridRun:
    """One run of a grid.

    Attributes:
        point: Its cell.
        task: As the grid names it; None where the arguments do.
        seed: Of the reader.
        folder: Where it is.
        args: Everything before the reader's training.
        training: The Trainer's arguments.
    """

    point: Point
    task: str | None
    seed: int
    folder: Path
    args: PgraArguments
    training: ReaderTrainingArguments

    @property
    def name(self) -> str:
        """Name it in a log."""
        return name_run(self.task, self.point, self.seed)

    @property
    def is_finished(self) -> bool:
        """Say whether it was measured."""
        return (self.folder / METRICS_FILE).is_file()

    @property
    def is_dropped(self) -> bool:
        """Say whether it is a reader's run that was measured, and keeps no weights."""
        is_reader = self.args.runtime.system in READER_SYSTEMS
        return (
            is_reader
            and self.is_finished
            and (self.folder / READER_FOLDER).is_dir()
            and not (self.folder / READER_FOLDER / WEIGHTS_FILE).is_file()
        )

    @property
    def width(self) -> float:
        """Say how much it searches; see `AnyRun`."""
        return width(self.args)

    @property
    def task_of_arguments(self) -> str | None:
        """Give the task; see `AnyRun`."""
        return self.args.data.task

    def value(self, name: str) -> Json:
        """Give an argument's value; see `AnyRun`."""
        if name == PROFILE:
            return self.point.values.get(name)
        section = argument_sections()[name]
        if section == "training":
            return self.training.to_dict().get(name)
        return asdict(getattr(self.args, section))[name]

    def make(self, processes: Processes) -> Outcome:
        """Make it; see `run_point`."""
        return run_point(self, processes)

    def drop_reader(self) -> None:
        """Delete its weights; see `drop_reader`."""
        drop_reader(self)


@dataclass(frozen=True)
class Failure:
    """A run that could not be made, and why."""

    run: AnyRun
    reason: str


def make_runs(grid: Grid, seeds: Sequence[int], root: Path, resolve: Resolve) -> list[GridRun]:
    """Give a grid's runs in the order of its table: by task, point and seed.

    Args:
        grid: The grid.
        seeds: Of the reader.
        root: Folder of all of them.
        resolve: Gives the arguments of a task and point.

    Raises:
        ConfigError: If a point contradicts itself; it is named.
    """
    runs = []
    for task, point, folder in cells(grid, root):
        try:
            args, training = resolve(task, point)
        except ConfigError as error:
            raise ConfigError(f"{grid.origin}: point '{point.name}': {error}") from None
        for seed in seeds:
            place = folder / f"seed-{seed}"
            mine = variant(training, place, seed=seed)
            runs.append(GridRun(point, task, seed, place, args, mine))
    return runs


def in_order(runs: Sequence[_Run]) -> list[_Run]:
    """Order runs so that later ones find what earlier ones left.

    The first seed of all points comes before the second, so that a grid that was stopped tells of
    every point; of these, those that search most come first.
    """
    seeds = list(dict.fromkeys(run.seed for run in runs))
    return sorted(runs, key=lambda run: (seeds.index(run.seed), -run.width))


def width(args: PgraArguments) -> float:
    """Give how many candidates a query has, infinite where the LM reads the whole corpus."""
    is_whole = args.is_exhaustive or args.rerank.bank == "full"
    return float("inf") if is_whole else args.retriever.num_candidates


def run_grid(
    runs: Sequence[AnyRun],
    processes: Processes = Processes(),  # noqa: B008 (frozen)
    *,
    drop_readers: bool = False,
) -> list[Failure]:
    """Make all runs; one that fails does not stop the others.

    In several processes only what all refuse alike is passed over, arguments and data: anything
    else may be the failure of one alone, for which the others would wait.

    Args:
        runs: In any order.
        processes: Who shares the work.
        drop_readers: Whether to delete readers and checkpoints of measured runs: a grid may have a
            hundred.

    Returns:
        Those that failed.

    Raises:
        PgraError: In several processes, as a run says.
    """
    failures = []
    for number, run in enumerate(in_order(runs), 1):
        logger.info("ablate: %s (%d of %d)", run.name, number, len(runs))
        try:
            run.make(processes)
        except PgraError as error:
            if processes.worker.world > 1 and not isinstance(error, (ConfigError, DataError)):
                raise
            logger.error("ablate: %s failed: %s", run.name, error)
            failures.append(Failure(run, " ".join(str(error).split())))
            continue
        if drop_readers and processes.worker.is_main:
            run.drop_reader()
        processes.barrier()
    return failures


def run_point(run: GridRun, processes: Processes = Processes()) -> Outcome:  # noqa: B008 (frozen)
    """Make one run, or take it up, also where its reader was dropped.

    Raises:
        PgraError: As the system says.
    """
    if not run.is_dropped:
        return run_system(run.args, run.training, processes)
    prepared = prepare_runs(run.args, [run.training], processes)
    identity = run_identity(run.args, run.training, prepared.found, prepared.source)
    check_run(run.folder, identity, run.training)
    logger.info("run: %s is finished, without its reader (reused)", run.folder)
    return Outcome(run.folder, read_object(run.folder / METRICS_FILE), reused=True)


def drop_reader(run: GridRun) -> None:
    """Delete the weights and checkpoints of a trained and measured run; all else stays."""
    if run.args.runtime.system not in READER_SYSTEMS or not run.is_finished:
        return
    for folder in run.folder.glob("checkpoint-*"):
        shutil.rmtree(folder)
    (run.folder / READER_FOLDER / WEIGHTS_FILE).unlink(missing_ok=True)


def write_grid(grid: Grid, runs: Sequence[AnyRun], root: Path) -> None:
    """Say what a grid is, before it runs.

    Raises:
        ArtifactError: If the folder holds another grid or a run.
        OSError: If it cannot be written.
    """
    check_writable(root)
    path = root / GRID_FILE
    if (root / IDENTITY_FILE).is_file():
        raise ArtifactError(f"{root} is a run itself: choose another --output_dir for the grid")
    if path.is_file() and read_object(path).get("name") != grid.name:
        raise ArtifactError(
            f"{root} holds the grid '{read_object(path).get('name')}', this one is '{grid.name}': "
            "choose another --output_dir"
        )
    root.mkdir(parents=True, exist_ok=True)
    write_json(path, grid_record(grid, runs, root))


def grid_record(grid: Grid, runs: Sequence[AnyRun], root: Path) -> dict[str, Json]:
    """Give the content of `grid.json`: axes by section and name, points with every axis' value.

    Points of several tasks stand once a task, under one name.
    """
    sections = argument_sections(grid.command)
    long = {name: _long(name, sections) for name in (*grid.axes, *(grid.baseline or {}))}
    points: dict[tuple[str | None, str], dict[str, Any]] = {}
    for run in runs:
        values: dict[str, Json] = {long[name]: run.value(name) for name in grid.axes}
        told = {"name": run.point.name, "task": run.task_of_arguments}
        fresh = {**told, "values": values, "seeds": {}}
        entry = points.setdefault((run.task, run.point.name), fresh)
        entry["seeds"][str(run.seed)] = str(run.folder.relative_to(root))
    baseline = grid.baseline and {long[name]: value for name, value in grid.baseline.items()}
    return {
        "name": grid.name,
        "title": grid.title,
        "axes": [long[name] for name in grid.axes],
        "labels": {long[name]: grid.labels.get(name) or name for name in grid.axes},
        "seeds": list(dict.fromkeys(run.seed for run in runs)),
        "reference": grid.reference,
        "baseline": baseline,
        "points": list(points.values()),
    }


def _long(name: str, sections: Mapping[str, str]) -> str:
    return name if name == PROFILE else f"{sections[name]}.{name}"
