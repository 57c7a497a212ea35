"""Finished runs as reports read them: from a run, a folder of runs, several seeds, or a grid.

A folder counts as a run when it holds `metrics.json`, and as a grid when it holds `grid.json`
(`pgra ablate` writes it before anything runs, so that what is missing is known). Below either no
other runs are looked for.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pgra.errors import ArtifactError
from pgra.evaluation.metrics import METRICS
from pgra.evaluation.results import METRICS_FILE, PREDICTIONS_FILE
from pgra.evaluation.run_files import (
    Decisions,
    damaged,
    read_decisions,
    read_lines,
    read_object,
    read_optional,
)
from pgra.evaluation.written_runs import TEXT_METRICS, Each, split_measures
from pgra.io import MANIFEST
from pgra.types import Json

GRID_FILE = "grid.json"
TASK_AXIS = "data.task"
_ARGUMENTS_FILE = "arguments.json"
_IDENTITY_FILE = "run.json"
# Runs from before `--system` tell their method only.
_METHODS = {"t5": "plain", "fid": "fid", "pgra": "pgra", "pgra-exhaustive": "exhaustive"}
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Run:
    """One finished run.

    Attributes:
        system: As `--system` names it, such as "pgra" or "fid".
        name: The folder's name; of a grid, the point's.
        task: The task's name.
        seed: Of the run.
        folder: Where it is.
        arguments: Content of `arguments.json`: values by section; empty where there is none.
        metrics: Content of `metrics.json`.
        decisions: What it decided.
        point: Values by axis where it is of a grid; else empty.
        each: Of a part of a run that is measured on texts: what its measure is made of, a row a
            query (`written_runs`); else None.
    """

    system: str
    name: str
    task: str
    seed: int
    folder: Path
    arguments: Mapping[str, Any]
    metrics: Mapping[str, Any]
    decisions: Decisions
    point: Mapping[str, Json] = field(default_factory=dict)
    each: Each | None = field(default=None, compare=False)

    @property
    def metric(self) -> str:
        """Give the name of the headline metric."""
        return str(self.metrics["metric"])

    @property
    def value(self) -> float:
        """Give the headline metric, a fraction."""
        return float(self.metrics["value"])

    @cached_property
    def predictions(self) -> list[dict[str, Any]]:
        """Give the lines of `predictions.jsonl`: read when asked for, evidence is long."""
        return list(read_lines(self.folder / PREDICTIONS_FILE))

    def setting(self, name: str) -> Json:
        """Give an argument by "section.name"; None where it is unknown."""
        section, _, key = name.partition(".")
        values = self.arguments.get(section)
        return values.get(key) if isinstance(values, Mapping) else None


@dataclass(frozen=True)
class Missing:
    """A run of a grid that is not there (yet).

    Attributes:
        name: The point's.
        task: Its task; None if the grid does not say it.
        seed: Its seed.
        folder: Where it would be.
    """

    name: str
    task: str | None
    seed: int
    folder: Path


@dataclass(frozen=True)
class Group:
    """Runs that belong in one table.

    Attributes:
        title: Of the table.
        runs: What is there.
        missing: What should be.
        axes: Of a grid: the arguments it varies, as "section.name"; else empty.
        labels: An axis' short name.
        reference: The paper's table that it stands beside; None if none is named.
        baseline: Values by axis of the point to compare with; None if none is named.
        points: Of a grid: values by axis of each of its points, by name, in order.
    """

    title: str
    runs: Sequence[Run]
    missing: Sequence[Missing] = ()
    axes: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    reference: str | None = None
    baseline: Mapping[str, Json] | None = None
    points: Mapping[str, Mapping[str, Json]] = field(default_factory=dict)


@dataclass(frozen=True)
class Collection:
    """All that was found.

    Attributes:
        groups: The grids, in order, then all other runs as one group.
        unfinished: Folders of runs that were begun and not measured, outside of grids.
    """

    groups: Sequence[Group]
    unfinished: Sequence[Path]


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """Read all runs that are found under some paths.

    Args:
        paths: Runs, folders of runs, folders of several seeds, grids.

    Raises:
        ArtifactError: As `load_collection`.
    """
    return [run for group in load_collection(paths).groups for run in group.runs]


def load_collection(paths: Sequence[Path]) -> Collection:
    """Read all runs and grids that are found under some paths; each folder counts once.

    Args:
        paths: Runs, folders of runs, folders of several seeds, grids.

    Raises:
        ArtifactError: If a path is not there, a file is damaged, or there is no finished run.
    """
    runs: dict[Path, Run] = {}
    grids: dict[Path, Group] = {}
    unfinished: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise ArtifactError(f"{path} is no folder: give a run, a folder of runs, or a grid")
        for folder in _find(path):
            key = folder.resolve()
            if (folder / GRID_FILE).is_file():
                grids.setdefault(key, load_grid(folder))
            elif (folder / METRICS_FILE).is_file():
                runs.setdefault(key, load_run(folder))
            else:
                unfinished.setdefault(key, folder)
    groups = list(grids.values())
    parts = [part for run in runs.values() for part in split_measures(run)]
    groups += [Group("Results", parts)] if parts else []
    if not any(group.runs for group in groups):
        where = ", ".join(str(path) for path in paths)
        raise ArtifactError(f"no finished run (with {METRICS_FILE}) in {where}: train one first")
    return Collection(groups, list(unfinished.values()))


def _find(folder: Path) -> Iterator[Path]:
    """Give grids and runs, in the order of names; nothing inside of either."""
    marks = (GRID_FILE, METRICS_FILE, _IDENTITY_FILE)
    if any((folder / name).is_file() for name in marks):
        yield folder
    elif not (folder / MANIFEST).is_file():  # an artefact holds no runs, and may be large
        for inner in sorted(folder.iterdir()):
            if inner.is_dir() and not inner.is_symlink():
                yield from _find(inner)


def load_run(
    folder: Path, *, name: str | None = None, point: Mapping[str, Json] | None = None
) -> Run:
    """Read a finished run.

    Args:
        folder: The run.
        name: Instead of the folder's.
        point: Values by axis, where it is of a grid.

    Raises:
        ArtifactError: If a file is missing or damaged, or `metrics.json` does not follow from
            `predictions.jsonl`.
    """
    metrics = read_object(folder / METRICS_FILE)
    arguments = read_optional(folder / _ARGUMENTS_FILE)
    try:
        system = str(metrics.get("system") or _old_system(folder))
        run = Run(
            system,
            name or folder.name,
            str(metrics["task"]),
            int(metrics["seed"]),
            folder,
            arguments,
            metrics,
            read_decisions(folder / PREDICTIONS_FILE),
            dict(point or {}),
        )
        _check_value(run)
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(folder / METRICS_FILE, error) from None
    return run


def _old_system(folder: Path) -> str:
    method = str(read_optional(folder / _IDENTITY_FILE).get("method", folder.name))
    return _METHODS.get(method, method)


def _check_value(run: Run) -> None:
    """Refuse metrics that were not measured on the predictions beside them."""
    decided = run.decisions
    if run.metrics["n"] != len(decided.labels):
        raise ValueError(f"n is {run.metrics['n']}, there are {len(decided.labels)} predictions")
    if run.metric in TEXT_METRICS:
        return  # `split_measures` looks at each of its measures
    if run.metric not in METRICS:
        raise ValueError(f"metric {run.metric} is unknown")
    value = METRICS[run.metric](decided.labels, decided.predicted, decided.names)
    if not abs(value - run.value) <= _ROUNDING:  # so that NaN is refused too
        raise ValueError(f"{run.metric} is {run.value:.4f}, and {value:.4f} by its predictions")


def load_grid(folder: Path) -> Group:
    """Read a grid: what is there of its points, and what is missing.

    A point stands once for each task, under one name.

    Raises:
        ArtifactError: If `grid.json` or a point is damaged.
    """
    grid = read_object(folder / GRID_FILE)
    runs: list[Run] = []
    missing: list[Missing] = []
    parts: dict[str | None, list[str | None]] = {}
    try:
        for point in grid["points"]:
            name, values = str(point["name"]), dict(point["values"])
            task = point.get("task") or values.get(TASK_AXIS)
            task = str(task).rpartition("/")[2].removesuffix(".yaml") if task else None
            for seed, place in point["seeds"].items():
                run = folder / place
                if (run / METRICS_FILE).is_file():
                    own = split_measures(load_run(run, name=name, point=values))
                    parts[task] = [part.task for part in own]
                    runs += own
                else:
                    missing.append(Missing(name, task, int(seed), run))
        return Group(
            str(grid.get("title") or grid["name"]),
            runs,
            [replace(one, task=name) for one in missing for name in parts.get(one.task, [one.task])]
            if any(run.each is not None for run in runs)
            else missing,
            tuple(grid["axes"]),
            dict(grid.get("labels") or {}),
            grid.get("reference"),
            grid.get("baseline"),
            {str(point["name"]): dict(point["values"]) for point in grid["points"]},
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(folder / GRID_FILE, error) from None
