"""`pgra task`: one task, checked and shown."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from statistics import fmean

from pgra.commands.common import parse, say
from pgra.config import arg
from pgra.data.examples import DataArguments, open_named, read_split
from pgra.data.tasks import SPLITS, AnyTask, load_any_task
from pgra.errors import ConfigError
from pgra.prompts import Verbalizer, task_format
from pgra.types import Example

_UNUSED = (
    "max_train_samples",
    "max_dev_samples",
    "max_test_samples",
    "dev_fraction",
    "split_seed",
    "test_fraction",
    "allow_test_in_train",
)
_NUM_SHOWN = 2


@dataclass(kw_only=True)
class TaskArguments(DataArguments):
    """Which task, which rows, and how they are shown."""

    num_exemplars: int = arg(2, "Labelled examples in the prompts that are shown.", least=0)


def main(words: Sequence[str]) -> int:
    """Check tasks' YAMLs and files, and show two rows of each as the LM and the reader see them.

    Examples:
      pgra task my_task.yaml --train_file train.csv --test_file test.csv
      pgra task rotten-tomatoes --dataset_name bundled:rotten-tomatoes
      pgra task sst2 sst5 cola trec cr mr mpqa subj --dataset_name own

    Every row of the files that are named is read; own is the task's data set on the hub. Without
    any, the YAML is checked.
    """
    names = list(takewhile(lambda word: not word.startswith("-"), words))
    flags = list(words[len(names) :])
    for named in [[f"--task={name}", *flags] for name in names] or [flags]:
        (args,) = parse(main, [TaskArguments], named, "pgra task NAME ...", unused=_UNUSED)
        if args.task is None:
            raise ConfigError("name the task or its YAML: pgra task my_task.yaml")
        _check(args)
    return 0


def _check(args: TaskArguments) -> None:
    logging.getLogger("pgra.data").setLevel(logging.WARNING)
    task = load_any_task(str(args.task))
    say(f"{args.task}: valid")
    lines = list[str]()
    files = (args.train_file, args.validation_file, args.test_file)
    named = args.dataset_name
    if named == "own":
        args.dataset_name = None
    for split, file in zip(SPLITS, files, strict=True):
        raw = open_named(task, args, split) if file or named else None
        if raw is None:
            continue
        records = list(raw.rows)
        rows = read_split(task, replace(raw, rows=records), split)
        lines = lines or list(_as_read(task, rows, args.num_exemplars))
        length = fmean(len(row.text.split()) for row in rows)
        text = f"{split}: {len(rows):,} rows of {length:.1f} words on average"
        if task.labels:
            counts = Counter(row.label for row in rows).items()
            labels = ", ".join(f"{label} {count:,}" for label, count in counts)
            text = f"{text}: {labels}"
        say(text)
        if dropped := len(records) - len(rows):
            say(f"  {dropped:,} rows more have no text, or a label that is left out")
    say("\n".join(lines or ["give --train_file FILE to see rows as models see them"]))


def _as_read(task: AnyTask, rows: Sequence[Example], num_exemplars: int) -> Iterator[str]:
    """Yield the first rows, after exemplars, as models see them."""
    exemplars = (rows[_NUM_SHOWN:] or rows)[:num_exemplars]
    style = task_format(task)
    for row in rows[:_NUM_SHOWN]:
        yield f"\nthe LM reads ({row.id}):"
        prompt = style.write(exemplars, row.fields)
        yield from (f"  {line}".rstrip() for line in prompt.splitlines())
        if task.labels and task.has_reader:
            query = task.reader_text.format_map(row.fields)
            words = Verbalizer(task.reader_words, task.reader_text)
            yield f"\nthe reader reads, for each evidence ({row.id}):"
            yield f"  {query} (a passage of the corpus)"
            yield f"and learns to write: {words.target_text(row.label or task.labels[0])}"
    if not task.has_reader:
        yield "\nwithout reader_template and verbalizer it is for head, knn and icl, not for a T5"
