"""Runs a grid of runs from a YAML: `pgra ablate NAME`, and the files in `ablations/`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from pgra.commands.common import SECTIONS, quiet_imports, quiet_libraries, say, say_once
from pgra.config import Defaults, PgraArguments, SeriesArguments, parse_arguments, parse_first
from pgra.errors import ConfigError, PgraError

if TYPE_CHECKING:
    from pgra.core import Context
    from pgra.experiments.grid import AnyRun, Cost, Failure, Grid, GridRun, IclGridRun, Point
    from pgra.methods.kate_inputs import IclRun
    from pgra.reader.arguments import ReaderTrainingArguments


# What `pgra ablate` shows: the points and what they cost before, the table after.


def show_results(
    grid: "Grid", runs: "Sequence[AnyRun]", failures: "Sequence[Failure]", root: Path
) -> None:
    """Show what came out, and what did not.

    Args:
        grid: The grid.
        runs: All of its runs.
        failures: Those that could not be made.
        root: Folder of all of them.
    """
    if any(run.is_finished for run in runs):
        _show(root)
    if grid.show == "seconds":
        say(_describe_seconds(runs))
    for failure in failures:
        say(f"failed: {failure.run.name}: {failure.reason}")
    if failures:
        say(f"{len(failures)} of {len(runs)} runs failed; the same command tries them again")


def _show(root: Path) -> None:
    """Show the report's table; runs that it cannot put into one stay where they are."""
    from pgra.commands.report import main as report

    try:
        report([str(root)])
    except PgraError as error:
        say(f"no table: {error}")


def _describe_seconds(runs: "Sequence[AnyRun]") -> str:
    """List what each stage of each finished run took, in seconds."""
    from pgra.report.results import read_object

    done = [run for run in runs if run.is_finished]
    took = [read_object(run.folder / "metrics.json")["seconds"] for run in done]
    stages = list(dict.fromkeys(stage for one in took for stage in one))
    rows = [("seconds", *stages, "all")]
    for run, one in zip(done, took, strict=True):
        told = [f"{one[stage]:.1f}" if stage in one else "-" for stage in stages]
        rows.append((run.name, *told, f"{sum(one.values()):.1f}"))
    return "\n".join(_columns(rows))


def describe_costs(grid: "Grid", runs: "Sequence[GridRun]") -> str:
    """List points in the order they run, with what the LM reads for each."""
    from pgra.experiments.grid import foresee

    costs = foresee(runs)
    head = ("task", "point", "runs", "finished", "steps", "LM reads", "")
    rows = [head, *(_cost_row(cost) for cost in costs)]
    finished = sum(run.is_finished for run in runs)
    known = [cost.texts for cost in costs if cost.texts is not None]
    sign = "" if all(cost.is_exact for cost in costs) else "about "
    unknown = len(costs) - len(known)
    return "\n".join(
        [
            grid.title,
            *_columns(rows),
            f"{len(runs)} runs, {finished} of them finished; the LM reads {sign}{sum(known):,} "
            f"texts in all" + (f", and {unknown} points cannot be told" if unknown else ""),
        ]
    )


def _cost_row(cost: "Cost") -> tuple[str, ...]:
    run = cost.runs[0]
    finished = sum(run.is_finished for run in cost.runs)
    sign = "" if cost.is_exact else "~"
    return (
        run.args.data.task or "",
        run.point.name,
        str(len(cost.runs)),
        str(finished),
        str(run.training.max_steps),
        "?" if cost.texts is None else f"{sign}{cost.texts:,}",
        cost.note,
    )


def describe_prompts(grid: "Grid", runs: "Sequence[IclGridRun]") -> str:
    """List points in the order of the table, with the prompts that are asked for each."""
    from pgra.experiments.grid import foresee_prompts

    costs = foresee_prompts(runs)
    rows: list[Sequence[str]] = [("task", "point", "runs", "finished", "queries", "prompts", "")]
    for cost in costs:
        run = cost.runs[0]
        numbers = ("?" if n is None else f"{n:,}" for n in (cost.queries, cost.prompts))
        done = sum(run.is_finished for run in cost.runs)
        names = (run.task_of_arguments or "", run.point.name)
        rows.append((*names, str(len(cost.runs)), str(done), *numbers, cost.note))
    asked = sum(cost.prompts or 0 for cost in costs)
    unknown = sum(cost.prompts is None for cost in costs)
    return "\n".join(
        [
            grid.title,
            *_columns(rows),
            f"{len(runs)} runs, {sum(run.is_finished for run in runs)} of them finished; at most "
            f"{asked:,} prompts in all, without those that are answered already"
            + (f", and {unknown} points cannot be told" if unknown else ""),
        ]
    )


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  ".join(f"{word:<{width}}" for word, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


DESCRIPTION = "Run a grid of runs from a YAML, and show them in one table."
EXAMPLE = """examples:
  pgra ablate k --demo
  pgra ablate k --demo --dry-run
  pgra ablate d --tasks sst2 trec --seeds 0 1 2 3 4
  pgra ablate k --axis num_candidates=200,100 --task mr --output_dir runs/k-mr
  pgra ablate my_grid.yaml --corpus my_corpus.txt
  pgra ablate kate_t6 --tasks webquestions --seeds 0 1 2 3 4

The grids: {names}.
The first word is one of these or the path of a YAML; all arguments of train.py (of pgra icl for
the grids kate_...) may follow, and win over the YAML. Given again, the same command goes on where
it was stopped.
"""


@dataclass(kw_only=True)
class GridArguments:
    """How a grid is run."""

    demo: bool = field(
        default=False, metadata={"help": "Bundled models and small sizes, as the YAML says."}
    )
    dry_run: bool = field(
        default=False, metadata={"help": "List points and what they cost, and run nothing."}
    )
    seeds: list[str] | None = field(
        default=None,
        metadata={"help": "Seeds of the reader, a run each; default: the YAML's, else 0 1 2."},
    )
    tasks: list[str] | None = field(
        default=None, metadata={"help": "Tasks, each with all points; default: the YAML's."}
    )
    axis: list[str] | None = field(
        default=None,
        metadata={"help": "Values of an axis in place of the YAML's: num_candidates=150,50."},
    )
    drop_readers: bool = field(
        default=False,
        metadata={
            "help": "Delete the reader and the checkpoints of each run once it is measured; its "
            "predictions and metrics stay, and the grid goes on all the same."
        },
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a grid, or list it; 1 if a run failed."""
    words = list(sys.argv[1:] if argv is None else argv)
    quiet_imports()
    if not words or words[0].startswith("-"):
        return _explain(words)
    how, rest = parse_first(GridArguments, words[1:])
    grid = _read(words[0], how, rest)
    if "-h" in rest or "--help" in rest:
        return _explain(["--help"], grid.command)
    root = _root(grid, how, rest)
    return (
        _make_icl(grid, how, rest, root) if grid.command == "icl" else _make(grid, how, rest, root)
    )


def _make(grid: "Grid", how: GridArguments, rest: list[str], root: Path) -> int:
    """Run a grid of train.py."""
    from pgra.experiments.grid import make_runs

    context = _join(rest)
    seeds = SeriesArguments(seeds=how.seeds).seed_list() or grid.seeds
    words = [*rest, "--use_cpu"] if _is_on_cpu(rest) else rest
    runs = make_runs(
        grid, seeds, root, lambda task, point: resolve_point(grid, task, point, words, root)
    )
    quiet_libraries()
    if how.dry_run:
        with say_once():
            told = describe_costs(grid, runs)
        say(told)
        return 0
    return _make_all(grid, runs, root, context, drop_readers=how.drop_readers)


def _make_icl(grid: "Grid", how: GridArguments, rest: list[str], root: Path) -> int:
    """Run a grid of `pgra icl`."""
    from pgra.experiments.grid import make_icl_runs

    if how.drop_readers:
        raise ConfigError(
            f"drop_readers deletes readers, and the grid '{grid.name}' trains none: leave it out"
        )
    context = _join(rest)
    seeds = SeriesArguments(seeds=how.seeds).seed_list() or grid.seeds
    runs = make_icl_runs(
        grid, seeds, root, lambda task, point: resolve_icl_point(grid, task, point, rest, root)
    )
    quiet_libraries()
    if how.dry_run:
        with say_once():
            told = describe_prompts(grid, runs)
        say(told)
        return 0
    return _make_all(grid, runs, root, context)


def _is_on_cpu(rest: Sequence[str]) -> bool:
    return "--device=cpu" in rest or ("--device", "cpu") in pairwise(rest)


def _join(rest: Sequence[str]) -> "Context":
    from pgra.core import join_context

    return join_context("cpu" if _is_on_cpu(rest) else "auto")


def _make_all(
    grid: "Grid",
    runs: Sequence["AnyRun"],
    root: Path,
    context: "Context",
    *,
    drop_readers: bool = False,
) -> int:
    """Make a grid's runs, and show what came of them."""
    from pgra.experiments.grid import run_grid, write_grid

    if context.worker.is_main:
        write_grid(grid, runs, root)
    context.barrier()
    failures = run_grid(runs, context, drop_readers=drop_readers)
    if context.worker.is_main:
        show_results(grid, runs, failures, root)
    return 1 if failures else 0


def _explain(words: Sequence[str], command: str = "train") -> int:
    """Show the help, or say that the grid is missing."""
    from pgra.experiments.grid import ICL_SECTIONS, grid_names

    names = ", ".join(grid_names())
    if list(words) not in (["-h"], ["--help"]):
        raise ConfigError(f"name a grid first, such as pgra ablate k --demo; there are: {names}")
    from pgra.reader.arguments import ReaderTrainingArguments

    trains = [*SECTIONS.values(), ReaderTrainingArguments]
    parse_arguments(
        [_grid_arguments(command), *(ICL_SECTIONS.values() if command == "icl" else trains)],
        ["--help"],
        prog="pgra ablate NAME|FILE.yaml",
        description=DESCRIPTION,
        epilog=EXAMPLE.format(names=names),
    )
    return 0


def _grid_arguments(command: str) -> type:
    """Give how a grid is run, for its help; `pgra icl` tells of --seeds itself."""
    own = [
        (f.name, f.type, field(default=f.default, metadata=f.metadata))
        for f in fields(GridArguments)
        if f.name != "seeds"
    ]
    return make_dataclass("IclGridArguments", own) if command == "icl" else GridArguments


def _read(name: str, how: GridArguments, rest: Sequence[str]) -> "Grid":
    """Read the grid; refuse an axis that is an argument too."""
    from pgra.experiments.grid import read_axes, read_grid, with_tasks

    grid = read_grid(name, demo=how.demo, axes=read_axes(how.axis or ()))
    given = {word[2:].split("=")[0].replace("-", "_") for word in rest if word.startswith("--")}
    for axis in grid.axes:
        if axis in given:
            raise ConfigError(
                f"{axis} is an axis of the grid '{grid.name}': give its values as "
                f"--axis {axis}=VALUE,VALUE"
            )
    if given & {"seed", "exemplar_seed"} and (grid.command == "icl" or "seed" in given):
        raise ConfigError("a grid runs several seeds: give --seeds 0 1 2, or --seeds 0 for one")
    if how.tasks and "task" in given:
        raise ConfigError("--task and --tasks both name what to run: give one of them")
    if how.tasks or "task" in given:
        grid = with_tasks(grid, how.tasks or ())
    return grid


def _root(grid: "Grid", how: GridArguments, rest: Sequence[str]) -> Path:
    """Give the grid's folder: as the command line names it last, in either spelling."""
    root = Path("runs") / f"ablate-{grid.name}{'-demo' if how.demo else ''}"
    for flag, value in pairwise([*rest, ""]):
        name, sign, text = flag.partition("=")
        if name.replace("-", "_") == "__output_dir":
            root = Path(text if sign else value)
    return root


def resolve_point(
    grid: "Grid", task: str | None, point: "Point", words: Sequence[str], root: Path
) -> "tuple[PgraArguments, ReaderTrainingArguments]":
    """Read a point's arguments, in rising order: grid, --profile, --config, point, command line.

    Args:
        grid: The grid.
        task: One of its tasks; None where the arguments name one.
        point: One of its points.
        words: Arguments of the command line.
        root: Folder of the grid's runs.

    Raises:
        ConfigError: As `parse_arguments`, or if the values contradict each other.
    """
    from pgra.reader.arguments import ReaderTrainingArguments

    own = Defaults(grid.origin, {"output_dir": str(root)})
    *sections, training = parse_arguments(
        [*SECTIONS.values(), ReaderTrainingArguments],
        words,
        prog="pgra ablate",
        description=DESCRIPTION,
        under=[*grid.under(task, point), own],
        over=_over(grid, task, point, root),
    )
    return PgraArguments(**dict(zip(SECTIONS, sections, strict=True))), training


def resolve_icl_point(
    grid: "Grid", task: str | None, point: "Point", words: Sequence[str], root: Path
) -> "IclRun":
    """Read a point's arguments of `pgra icl`, in the order of `resolve_point`.

    Args:
        grid: The grid.
        task: One of its tasks; None where the arguments name one.
        point: One of its points.
        words: Arguments of the command line.
        root: Folder of the grid's runs.

    Raises:
        ConfigError: As `parse_arguments`, or if the values contradict each other.
    """
    from pgra.experiments.grid import ICL_SECTIONS
    from pgra.methods.kate_inputs import IclRun

    parsed = parse_arguments(
        list(ICL_SECTIONS.values()),
        words,
        prog="pgra ablate",
        description=DESCRIPTION,
        under=[*grid.under(task, point), Defaults(grid.origin, {"output_dir": str(root)})],
        over=_over(grid, task, point, root),
    )
    return IclRun(**dict(zip(ICL_SECTIONS, parsed, strict=True)))


def _over(grid: "Grid", task: str | None, point: "Point", root: Path) -> list[Defaults]:
    """Give what stands above `--config`; artefacts of its own where a grid shares none."""
    over = [grid.over(task, point)]
    if not grid.share:
        own = {"artifacts_dir": str(root / point.folder / "artifacts")}
        over.append(Defaults(grid.origin, own))
    return over
