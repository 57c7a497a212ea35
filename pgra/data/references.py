"""Examples of generation tasks with all answers that are right, from files, folders and the hub.

Files are jsonl (also .gz): a row's answers are a text, a list of texts, or TriviaQA's value with
its aliases; of a table they are the sentences that tell it.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pgra.config import DataArguments
from pgra.data.examples import find_split_file, load_hub
from pgra.data.generation import ANSWERS, GenerationTask
from pgra.data.highlights import Highlights, read_fetaqa, read_totto
from pgra.data.tables import Row, json_rows
from pgra.data.tasks import HubSource
from pgra.data.textfile import check_file, is_utf8
from pgra.errors import DataError
from pgra.types import Example, Json

_ANY_SPLITS = {"train": "train", "validation": "validation", "test": "test"}


@dataclass(frozen=True)
class Reference:
    """An example of a generation task.

    Attributes:
        example: Id, fields, and as its label the first answer: what an exemplar shows.
        answers: All that are right, at least one.
        table: The table it is about, or None.
    """

    example: Example
    answers: tuple[str, ...]
    table: Highlights | None = None


@dataclass(frozen=True)
class References:
    """A run's exemplars and queries.

    Attributes:
        pool: Where exemplars are drawn from.
        queries: What is asked.
        notes: Where each came from, and counts.
    """

    pool: list[Reference]
    queries: list[Reference]
    notes: Mapping[str, Json]


def load_references(task: GenerationTask, args: DataArguments) -> References:
    """Read a task's exemplars and queries; sub-samples are drawn with `split_seed`.

    Raises:
        DataError: If a source is missing or unreadable, or has a bad row.
    """
    found, notes = {}, dict[str, Json]()
    sources = {"train": args.train_file, "test": args.test_file}
    most = {"train": args.max_train_samples, "test": args.max_test_samples}
    for split, file in sources.items():
        source = file or args.dataset_name
        if source is None and any(sources.values()):
            raise DataError(f"there is no {split} set: give --{split}_file")
        rows = read_references(task, source, split)
        found[split] = _sample(rows, most[split], args.split_seed)
        notes[split] = len(found[split])
        notes[f"{split}_source"] = source or (task.hub.id if task.hub else None)
        notes[f"{split}_is_usual"] = task.sizes.get(split) in (None, len(rows))
    return References(found["train"], found["test"], notes)


def read_references(task: GenerationTask, source: str | None, split: str) -> list[Reference]:
    """Read one split.

    Args:
        task: Whose rows they are.
        source: A jsonl file, a local folder or a hub id; None is the task's own on the hub.
        split: "train", "validation" or "test"; ids begin with it.

    Raises:
        DataError: If nothing is there, it cannot be read, or a row is bad; its place is named.
    """
    path = None if source is None else Path(source).expanduser()
    if path is not None and path.is_dir():
        path = find_split_file(
            path, split, task=task.name, splits=task.local_splits, kinds=("jsonl",)
        )
    if path is not None and (path.is_file() or "jsonl" in path.name.split(".")):
        check_file(path, ("jsonl",))
        return _read_rows(task, json_rows(path), task.local_columns, split=split, where=str(path))
    hub = task.hub if source is None or (task.hub and task.hub.id == source) else None
    if hub is None and source is None:
        raise DataError(
            f"task '{task.name}' names no data set of its own: give --dataset_name, or "
            "--train_file and --test_file"
        )
    return _read_hub(task, hub or HubSource(str(source), None, None, {}, None, _ANY_SPLITS), split)


def _read_hub(task: GenerationTask, hub: HubSource, split: str) -> list[Reference]:
    data = load_hub(hub)
    name = hub.splits.get(split, split)
    if name not in data:
        raise DataError(
            f"data set '{hub.id}' has no split '{name}' (it has {', '.join(data)}): give the "
            f"{split} split with --{split}_file"
        )
    where = f"data set '{hub.id}', split '{name}'"
    rows = (Row(f"{where}, row {number}", row) for number, row in enumerate(data[name]))
    return _read_rows(task, rows, hub.columns, split=split, where=where)


def _read_rows(
    task: GenerationTask,
    rows: Iterable[Row],
    columns: Mapping[str, str],
    *,
    split: str,
    where: str,
) -> list[Reference]:
    shown = {name: columns.get(name, name) for name in (*task.inputs, ANSWERS)}
    found = [_reference(task, row, shown, f"{split}-{number}") for number, row in enumerate(rows)]
    if not found:
        raise DataError(f"{where} holds no example")
    return found


def _reference(task: GenerationTask, row: Row, columns: Mapping[str, str], name: str) -> Reference:
    try:
        parsed = _READERS[task.kind](row, columns)
    except KeyError as error:
        names = ", ".join(map(str, row.values)) or "none"
        raise DataError(f"{row.place}: no column {error}. Found: {names}.") from None
    except (TypeError, ValueError) as error:
        raise DataError(f"{row.place}: {str(error).splitlines()[0]}") from None
    fields = {field: _clean(row, field, parsed.fields.get(field)) for field in task.inputs}
    answers = [_clean(row, ANSWERS, answer, may_be_blank=True) for answer in parsed.answers]
    right = tuple(dict.fromkeys(answer for answer in answers if answer))
    if not right:
        raise DataError(f"{row.place}: has no answer")
    return Reference(Example(name, fields, right[0]), right, parsed.table)


def _clean(row: Row, name: str, text: object, *, may_be_blank: bool = False) -> str:
    """Give a text as one line would hold it.

    Raises:
        DataError: If it is none, blank, or cannot be kept as UTF-8.
    """
    if not isinstance(text, str):
        raise DataError(f"{row.place}: '{name}' is {text!r}, not text")
    if not is_utf8(text):
        raise DataError(f"{row.place}: '{name}' holds a NUL or half a surrogate pair")
    if not text.strip() and not may_be_blank:
        raise DataError(f"{row.place}: '{name}' is blank")
    return text.strip()


@dataclass(frozen=True)
class _Parsed:
    fields: Mapping[str, object]
    answers: Sequence[object]
    table: Highlights | None = None


def _question(row: Row, columns: Mapping[str, str]) -> _Parsed:
    """Take text fields, and answers in any of the known shapes."""
    fields = {name: row.values[column] for name, column in columns.items()}
    given = fields.pop(ANSWERS)
    if isinstance(given, Mapping):  # TriviaQA: the answer, and other names of it
        given = [given["value"], *given.get("aliases", ())]
    return _Parsed(fields, given if isinstance(given, list) else [given])


def _totto(row: Row, _: Mapping[str, str]) -> _Parsed:
    """Take a table and its sentences; on the hub they are a mapping of lists."""
    table, told = read_totto(row.values), row.values["sentence_annotations"]
    if isinstance(told, Mapping):
        sentences = list(told["final_sentence"])
    else:
        sentences = [annotation["final_sentence"] for annotation in _listed(told)]
    return _Parsed({"table": table.line}, sentences, table)


def _fetaqa(row: Row, _: Mapping[str, str]) -> _Parsed:
    table = read_fetaqa(row.values)
    fields = {"table": table.line, "question": row.values["question"]}
    return _Parsed(fields, [row.values["answer"]], table)


def _listed(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is not a list")
    return value


_READERS: Mapping[str, Callable[[Row, Mapping[str, str]], _Parsed]] = {
    "question": _question,
    "totto": _totto,
    "fetaqa": _fetaqa,
}


def _sample(rows: list[Reference], most: int | None, seed: int) -> list[Reference]:
    if most is None or most >= len(rows):
        return rows
    return [rows[row] for row in sorted(random.Random(seed).sample(range(len(rows)), most))]
