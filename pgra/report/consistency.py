"""Label consistency as numbers, tables and plots (Guo et al. 2023, section 4.1).

Evidence has no label of its own. A plain reader of the same task, trained without evidence, gives
it one, its pseudo-label; evidence is *consistent* with a query if that is the query's true label.
The consistency score of a query is the share of its evidence that is (section 4.3: 5 of 8 is
62.5 %), that of a run the mean over its queries, which is what the paper's Table 10 and Figure 4
report; its Figure 2 counts queries by their number of consistent evidence.

Two lines belong beside every score. If all evidence had one label, the score would be that label's
share of the queries: at best the *majority rate*. The paper's scores on CoLA, 69.0 to 69.3 % for
all sizes of LM, are that line (69 % of its sentences are acceptable), so they say nothing of the
LM. And evidence whose labels have nothing to do with its query's has the score of *chance*: the
labels' shares of the queries times their shares of the evidence, added up. So that a labeler which
calls nearly all of the corpus one label does not hide what ways differ in, it is centred at the
corpus (`pgra/experiments/consistency.py`), which the paper's is not.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pgra.artifacts import write_aside
from pgra.core import Json
from pgra.errors import ConfigError, DataError
from pgra.report.metrics import Discordant, Gaps, Interval, PairedDifference
from pgra.report.page import plain_text
from pgra.report.tables import Cell, Table

_SEED = 0
_DRAWS = 2000
# Equal shares, averaged over another number of seeds, may differ in a last digit of their own.
_DIGITS = 12
_Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CountBin:
    """The queries that have the same number of consistent evidence.

    Attributes:
        consistent: That number.
        queries: How many there are, of all seeds.
        right: How many of them were decided rightly, of all seeds.
    """

    consistent: int
    queries: int
    right: int

    @property
    def accuracy(self) -> float | None:
        """Give the share decided rightly; None where there is no query."""
        return self.right / self.queries if self.queries else None


@dataclass(frozen=True)
class Consistency:
    """What label consistency says of one run, or of one with several seeds.

    Attributes:
        name: The run's, in tables.
        task: Its task.
        ids: Of the queries that have evidence, in the run's order.
        shares: Share of consistent evidence of each of these queries, in 0..1; mean over seeds.
        bins: Queries by their number of consistent evidence, from 0 to d.
        majority: Share of the queries that have the commonest label.
        chance: The score if evidence had nothing to do with its query.
        pseudo_labels: Share of the evidence by pseudo-label, in the task's order of labels.
        without_evidence: Queries that have none and count nowhere.
        seeds: Runs that were put together.
    """

    name: str
    task: str
    ids: Sequence[str]
    shares: _Values
    bins: Sequence[CountBin]
    majority: float
    chance: float
    pseudo_labels: Mapping[str, float]
    without_evidence: int
    seeds: int = 1

    @property
    def depth(self) -> int:
        """Give the most evidence a query has, the paper's d."""
        return len(self.bins) - 1

    @property
    def score(self) -> float:
        """Give the mean share of consistent evidence, in 0..1."""
        return float(self.shares.mean())

    @property
    def interval(self) -> Interval:
        """Give the score's 95 % interval over resamples of the queries (Efron 1979)."""
        low, high = np.percentile(_resampled_means(self.shares), [2.5, 97.5])
        return Interval(float(low), float(high))

    def as_json(self) -> dict[str, Json]:
        """Give all of it but the single queries."""
        return {
            "name": self.name,
            "task": self.task,
            "seeds": self.seeds,
            "queries": len(self.shares),
            "without_evidence": self.without_evidence,
            "depth": self.depth,
            "score": self.score,
            "interval_95": [self.interval.low, self.interval.high],
            "majority": self.majority,
            "chance": self.chance,
            "pseudo_labels": dict(self.pseudo_labels),
            "by_count": [{**asdict(one), "accuracy": one.accuracy} for one in self.bins],
        }


def measure_consistency(
    name: str,
    task: str,
    predictions: Sequence[Mapping[str, Any]],
    pseudo_labels: Mapping[str, str],
    *,
    labels: Sequence[str],
    depth: int | None = None,
) -> Consistency:
    """Compare the pseudo-labels of a run's evidence with its queries' labels.

    Args:
        name: The run's, in tables.
        task: Its task.
        predictions: The lines of its `predictions.jsonl`.
        pseudo_labels: Label by text; of texts that no query has, too.
        labels: The task's, in order.
        depth: Look at a query's best so many only; None is all that the run read.

    Raises:
        ConfigError: If more evidence is asked for than any query has.
        DataError: If the run has no evidence.
        KeyError: If a text has no pseudo-label.
    """
    most = max((len(line["evidence"]) for line in predictions), default=0)
    if not most:
        raise DataError(f"{name} has no evidence to be consistent with: leave it out of --runs")
    if depth is not None and depth > most:
        raise ConfigError(f"depth is {depth}, and {name} has at most {most} evidence a query")
    depth = depth or most
    told = [line for line in predictions if line["evidence"]]
    found = [[pseudo_labels[seen["text"]] for seen in line["evidence"][:depth]] for line in told]
    counts = [own.count(line["label"]) for line, own in zip(told, found, strict=True)]
    truth = Counter(line["label"] for line in told)
    pseudo = Counter(label for own in found for label in own)
    texts = sum(pseudo.values())
    return Consistency(
        name,
        task,
        [line["id"] for line in told],
        np.array([count / len(own) for count, own in zip(counts, found, strict=True)]),
        _bins(told, counts, depth),
        majority=max(truth.values()) / len(told),
        chance=sum(truth[label] * pseudo[label] for label in labels) / (len(told) * texts),
        pseudo_labels={label: pseudo[label] / texts for label in labels},
        without_evidence=len(predictions) - len(told),
    )


def merge_seeds(runs: Sequence[Consistency]) -> Consistency:
    """Put the seeds of one run together: shares are averaged by query, counts are added up.

    Seeds of the reader have the same evidence, so that what differs is the accuracy alone.

    Raises:
        DataError: If they have evidence for different queries, or another number of it.
    """
    first = runs[0]
    for run in runs:
        if list(run.ids) != list(first.ids) or run.depth != first.depth:
            raise DataError(f"the seeds of {first.name} have evidence for different queries")
    pairs = [[run.bins[number] for run in runs] for number in range(first.depth + 1)]
    return replace(
        first,
        shares=np.mean([run.shares for run in runs], axis=0),
        bins=[
            CountBin(number, sum(one.queries for one in bins), sum(one.right for one in bins))
            for number, bins in enumerate(pairs)
        ],
        chance=float(np.mean([run.chance for run in runs])),
        pseudo_labels={
            label: float(np.mean([run.pseudo_labels[label] for run in runs]))
            for label in first.pseudo_labels
        },
        seeds=len(runs),
    )


def _bins(
    lines: Sequence[Mapping[str, Any]], counts: Sequence[int], depth: int
) -> Sequence[CountBin]:
    queries = Counter(counts)
    right = Counter(
        count
        for line, count in zip(lines, counts, strict=True)
        if line["prediction"] == line["label"]
    )
    return [CountBin(number, queries[number], right[number]) for number in range(depth + 1)]


def compare_consistency(one: Consistency, other: Consistency) -> PairedDifference:
    """Say how much more consistent one run's evidence is than another's, query by query.

    The interval and p are those of `metrics.paired_bootstrap`, of the mean difference.

    Raises:
        ValueError: If they are of different queries.
    """
    if list(one.ids) != list(other.ids):
        raise ValueError(f"{one.name} and {other.name} have evidence for different queries")
    gaps = np.round(one.shares - other.shares, _DIGITS)
    differing = Discordant(int((gaps != 0).sum()), gaps / len(gaps))
    return Gaps(float(gaps.mean()), _resampled_means(gaps), differing).summarise()


def _resampled_means(values: _Values) -> _Values:
    """Give the mean of each resample of the queries; a resample is counts of distinct values."""
    distinct, counts = np.unique(values, return_counts=True)
    generator = np.random.default_rng(_SEED)
    drawn = generator.multinomial(len(values), counts / len(values), size=_DRAWS)
    means: _Values = np.round(drawn @ distinct / len(values), _DIGITS)
    return means


# Tables of label consistency: scores, and queries by number of consistent evidence.


_COUNT_COLUMNS = ("queries", "accuracy")
_NOTHING = Cell("")
_MEANING = (
    "Consistency: mean share of a query's evidence whose pseudo-label is the query's label.",
    "Majority rate: the consistency of evidence that all had the commonest label of the queries.",
    "Chance: that of evidence with these pseudo-labels that had nothing to do with its query.",
    "Intervals and p are of a bootstrap over queries; a difference whose interval holds 0 is none.",
)


def score_table(
    runs: Sequence[Consistency],
    *,
    baseline: str,
    paper: Mapping[tuple[str, str], float],
    notes: Sequence[str] = (),
) -> Table:
    """Write the scores (the paper's Table 10) in hundredths.

    Args:
        runs: Of any tasks.
        baseline: Name of the run that others of its task are compared with.
        paper: What the paper prints, by task and name; may be empty.
        notes: Of these runs.
    """
    columns = ["run", "task", "seeds", "d", "queries", "consistency", "95 % interval"]
    columns += [*(["paper"] if paper else []), "majority rate", "chance"]
    columns += [f"difference to {baseline}", "its 95 % interval", "p"]
    bases = {run.task: run for run in runs if run.name == baseline}
    rows = []
    for run in runs:
        cells = [Cell(run.name), Cell(run.task), Cell(str(run.seeds)), Cell(str(run.depth))]
        cells += [Cell(str(len(run.shares))), _percent(run.score)]
        cells += [Cell(f"{as_percent(run.interval.low)} to {as_percent(run.interval.high)}")]
        if paper:
            printed = paper.get((run.task, run.name))
            cells += [_NOTHING if printed is None else Cell(f"{printed:.1f}", value=printed)]
        cells += [_percent(run.majority), _percent(run.chance)]
        rows.append([*cells, *_difference_cells(run, bases.get(run.task))])
    return Table("Label consistency of evidence", columns, rows, [*_MEANING, *notes])


def _difference_cells(run: Consistency, base: Consistency | None) -> list[Cell]:
    if base is None or run is base:
        return [_NOTHING] * 3
    if list(run.ids) != list(base.ids):
        return [Cell("other queries"), _NOTHING, _NOTHING]
    gap = compare_consistency(run, base)
    low, high = 100 * gap.low, 100 * gap.high
    return [
        Cell(f"{100 * gap.difference:+.1f}", value=100 * gap.difference),
        Cell(f"{low:+.1f} to {high:+.1f}"),
        Cell(f"{gap.p:.3f}", value=gap.p),
    ]


def count_table(runs: Sequence[Consistency]) -> Table:
    """Write queries and accuracy by number of consistent evidence (the paper's Figure 2).

    Args:
        runs: Of one task. Queries are those of a seed, on average; where a run has none with a
            number, its accuracy is a dash.
    """
    columns = ["consistent", *(f"{r.name}: {what}" for r in runs for what in _COUNT_COLUMNS)]
    rows = []
    for number in range(max(run.depth for run in runs) + 1):
        cells = [cell for run in runs for cell in _count_cells(run, number)]
        rows.append([Cell(str(number)), *cells])
    told = [
        f"Pseudo-labels of the evidence of {run.name}: "
        + ", ".join(f"{label} {as_percent(v)}" for label, v in run.pseudo_labels.items())
        + (f"; {run.without_evidence} queries have none." if run.without_evidence else ".")
        for run in runs
    ]
    return Table(f"{runs[0].task}: by number of consistent evidence", columns, rows, told)


def _count_cells(run: Consistency, number: int) -> list[Cell]:
    if number > run.depth:
        return [_NOTHING, _NOTHING]
    found = run.bins[number]
    queries = found.queries / run.seeds
    accuracy = Cell("-") if found.accuracy is None else _percent(found.accuracy)
    return [Cell(f"{queries:.4g}", value=queries), accuracy]


def _percent(value: float) -> Cell:
    return Cell(as_percent(value), value=100 * value)


def as_percent(value: float) -> str:
    """Write a share as a percentage with one digit, without its sign."""
    return f"{100 * value:.1f}"


# Plots of label consistency: the paper's Figure 2, and scores beside what needs no retrieval.


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
