"""Grids: a YAML of points, their costs, and runs that share their work.

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

import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Protocol, TypeVar

import yaml

from pgra.artifacts import write_json
from pgra.config import (
    PROFILES,
    READER_SYSTEMS,
    DataArguments,
    Defaults,
    PgraArguments,
    SeriesArguments,
    choose,
    config_root,
    read_yaml,
)
from pgra.core import ALONE, Context, Json
from pgra.errors import ArtifactError, ConfigError, DataError, PgraError, unknown_name
from pgra.exemplars import SelectionArguments
from pgra.lm.base import CompleterArguments, LanguageModel
from pgra.methods.base import check_run, prepare_runs
from pgra.methods.kate import run_icl
from pgra.methods.kate_arguments import IclArguments
from pgra.methods.kate_inputs import IclRun, open_lm, read_inputs
from pgra.methods.pgra import open_stages, read_task
from pgra.plan import make_plan
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.reader.record import READER_FOLDER
from pgra.report.results import METRICS_FILE, read_object
from pgra.rerank.similarity import find_similarity
from pgra.run_folder import IDENTITY_FILE, WEIGHTS_FILE, check_writable, run_identity
from pgra.runs import Outcome, run_system, variant

# The YAMLs of grids: where they are, which keys they have, and how one stands on another.


_KEYS = (
    *("about", "base", "baseline", "by_task", "command", "demo", "extends", "grid", "labels"),
    *("points", "reference", "seeds", "share", "show", "tasks", "title"),
)
_MERGED = ("base", "by_task", "labels")  # the other keys are replaced
_MAPPINGS = ("base", "by_task", "demo", "grid", "labels")
_LISTS = ("points", "seeds", "tasks")


def grid_names() -> list[str]:
    """Name the shipped grids."""
    paths = (config_root() / "ablations").glob("*.yaml")
    return sorted(path.stem for path in paths if not path.stem.startswith("_"))


COMMANDS = ("train", "icl")
"""What makes a grid's runs: `train.py`, or `pgra icl`."""


def find_grid(name: str) -> Path:
    """Give the YAML of a shipped grid, or the path as it is.

    Raises:
        ConfigError: If there is no such grid, with the nearest.
    """
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    choose("grid", name, grid_names())
    return config_root() / "ablations" / f"{name}.yaml"


def read_layers(path: Path) -> dict[str, Any]:
    """Read a YAML over the one it extends, which lies beside it or is one of ours.

    Raises:
        ConfigError: On an unknown key, or one of the wrong kind.
    """
    values = _read_keys(path)
    below = values.pop("extends", None)
    if below is None:
        return values
    beside = path.parent / f"{below}.yaml"
    ours = config_root() / "ablations" / f"{below}.yaml"
    lower = _read_keys(beside if beside.is_file() else ours)
    if "extends" in lower:
        raise ConfigError(f"{path}: extends {below}, which extends another: one step is all")
    merged = merge(lower, values)
    if "demo" in lower and "demo" in values:
        merged["demo"] = merge(lower["demo"], values["demo"])
    return merged


def _read_keys(path: Path) -> dict[str, Any]:
    values = read_yaml(path)
    for part, where in ((values, ""), (values.get("demo") or {}, "demo: ")):
        if not isinstance(part, dict):
            raise ConfigError(f"{path}: demo must be a mapping of names to values")
        for key, value in part.items():
            if key not in _KEYS:
                raise ConfigError(f"{path}: {where}{unknown_name('key', str(key), _KEYS)}")
            _check_kind(f"{path}: {where}{key}", key, value)
    return values


def _check_kind(where: str, key: str, value: object) -> None:
    if key == "command" and value not in COMMANDS:
        raise ConfigError(f"{where}: {unknown_name('command', str(value), COMMANDS)}")
    if key in _MAPPINGS and not isinstance(value, dict):
        raise ConfigError(f"{where} must be a mapping of names to values")
    if key in _LISTS and not isinstance(value, list):
        raise ConfigError(f"{where} must be a list")


def merge(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Lay one YAML's keys over another's."""
    merged = {**lower, **upper}
    for key in _MERGED:
        if key in lower and key in upper:
            merged[key] = {**lower[key], **upper[key]}
    return merged


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


# One run of a grid, whichever command makes it, and where it goes.


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

    def make(self, context: Context) -> Outcome:
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


# Runs a grid: points that share work share it, and what is finished is taken up.
#
#     NAME/grid.json              the points and where their runs are, written before anything runs
#     NAME/POINT/seed-N/          a run each; NAME/TASK/POINT/seed-N/ with several tasks
#
# All points of a grid share one artefacts folder, so one LM with one prompt has one bank. The
# points with the most candidates run first: the candidates of fewer are the first of more, so
# that those runs add no forward of the LM; how many become evidence is a cut of one ranking.


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

    def make(self, context: Context) -> Outcome:
        """Make it; see `run_point`."""
        return run_point(self, context)

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
    context: Context = ALONE,
    *,
    drop_readers: bool = False,
) -> list[Failure]:
    """Make all runs; one that fails does not stop the others.

    In several processes only what all refuse alike is passed over, arguments and data: anything
    else may be the failure of one alone, for which the others would wait.

    Args:
        runs: In any order.
        context: Who shares the work.
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
            run.make(context)
        except PgraError as error:
            if context.worker.world > 1 and not isinstance(error, (ConfigError, DataError)):
                raise
            logger.error("ablate: %s failed: %s", run.name, error)
            failures.append(Failure(run, " ".join(str(error).split())))
            continue
        if drop_readers and context.worker.is_main:
            run.drop_reader()
        context.barrier()
    return failures


def run_point(run: GridRun, context: Context = ALONE) -> Outcome:
    """Make one run, or take it up, also where its reader was dropped.

    Raises:
        PgraError: As the system says.
    """
    if not run.is_dropped:
        return run_system(run.args, run.training, context)
    prepared = prepare_runs(run.args, [run.training], context)
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


# Runs of a grid that `pgra icl` makes: KATE's tables and figures, one frozen LM for all points.
#
# A point that draws nothing has one run, whatever the number of seeds: its others would be the
# same.


ResolveIcl = Callable[[str | None, Point], IclRun]


@dataclass
class SharedLm:
    """The LM of the run before, which the next one takes if it asks for the same."""

    _asked: Mapping[str, Json] | None = None
    _completer: LanguageModel | None = None

    def open(self, run: IclRun, context: Context) -> LanguageModel:
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
            self._completer, self._asked = open_lm(run, context), asked
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

    def make(self, context: Context) -> Outcome:
        """Make it, or take it up.

        Raises:
            PgraError: As `run_icl`.
        """
        return run_icl(self.run, self.lm.open, context)

    def drop_reader(self) -> None:
        """Do nothing: there is none."""


def make_icl_runs(
    grid: Grid, seeds: Sequence[int], root: Path, resolve: ResolveIcl
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


# What a grid costs before it is run: the texts that the LM has yet to read, once a bank.


@dataclass(frozen=True)
class Cost:
    """What the LM has yet to read for the runs of one point.

    Attributes:
        runs: The point's, one a seed.
        texts: For this point alone, behind those before it; None if it cannot be told.
        is_exact: Whether that is a count, not an estimate.
        note: Why there is nothing to read, or why it cannot be told.
    """

    runs: Sequence[GridRun]
    texts: int | None
    is_exact: bool
    note: str


def foresee(runs: Sequence[GridRun]) -> list[Cost]:
    """Tell what the LM has to read for each point, in the order they run; no model runs.

    Points that share a bank are told of once. One that searches the same bank in another way may
    read some texts that another does: it is counted as if it did not.
    """
    points: dict[tuple[str | None, str], list[GridRun]] = {}
    for run in in_order(runs):
        points.setdefault((run.task, run.point.name), []).append(run)
    known: dict[str, str] = {}
    return [_foresee_point(own, known) for own in points.values()]


def _foresee_point(runs: Sequence[GridRun], known: dict[str, str]) -> Cost:
    run = runs[0]
    if run.args.system == "icl":
        return Cost(runs, None, is_exact=False, note="system icl is not foreseen")
    if run.args.rerank.num_evidence == 0 or run.args.rerank.reranker == "none":
        return Cost(runs, 0, is_exact=True, note="the LM reads nothing")
    try:
        return _count(runs, known)
    except PgraError as error:
        return Cost(runs, None, is_exact=False, note=" ".join(str(error).split()))


def _count(runs: Sequence[GridRun], known: dict[str, str]) -> Cost:
    """Count what is not told of yet; `known` has points by what they read of which bank."""
    args = runs[0].args
    bank, stage = _bank(args), _stage(args)
    is_fitted = find_similarity(args.rerank.similarity).is_fitted
    read = [bank if stage == "whole" else f"{bank} {stage}"]
    if is_fitted and stage != "whole":
        read.append(f"{read[0]} sample")
    other = known.get(bank) or known.get(read[0])
    if bank in known or all(part in known for part in read):
        return Cost(runs, 0, is_exact=True, note=f"shares the bank of {other}")
    plan = make_plan(args, seconds=0)
    if plan.cost is None:
        note = f"what reranker {args.rerank.reranker} reads is not known"
        return Cost(runs, None, is_exact=False, note=note)
    cost, note, to_read = plan.cost, "", plan.cost.to_read
    if other is not None:  # only what the similarity is fitted to is new
        plain = replace(args, rerank=replace(args.rerank, similarity="dot"))
        without = make_plan(plain, seconds=0).cost
        to_read -= 0 if without is None else without.to_read
        note = f", behind {other}"
    if cost.reads_pairs:
        note = f": each passage with each query, about {cost.reading.tokens:,} tokens"
    for part in read:
        known.setdefault(part, runs[0].point.name)
    return Cost(runs, to_read, cost.is_exact, f"{cost.basis}{note}" if to_read else "all read")


def _bank(args: PgraArguments) -> str:
    """Tell banks apart by their folder, which holds the hash of all that states depend on."""
    found = read_task(args)
    open_stages(found, args)
    assert found.reranker is not None
    return found.reranker.store


def _stage(args: PgraArguments) -> str:
    """Tell first stages apart, but for k."""
    if width(args) == float("inf"):
        return "whole"
    values = asdict(args.retriever)
    return str({name: value for name, value in values.items() if name != "num_candidates"})
