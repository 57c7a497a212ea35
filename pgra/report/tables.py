"""One table, written for a terminal, Markdown, LaTeX or CSV."""

import csv
import io
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"$<$",
    ">": r"$>$",
    "|": r"$|$",
    "±": r"$\pm$",
    "[": "{[}",  # at the start of a row it would be an argument of the row's end before it
}
_WIDTH = 100
_MARKDOWN = re.compile(r"([\\`*_\[\]|~])")


@dataclass(frozen=True)
class Cell:
    """One field of a table; `value` is its number, which CSV holds unrounded."""

    text: str
    is_bold: bool = False
    value: float | None = None

    @classmethod
    def of(cls, value: float | str | None, form: str = "", *, is_bold: bool = False) -> Self:
        """Return a number's cell, formatted; a text stands as it is, None is empty."""
        if value is None or isinstance(value, str):
            return cls(value or "")
        return cls(f"{value:{form}}", is_bold, value)

    @classmethod
    def interval(cls, ends: Sequence[float | str | None] | None, form: str) -> Self:
        low, high = ends or (None, None)
        return cls("" if low is None else f"{low:{form}} to {high:{form}}")

    @classmethod
    def of_p(cls, p: float | str | None) -> Self:
        return cls("< 0.001", value=p) if isinstance(p, float) and p < 0.001 else cls.of(p, ".3f")


@dataclass(frozen=True)
class Table:
    """A table; its first column names the rows.

    `title` stands above it and may be empty for Markdown, `notes` below it, a line each.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{len(row)} cells in a row, {len(self.columns)} columns")

    def to_text(self) -> str:
        """Render for a terminal: columns aligned, bold cells with a star."""
        # Room for the star is kept beside the others, so that digits stay in line.
        free = " " if any(cell.is_bold for row in self.rows for cell in row) else ""
        rows = [[self.columns[0], *(name + free for name in self.columns[1:])]]
        for first, *others in self.rows:
            texts = [_one_line(cell.text) + ("*" if cell.is_bold else free) for cell in others]
            rows.append([_one_line(first.text), *texts])
        widths = _widths(rows)
        lines = [_aligned(row, widths).rstrip() for row in rows]
        lines.insert(1, "-" * (sum(widths) + 2 * (len(widths) - 1)))
        notes = [line for note in self.notes for line in textwrap.wrap(note, _WIDTH)]
        return "\n".join([self.title, "", *lines, *([""] if notes else []), *notes])

    def to_markdown(self) -> str:
        """Render as GitHub's Markdown, padded so that it reads well as text too."""
        rows = [[_markdown(name) for name in self.columns]]
        rows += [[_bold(_markdown(c.text), c, "**{}**") for c in row] for row in self.rows]
        widths = [max(3, width) for width in _widths(rows)]
        lines = [f"| {_aligned(row, widths, ' | ')} |" for row in rows]
        rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
        lines.insert(1, f"| {' | '.join(rule)} |")
        notes = [f"- {_markdown(note)}" for note in self.notes]
        title = [f"**{_markdown(self.title)}**", ""] if self.title else []
        return "\n".join([*title, *lines, *([""] if notes else []), *notes])

    def to_latex(self) -> str:
        """Render for LaTeX with `booktabs`."""
        rows = [
            " & ".join(_bold(_latex(c.text), c, r"\textbf{{{}}}") for c in row) for row in self.rows
        ]
        lines = [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_latex(self.title)}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(self.columns) - 1)}}}",
            r"\toprule",
            " & ".join(_latex(name) for name in self.columns) + r" \\",
            r"\midrule",
            *(row + r" \\" for row in rows),
            r"\bottomrule",
            r"\end{tabular}",
            *(r"\par\footnotesize " + _latex(note) for note in self.notes),
            r"\end{table}",
        ]
        return "\n".join(lines)

    def to_csv(self) -> str:
        """Render the cells as CSV with a header: numbers unrounded, neither title nor notes."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        for row in self.rows:
            writer.writerow([c.text if c.value is None else repr(c.value) for c in row])
        return text.getvalue().rstrip("\n")


FORMATS: dict[str, Callable[[Table], str]] = {
    "text": Table.to_text,
    "markdown": Table.to_markdown,
    "latex": Table.to_latex,
    "csv": Table.to_csv,
}


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _aligned(row: Sequence[str], widths: Sequence[int], between: str = "  ") -> str:
    """Put the first column to the left, the others to the right."""
    first, *others = row
    cells = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
    return between.join([first.ljust(widths[0]), *cells])


def _bold(text: str, cell: Cell, pattern: str) -> str:
    return pattern.format(text) if cell.is_bold and text else text


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _markdown(text: str) -> str:
    escaped = _MARKDOWN.sub(r"\\\1", _one_line(text))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in _one_line(text))
