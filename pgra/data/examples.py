"""A task's examples from files, folders, bundled data and the hub, with labels by name.

Formats of files: jsonl; csv as the csv module reads it; tsv without quoting (a quote mark is a
character). All may end in .gz. csv and tsv need a header. Other columns are ignored.
"""

import difflib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pgra.data.bundled import bundled_task_files
from pgra.data.hubfile import data_set_builder, hub_errors, hub_reason
from pgra.data.tables import Row, json_rows, table_rows
from pgra.data.tasks import LABEL, HubSource, Task
from pgra.data.textfile import check_file, is_utf8
from pgra.data.yaml_keys import SPLITS
from pgra.errors import DataError, unknown_name
from pgra.types import Example

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
