"""Tables for a terminal, Markdown or CSV; a study as tables, as a figure, and as one HTML page.

The page holds the tables, a figure of each and some examples. It has no script and loads nothing:
the figures are inline. Jinja2 escapes all text of runs.
"""

import base64
import csv
import io
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Self

from pgra.artifacts import write_aside
from pgra.data.tasks import METRICS, TEXT_METRICS
from pgra.errors import one_line
from pgra.report.compare import AVERAGE, LEVEL, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 100
_MARKDOWN = re.compile(r"([\\`*_\[\]|~])")
_MISSING = "missing"
_ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True)
class Cell:
    """One field of a table; `value` is its number, which CSV holds unrounded."""

    text: str
    is_bold: bool = False
    value: float | None = None

    @classmethod
    def of(cls, value: float | str | None, form: str = "") -> Self:
        """Return a number's cell, formatted; a text stands as it is, None is empty."""
        if value is None or isinstance(value, str):
            return cls(value or "")
        return cls(f"{value:{form}}", value=value)


TableRow = dict[str, float | str | None]  # values by column


@dataclass(frozen=True)
class Table:
    """A table; its first column names the rows.

    `title` stands above it and may be empty for Markdown, `notes` below it, a line each.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        title: str,
        rows: Sequence[Mapping[str, float | str | None]],
        forms: Mapping[str, str],
        notes: Sequence[str] = (),
    ) -> Self:
        """Return a table of values by column, as `forms` shows each; empty columns are left out."""
        names = [name for name in forms if any(row.get(name) not in (None, "") for row in rows)]
        cells = [[Cell.of(row.get(name), forms[name]) for name in names] for row in rows]
        return cls(title, [name.replace("_", " ") for name in names], cells, notes)

    def to_text(self) -> str:
        """Render for a terminal: columns aligned, bold cells with a star."""
        rows = [list(self.columns)]
        for row in self.rows:
            rows.append([f"{cell.text}*" if cell.is_bold else cell.text for cell in row])
        lines = _aligned(rows, "  ")
        lines.insert(1, "-" * max(map(len, lines)))
        lines = [self.title, "", *map(str.rstrip, lines)]
        if self.notes:
            lines.append("")
        for note in self.notes:
            lines += textwrap.wrap(note, _WIDTH)
        return "\n".join(lines)

    def to_markdown(self) -> str:
        """Render as GitHub's Markdown, padded so that it reads well as text too."""
        rows = [[_markdown(name) for name in self.columns]]
        rows.append([":--", *["--:"] * (len(self.columns) - 1)])
        for row in self.rows:
            texts = [_markdown(cell.text) for cell in row]
            pairs = zip(texts, row, strict=True)
            rows.append([f"**{text}**" if cell.is_bold else text for text, cell in pairs])
        lines = [f"| {line} |" for line in _aligned(rows, " | ")]
        if self.title:
            lines = [f"**{_markdown(self.title)}**", "", *lines]
        if self.notes:
            lines += ["", *(f"- {_markdown(note)}" for note in self.notes)]
        return "\n".join(lines)

    def to_csv(self) -> str:
        """Render the cells as CSV with a header: numbers unrounded, neither title nor notes."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        for row in self.rows:
            writer.writerow([cell.text if cell.value is None else repr(cell.value) for cell in row])
        return text.getvalue().rstrip("\n")


TABLE_FORMATS = {".txt": Table.to_text, ".md": Table.to_markdown, ".csv": Table.to_csv}


def with_sd(values: Sequence[float], form: str) -> str:
    """Return the mean, and of several values their sample standard deviation."""
    sd = f" ± {stdev(values):{form.removeprefix('+')}}" if len(values) > 1 else ""
    return f"{fmean(values):{form}}{sd}"


def _aligned(rows: Sequence[Sequence[str]], between: str) -> list[str]:
    """Pad all columns, the first to the left, the others to the right; a line for each row."""
    rows = [[one_line(text) for text in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        lines.append(between.join([first.ljust(widths[0]), *cells]))
    return lines


def _markdown(text: str) -> str:
    escaped = _MARKDOWN.sub(r"\\\1", text)
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


# A study as tables: one to look at, one with every test, and one for further work.


def results_table(study: Study) -> Table:
    """Return rows by tasks: mean, spread over seeds, and the paper's value beside it."""
    has_paper = {column for _, column in study.paper}
    columns = ["point" if study.group.points else "method"]
    for column in study.columns:
        columns.append(column)
        if column in has_paper:
            columns.append(f"{column} (paper)")
    rows = []
    for row in study.rows:
        cells = [Cell(row)]
        for column in study.columns:
            cells.append(_value_cell(study, row, column))
            if column in has_paper:
                cells.append(Cell.of(study.paper.get((row, column)), ".1f"))
        rows.append(cells)
    return Table(study.group.title, columns, rows, _notes(study))


def _value_cell(study: Study, row: str, column: str) -> Cell:
    result = study.results.get((row, column))
    if result is None:
        return Cell(_absent(study, row, column))
    text = with_sd([100 * value for value in result.values], ".1f")
    if result.missing:
        n = len(result.values)
        text += f" ({n} of {n + len(result.missing)} seeds)"
    comparison = study.comparisons.get((row, column))
    is_win = comparison is not None and comparison.verdict == "better"
    return Cell(text, is_bold=is_win, value=100 * result.mean)


def _absent(study: Study, row: str, column: str) -> str:
    """Return what stands for no result: "" where the row has other values of the task."""
    runs = {(name, task.partition(" ")[0]) for name, task in study.results}
    return "" if (row, column.partition(" ")[0]) in runs else _MISSING


def _notes(study: Study) -> list[str]:
    metrics = {run.task: run.metric for run in study.group.runs}
    named = ", ".join(
        task if " " in task else f"{task} {metric}" for task, metric in metrics.items()
    )
    notes = [f"In percent: {named}; ± is the standard deviation over seeds."]
    if len(set(metrics.values())) > 1 and AVERAGE in study.columns:
        notes.append("The average mixes metrics, as the paper's does.")
    if study.baseline is not None:
        notes.append(
            f"Standing out (bold, or *): better than {study.baseline} by more than noise, that is "
            f"by a paired test over the examples (p at most {LEVEL} after Holm over the tasks; the "
            "average by itself), in each seed that both have, and by Welch's t-test over seeds (p "
            f"at most {LEVEL}; one seed shows nothing of the noise of training)."
        )
    if study.group.missing:
        notes.append(f"Missing: {len(study.group.missing)} run(s) of the grid.")
    if study.reference is not None and study.paper:
        notes += [
            f"Paper (hollow in the figure): {study.reference.title}.",
            *study.reference.notes_on(study.tasks),
        ]
    elif study.reference is not None:
        notes.append(f"The paper's {study.reference.title} has no value for these rows and tasks.")
    of_runs = chain.from_iterable(run.metrics.get("notes", ()) for run in study.group.runs)
    return [*notes, *dict.fromkeys(map(str, of_runs))]


def detail_table(study: Study) -> Table:
    """Return every value with its interval, and its difference to the baseline with its test."""
    cells = [cell for cell in product(study.rows, study.columns) if cell in study.results]
    title = f"{study.group.title}: every value"
    notes = [
        "In percent. Intervals (low, high) are 95 %: over seeds by Student's t; of one seed, or "
        "of equal ones, over the test examples by the bootstrap."
    ]
    if study.comparisons:
        title += f", and its difference to {study.baseline}"
        notes.append(
            "Differences are of means over the seeds that both have; their interval is of a paired "
            "bootstrap over the test examples, given the readers as they were trained, and p is "
            "the larger of the bootstrap's and of a test by swapping the sides of the examples "
            "that differ, by Holm over a row's tasks."
        )
    return Table.of(title, [_numbers(study, *cell) for cell in cells], _DETAIL, notes)


def long_table(studies: Sequence[Study]) -> Table:
    """Return a row for each row and task of studies with all numbers, unrounded in CSV."""
    rows = []
    for study in studies:
        for cell in product(study.rows, study.columns):
            rows.append([Cell.of(value) for value in _numbers(study, *cell).values()])
    return Table(studies[0].group.title, _LONG, rows)


_DETAIL = {  # how each number is shown
    "row": "",
    "task": "",
    "value": ".1f",
    "sd": ".1f",
    "low": ".1f",
    "high": ".1f",
    "difference": "+.1f",
    "difference_low": "+.1f",
    "difference_high": "+.1f",
    "p": ".2g",
    "seeds_better": "",
    "verdict": "",
}
_LONG = (
    "table",
    "row",
    "task",
    "metric",
    "n",
    "seeds",
    "missing_seeds",
    "value",
    "sd",
    "low",
    "high",
    "baseline",
    "difference",
    "difference_low",
    "difference_high",
    "p",
    "seeds_better",
    "verdict",
    "paper",
)


def _numbers(study: Study, row: str, column: str) -> dict[str, Any]:
    """Return all numbers of a row and column in percent; p-values as they are."""
    result = study.results.get((row, column))
    comparison = study.comparisons.get((row, column))
    numbers: TableRow = dict.fromkeys(_LONG)
    numbers |= {
        "table": study.group.title,
        "row": row,
        "task": column,
        "value": _absent(study, row, column),
        "paper": study.paper.get((row, column)),
    }
    if result is not None:
        seeds = " ".join(str(run.seed) for run in result.runs)
        low, high = result.interval
        if result.runs:
            numbers |= {"metric": result.runs[0].metric, "n": str(result.runs[0].n)}
        numbers |= {
            "seeds": seeds or str(len(result.values)),
            "missing_seeds": " ".join(map(str, result.missing)),
            "value": 100 * result.mean,
            "sd": None if result.sd is None else 100 * result.sd,
            "low": 100 * low,
            "high": 100 * high,
        }
    if row == study.baseline:
        numbers["verdict"] = "baseline"
    elif comparison is not None:
        low, high = comparison.gap.interval
        numbers |= {
            "baseline": study.baseline,
            "difference": 100 * comparison.gap.difference,
            "difference_low": 100 * low,
            "difference_high": 100 * high,
            "p": comparison.p,
            "seeds_better": f"{comparison.better} of {comparison.shared}",
            "verdict": comparison.verdict,
        }
    return numbers


# What `pgra worth` measured.

BITS = "bits"
WITHOUT = "without"
_WORTH = {  # how each number is shown
    "source": "",
    "d": "",
    "queries": "",
    "gain": "+.2f",
    "p": ".3f",
    "helped": ".0%",
    "hurt": ".0%",
    BITS: ".2f",
    **dict.fromkeys({**METRICS, **TEXT_METRICS}, ".1%"),
    "known": "",
    "destroyed": ".0%",
    "gained": ".0%",
}
_OF_WORTH = (
    "In parentheses: a lower and an upper bound of this row alone, each with 95 % confidence after "
    "each query. p of no gain, by betting and Holm over all rows, decides (at most "
    f"{LEVEL}). helped, hurt: queries that gain or lose what matters. known: answered rightly "
    "without evidence; of these it destroyed, of the others it gained. random is the control."
)


def worth_table(worth: Mapping[str, Any]) -> Table:
    """Return what was measured: a row an arm; cost, and what to take, stand below them."""
    rows = [{"source": WITHOUT, **worth["without"]}]
    for row in worth["rows"]:
        texts = {}
        for name in ("gain", "destroyed", "gained"):
            ends = [f"{end:{_WORTH[name]}}" for end in row.get(name, {}).values()]
            texts[name] = "{} ({} to {})".format(*ends) if ends else None
        rows.append({**row, **texts})
    cost = (
        f"Cost: {worth['calls']} calls of the reader, {worth['tokens']} tokens read by an LM, "
        f"{worth['seconds']} s."
    )
    return Table.of(
        f"Evidence for the reader as it is: gain in {worth['unit']}, by {worth['measure']}",
        rows,
        _WORTH,
        [*worth["notes"], _OF_WORTH, cost, worth["why"]],
    )


# A study as one figure: a dot and its interval a row.


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure in the format of a path's suffix."""
    with write_aside(path) as aside:
        figure.savefig(aside, dpi=150)


def draw_study(study: Study) -> "Figure":
    """Return the figure: a panel a task, and one for the average."""
    from matplotlib.figure import Figure

    width = min(len(study.columns), 3)
    height = math.ceil(len(study.columns) / width)
    tall = 0.6 + 0.35 * len(study.rows)
    figure = Figure(figsize=(4.2 * width, tall * height + 0.8), layout="constrained")
    for number, column in enumerate(study.columns, 1):
        _draw_panel(figure.add_subplot(height, width, number), study, column)
    lines = [study.group.title]
    if study.paper and study.reference is not None:
        lines.append(f"hollow: the paper's values ({study.reference.title})")
    figure.suptitle("\n".join(lines), fontsize="medium")
    return figure


def _draw_panel(axes: "Axes", study: Study, column: str) -> None:
    """Draw means (discs), seeds (rings), 95 % intervals (bars), the paper's values (diamonds)."""
    axes.set_title(f"{column}, %", fontsize="medium")
    rows = list(reversed(study.rows))

    def draw(position: int, values: Sequence[float], marks: str, **style: Any) -> None:
        percent = [100 * value for value in values]
        axes.plot(percent, [position] * len(percent), marks, color="black", **style)

    for position, row in enumerate(rows):
        if paper := study.paper.get((row, column)):
            draw(position, [paper / 100], "D", fillstyle="none", alpha=0.7)
        if result := study.results.get((row, column)):
            # By Student's t over two seeds it can be wider than all values that there are.
            ends = [min(max(end, min(0.0, result.mean)), 1.0) for end in result.interval]
            draw(position, ends, "-", linewidth=3, alpha=0.4, zorder=0)
            if len(result.runs) > 1:
                draw(position, result.values, "o", fillstyle="none", markersize=5)
            draw(position, [result.mean], "o")
    axes.set_yticks(range(len(rows)), [row[:28] for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.spines[["top", "right"]].set_visible(False)


@dataclass(frozen=True)
class RunAnswer:
    """A run's answer to a query, and what it read before it; `is_right` None: not known."""

    run: str
    prediction: str
    is_right: bool | None
    read: Sequence[str]


@dataclass(frozen=True)
class Sample:
    """A query, and each run's answer to it."""

    task: str
    query: str
    right: str
    answers: Sequence[RunAnswer]

    def __str__(self) -> str:
        """Show it in a terminal."""
        lines = [f"{self.task}, {self.query}", f"  right: {self.right}"]
        for answer in self.answers:
            lines.append(f"  {answer.run}: {answer.prediction}")
            lines += [f"    {text}" for text in answer.read]
        return "\n".join(lines)


def render_page(
    title: str,
    studies: Sequence[Study],
    samples: Sequence[Sample],
    *,
    tables: Sequence[Table],
    lead: str,
) -> str:
    """Return the page: title, `lead` with its line breaks, tables, studies, samples by task."""
    from jinja2 import Environment, FileSystemLoader

    parts: list[dict[str, Any]] = [{"results": table} for table in tables]
    for study in studies:
        results = results_table(study)
        parts.append({"results": results, "detail": detail_table(study), "figures": _panels(study)})
    environment = Environment(loader=FileSystemLoader(_ASSETS), autoescape=True)
    template = environment.get_template("page.html")
    return template.render(title=title, lead=lead, parts=parts, samples=samples)


def _panels(study: Study) -> list[str]:
    """Return an SVG of each column, which a narrow screen shows below the others."""
    panels = []
    for column in study.columns:
        rows = [row for row in study.rows if (row, column) in {**study.results, **study.paper}]
        if rows:
            figure = draw_study(replace(study, columns=[column], rows=rows))
            figure.suptitle("")  # which the page has
            file = io.BytesIO()
            figure.savefig(file, format="svg")
            panels.append(base64.b64encode(file.getvalue()).decode())
    return panels
