"""Grids: a YAML of points, their costs, and runs that share their work.

title: ...              what the table is called
extends: _base          another YAML below this one
base: {...}             arguments that all points share, `method` and `profile` among them
tasks: [...]            one run a task and point
by_task: {trec: {...}}  arguments of one task
grid: {num_candidates: [150, 50]}       axes: all combinations
points: [{name: BM25, retriever: bm25}] values that go together; crossed with the axes; `seeds` of
                        its own, which --seeds replaces
baseline: {...}         the point that others are compared with
labels: {num_candidates: k}             short names of axes; "" shows the value alone
reference: T5           the paper's table
demo: {...}             all of these again, for bundled models and small sizes

NAME/grid.json              the points and where their runs are, written before anything runs
NAME/POINT/seed-N/          a run each; NAME/TASK/POINT/seed-N/ with several tasks

All points share one artifacts folder, so one LM with one prompt has one bank.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, product
from pathlib import Path
from typing import Any

from pgra.artifacts import write_sealed
from pgra.config import Defaults, config_root, field_names, find_yaml, from_yaml, read_yaml
from pgra.context import Context
from pgra.errors import ArtifactError, BusyError, ConfigError, DataError, PgraError, one_line
from pgra.methods.arguments import RunArguments
from pgra.methods.base import bare_name, find_method, find_sections
from pgra.report.results import GRID_FILE
from pgra.run_folder import IDENTITY_FILE, WEIGHTS_FILE, RunFolder, read_object
from pgra.types import Json

logger = logging.getLogger(__name__)

PROFILE = "profile"
_OF_POINTS = {"by_task", "name", "seeds"}


@dataclass(frozen=True)
class Point:
    """One cell of a grid.

    Attributes:
        values: By argument name; `profile` names defaults below them.
        by_task: Values that differ for one task.
        seeds: Its own; empty for the grid's.
    """

    name: str
    values: Mapping[str, Any]
    by_task: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seeds: Sequence[int] = ()

    @property
    def folder(self) -> str:
        return re.sub(r"[^A-Za-z0-9._=+-]+", "-", self.name).strip("-.")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What is varied, over what: the keys of a grid's YAML (see this module).

    Attributes:
        share: Whether points reuse each other's products.
        show: Below the table: "seconds" of each stage, or "dev" (the best point on the dev set).
    """

    name: str = ""
    origin: str = ""
    title: str = ""
    about: str = ""
    extends: str | None = None
    base: Mapping[str, Any] = field(default_factory=dict)
    tasks: tuple[str, ...] = ()
    by_task: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    points: tuple[Mapping[str, Any], ...] = ({},)
    baseline: Mapping[str, Any] | None = None
    labels: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2)
    reference: str | None = None
    share: bool = True
    show: str | None = None

    @cached_property
    def cells(self) -> list[Point]:
        """The points in the order of the table, crossed with the axes."""
        cells = []
        for entry in self.points:
            values = {name: entry[name] for name in entry if name not in _OF_POINTS}
            first = [str(entry["name"])] if "name" in entry else self._words(values)
            for combination in product(*self.grid.values()):
                crossed = dict(zip(self.grid, combination, strict=True))
                name = ", ".join([*first, *self._words(crossed)]) or self.name
                by_task = entry.get("by_task", {})
                seeds = entry.get("seeds", ())
                cells.append(Point(name, {**values, **crossed}, by_task, seeds))
        return cells

    def _words(self, values: Mapping[str, Any]) -> list[str]:
        words = []
        for name, value in values.items():
            label = self.labels.get(name, name)
            words.append(f"{label}={short(value)}" if label else short(value))
        return words

    @property
    def axes(self) -> list[str]:
        """The arguments that vary, in the order of the file."""
        return list(dict.fromkeys(chain.from_iterable(point.values for point in self.cells)))

    def under(self, task: str | None, point: Point) -> list[Defaults]:
        """Return defaults below `--profile` and `--config`; later ones win."""
        base = dict(self.base)
        profile = base.pop(PROFILE, None)
        profile = point.values.get(PROFILE, profile)
        layers = [Defaults(self.origin, base)]
        if profile is not None:
            path = find_yaml("profile", "profiles", str(profile))
            layers.insert(0, Defaults(str(path), read_yaml(path)))
        if task is not None:
            layers.append(Defaults(f"{self.origin}: {task}", self.by_task.get(task, {})))
        return layers

    def over(self, task: str | None, point: Point) -> Defaults:
        """Return the point's own values, which win against `--profile` and `--config`."""
        values = dict(point.values)
        values.pop(PROFILE, None)
        if task is not None:
            values |= {**point.by_task.get(task, {}), "task": task}
        return Defaults(f"{self.origin}: {point.name}", values, wins=True)


def read_grid(name: str, *, demo: bool = False) -> Grid:
    """Read a shipped grid by name, or a YAML.

    Raises:
        ConfigError: On an unknown grid, key or profile, or a value of the wrong kind.
    """
    path = find_yaml("grid", "ablations", name)
    values = _read_layers(path)
    small = values.pop("demo", None) or {}
    if demo:
        values = _merge({**values, "by_task": {}}, small)
    values.setdefault("title", path.stem)
    grid = from_yaml(Grid, path, values, name=path.stem, origin=str(path))
    if {"seed", "task"} & {*grid.axes}:
        raise ConfigError(f"{path}: seed and task cannot be axes: give --seeds or --tasks")
    return grid


def _read_layers(path: Path, above: Sequence[Path] = ()) -> dict[str, Any]:
    """Read a YAML merged into the one it extends: a path from its folder, or one of ours."""
    if path.resolve() in above:
        raise ConfigError(f"{path} extends itself: name another")
    values = read_yaml(path)
    below = values.get("extends")
    if below is None:
        return values
    beside = path.parent / f"{below}.yaml"
    ours = config_root() / "ablations" / beside.name
    lower = beside if beside.is_file() else ours
    return _merge(_read_layers(lower, [*above, path.resolve()]), values)


def _merge(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two YAMLs, the upper one wins; "base", "by_task", "labels" and "demo" key by key."""
    merged = {**lower, **upper}
    for key in ("base", "by_task", "labels", "demo"):
        below = lower.get(key) or {}
        above = merged.get(key) or {}
        if key in lower and isinstance(below, Mapping) and isinstance(above, Mapping):
            merged[key] = _merge(below, above) if key == "demo" else {**below, **above}
    return merged


def argument_names(grid: Grid) -> set[str]:
    """Return the names of all arguments of the classes that a grid names."""
    names: set[str] = set()
    for point in grid.cells:
        sections = find_sections({**grid.base, **point.values})
        names |= field_names(sections.values())
    return names


def short(value: Json) -> str:
    """Shorten a value for a point's name: a path or model to its last part."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text.removeprefix("bundled:").rstrip("/").rpartition("/")[2]


@dataclass(frozen=True)
class GridRun(RunFolder):
    """One run of a grid; `task` is as the grid names it, None where the arguments do."""

    point: Point
    task: str | None
    args: RunArguments

    @property
    def name(self) -> str:
        task = "" if self.task is None else f"{self.task}, "
        return f"{task}{self.point.name}, seed {self.args.seed}"


def make_runs(
    grid: Grid,
    seeds: Sequence[int],
    root: Path,
    resolve: Callable[[str | None, Point], RunArguments],
    tasks: Sequence[str] | None = None,
) -> list[GridRun]:
    """Return a grid's runs in the order of its table: by task, point and seed.

    A point that draws nothing has one run, whatever the number of seeds. If the file has several
    tasks, each has its own folder, even if only one is run.

    Args:
        grid: The grid.
        seeds: One run each; empty for those of each point, else the grid's.
        root: Folder of all of them.
        resolve: Returns the arguments of a task and point.
        tasks: Those that replace the file's; empty where the arguments name one.

    Raises:
        ConfigError: If a point contradicts itself; it is named.
    """
    runs = []
    if tasks is None:
        tasks = grid.tasks
    is_apart = max(len(grid.tasks), len(tasks)) > 1
    for task, point in product(tasks or (None,), grid.cells):
        home = root / bare_name(task) if is_apart and task else root
        try:
            args = resolve(task, point)
            is_drawn = find_method(args.runtime.method).uses_seed(args)
        except ConfigError as error:
            raise ConfigError(f"{grid.origin}: point '{point.name}': {error}") from None
        of_point = seeds or point.seeds or grid.seeds
        if not is_drawn:
            of_point = of_point[:1]
        for seed in of_point:
            folder = home / point.folder / f"seed-{seed}"
            runs.append(GridRun(folder, point, task, args.variant(folder, seed)))
    return runs


def run_grid(
    runs: Sequence[GridRun],
    make: Callable[[RunArguments], object],
    context: Context,
    *,
    card: str | None,
    drop_readers: bool,
) -> dict[str, str]:
    """Make all runs; one that fails does not stop the others. Return why, by the failed run's name.

    With several processes only errors in arguments and data are skipped: others may occur in one
    process alone, for which the rest would wait. `drop_readers` leaves plain readers, which label
    evidence. A run that another job makes is left to it, unless that is killed meanwhile.
    """
    from pgra.experiments.dry_run import check_sources  # it brings torch

    worker = context.worker
    if context.is_main and not worker.is_part:
        answers, _ = check_sources([run.args for run in runs if not run.is_finished])
        costs = describe_costs(runs, card)
        logger.info("ablate: %s", "\n".join(["data and models:", *answers, *costs]))
    failures: dict[str, str] = {}
    # By seed, so that a stopped grid can be reported.
    left = sorted(runs, key=lambda run: run.args.seed)
    if worker.is_part:
        left = worker.order(left)
    busy: dict[str, str] = {}
    num_left = -1
    while len(left) != num_left:  # others may have ended meanwhile
        num_left = len(left)
        busy = {}
        for number, run in enumerate(left, 1):
            if worker.is_part and run.is_finished:
                continue
            logger.info("ablate: %s (%d of %d)", run.name, number, len(left))
            try:
                make(run.args)
            except PgraError as error:
                is_together = worker.world > 1 and not worker.is_part
                if is_together and not isinstance(error, (ConfigError, DataError)):
                    raise
                logger.error("ablate: %s is not made: %s", run.name, error)
                reasons = busy if isinstance(error, BusyError) else failures
                reasons[run.name] = one_line(error)
                continue
            if drop_readers and run.args.method != "plain" and context.is_main:
                run.remove_checkpoints()
                (run.reader_folder / WEIGHTS_FILE).unlink(missing_ok=True)
            context.barrier()
        left = [run for run in left if run.name in busy]
    return failures if worker.is_part else {**failures, **busy}


def describe_costs(runs: Sequence[GridRun], card: str | None) -> list[str]:
    """Count the disk and the hours of unfinished runs; None for `card` is the GPU that is there."""
    from pgra.experiments.costs import Cost, card_here  # it brings torch

    cost = Cost.of([run.args for run in runs if not run.is_finished])
    return cost.describe(card or card_here())


def write_grid(grid: Grid, runs: Sequence[GridRun], root: Path) -> None:
    """Write `grid.json`, before anything runs; points of several tasks have an entry a task.

    Raises:
        ArtifactError: If the folder holds another grid or a run.
    """
    path = root / GRID_FILE
    is_other = path.is_file() and read_object(path).get("name") != grid.name
    if is_other or (root / IDENTITY_FILE).is_file():
        raise ArtifactError(f"{root} holds another grid or a run: choose another --output_dir")
    points: dict[tuple[str | None, str], dict[str, Any]] = {}
    for run in runs:
        values: dict[str, Json] = {PROFILE: run.point.values.get(PROFILE)}
        for section in run.args.as_json().values():
            values |= section
        fresh = {
            "name": run.point.name,
            "task": bare_name(str(run.args.data.task)),
            "values": {name: values.get(name) for name in grid.axes},
            "seeds": {},
        }
        entry = points.setdefault((run.task, run.point.name), fresh)
        entry["seeds"][str(run.args.seed)] = str(run.folder.relative_to(root))
    record = {
        "name": grid.name,
        "title": grid.title,
        "axes": grid.axes,
        "reference": grid.reference,
        "baseline": grid.baseline,
        "points": list(points.values()),
    }
    write_sealed(path, record)
