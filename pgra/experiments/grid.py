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

All points share one artifacts folder, so one LM with one prompt has one bank. The points with the
most candidates run first: their LM states serve those with fewer.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from pgra.artifacts import write_json
from pgra.config import (
    CHOOSING,
    Defaults,
    config_root,
    find_yaml,
    from_values,
    parse_yaml,
    read_yaml,
)
from pgra.core import ALONE, Context, Json
from pgra.errors import (
    ArtifactError,
    ConfigError,
    DataError,
    PgraError,
    cut,
    reading,
)
from pgra.experiments import SeriesArguments
from pgra.methods.arguments import METHODS, RunArguments
from pgra.methods.base import find_method, find_sections
from pgra.reader import READER_FOLDER
from pgra.report.results import GRID_FILE, METRICS_FILE, read_object
from pgra.run_folder import IDENTITY_FILE, WEIGHTS_FILE, remove_checkpoints

logger = logging.getLogger(__name__)

PROFILE = "profile"
_OF_POINTS = ("by_task", "name", "seeds")
_NO_AXES = ("artifacts_dir", "output_dir", "seed", "task")


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
        show: Below the table: "seconds" of each stage, "dev" (the best point on the dev set), or
            the "consistency" of the evidence, labelled by the task's plain run.
        asked: The command line's tasks, which replace the file's; None without any.
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
    demo: "Grid | None" = None
    asked: tuple[str, ...] | None = None

    @cached_property
    def cells(self) -> list[Point]:
        """The points in the order of the table, crossed with the axes."""
        cells = []
        for given in self.points:
            own = {name: value for name, value in given.items() if name not in _OF_POINTS}
            for combination in product(*self.grid.values()):
                crossed = dict(zip(self.grid, combination, strict=True))
                words = [str(given["name"])] if "name" in given else self._words(own)
                name = ", ".join([*words, *self._words(crossed)]) or self.name
                by_task, seeds = given.get("by_task", {}), given.get("seeds", ())
                cells.append(Point(name, {**own, **crossed}, by_task, seeds))
        return cells

    def _words(self, values: Mapping[str, Any]) -> list[str]:
        named = [(self.labels.get(name, name), short(value)) for name, value in values.items()]
        return [f"{label}={value}" if label else value for label, value in named]

    @property
    def axes(self) -> list[str]:
        return list(dict.fromkeys(name for point in self.cells for name in point.values))

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
        values = {name: value for name, value in point.values.items() if name != PROFILE}
        if task is not None:
            values = {**values, **point.by_task.get(task, {}), "task": task}
        return Defaults(f"{self.origin}: {point.name}", values)


def read_grid(
    name: str, *, demo: bool = False, axes: Mapping[str, Sequence[Any]] | None = None
) -> Grid:
    """Read a shipped grid by name, or a YAML; `axes` replace some of its own, or are added.

    Raises:
        ConfigError: On an unknown grid, key, axis or profile, a value of the wrong kind, or points
            with the same folder.
    """
    path = find_yaml("grid", "ablations", name)
    values = _read_layers(path)
    small = values.pop("demo", None) or {}
    if demo:
        values = _merge({**values, "by_task": {}}, small)
    values["grid"] = {**values.get("grid", {}), **(axes or {})}
    values.setdefault("title", path.stem)
    try:
        grid = from_values(Grid, values, name=path.stem, origin=str(path))
        _check(grid)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return grid


def _read_layers(path: Path) -> dict[str, Any]:
    """Read a YAML merged into the one it extends, which lies beside it or is one of ours."""
    values = read_yaml(path)
    below = values.get("extends")
    if below is None:
        return values
    beside = path.with_name(f"{below}.yaml")
    ours = config_root() / "ablations" / beside.name
    return _merge(_read_layers(beside if beside.is_file() else ours), values)


def _merge(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two YAMLs, the upper one wins; "base", "by_task", "labels" and "demo" key by key."""
    merged = {**lower, **upper}
    for key in ("base", "by_task", "labels", "demo"):
        below, above = lower.get(key) or {}, merged.get(key) or {}
        if key in lower and isinstance(below, Mapping) and isinstance(above, Mapping):
            merged[key] = _merge(below, above) if key == "demo" else {**below, **above}
    return merged


def read_axes(words: Sequence[str]) -> dict[str, list[Any]]:
    """Read axes of a command line, such as num_candidates=150,50; a ConfigError if they are not."""
    axes = {}
    for word in words:
        name, sign, text = word.partition("=")
        wanted = "write NAME=VALUE,VALUE such as num_evidence=4,8"
        with reading(f"axis '{cut(word)}' ({wanted})", ConfigError):
            values = parse_yaml(f"[{text}]") if sign else None
        if not isinstance(values, list) or not values:
            raise ConfigError(f"axis '{cut(word)}': {wanted}")
        axes[name.replace("-", "_")] = values
    return axes


def argument_names(grid: Grid) -> set[str]:
    """Return the names of all arguments of our methods and of the classes that a grid names."""
    sections = [entry.sections for entry in METHODS.values()]
    for point in grid.cells:
        for own in ({}, *point.by_task.values()):
            layer = {**grid.base, **point.values, **own}
            sections.append(find_sections({n: layer[n] for n in CHOOSING if n in layer}))
    classes = {cls for own in sections for cls in own.values()}
    return {f.name for cls in classes for f in fields(cls)}


def short(value: Json) -> str:
    """Shorten a value for a point's name: a path or model to its last part."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return value.removeprefix("bundled:").rstrip("/").rpartition("/")[2] or value
    return "none" if value is None else str(value)


def _check(grid: Grid) -> None:
    for seeds in (grid.seeds, *(point.seeds for point in grid.cells)):
        SeriesArguments(seeds=list(seeds))
    for name in grid.axes:
        if name in _NO_AXES:
            raise ConfigError(
                f"'{name}' cannot be an axis: give --seeds or --tasks, and one --output_dir and "
                "--artifacts_dir for all"
            )
    folders: dict[str, str] = {}
    for point in grid.cells:
        other = folders.get(point.folder.lower())
        if other is not None:
            raise ConfigError(
                f"points '{other}' and '{point.name}' would share the folder '{point.folder}': "
                "give each a name of its own"
            )
        folders[point.folder.lower()] = point.name


@dataclass(frozen=True)
class GridRun:
    """One run of a grid; `task` is as the grid names it, None where the arguments do."""

    point: Point
    task: str | None
    args: RunArguments

    @property
    def folder(self) -> Path:
        return self.args.folder

    @property
    def seed(self) -> int:
        return self.args.seed

    @property
    def name(self) -> str:
        task = "" if self.task is None else f"{self.task}, "
        return f"{task}{self.point.name}, seed {self.seed}"

    @property
    def is_finished(self) -> bool:
        return (self.folder / METRICS_FILE).is_file()

    @property
    def width(self) -> int:
        """How many candidates a query has."""
        if "rerank" not in self.args.sections:
            return 0
        return self.args.pgra.retriever.num_candidates

    def value(self, name: str) -> Json:
        """Return an argument's value by its name, as JSON; None where the method has none."""
        if name == PROFILE:
            return self.point.values.get(name)
        section = section_of(name, self.args)
        return None if section is None else self.args.as_json()[section].get(name)


def section_of(name: str, args: RunArguments) -> str | None:
    """Return the section that has an argument; None if none has."""
    for section, part in args.sections.items():
        if part is not None and name in {f.name for f in fields(part)}:
            return section
    return None


def make_runs(
    grid: Grid,
    seeds: Sequence[int],
    root: Path,
    resolve: Callable[[str | None, Point], RunArguments],
) -> list[GridRun]:
    """Return a grid's runs in the order of its table: by task, point and seed.

    A point that draws nothing has one run, whatever the number of seeds. If the file has several
    tasks, each has its own folder, even if only one is run.

    Args:
        grid: The grid.
        seeds: One run each; empty for those of each point, else the grid's.
        root: Folder of all of them.
        resolve: Returns the arguments of a task and point.

    Raises:
        ConfigError: If a point contradicts itself; it is named.
    """
    from pgra.runs import variant  # and torch, which a help does without

    runs = []
    tasks = grid.tasks if grid.asked is None else grid.asked
    is_apart = max(len(grid.tasks), len(tasks)) > 1
    for task, point in product(tasks or (None,), grid.cells):
        own = (task or "").rpartition("/")[2].removesuffix(".yaml")  # it may be a YAML's path
        folder = root / (own if is_apart else "") / point.folder
        try:
            args = resolve(task, point)
            is_drawn = find_method(args.runtime.method).uses_seed(args)
        except ConfigError as error:
            raise ConfigError(f"{grid.origin}: point '{point.name}': {error}") from None
        own_seeds = seeds or point.seeds or grid.seeds
        for seed in own_seeds if is_drawn else own_seeds[:1]:
            mine = variant(args, folder / "seed-{seed}", seed)
            runs.append(GridRun(point, task, mine))
    return runs


def in_order(runs: Sequence[GridRun]) -> list[GridRun]:
    """Order runs by seed, then by candidates, most first: later ones reuse what those computed."""
    seeds = list(dict.fromkeys(run.seed for run in runs))
    return sorted(runs, key=lambda run: (seeds.index(run.seed), -run.width))


def run_grid(
    runs: Sequence[GridRun],
    context: Context = ALONE,
    *,
    drop_readers: bool = False,
    keep_plain: bool = False,
) -> dict[str, str]:
    """Make all runs; one that fails does not stop the others. Return why, by the failed run's name.

    With several processes only errors in arguments and data are skipped: others may occur in one
    process alone, for which the rest would wait. `keep_plain` excepts plain readers, which label
    evidence, from `drop_readers`.
    """
    from pgra.runs import run_all

    failures = {}
    for number, run in enumerate(in_order(runs), 1):
        logger.info("ablate: %s (%d of %d)", run.name, number, len(runs))
        try:
            run_all({run.seed: run.args}, context, may_lack_reader=True)
        except PgraError as error:
            if context.worker.world > 1 and not isinstance(error, (ConfigError, DataError)):
                raise
            logger.error("ablate: %s failed: %s", run.name, error)
            failures[run.name] = " ".join(str(error).split())
            continue
        is_kept = keep_plain and run.args.runtime.method == "plain"
        if drop_readers and not is_kept and context.is_main and run.is_finished:
            remove_checkpoints(run.folder)
            (run.folder / READER_FOLDER / WEIGHTS_FILE).unlink(missing_ok=True)
        context.barrier()
    return failures


def write_grid(grid: Grid, runs: Sequence[GridRun], root: Path) -> None:
    """Write `grid.json`, before anything runs.

    Raises:
        ArtifactError: If the folder holds another grid or a run.
    """
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


def grid_record(grid: Grid, runs: Sequence[GridRun], root: Path) -> dict[str, Json]:
    """Return the content of `grid.json`; points of several tasks have an entry a task."""
    long = {name: name for name in (*grid.axes, *(grid.baseline or {}))}
    for name, run in product(long, reversed(runs)):
        section = section_of(name, run.args)
        long[name] = long[name] if section is None else f"{section}.{name}"
    points: dict[tuple[str | None, str], dict[str, Any]] = {}
    for run in runs:
        fresh = {
            "name": run.point.name,
            "task": run.args.data.task,
            "values": {long[name]: run.value(name) for name in grid.axes},
            "seeds": {},
        }
        entry = points.setdefault((run.task, run.point.name), fresh)
        entry["seeds"][str(run.seed)] = str(run.folder.relative_to(root))
    return {
        "name": grid.name,
        "title": grid.title,
        "axes": [long[name] for name in grid.axes],
        "labels": {long[name]: grid.labels.get(name) or name for name in grid.axes},
        "seeds": list(dict.fromkeys(run.seed for run in runs)),
        "reference": grid.reference,
        "baseline": grid.baseline and {long[name]: v for name, v in grid.baseline.items()},
        "points": list(points.values()),
    }
