"""Examples of generation tasks with all their right answers; tables as one line of text.

Files are jsonl (also .gz): a row's answers are a text, a list of texts, or TriviaQA's value with
its aliases; of a table they are the sentences that tell it.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pgra.config import DataArguments
from pgra.core import Example, Json
from pgra.data.examples import find_split_file, load_hub
from pgra.data.read import Row, check_file, is_utf8, json_rows
from pgra.data.tasks import ANSWERS, GenerationTask, HubSource
from pgra.errors import DataError

# Tables with highlighted cells, as ToTTo and FeTaQA have them, written as one line of text.
#
# Parikh et al. 2020 (ToTTo), section 7: the highlighted cells with the headers that are found for
# them, behind the titles of page and section. KATE (Liu et al. 2022, section 3.1 and Table 11)
# deletes the closing tags, so that more exemplars fit.


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        value: Its text.
        is_header: Whether it names others.
        columns: How many columns it spans.
    """

    value: str
    is_header: bool = False
    columns: int = 1


@dataclass(frozen=True)
class Highlights:
    """A table, and the cells of it that are to be told.

    Attributes:
        cells: Its rows.
        chosen: Row and place in the row of each highlighted cell, (n, 2).
        page: Title of the page it is from; may be empty.
        section: Title of the section; may be empty.
        section_text: What the section says before the table; may be empty.
        is_overlap: Of ToTTo's dev set: whether the train set has tables with the same header;
            None elsewhere.
    """

    cells: Sequence[Sequence[Cell]]
    chosen: Sequence[Sequence[int]]
    page: str = ""
    section: str = ""
    section_text: str = ""
    is_overlap: bool | None = None
    _starts: list[list[int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Find the column at which each cell starts, cells over several rows not counted.

        Raises:
            ValueError: If a highlighted cell is not in the table.
        """
        for row, place in self.chosen:
            if not (0 <= row < len(self.cells) and 0 <= place < len(self.cells[row])):
                raise ValueError(f"the highlighted cell [{row}, {place}] is not in the table")
        starts = [[sum(c.columns for c in row[:i]) for i in range(len(row))] for row in self.cells]
        object.__setattr__(self, "_starts", starts)

    @property
    def line(self) -> str:
        """Write titles and highlighted cells with their headers, opening tags only."""
        parts = [("page_title", self.page), ("section_title", self.section)]
        for row, place in self.chosen:
            parts.append(("cell", self.cells[row][place].value))
            parts += [("col_header", value) for value in self._column_headers(row, place)]
            parts += [
                ("row_header", cell.value) for cell in self.cells[row][:place] if cell.is_header
            ]
        written = (f"<{tag}>{' '.join(text.split())}" for tag, text in parts if text.strip())
        return " ".join(written)

    def _column_headers(self, row: int, place: int) -> list[str]:
        """Give the headers above a cell that share a column with it, from the top."""
        start = self._starts[row][place]
        end = start + self.cells[row][place].columns
        found = []
        for above, first in zip(self.cells[:row], self._starts[:row], strict=True):
            for cell, begin in zip(above, first, strict=True):
                if cell.is_header and begin < end and begin + cell.columns > start:
                    found.append(cell.value)
        return found

    @property
    def values(self) -> list[str]:
        """Give all values and titles: what a sentence may say (PARENT's table for precision)."""
        inside = [cell.value for row in self.cells for cell in row]
        return _present([*inside, self.page, self.section, self.section_text])

    @property
    def chosen_values(self) -> list[str]:
        """Give highlighted values and titles: what it should say (PARENT's table for recall)."""
        chosen = [self.cells[row][place].value for row, place in self.chosen]
        return _present([*chosen, self.page, self.section])


def _present(texts: Sequence[str]) -> list[str]:
    return [text for text in texts if text.strip()]


def read_totto(row: Mapping[str, Any]) -> Highlights:
    """Read ToTTo's columns.

    Raises:
        KeyError: If one is missing.
        TypeError: If a value is of another kind.
        ValueError: If a highlighted cell is not in the table.
    """
    cells = [
        [Cell(_text(c["value"]), c["is_header"] is True, int(c["column_span"])) for c in line]
        for line in row["table"]
    ]
    return Highlights(
        cells,
        [[int(i) for i in pair] for pair in row["highlighted_cells"]],
        page=_text(row["table_page_title"]),
        section=_text(row["table_section_title"]),
        section_text=_text(row.get("table_section_text") or ""),
        is_overlap=row.get("overlap_subset"),
    )


def read_fetaqa(row: Mapping[str, Any]) -> Highlights:
    """Read FeTaQA's columns, whose tables have one line of headers; raises as `read_totto`."""
    cells = [
        [Cell(_text(value), is_header=number == 0) for value in line]
        for number, line in enumerate(row["table_array"])
    ]
    return Highlights(
        cells,
        [[int(i) for i in pair] for pair in row["highlighted_cell_ids"]],
        page=_text(row["table_page_title"]),
        section=_text(row["table_section_title"]),
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


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
