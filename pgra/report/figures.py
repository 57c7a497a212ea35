"""Pictures of results: a study's values, losses, reliability, label consistency by rank.

A figure is a file of its own (`save_figure`), or stands as SVG in a page (`inline_svg`).
"""

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pgra.artifacts import write_aside
from pgra.errors import ConfigError
from pgra.reader.arguments import LOSSES_FILE
from pgra.report.compare import Study
from pgra.report.metrics import BINS, Values, expected_calibration_error
from pgra.report.results import TASK_AXIS, Run, read_lines
from pgra.report.tables import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DOTS_PER_INCH = 150
FIGURES = (".pdf", ".png", ".svg")
# Told apart on white and on black alike; the dashes tell them apart without colour.
_LINES = (
    *(("black", "-"), ("#d55e00", "--"), ("#0a7fc4", "-."), ("#009e73", ":")),
    *(("#b8629a", (0, (5, 1))), ("#808080", (0, (1, 1)))),
)
MOST_LINES = len(_LINES)
"""How many rows a figure of lines shows."""


# A study as one figure: a line along what a grid varies, or a dot and its interval a row.


@contextmanager
def plain_text() -> Iterator[None]:
    """Show names as they are: to matplotlib two dollar signs would be a formula."""
    from matplotlib import rc_context

    with rc_context({"text.parse_math": False, "svg.hashsalt": "pgra"}):
        yield


def save_figure(figure: "Figure", *paths: Path) -> None:
    """Write a picture, of the kinds that the files' names say, without a date."""
    undated: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = path.suffix.lower().removeprefix(".")
        with plain_text(), write_aside(path) as aside:
            figure.savefig(aside, format=kind, dpi=_DOTS_PER_INCH, metadata=undated[kind])


def check_path(name: str, path: Path, suffixes: Sequence[str]) -> None:
    """Refuse a file that does not look like what is written, before anything is read.

    Raises:
        ConfigError: If its name has another ending.
    """
    if path.suffix.lower() not in suffixes:
        raise ConfigError(f"{name} is '{path}': give a file that ends in {', '.join(suffixes)}")


def number_axis(study: Study) -> str | None:
    """Return the one argument that a grid varies, if it is a number; else None."""
    axes = [axis for axis in study.group.axes if axis != TASK_AXIS]
    if len(axes) != 1 or len(study.rows) < 2:
        return None
    values = [point.get(axes[0]) for point in study.group.points.values()]
    is_number = [isinstance(v, int | float) and not isinstance(v, bool) for v in values]
    return axes[0] if all(is_number) else None


def plot_study(study: Study, path: Path) -> None:
    """Draw a study to a .png, .svg or .pdf; what is missing is not drawn, and is named above.

    Raises:
        ConfigError: If the file's name ends in nothing of these.
    """
    check_path("figure", path, FIGURES)
    save_figure(draw_study(study), path)


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
    """Draw means (discs), seeds (rings), 95 % intervals (bars) and the paper's values (diamonds).

    Along a number, at even steps, from left to right, with a gap where a point is missing; else a
    line for each row, the first on top.
    """
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


# Figures inside of a page.


@dataclass(frozen=True)
class Drawing:
    """A figure that stands in a page.

    Attributes:
        title: Above it.
        box: The SVG's viewBox.
        svg: What is inside of the SVG.
        label: Its numbers in words, for who cannot see it.
    """

    title: str
    box: str
    svg: str
    label: str


def inline_svg(figure: "Figure", title: str, label: str) -> Drawing:
    """Return a figure as SVG in the page's own colours.

    A page's policy allows no style attributes, so that they become attributes of their own; black
    becomes the colour of the page's text.
    """
    from matplotlib import rc_context

    with plain_text(), rc_context({"svg.fonttype": "none"}):
        file = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    _, head, drawing = file.getvalue().partition("<svg ")
    head, _, drawing = drawing.removesuffix("</svg>\n").partition(">")
    drawing = re.sub(r"<style.*?</style>|<metadata.*?</metadata>", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r'(<[^<>]*?) style="([^"]*)"', _as_attributes, drawing)
    drawing = re.sub(r'(<g) id="[^"]*"', r"\1", drawing.replace('"#000000"', '"currentColor"'))
    box = re.search(r'viewBox="([^"]*)"', head)
    return Drawing(title, box[1] if box else "", drawing, label)


def _as_attributes(match: re.Match[str]) -> str:
    rules = (rule.partition(":") for rule in match[2].split(";") if rule.strip())
    kept = [(k.strip(), v.strip()) for k, _, v in rules if k.strip() != "font"]
    return match[1] + "".join(f' {name}="{value}"' for name, value in kept)


def _panel(height: float = 2.6) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    with plain_text():
        figure = Figure(figsize=(4.8, height), layout="constrained")
        axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_values(study: Study, column: str) -> Drawing:
    """Draw a column of a study: means, intervals, seeds, and the paper's values."""
    figure, axes = _panel(_height(study) + 0.3)
    with plain_text():
        _draw_panel(axes, study, column)
    words = []
    for row in study.rows:
        result = study.results.get((row, column))
        ends = [100 * end for end in (result.interval if result else None) or ()]
        value = "missing" if result is None else f"{100 * result.spread.mean:.1f}"
        words.append(f"{row}: {value}" + (f" ({Cell.interval(ends, '.1f').text})" if ends else ""))
    label = "; ".join(words)
    paper = [f"{row}: {value:.1f}" for (row, of), value in study.paper.items() if of == column]
    if paper:
        label += f". The paper (diamonds): {'; '.join(paper)}"
    metric = next((f": {run.metric}" for run in study.group.runs if run.task == column), "")
    title = f"{column}{metric} (%) with 95 % interval" + (" ◇ the paper" if paper else "")
    return inline_svg(figure, title, label)


def _draw_lines(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], x: str, y: str
) -> "tuple[Figure, Axes]":
    """Draw a line a row, with a legend below; of more than `MOST_LINES` rows the first."""
    figure, axes = _panel(2.6 + 0.16 * min(len(lines), MOST_LINES))
    with plain_text():
        for (row, (places, values)), (colour, dash) in zip(lines.items(), _LINES, strict=False):
            axes.plot(places, values, color=colour, linestyle=dash, linewidth=1.6, label=row)
        axes.set(xlabel=x, ylabel=y)
        axes.locator_params(axis="x", integer=True)
        figure.legend(loc="outside lower left", frameon=False, fontsize=9, handlelength=3)
    return figure, axes


def draw_losses(study: Study, task: str) -> Drawing | None:
    """Draw each row's training loss, the mean of its seeds, smoothed; None where none is kept."""
    lines = {}
    for row in study.rows:
        curves = [found for run in runs_of(study, row, task) if (found := _losses(run))]
        steps = min(map(len, curves), default=0)
        if steps > 1:
            mean = np.mean([curve[:steps] for curve in curves], axis=0)
            lines[row] = (range(1, steps + 1), _smoothed(mean, max(1, steps // 25)).tolist())
    if not lines:
        return None
    figure, _ = _draw_lines(lines, "step", "loss")
    words = [f"{row}: from {v[0]:.2f} to {v[-1]:.2f} in {len(v)}" for row, (_, v) in lines.items()]
    return inline_svg(figure, f"{task}: training loss by step", "; ".join(words) + " steps")


def _losses(run: Run) -> list[float]:
    path = run.folder / LOSSES_FILE
    return [float(line["loss"]) for line in read_lines(path)] if path.is_file() else []


def _smoothed(values: Values, width: int) -> Values:
    """Return the mean of the last `width` values, of each place."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts), np.float64)


def runs_of(study: Study, row: str, task: str) -> Sequence[Run]:
    """Return a row's runs on a task, by seed; none where it is missing."""
    return study.results[row, task].runs if (row, task) in study.results else ()


@dataclass(frozen=True)
class Calibration:
    """How sure a run's answers were, and how often they were right.

    Attributes:
        chances: Probability of each label, (B, C), of all seeds below each other.
        truth: The true label's column, of each.
        ece: Expected calibration error, the mean of the seeds'.
    """

    chances: Values
    truth: Sequence[int]
    ece: float


def read_calibration(runs: Sequence[Run]) -> Calibration | None:
    """Read the probabilities of a row's seeds; None where not each label of each example has one.

    Raises:
        ArtifactError: If a run's predictions are damaged.
    """
    tables, truth, errors = [], [], []
    for run in runs:
        names = sorted(run.labels)
        number = {name: place for place, name in enumerate(names)}
        lines = run.predictions
        scores = [line.get("scores") or {} for line in lines]
        own = [number.get(str(line["label"]), -1) for line in lines]
        whole = all(set(names) == set(found) for found in scores) and len(names) > 1
        if not whole or min(own) < 0:
            return None
        table = np.array([[float(found[name]) for name in names] for found in scores])
        if not np.isfinite(table).all() or table.min() < 0 or table.max() > 1 + 1e-6:
            return None
        tables.append(table)
        truth += own
        errors.append(expected_calibration_error(table, own))
    if not tables:
        return None
    return Calibration(np.concatenate(tables), truth, float(np.mean(errors)))


def draw_reliability(found: Calibration) -> Drawing:
    """Draw how often answers were right by how sure the run was (Guo et al. 2017, figure 1).

    A disc a bin of the calibration error's; its area is the bin's number of answers.
    """
    confidence = found.chances.max(axis=1)
    right = found.chances.argmax(axis=1) == np.asarray(found.truth)
    bin_of = np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)
    places, shares, sizes = [], [], []
    for number in np.unique(bin_of):
        own = bin_of == number
        places.append(100 * float(confidence[own].mean()))
        shares.append(100 * float(right[own].mean()))
        sizes.append(int(own.sum()))
    figure, axes = _panel(2.9)
    with plain_text():
        axes.plot([0, 100], [0, 100], color="#808080", linestyle="--", linewidth=1, zorder=0)
        area = [12 + 500 * size / len(right) for size in sizes]
        axes.plot(places, shares, color="#0a7fc4", linewidth=1)
        axes.scatter(places, shares, s=area, color="#0a7fc4", alpha=0.75)
        low = min(100 / found.chances.shape[1], min(places), 50) - 4
        axes.set(xlim=(low, 105), ylim=(-5, 108), xlabel="confidence (%)", ylabel="accuracy (%)")
    bins = zip(places, shares, sizes, strict=True)
    words = [f"{size} answers at {sure:.0f} %: {share:.0f} % right" for sure, share, size in bins]
    title = f"Confidence and accuracy (calibration error {100 * found.ece:.1f} %)"
    return inline_svg(figure, title, "; ".join(words))


def draw_ranks(
    shares: Mapping[str, Sequence[float]], title: str, lines: Mapping[str, float]
) -> Drawing:
    """Draw the share of evidence with the query's label, by its rank.

    Args:
        shares: By row, of ranks 1, 2, ...
        title: Above it.
        lines: Level lines to compare with, by name.
    """
    drawn = {row: (range(1, len(v) + 1), [100 * x for x in v]) for row, v in shares.items()}
    figure, axes = _draw_lines(drawn, "rank of the evidence", "consistent (%)")
    for value in lines.values():
        axes.axhline(100 * value, color="#808080", linestyle="--", linewidth=1, zorder=0)
    axes.set_xticks(range(1, max(map(len, shares.values())) + 1))
    words = [f"{row}: {', '.join(f'{100 * x:.0f}' for x in v)}" for row, v in shares.items()]
    words += [f"{name}: {100 * value:.0f}" for name, value in lines.items()]
    return inline_svg(figure, title, "; ".join(words))
