"""Reports to look at: figures, and one HTML page with tables, plots and a browser of examples.

Nothing in it asks for anything outside: style and script stand in the page, and its
Content-Security-Policy allows no other (by their sha256), nor any request. All text of runs is
escaped: in tables and plots by `html.escape`, for the browser as JSON without `<`, which the script
reads and puts into text nodes.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgra.artifacts import write_aside, write_text
from pgra.core import Json
from pgra.errors import ArtifactError, ConfigError
from pgra.report.compare import (
    AVERAGE,
    METRIC,
    ReferenceTable,
    Result,
    Study,
    has_paper,
    paper_value,
    summarise,
)
from pgra.report.metrics import PairedDifference, paired_bootstrap
from pgra.report.results import PREDICTIONS_FILE, TASK_AXIS, Group, Run, row_names
from pgra.report.tables import Cell, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# What the report's browser of examples looks through, as one value for JSON.
#
# Texts, and lists of evidence that several runs share (the seeds of one system do), stand there
# once: 10,000 queries of several runs stay a page that opens.


MOST_EVIDENCE = 16
"""How many of a query's evidence the page holds: the paper's d."""

_UNKNOWN = -1
_CHANCE_DIGITS = 5
_SCORE_DIGITS = 7  # dot products are in the thousands, and differ in the first decimal


class Places:
    """Numbers for values, from 0, in the order in which they are first met."""

    def __init__(self) -> None:
        self._places: dict[Any, int] = {}

    def of(self, value: Hashable) -> int:
        """Give a value's number, a new one if it is new."""
        return self._places.setdefault(value, len(self._places))

    @property
    def values(self) -> list[Any]:
        """Give the values by number."""
        return list(self._places)


def browser_data(groups: Sequence[Group], *, most_evidence: int = MOST_EVIDENCE) -> dict[str, Json]:
    """Gather all examples, with what each run read and said.

    Args:
        groups: Runs; those of one test set are laid side by side, whatever group they are of.
        most_evidence: How many of each query's evidence are kept, from the best.

    Returns:
        `{"texts": [...], "tasks": [...]}`, as `assets/choose.js` describes it.

    Raises:
        ArtifactError: If a run's predictions are damaged.
    """
    texts = Places()
    sets: dict[tuple[str, str], list[tuple[str, Run]]] = {}
    for group in groups:
        for row, run in zip(row_names(group), group.runs, strict=True):
            known = sets.setdefault((run.task, run.decisions.examples), [])
            if run.folder.resolve() not in [other.folder.resolve() for _, other in known]:
                known.append((row, run))
    names = _distinct([task for task, _ in sets])
    tasks = [
        _task_data(name, runs, texts, most_evidence=most_evidence)
        for name, runs in zip(names, sets.values(), strict=True)
    ]
    return {"texts": texts.values, "tasks": tasks}


def _distinct(names: Sequence[str]) -> list[str]:
    """Number the names that stand there already: "sst2", "sst2 (2)"."""
    given: list[str] = []
    for name in names:
        number, mine = 1, name
        while mine in given:
            number += 1
            mine = f"{name} ({number})"
        given.append(mine)
    return given


def _task_data(
    name: str, runs: Sequence[tuple[str, Run]], texts: Places, *, most_evidence: int
) -> dict[str, Json]:
    labels, lists = Places(), Places()
    systems = [system for system, _ in runs]
    shown = _distinct([f"{s} (seed {run.seed})" if systems.count(s) > 1 else s for s, run in runs])
    laid = []
    for (system, run), run_name in zip(runs, shown, strict=True):
        try:
            laid.append(
                {
                    "name": run_name,
                    "system": system,
                    **_run_data(run.predictions, labels, lists, texts, most=most_evidence),
                }
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ArtifactError(
                f"{run.folder / PREDICTIONS_FILE} is damaged ({type(error).__name__}: {error}): "
                f"leave {run.folder} out, or delete it and run it again"
            ) from None
    lines = runs[0][1].predictions
    gold = [_UNKNOWN if line["label"] is None else labels.of(line["label"]) for line in lines]
    return {
        "name": name,
        "ids": [str(line["id"]) for line in lines],
        "queries": [texts.of(str(line["text"])) for line in lines],
        "gold": gold,
        "labels": labels.values,
        "lists": [list(flat) for flat in lists.values],
        "runs": laid,
    }


def _run_data(
    lines: Sequence[Mapping[str, Any]],
    labels: Places,
    lists: Places,
    texts: Places,
    *,
    most: int,
) -> dict[str, Json]:
    answers, chances, evidence, attention = [], [], [], []
    for line in lines:
        scores = line.get("scores") or {}
        for label in scores:  # first of all, for their order is the task's
            labels.of(label)
        seen = line.get("evidence") or []
        answers.append(labels.of(line["prediction"]))
        chances.append([[labels.of(k), _short(v, _CHANCE_DIGITS)] for k, v in scores.items()])
        evidence.append(lists.of(_flat(seen[:most], texts)))
        attention.append([_short(one.get("attention"), _CHANCE_DIGITS) for one in seen[:most]])
    knows = any(share is not None for shares in attention for share in shares)
    return {
        "answers": answers,
        "chances": chances,
        "evidence": evidence,
        "attention": attention if knows else None,
        "read": max((len(line.get("evidence") or []) for line in lines), default=0),
    }


def _flat(seen: Sequence[Mapping[str, Any]], texts: Places) -> tuple[float | int | None, ...]:
    """Lay evidence in a row, four numbers each: text, stage-1 rank, both stages' scores."""
    numbers: list[float | int | None] = []
    for one in seen:
        numbers += [texts.of(str(one["text"])), one.get("stage1_rank")]
        numbers += [_short(one.get(name), _SCORE_DIGITS) for name in ("stage1_score", "score")]
    return tuple(numbers)


def _short(value: float | None, digits: int) -> float | None:
    """Keep as many digits as a person reads; None for what is no number."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


# Plots as inline SVG: drawn by the page's own style sheet, so that they follow light and dark.
#
# The figures for papers are matplotlib's (`pgra.report.page`). These need no package, and keep
# their letters readable on a phone: names stand above their line, not beside it.


_WIDTH, _SIDE = 400, 12  # of the drawing's own units; the page scales it
_ROW, _FOOT = 44, 26
_TICKS = 4
_NAME_LENGTH = 30
_EXACT = 1e-9  # what rounding may do to a value on a tick
_SWEEP = 240  # height of a sweep's field


@dataclass(frozen=True)
class PlotRow:
    """One line of a plot.

    Attributes:
        name: What is measured.
        values: One a seed, fractions; empty if it is missing.
        interval: Both ends of the 95 % interval; None where it is unknown.
        paper: What the paper prints; None where it prints nothing.
    """

    name: str
    values: Sequence[float]
    interval: tuple[float, float] | None = None
    paper: float | None = None

    @property
    def mean(self) -> float:
        """Give the mean over the seeds."""
        return sum(self.values) / len(self.values)


def interval_plot(title: str, rows: Sequence[PlotRow]) -> str:
    """Draw each row's mean (a disc), seeds (rings), 95 % interval (a bar) and the paper's value.

    Args:
        title: What the values are; escaped here, as all names are.
        rows: From above; one without values is said to be missing.
    """
    axis = _Axis.over([value for row in rows for value in _all_values(row)])
    height = _ROW * len(rows) + _FOOT
    parts = [axis.draw(height)]
    parts += [_draw_row(row, axis, place * _ROW) for place, row in enumerate(rows)]
    return _figure(title, rows, height, parts)


def sweep_plot(title: str, axis_name: str, rows: Sequence[PlotRow]) -> str:
    """Draw the mean along the values of one argument, with each point's 95 % interval.

    Values stand at equal steps, for the paper's are powers of two and the like.

    Args:
        title: What the values are.
        axis_name: The argument's.
        rows: From left to right, each named by the argument's value; one without values is said
            to be missing, and the line has a gap there.
    """
    axis = _Axis.over([value for row in rows for value in _all_values(row)])
    left, right = 5 * _SIDE, _WIDTH - 3 * _SIDE
    step = (right - left) / max(len(rows) - 1, 1)
    parts = [
        f'<line class="grid" x1="{left}" x2="{right}" y1="{axis.y(t / 100)}" y2="{axis.y(t / 100)}"'
        f'/><text class="tick" x="{left - 16}" y="{axis.y(t / 100) + 4}" text-anchor="end">'
        f"{t:.{axis.digits}f}</text>"
        for t in axis.ticks
    ]
    last = None
    for place, row in enumerate(rows):
        x = round(left + place * step, 1)
        here = (x, axis.y(row.mean)) if row.values else None
        if last and here:
            parts.append(
                f'<line class="trend" x1="{last[0]}" y1="{last[1]}" x2="{here[0]}" y2="{here[1]}"/>'
            )
        parts.append(_draw_point(row, axis, x))
        last = here
    height = _SWEEP + 2 * _FOOT
    parts.append(
        f'<text class="tick" x="{(left + right) / 2}" y="{height - 8}" text-anchor="middle">'
        f"{escape(axis_name)}</text>"
    )
    return _figure(title, rows, height, parts)


@dataclass(frozen=True)
class _Axis:
    """Where values lie from left to right.

    Attributes:
        ticks: Round values, at least two, that enclose all others.
        digits: Decimals that tell the ticks apart.
    """

    ticks: Sequence[float]
    digits: int

    @classmethod
    def over(cls, values: Sequence[float]) -> "_Axis":
        """Choose round ticks around some values."""
        known = [100 * value for value in values] or [0.0, 100.0]
        span = max(max(known) - min(known), 0.1)
        power = 10.0 ** math.floor(math.log10(span / _TICKS))
        step = next(power * m for m in (1, 2, 5, 10) if power * m >= span / _TICKS)
        first = math.floor(min(known) / step + _EXACT)
        last = math.ceil(max(known) / step - _EXACT)
        last = max(last, first + 1)
        digits = max(0, -math.floor(math.log10(step) + _EXACT))
        return cls([place * step for place in range(first, last + 1)], digits)

    def share(self, value: float) -> float:
        """Give how far along the axis a fraction lies, from 0 to 1."""
        return (100 * value - self.ticks[0]) / (self.ticks[-1] - self.ticks[0])

    def x(self, value: float) -> float:
        """Give a fraction's place from left to right."""
        return round(2 * _SIDE + self.share(value) * (_WIDTH - 4 * _SIDE), 1)

    def y(self, value: float) -> float:
        """Give a fraction's place in a sweep, from the top."""
        return round(_SIDE + (1 - self.share(value)) * (_SWEEP - 2 * _SIDE), 1)

    def draw(self, height: int) -> str:
        """Draw lines and numbers."""
        foot = height - _FOOT
        return "".join(
            f'<line class="grid" x1="{self.x(t / 100)}" x2="{self.x(t / 100)}" y1="0" y2="{foot}"/>'
            f'<text class="tick" x="{self.x(t / 100)}" y="{foot + 16}" text-anchor="middle">'
            f"{t:.{self.digits}f}</text>"
            for t in self.ticks
        )


def _worded(row: PlotRow) -> str:
    if not row.values:
        return "missing"
    told = f"{100 * row.mean:.1f}"
    if row.interval is not None:
        told += f" ({100 * row.interval[0]:.1f} to {100 * row.interval[1]:.1f})"
    return told


def _all_values(row: PlotRow) -> list[float]:
    return [*row.values, *_drawn(row), *([] if row.paper is None else [row.paper])]


def _drawn(row: PlotRow) -> list[float]:
    """Give the interval within 0 to 1: by Student's t over two seeds it can be wider than all."""
    if row.interval is None or not row.values:
        return []
    return [min(max(end, min(0.0, *row.values)), 1.0) for end in row.interval]


def _draw_row(row: PlotRow, axis: _Axis, top: int) -> str:
    name = row.name if len(row.name) <= _NAME_LENGTH else f"{row.name[: _NAME_LENGTH - 1]}…"
    parts = [
        f'<text x="{_SIDE}" y="{top + 16}">{escape(name)}<title>{escape(row.name)}</title></text>',
        f'<text x="{_WIDTH - _SIDE}" y="{top + 16}" text-anchor="end">{_worded(row)}</text>',
    ]
    y = top + 30
    if ends := _drawn(row):
        places = f'x1="{axis.x(ends[0])}" x2="{axis.x(ends[1])}"'
        parts.append(f'<line class="range" {places} y1="{y}" y2="{y}"/>')
    if len(row.values) > 1:
        parts += [f'<circle class="seed" cx="{axis.x(v)}" cy="{y}" r="5"/>' for v in row.values]
    if row.values:
        parts.append(f'<circle class="mean" cx="{axis.x(row.mean)}" cy="{y}" r="5"/>')
    if row.paper is not None:
        parts.append(_diamond(axis.x(row.paper), y))
    return "".join(parts)


def _draw_point(row: PlotRow, axis: _Axis, x: float) -> str:
    parts = [
        f'<text class="tick" x="{x}" y="{_SWEEP + 16}" text-anchor="middle">'
        f"{escape(row.name)}</text>"
    ]
    if ends := _drawn(row):
        places = f'y1="{axis.y(ends[0])}" y2="{axis.y(ends[1])}"'
        parts.append(f'<line class="range" x1="{x}" x2="{x}" {places}/>')
    if row.values:
        parts.append(f'<circle class="mean" cx="{x}" cy="{axis.y(row.mean)}" r="5"/>')
    else:
        parts.append(
            f'<text class="tick" x="{x}" y="{_SWEEP // 2}" text-anchor="middle">missing</text>'
        )
    if row.paper is not None:
        parts.append(_diamond(x, axis.y(row.paper)))
    return "".join(parts)


def _diamond(x: float, y: float) -> str:
    return f'<path class="paper" d="M{x} {y - 6}l6 6l-6 6l-6-6z"/>'


def _figure(title: str, rows: Sequence[PlotRow], height: int, parts: Sequence[str]) -> str:
    told = "; ".join(f"{row.name}: {_worded(row)}" for row in rows)
    papers = [f"{row.name}: {100 * row.paper:.1f}" for row in rows if row.paper is not None]
    told += f". The paper (diamonds): {'; '.join(papers)}" if papers else ""
    more = " \N{WHITE DIAMOND} the paper" if papers else ""
    return (
        f"<figure><figcaption>{escape(title)}{more}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(told)}">'
        f"{''.join(parts)}</svg></figure>"
    )


# A study as one figure: a line along what a grid varies, or a dot and its interval a row.


SUFFIXES = (".pdf", ".png", ".svg")
_DOTS_PER_INCH = 150
_NOWHERE = float("nan")


def check_figure_path(path: Path) -> None:
    """Refuse a file whose ending names no kind of picture, before anything is read.

    Raises:
        ConfigError: If it does not.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"figure is '{path}': give a file that ends in {', '.join(SUFFIXES)}")


def number_axis(study: Study) -> str | None:
    """Give the one argument that a grid varies, if it is a number; else None."""
    axes = [axis for axis in study.group.axes if axis != TASK_AXIS]
    if len(axes) != 1 or len(study.rows) < 2:
        return None
    values = [point.get(axes[0]) for point in study.group.points.values()]
    return axes[0] if all(_is_number(value) for value in values) else None


def plot_study(study: Study, path: Path, reference: ReferenceTable | None = None) -> None:
    """Draw a study; what is missing is not drawn, and is named beneath.

    Args:
        study: The runs.
        path: .png, .svg or .pdf.
        reference: The paper's table: its values are drawn hollow.

    Raises:
        ArtifactError: If matplotlib is not installed.
        ConfigError: As `check_figure_path`.
    """
    check_figure_path(path)
    if reference is not None and reference.measure != METRIC:
        reference = None
    figure = draw_study(study, reference)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a date, so that one study gives one file.
    kind = path.suffix.lower().removeprefix(".")
    undated: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
    with write_aside(path) as aside:
        figure.savefig(aside, format=kind, dpi=_DOTS_PER_INCH, metadata=undated[kind])


def draw_study(study: Study, reference: ReferenceTable | None = None) -> "Figure":
    """Give the figure: a panel a task, and one for the average.

    Raises:
        ArtifactError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ArtifactError("matplotlib is missing: pip install 'pgra[demo]'") from None
    with plain_text():
        return _draw(Figure, study, reference)


@contextmanager
def plain_text() -> Iterator[None]:
    """Show names as they are: to matplotlib two dollar signs would be a formula."""
    from matplotlib import rc_context

    with rc_context({"text.parse_math": False}):
        yield


def _draw(open_figure: "type[Figure]", study: Study, reference: ReferenceTable | None) -> "Figure":
    panels = [*study.tasks, *([AVERAGE] if study.averages and len(study.tasks) > 1 else [])]
    along = number_axis(study)
    width = min(len(panels), 3)
    height = -(-len(panels) // width)
    tall = 2.8 if along else 1.0 + 0.35 * len(study.rows)
    figure = open_figure(figsize=(4.2 * width, tall * height + 0.8), layout="constrained")
    grid = figure.subplots(height, width, squeeze=False).ravel().tolist()
    for axes, panel in zip(grid, panels, strict=False):
        if along is not None:
            _draw_line(axes, study, panel, along, reference)
        else:
            _draw_dots(axes, study, panel, reference)
        axes.set_title(f"{panel}, {_measure(study, panel)}", fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(_title(study, reference), fontsize="medium")
    return figure


def _measure(study: Study, panel: str) -> str:
    metric = next((run.metric for run in study.group.runs if run.task == panel), "")
    return f"{metric} in hundredths".strip()


def _title(study: Study, reference: ReferenceTable | None) -> str:
    lines = [study.group.title]
    if reference is not None and any(has_paper(reference, study, t) for t in study.tasks):
        lines.append(f"hollow: the paper's values ({reference.title})")
    absent = [
        f"{row} ({task})"
        for row in study.rows
        for task in study.tasks
        if (row, task) not in study.results
    ]
    lines += [f"missing: {', '.join(absent)}"] if absent else []
    return "\n".join(lines)


def _result(study: Study, row: str, panel: str) -> Result | None:
    return study.averages.get(row) if panel == AVERAGE else study.results.get((row, panel))


def _ends(result: Result) -> tuple[float, float]:
    low, high = result.interval or (result.spread.mean, result.spread.mean)
    return 100 * low, 100 * high


def _draw_line(
    axes: "Axes", study: Study, panel: str, along: str, reference: ReferenceTable | None
) -> None:
    """Draw values by the axis' numbers, evenly spaced, with their 95 % intervals.

    A point that is missing leaves a gap in the line.
    """
    points = study.group.points
    rows = sorted(study.rows, key=lambda row: _number(points[row][along]))
    results = [_result(study, row, panel) for row in rows]
    ours = [_NOWHERE if result is None else 100 * result.spread.mean for result in results]
    axes.plot(range(len(rows)), ours, "o-", color="black")
    for place, result in enumerate(results):
        if result is not None:
            axes.plot([place, place], _ends(result), color="0.6", linewidth=3, zorder=0)
    paper = [paper_value(study, reference, row, panel) for row in rows]
    if any(value is not None for value in paper):
        theirs = [_NOWHERE if value is None else value for value in paper]
        axes.plot(range(len(rows)), theirs, "o--", color="C0", fillstyle="none")
    axes.set_xticks(range(len(rows)), [str(points[row][along]) for row in rows])
    axes.set_xlabel(study.group.labels.get(along) or along.rpartition(".")[2])


def _draw_dots(axes: "Axes", study: Study, panel: str, reference: ReferenceTable | None) -> None:
    """Draw a line for each row, the first on top: its value, its 95 % interval."""
    for place, row in enumerate(reversed(study.rows)):
        result = _result(study, row, panel)
        if result is not None:
            axes.plot(_ends(result), [place, place], color="0.6", linewidth=3, zorder=0)
            axes.plot(100 * result.spread.mean, place, "o", color="black")
        value = paper_value(study, reference, row, panel)
        if value is not None:
            axes.plot(value, place, "o", color="C0", fillstyle="none")
    axes.set_yticks(range(len(study.rows)), _shortened(study.rows))
    axes.set_ylim(-0.6, len(study.rows) - 0.4)


def _shortened(rows: Sequence[str], most: int = 28) -> list[str]:
    """Give the rows' names from below, cut where they are long."""
    return [row if len(row) <= most else row[: most - 3] + "..." for row in reversed(rows)]


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Json) -> float:
    return float(value) if isinstance(value, int | float) else _NOWHERE


Told = tuple[Study, ReferenceTable | None]
"""A study, and the paper's table beside it."""
PAGE_SUFFIXES = (".html", ".htm")
_PAGE = Path(__file__).parent / "assets"
_SCRIPTS = ("choose.js", "page.js")
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def check_page_path(path: Path) -> None:
    """Refuse a file that does not look like a page, before anything is read or written over.

    Raises:
        ConfigError: If its name does not end as a page's.
    """
    if path.suffix.lower() not in PAGE_SUFFIXES:
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


# The demo's report: its runs in one table with differences, one example, one plot.


_BOOTSTRAP_SEED = 0


def compare(run: Run, baseline: Run) -> PairedDifference:
    """Compare two runs on the same examples.

    Raises:
        ValueError: If they decided different examples.
    """
    ours, theirs = run.decisions, baseline.decisions
    if ours.examples != theirs.examples:
        raise ValueError(f"{run.folder} and {baseline.folder} decided different examples")
    return paired_bootstrap(
        run.metric,
        theirs.labels,
        ours.predicted,
        theirs.predicted,
        ours.names,
        seed=_BOOTSTRAP_SEED,
    )


def demo_table(runs: Sequence[Run]) -> Table:
    """Give each run's metric with its interval, and its difference to the first."""
    baseline = runs[0]
    rows = []
    for run in runs:
        low, high = _interval(run)
        cells = [run.name, f"{run.value:.3f}", f"{low:.3f} to {high:.3f}"]
        if run is baseline:
            cells += ["", ""]
        else:
            gap = compare(run, baseline)
            cells += [
                f"{gap.difference:+.3f} ({gap.low:+.3f} to {gap.high:+.3f})",
                f"{gap.p:.2f}",
            ]
        rows.append([Cell(text) for text in cells])
    columns = ["reader", baseline.metric, "95 % interval", "difference to the first", "p"]
    return Table("", columns, rows)


def _interval(run: Run) -> tuple[float, float]:
    low, high = run.metrics["interval_95"]
    return float(low), float(high)


def choose_case(runs: Sequence[Run]) -> int:
    """Give the place of the first example that the runs decide differently; else the first."""
    for place, lines in enumerate(zip(*(run.predictions for run in runs), strict=True)):
        if len({line["prediction"] for line in lines}) > 1:
            return place
    return 0


def case_study(runs: Sequence[Run], place: int, *, most: int = 4) -> str:
    """Show one query as the paper's Table 3 does: what each system read, and what it said."""
    query = runs[0].predictions[place]
    lines = [f"query: {query['text']}", f"label: {query['label']}"]
    for run in runs:
        line = run.predictions[place]
        chance = line["scores"][line["prediction"]]
        verdict = "right" if line["prediction"] == line["label"] else "wrong"
        lines += ["", f"{run.name}: {line['prediction']} ({chance:.2f}, {verdict})"]
        lines += [
            f"  ({number}) {seen['text']}  [stage 1: rank {seen['stage1_rank']}]"
            for number, seen in enumerate(line["evidence"][:most], 1)
        ]
    return "\n".join(lines)


def plot_results(runs: Sequence[Run], path: Path) -> None:
    """Draw each system's metric with its interval.

    Raises:
        ArtifactError: If matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise ArtifactError("matplotlib is missing: pip install 'pgra[demo]'") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 0.8 + 0.6 * len(runs)), layout="constrained")
    for place, run in enumerate(reversed(runs)):
        low, high = _interval(run)
        axes.plot([low, high], [place, place], color="0.6", linewidth=3, solid_capstyle="round")
        axes.plot(run.value, place, "o", color="black")
    axes.set_yticks(range(len(runs)), [run.name for run in reversed(runs)])
    axes.set_ylim(-0.6, len(runs) - 0.4)
    first = runs[0].metrics
    axes.set_xlabel(f"{first['metric']} on {first['n']} test examples, 95 % interval")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
