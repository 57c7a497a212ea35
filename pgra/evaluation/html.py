"""One page to look through: tables, plots, and a browser of examples, in a file of its own.

Nothing in it asks for anything outside: style and script stand in the page, and its
Content-Security-Policy allows no other (by their sha256), nor any request. All text of runs is
escaped: in tables and plots by `html.escape`, for the browser as JSON without `<`, which the script
reads and puts into text nodes.
"""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from pgra.errors import ConfigError
from pgra.evaluation.comparison import Study
from pgra.evaluation.figures import number_axis
from pgra.evaluation.page_data import browser_data
from pgra.evaluation.page_plots import PlotRow, interval_plot, sweep_plot
from pgra.evaluation.reference import ReferenceTable
from pgra.evaluation.runs import Group
from pgra.evaluation.summary import AVERAGE, paper_value, summarise
from pgra.evaluation.tables import Cell, Table
from pgra.io import write_text
from pgra.types import Json

Told = tuple[Study, ReferenceTable | None]
"""A study, and the paper's table beside it."""
SUFFIXES = (".html", ".htm")
_PAGE = Path(__file__).parent / "page"
_SCRIPTS = ("choose.js", "page.js")
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def check_page_path(path: Path) -> None:
    """Refuse a file that does not look like a page, before anything is read or written over.

    Raises:
        ConfigError: If its name does not end as a page's.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"html is '{path}': give a file whose name ends in .html")


def write_page(path: Path, title: str, studies: Sequence[Told]) -> None:
    """Write the page, aside and renamed.

    Args:
        path: The file; it is written over.
        title: Of the page.
        studies: What it tells, in order.

    Raises:
        ArtifactError: If a run's predictions are damaged.
        ConfigError: As `check_page_path`.
    """
    check_page_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, render_page(title, studies))


def render_page(title: str, studies: Sequence[Told]) -> str:
    """Give the page's text.

    Args:
        title: Of the page.
        studies: What it tells, in order.

    Raises:
        ArtifactError: If a run's predictions are damaged.
    """
    groups = [study.group for study, _ in studies]
    tables = [table for study, reference in studies for table in summarise(study, reference)]
    style = _read("page.css")
    script = "".join(_read(name) for name in _SCRIPTS)
    values = {
        "title": escape(title),
        "summary": escape(_summary(groups)),
        "style": style,
        "style_hash": _policy_hash(style),
        "script": script,
        "script_hash": _policy_hash(script),
        "tables": "\n".join(_table(table) for table in tables),
        "plots": "\n".join(_plots(studies)),
        "data": _safe_json(browser_data(groups)),
    }
    # In one pass: what a text of a run looks like is never taken for a place.
    page = _PLACE.sub(lambda match: values[match.group(1)], _read("template.html"))
    # Half of a surrogate pair, which JSON may hold and UTF-8 may not, becomes a question mark.
    return page.encode("utf-8", "replace").decode("utf-8")


def _read(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")


def _policy_hash(text: str) -> str:
    """Word a text's hash as a Content-Security-Policy does."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _safe_json(value: Json) -> str:
    """Write JSON that can end no <script> and open no comment."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _summary(groups: Sequence[Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    missing = sum(len(group.missing) for group in groups)
    tasks = sorted({run.task for run in runs})
    told = f"{len(runs)} runs of {', '.join(tasks)}."
    return f"{told} {missing} more are missing." if missing else told


def _table(table: Table) -> str:
    """Give a table; its first column names the rows."""
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.columns)
    rows = "".join(f"<tr>{_row(row)}</tr>" for row in table.rows)
    notes = "".join(f"<li>{escape(note)}</li>" for note in table.notes)
    notes = f'<ul class="notes">{notes}</ul>' if notes else ""
    title = escape(table.title)
    return (
        f'<div class="wide" role="region" aria-label="{title}" tabindex="0"><table>'
        f"<caption>{title}</caption><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
        f"</div>{notes}"
    )


def _row(cells: Sequence[Cell]) -> str:
    parts = []
    for place, cell in enumerate(cells):
        tag, scope = ("td", "") if place else ("th", ' scope="row"')
        style = ' class="best"' if cell.is_bold else ""
        parts.append(f"<{tag}{scope}{style}>{escape(cell.text)}</{tag}>")
    return "".join(parts)


def _plots(studies: Sequence[Told]) -> list[str]:
    """Draw one figure for each task of each study, and one for the average."""
    figures = []
    for study, reference in studies:
        along = number_axis(study)
        for panel in [*study.tasks, *([AVERAGE] if study.has_average else [])]:
            rows = [_plot_row(study, reference, row, panel) for row in study.rows]
            title = f"{study.group.title}: {panel} (%)"
            if along is None:
                figures.append(interval_plot(title, rows))
            else:
                name = study.group.labels.get(along) or along.rpartition(".")[2]
                figures.append(sweep_plot(title, name, _in_order(study, along, rows)))
    return figures


def _plot_row(study: Study, reference: ReferenceTable | None, row: str, panel: str) -> PlotRow:
    found = study.averages.get(row) if panel == AVERAGE else study.results.get((row, panel))
    paper = paper_value(study, reference, row, panel)  # in hundredths
    fraction = None if paper is None else paper / 100
    if found is None:
        return PlotRow(row, (), paper=fraction)
    values = [run.value for run in found.runs] or [found.spread.mean]
    return PlotRow(row, values, found.interval, fraction)


def _in_order(study: Study, axis: str, rows: Sequence[PlotRow]) -> list[PlotRow]:
    """Sort points by an argument's number, and name them by it."""
    numbers = {name: float(str(values[axis])) for name, values in study.group.points.items()}
    ordered = sorted(rows, key=lambda row: numbers[row.name])
    return [replace(row, name=f"{numbers[row.name]:g}") for row in ordered]
