"""Reports to look at: figures, and one HTML page with tables, plots and a browser of examples.

Nothing in the page asks for anything outside: style and script stand in it, and its
Content-Security-Policy allows no other (by their sha256), nor any request. All text of runs is
escaped by Jinja2; the script gets it as JSON without `<`, and puts it into text nodes.
"""

import base64
import hashlib
import io
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgra.artifacts import write_aside
from pgra.core import Json
from pgra.errors import ArtifactError, ConfigError
from pgra.report.compare import Study, summarise
from pgra.report.metrics import compare_methods
from pgra.report.results import PREDICTIONS_FILE, TASK_AXIS, Group, Run, row_names
from pgra.report.tables import Cell, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ASSETS = Path(__file__).parent / "assets"
_DOTS_PER_INCH = 150
FIGURES = (".pdf", ".png", ".svg")
PAGES = (".html", ".htm")


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


# The page.


def render_page(title: str, studies: Sequence[Study]) -> str:
    """Return the page's text.

    Args:
        title: Of the page.
        studies: What it tells, in order.

    Raises:
        ArtifactError: If a run's predictions are damaged.
        ConfigError: If a run is measured on texts: the page sorts examples into right and wrong.
    """
    from jinja2 import Environment, FileSystemLoader

    groups = [study.group for study in studies]
    runs = [run for group in groups for run in group.runs]
    for run in runs:
        if run.decisions is None:
            raise ConfigError(
                f"--html shows which examples are right, and {run.task} of {run.folder} is a "
                "measure of texts that are neither: leave --html out, or that run"
            )
    summary = f"{len(runs)} runs of {', '.join(sorted({run.task for run in runs}))}."
    missing = sum(len(group.missing) for group in groups)
    style, script = ((_ASSETS / name).read_text("utf-8") for name in ("page.css", "page.js"))
    environment = Environment(
        loader=FileSystemLoader(_ASSETS), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    page = environment.get_template("page.html").render(
        title=title,
        summary=f"{summary} {missing} more are missing." if missing else summary,
        style=style,
        style_hash=policy_hash(style),
        script=script,
        script_hash=policy_hash(script),
        tables=[table for study in studies for table in summarise(study)],
        plots=[_draw_inline(study, column) for study in studies for column in study.columns],
        data=browser_data(groups),
    )
    # Half of a surrogate pair, which JSON may hold and UTF-8 may not, becomes a question mark.
    return page.encode("utf-8", "replace").decode("utf-8")


def policy_hash(text: str) -> str:
    """Return a text's hash as a Content-Security-Policy has it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _draw_inline(study: Study, column: str) -> dict[str, str]:
    """Draw a panel as SVG in the page's own colours, with its numbers as text for who cannot see.

    The policy allows no style attributes, so that they become attributes of their own.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with plain_text(), rc_context({"svg.fonttype": "none"}):
        figure = Figure(figsize=(4.8, _height(study) + 0.3), layout="constrained")
        _draw_panel(figure.subplots(), study, column)
        file = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    _, head, drawing = file.getvalue().partition("<svg ")
    head, _, drawing = drawing.removesuffix("</svg>\n").partition(">")
    drawing = re.sub(r"<style.*?</style>|<metadata.*?</metadata>", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r'(<[^<>]*?) style="([^"]*)"', _as_attributes, drawing)
    drawing = re.sub(r'(<g) id="[^"]*"', r"\1", drawing.replace('"#000000"', '"currentColor"'))
    box = re.search(r'viewBox="([^"]*)"', head)
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
    return {
        "title": f"{study.group.title}: {column} (%)" + (" ◇ the paper" if paper else ""),
        "box": box[1] if box else "",
        "label": label,
        "drawing": drawing,
    }


def _as_attributes(match: re.Match[str]) -> str:
    rules = (rule.partition(":") for rule in match[2].split(";") if rule.strip())
    kept = [(k.strip(), v.strip()) for k, _, v in rules if k.strip() != "font"]
    return match[1] + "".join(f' {name}="{value}"' for name, value in kept)


# What the page's browser of examples looks through, as one value for JSON.
#
# Texts, and lists of evidence that several runs share (the seeds of one method do), stand there
# once: 10,000 queries of several runs stay a page that opens.


MOST_EVIDENCE = 16
"""How many of a query's evidence the page holds: the paper's d."""
_CHANCE_DIGITS = 5
_SCORE_DIGITS = 7  # dot products are in the thousands, and differ in the first decimal


def _numbering() -> "defaultdict[Any, int]":
    """Return a table that numbers what is looked up in it, from 0, as it is first met."""
    table: defaultdict[Any, int] = defaultdict()
    table.default_factory = table.__len__
    return table


def browser_data(groups: Sequence[Group], *, most_evidence: int = MOST_EVIDENCE) -> dict[str, Any]:
    """Gather all examples, with what each run read and said.

    Args:
        groups: Runs; those of one test set are laid side by side, whatever group they are of.
        most_evidence: How many of each query's evidence are kept, from the best.

    Returns:
        `{"texts": [...], "tasks": [...]}`, as `assets/page.js` describes it.

    Raises:
        ArtifactError: If a run's predictions are damaged.
    """
    sets: dict[tuple[str, str], dict[Path, tuple[str, Run]]] = {}
    for group in groups:
        for row, run in zip(row_names(group), group.runs, strict=True):
            known = sets.setdefault((run.task, run.examples), {})
            known.setdefault(run.folder.resolve(), (row, run))
    texts, tasks = _numbering(), []
    for name, runs in zip(_distinct([task for task, _ in sets]), sets.values(), strict=True):
        labels, lists, laid = _numbering(), _numbering(), []
        methods = [row for row, _ in runs.values()]
        names = [
            f"{row} (seed {run.seed})" if methods.count(row) > 1 else row
            for row, run in runs.values()
        ]
        for run_name, (row, run) in zip(_distinct(names), runs.values(), strict=True):
            try:
                own = _run_data(run.predictions, labels, lists, texts, most_evidence)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ArtifactError(
                    f"{run.folder / PREDICTIONS_FILE} is damaged ({type(error).__name__}: {error}):"
                    f" leave {run.folder} out, or delete it and run it again"
                ) from None
            laid.append({"name": run_name, "method": row, **own})
        lines = next(iter(runs.values()))[1].predictions
        task = {
            "name": name,
            "ids": [str(line["id"]) for line in lines],
            "queries": [texts[str(line["text"])] for line in lines],
            "gold": [-1 if line["label"] is None else labels[line["label"]] for line in lines],
        }
        tasks.append({**task, "labels": list(labels), "lists": list(lists), "runs": laid})
    return {"texts": list(texts), "tasks": tasks}


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


def _run_data(
    lines: Sequence[Mapping[str, Any]],
    labels: "defaultdict[Any, int]",
    lists: "defaultdict[Any, int]",
    texts: "defaultdict[Any, int]",
    most: int,
) -> dict[str, Json]:
    answers, chances, evidence, attention = [], [], [], []
    for line in lines:
        scores, seen = line.get("scores") or {}, line.get("evidence") or []
        # Before the answer, for their order is the task's.
        chances.append([[labels[k], _rounded(v, _CHANCE_DIGITS)] for k, v in scores.items()])
        answers.append(labels[line["prediction"]])
        flat: list[float | int | None] = []
        for item in seen[:most]:
            flat += [texts[str(item["text"])], item.get("stage1_rank")]
            flat += [_rounded(item.get(k), _SCORE_DIGITS) for k in ("stage1_score", "score")]
        evidence.append(lists[tuple(flat)])
        attention.append([_rounded(item.get("attention"), _CHANCE_DIGITS) for item in seen[:most]])
    is_known = any(share is not None for shares in attention for share in shares)
    return {
        "answers": answers,
        "chances": chances,
        "evidence": evidence,
        "attention": attention if is_known else None,
        "read": max((len(line.get("evidence") or []) for line in lines), default=0),
    }


def _rounded(value: float | None, digits: int) -> float | None:
    """Keep as many digits as a person reads; None for what is no number."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")
