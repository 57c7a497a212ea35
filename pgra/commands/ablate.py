"""Runs a grid of runs from a YAML: `pgra ablate NAME`, and the files in `ablations/`."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pgra.commands.common import (
    about,
    given_names,
    join_run,
    parse_run,
    quiet_libraries,
    say,
)
from pgra.config import Arguments, Defaults, arg, list_yamls, parse_first, wants_all, wants_help
from pgra.errors import ConfigError, PgraError
from pgra.experiments import SeriesArguments

if TYPE_CHECKING:
    from pgra.experiments.grid import Grid, GridRun, Point
    from pgra.methods.arguments import RunArguments


@dataclass(kw_only=True)
class GridArguments(Arguments):
    """How a grid is run."""

    demo: bool = arg(False, "Bundled models and small sizes, as the YAML says.")
    dry_run: bool = arg(False, "List the points and their runs, and run nothing.")
    seeds: list[int] | None = arg(
        None, "Seeds of the reader or the exemplars, a run each; default: the YAML's, else 0 1 2."
    )
    tasks: list[str] | None = arg(None, "Tasks, each with all points; default: the YAML's.")
    axis: list[str] | None = arg(
        None, "Values of an axis in place of the YAML's: num_candidates=150,50."
    )
    drop_readers: bool = arg(
        False,
        "Delete the reader and the checkpoints of each run once it is measured; its predictions "
        "and metrics stay, and the grid continues.",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a grid of runs from a YAML, and show them in one table.

    Examples:
      pgra ablate k --demo
      pgra ablate k --demo --dry-run
      pgra ablate d --tasks sst2 trec --seeds 0 1 2 3 4
      pgra ablate k --axis num_candidates=200,100 --task mr --output_dir runs/k-mr
      pgra ablate my_grid.yaml --corpus my_corpus.txt
      pgra ablate kate_t6 --tasks webquestions --seeds 0 1 2 3 4

    The grids: {names}.

    The first word is one of these or the path of a YAML; all arguments of pgra train (for the grids
    kate_... those of --method kate) may follow, and override the YAML. Given again, the same
    command resumes where it was stopped.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0].startswith("-"):
        return _explain(words)
    how, rest = parse_first(GridArguments, words[1:])
    grid = _read(words[0], how, rest)
    if wants_help(rest):
        return _explain(rest, grid)
    from pgra.experiments.grid import make_runs, run_grid, write_grid
    from pgra.runs import lock_run

    context, root = join_run(rest), _root(grid, how, rest)
    seeds = SeriesArguments(seeds=how.seeds).seeds or []
    runs = make_runs(
        grid, seeds, root, lambda task, point: resolve_point(grid, task, point, rest, root)
    )
    quiet_libraries()
    if how.dry_run:
        say(describe_runs(grid, runs))
        return 0
    with lock_run(root, context):
        if context.is_main:
            write_grid(grid, runs, root)
        context.barrier()
        failures = run_grid(
            runs,
            context,
            drop_readers=how.drop_readers,
            keep_plain=grid.show == "consistency",
        )
    if not context.is_main:
        return 1 if failures else 0
    return show_results(grid, runs, failures, root)


def show_results(
    grid: "Grid", runs: "Sequence[GridRun]", failures: Mapping[str, str], root: Path
) -> int:
    """Show results and failures (reasons by run); return 1 if a run or the table failed."""
    from pgra.commands.report import consistency
    from pgra.commands.report import main as report

    code = 1 if failures else 0
    done = [run for run in runs if run.is_finished]
    tables = [(report, [str(root)])] if done else []
    if done and grid.show == "consistency":
        folder = str(root / "consistency")
        tables.append((consistency, ["--runs", str(root), "--output_dir", folder]))
    for command, words in tables:
        try:
            command(words)
        except PgraError as error:  # runs that it cannot put into one table stay where they are
            say(f"no table: {error}")
            code = 1
    if grid.show == "seconds":
        say(_describe_seconds(done))
    if grid.show == "dev":
        say(_describe_best(done))
    for name, reason in failures.items():
        say(f"failed: {name}: {reason}")
    if failures:
        say(f"{len(failures)} of {len(runs)} runs failed; the same command tries them again")
    return code


def _describe_seconds(runs: "Sequence[GridRun]") -> str:
    from pgra.report.results import METRICS_FILE, read_object
    from pgra.report.tables import Cell, Table

    took = [read_object(run.folder / METRICS_FILE)["seconds"] for run in runs]
    stages = list(dict.fromkeys(stage for seconds in took for stage in seconds))
    rows = [
        [Cell(run.name), *(Cell.of(own.get(stage, "-"), ".1f") for stage in (*stages, "all"))]
        for run, seconds in zip(runs, took, strict=True)
        for own in ({**seconds, "all": sum(seconds.values())},)
    ]
    return Table("Wall-clock seconds of each stage", ["run", *stages, "all"], rows).to_text()


def _describe_best(runs: "Sequence[GridRun]") -> str:
    """List each task's best point on the dev set, beside what the paper chose (table 7)."""
    from pgra.report.compare import load_reference
    from pgra.report.results import read_object
    from pgra.report.tables import Cell, Table
    from pgra.run_folder import TRAINING_FILE

    paper = load_reference("T7").rows
    values = {run.folder: float(read_object(run.folder / TRAINING_FILE)["value"]) for run in runs}
    rows = []
    for task in dict.fromkeys(str(run.args.data.task) for run in runs):
        own = [run for run in runs if run.args.data.task == task]
        best = max(own, key=lambda run: values[run.folder])  # the first of equals
        chosen = [best.point.name, f"{values[best.folder]:.4f}"]
        printed = [f"{row[task]:g}" if task in row else "" for row in paper.values()]
        rows.append([Cell(text) for text in (task, *chosen, *printed)])
    columns = ["task", "best point", "dev", *(f"{name} (paper)" for name in paper)]
    return Table("Best on the dev set", columns, rows).to_text()


def describe_runs(grid: "Grid", runs: "Sequence[GridRun]") -> str:
    from pgra.experiments.grid import in_order
    from pgra.report.tables import Cell, Table

    points: dict[tuple[str | None, str], list[GridRun]] = {}
    for run in in_order(runs):
        points.setdefault((run.task, run.point.name), []).append(run)
    rows = []
    for own in points.values():
        training = own[0].args.sections.get("training")
        steps = "-" if training is None else str(training.max_steps)
        finished = str(sum(run.is_finished for run in own))
        cells = [own[0].point.name, own[0].args.data.task or "", str(len(own)), finished, steps]
        rows.append([Cell(text) for text in cells])
    note = f"{len(runs)} runs, {sum(run.is_finished for run in runs)} of them finished"
    return Table(grid.title, ["point", "task", "runs", "finished", "steps"], rows, [note]).to_text()


def _explain(words: Sequence[str], grid: "Grid | None" = None) -> int:
    """Show the help, or report that the grid is missing."""
    names = ", ".join(list_yamls("ablations"))
    if not wants_help(words):
        raise ConfigError(f"name a grid first, such as pgra ablate k --demo; there are: {names}")
    parse_run(
        ["--help-all" if wants_all(words) else "--help"],
        [GridArguments],
        prog="pgra ablate NAME|FILE.yaml",
        **{name: text.format(names=names) for name, text in about(main).items()},
        under=() if grid is None else grid.under(None, grid.cells[0]),
    )
    return 0


def _read(name: str, how: GridArguments, rest: Sequence[str]) -> "Grid":
    """Read the grid; refuse axes that are also given as arguments."""
    from pgra.experiments.grid import read_axes, read_grid

    grid = read_grid(name, demo=how.demo, axes=read_axes(how.axis or ()))
    given = given_names(rest)
    for axis in given.intersection(grid.axes):
        raise ConfigError(
            f"{axis} is an axis of the grid '{grid.name}': give its values as "
            f"--axis {axis}=VALUE,VALUE"
        )
    if "seed" in given:
        raise ConfigError("a grid runs several seeds: give --seeds 0 1 2, or --seeds 0 for one")
    if how.tasks and "task" in given:
        raise ConfigError("--task and --tasks both name what to run: give one of them")
    return replace(grid, asked=tuple(how.tasks or ())) if how.tasks or "task" in given else grid


def _root(grid: "Grid", how: GridArguments, rest: Sequence[str]) -> Path:
    """Return the grid's folder: the last one on the command line, in either spelling."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    default = f"runs/ablate-{grid.name}{'-demo' if how.demo else ''}"
    parser.add_argument("--output_dir", "--output-dir", default=default)
    return Path(parser.parse_known_args(list(rest))[0].output_dir)


def resolve_point(
    grid: "Grid", task: str | None, point: "Point", words: Sequence[str], root: Path
) -> "RunArguments":
    """Read a point's arguments, lowest first: grid, --profile, --config, point, command line.

    `task` is None where the arguments name one; `root` is the folder of the grid's runs.
    """
    from pgra.experiments.grid import argument_names
    from pgra.methods.base import fill_folder

    over = [grid.over(task, point)]
    if not grid.share:  # artifacts of its own
        folder = str(root / point.folder / "artifacts")
        over.append(Defaults(grid.origin, {"artifacts_dir": folder}))
    args, _ = parse_run(
        words,
        prog="pgra ablate",
        **about(main),
        under=[*grid.under(task, point), Defaults(grid.origin, {"output_dir": str(root)})],
        over=over,
        others=argument_names(grid),
    )
    return fill_folder(args)
