"""What streams with a memory gave, as a table and a figure beside the paper's numbers."""

import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pgra.evaluation.statistics import Spread, mean_sd_interval
from pgra.io import write_aside, write_text
from pgra.memory.families import Family
from pgra.memory.gate import GateReport
from pgra.memory.measures import correlate, running_accuracy
from pgra.pipelines.memory_compare import compare_systems
from pgra.pipelines.memory_stream import StreamResult, Variant

logger = logging.getLogger(__name__)

REPORT_FILE, FIGURE_FILE = "report.md", "running.png"
_DOTS_PER_INCH = 150
_MARKS = (25, 50, 100, 200)  # steps at which the running accuracy is told
_TITLES = {"no-mem": "NO-MEM", "grow": "GROW-PROMPT", "mem": "MEM-PROMPT"}


def write_report(
    folder: Path, family: Family, results: Sequence[StreamResult], *, gate: GateReport | None
) -> str:
    """Write the table, and the figure where matplotlib is installed.

    Args:
        folder: The run's.
        family: Whose questions they were.
        results: Of `run_streams`.
        gate: How the threshold was chosen; None where it was given.

    Returns:
        The table's text.
    """
    text = render_report(family, results, gate=gate)
    write_text(folder / REPORT_FILE, text)
    if importlib.util.find_spec("matplotlib") is None:
        logger.warning("no figure: matplotlib is not installed (pip install 'pgra[demo]')")
    else:
        plot_running(folder / FIGURE_FILE, results)
    return text


def render_report(
    family: Family, results: Sequence[StreamResult], *, gate: GateReport | None
) -> str:
    """Write the table as Markdown: means over the seeds, and below each what the paper has."""
    kinds = family.kinds
    groups = _by_variant(results)
    lines = [
        f"# A memory of corrections: {family.name}, {results[0].metrics['n']} steps",
        "",
        _row("understood", *kinds, "all", "area", "last 100", "answered", "prompt tokens"),
        "|:--|" + "--:|" * (len(kinds) + 5),
    ]
    for group in groups:
        lines.append(_row(_title(group), *_cells(group, kinds)))
    for system in dict.fromkeys([*family.paper, *family.paper_answered]):
        told = family.paper.get(system, {})
        cells = [_number(told.get(kind)) for kind in (*kinds, "all")]
        cells += ["", "", _number(family.paper_answered.get(system), places=3), ""]
        lines.append(_row(f"{_TITLES[system]}, paper (GPT-3)", *cells))
    if family.situations is not None:
        lines += ["", *_correlation_lines(groups)]
    lines += [
        "",
        *_running_lines(groups),
        *_claim_lines(results),
        *_lookup_lines(groups),
        *_gate_lines(gate),
        *_collision_lines(results),
    ]
    return "\n".join(lines) + "\n"


def _by_variant(results: Sequence[StreamResult]) -> list[list[StreamResult]]:
    groups: dict[tuple[str, float], list[StreamResult]] = {}
    for result in results:
        groups.setdefault((result.variant.system, result.variant.probability), []).append(result)
    return list(groups.values())


def _title(group: Sequence[StreamResult]) -> str:
    seeds = f" ({len(group)} seeds)" if len(group) > 1 else ""
    return f"{_name(group[0].variant)}{seeds}"


def _name(variant: Variant) -> str:
    told = "" if variant.system == "no-mem" else f", p = {variant.probability:g}"
    return f"{_TITLES[variant.system]}{told}"


def _cells(group: Sequence[StreamResult], kinds: Sequence[str]) -> list[str]:
    by_type = [_mean(group, "understood_by_type", kind) for kind in kinds]
    names = ("understood", "understood_area", "understood_last_100", "answered")
    tokens = fmean(float(str(one.metrics["prompt_tokens"])) for one in group)
    return [
        *map(_number, by_type),
        *(_with_sd(group, name) for name in names),
        f"{tokens:,.0f}",
    ]


def _with_sd(group: Sequence[StreamResult], name: str) -> str:
    """Write a measure's mean, and behind that of several seeds their standard deviation."""
    spread = mean_sd_interval([float(str(one.metrics[name])) for one in group])
    return _number(spread.mean) + ("" if spread.sd is None else f" ± {_number(spread.sd)}")


def _mean(group: Sequence[StreamResult], *names: str) -> float | None:
    values = []
    for one in group:
        value: Any = one.metrics
        for name in names:
            value = None if value is None else value.get(name)
        values += [] if value is None else [float(value)]
    return fmean(values) if values else None


def _running_lines(groups: Sequence[Sequence[StreamResult]]) -> list[str]:
    """Write the paper's figure 6 in numbers: accuracy of all steps up to some."""
    length = len(groups[0][0].taken)
    marks = [mark for mark in _MARKS if mark < length] + [length]
    rows = []
    for group in groups:
        means = _mean_running(group, "understood")
        rows.append(_row(_title(group), *(_number(means[mark - 1]) for mark in marks)))
    head = _row("understood, steps up to", *map(str, marks))
    return [head, "|:--|" + "--:|" * len(marks), *rows, ""]


def _mean_running(group: Sequence[StreamResult], name: str) -> list[float]:
    lines = [running_accuracy([getattr(t, name) for t in one.taken]) for one in group]
    return [fmean(values) for values in zip(*lines, strict=False)]


def _claim_lines(results: Sequence[StreamResult]) -> list[str]:
    rows = [
        _row(
            f"{_name(one.better)} - {_name(one.worse)}",
            _gap(one.final),
            _gap(one.area),
            f"{one.p_value:.2g}",
            f"{one.cost:.2f}",
        )
        for one in compare_systems(results)
    ]
    if not rows:
        return []
    head = _row("understood, gap of", "all", "area", "p (McNemar)", "prompt tokens, ratio")
    return [head, "|:--|" + "--:|" * 4, *rows, ""]


def _gap(spread: Spread) -> str:
    """Write a gap; behind several seeds' mean their standard deviation."""
    return f"{spread.mean:+.3f}" + ("" if spread.sd is None else f" ± {spread.sd:.3f}")


def _lookup_lines(groups: Sequence[Sequence[StreamResult]]) -> list[str]:
    rows = []
    for group in groups:
        if group[0].variant.system != "mem":
            continue
        names = [("lookups", "effective"), ("lookups", "wrong_type")]
        names += [("against_no_mem", name) for name in ("helped", "hurt")]
        used = _mean(group, "lookups", "used") or 0.0
        cells = [_number(_mean(group, *name)) for name in names]
        rows.append(_row(_title(group), f"{used:.0f}", *cells))
    if not rows:
        return []
    head = _row("look-ups", "used", "understood after", "wrong type", "helped", "hurt")
    return [head, "|:--|" + "--:|" * 5, *rows, ""]


def _gate_lines(gate: GateReport | None) -> list[str]:
    if gate is None:
        return []
    return [
        f"Gate: scores of at least {gate.threshold:.4g} pass, chosen on {gate.num_trials} other "
        f"questions (precision {_number(gate.precision)}, recall {_number(gate.recall)}).",
        "",
    ]


def _collision_lines(results: Sequence[StreamResult]) -> list[str]:
    lines = []
    for result in results:
        pairs: Any = result.metrics["wrong_type_pairs"]
        lines += [
            f"- {result.variant.name}: {pair['asked']} took a clarification for {pair['found']} "
            f"{pair['times']} times ('{pair['question']}' found '{pair['key']}', score "
            f"{pair['score']:.3g}); understood all the same: {pair['understood']}"
            for pair in pairs
        ]
    return ["Near keys of another type:", "", *lines] if lines else []


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _correlation_lines(groups: Sequence[Sequence[StreamResult]]) -> list[str]:
    """Say how far the answer is right where the understanding is (the paper, section 4.1.1)."""
    told = []
    for group in groups:
        taken = [one for result in group for one in result.taken]
        value = correlate([one.understood for one in taken], [one.answered for one in taken])
        told.append(f"{_title(group)} {_number(value) or 'none'}")
    return [
        f"Correlation of understanding and answer, question by question: {'; '.join(told)}. The "
        "paper has 0.36 (ERT-CAT, MEM-PROMPT) and does not say over what."
    ]


def _number(value: float | None, *, places: int = 2) -> str:
    return "" if value is None else f"{value:.{places}f}"


def plot_running(path: Path, results: Sequence[StreamResult]) -> None:
    """Draw the running accuracy of understanding and answer over the steps, means over the seeds.

    Args:
        path: A .png file.
        results: Of `run_streams`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for group in _by_variant(results):
        for axes, name in ((left, "understood"), (right, "answered")):
            mean = _mean_running(group, name)
            axes.plot(range(1, len(mean) + 1), mean, label=_title(group))
    for axes, name in ((left, "understanding"), (right, "answer")):
        axes.set(title=f"running accuracy of the {name}", xlabel="step", ylim=(0, 1))
        axes.grid(visible=True, alpha=0.3)
    left.legend(fontsize="small")
    with write_aside(path) as aside:
        figure.savefig(aside, dpi=_DOTS_PER_INCH)
