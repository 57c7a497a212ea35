"""A grid of runs as a YAML tells it: what all share, and what is varied.

title: ...              what the table is called
command: icl            what makes a run: train (train.py, the default) or icl (pgra icl)
extends: _base          another YAML beneath this one
base: {...}             arguments that all points share, `profile` among them
tasks: [...]            one run a task and point
by_task: {trec: {...}}  arguments of one task
grid: {num_candidates: [150, 50]}       axes: all combinations
points: [{name: BM25, retriever: bm25}] values that go together; crossed with the axes
baseline: {...}         the point that others are compared with
labels: {num_candidates: k}             short names of axes; "" shows the value alone
reference: T5           the paper's table
demo: {...}             all of these again, for bundled models and small sizes
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from pgra.arguments import Defaults
from pgra.config import PROFILES, DataArguments, PgraArguments, choose, config_root, read_yaml
from pgra.errors import ConfigError, unknown_name
from pgra.icl.arguments import IclArguments, SelectionArguments
from pgra.icl.opening import CompleterArguments
from pgra.pipelines.grid_files import COMMANDS, find_grid, merge, read_layers
from pgra.series import SeriesArguments
from pgra.types import Json

PROFILE = "profile"
SEEDS = (0, 1, 2)
_NO_AXES = {
    "train": ("artifacts_dir", "output_dir", "seed", "task"),
    "icl": ("artifacts_dir", "output_dir", "exemplar_seed", "seeds", "task"),
}
ICL_SECTIONS = {
    "data": DataArguments,
    "completer": CompleterArguments,
    "selection": SelectionArguments,
    "icl": IclArguments,
}
"""Arguments of `pgra icl`, by the section of `arguments.json`."""


@dataclass(frozen=True)
class Point:
    """One cell of a grid.

    Attributes:
        name: As tables show it.
        values: By argument name; `profile` names defaults beneath them.
        by_task: Values that differ for one task.
    """

    name: str
    values: Mapping[str, Any]
    by_task: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """Give the name of its folder."""
        return re.sub(r"[^A-Za-z0-9._=+-]+", "-", self.name).strip("-.")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What is varied, over what.

    Attributes:
        name: The YAML's, without its ending.
        origin: The YAML.
        title: What its table is called.
        about: What it shows, for a list of grids.
        axes: Arguments that differ between points.
        points: In the order of the table.
        base: Arguments that all points share.
        tasks: One run a task and point; none: the task of the arguments.
        by_task: Arguments of one task.
        labels: Short names of axes.
        seeds: Of the reader, one run each.
        reference: The paper's table; None without one.
        baseline: Values that tell the point others are compared with; None without one.
        share: Whether points take up each other's products.
        show: "seconds" to show what each stage took.
        command: What makes its runs, of `COMMANDS`.
        has_task_folders: Whether each task's runs have a folder of their own: of a file with
            several tasks always, so that all may follow where one was run first.
    """

    name: str
    origin: str
    title: str
    about: str = ""
    axes: Sequence[str]
    points: Sequence[Point]
    base: Mapping[str, Any] = field(default_factory=dict)
    tasks: Sequence[str] = ()
    by_task: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    seeds: Sequence[int] = SEEDS
    reference: str | None = None
    baseline: Mapping[str, Any] | None = None
    share: bool = True
    show: str | None = None
    command: str = COMMANDS[0]
    has_task_folders: bool = False

    def under(self, task: str | None, point: Point) -> list[Defaults]:
        """Give what stands beneath `--profile` and `--config`, the later over the earlier."""
        base = dict(self.base)
        profile = base.pop(PROFILE, None)
        profile = point.values.get(PROFILE, profile)
        layers = [Defaults(self.origin, base)]
        if profile is not None:
            path = config_root() / "profiles" / f"{profile}.yaml"
            layers.insert(0, Defaults(str(path), read_yaml(path)))
        if task is not None:
            layers.append(Defaults(f"{self.origin}: {task}", self.by_task.get(task, {})))
        return layers

    def over(self, task: str | None, point: Point) -> Defaults:
        """Give what stands above `--profile` and `--config`: the point's own values."""
        values = {name: value for name, value in point.values.items() if name != PROFILE}
        if task is not None:
            values = {**values, **point.by_task.get(task, {}), "task": task}
        return Defaults(f"{self.origin}: {point.name}", values)


def read_grid(
    name: str, *, demo: bool = False, axes: Mapping[str, Sequence[Any]] | None = None
) -> Grid:
    """Read a grid.

    Args:
        name: Of a shipped one, or the path of a YAML.
        demo: Whether to take its `demo` part.
        axes: Other values for some of its axes, or further axes.

    Raises:
        ConfigError: On an unknown grid, key, axis or profile, a value of the wrong kind, or points
            that cannot be told apart.
    """
    path = find_grid(name)
    values = read_layers(path)
    small = values.pop("demo", {})
    if demo:
        values = merge({**values, "by_task": {}}, small)
    given = {**values.get("grid", {}), **(axes or {})}
    points = _points(path, values.get("points") or [{}], given, values.get("labels", {}))
    names = dict.fromkeys(name for point in points for name in point.values)
    tasks = tuple(str(task) for task in values.get("tasks") or ())
    grid = Grid(
        name=path.stem,
        origin=str(path),
        title=str(values.get("title", path.stem)),
        about=" ".join(str(values.get("about", "")).split()),
        axes=tuple(names),
        points=points,
        base=values.get("base", {}),
        tasks=tasks,
        has_task_folders=len(tasks) > 1,
        by_task=values.get("by_task", {}),
        labels=values.get("labels", {}),
        seeds=_seeds(values.get("seeds")),
        reference=values.get("reference"),
        baseline=values.get("baseline"),
        share=bool(values.get("share", True)),
        show=values.get("show"),
        command=values.get("command", COMMANDS[0]),
    )
    _check(grid)
    return grid


def with_tasks(grid: Grid, tasks: Sequence[str]) -> Grid:
    """Give the same grid over other tasks."""
    is_apart = grid.has_task_folders or len(tasks) > 1
    return replace(grid, tasks=tuple(tasks), has_task_folders=is_apart)


def read_axes(words: Sequence[str]) -> dict[str, list[Any]]:
    """Read axes of a command line, such as num_candidates=150,50.

    Raises:
        ConfigError: If a word is not of that form.
    """
    axes = {}
    for word in words:
        name, sign, text = word.partition("=")
        try:
            values = yaml.safe_load(f"[{text}]")
        except yaml.YAMLError:
            values = []
        if not sign or not values:
            raise ConfigError(f"axis '{word}': write NAME=VALUE,VALUE such as num_evidence=4,8")
        axes[name.replace("-", "_")] = values
    return axes


def argument_sections(command: str = COMMANDS[0]) -> dict[str, str]:
    """Give the section of a command's arguments by argument; "training" for the Trainer's."""
    if command == "icl":
        return {f.name: name for name, cls in ICL_SECTIONS.items() for f in fields(cls)}
    from pgra.reader.arguments import ReaderTrainingArguments

    ours = {f.name: s.name for s in fields(PgraArguments) for f in fields(s.type)}  # type: ignore[arg-type]
    return {**{f.name: "training" for f in fields(ReaderTrainingArguments)}, **ours}


def short(value: Json) -> str:
    """Word a value in a point's name: a model or a file by the last part of its name."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return value.removeprefix("bundled:").rstrip("/").rpartition("/")[2] or value
    return "none" if value is None else str(value)


def _points(
    path: Path,
    together: Sequence[Mapping[str, Any]],
    axes: Mapping[str, Sequence[Any]],
    labels: Mapping[str, str],
) -> list[Point]:
    """Cross values that go together with all combinations of the axes'."""
    for name, values in axes.items():
        if not isinstance(values, list | tuple) or not values:
            raise ConfigError(f"{path}: axis {name} must be a list of values, not {values!r}")
    points = []
    for given in together:
        if not isinstance(given, Mapping):
            raise ConfigError(f"{path}: a point must be a mapping, not {given!r}")
        own = {name: value for name, value in given.items() if name not in ("by_task", "name")}
        for combination in product(*axes.values()):
            crossed = dict(zip(axes, combination, strict=True))
            words = [str(given["name"])] if "name" in given else _words(own, labels)
            words += _words(crossed, labels)
            name = ", ".join(words) or path.stem
            points.append(Point(name, {**own, **crossed}, given.get("by_task", {})))
    return points


def _words(values: Mapping[str, Any], labels: Mapping[str, str]) -> list[str]:
    named = [(labels.get(name, name), short(value)) for name, value in values.items()]
    return [f"{label}={value}" if label else value for label, value in named]


def _seeds(given: Sequence[Any] | None) -> tuple[int, ...]:
    if given is None:
        return SEEDS
    return tuple(SeriesArguments(seeds=[str(seed) for seed in given]).seed_list())


def _check(grid: Grid) -> None:
    _check_names(grid)
    for profile in (grid.base.get(PROFILE), *(p.values.get(PROFILE) for p in grid.points)):
        if profile is not None:
            choose("profile", str(profile), PROFILES)
    folders: dict[str, str] = {}
    for point in grid.points:
        key = point.folder.lower()
        if key in folders:
            raise ConfigError(
                f"{grid.origin}: points '{folders[key]}' and '{point.name}' would share the folder "
                f"'{point.folder}': give each a name of its own"
            )
        folders[key] = point.name


def _check_names(grid: Grid) -> None:
    known = {PROFILE: "", **argument_sections(grid.command)}
    for name in grid.axes:
        if name not in known:
            raise ConfigError(f"{grid.origin}: {_nearest(grid, 'axis', name)}")
        if name in _NO_AXES[grid.command]:
            raise ConfigError(
                f"{grid.origin}: '{name}' cannot be an axis: give --seeds or --tasks, and one "
                "--output_dir and --artifacts_dir for all"
            )
    for name in grid.baseline or {}:
        if name not in known:
            raise ConfigError(f"{grid.origin}: {_nearest(grid, 'argument of the baseline', name)}")


def _nearest(grid: Grid, kind: str, name: str) -> str:
    known = [PROFILE, *argument_sections(grid.command)]
    told = unknown_name(kind, name, known).split(" Known:")[0]
    return f"{told} See pgra {grid.command} --help."
