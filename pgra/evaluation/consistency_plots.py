"""Plots of label consistency: the paper's Figure 2, and scores beside what needs no retrieval."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pgra.errors import ConfigError
from pgra.evaluation.consistency import Consistency
from pgra.evaluation.consistency_tables import as_percent
from pgra.evaluation.figures import plain_text
from pgra.io import write_aside

SUFFIXES = (".png", ".svg")


def plot_counts(runs: Sequence[Consistency], path: Path) -> None:
    """Draw accuracy and count by number of consistent evidence, a panel a run (Figure 2).

    Args:
        runs: Of one task.
        path: Without suffix: a .png and an .svg are written.

    Raises:
        ConfigError: If matplotlib is not installed.
    """
    plt = _pyplot()
    with plain_text():
        figure = _draw_counts(plt, runs)
    _save(figure, path)


def _draw_counts(plt: Any, runs: Sequence[Consistency]) -> Any:
    figure, panels = plt.subplots(
        1, len(runs), figsize=(4.4 * len(runs), 3.4), squeeze=False, layout="constrained"
    )
    most = max(one.queries / run.seeds for run in runs for one in run.bins)
    for axes, run in zip(panels[0], runs, strict=True):
        numbers = [one.consistent for one in run.bins]
        axes.bar(numbers, [one.queries / run.seeds for one in run.bins], color="0.8")
        axes.set(ylim=(0, 1.05 * most), xlabel=f"consistent evidence of {run.depth}")
        axes.set(ylabel="queries (bars)", title=f"{run.name}: {as_percent(run.score)} % consistent")
        right = axes.twinx()
        seen = [(one.consistent, one.accuracy) for one in run.bins if one.accuracy is not None]
        right.plot(*zip(*seen, strict=True), "o-", color="black", markersize=4)
        line = right.axhline(run.majority, color="0.4", linestyle="--", linewidth=1)
        line.set_label("majority rate")
        right.legend(loc="lower right", fontsize="small", frameon=False)
        right.set(ylim=(0, 1.05), ylabel="accuracy (line)")
    return figure


def plot_scores(runs: Sequence[Consistency], path: Path) -> None:
    """Draw each run's score and interval, with its task's majority rate and its own chance.

    Args:
        runs: Of one task: the lines are its own.
        path: Without suffix: a .png and an .svg are written.

    Raises:
        ConfigError: If matplotlib is not installed.
    """
    plt = _pyplot()
    with plain_text():
        figure = _draw_scores(plt, runs)
    _save(figure, path)


def _draw_scores(plt: Any, runs: Sequence[Consistency]) -> Any:
    figure, axes = plt.subplots(figsize=(7, 1.2 + 0.5 * len(runs)), layout="constrained")
    for place, run in enumerate(reversed(runs)):
        ends = [run.interval.low, run.interval.high]
        axes.plot(ends, [place, place], color="0.6", linewidth=3, solid_capstyle="round")
        axes.plot(run.score, place, "o", color="black")
        axes.plot(run.chance, place, "|", color="black", markersize=14)
    axes.axvline(runs[0].majority, color="0.4", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(runs)), [run.name for run in reversed(runs)])
    axes.set_ylim(-0.6, len(runs) - 0.4)
    axes.set_xlabel(
        f"label consistency on {runs[0].task}, 95 % interval; dashed: majority rate; |: chance"
    )
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def require_matplotlib() -> None:
    """Load what draws.

    Raises:
        ConfigError: If it is not installed.
    """
    _pyplot()


def _pyplot() -> Any:
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError(
            "matplotlib is missing: pip install 'pgra[demo]', or leave plots out (--no_plots)"
        ) from None
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    for suffix in SUFFIXES:
        with write_aside(path.with_name(path.name + suffix)) as aside:
            figure.savefig(aside, format=suffix.removeprefix("."), dpi=150)
    _pyplot().close(figure)
