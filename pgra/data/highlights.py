"""Tables with highlighted cells, as ToTTo and FeTaQA have them, written as one line of text.

Parikh et al. 2020 (ToTTo), section 7: the highlighted cells with the headers that are found for
them, behind the titles of page and section. KATE (Liu et al. 2022, section 3.1 and Table 11)
deletes the closing tags, so that more exemplars fit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


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
