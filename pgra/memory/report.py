"""Streams beside each other and the paper's numbers, as tables and a figure.

Acc(u) is the accuracy of the understanding, Acc(y) that of the answer (Madaan et al. 2022, section
4). Systems are compared on the same steps, by seed, with McNemar's test.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import correlation, fmean, stdev

import numpy as np

from pgra.artifacts import write_text
from pgra.memory.families import Family
from pgra.memory.stream import SYSTEMS, StreamResult, measure
from pgra.report.metrics import combine_p, mcnemar
from pgra.report.tables import Cell, Table

REPORT_FILE = "report.md"
FIGURE_FILE = "running.png"
_SAMPLES = 6


def write_report(folder: Path, family: Family, results: Sequence[StreamResult]) -> str:
    """Write the tables and the figure; return the tables' text."""
    text = render_report(family, results)
    write_text(folder / REPORT_FILE, text)
    plot_running(folder / FIGURE_FILE, results)
    return text


def render_report(family: Family, results: Sequence[StreamResult]) -> str:
    """Render the tables as Markdown: means over the seeds, and the paper's values below."""
    groups = _name_groups(results)
    parts = [
        f"# A memory of corrections: {family.name}, {len(results[0].outcomes)} steps",
        _accuracy_table(family, groups),
    ]
    if family.situations is not None:  # how far answers are right where they are understood: 4.1.1
        cells = [f"{title} {_correlate(group)}" for title, group in groups.items()]
        parts.append(
            f"Correlation of understanding and answer, question by question: {'; '.join(cells)}."
        )
    head = ["understood, gap of", "all", "p (McNemar)"]
    parts += [_markdown(head, compare_methods(results)), _sample_table(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _name_groups(results: Sequence[StreamResult]) -> dict[str, list[StreamResult]]:
    """Group results by the variant's title, over seeds."""
    groups = defaultdict[str, list[StreamResult]](list)
    for result in results:
        groups[result.variant.title].append(result)
    seeds = {title: f" ({len(group)} seeds)" for title, group in groups.items() if len(group) > 1}
    return {f"{title}{seeds.get(title, '')}": group for title, group in groups.items()}


def _accuracy_table(family: Family, groups: Mapping[str, Sequence[StreamResult]]) -> str:
    """Show tables 4 and 5, and the share of used look-ups that were effective (4.1.2)."""
    kinds = family.kinds
    rows = []
    for title, group in groups.items():
        metrics = [measure(result.outcomes) for result in group]
        by_kind = [[each["understood_by_type"].get(kind) for each in metrics] for kind in kinds]
        spreads = [
            _with_sd([m[name] for m in metrics], ".2f") for name in ("understood", "answered")
        ]
        rows.append(
            [
                *(title, *map(_mean, by_kind), *spreads),
                _mean([each["prompt_tokens"] for each in metrics], ",.0f"),
                _mean([each["lookups"] for each in metrics], ".0f"),
                _mean([each["effective"] for each in metrics]),
            ]
        )
    for system, printed in family.paper.items():
        cells = [_mean([printed.get(kind)]) for kind in (*kinds, "all")]
        rows.append([f"{SYSTEMS[system]}, paper (GPT-3)", *cells, "", "", "", ""])
    head = ["understood", *kinds, "all", "answered", "prompt tokens", "look-ups", "effective"]
    return _markdown(head, rows)


def _correlate(group: Sequence[StreamResult]) -> str:
    """Return the correlation of understanding and answer (phi); "none" if either is constant."""
    marks = [
        [m for result in group for m in result.marks(name)] for name in ("understood", "answered")
    ]
    if any(len(set(each)) < 2 for each in marks):
        return "none"
    return f"{correlation(*([float(mark) for mark in each] for each in marks)):.2f}"


def compare_methods(results: Sequence[StreamResult]) -> list[list[str]]:
    """Compare as the paper does: GROW with NO-MEM, MEM with both.

    Returns rows of a table over shared seeds: the pair; its gap in accuracy of the understanding;
    p of McNemar's tests, combined over seeds (`combine_p`).
    """
    rows = []
    groups = dict[tuple[str, float], dict[int, StreamResult]]()
    for result in results:
        variant = result.variant
        groups.setdefault((variant.system, variant.probability), {})[variant.seed] = result
    for (system, p), mine in groups.items():
        for other in [("no-mem", 0.0), ("grow", p)][: list(SYSTEMS).index(system)]:
            theirs = groups.get(other, {})
            pairs = [(mine[seed], theirs[seed]) for seed in sorted({*mine} & {*theirs})]
            if pairs:
                marks = [(a.marks("understood"), b.marks("understood")) for a, b in pairs]
                gaps = [fmean(ours) - fmean(others) for ours, others in marks]
                p_value = combine_p([mcnemar(*both) for both in marks])
                name = f"{pairs[0][0].variant.title} - {pairs[0][1].variant.title}"
                rows.append([name, _with_sd(gaps, "+.3f"), f"{p_value:.2g}"])
    return rows


def _sample_table(results: Sequence[StreamResult]) -> str:
    """Show steps through time, as the paper's tables 6, 7 and 11 to 13."""
    mem = next((result for result in results if result.variant.system == "mem"), None)
    if mem is None:
        return ""
    used = [step for step in mem.outcomes if step.neighbors]
    bare = {
        step.step: step.generated
        for result in results
        for step in result.outcomes
        if (result.variant.system, result.variant.seed) == ("no-mem", mem.variant.seed)
    }
    rows = [
        [
            str(step.step),
            step.question,
            " / ".join(step.neighbors[:3]),
            step.expected,
            bare.get(step.step, ""),
            step.generated,
        ]
        for step in used[:: -(-len(used) // _SAMPLES) or 1]
    ]
    head = ["step", "question", "nearest in the memory", "expected", "NO-MEM", "MEM-PROMPT"]
    return _markdown(head, rows)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[Cell(text) for text in row] for row in rows]
    return Table("", columns, cells).to_markdown() if rows else ""


def _with_sd(values: Sequence[float], style: str) -> str:
    sd = f" ± {stdev(values):{style.removeprefix('+')}}" if len(values) > 1 else ""
    return f"{fmean(values):{style}}{sd}"


def _mean(values: Sequence[float | None], style: str = ".2f") -> str:
    """Return the mean of those that are known; "" if none is."""
    known = [value for value in values if value is not None]
    return f"{fmean(known):{style}}" if known else ""


def plot_running(path: Path, results: Sequence[StreamResult]) -> None:
    """Draw the running accuracy of understanding and answer, means over the seeds, as a .png."""
    from matplotlib.figure import Figure

    from pgra.report.tables import save_figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    names = {"understood": "understanding", "answered": "answer"}
    for axes, (name, title) in zip(panels, names.items(), strict=True):
        for label, group in _name_groups(results).items():
            marks = np.array([result.marks(name) for result in group])
            mean = (marks.cumsum(axis=1) / np.arange(1, marks.shape[1] + 1)).mean(axis=0)
            axes.plot(range(1, len(mean) + 1), mean, label=label)
        axes.set(title=f"running accuracy of the {title}", xlabel="step", ylim=(0, 1))
        axes.grid(visible=True, alpha=0.3)
    panels[0].legend(fontsize="small")
    save_figure(figure, path)
