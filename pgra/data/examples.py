"""A task's examples from files, the hub and packages, and their splits.

Files are jsonl, csv as the csv module reads it, or tsv without quoting (a quote mark is a
character); csv and tsv need a header. The dev set, on which checkpoints are chosen, is a validation
file, the data set's validation split where the task's YAML names one, or a held-out part of train.
It is never the test set, which may be held out of train too.
"""

import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from pgra.artifacts import at_home
from pgra.config import Arguments, arg
from pgra.data.bundled import BUNDLED, bundled_task_files
from pgra.data.read import RawSplit, Record, file_kind, load_data_set, read_table
from pgra.data.tasks import SPLITS, AnyTask, HubSource
from pgra.data.text import copy_key
from pgra.errors import ConfigError, DataError, show
from pgra.types import Example, Fields, as_list

logger = logging.getLogger(__name__)

TEST_FRACTION = 0.2  # of train, where nothing is named to report on
_ANY_SPLITS = {split: split for split in SPLITS}


@dataclass(kw_only=True)
class DataArguments(Arguments):
    """Which task, and where its examples come from."""

    GROUP = "Task"

    task: str | None = arg(
        None, "Name of a YAML in configs/tasks, or the path of one.", is_common=True
    )
    dataset_name: str | None = arg(
        None,
        "Hub id, folder with {train,validation,test}.jsonl, or bundled:NAME; default: the task's.",
        is_common=True,
    )
    train_file: str | None = arg(
        None,
        "jsonl, csv or tsv (no quoting) with the task's inputs and 'label'; over dataset_name.",
        is_common=True,
    )
    validation_file: str | None = arg(
        None, "The same, to choose a checkpoint on; without one a part of train is held out."
    )
    test_file: str | None = arg(
        None,
        "The same, to report on; without one a part of train is held out (test_fraction).",
        is_common=True,
    )
    columns: list[str] | None = arg(
        None, "A file's columns of other names, such as question=Question answers=Answer."
    )
    max_train_samples: int | None = arg(
        None, "Keep this many training examples (drawn with split_seed).", least=1
    )
    max_dev_samples: int | None = arg(
        500, "At most this many examples to choose a checkpoint on.", least=1
    )
    max_test_samples: int | None = arg(
        None, "Keep this many test examples (drawn with split_seed).", least=1
    )
    dev_fraction: float = arg(
        0.1,
        "Share of train held out when there is no validation file, the same share of each label.",
        above=0,
        below=1,
    )
    test_fraction: float | None = arg(
        None,
        "Share of train to report on, of each label; default: 0.2 of a train_file without a test.",
        above=0,
        below=1,
    )
    split_seed: int = arg(0, "Seed of the held-out parts and of every sub-sample.")
    allow_test_in_train: bool = arg(
        False, "Measure even where each test text also stands in the training file."
    )

    def check(self) -> None:
        """Hold out a test set where there is none: a run that is measured again knows of it."""
        if self.dataset_name and not self.train_file and at_home(self.dataset_name).is_file():
            self.train_file = self.dataset_name
            self.dataset_name = None
        if self.train_file and not (self.test_file or self.dataset_name or self.test_fraction):
            self.test_fraction = TEST_FRACTION


def open_split(task: AnyTask, source: str, split: str) -> RawSplit | None:
    """Open one split of a data set; None if the data set has no such split.

    `source` is a jsonl file (csv or tsv too for labels), a local folder, bundled:NAME or a hub id.

    Raises:
        DataError: If there is no such data set, or a split other than validation is missing.
    """
    if source.startswith(BUNDLED):
        files = bundled_task_files(source.removeprefix(BUNDLED))
        return open_file(task, files[split]) if split in files else None
    path = at_home(source)
    if path.is_dir():
        file = _find_split_file(path, split, task)
        is_standard = task.local.splits is not None
        return replace(open_file(task, file), is_standard=is_standard) if file else None
    if path.is_file() or file_kind(path) in task.file_kinds:
        return open_file(task, path)
    hub = task.hub
    is_standard = hub is not None and hub.id == source
    if hub is None or not is_standard:
        hub = HubSource(id=source, splits=_ANY_SPLITS)
    if split not in hub.splits:
        return None
    _, tables = load_data_set(hub.id, hub.config, hub.revision)
    where = f"data set '{source}', split '{hub.splits[split]}'"
    table = tables.get(hub.splits[split])
    if table is None:
        if split == "validation":
            return None
        raise DataError(f"{where}: there are {', '.join(tables)}; give --{split}_file")
    columns = _columns(task, hub.columns)
    classes = find_classes(task, table, columns[task.target], hub.labels)
    rows = (Record(row, f"{where}, row {i}") for i, row in enumerate(table))
    return RawSplit(rows, columns, where, classes, is_standard)


# A `datasets.Dataset`, a pandas table, a file, mappings, or pairs (text, label) of a task with one
# input.
ExampleRows = Iterable[Any] | Path
_KINDS = (
    "a datasets.Dataset (one split), a pandas table, a list of dicts, or of pairs (text, label) "
    "for a task of one input"
)


def as_rows(rows: ExampleRows) -> ExampleRows:
    """Return rows that can be read twice: a data set or a file's name, or anything else as a list.

    Raises:
        DataError: If they are of another kind.
    """
    if isinstance(rows, str | Path) or hasattr(rows, "features"):  # it names its classes
        return rows
    return as_list("examples", rows, _KINDS)


def open_rows(task: AnyTask, rows: ExampleRows, where: str) -> RawSplit:
    """Open rows in memory, or a file by its name; messages call them `where`.

    Columns have the names that the task's files or its hub data set have.

    Raises:
        DataError: If there are no rows, or one is of another kind.
    """
    if isinstance(rows, str | Path):
        return open_file(task, at_home(rows))
    records = []
    for number, row in enumerate(as_list(where, rows, _KINDS)):
        record_name = f"{where}, row {number}"
        if isinstance(row, Example):
            row = {**row.fields, task.target: row.label}
        elif isinstance(row, tuple | list) and len(row) == 2 and len(task.inputs) == 1:
            row = dict(zip((task.inputs[0], task.target), row, strict=True))
        if not isinstance(row, Mapping):
            raise DataError(f"{record_name} is a {type(row).__name__}, {show(row)}: give {_KINDS}")
        values = {n: v.item() if isinstance(v, np.generic) else v for n, v in row.items()}
        records.append(Record(values, record_name))
    if not records:
        raise DataError(f"{where} is empty: give at least one row")
    # The hub's names first: a file may have its columns and others.
    for names in (task.hub.columns if task.hub else {}, task.local.columns, {}):
        columns = _columns(task, names)
        if {*columns.values()} <= {*records[0].fields}:
            break
    return RawSplit(records, columns, where, find_classes(task, rows, columns[task.target]))


def open_file(task: AnyTask, path: Path) -> RawSplit:
    """Open a file of a task's rows; a DataError if it is missing or of another kind."""
    rows = read_table(path, task.file_kinds)
    return RawSplit(rows, _columns(task, task.local.columns), str(path))


def _columns(task: AnyTask, names: Mapping[str, str]) -> dict[str, str]:
    return {field: names.get(field, field) for field in (*task.inputs, task.target)}


def find_classes(
    task: AnyTask, table: object, column: str, stated: Sequence[str] | None = None
) -> Sequence[str] | None:
    """Return the labels that a column's numbers stand for; None where it holds names.

    They are the names of a ClassLabel, where these are the task's labels; else `stated`.

    Raises:
        DataError: If the classes are not the task's labels, and nothing is stated.
    """
    features = getattr(table, "features", None)
    names = getattr(features.get(column), "names", None) if isinstance(features, Mapping) else None
    if names is None or not task.labels:
        return stated or names
    if {*task.labels} <= {*names} <= {*task.labels, *task.ignored_labels}:
        return list(names)
    if stated is None:
        raise DataError(
            f"column '{column}' has the classes {', '.join(names)}, the task has "
            f"{', '.join(task.labels)}: rename the classes, or give labels by name"
        )
    return stated


def _find_split_file(folder: Path, split: str, task: AnyTask) -> Path | None:
    """Find FOLDER/SPLIT.* or FOLDER/TASK/SPLIT.*; None where there is no validation file."""
    stem = (task.local.splits or _ANY_SPLITS).get(split)
    files = [*folder.glob(f"{stem}.*"), *folder.glob(f"{task.name}/{stem}.*")]
    paths = [path for path in sorted(files) if file_kind(path) in task.file_kinds]
    if len(paths) > 1 or (not paths and split != "validation"):
        present = ", ".join(map(str, paths)) or "none"
        raise DataError(
            f"{folder} holds {present}, not one {stem}.jsonl or the like: give --{split}_file"
        )
    return paths[0] if paths else None


def read_split(task: AnyTask, raw: RawSplit, split: str) -> list[Example]:
    """Read a split's examples in order. Ids are "SPLIT-ROW", the row counted from 0 in its source.

    Of a task with labels, rows without text or with an ignored label are dropped, with a note. Of
    one whose answers are written each is an `AnsweredExample`.

    Raises:
        DataError: If it is unreadable or empty, or lacks a column, a known label or an answer.
    """
    examples: list[Example] = []
    blank = ignored = 0
    for number, row in enumerate(raw.rows):
        example = task.example(row, raw, f"{split}-{number}")
        if not any(example.fields.values()):
            blank += 1
        elif example.label in task.ignored_labels:
            ignored += 1
        else:
            examples.append(example)
    if not examples:
        raise DataError(f"{raw.where} holds no example ({blank} blank rows, {ignored} ignored)")
    if blank or ignored:
        message = "%s: dropped are %d rows without text, %d with a label that is left out"
        logger.warning(message, raw.where, blank, ignored)
    num_rows = len(examples) + blank + ignored
    expected = task.sizes.get(split, num_rows)
    if raw.is_standard and expected != num_rows:
        logger.warning(
            "%s has %d rows, the papers' %s split of %s has %d: numbers are not comparable",
            raw.where,
            num_rows,
            split,
            task.name,
            expected,
        )
    return examples


@dataclass(frozen=True)
class Splits:
    """A task's examples for one run.

    Attributes:
        train: To train on, and to draw exemplars from.
        dev: To choose a checkpoint on.
        test: To report on.
        notes: How a test set was held out ("test_rule"), and how many test texts are in train too
            ("test_rows_in_train"; they are not dropped).
    """

    task: AnyTask
    train: Sequence[Example]
    dev: Sequence[Example]
    test: Sequence[Example]
    notes: Fields = field(default_factory=dict)


def load_splits(
    task: AnyTask,
    args: DataArguments,
    *,
    is_trained: bool = True,
    least_dev: int = 0,
    query_dataset_name: str | None = None,
) -> Splits:
    """Read a task's data and divide it.

    Held out are the same share of each label (rounded, at least one), drawn by `split_seed`: first
    a test set, where `test_fraction` asks for one, then a dev set of at most `max_dev_samples`.
    Copies of a text stay on one side. Sub-samples are drawn with the seed too and keep the source's
    order. A dev set of fewer than `least_dev` rows is of no use: all stay in train.

    If nothing `is_trained`, train is a pool of exemplars, all of it, and dev is empty. The test
    split of `query_dataset_name`, if it is named, holds the queries.

    Raises:
        ConfigError: If a validation file is named for nothing, or queries are named twice.
        DataError: If a split is missing, unreadable, empty, or has rows without a known label, or
            each test text is one of train.
    """
    seed = args.split_seed
    columns = dict(pair.partition("=")[::2] for pair in args.columns or ())
    local = structs.replace(task.local, columns={**task.local.columns, **columns})
    task = replace(task, local=local)
    validation = args.validation_file
    test = args.test_file
    if validation is not None and (validation == test or not is_trained):
        raise ConfigError(
            "validation_file is for choosing a checkpoint: leave it out if nothing is trained, and "
            "never give the test_file"
        )
    if query_dataset_name is not None and test is not None:
        raise ConfigError("query_dataset_name and test_file both name queries: leave one out")
    raw = {"train": open_named(task, args, "train")}
    if is_trained:
        raw["validation"] = open_named(task, args, "validation")
    raw["test"] = open_named(task, args, "test", query_dataset_name)
    read = {split: read_split(task, rows, split) for split, rows in raw.items() if rows}
    rest = read["train"]
    rule = None
    if args.test_fraction is not None and query_dataset_name is None:
        held, rest = _hold_out(task, rest, "test", args.test_fraction, seed)
        if "test" not in read:  # else the run is measured on another file
            read["test"] = held
            rule = (
                f"test: {args.test_fraction:g} of the training rows, held out since no test file "
                f"is given (split_seed {seed})"
            )
    learned = rest
    dev = list[Example]()
    if "validation" in read:
        dev = sample(read["validation"], args.max_dev_samples, seed)
    elif is_trained:
        most = args.max_dev_samples
        wanted = args.dev_fraction * len(learned)
        if min(wanted, most or wanted) >= least_dev:
            dev, rest = _hold_out(task, learned, "validation", args.dev_fraction, seed, most=most)
    train = sample(rest, args.max_train_samples, seed)
    tested = sample(read["test"], args.max_test_samples, seed)
    labels = {example.label for example in train}
    if missing := [label for label in task.labels if label not in labels]:
        logger.warning("%s: no training example has the label %s", task.name, ", ".join(missing))
    counts = (task.name, len(train), len(dev), len(tested))
    logger.info("%s: %d training, %d dev and %d test examples", *counts)
    texts = {copy_key(example.text) for example in learned}
    shared = sum(copy_key(example.text) in texts for example in tested)
    is_allowed = args.allow_test_in_train or not is_trained  # a pool has a guard of its own
    if shared == len(tested) and not is_allowed:
        raise DataError(
            f"all {shared} test texts also stand in the training file, so nothing new is measured: "
            "give another --test_file, or --allow_test_in_train"
        )
    return Splits(task, train, dev, tested, {"test_rule": rule, "test_rows_in_train": shared})


def open_named(
    task: AnyTask, args: DataArguments, split: str, source: str | None = None
) -> RawSplit | None:
    """Open the split that arguments or `source` name, or the task's own.

    None without a validation split, and without a test set where that is held out of train.

    Raises:
        DataError: If there is none, or it cannot be opened.
    """
    file = getattr(args, f"{split}_file")
    if file is not None:
        return open_file(task, at_home(file))
    if split == "test" and args.test_fraction is not None and source is None:
        return None
    source = source or args.dataset_name
    has_files = args.train_file or args.validation_file or args.test_file
    if source is None and task.hub is not None and not has_files:
        source = task.hub.id
    raw = None if source is None else open_split(task, source, split)
    if raw is None and split != "validation":
        raise DataError(f"there is no {split} set: give --{split}_file, or --dataset_name")
    return raw


def _hold_out(
    task: AnyTask,
    rows: Sequence[Example],
    split: str,
    share: float,
    seed: int,
    *,
    most: int | None = None,
) -> tuple[list[Example], list[Example]]:
    """Draw a share of each label's texts, with their copies; return it and the rest, in order.

    At least one is drawn of two or more, and at most `most` rows in all, unless one text alone has
    more copies.
    """
    copies: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        copies.setdefault(copy_key(row.text), []).append(number)
    texts = list(copies.values())
    groups = [[text for text in texts if rows[text[0]].label == name] for name in task.labels]
    groups = groups or [texts]
    most = len(rows) if most is None else most
    share = min(share, most / len(rows))
    draw = random.Random(seed)
    held: list[list[int]] = []
    for group in groups:
        wanted = max(1, round(len(group) * share))
        held += draw.sample(group, min(wanted, max(len(group) - 1, 0)))
    if len(held) > most:
        held = draw.sample(held, most)
    if not held:
        raise DataError(
            f"too few texts ({len(texts)}) to hold out {split}: give 3 or more of each label, or "
            f"--{split}_file"
        )
    chosen: set[int] = set()
    for text in held:
        if not chosen or len(chosen) + len(text) <= most:
            chosen.update(text)
    rest = [row for number, row in enumerate(rows) if number not in chosen]
    return [rows[number] for number in sorted(chosen)], rest


def sample(rows: Sequence[Example], most: int | None, seed: int) -> list[Example]:
    """Draw at most so many rows, and keep their order; None keeps all."""
    if most is None or most >= len(rows):
        return list(rows)
    return [rows[row] for row in sorted(random.Random(seed).sample(range(len(rows)), most))]
