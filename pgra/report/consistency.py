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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pgra.core import Json
from pgra.errors import ConfigError, DataError
from pgra.report.metrics import Values, bootstrap_mean, compare_means, interval_95
from pgra.report.page import plain_text, save_figure
from pgra.report.tables import Cell, Table

_SEED = 0
_Counts = npt.NDArray[np.int64]
_NOTHING = Cell("")
_MEANING = (
    "Consistency: mean share of a query's evidence whose pseudo-label is the query's label.",
    "Majority rate: the consistency of evidence that all had the commonest label of the queries.",
    "Chance: that of evidence with these pseudo-labels that had nothing to do with its query.",
    "Intervals and p are of a bootstrap over queries; a difference whose interval holds 0 is none.",
)


@dataclass(frozen=True, eq=False)
class Consistency:
    """What label consistency says of one run, or of one with several seeds.

    Attributes:
        name: The run's, in tables.
        task: Its task.
        ids: Of the queries that have evidence, in the run's order.
        shares: Share of consistent evidence of each of these queries, in 0..1; mean over seeds.
        queries: How many queries have 0, 1, ... d consistent evidence, of all seeds, (d + 1,).
        right: How many of these were decided rightly.
        majority: Share of the queries that have the commonest label.
        chance: The score if evidence had nothing to do with its query.
        pseudo_labels: Share of the evidence by pseudo-label, in the task's order of labels.
        without_evidence: Queries that have none and count nowhere.
        seeds: Runs that were put together.
    """

    name: str
    task: str
    ids: Sequence[str]
    shares: Values
    queries: _Counts
    right: _Counts
    majority: float
    chance: float
    pseudo_labels: Mapping[str, float]
    without_evidence: int
    seeds: int = 1

    @property
    def depth(self) -> int:
        """The most evidence a query has, the paper's d."""
        return len(self.queries) - 1

    @property
    def score(self) -> float:
        """The mean share of consistent evidence, in 0..1."""
        return float(self.shares.mean())

    @property
    def interval(self) -> tuple[float, float]:
        """The score's 95 % interval over resamples of the queries (Efron 1979)."""
        return interval_95(bootstrap_mean(self.shares, seed=_SEED))

    def accuracy(self, number: int) -> float | None:
        """Return the share of queries decided rightly, of those with so many consistent evidence.

        None where there is no such query.
        """
        return float(self.right[number] / self.queries[number]) if self.queries[number] else None

    def as_json(self) -> dict[str, Json]:
        """Return all of it but the single queries."""
        counts = zip(self.queries.tolist(), self.right.tolist(), strict=True)
        by_count = [
            {"consistent": i, "queries": queries, "right": right, "accuracy": self.accuracy(i)}
            for i, (queries, right) in enumerate(counts)
        ]
        return {
            "name": self.name,
            "task": self.task,
            "seeds": self.seeds,
            "queries": len(self.shares),
            "without_evidence": self.without_evidence,
            "depth": self.depth,
            "score": self.score,
            "interval_95": list(self.interval),
            "majority": self.majority,
            "chance": self.chance,
            "pseudo_labels": dict(self.pseudo_labels),
            "by_count": by_count,
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
    lines = [line for line in predictions if line["evidence"]]
    found = [[pseudo_labels[seen["text"]] for seen in line["evidence"][:depth]] for line in lines]
    counts = np.array([own.count(line["label"]) for line, own in zip(lines, found, strict=True)])
    is_right = np.array([line["prediction"] == line["label"] for line in lines])
    truth = Counter(line["label"] for line in lines)
    pseudo = Counter(label for own in found for label in own)
    texts = sum(pseudo.values())
    return Consistency(
        name,
        task,
        [line["id"] for line in lines],
        counts / np.array([len(own) for own in found]),
        np.bincount(counts, minlength=depth + 1),
        np.bincount(counts[is_right], minlength=depth + 1),
        majority=max(truth.values()) / len(lines),
        chance=sum(truth[label] * pseudo[label] for label in labels) / (len(lines) * texts),
        pseudo_labels={label: pseudo[label] / texts for label in labels},
        without_evidence=len(predictions) - len(lines),
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
    return replace(
        first,
        shares=np.mean([run.shares for run in runs], axis=0),
        queries=np.sum([run.queries for run in runs], axis=0),
        right=np.sum([run.right for run in runs], axis=0),
        chance=float(np.mean([run.chance for run in runs])),
        pseudo_labels={
            label: float(np.mean([run.pseudo_labels[label] for run in runs]))
            for label in first.pseudo_labels
        },
        seeds=len(runs),
    )


def score_table(
    runs: Sequence[Consistency],
    *,
    baseline: str,
    paper: Mapping[tuple[str, str], float],
    notes: Sequence[str] = (),
) -> Table:
    """Return the scores (the paper's Table 10) in hundredths.

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
        cells += [Cell(f"{100 * run.interval[0]:.1f} to {100 * run.interval[1]:.1f}")]
        if paper:
            printed = paper.get((run.task, run.name))
            cells += [_NOTHING if printed is None else Cell(f"{printed:.1f}", value=printed)]
        cells += [_percent(run.majority), _percent(run.chance)]
        base = bases.get(run.task)
        if base is None or run is base:
            cells += [_NOTHING] * 3
        elif list(run.ids) != list(base.ids):
            cells += [Cell("other queries"), _NOTHING, _NOTHING]
        else:
            gap = compare_means(run.shares, base.shares, seed=_SEED)
            cells += [
                Cell(f"{100 * gap.difference:+.1f}", value=100 * gap.difference),
                Cell(f"{100 * gap.low:+.1f} to {100 * gap.high:+.1f}"),
                Cell(f"{gap.p:.3f}", value=gap.p),
            ]
        rows.append(cells)
    return Table("Label consistency of evidence", columns, rows, [*_MEANING, *notes])


def count_table(runs: Sequence[Consistency]) -> Table:
    """Return queries and accuracy by number of consistent evidence (the paper's Figure 2).

    Args:
        runs: Of one task. Queries are those of a seed, on average; where a run has none with a
            number, its accuracy is a dash.
    """
    kinds = ("queries", "accuracy")
    columns = ["consistent", *(f"{run.name}: {kind}" for run in runs for kind in kinds)]
    rows = []
    for number in range(max(run.depth for run in runs) + 1):
        cells = [Cell(str(number))]
        for run in runs:
            if number > run.depth:
                cells += [_NOTHING, _NOTHING]
                continue
            queries, accuracy = run.queries[number] / run.seeds, run.accuracy(number)
            cells.append(Cell(f"{queries:.4g}", value=float(queries)))
            cells.append(Cell("-") if accuracy is None else _percent(accuracy))
        rows.append(cells)
    notes = [
        f"Pseudo-labels of the evidence of {run.name}: "
        + ", ".join(f"{label} {100 * v:.1f}" for label, v in run.pseudo_labels.items())
        + (f"; {run.without_evidence} queries have none." if run.without_evidence else ".")
        for run in runs
    ]
    return Table(f"{runs[0].task}: by number of consistent evidence", columns, rows, notes)


def _percent(value: float) -> Cell:
    return Cell(f"{100 * value:.1f}", value=100 * value)


def plot_counts(runs: Sequence[Consistency], path: Path) -> None:
    """Draw accuracy and count by number of consistent evidence, a panel a run (Figure 2).

    Args:
        runs: Of one task.
        path: Without suffix: a .png and an .svg are written.
    """
    from matplotlib.figure import Figure

    most = max(float(run.queries.max()) / run.seeds for run in runs)
    with plain_text():
        figure = Figure(figsize=(4.4 * len(runs), 3.4), layout="constrained")
        panels = figure.subplots(1, len(runs), squeeze=False)[0]
        for axes, run in zip(panels, runs, strict=True):
            axes.bar(range(run.depth + 1), run.queries / run.seeds, color="0.8")
            axes.set(ylim=(0, 1.05 * most), xlabel=f"consistent evidence of {run.depth}")
            title = f"{run.name}: {100 * run.score:.1f} % consistent"
            axes.set(ylabel="queries (bars)", title=title)
            right = axes.twinx()
            numbers = np.flatnonzero(run.queries)
            accuracy = run.right[numbers] / run.queries[numbers]
            right.plot(numbers, accuracy, "o-", color="black", markersize=4)
            line = right.axhline(run.majority, color="0.4", linestyle="--", linewidth=1)
            line.set_label("majority rate")
            right.legend(loc="lower right", fontsize="small", frameon=False)
            right.set(ylim=(0, 1.05), ylabel="accuracy (line)")
    _save(figure, path)


def plot_scores(runs: Sequence[Consistency], path: Path) -> None:
    """Draw each run's score and interval, with its task's majority rate and its own chance.

    Args:
        runs: Of one task: the lines are its own.
        path: Without suffix: a .png and an .svg are written.
    """
    from matplotlib.figure import Figure

    with plain_text():
        figure = Figure(figsize=(7, 1.2 + 0.5 * len(runs)), layout="constrained")
        axes = figure.subplots()
        for height, run in enumerate(reversed(runs)):
            axes.plot(run.interval, [height, height], color="0.6", linewidth=3)
            axes.plot(run.score, height, "o", color="black")
            axes.plot(run.chance, height, "|", color="black", markersize=14)
        axes.axvline(runs[0].majority, color="0.4", linestyle="--", linewidth=1)
        axes.set_yticks(range(len(runs)), [run.name for run in reversed(runs)])
        axes.set_ylim(-0.6, len(runs) - 0.4)
        axes.set_xlabel(
            f"label consistency on {runs[0].task}, 95 % interval; dashed: majority rate; |: chance"
        )
        axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    for suffix in (".png", ".svg"):
        save_figure(figure, path.with_name(path.name + suffix))
