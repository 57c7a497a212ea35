"""Lists the tasks and the data that come inside packages: `pgra data`."""

from collections.abc import Sequence

from pgra.commands.listing import Entry, bundled_entry, parse_help_only, show_list
from pgra.data.bundled import BUNDLED_DATA
from pgra.data.tasks import (
    GenerationTask,
    Task,
    generation_task_names,
    load_generation_task,
    load_task,
    task_names,
)

ABOUT = "List the tasks, and the data that come inside packages."
EXAMPLE = """example:
  pgra data
  pgra rerank --task sst2 --dataset_name bundled:rotten-tomatoes \\
      --corpus bundled:wikipedia-19k --encoder bundled:minilm-l6 --lm bundled:smollm2-135m
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Show each task, then each bundled data set and corpus."""
    parse_help_only(argv, prog="pgra data", about=ABOUT, example=EXAMPLE)
    show_list(
        "tasks, for --task:",
        [_entry(load_task(name)) for name in task_names()],
        "Any task takes --train_file, --validation_file and --test_file (jsonl, csv or tsv with "
        "its inputs and 'label'). A new task is one YAML: give its path to --task.",
    )
    show_list(
        "\ntasks whose answers are written, for pgra icl:",
        [_entry(load_generation_task(name)) for name in generation_task_names()],
        "They take --train_file and --test_file (jsonl). A new one is one YAML too.",
    )
    show_list(
        "\ndata inside packages, for --dataset_name (task) and --corpus (corpus):",
        [bundled_entry(data) for data in BUNDLED_DATA.values()],
        "A corpus may also be a file with a passage a line (.txt, .jsonl, .gz), or hub "
        "dataset/file.",
    )
    return 0


def _entry(task: Task | GenerationTask) -> Entry:
    if isinstance(task, Task):
        about = f"{', '.join(task.labels)} ({task.metric})"
    else:
        about = f"{', '.join(task.inputs)} ({', '.join(task.metrics)})"
    sizes = ", ".join(f"{split} {rows:,}" for split, rows in task.sizes.items())
    own = f"hub: {task.hub.id}" if task.hub else "no data set of its own: give files or a name"
    return Entry(task.name, about, [own, *([f"sizes: {sizes}"] if sizes else [])])
