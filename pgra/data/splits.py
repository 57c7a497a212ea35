"""A run's train, dev and test examples, under one stated rule.

The dev set, on which checkpoints are chosen, is a validation file, the data set's validation split
where the task's YAML names one, or a held-out part of train. It is never the test set.
"""

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pgra.config import DataArguments
from pgra.data.examples import SplitRows, load_examples, read_dataset, read_file
from pgra.data.tasks import Task
from pgra.errors import ConfigError, DataError
from pgra.types import Example, Json

logger = logging.getLogger(__name__)

__all__ = ["Splits", "load_examples", "load_pool", "load_splits"]


@dataclass(frozen=True)
class Splits:
    """The examples of one run.

    Attributes:
        train: To train on; exemplars are drawn from them too.
        dev: To choose a checkpoint on.
        test: To report on.
        notes: Where each came from, the dev set's rule in words, counts, blank rows, and how many
            dev and test texts also stand in train ("dev_rows_in_train", "test_rows_in_train";
            they are reported, not dropped).
    """

    train: list[Example]
    dev: list[Example]
    test: list[Example]
    notes: Mapping[str, Json] = field(default_factory=dict)


def load_splits(task: Task, args: DataArguments) -> Splits:
    """Read a task's data and divide it. Ids are "SPLIT-ROW", the row counted from 0 in its source.

    Held out are the same share of each label (rounded, at least one), at most `max_dev_samples` in
    all, drawn with `split_seed`. Sub-samples are drawn with it too and keep the source's order.

    Raises:
        DataError: If a split is missing, unreadable, empty, or has rows without a known label.
    """
    read = {split: _read_split(task, args, split) for split in ("train", "validation", "test")}
    train, test = _need(read, "train"), _need(read, "test")
    _refuse_test_as_dev(args)
    present = {split: rows for split, rows in read.items() if rows is not None}
    for split, rows in present.items():
        _check_size(task, split, rows)
    divided = _choose_dev(task, train, read["validation"], args)
    kept = _sample(divided.train, args.max_train_samples, args.split_seed)
    tested = _sample(test.examples, args.max_test_samples, args.split_seed)
    _warn_of_missing_labels(task, kept)
    notes: dict[str, Json] = {
        "rule": divided.rule,
        "sources": {split: rows.where for split, rows in present.items()},
        "blank_rows": {split: rows.blank for split, rows in present.items()},
        "ignored_rows": {split: rows.ignored for split, rows in present.items()},
        "train": len(kept),
        "dev": len(divided.dev),
        "test": len(tested),
        "dev_rows_in_train": _count_shared(divided.dev, divided.train),
        "test_rows_in_train": _count_shared(tested, train.examples),
    }
    logger.info(
        "%s: %d training, %d dev and %d test examples (%s)",
        task.name,
        len(kept),
        len(divided.dev),
        len(tested),
        divided.rule,
    )
    return Splits(kept, divided.dev, tested, notes)


def load_pool(task: Task, args: DataArguments, *, query_dataset_name: str | None = None) -> Splits:
    """Read what in-context learning needs: all of train as a pool of exemplars, and the queries.

    Nothing is held out, since nothing is trained.

    Args:
        task: Whose inputs and labels the rows have.
        args: Where they are; sub-samples are drawn as `load_splits` draws them.
        query_dataset_name: Another data set, whose test split holds the queries.

    Returns:
        The pool as train, the queries as test, and an empty dev set.

    Raises:
        ConfigError: If a validation file is named, or queries are named twice.
        DataError: As `load_splits`.
    """
    check_pool_arguments(args, query_dataset_name)
    train = _need({"train": _read_split(task, args, "train")}, "train")
    if query_dataset_name is None:
        queries = _read_split(task, args, "test")
    else:
        queries = read_dataset(task, query_dataset_name, "test")
    test = _need({"test": queries}, "test")
    pool = _sample(train.examples, args.max_train_samples, args.split_seed)
    tested = _sample(test.examples, args.max_test_samples, args.split_seed)
    _warn_of_missing_labels(task, pool)
    notes: dict[str, Json] = {
        "sources": {"train": train.where, "test": test.where},
        "train": len(pool),
        "test": len(tested),
        "test_rows_in_train": _count_shared(tested, train.examples),
    }
    logger.info("%s: a pool of %d examples, %d queries", task.name, len(pool), len(tested))
    return Splits(pool, [], tested, notes)


def check_pool_arguments(args: DataArguments, query_dataset_name: str | None) -> None:
    """Refuse what is for training, and queries that are named twice.

    Raises:
        ConfigError: If there is such.
    """
    if args.validation_file is not None:
        raise ConfigError(
            "validation_file chooses a checkpoint, and nothing is trained here: leave it out (to "
            "take queries from it, name it with --test_file)"
        )
    if query_dataset_name is not None and args.test_file is not None:
        raise ConfigError(
            f"queries are named twice, by --query_dataset_name {query_dataset_name} and by "
            f"--test_file {args.test_file}: leave one out"
        )


@dataclass(frozen=True)
class _Divided:
    dev: list[Example]
    train: list[Example]
    rule: str


def _need(read: Mapping[str, SplitRows | None], split: str) -> SplitRows:
    rows = read[split]
    if rows is None:
        hint = " (a validation file only chooses the checkpoint)" if split == "test" else ""
        raise DataError(f"there is no {split} set: give --{split}_file{hint}")
    return rows


def _refuse_test_as_dev(args: DataArguments) -> None:
    if args.validation_file is not None and args.validation_file == args.test_file:
        raise DataError(
            f"--validation_file and --test_file are both {args.test_file}: a checkpoint is never "
            "chosen on the test set; leave --validation_file out to hold out a part of train"
        )


def _choose_dev(
    task: Task, train: SplitRows, given: SplitRows | None, args: DataArguments
) -> _Divided:
    if given is not None:
        dev = _sample(given.examples, args.max_dev_samples, args.split_seed)
        rule = f"dev: {len(dev)} of {len(given.examples)} rows of {given.where}"
        return _Divided(dev, train.examples, rule)
    dev, rest = _hold_out(train.examples, task.labels, args)
    rule = (
        f"dev: {len(dev)} of {len(train.examples)} training rows, the same share of each label, "
        f"seed {args.split_seed}"
    )
    return _Divided(dev, rest, rule)


def _read_split(task: Task, args: DataArguments, split: str) -> SplitRows | None:
    files = {
        "train": args.train_file,
        "validation": args.validation_file,
        "test": args.test_file,
    }
    file = files[split]
    if file is not None:
        return read_file(task, Path(file).expanduser(), split)
    name = args.dataset_name
    if name is None and not any(files.values()):
        if task.hub is None:
            raise DataError(
                f"task '{task.name}' names no data set of its own: give --dataset_name, or "
                "--train_file and --test_file"
            )
        name = task.hub.id
    # With files given and no data set, nothing is fetched behind the user's back.
    return None if name is None else read_dataset(task, name, split)


def _check_size(task: Task, split: str, rows: SplitRows) -> None:
    expected = task.sizes.get(split)
    found = len(rows.examples) + rows.blank + rows.ignored
    if rows.is_standard and expected is not None and found != expected:
        logger.warning(
            "%s has %d rows, the papers' %s split of %s has %d: numbers are not comparable",
            rows.where,
            found,
            split,
            task.name,
            expected,
        )


def _warn_of_missing_labels(task: Task, train: Sequence[Example]) -> None:
    missing = [label for label in task.labels if label not in {e.label for e in train}]
    if missing:
        logger.warning("%s: no training example has the label %s", task.name, ", ".join(missing))


def _hold_out(
    examples: Sequence[Example], labels: Sequence[str], args: DataArguments
) -> tuple[list[Example], list[Example]]:
    """Give the held-out part and the rest, both in the order they came."""
    most = len(examples) if args.max_dev_samples is None else args.max_dev_samples
    share = min(args.dev_fraction, most / len(examples))
    draw = random.Random(args.split_seed)
    held: list[int] = []
    for label in labels:
        rows = [row for row, example in enumerate(examples) if example.label == label]
        wanted = max(1, round(len(rows) * share))
        held += draw.sample(rows, min(wanted, max(len(rows) - 1, 0)))
    if len(held) > most:
        held = draw.sample(held, most)
    if not held:
        raise DataError(
            f"{len(examples)} training rows are too few to hold out a dev set: "
            "give --validation_file"
        )
    chosen = set(held)
    dev = [examples[row] for row in sorted(chosen)]
    return dev, [example for row, example in enumerate(examples) if row not in chosen]


def _sample(examples: Sequence[Example], most: int | None, seed: int) -> list[Example]:
    if most is None or most >= len(examples):
        return list(examples)
    rows = sorted(random.Random(seed).sample(range(len(examples)), most))
    return [examples[row] for row in rows]


def _count_shared(examples: Sequence[Example], train: Sequence[Example]) -> int:
    texts = {example.text for example in train}
    return sum(example.text in texts for example in examples)
