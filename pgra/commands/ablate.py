"""Runs a grid of runs from a YAML: `pgra ablate NAME`, and the files in `ablations/`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pgra.commands import common
from pgra.config import (
    Defaults,
    arg,
    find_yaml,
    list_yamls,
    parse_first,
    read_yaml,
    wants_all,
    wants_help,
)
from pgra.errors import ConfigError, PgraError

if TYPE_CHECKING:
    from pgra.experiments.grid import Grid, GridRun, Point
    from pgra.methods.arguments import RunArguments


@dataclass(kw_only=True)
class GridArguments(common.SeriesArguments):
    """How a grid is run."""

    GROUP = "Options"

    demo: bool = arg(False, "Bundled models and small sizes, as the YAML says.")
    dry_run: bool = arg(False, "List the runs, and run nothing.")
    tasks: list[str] | None = arg(None, "Tasks, each with all points; default: the YAML's.")
    drop_readers: bool = arg(
        False, "Delete a run's reader and checkpoints once it is measured, but for plain ones."
    )
    output_dir: str | None = arg(None, "The grid's folder; default: runs/ablate-NAME.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a grid of runs from a YAML, and show them in one table.

    Examples:
      pgra ablate k --demo
      pgra ablate k --demo --dry-run
      pgra ablate d --tasks sst2 trec --seeds 0 1 2 3 4
      pgra ablate k --task mr --output_dir runs/k-mr
      pgra ablate my_grid.yaml --corpus my_corpus.txt
      pgra ablate kate_t6 --tasks webquestions --seeds 0 1 2 3 4

    pgra ablate --list shows the grids, those of the papers first. The first word is one of them or
    the path of a YAML; all arguments of pgra train (for the grids
    kate_... those of --method kate) may follow, and override the YAML. Given again, the same
    command resumes where it was stopped.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if wants_help(words):
        asked = ["--help-all" if wants_all(words) else "--help"]
        common.parse_run(
            asked, [GridArguments], prog="pgra ablate NAME|FILE.yaml", **common.about(main)
        )
    if words == ["--list"]:
        common.say(_list_grids())
        return 0
    if not words or words[0].startswith("-"):
        raise ConfigError(
            "name a grid first, such as pgra ablate k --demo; pgra ablate --list shows all"
        )
    how, rest = parse_first(GridArguments, words[1:])
    from pgra.experiments.grid import make_runs, read_grid, run_grid, write_grid
    from pgra.runs import lock_run

    grid = read_grid(words[0], demo=how.demo)
    if both := common.given_names(rest) & {"seed", *grid.axes}:
        raise ConfigError(f"the grid varies {both.pop()}: give --seeds, or a YAML that extends it")
    if how.tasks and "task" in common.given_names(rest):
        raise ConfigError("--task and --tasks both name what to run: give one of them")
    context = common.join_run(rest)
    root = Path(how.output_dir or f"runs/ablate-{grid.name}{'-demo' if how.demo else ''}")
    tasks = [] if "task" in common.given_names(rest) else how.tasks
    runs = make_runs(
        grid,
        how.seeds or [],
        root,
        lambda task, point: resolve_point(grid, task, point, rest, root),
        tasks,
    )
    common.quiet_libraries()
    if how.dry_run:
        finished = sum(run.is_finished for run in runs)
        names = [run.name + (", finished" if run.is_finished else "") for run in runs]
        common.say("\n".join([*names, f"{len(runs)} runs, {finished} of them finished"]))
        return 0
    with lock_run(root, context):
        if context.is_main:
            write_grid(grid, runs, root)
        context.barrier()
        failures = run_grid(runs, context, drop_readers=how.drop_readers)
    if not context.is_main:
        return 1 if failures else 0
    return _show_results(grid, [run for run in runs if run.is_finished], failures, root)


def _list_grids() -> str:
    """List the grids by title: tables and figures of the papers, then studies of our own."""
    lines: dict[bool, list[str]] = {True: ["of the papers:"], False: ["of our own:"]}
    for name in list_yamls("ablations"):
        title = str(read_yaml(find_yaml("grid", "ablations", name))["title"])
        is_theirs = any(f"{word} " in title for word in ("table", "figure", "section", "appendix"))
        lines[is_theirs].append(f"  {name:<24} {title}")
    return "\n".join([*lines[True], *lines[False]])


def _show_results(
    grid: "Grid", done: "Sequence[GridRun]", failures: dict[str, str], root: Path
) -> int:
    """Show results and failures (reasons by run); return 1 if a run or the table failed."""
    from pgra.commands.report import consistency
    from pgra.commands.report import main as report

    code = 1 if failures else 0
    tables = [(report, [str(root)])] if done else []
    if done and grid.show == "consistency":
        folder = str(root / "consistency")
        tables.append((consistency, ["--runs", str(root), "--output_dir", folder]))
    for command, words in tables:
        try:
            command(words)
        except PgraError as error:  # runs that it cannot put into one table stay where they are
            common.say(f"no table: {error}")
            code = 1
    if grid.show in ("seconds", "dev"):
        common.say(_describe_seconds(done) if grid.show == "seconds" else _describe_best(done))
    for name, reason in failures.items():
        common.say(f"failed: {name}: {reason}")
    if failures:
        common.say(f"{len(failures)} runs failed; the same command tries them again")
    return code


def _describe_seconds(runs: "Sequence[GridRun]") -> str:
    from pgra.report.results import METRICS_FILE, read_object
    from pgra.report.tables import Table

    took = [(run.name, read_object(run.args.folder / METRICS_FILE)["seconds"]) for run in runs]
    forms = {"run": "", **{stage: ".1f" for _, seconds in took for stage in seconds}}
    rows = [{"run": name, **seconds} for name, seconds in took]
    return Table.of("Wall-clock seconds of each stage", rows, forms).to_text()


def _describe_best(runs: "Sequence[GridRun]") -> str:
    """List each task's best point on the dev set, beside what the paper chose (table 7)."""
    from pgra.report.compare import load_reference
    from pgra.report.results import read_object
    from pgra.report.tables import Table
    from pgra.run_folder import TRAINING_FILE

    paper = load_reference("T7").rows
    rows: list[dict[str, float | str | None]] = []
    for task in dict.fromkeys(str(run.args.data.task) for run in runs):
        own = {
            run.point.name: read_object(run.args.folder / TRAINING_FILE)["value"]
            for run in runs
            if run.args.data.task == task
        }
        if None in own.values():
            return "the dev set was not measured: give --eval_steps"
        best = max(own, key=lambda name: own[name])  # the first of equals
        printed = {f"{name} (paper)": values.get(task) for name, values in paper.items()}
        rows.append({"task": task, "best point": best, "dev": own[best], **printed})
    forms = {"task": "", "best point": "", "dev": ".4f", **{f"{n} (paper)": "g" for n in paper}}
    return Table.of("Best on the dev set", rows, forms).to_text()


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
        over.append(Defaults(grid.origin, {"artifacts_dir": folder}, wins=True))
    args, _ = common.parse_run(
        words,
        prog="pgra ablate",
        **common.about(main),
        defaults=[*grid.under(task, point), *over],
        others=argument_names(grid),
    )
    return fill_folder(args)
