"""Runs of a grid that `pgra icl` makes: KATE's tables and figures, one frozen LM for all points.

A point that draws nothing has one run, whatever the number of seeds: its others would be the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pgra.errors import ConfigError, PgraError
from pgra.evaluation.results import METRICS_FILE
from pgra.icl.completion import Completer
from pgra.pipelines.grid import PROFILE, Grid, Point, argument_sections
from pgra.pipelines.grid_run import cells, name_run
from pgra.pipelines.icl import run_icl
from pgra.pipelines.icl_inputs import IclRun, read_inputs
from pgra.pipelines.icl_opening import open_lm
from pgra.pipelines.run import Outcome
from pgra.processes import Processes
from pgra.types import Json

Resolve = Callable[[str | None, Point], IclRun]


@dataclass
class SharedLm:
    """The LM of the run before, which the next one takes if it asks for the same."""

    _asked: Mapping[str, Json] | None = None
    _completer: Completer | None = None

    def open(self, run: IclRun, processes: Processes) -> Completer:
        """Open a run's LM, or give the one that is open.

        Raises:
            PgraError: As `open_lm`.
        """
        asked: dict[str, Json] = {
            **asdict(run.completer),
            "artifacts_dir": str(run.artifacts),
            "device": run.icl.device,
        }
        if self._completer is None or self._asked != asked:
            self._completer = None  # so that two LMs are never in memory together
            self._completer, self._asked = open_lm(run, processes), asked
        return self._completer


@dataclass(frozen=True)
class IclGridRun:
    """One run of a grid of `pgra icl`; see `AnyRun`.

    Attributes:
        point: Its cell.
        task: As the grid names it; None where the arguments do.
        seed: Of the exemplars.
        run: All arguments, its own folder and seed among them.
        lm: Shared with the other runs.
    """

    point: Point
    task: str | None
    seed: int
    run: IclRun
    lm: SharedLm = field(repr=False, compare=False)

    @property
    def folder(self) -> Path:
        """Say where it is."""
        return self.run.folder

    @property
    def name(self) -> str:
        """Name it in a log."""
        return name_run(self.task, self.point, self.seed)

    @property
    def is_finished(self) -> bool:
        """Say whether it was measured."""
        return (self.folder / METRICS_FILE).is_file()

    @property
    def width(self) -> float:
        """Say nothing of the order: neighbors and answers are kept, whichever run is first."""
        return 0.0

    @property
    def task_of_arguments(self) -> str | None:
        """Give the task as its arguments name it."""
        return self.run.data.task

    def value(self, name: str) -> Json:
        """Give an argument's value by its name, as JSON."""
        if name == PROFILE:
            return self.point.values.get(name)
        return asdict(getattr(self.run, argument_sections("icl")[name]))[name]

    def make(self, processes: Processes) -> Outcome:
        """Make it, or take it up.

        Raises:
            PgraError: As `run_icl`.
        """
        return run_icl(self.run, self.lm.open, processes)

    def drop_reader(self) -> None:
        """Do nothing: there is none."""


def make_icl_runs(
    grid: Grid, seeds: Sequence[int], root: Path, resolve: Resolve
) -> list[IclGridRun]:
    """Give a grid's runs in the order of its table: by task, point and seed.

    Args:
        grid: The grid.
        seeds: Of the exemplars; a point that draws nothing takes the first alone.
        root: Folder of all of them.
        resolve: Gives the arguments of a task and point.

    Raises:
        ConfigError: If a point contradicts itself; it is named.
    """
    lm, runs = SharedLm(), []
    for task, point, folder in cells(grid, root):
        try:
            run = resolve(task, point)
        except ConfigError as error:
            raise ConfigError(f"{grid.origin}: point '{point.name}': {error}") from None
        for seed in seeds if run.selection.draws else seeds[:1]:
            place = str(folder / f"seed-{seed}")
            mine = replace(
                run,
                selection=replace(run.selection, exemplar_seed=seed),
                icl=replace(run.icl, output_dir=place),
            )
            runs.append(IclGridRun(point, task, seed, mine, lm))
    return runs


@dataclass(frozen=True)
class PointCost:
    """What a point asks the LM.

    Attributes:
        runs: The point's, one a seed.
        queries: Of its task; None if they cannot be read.
        prompts: Of its unfinished runs, at most: what is kept is not asked again; None likewise.
        note: Why it cannot be told.
    """

    runs: Sequence[IclGridRun]
    queries: int | None
    prompts: int | None
    note: str = ""


_BLANKS = 3  # prompts without content that --calibrate adds to each, at most


def foresee_prompts(runs: Sequence[IclGridRun]) -> list[PointCost]:
    """Tell how many prompts each point asks, in the order of the table; no model runs."""
    points: dict[tuple[str | None, str], list[IclGridRun]] = {}
    for run in runs:
        points.setdefault((run.task, run.point.name), []).append(run)
    known: dict[str, int | str] = {}
    return [_foresee(own, known) for own in points.values()]


def _foresee(runs: Sequence[IclGridRun], known: dict[str, int | str]) -> PointCost:
    first = runs[0].run
    key = str((asdict(first.data), first.icl.query_dataset_name))
    if key not in known:
        try:
            known[key] = len(read_inputs(first).queries)
        except PgraError as error:
            known[key] = " ".join(str(error).split())
    found = known[key]
    if isinstance(found, str):
        return PointCost(runs, None, None, found)
    if first.icl.decide_by == "vote":
        return PointCost(runs, found, 0, "no LM")
    each = found * (1 + _BLANKS * first.icl.calibrate)
    return PointCost(runs, found, each * sum(not run.is_finished for run in runs))
