"""What `pgra ablate` shows: the points and what they cost before, the table after."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pgra.commands.common import say
from pgra.errors import PgraError

if TYPE_CHECKING:
    from pgra.pipelines.ablate import Failure, GridRun
    from pgra.pipelines.grid import Grid
    from pgra.pipelines.grid_costs import Cost
    from pgra.pipelines.grid_run import AnyRun
    from pgra.pipelines.icl_grid import IclGridRun


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
    from pgra.evaluation.run_files import read_object

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
    from pgra.pipelines.grid_costs import foresee

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
    from pgra.pipelines.icl_grid import foresee_prompts

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
