"""Streams beside each other and the paper's numbers, as tables and a figure.

Acc(u) is the accuracy of the understanding, Acc(y) that of the answer (Madaan et al. 2022, section
4). Systems are compared on the same steps, by seed, with McNemar's test.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import correlation, fmean

import numpy as np

from pgra.artifacts import write_text
from pgra.memory.families import Family
from pgra.memory.stream import SYSTEMS, StreamResult, Variant, measure_stream
from pgra.report.metrics import combine_p, sign_flip
from pgra.report.tables import Cell, Table, with_sd

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
    groups = group_by_title(results)
    blocks = [
        f"# A memory of corrections: {family.name}, {len(results[0].outcomes)} steps",
        _accuracy_table(family, groups),
    ]
    if family.situations is not None:  # how far answers are right where they are understood: 4.1.1
        cells = [f"{_label(*group)} {_correlate(group[1])}" for group in groups.items()]
        blocks.append(
            f"Correlation of understanding and answer, question by question: {'; '.join(cells)}."
        )
    head = ["understood, gap of", "all", "p (McNemar)"]
    blocks += [_markdown(head, compare_systems(groups)), _sample_table(groups)]
    return "\n\n".join(block for block in blocks if block) + "\n"


Streams = Mapping[int, StreamResult]  # of one system and probability, by seed


def group_by_title(results: Sequence[StreamResult]) -> dict[str, Streams]:
    """Group results by the variant's title."""
    groups = defaultdict[str, dict[int, StreamResult]](dict)
    for result in results:
        groups[result.variant.title][result.variant.seed] = result
    return dict(groups)


def _label(title: str, streams: Streams) -> str:
    return f"{title} ({len(streams)} seeds)" if len(streams) > 1 else title


def _accuracy_table(family: Family, groups: Mapping[str, Streams]) -> str:
    """Show tables 4 and 5, and the share of used look-ups that were effective (4.1.2)."""
    kinds = family.kinds
    rows = []
    for title, streams in groups.items():
        metrics = [measure_stream(stream.outcomes) for stream in streams.values()]
        cells = [_label(title, streams)]
        for kind in kinds:
            cells.append(_mean([values["understood_by_type"].get(kind) for values in metrics]))
        for name in ("understood", "answered"):
            cells.append(with_sd([values[name] for values in metrics], ".2f"))
        for name, form in {"prompt_tokens": ",.0f", "lookups": ".0f", "effective": ".2f"}.items():
            cells.append(_mean([values[name] for values in metrics], form))
        rows.append(cells)
    for system, printed in family.paper.items():
        cells = [_mean([printed.get(kind)]) for kind in (*kinds, "all")]
        rows.append([f"{SYSTEMS[system]}, paper (GPT-3)", *cells, "", "", "", ""])
    head = ["understood", *kinds, "all", "answered", "prompt tokens", "look-ups", "effective"]
    return _markdown(head, rows)


def _correlate(streams: Streams) -> str:
    """Return the correlation of understanding and answer (phi); "none" if either is constant."""
    steps = list(chain.from_iterable(stream.outcomes for stream in streams.values()))
    understood = [float(step.understood) for step in steps]
    answered = [float(step.answered) for step in steps]
    if len(set(understood)) < 2 or len(set(answered)) < 2:
        return "none"
    return f"{correlation(understood, answered):.2f}"


def compare_systems(groups: Mapping[str, Streams]) -> list[list[str]]:
    """Compare as the paper does: GROW with NO-MEM, MEM with both.

    Returns rows of a table over shared seeds: the pair; its gap in accuracy of the understanding;
    p of McNemar's tests, combined over seeds (`combine_p`).
    """
    rows = []
    for title, streams in groups.items():
        variant = next(iter(streams.values())).variant
        weaker = [Variant("no-mem", 0.0, 0), Variant("grow", variant.probability, 0)]
        for other in weaker[: list(SYSTEMS).index(variant.system)]:
            others = groups.get(other.title, {})
            gaps = []
            p_values = []
            for seed in sorted({*streams} & {*others}):
                a = streams[seed].marks("understood")
                b = others[seed].marks("understood")
                gaps.append(fmean(a) - fmean(b))
                p_values.append(sign_flip(np.subtract(a, b, dtype=np.float64)))
            if gaps:
                p = combine_p(p_values)
                rows.append([f"{title} - {other.title}", with_sd(gaps, "+.3f"), f"{p:.2g}"])
    return rows


def _sample_table(groups: Mapping[str, Streams]) -> str:
    """Show steps through time, as the paper's tables 6, 7 and 11 to 13."""
    for streams in groups.values():
        seed, mem = next(iter(streams.items()))
        if mem.variant.system == "mem":
            break
    else:
        return ""
    bare: dict[int, str] = {}
    if (without := groups.get(SYSTEMS["no-mem"], {}).get(seed)) is not None:
        bare = {step.step: step.generated for step in without.outcomes}
    used = [step for step in mem.outcomes if step.neighbors]
    stride = max(1, math.ceil(len(used) / _SAMPLES))
    rows = [
        [
            str(step.step),
            step.question,
            " / ".join(step.neighbors[:3]),
            step.expected,
            bare.get(step.step, ""),
            step.generated,
        ]
        for step in used[::stride]
    ]
    head = ["step", "question", "nearest in the memory", "expected", "NO-MEM", "MEM-PROMPT"]
    return _markdown(head, rows)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[Cell(text) for text in row] for row in rows]
    return Table("", columns, cells).to_markdown() if rows else ""


def _mean(values: Sequence[float | None], form: str = ".2f") -> str:
    """Return the mean of the values that are not None; "" without any."""
    numbers = [value for value in values if value is not None]
    return f"{fmean(numbers):{form}}" if numbers else ""


def plot_running(path: Path, results: Sequence[StreamResult]) -> None:
    """Draw the running accuracy of understanding and answer, means over the seeds, as a .png."""
    from matplotlib.figure import Figure

    from pgra.report.tables import save_figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    names = {"understood": "understanding", "answered": "answer"}
    for axes, (name, title) in zip(panels, names.items(), strict=True):
        for label, streams in group_by_title(results).items():
            marks = np.array([stream.marks(name) for stream in streams.values()])
            running = marks.cumsum(axis=1) / np.arange(1, marks.shape[1] + 1)
            mean = running.mean(axis=0)
            axes.plot(range(1, len(mean) + 1), mean, label=_label(label, streams))
        axes.set(title=f"running accuracy of the {title}", xlabel="step", ylim=(0, 1))
        axes.grid(visible=True, alpha=0.3)
    panels[0].legend(fontsize="small")
    save_figure(figure, path)
