"""A task's examples from files, the hub and packages, and their splits under one stated rule.

Formats of files: jsonl; csv as the csv module reads it; tsv without quoting (a quote mark is a
character). All may end in .gz. csv and tsv need a header. Other columns are ignored.
"""

import difflib
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pgra.config import DataArguments, at_least
from pgra.core import Example, Json
from pgra.data.bundled import bundled_task_files
from pgra.data.read import (
    Row,
    check_file,
    data_set_builder,
    hub_errors,
    hub_reason,
    is_utf8,
    json_rows,
    table_rows,
)
from pgra.data.tasks import LABEL, SPLITS, HubSource, Task
from pgra.errors import ConfigError, DataError, unknown_name

logger = logging.getLogger(__name__)

BUNDLED = "bundled:"
KINDS = ("jsonl", "csv", "tsv")
_ANY_SPLITS = {split: split for split in SPLITS}


@dataclass(frozen=True)
class SplitRows:
    """What a source holds for one split.

    Attributes:
        examples: In the source's order, without blank rows.
        blank: How many rows had no text and were dropped.
        where: The source, in words.
        is_standard: Whether it stands where the task's own split stands, so that its size is known.
        ignored: How many rows had a label that the task does without, and were dropped.
    """

    examples: list[Example]
    blank: int
    where: str
    is_standard: bool = False
    ignored: int = 0


def load_examples(
    task: Task, source: str, split: str, *, require_labels: bool = True
) -> list[Example]:
    """Read one split from a file, or from anything that `dataset_name` may be.

    Args:
        task: Whose inputs and labels the rows have.
        source: A jsonl, csv or tsv file; or a local folder, bundled:NAME or hub id.
        split: "train", "validation" or "test"; ids begin with it.
        require_labels: Whether a row without label is refused; otherwise its label is None.

    Raises:
        DataError: If nothing is there, or it is not readable, or lacks a column or label.
    """
    is_file = not Path(source).is_dir() and _is_file_name(source)
    if is_file:
        return read_file(task, Path(source), split, require_labels=require_labels).examples
    rows = read_dataset(task, source, split, require_labels=require_labels)
    if rows is None:
        raise DataError(f"{source} has no {split} split for task '{task.name}'")
    return rows.examples


def _is_file_name(source: str) -> bool:
    suffixes = [s.lstrip(".").lower() for s in Path(source).suffixes]
    return Path(source).is_file() or any(kind in suffixes for kind in KINDS)


def read_file(task: Task, path: Path, split: str, *, require_labels: bool = True) -> SplitRows:
    """Read one split from a file.

    Raises:
        DataError: If the file cannot be read, lacks a column, or has a row without a known label.
    """
    kind = check_file(path, KINDS)
    columns = {name: task.local_columns.get(name, name) for name in (*task.inputs, LABEL)}
    rows = json_rows(path) if kind == "jsonl" else table_rows(path, kind, columns.values())
    reader = _RowReader(task, columns, task.labels, require_labels=require_labels)
    return reader.read(rows, split, str(path))


def read_dataset(
    task: Task, name: str, split: str, *, require_labels: bool = True
) -> SplitRows | None:
    """Read one split of a data set; None if the data set has no such split.

    Args:
        task: Whose inputs and labels the rows have.
        name: bundled:NAME, a local folder, or a hub id.
        split: "train", "validation" or "test".
        require_labels: Whether a row without label is refused.

    Raises:
        DataError: If there is no such data set, or as `read_file`.
    """
    if name.startswith(BUNDLED):
        files = bundled_task_files(name.removeprefix(BUNDLED))
        if split not in files:
            return None
        return read_file(task, files[split], split, require_labels=require_labels)
    folder = Path(name).expanduser()
    if folder.is_dir():
        path = find_split_file(folder, split, task=task.name, splits=task.local_splits)
        if path is None:
            return None
        rows = read_file(task, path, split, require_labels=require_labels)
        return replace(rows, is_standard=task.local_splits is not None)
    return _read_hub(task, name, split, require_labels=require_labels)


def find_split_file(
    folder: Path,
    split: str,
    *,
    task: str,
    splits: Mapping[str, str] | None,
    kinds: Sequence[str] = KINDS,
) -> Path | None:
    """Find FOLDER/SPLIT.* or FOLDER/TASK/SPLIT.*; None where there is no validation file.

    Args:
        folder: Where to look.
        split: "train", "validation" or "test".
        task: The task's name.
        splits: The file's name (without suffix) by split, as the task's YAML says; None: the same.
        kinds: Suffixes that are looked for, without the dot.

    Raises:
        DataError: If there is none, or more than one.
    """
    stem = (splits or _ANY_SPLITS).get(split)
    if stem is None:
        return None
    names = [f"{stem}.{kind}{end}" for kind in kinds for end in ("", ".gz")]
    found = [home / n for home in (folder, folder / task) for n in names]
    present = [path for path in found if path.is_file()]
    if len(present) > 1:
        raise DataError(
            f"{folder} holds {len(present)} files for the {split} split "
            f"({', '.join(str(p.relative_to(folder)) for p in present)}): keep one, or name it "
            f"with --{split}_file"
        )
    if not present and split != "validation":
        raise DataError(
            f"{folder} has no {stem}.{_listed(kinds)}, nor has "
            f"{folder / task}: it is the {split} split of task '{task}'; name another with "
            f"--{split}_file"
        )
    return present[0] if present else None


def _listed(kinds: Sequence[str]) -> str:
    *others, last = kinds
    return f"{', .'.join(others)} or .{last}" if others else last


@dataclass(frozen=True)
class _RowReader:
    """Turns rows into examples.

    Attributes:
        task: Whose inputs and labels the rows have.
        columns: Column by input name, and by "label".
        names: Label names in the order of the source's integers.
        require_labels: Whether a row without label is refused.
    """

    task: Task
    columns: Mapping[str, str]
    names: Sequence[str]
    require_labels: bool

    def read(self, rows: Iterable[Row], split: str, where: str) -> SplitRows:
        examples, blank, ignored = [], 0, 0
        for number, row in enumerate(rows):
            fields = {name: self._field(row, name) for name in self.task.inputs}
            if not any(fields.values()):
                blank += 1
                continue
            if self._is_ignored(row):
                ignored += 1
                continue
            examples.append(Example(f"{split}-{number}", fields, self._label(row)))
        if not examples:
            raise DataError(f"{where} holds no example ({blank} blank rows{_told(ignored)})")
        if blank:
            logger.warning("%s: %d rows without text were dropped", where, blank)
        if ignored:
            names = ", ".join(self.task.ignored_labels)
            logger.info("%s: %d rows labelled %s were left out", where, ignored, names)
        return SplitRows(examples, blank, where, ignored=ignored)

    def _is_ignored(self, row: Row) -> bool:
        value = row.values.get(self.columns[LABEL])
        return isinstance(value, str) and value.strip() in self.task.ignored_labels

    def _field(self, row: Row, name: str) -> str:
        column = self.columns[name]
        value = row.values.get(column)
        if column not in row.values:
            raise DataError(_missing_column(row, column))
        if not isinstance(value, str):
            raise DataError(f"{row.place}: '{column}' is {value!r}, not text")
        _refuse_unclean(row, column, value)
        return value.strip()

    def _label(self, row: Row) -> str | None:
        column = self.columns[LABEL]
        value = row.values.get(column)
        text = value.strip() if isinstance(value, str) else value
        if text in (None, "", -1):  # -1 is what hidden labels are on the hub
            if self.require_labels:
                is_there = column in row.values
                raise DataError(
                    f"{row.place}: has no label" if is_there else _missing_column(row, column)
                )
            return None
        if not isinstance(text, str) and type(text) is not int:
            raise DataError(
                f"{row.place}: '{column}' is {text!r}, a {type(text).__name__}, "
                "not a label's name or number"
            )
        _refuse_unclean(row, column, str(text))
        if isinstance(text, str) and text in self.task.labels:
            return text
        digits = text.isdecimal() if isinstance(text, str) else True
        if digits and 0 <= int(str(text)) < len(self.names):
            return self.names[int(str(text))]
        message = unknown_name("label", str(value), self.task.labels)
        raise DataError(f"{row.place}: {message} Numbers 0 to {len(self.names) - 1} are read too.")


def _told(ignored: int) -> str:
    return f", {ignored} with a label that the task does without" if ignored else ""


def _refuse_unclean(row: Row, column: str, text: str) -> None:
    if not is_utf8(text):
        raise DataError(f"{row.place}: '{column}' holds a NUL or half a surrogate pair")


def _missing_column(row: Row, column: str) -> str:
    found = list(row.values)
    near = difflib.get_close_matches(column, found, n=1, cutoff=0.5)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    names = ", ".join(map(str, found)) or "none"
    return f"{row.place}: no column '{column}'.{hint} Found: {names}. {row.hint}".rstrip()


def _read_hub(task: Task, name: str, split: str, *, require_labels: bool) -> SplitRows | None:
    own = task.hub is not None and task.hub.id == name
    plain = {column: column for column in (*task.inputs, LABEL)}
    hub = task.hub if task.hub and own else HubSource(name, None, None, plain, None, _ANY_SPLITS)
    if split not in hub.splits:
        return None
    data = load_hub(hub)
    if hub.splits[split] not in data:
        if split == "validation":
            return None
        raise DataError(
            f"data set '{name}' has no split '{hub.splits[split]}' (it has {', '.join(data)}): "
            f"give the {split} split with --{split}_file"
        )
    table = data[hub.splits[split]]
    names = hub.labels or _class_names(table, hub.columns[LABEL], task.labels)
    where = f"data set '{name}', split '{hub.splits[split]}'"
    rows = (Row(f"{where}, row {number}", row) for number, row in enumerate(table))
    reader = _RowReader(task, hub.columns, names, require_labels=require_labels)
    found = reader.read(rows, split, where)
    return replace(found, is_standard=own)


def _class_names(table: object, column: str, labels: Sequence[str]) -> Sequence[str]:
    """Give the names behind a hub column's integers, where the data set states ours."""
    feature = getattr(table, "features", {}).get(column)
    names = getattr(feature, "names", None)
    if names is None:
        return labels
    if set(names) != set(labels):
        raise DataError(
            f"column '{column}' has the classes {', '.join(names)}, the task has "
            f"{', '.join(labels)}: state the order in the task's YAML (hub.labels)"
        )
    return list(names)


def load_hub(hub: HubSource) -> Mapping[str, Iterable[Mapping[str, object]]]:
    """Load a data set of the hub, by split.

    Raises:
        DataError: If there is none, or it cannot be loaded.
    """
    from datasets.exceptions import DatasetGenerationError, DatasetsError

    try:
        builder = data_set_builder(hub.id, hub.config, revision=hub.revision)
        builder.download_and_prepare()
        data: Mapping[str, Iterable[Mapping[str, object]]] = builder.as_dataset()
    except hub_errors(DatasetsError, ValueError, RuntimeError) as error:
        is_vague = isinstance(error, DatasetGenerationError)  # its cause is not
        reason = hub_reason((error.__cause__ if is_vague else None) or error)
        raise DataError(
            f"cannot load data set '{hub.id}': it is no folder here, and the hub says: {reason} "
            "Give a local folder or a bundled: name with --dataset_name, or --train_file and "
            "--test_file."
        ) from None
    return data


# A run's train, dev and test examples, under one stated rule.
#
# The dev set, on which checkpoints are chosen, is a validation file, the data set's validation
# split where the task's YAML names one, or a held-out part of train. It is never the test set.


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


# Few-shot splits: so many examples of each label to train on, as many to choose a checkpoint.
#
# Gao et al. 2021, "Making Pre-trained Language Models Better Few-shot Learners", section 3: K
# examples a class to train on, and a development set of the same size. Their released draw is made
# again: in the files' order the same seed gives the same examples (seen for SST-2, CR and TREC; of
# CoLA only for seed 100, their first, since they go on shuffling what the seed before left).


@dataclass(frozen=True)
class Shots:
    """A few-shot split.

    Attributes:
        train: K examples of each label, label after label.
        dev: Other K of each label.
    """

    train: list[Example]
    dev: list[Example]


def draw_shots(
    examples: Sequence[Example], labels: Sequence[str], num_shots: int, seed: int
) -> Shots:
    """Shuffle the examples, and take each label's first K and next K.

    Args:
        examples: Labelled; their order matters to the draw.
        labels: The task's.
        num_shots: K.
        seed: Of numpy's old generator, which the original used.

    Raises:
        ConfigError: If K is less than 2: an example's own label needs another one to show.
        DataError: If a label has fewer than 2 K examples.
    """
    at_least("num_shots", num_shots, 2)
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
    return Shots(
        [example for group in groups.values() for example in group[:num_shots]],
        [example for group in groups.values() for example in group[num_shots : 2 * num_shots]],
    )


def whole_train(train: Sequence[Example], dev: Sequence[Example]) -> list[Example]:
    """Give a training file's examples in its order, those that were held out of it included.

    Args:
        train: As `load_splits` gives them, with ids "train-ROW".
        dev: The same; one with a file of its own has other ids and is left out.
    """
    rows = {
        int(example.id.rpartition("-")[2]): example
        for example in [*dev, *train]
        if example.id.startswith("train-")
    }
    return [rows[row] for row in sorted(rows)]
