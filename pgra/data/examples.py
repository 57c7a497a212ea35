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

from pgra.artifacts import at_home
from pgra.config import Arguments, arg
from pgra.core import Example, Json
from pgra.data.bundled import BUNDLED, bundled_task_files
from pgra.data.read import Record, load_data_set, read_label, read_table
from pgra.data.references import read_answers
from pgra.data.tasks import LABEL, SPLITS, GenerationTask, HubSource, Task, load_any_task
from pgra.errors import ConfigError, DataError

TEST_FRACTION = 0.2  # of train, where nothing is named to report on


@dataclass(kw_only=True)
class DataArguments(Arguments):
    """Which task, and where its examples come from."""

    GROUP = "Task"

    task: str | None = arg(
        None, "Name of a YAML in configs/tasks, or the path of one.", is_common=True
    )
    dataset_name: str | None = arg(
        None,
        "Hub id, local folder with {train,validation,test}.jsonl, or bundled:NAME; "
        "default: the task's own.",
        is_common=True,
    )
    train_file: str | None = arg(
        None,
        "jsonl, csv or tsv (tsv: no quoting) with the task's input fields and 'label'; over "
        "dataset_name.",
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
        "Share of train held out to report on, the same share of each label; default: 0.2 where "
        "there is a train_file and neither test_file nor dataset_name, else none.",
        above=0,
        below=1,
    )
    split_seed: int = arg(0, "Seed of the held-out parts and of every sub-sample.")

    def check(self) -> None:
        """Hold out a test set where there is none: a run that is measured again knows of it."""
        if self.train_file and not (self.test_file or self.dataset_name or self.test_fraction):
            self.test_fraction = TEST_FRACTION


logger = logging.getLogger(__name__)

_ANY_SPLITS = {split: split for split in SPLITS}


@dataclass(frozen=True)
class RawSplit:
    """One split of a source, to be read.

    Attributes:
        columns: Column by field of the task, and by "label" or "answers".
        where: The source, in words.
        classes: Label names in the order of the source's numbers; None: it has names.
        is_standard: Whether it is the task's own split, whose size is known.
    """

    rows: Iterable[Record]
    columns: Mapping[str, str]
    where: str
    classes: Sequence[str] | None = None
    is_standard: bool = False


def open_split(task: Task | GenerationTask, source: str, split: str) -> RawSplit | None:
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
        if file is None:
            return None
        return replace(open_file(task, file), is_standard=task.local.splits is not None)
    if path.is_file() or {s.lower().lstrip(".") for s in path.suffixes} & {*task.file_kinds}:
        return open_file(task, path)
    is_own = task.hub is not None and task.hub.id == source
    hub = task.hub if task.hub and is_own else HubSource(id=source, splits=_ANY_SPLITS)
    if split not in hub.splits:
        return None
    _, tables = load_data_set(hub.id, hub.config, hub.revision)
    name = hub.splits[split]
    if name not in tables:
        if split == "validation":
            return None
        raise DataError(
            f"data set '{source}' has no split '{name}' (it has {', '.join(tables)}): "
            f"give the {split} split with --{split}_file"
        )
    table, where = tables[name], f"data set '{source}', split '{name}'"
    columns = _columns(task, hub.columns)
    classes = None
    if isinstance(task, Task):
        classes = find_classes(task, table, columns[LABEL], is_own=is_own)
    rows = (Record(i, row, f"{where}, row {i}") for i, row in enumerate(table))
    return RawSplit(rows, columns, where, classes, is_own)


# A `datasets.Dataset`, mappings, or pairs (text, label) of a task with one input.
Rows = Iterable[Any]


def open_rows(task: Task | GenerationTask, rows: Rows | str | Path, where: str) -> RawSplit:
    """Open rows in memory, or a file by its name; messages call them `where`.

    Columns have the names that the task's files or its hub data set have.

    Raises:
        DataError: If there are no rows, or one is of another kind.
    """
    if isinstance(rows, str | Path):
        return open_file(task, at_home(rows))
    if isinstance(rows, bytes | Mapping) or not isinstance(rows, Iterable):
        splits = f" of {', '.join(map(str, rows))}" if isinstance(rows, Mapping) else ""
        hint = ": give one of its splits" if splits else ""
        raise DataError(f"{where} is a {type(rows).__name__}{splits}{hint or _KINDS_OF_ROWS}")
    found = []
    for number, row in enumerate(rows):
        place = f"{where}, row {number}"
        if isinstance(row, Example):
            row = {**row.fields, task.target: row.label}
        elif isinstance(row, tuple | list) and len(row) == 2 and len(task.inputs) == 1:
            row = dict(zip((task.inputs[0], task.target), row, strict=True))
        if not isinstance(row, Mapping):
            raise DataError(f"{place} is a {type(row).__name__} ({row!r:.60}){_KINDS_OF_ROWS}")
        values = {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in row.items()
        }
        found.append(Record(number, values, place))
    if not found:
        raise DataError(f"{where} is empty: give at least one row")
    hub, files = task.hub, task.local.columns
    fitting = [  # the hub's first: a file may have its columns and others
        named
        for named in (hub.columns if hub else {}, files)
        if {*_columns(task, named).values()} <= {*found[0].fields}
    ]
    named = fitting[0] if fitting else {}
    columns, classes = _columns(task, named), None
    if isinstance(task, Task):
        classes = find_classes(task, rows, columns[LABEL])
    return RawSplit(found, columns, where, classes)


_KINDS_OF_ROWS = (
    ": give a datasets.Dataset, a list of dicts, or of (text, label) pairs where the task has one "
    "input, or the name of a file"
)


def open_file(task: Task | GenerationTask, path: Path) -> RawSplit:
    """Open a file of a task's rows; a DataError if it is missing, empty or of another kind."""
    columns = _columns(task, task.local.columns)
    rows = read_table(path, task.file_kinds, columns.values())
    return RawSplit(rows, columns, str(path))


def _columns(task: Task | GenerationTask, named: Mapping[str, str]) -> dict[str, str]:
    return {name: named.get(name, name) for name in (*task.inputs, task.target)}


def find_classes(
    task: Task, table: object, column: str, *, is_own: bool | None = None
) -> Sequence[str] | None:
    """Return the labels that a column's numbers stand for; None where it holds names.

    The names of a ClassLabel must be the task's labels, or `hub.labels` in the task's YAML must
    name them for its own data set. `is_own` None: its name decides whether it is that.

    Raises:
        DataError: If the classes are not the task's labels, and nothing is said of them.
    """
    names, hub = class_names(table, column), task.hub
    if names is not None and {*task.labels} <= {*names} <= {*task.labels, *task.ignored_labels}:
        return names
    if is_own is None:
        name = str(getattr(getattr(table, "info", None), "dataset_name", None))
        is_own = hub is not None and hub.id.lower().rpartition("/")[2] == name.lower()
    stated = hub.labels if hub and is_own and column == hub.columns.get(LABEL, LABEL) else None
    if names is not None and stated is None:
        raise DataError(
            f"column '{column}' has the classes {', '.join(names)}, the task has "
            f"{', '.join(task.labels)}: rename the classes, or give labels by name"
        )
    return stated


def class_names(table: object, column: str | None) -> Sequence[str] | None:
    """Return the names of a ClassLabel column of a data set; None for any other."""
    features = getattr(table, "features", None)
    return getattr(features.get(column), "names", None) if isinstance(features, Mapping) else None


def _find_split_file(folder: Path, split: str, task: Task | GenerationTask) -> Path | None:
    """Find FOLDER/SPLIT.* or FOLDER/TASK/SPLIT.*; None where there is no validation file."""
    stem = (task.local.splits or _ANY_SPLITS).get(split)
    if stem is None:
        return None
    names = [f"{stem}.{kind}{end}" for kind in task.file_kinds for end in ("", ".gz")]
    homes = (folder, folder / task.name)
    present = [p for home in homes for n in names if (p := home / n).is_file()]
    if len(present) > 1:
        raise DataError(
            f"{folder} holds {len(present)} files for the {split} split "
            f"({', '.join(str(p.relative_to(folder)) for p in present)}): keep one, or name it "
            f"with --{split}_file"
        )
    if not present and split != "validation":
        raise DataError(
            f"{folder} has no {' or '.join(f'{stem}.{kind}' for kind in task.file_kinds)}, nor has "
            f"{folder / task.name}: it is the {split} split of task '{task.name}'; name another "
            f"with --{split}_file"
        )
    return present[0] if present else None


def read_split(
    task: Task | GenerationTask, raw: RawSplit, split: str, *, is_quiet: bool = False
) -> list[Example]:
    """Read a split's examples in order. Ids are "SPLIT-ROW", the row counted from 0 in its source.

    Of a task with labels, rows without text or with an ignored label are dropped, with a note
    unless `is_quiet`. Of one whose answers are written each is an `AnsweredExample`.

    Raises:
        DataError: If it is unreadable or empty, or lacks a column, a known label or an answer.
    """
    examples: list[Example] = []
    blank = ignored = 0
    for number, row in enumerate(raw.rows):
        name = f"{split}-{number}"
        if isinstance(task, GenerationTask):
            examples.append(read_answers(task, row, raw.columns, name))
            continue
        fields = {name: row.text(raw.columns[name]) for name in task.inputs}
        if not any(fields.values()):
            blank += 1
            continue
        known = (*task.labels, *task.ignored_labels)
        label = read_label(row, raw.columns[LABEL], labels=known, classes=raw.classes)
        if label in task.ignored_labels:
            ignored += 1
        else:
            examples.append(Example(name, fields, label))
    if not examples:
        more = f", {ignored} with a label that the task does without" if ignored else ""
        raise DataError(f"{raw.where} holds no example ({blank} blank rows{more})")
    if is_quiet:
        return examples
    if blank:
        logger.warning("%s: %d rows without text were dropped", raw.where, blank)
    if ignored:
        logger.info("%s: %d rows with a label that is left out", raw.where, ignored)
    num_rows, expected = len(examples) + blank + ignored, task.sizes.get(split)
    if raw.is_standard and expected is not None and num_rows != expected:
        logger.warning(
            "%s has %d rows, the papers' %s split of %s has %d: numbers are not comparable",
            *(raw.where, num_rows, split, task.name, expected),
        )
    return examples


@dataclass(frozen=True)
class Splits:
    """The examples of one run.

    Attributes:
        train: To train on, and to draw exemplars from.
        dev: To choose a checkpoint on.
        test: To report on.
        notes: How a test set was held out ("test_rule"), and how many test texts are in train too
            ("test_rows_in_train"; they are not dropped).
    """

    train: list[Example]
    dev: list[Example]
    test: list[Example]
    notes: Mapping[str, Json] = field(default_factory=dict)


def load_splits(
    task: Task | GenerationTask | str | Path,
    data: DataArguments | Mapping[str, Rows | str | Path],
    *,
    is_trained: bool = True,
    query_dataset_name: str | None = None,
) -> Splits:
    """Read a task's data and divide it.

    Held out are the same share of each label (rounded, at least one), drawn by `split_seed`: first
    a test set, where `test_fraction` asks for one, then a dev set of at most `max_dev_samples`.
    Sub-samples are drawn with the seed too and keep the source's order. `data` may also be the rows
    by split, such as a `datasets.DatasetDict`.

    If nothing `is_trained`, train is a pool of exemplars, all of it, and dev is empty. The test
    split of `query_dataset_name`, if it is named, holds the queries.

    Raises:
        ConfigError: If a validation file is named for nothing, or queries are named twice.
        DataError: If a split is missing, unreadable, empty, or has rows without a known label.
    """
    task = task if isinstance(task, Task | GenerationTask) else load_any_task(str(task))
    if isinstance(data, DataArguments):
        args = data
        _check_sources(args, query_dataset_name, is_trained=is_trained)
        sources = {"test": query_dataset_name}
        names = SPLITS if is_trained else ("train", "test")
        found = {split: open_named(task, args, split, sources.get(split)) for split in names}
    elif isinstance(data, Mapping):
        if "train" not in data:
            raise DataError(f"there is no split 'train' (there are: {', '.join(map(str, data))})")
        args = DataArguments(test_fraction=None if "test" in data else TEST_FRACTION)
        found = {s: open_rows(task, data[s], s) if s in data else None for s in SPLITS}
    else:
        raise ValueError(
            f"data is a {type(data).__name__}: give the rows by split, such as {{'train': rows, "
            "'test': rows}, or DataArguments(train_file=..., test_file=...)"
        )
    read = {split: read_split(task, raw, split) for split, raw in found.items() if raw}
    is_of_another = "test" in read and args.test_file is None  # queries of another data set
    test, rest = read.get("test"), read["train"]
    rules = []
    if test is None or (args.test_fraction is not None and not is_of_another):
        held, rest = _hold_out(task, rest, "test", args.test_fraction or 0, args.split_seed)
        if test is None:
            test = held
            rules.append(
                f"test: {args.test_fraction:g} of the training rows, held out since no test file "
                f"is given (split_seed {args.split_seed})"
            )
    learned, dev = rest, list[Example]()
    if "validation" in read:
        dev = sample(read["validation"], args.max_dev_samples, args.split_seed)
        rules.append(f"dev: {len(dev)} of {len(read['validation'])} rows of the validation set")
    elif is_trained:
        share, most = args.dev_fraction, args.max_dev_samples
        dev, rest = _hold_out(task, learned, "validation", share, args.split_seed, most=most)
        rules.append(
            f"dev: {len(dev)} of {len(learned)} training rows, the same share of each label, "
            f"seed {args.split_seed}"
        )
    train = sample(rest, args.max_train_samples, args.split_seed)
    tested = sample(test, args.max_test_samples, args.split_seed)
    labels = {example.label for example in train}
    if isinstance(task, Task) and not labels.issuperset(task.labels):
        missing = ", ".join(label for label in task.labels if label not in labels)
        logger.warning("%s: no training example has the label %s", task.name, missing)
    counts = (task.name, len(train), len(dev), len(tested))
    if is_trained:
        logger.info(
            "%s: %d training, %d dev and %d test examples (%s)", *counts, "; ".join(rules[::-1])
        )
    else:
        logger.info("%s: a pool of %d examples, %d queries", task.name, len(train), len(tested))
    texts = {example.text for example in learned}
    notes = {
        "test_rule": next((rule for rule in rules if rule.startswith("test")), None),
        "test_rows_in_train": sum(example.text in texts for example in tested),
    }
    return Splits(train, dev, tested, notes)


def _check_sources(args: DataArguments, queries: str | None, *, is_trained: bool) -> None:
    if args.validation_file is not None and not is_trained:
        raise ConfigError(
            "validation_file chooses a checkpoint, and nothing is trained here: leave it out (to "
            "take queries from it, name it with --test_file)"
        )
    if args.validation_file is not None and args.validation_file == args.test_file:
        raise DataError(
            f"--validation_file and --test_file are both {args.test_file}: a checkpoint is never "
            "chosen on the test set; leave --validation_file out to hold out a part of train"
        )
    if queries is not None and args.test_file is not None:
        raise ConfigError(
            f"queries are named twice, by --query_dataset_name {queries} and by "
            f"--test_file {args.test_file}: leave one out"
        )


def open_named(
    task: Task | GenerationTask, args: DataArguments, split: str, source: str | None = None
) -> RawSplit | None:
    """Open the split that arguments or `source` name, or the task's own.

    None without a validation split, and without a test set where that is held out of train.

    Raises:
        DataError: If there is none, or it cannot be opened.
    """
    files = dict(zip(SPLITS, (args.train_file, args.validation_file, args.test_file), strict=True))
    file, raw = files[split], None
    if file is not None:
        return open_file(task, at_home(file))
    if split == "test" and args.test_fraction is not None and source is None:
        return None
    source = source or args.dataset_name
    # With files given and no data set, nothing is fetched.
    if source is None and not any(files.values()):
        if task.hub is None:
            raise DataError(
                f"task '{task.name}' names no data set of its own: give --dataset_name, or "
                "--train_file and --test_file"
            )
        source = task.hub.id
    if source is not None:
        raw = open_split(task, source, split)
    if raw is None and split != "validation":
        hint = "; or hold out a part of train (--test_fraction 0.2)" if split == "test" else ""
        raise DataError(f"there is no {split} set: give --{split}_file{hint}")
    return raw


def _hold_out(
    task: Task | GenerationTask,
    rows: Sequence[Example],
    split: str,
    share: float,
    seed: int,
    *,
    most: int | None = None,
) -> tuple[list[Example], list[Example]]:
    """Draw a share of each label's rows; return it and the rest, both in order.

    At least one is drawn of two or more, and at most `most` in all.
    """
    groups: list[Sequence[int]] = [range(len(rows))]
    if isinstance(task, Task):
        groups = [[i for i, row in enumerate(rows) if row.label == name] for name in task.labels]
    most = len(rows) if most is None else most
    share = min(share, most / len(rows))
    draw = random.Random(seed)
    held: list[int] = []
    for group in groups:
        wanted = max(1, round(len(group) * share))
        held += draw.sample(group, min(wanted, max(len(group) - 1, 0)))
    if len(held) > most:
        held = draw.sample(held, most)
    if not held:
        raise DataError(
            f"{len(rows)} training rows are too few to hold out a {split} set: give --{split}_file"
        )
    chosen = set(held)
    rest = [row for number, row in enumerate(rows) if number not in chosen]
    return [rows[number] for number in sorted(chosen)], rest


def sample(rows: Sequence[Example], most: int | None, seed: int) -> list[Example]:
    """Draw at most so many rows, and keep their order; None keeps all."""
    if most is None or most >= len(rows):
        return list(rows)
    return [rows[row] for row in sorted(random.Random(seed).sample(range(len(rows)), most))]


# Few-shot splits: so many examples of each label to train on, as many to choose a checkpoint on.
#
# Gao et al. 2021, "Making Pre-trained Language Models Better Few-shot Learners", section 3: K
# examples a class to train on, and a development set of the same size. Their released draw is made
# again: in the files' order the same seed gives the same examples (seen for SST-2, CR and TREC; for
# CoLA only with seed 100, their first, since they shuffle what the seed before left).


def draw_shots(
    examples: Sequence[Example], labels: Sequence[str], num_shots: int, seed: int
) -> Splits:
    """Shuffle the examples, and take each label's first K to train on, the next K as dev.

    The draw depends on their order; `seed` is of numpy's old generator, as in the original.

    Raises:
        DataError: If a label has fewer than 2 K examples.
    """
    order = list(range(len(examples)))
    np.random.RandomState(seed).shuffle(order)
    groups: dict[str, list[Example]] = {label: [] for label in labels}
    for row in order:
        groups[str(examples[row].label)].append(examples[row])
    for label, group in groups.items():
        if len(group) < 2 * num_shots:
            raise DataError(
                f"label '{label}' has {len(group)} training examples, and num_shots ({num_shots}) "
                f"asks for {2 * num_shots}, half of them to choose a checkpoint on: lower it"
            )
    return Splits(
        [example for group in groups.values() for example in group[:num_shots]],
        [example for group in groups.values() for example in group[num_shots : 2 * num_shots]],
        [],
    )


def whole_train(train: Sequence[Example], dev: Sequence[Example]) -> list[Example]:
    """Return train in its file's order, with the dev examples that were held out of it."""
    rows = {
        int(example.id.rpartition("-")[2]): example
        for example in [*dev, *train]
        if example.id.startswith("train-")
    }
    return [rows[row] for row in sorted(rows)]
