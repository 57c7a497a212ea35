"""One run of a grid, whichever command makes it, and where it goes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from pgra.pipelines.grid import Grid, Point
from pgra.pipelines.run import Outcome
from pgra.processes import Processes
from pgra.types import Json


class AnyRun(Protocol):
    """One run of a grid."""

    @property
    def point(self) -> Point:
        """Give its cell."""
        ...

    @property
    def task(self) -> str | None:
        """Give the task as the grid names it; None where the arguments do."""
        ...

    @property
    def seed(self) -> int:
        """Give its seed."""
        ...

    @property
    def folder(self) -> Path:
        """Say where it is."""
        ...

    @property
    def name(self) -> str:
        """Name it in a log."""
        ...

    @property
    def is_finished(self) -> bool:
        """Say whether it was measured."""
        ...

    @property
    def width(self) -> float:
        """Say how much it searches: those that search most come first."""
        ...

    @property
    def task_of_arguments(self) -> str | None:
        """Give the task as its arguments name it."""
        ...

    def value(self, name: str) -> Json:
        """Give an argument's value by its name, as JSON."""
        ...

    def make(self, processes: Processes) -> Outcome:
        """Make it, or take it up."""
        ...

    def drop_reader(self) -> None:
        """Delete the weights it trained, once it is measured."""
        ...


def name_run(task: str | None, point: Point, seed: int) -> str:
    """Name a run in a log."""
    told = "" if task is None else f"{task}, "
    return f"{told}{point.name}, seed {seed}"


def cells(grid: Grid, root: Path) -> Iterator[tuple[str | None, Point, Path]]:
    """Give task, point and folder of each cell, in the order of the table.

    Args:
        grid: The grid.
        root: Folder of all its runs.
    """
    for task in grid.tasks or (None,):
        parent = root / task_folder(task) if grid.has_task_folders and task else root
        for point in grid.points:
            yield task, point, parent / point.folder


def task_folder(task: str) -> str:
    """Give the folder's name of a task, which may be the path of a YAML."""
    return task.rpartition("/")[2].removesuffix(".yaml")
