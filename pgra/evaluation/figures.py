"""A study as one figure: a line along what a grid varies, or a dot and its interval a row."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgra.errors import ArtifactError, ConfigError
from pgra.evaluation.comparison import Result, Study
from pgra.evaluation.reference import METRIC, ReferenceTable
from pgra.evaluation.runs import TASK_AXIS
from pgra.evaluation.summary import AVERAGE, has_paper, paper_value
from pgra.io import write_aside
from pgra.types import Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
