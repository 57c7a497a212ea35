"""Examples whose answers are written, and the tables that answers describe.

A row's answers are a text, a list of texts (as JSON in a text, too), TriviaQA's value with its
aliases, SQuAD's texts, or KILT's output; a table's are sentences that describe it.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pgra.data.read import Record, clean_text, parse_json
from pgra.errors import DataError, reading, show
from pgra.types import Example

ANSWERS = "answers"
EXACT_MATCH = "exact_match"  # the metric by which an answer is right or wrong
SUBSETS = {"overlap": True, "nonoverlap": False}  # of ToTTo's dev set: `Table.is_overlap` by name
_LIST = re.compile(r"""\s*\[\s*["'].*\]\s*""", re.DOTALL)


@dataclass(frozen=True)
class Table:
    """A table, and the cells of it that a sentence must describe.

    It is written in one line, as Parikh et al. 2020 (ToTTo), section 7, do: the titles of page and
    section, then the highlighted cells with the headers that are found for them. KATE (Liu et al.
    2022, section 3.1 and Table 11) deletes the closing tags, so that more exemplars fit.

    Attributes:
        line: Titles and highlighted cells with their headers, in opening tags only.
        values: All values and titles: what a sentence may say (PARENT's table for precision).
        chosen_values: Highlighted values and titles: what it must say (PARENT's table for recall).
        is_overlap: In ToTTo's dev set, whether train has tables with the same header; else None.
    """

    line: str
    values: list[str]
    chosen_values: list[str]
    is_overlap: bool | None = None


@dataclass(frozen=True)
class AnsweredExample(Example):
    """An example of a generation task; its label is the first answer, which an exemplar shows.

    Attributes:
        answers: All that are right, at least one.
        table: What they describe; None where a question is answered.
    """

    answers: tuple[str, ...] = ()
    table: Table | None = None


@dataclass(frozen=True)
class SumMetric:
    """A metric of written texts that follows from the sum of their counts, as BLEU does.

    Attributes:
        counts: Returns a row of numbers for each of B stripped texts and their examples, (B, R).
        of_sum: Returns the metric, a fraction, of the sum of some rows, (R,).
    """

    counts: Callable[[Sequence[str], Sequence[AnsweredExample]], list[list[int]]]
    of_sum: Callable[[Sequence[int]], float]


def read_answered(
    kind: str, row: Record, columns: Mapping[str, str], inputs: Sequence[str], name: str
) -> AnsweredExample:
    """Read one row of a `GenerationTask.kind`; the example's id is `name`.

    Raises:
        DataError: If something is missing or not text; its place is named.
    """
    table = None
    with reading(row.where):
        try:
            if kind == "question":
                values = {field: row.value(columns[field]) for field in inputs}
                answers = _list_answers(row, columns[ANSWERS])
            elif kind == "totto":
                answers = _list_sentences(row.value("sentence_annotations"))
                table = _read_table(row, row.value("table"), row.value("highlighted_cells"))
                values = {"table": table.line}
            else:
                cells = _with_headers(row.value("table_array"))
                table = _read_table(row, cells, row.value("highlighted_cell_ids"))
                values = {"table": table.line, "question": row.value("question")}
                answers = [row.value("answer")]
        except KeyError as error:  # within a column
            raise DataError(f"{row.where}: {error} is missing in a column's value") from None
    fields = {field: clean_text(row.where, field, values.get(field)) for field in inputs}
    texts = [clean_text(row.where, ANSWERS, answer) for answer in answers]
    right = tuple(dict.fromkeys(text for text in texts if text))
    if not right or not all(fields.values()):
        raise DataError(f"{row.where}: an input is blank, or there is no answer")
    return AnsweredExample(name, fields, right[0], right, table)


def _list_answers(row: Record, column: str) -> list[object]:
    """Return a question's answers: a text, a list or its JSON, TriviaQA's, SQuAD's or KILT's."""
    answers: Any = row.value(column)
    where = f"{row.where}, '{column}'"
    if isinstance(answers, Mapping) and "text" in answers:  # SQuAD: texts, and where they begin
        answers = answers["text"]
    elif isinstance(answers, Mapping):  # TriviaQA: the answer, and other names of it
        value = Record(answers, where).value("value")
        answers = [value, *answers.get("aliases", ())]
    if isinstance(answers, str) and _LIST.fullmatch(answers):
        try:
            answers = parse_json(answers)  # PopQA
        except ValueError:
            raise DataError(
                f"{where} is {show(answers)}, the text of a list: give a list"
            ) from None
    answers = answers if isinstance(answers, list) else [answers]
    # KILT: mappings, of which those without an answer name a source.
    return [a.get("answer", "") if isinstance(a, Mapping) else a for a in answers]


def _list_sentences(annotations: Any) -> list[object]:
    """Return ToTTo's sentences: of a list of mappings, on the hub of a mapping of lists."""
    if isinstance(annotations, Mapping):
        return list(annotations["final_sentence"])
    return [annotation["final_sentence"] for annotation in annotations]


def _with_headers(lines: Any) -> list[list[dict[str, object]]]:
    """Return FeTaQA's table, which has one line of headers, as ToTTo has its cells."""
    rows = []
    for number, line in enumerate(lines):
        is_header = number == 0
        rows.append([{"value": v, "is_header": is_header, "column_span": 1} for v in line])
    return rows


def _read_table(record: Record, rows: Any, chosen: Any) -> Table:
    """Read a table of cells as ToTTo has them; `chosen` are row and index of the highlighted."""
    page = _text(record.value("table_page_title"))
    section = _text(record.value("table_section_title"))
    tagged = [("page_title", page), ("section_title", section)]
    chosen_values = []
    for row, index in chosen:
        if min(row, index) < 0:
            raise ValueError(f"the highlighted cell [{row}, {index}] is not in the table")
        _, start, end = [*_spans(rows[row])][index]
        value = _text(rows[row][index]["value"])
        chosen_values.append(value)
        tagged.append(("cell", value))
        for above in rows[:row]:  # headers above share a column with it; rowspans are ignored
            for cell, first, last in _spans(above):
                if cell["is_header"] is True and first < end and last > start:
                    tagged.append(("col_header", _text(cell["value"])))
        for cell in rows[row][:index]:
            if cell["is_header"] is True:
                tagged.append(("row_header", _text(cell["value"])))
    line = " ".join(f"<{tag}>{' '.join(text.split())}" for tag, text in tagged if text.strip())
    values = []
    for cells in rows:
        values += [_text(cell["value"]) for cell in cells]
    values += [page, section, _text(record.fields.get("table_section_text") or "")]
    chosen_values += [page, section]
    is_overlap: Any = record.fields.get("overlap_subset")
    return Table(line, _not_blank(values), _not_blank(chosen_values), is_overlap)


def _not_blank(texts: Sequence[str]) -> list[str]:
    return [text for text in texts if text.strip()]


def _spans(row: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], int, int]]:
    """Yield each cell with its first column, and the one after its last."""
    start = 0
    for cell in row:
        end = start + int(cell["column_span"])
        yield cell, start, end
        start = end


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value
