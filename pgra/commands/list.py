"""`pgra list`: the tasks, and the models and data that come inside packages."""

from collections.abc import Sequence
from importlib.util import find_spec

from pgra.commands.common import parse, say
from pgra.data.bundled import BUNDLED_DATA, BUNDLED_MODELS, Bundled, install_command
from pgra.data.tasks import GenerationTask, Task


def main(argv: Sequence[str]) -> int:
    """List the tasks, and the models and data that come inside packages.

    Example:
      pgra list
    """
    parse(main, [], argv)
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
