"""A study as one figure: a line along what a grid varies, or a dot and its interval a row.

Studies as one HTML page, with the tables, a figure of each and some examples. It has no script and
loads nothing: the figures are inline. Jinja2 escapes all text of runs.
"""

import base64
import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgra.artifacts import write_aside
from pgra.report.compare import Study, detail_table, results_table
from pgra.report.results import TASK_AXIS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DOTS_PER_INCH = 150
_ASSETS = Path(__file__).parent / "assets"


@contextmanager
def plain_text() -> Iterator[None]:
    """Show names as they are: matplotlib would read text between dollar signs as a formula."""
    from matplotlib import rc_context

    with rc_context({"text.parse_math": False, "svg.hashsalt": "pgra"}):
        yield


def save_figure(figure: "Figure", *paths: Path) -> None:
    """Write a figure to files, in the formats of their suffixes, without a date."""
    undated: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = path.suffix.lower().removeprefix(".")
        with plain_text(), write_aside(path) as aside:
            figure.savefig(aside, format=kind, dpi=_DOTS_PER_INCH, metadata=undated[kind])


def number_axis(study: Study) -> str | None:
    """Return the one argument that a grid varies, if it is a number; else None."""
    axes = [axis for axis in study.group.axes if axis != TASK_AXIS]
    if len(axes) != 1 or len(study.rows) < 2:
        return None
    values = [point.get(axes[0]) for point in study.group.points.values()]
    is_number = [isinstance(v, int | float) and not isinstance(v, bool) for v in values]
    return axes[0] if all(is_number) else None


def draw_study(study: Study) -> "Figure":
    """Return the figure: a panel a task, and one for the average."""
    from matplotlib.figure import Figure

    width = min(len(study.columns), 3)
    height = -(-len(study.columns) // width)
    with plain_text():
        figure = Figure(figsize=(4.2 * width, _height(study) * height + 0.8), layout="constrained")
        panels = figure.subplots(height, width, squeeze=False).ravel().tolist()
        for axes in panels[len(study.columns) :]:
            axes.set_visible(False)
        for axes, column in zip(panels, study.columns, strict=False):
            _draw_panel(axes, study, column)
            metric = next((run.metric for run in study.group.runs if run.task == column), "")
            in_hundredths = f"{metric} in hundredths".strip()
            axes.set_title(f"{column}, {in_hundredths}", fontsize="medium")
        lines = [study.group.title]
        if study.paper and study.reference is not None:
            lines.append(f"hollow: the paper's values ({study.reference.title})")
        places = [(row, task) for row in study.rows for task in study.tasks]
        absent = [f"{row} ({task})" for row, task in places if (row, task) not in study.results]
        lines += [f"missing: {', '.join(absent)}"] if absent else []
        figure.suptitle("\n".join(lines), fontsize="medium")
    return figure


def _height(study: Study) -> float:
    return 2.8 if number_axis(study) else 1.0 + 0.35 * len(study.rows)


def _draw_panel(axes: "Axes", study: Study, column: str) -> None:
    """Draw means (discs), seeds (rings), 95 % intervals (bars), the paper's values (diamonds)."""
    along, points = number_axis(study), study.group.points
    rows = list(reversed(study.rows))
    if along is not None:
        rows = sorted(study.rows, key=lambda row: float(str(points[row][along])))

    def draw(values: Sequence[float], places: Sequence[int], marks: str, **how: Any) -> None:
        sides = (values, places) if along is None else (places, values)
        axes.plot(*sides, marks, color="black", **how)

    everywhere, means, paper = range(len(rows)), [], []
    for place, row in enumerate(rows):
        result = study.results.get((row, column))
        means.append(math.nan if result is None else 100 * result.spread.mean)
        paper.append(study.paper.get((row, column), math.nan))
        if result is not None and result.interval is not None:
            # By Student's t over two seeds it can be wider than all values that there are.
            ends = [100 * min(max(e, min(0.0, result.spread.mean)), 1.0) for e in result.interval]
            draw(ends, [place, place], "-", linewidth=3, alpha=0.4, zorder=0)
        if result is not None and len(result.runs) > 1:
            values = [100 * run.value for run in result.runs]
            draw(values, [place] * len(values), "o", fillstyle="none", markersize=5)
    draw(means, everywhere, "o" if along is None else "o-")
    if not all(map(math.isnan, paper)):
        draw(paper, everywhere, "D" if along is None else "D--", fillstyle="none", alpha=0.7)
    if along is not None:
        axes.set_xticks(everywhere, [str(points[row][along]) for row in rows])
        axes.set_xlabel(study.group.labels.get(along) or along.rpartition(".")[2])
    else:
        axes.set_yticks(everywhere, [row if len(row) <= 28 else f"{row[:25]}..." for row in rows])
        axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.spines[["top", "right"]].set_visible(False)


def render_page(
    title: str, studies: Sequence[Study], samples: Sequence[str] = (), *, lead: str = ""
) -> str:
    """Return the page: title, `lead` with its line breaks, studies, then the texts of `samples`."""
    from jinja2 import Environment, FileSystemLoader

    parts = [
        {"results": results_table(study), "detail": detail_table(study), "figure": _figure(study)}
        for study in studies
    ]
    environment = Environment(loader=FileSystemLoader(_ASSETS), autoescape=True)
    template = environment.get_template("page.html")
    page = template.render(title=title, lead=lead, parts=parts, samples=samples)
    # Half of a surrogate pair, which JSON may hold and UTF-8 may not, becomes a question mark.
    return page.encode("utf-8", "replace").decode("utf-8")


def _figure(study: Study) -> str:
    file = io.BytesIO()
    with plain_text():
        draw_study(study).savefig(file, format="svg", metadata={"Date": None})
    return base64.b64encode(file.getvalue()).decode()
