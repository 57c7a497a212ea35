"""Runs a grid of runs from a YAML: `pgra ablate NAME`, and the files in `ablations/`."""

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
    wants_help,
)
from pgra.errors import ConfigError, PgraError

if TYPE_CHECKING:
    from pgra.experiments.grid import Grid, GridRun, Point
    from pgra.methods.arguments import RunArguments


@dataclass(kw_only=True)
class GridArguments(common.SeriesArguments, common.WorkArguments):
    """How a grid is run."""

    GROUP = "Options"

    demo: bool = arg(False, "Bundled models and small sizes, as the YAML says.")
    dry_run: bool = arg(False, "List the runs, and run nothing.")
    card: str | None = arg(
        None,
        "Count the hours of this GPU, and the disk; corpora and configurations are looked up. "
        "Default: the GPU that is there.",
        choices=("a100", "a6000", "h100", "h200", "l40s"),
    )
    tasks: list[str] | None = arg(None, "Tasks, each with all points; default: the YAML's.")
    drop_readers: bool = arg(
        False, "Delete a run's reader and checkpoints once it is measured, but for plain ones."
    )
    output_dir: str | None = arg(None, "The grid's folder; default: runs/ablate-NAME.")


def main(words: Sequence[str]) -> int:
    """Run a grid of runs from a YAML, and show them in one table.

    Examples:
      pgra ablate k --demo
      pgra ablate k --demo --dry-run
      pgra ablate d --tasks sst2 trec --seeds 0 1 2 3 4
      pgra ablate k --task mr --output_dir runs/k-mr
      pgra ablate my_grid.yaml --corpus my_corpus.txt
      pgra ablate kate_t6 --tasks webquestions --seeds 0 1 2 3 4

    pgra ablate --list shows the grids. The first word is one of them or the path of a YAML; all
    arguments of pgra train (for the grids kate_... those of --method kate) may follow, and override
    the YAML. Given again, the same command resumes where it was stopped.
    """
    if wants_help(words):
        common.parse_run(main, "pgra ablate NAME|FILE.yaml", words, [GridArguments])
    if words == ["--list"]:
        common.say(_list_grids())
        return 0
    if not words or words[0].startswith("-"):
        raise ConfigError(
            "name a grid first, such as pgra ablate k --demo; pgra ablate --list shows all"
        )
    options, rest = parse_first(GridArguments, words[1:])
    from pgra.experiments.grid import describe_costs, make_runs, read_grid, run_grid, write_grid
    from pgra.runs import run_all

    grid = read_grid(words[0], demo=options.demo)
    flags = common.given_names(rest)
    if both := flags & {"seed", *grid.axes}:
        raise ConfigError(f"the grid varies {both.pop()}: give --seeds, or a YAML that extends it")
    if options.tasks and "task" in flags:
        raise ConfigError("--task and --tasks both name what to run: give one of them")
    suffix = "-demo" if options.demo else ""
    root = Path(options.output_dir or f"runs/ablate-{grid.name}{suffix}")
    runs = make_runs(
        grid,
        options.seeds or [],
        root,
        lambda task, point: resolve_point(grid, task, point, rest, root),
        [] if "task" in flags else options.tasks,
    )
    context = options.join(runs[0].args.runtime.device)
    common.quiet_libraries()
    if options.dry_run:
        lines = [run.name + (", finished" if run.is_finished else "") for run in runs]
        finished = sum(run.is_finished for run in runs)
        lines.append(f"{len(runs)} runs, {finished} of them finished")
        if options.card is not None:
            lines += describe_costs(runs, options.card)
        common.say("\n".join(lines))
        return 0

    def make(args: "RunArguments") -> None:
        run_all({args.seed: args}, context.unshared(), may_lack_reader=True)

    if context.is_main:
        write_grid(grid, runs, root)
    context.barrier()
    failures = run_grid(runs, make, context, card=options.card, drop_readers=options.drop_readers)
    if context.worker.is_part:
        num_left = sum(not run.is_finished for run in runs)
        common.say(f"{root}: {num_left} of {len(runs)} runs are left; others may be making them")
    if context.worker.is_part or not context.is_main:
        return 1 if failures else 0
    return _show_results(grid, [run for run in runs if run.is_finished], failures, root)


def _list_grids() -> str:
    """List the grids with their titles."""
    lines = []
    for name in list_yamls("ablations"):
        title = read_yaml(find_yaml("grid", "ablations", name))["title"]
        lines.append(f"{name:<24} {title}")
    return "\n".join(lines)


def _show_results(
    grid: "Grid", done: "Sequence[GridRun]", failures: dict[str, str], root: Path
) -> int:
    """Show results and failures (reasons by run); return 1 if a run or the table failed."""
    from pgra.commands.report import main as report

    code = 1 if failures else 0
    try:
        if done:
            report([str(root)])
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
    from pgra.report.tables import Table
    from pgra.run_folder import METRICS_FILE

    rows = []
    forms = {"run": ""}
    for run in runs:
        seconds = run.read(METRICS_FILE)["seconds"]
        rows.append({"run": run.name, **seconds})
        forms |= dict.fromkeys(seconds, ".1f")
    return Table.of("Wall-clock seconds of each stage", rows, forms).to_text()


def _describe_best(runs: "Sequence[GridRun]") -> str:
    """List each task's best point on the dev set, beside what the paper chose (table 7)."""
    from pgra.report.compare import load_reference
    from pgra.report.tables import Table, TableRow

    values: dict[str, dict[str, float | None]] = {}
    for run in runs:
        of_task = values.setdefault(str(run.args.data.task), {})
        of_task[run.point.name] = run.training["value"]
    forms = {"task": "", "best point": "", "dev": ".4f"}
    rows: list[TableRow] = []
    for task, of_task in values.items():
        measured = {point: value for point, value in of_task.items() if value is not None}
        if len(measured) < len(of_task):
            return "the dev set was not measured: give --eval_steps"
        best = max(measured, key=lambda point: measured[point])  # the first of equals
        row: TableRow = {"task": task, "best point": best, "dev": measured[best]}
        for name, printed in load_reference("T7").rows.items():
            row[f"{name} (paper)"] = printed.get(task)
            forms[f"{name} (paper)"] = "g"
        rows.append(row)
    return Table.of("Best on the dev set", rows, forms).to_text()


def resolve_point(
    grid: "Grid", task: str | None, point: "Point", words: Sequence[str], root: Path
) -> "RunArguments":
    """Read a point's arguments, lowest first: grid, --profile, --config, point, command line.

    `task` is None where the arguments name one; `root` is the folder of the grid's runs.
    """
    from pgra.experiments.grid import argument_names

    over = [grid.over(task, point)]
    if not grid.share:  # artifacts of its own
        folder = str(root / point.folder / "artifacts")
        over.append(Defaults(grid.origin, {"artifacts_dir": folder}, wins=True))
    args, _ = common.parse_run(
        main,
        "pgra ablate",
        words,
        defaults=[*grid.under(task, point), *over],
        others=argument_names(grid),
    )
    return args
