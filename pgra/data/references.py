"""Examples of generation tasks with all their right answers; tables as one line of text.

Files are jsonl. A row's answers are a text, a list of texts, or TriviaQA's value with its aliases;
a table's are sentences that describe it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pgra.core import Example
from pgra.data.read import Record, clean_text
from pgra.data.tasks import ANSWERS, GenerationTask
from pgra.errors import DataError

# Tables with highlighted cells, as ToTTo and FeTaQA have them, written as one line of text.
#
# Parikh et al. 2020 (ToTTo), section 7: the highlighted cells with the headers that are found for
# them, after the titles of page and section. KATE (Liu et al. 2022, section 3.1 and Table 11)
# deletes the closing tags, so that more exemplars fit.


@dataclass(frozen=True)
class RawCell:
    """A cell of a table; a header names others, `columns` is the number that it spans."""

    value: str
    is_header: bool = False
    columns: int = 1


@dataclass(frozen=True)
class Highlights:
    """A table, and the cells of it that a sentence must describe.

    Attributes:
        cells: Its rows.
        chosen: Row and index in the row of each highlighted cell, (n, 2).
        page: Title of its page; it and the two below may be empty.
        section: Title of the section.
        section_text: What the section says before the table.
        is_overlap: In ToTTo's dev set, whether train has tables with the same header; else None.
    """

    cells: Sequence[Sequence[RawCell]]
    chosen: Sequence[Sequence[int]]
    page: str = ""
    section: str = ""
    section_text: str = ""
    is_overlap: bool | None = None

    def __post_init__(self) -> None:
        for row, index in self.chosen:
            if not (0 <= row < len(self.cells) and 0 <= index < len(self.cells[row])):
                raise ValueError(f"the highlighted cell [{row}, {index}] is not in the table")

    @property
    def line(self) -> str:
        """Return titles and highlighted cells with their headers, in opening tags only."""
        parts = [("page_title", self.page), ("section_title", self.section)]
        for row, index in self.chosen:
            parts.append(("cell", self.cells[row][index].value))
            parts += [("col_header", value) for value in self._column_headers(row, index)]
            parts += [
                ("row_header", cell.value) for cell in self.cells[row][:index] if cell.is_header
            ]
        written = (f"<{tag}>{' '.join(text.split())}" for tag, text in parts if text.strip())
        return " ".join(written)

    def _column_headers(self, row: int, index: int) -> list[str]:
        """Return the headers above a cell that share a column with it; rowspans are ignored."""
        _, start, end = [*_spans(self.cells[row])][index]
        return [
            cell.value
            for above in self.cells[:row]
            for cell, first, last in _spans(above)
            if cell.is_header and first < end and last > start
        ]

    @property
    def values(self) -> list[str]:
        """Return all values and titles: what a sentence may say (PARENT's table for precision)."""
        inside = [cell.value for row in self.cells for cell in row]
        return _present([*inside, self.page, self.section, self.section_text])

    @property
    def chosen_values(self) -> list[str]:
        """Return highlighted values and titles: what it must say (PARENT's table for recall)."""
        chosen = [self.cells[row][index].value for row, index in self.chosen]
        return _present([*chosen, self.page, self.section])


def _spans(row: Sequence[RawCell]) -> Iterator[tuple[RawCell, int, int]]:
    """Yield each cell with its first column, and the one after its last."""
    start = 0
    for cell in row:
        yield cell, start, start + cell.columns
        start += cell.columns


def _present(texts: Sequence[str]) -> list[str]:
    return [text for text in texts if text.strip()]


@dataclass(frozen=True)
class AnsweredExample(Example):
    """An example of a generation task; its label is the first answer, which an exemplar shows.

    Attributes:
        answers: All that are right, at least one.
        table: What they describe; None where a question is answered.
    """

    answers: tuple[str, ...] = ()
    table: Highlights | None = None


def read_answers(
    task: GenerationTask, row: Record, columns: Mapping[str, str], name: str
) -> AnsweredExample:
    """Read one row; a DataError with its place if something is missing or no text."""
    try:
        parsed, given, table = _parse(task.kind, row, columns)
    except KeyError as error:
        raise row.lacks(str(error.args[0])) from None
    except (TypeError, ValueError) as error:
        raise DataError(f"{row.place}: {str(error).splitlines()[0]}") from None
    fields = {field: clean_text(row.place, field, parsed.get(field)) for field in task.inputs}
    for key, text in fields.items():
        if not text:
            raise DataError(f"{row.place}: '{key}' is blank")
    answers = [clean_text(row.place, ANSWERS, answer) for answer in given]
    right = tuple(dict.fromkeys(answer for answer in answers if answer))
    if not right:
        raise DataError(f"{row.place}: has no answer")
    return AnsweredExample(name, fields, right[0], right, table)


def _parse(
    kind: str, row: Record, columns: Mapping[str, str]
) -> tuple[Mapping[str, object], Sequence[object], Highlights | None]:
    """Return a row's fields, answers and table; a bad row is a Key-, Type- or ValueError."""
    values: Mapping[str, Any] = row.fields
    if kind == "question":
        fields = {name: values[column] for name, column in columns.items()}
        given = fields.pop(ANSWERS)
        if isinstance(given, Mapping):  # TriviaQA: the answer, and other names of it
            given = [given["value"], *given.get("aliases", ())]
        return fields, given if isinstance(given, list) else [given], None
    page, section = _text(values["table_page_title"]), _text(values["table_section_title"])
    if kind == "totto":
        cells = [
            [RawCell(_text(c["value"]), c["is_header"] is True, int(c["column_span"])) for c in row]
            for row in values["table"]
        ]
        chosen, is_overlap = _pairs(values["highlighted_cells"]), values.get("overlap_subset")
        section_text = _text(values.get("table_section_text") or "")
        table = Highlights(cells, chosen, page, section, section_text, is_overlap)
        given = values["sentence_annotations"]
        if isinstance(given, Mapping):  # on the hub a mapping of lists
            return {"table": table.line}, list(given["final_sentence"]), table
        if not isinstance(given, list):
            raise TypeError(f"{given!r} is not a list")
        return {"table": table.line}, [each["final_sentence"] for each in given], table
    cells = [  # FeTaQA's tables have one line of headers
        [RawCell(_text(value), is_header=number == 0) for value in line]
        for number, line in enumerate(values["table_array"])
    ]
    table = Highlights(cells, _pairs(values["highlighted_cell_ids"]), page, section)
    return {"table": table.line, "question": values["question"]}, [values["answer"]], table


def _pairs(values: Any) -> list[list[int]]:
    return [[int(i) for i in pair] for pair in values]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value
