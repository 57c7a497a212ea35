"""Checks the YAML of a task of one's own: `pgra task validate`."""

import logging
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, takewhile, zip_longest
from statistics import fmean

from pgra.commands.common import about, say, say_words
from pgra.config import arg, choose, parse_arguments
from pgra.core import Example
from pgra.data.examples import DataArguments, open_named, own_data_set, read_split
from pgra.data.references import read_references
from pgra.data.tasks import SPLITS, GenerationTask, Task, load_any_task
from pgra.errors import ConfigError
from pgra.help import wants_help
from pgra.prompts.fewshot import PromptFormat, line_format, task_format
from pgra.prompts.verbalizer import Verbalizer

_UNUSED = (
    *("max_train_samples", "max_dev_samples", "max_test_samples", "dev_fraction", "split_seed"),
    "test_fraction",
)
_NUM_SHOWN = 2
_EVIDENCE = "(a passage of the corpus)"
_OWN = "own"


def main(argv: Sequence[str] | None = None) -> int:
    """Look at a task's YAML before anything is run with it.

    Examples:
      pgra task validate my_task.yaml
      pgra task validate my_task.yaml --train_file train.csv --test_file test.csv
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or wants_help(words[:1]):
        say_words("pgra task", main, {"validate": validate})
        return 0
    choose("word after pgra task", words[0], ["validate"])
    return validate(words[1:])


@dataclass(kw_only=True)
class ValidateArguments(DataArguments):
    """Which task, which rows, and how they are shown."""

    num_exemplars: int = arg(2, "Labelled examples in the prompts that are shown.", least=0)


def validate(argv: Sequence[str]) -> int:
    """Check a task's YAML and files, and show two rows as the LM and the reader see them.

    Examples:
      pgra task validate my_task.yaml
      pgra task validate my_task.yaml --train_file train.csv --test_file test.csv
      pgra task validate rotten-tomatoes --dataset_name bundled:rotten-tomatoes
      pgra task validate sst2 sst5 cola trec cr mr mpqa subj --dataset_name own

    Every row of the files that are named is read; own is the task's data set on the hub. Without
    any, rows are made up.
    """
    names = list(takewhile(lambda word: not word.startswith("-"), argv))
    flags = argv[len(names) :]
    if not names:
        return _validate(flags)
    for name in names:
        _validate([f"--task={name}", *flags])
    return 0


def _validate(words: Sequence[str]) -> int:
    (args,) = parse_arguments(
        [ValidateArguments],
        words,
        prog="pgra task validate [TASK]",
        unused=_UNUSED,
        **about(validate),
    )
    if args.task is None:
        raise ConfigError("name the task's YAML: pgra task validate my_task.yaml")
    task = load_any_task(args.task)
    lines, rows = [f"{args.task}: valid"], list[Example]()
    for split, examples in _read(task, args):
        rows = rows or examples
        counts = Counter(example.label for example in examples)
        of = ", ".join(f"{label} {count:,}" for label, count in counts.items())
        length = fmean(len(example.text.split()) for example in examples)
        text = f"{split}: {len(examples):,} rows of {length:.1f} words on average"
        lines.append(text + (f": {of}" if isinstance(task, Task) else ""))
    if not rows:
        rows = _made_up(task)
        lines.append("rows are made up; give --train_file FILE to read yours")
    say("\n".join([*lines, *_show(task, rows, args.num_exemplars)]))
    return 0


def _read(
    task: Task | GenerationTask, args: ValidateArguments
) -> Iterator[tuple[str, list[Example]]]:
    """Read all rows of the splits that are named."""
    files = (args.train_file, args.validation_file, args.test_file)
    source = own_data_set(task) if args.dataset_name == _OWN else None
    logging.getLogger("pgra.data").setLevel(logging.WARNING)
    for split, file in zip(SPLITS, files, strict=True):
        if file is None and args.dataset_name is None:
            continue
        raw = open_named(task, args, split, source)
        if raw is None:
            continue
        if isinstance(task, Task):
            yield split, read_split(task, raw, split)
        else:
            yield split, [one.example for one in read_references(task, raw, split)]


def _made_up(task: Task | GenerationTask) -> list[Example]:
    """Return rows that hold the names of what they would hold."""
    labels = task.labels if isinstance(task, Task) else ("(an answer)", "(another answer)")
    return [
        Example(f"row-{at}", {name: f"({name} {at + 1})" for name in task.inputs}, label)
        for at, label in enumerate([*labels, *labels])
    ]


def _show(task: Task | GenerationTask, rows: Sequence[Example], num_exemplars: int) -> list[str]:
    """Show the first rows after exemplars, first one of each label, as models see them."""
    shown, rest = rows[:_NUM_SHOWN], rows[_NUM_SHOWN:] or rows
    by_label: dict[str | None, list[Example]] = {}
    for example in rest:
        by_label.setdefault(example.label, []).append(example)
    turns = chain.from_iterable(zip_longest(*by_label.values()))
    exemplars = list(islice(filter(None, turns), num_exemplars))
    if isinstance(task, GenerationTask):
        style = line_format(task.frame, task.inputs)
        return [line for row in shown for line in _part("the LM reads", style, exemplars, row)]
    style = task_format(task, "task")
    lines: list[str] = []
    for row in shown:
        lines += _part("the LM reads", style, exemplars, row)
        if not task.reader_template or not task.verbalizer:
            continue
        query = task.reader_template.format_map(row.fields)
        words = Verbalizer(task.verbalizer, task.reader_template)
        lines += ["", f"the reader reads, for each evidence ({row.id}):", f"  {query} {_EVIDENCE}"]
        lines.append(f"and learns to write: {words.target_text(row.label or task.labels[0])}")
    if not task.reader_template or not task.verbalizer:
        lines += ["", "without reader_template and verbalizer it is for pgra icl alone"]
    return lines


def _part(title: str, style: PromptFormat, exemplars: Sequence[Example], row: Example) -> list[str]:
    text = style.write(exemplars, row.fields)
    return ["", f"{title} ({row.id}):", *(f"  {line}".rstrip() for line in text.splitlines())]
