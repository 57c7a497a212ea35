"""Rows of example files by column: jsonl, csv as the csv module reads it, tsv without quoting."""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pgra.data.textfile import read_lines, read_records
from pgra.errors import DataError

_NO_QUOTING = "tsv is read without quoting: use csv for quoted cells"


@dataclass(frozen=True)
class Row:
    """One row of a source.

    Attributes:
        place: Where it stands, in words.
        values: By column.
        hint: What may be wrong where a column is missing; may be empty.
    """

    place: str
    values: Mapping[str, object]
    hint: str = ""


def json_rows(path: Path) -> Iterator[Row]:
    """Give a jsonl file's rows.

    Raises:
        DataError: If a line is not a JSON object, or the file cannot be read.
    """
    for record in read_records(path):
        yield Row(f"{path}, line {record.line}", record.fields)


def table_rows(path: Path, kind: str, columns: Iterable[str]) -> Iterator[Row]:
    """Give the rows of a table with a header. In a tsv, a quote mark is a character.

    Args:
        path: A csv or tsv file.
        kind: "csv" or "tsv".
        columns: Those that are used; quoted cells of a tsv are refused in them.

    Raises:
        DataError: If the file cannot be read, a row's cells do not match the header, or a cell of a
            tsv is quoted as csv quotes.
    """
    lines, columns = (line.text for line in read_lines(path)), list(columns)
    if kind == "csv":
        reader = csv.reader(lines, strict=True)
    else:
        reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    try:
        header = [name.strip() for name in next(reader, [])]
        hint = f"Is the first line a header?{_quoting_hint(kind, header)}"
        for cells in reader:
            place = f"{path}, line {reader.line_num}"
            if not cells:
                continue
            if len(cells) != len(header):
                raise DataError(
                    f"{place}: {len(cells)} cells under a header of {len(header)} "
                    f"({', '.join(header)}).{_quoting_hint(kind, cells)}"
                )
            values = dict(zip(header, cells, strict=True))
            if kind == "tsv":
                _refuse_quoted(place, {name: values[name] for name in columns if name in values})
            yield Row(place, values, hint)
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not valid {kind} ({error})") from None


def _quoting_hint(kind: str, cells: Sequence[str]) -> str:
    is_quoted = kind == "tsv" and any(cell.startswith('"') for cell in cells)
    return f" {_NO_QUOTING}." if is_quoted else ""


def _refuse_quoted(place: str, values: Mapping[str, str]) -> None:
    """Refuse a cell that says one thing with quoting and another without."""
    for name, value in values.items():
        cell = value.strip()
        if '""' in cell and cell.startswith('"') and cell.endswith('"'):
            raise DataError(f"{place}: '{name}' is quoted ({cell[:40]}), but {_NO_QUOTING}")
