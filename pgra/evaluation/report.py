"""The demo's report: its runs in one table with differences, one example, one plot."""

from collections.abc import Sequence
from pathlib import Path

from pgra.errors import ArtifactError
from pgra.evaluation.metrics import PairedDifference, paired_bootstrap
from pgra.evaluation.runs import Run
from pgra.evaluation.tables import Cell, Table

_BOOTSTRAP_SEED = 0


def compare(run: Run, baseline: Run) -> PairedDifference:
    """Compare two runs on the same examples.

    Raises:
        ValueError: If they decided different examples.
    """
    ours, theirs = run.decisions, baseline.decisions
    if ours.examples != theirs.examples:
        raise ValueError(f"{run.folder} and {baseline.folder} decided different examples")
    return paired_bootstrap(
        run.metric,
        theirs.labels,
        ours.predicted,
        theirs.predicted,
        ours.names,
        seed=_BOOTSTRAP_SEED,
    )


def demo_table(runs: Sequence[Run]) -> Table:
    """Give each run's metric with its interval, and its difference to the first."""
    baseline = runs[0]
    rows = []
    for run in runs:
        low, high = _interval(run)
        cells = [run.name, f"{run.value:.3f}", f"{low:.3f} to {high:.3f}"]
        if run is baseline:
            cells += ["", ""]
        else:
            gap = compare(run, baseline)
            cells += [
                f"{gap.difference:+.3f} ({gap.low:+.3f} to {gap.high:+.3f})",
                f"{gap.p:.2f}",
            ]
        rows.append([Cell(text) for text in cells])
    columns = ["reader", baseline.metric, "95 % interval", "difference to the first", "p"]
    return Table("", columns, rows)


def _interval(run: Run) -> tuple[float, float]:
    low, high = run.metrics["interval_95"]
    return float(low), float(high)


def choose_case(runs: Sequence[Run]) -> int:
    """Give the place of the first example that the runs decide differently; else the first."""
    for place, lines in enumerate(zip(*(run.predictions for run in runs), strict=True)):
        if len({line["prediction"] for line in lines}) > 1:
            return place
    return 0


def case_study(runs: Sequence[Run], place: int, *, most: int = 4) -> str:
    """Show one query as the paper's Table 3 does: what each system read, and what it said."""
    query = runs[0].predictions[place]
    lines = [f"query: {query['text']}", f"label: {query['label']}"]
    for run in runs:
        line = run.predictions[place]
        chance = line["scores"][line["prediction"]]
        verdict = "right" if line["prediction"] == line["label"] else "wrong"
        lines += ["", f"{run.name}: {line['prediction']} ({chance:.2f}, {verdict})"]
        lines += [
            f"  ({number}) {seen['text']}  [stage 1: rank {seen['stage1_rank']}]"
            for number, seen in enumerate(line["evidence"][:most], 1)
        ]
    return "\n".join(lines)


def plot_results(runs: Sequence[Run], path: Path) -> None:
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

    figure, axes = plt.subplots(figsize=(7, 0.8 + 0.6 * len(runs)), layout="constrained")
    for place, run in enumerate(reversed(runs)):
        low, high = _interval(run)
        axes.plot([low, high], [place, place], color="0.6", linewidth=3, solid_capstyle="round")
        axes.plot(run.value, place, "o", color="black")
    axes.set_yticks(range(len(runs)), [run.name for run in reversed(runs)])
    axes.set_ylim(-0.6, len(runs) - 0.4)
    first = runs[0].metrics
    axes.set_xlabel(f"{first['metric']} on {first['n']} test examples, 95 % interval")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
