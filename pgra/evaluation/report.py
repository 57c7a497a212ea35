"""Runs side by side: one table with intervals and paired differences, one example, one plot."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pgra.errors import ArtifactError
from pgra.evaluation.metrics import PairedDifference, paired_bootstrap
from pgra.evaluation.results import METRICS_FILE, PREDICTIONS_FILE

_BOOTSTRAP_SEED = 0


@dataclass(frozen=True)
class System:
    """One run as a report shows it.

    Attributes:
        name: In the table.
        folder: The run.
        metrics: Its `metrics.json`.
        predictions: Its `predictions.jsonl`, in order.
    """

    name: str
    folder: Path
    metrics: Mapping[str, Any]
    predictions: Sequence[Mapping[str, Any]]

    @property
    def interval(self) -> tuple[float, float]:
        """Give the 95 % interval of the headline metric."""
        low, high = self.metrics["interval_95"]
        return float(low), float(high)


def load_system(name: str, folder: Path) -> System:
    """Read a finished run.

    Raises:
        ArtifactError: If it is not finished, or its files cannot be read.
    """
    try:
        metrics = json.loads((folder / METRICS_FILE).read_text(encoding="utf-8"))
        with (folder / PREDICTIONS_FILE).open(encoding="utf-8") as file:
            predictions = [json.loads(line) for line in file]
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{folder} is no finished run ({error}): train it first") from None
    return System(name, folder, metrics, predictions)


def compare(system: System, baseline: System, labels: Sequence[str]) -> PairedDifference:
    """Compare two systems on the same examples.

    Raises:
        ValueError: If they decided different examples.
    """
    if [p["id"] for p in system.predictions] != [p["id"] for p in baseline.predictions]:
        raise ValueError(f"{system.folder} and {baseline.folder} decided different examples")
    return paired_bootstrap(
        system.metrics["metric"],
        [p["label"] for p in baseline.predictions],
        [p["prediction"] for p in system.predictions],
        [p["prediction"] for p in baseline.predictions],
        labels,
        seed=_BOOTSTRAP_SEED,
    )


def results_table(systems: Sequence[System], labels: Sequence[str]) -> str:
    """Write the table as Markdown; differences are to the first system."""
    baseline = systems[0]
    metric = baseline.metrics["metric"]
    lines = [
        f"| reader | {metric} | 95 % interval | difference to the first | p |",
        "|:--|--:|:-:|:-:|--:|",
    ]
    for system in systems:
        low, high = system.interval
        cells = [system.name, f"{system.metrics['value']:.3f}", f"{low:.3f} to {high:.3f}"]
        if system is baseline:
            cells += ["", ""]
        else:
            gap = compare(system, baseline, labels)
            cells += [
                f"{gap.difference:+.3f} ({gap.low:+.3f} to {gap.high:+.3f})",
                f"{gap.p:.2f}",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return _align(lines)


def _align(lines: Sequence[str]) -> str:
    """Pad a Markdown table's cells, so that it reads well in a terminal too."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    widths = [max(len(row[i]) for row in rows if row is not rows[1]) for i in range(len(rows[0]))]
    out = []
    for number, row in enumerate(rows):
        cells = [
            _rule(cell, width) if number == 1 else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ]
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


def _rule(cell: str, width: int) -> str:
    left, right = cell.startswith(":"), cell.endswith(":")
    return ":" * left + "-" * (width - left - right) + ":" * right


def choose_case(systems: Sequence[System]) -> int:
    """Give the place of the first example that the systems decide differently; else the first."""
    for place, lines in enumerate(zip(*(s.predictions for s in systems), strict=True)):
        if len({line["prediction"] for line in lines}) > 1:
            return place
    return 0


def case_study(systems: Sequence[System], place: int, *, most: int = 4) -> str:
    """Show one query as the paper's Table 3 does: what each system read, and what it said."""
    query = systems[0].predictions[place]
    lines = [f"query: {query['text']}", f"label: {query['label']}"]
    for system in systems:
        line = system.predictions[place]
        chance = line["scores"][line["prediction"]]
        verdict = "right" if line["prediction"] == line["label"] else "wrong"
        lines += ["", f"{system.name}: {line['prediction']} ({chance:.2f}, {verdict})"]
        lines += [
            f"  ({number}) {seen['text']}  [stage 1: rank {seen['stage1_rank']}]"
            for number, seen in enumerate(line["evidence"][:most], 1)
        ]
    return "\n".join(lines)


def plot_results(systems: Sequence[System], path: Path) -> None:
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

    figure, axes = plt.subplots(figsize=(7, 0.8 + 0.6 * len(systems)), layout="constrained")
    for place, system in enumerate(reversed(systems)):
        low, high = system.interval
        axes.plot([low, high], [place, place], color="0.6", linewidth=3, solid_capstyle="round")
        axes.plot(system.metrics["value"], place, "o", color="black")
    axes.set_yticks(range(len(systems)), [system.name for system in reversed(systems)])
    axes.set_ylim(-0.6, len(systems) - 0.4)
    first = systems[0].metrics
    axes.set_xlabel(f"{first['metric']} on {first['n']} test examples, 95 % interval")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
