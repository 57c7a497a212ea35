"""Streams beside each other and the paper's numbers, as tables and a figure.

Acc(u) is the accuracy of the understanding, Acc(y) that of the answer (Madaan et al. 2022, section
4). Systems are compared on the same steps, by seed, with McNemar's test.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from pgra.artifacts import write_text
from pgra.memory.families import Family
from pgra.memory.stream import SYSTEMS, StreamResult, Variant, measure_stream
from pgra.report.metrics import combine_p, sign_flip
from pgra.report.tables import Table, TableRow, with_sd

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
    forms = {
        **dict.fromkeys(("understood", *family.kinds, "all", "answered"), ".2f"),
        "prompt_tokens": ",.0f",
        "look-ups": ".0f",
        "effective": ".2f",
    }
    tables = [
        Table.of("", _accuracy_rows(family, groups), forms),
        _text_table(compare_systems(groups)),
        _text_table(_sample_rows(groups)),
    ]
    title = f"# A memory of corrections: {family.name}, {len(results[0].outcomes)} steps"
    blocks = [title, *(table.to_markdown() for table in tables if table.rows)]
    return "\n\n".join(blocks) + "\n"


Streams = dict[int, StreamResult]  # of one system and probability, by seed


def group_by_title(results: Sequence[StreamResult]) -> dict[str, Streams]:
    """Group results by the variant's title."""
    groups: dict[str, Streams] = {}
    for result in results:
        groups.setdefault(result.variant.title, {})[result.variant.seed] = result
    return groups


def _label(title: str, streams: Streams) -> str:
    return f"{title} ({len(streams)} seeds)" if len(streams) > 1 else title


def _accuracy_rows(family: Family, groups: Mapping[str, Streams]) -> list[TableRow]:
    """Return tables 4 and 5, and the share of used look-ups that were effective (4.1.2)."""
    rows: list[TableRow] = []
    for title, streams in groups.items():
        measured = [measure_stream(stream.outcomes) for stream in streams.values()]
        row: TableRow = {"understood": _label(title, streams)}
        for kind in family.kinds:
            row[kind] = _mean([metrics["understood_by_type"].get(kind) for metrics in measured])
        row["all"] = with_sd([metrics["understood"] for metrics in measured], ".2f")
        row["answered"] = with_sd([metrics["answered"] for metrics in measured], ".2f")
        for name in ("prompt_tokens", "look-ups", "effective"):
            row[name] = _mean([metrics[name.replace("-", "")] for metrics in measured])
        rows.append(row)
    for system, printed in family.paper.items():
        rows.append({"understood": f"{SYSTEMS[system]}, paper (GPT-3)", **printed})
    return rows


def compare_systems(groups: Mapping[str, Streams]) -> list[TableRow]:
    """Compare as the paper does: GROW with NO-MEM, MEM with both.

    Returns rows of a table over shared seeds: the pair; its gap in accuracy of the understanding;
    p of McNemar's tests, combined over seeds (`combine_p`).
    """
    rows: list[TableRow] = []
    for title, streams in groups.items():
        variant = next(iter(streams.values())).variant
        weaker = [Variant("no-mem", 0.0, 0), Variant("grow", variant.probability, 0)]
        for other in weaker[: list(SYSTEMS).index(variant.system)]:
            others = groups.get(other.title, {})
            gaps = [
                np.subtract(
                    streams[seed].marks("understood"),
                    others[seed].marks("understood"),
                    dtype=np.float64,
                )
                for seed in sorted({*streams} & {*others})
            ]
            if gaps:
                row: TableRow = {"understood, gap of": f"{title} - {other.title}"}
                row["all"] = with_sd([gap.mean() for gap in gaps], "+.3f")
                row["p (McNemar)"] = f"{combine_p(list(map(sign_flip, gaps))):.2g}"
                rows.append(row)
    return rows


def _sample_rows(groups: Mapping[str, Streams]) -> list[TableRow]:
    """Return steps through time, as the paper's tables 6, 7 and 11 to 13."""
    streams = [next(iter(group.values())) for group in groups.values()]
    mem = next((stream for stream in streams if stream.variant.system == "mem"), None)
    if mem is None:
        return []
    without = groups.get(SYSTEMS["no-mem"], {}).get(mem.variant.seed)
    bare = {step.step: step.generated for step in without.outcomes} if without else {}
    used = [step for step in mem.outcomes if step.neighbors]
    rows: list[TableRow] = []
    for step in used[:: max(1, math.ceil(len(used) / _SAMPLES))]:
        row: TableRow = {"step": str(step.step), "question": step.question}
        row["nearest in the memory"] = " / ".join(step.neighbors[:3])
        row["expected"] = step.expected
        row["NO-MEM"] = bare.get(step.step, "")
        row["MEM-PROMPT"] = step.generated
        rows.append(row)
    return rows


def _text_table(rows: Sequence[TableRow]) -> Table:
    return Table.of("", rows, dict.fromkeys(rows[0], "") if rows else {})


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None; None without any."""
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None


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
