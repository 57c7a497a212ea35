"""Runs side by side: each system on each task over its seeds, and its difference to a baseline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pgra.errors import ConfigError, unknown_name
from pgra.evaluation.comparable import (
    SYSTEMS,
    TASKS,
    check_comparable,
    in_order,
    is_unseeded,
    row_names,
)
from pgra.evaluation.metrics import PairedDifference
from pgra.evaluation.runs import Group, Run
from pgra.evaluation.statistics import (
    Gaps,
    Spread,
    average_gaps,
    combine_p,
    holm,
    mcnemar,
    mean_sd_interval,
    metric_draws,
    paired_gaps,
    welch,
)
from pgra.evaluation.written_runs import text_gaps

LEVEL = 0.05
_BOOTSTRAP_SEED = 0
_LAST_DIGIT = 1e-12
_USUAL_BASELINES = ("fid", "plain")


@dataclass(frozen=True)
class Result:
    """One row on one task (or on average).

    Attributes:
        runs: By seed, rising; of an average none.
        missing: Seeds that should be there and are not.
        spread: Of the metric over seeds.
        interval: 95 %: over seeds by Student's t; of one seed, or of equal ones, over examples by
            the bootstrap; None where there is neither.
        is_over_seeds: Which of the two.
    """

    runs: Sequence[Run]
    missing: Sequence[int]
    spread: Spread
    interval: tuple[float, float] | None
    is_over_seeds: bool


@dataclass(frozen=True)
class Comparison:
    """A row against the baseline on one task (or on average).

    Attributes:
        gap: Difference of the means over seeds, over resamples of the examples.
        mcnemar: Exact test of right against wrong; of several seeds combined by `combine_p`; None
            of an average, or where no seed is shared and there are several.
        holm: The gap's p, adjusted over the row's tasks; of an average as it is.
        better: In how many shared seeds the row is better.
        shared: How many seeds both have.
        welch: Welch's t-test over seeds; None where a side that is trained has one seed only.
        has_noise: Whether a seed changes anything on either side; where none does, `welch` is 0 or
            1 and tells no more than the difference.
    """

    gap: PairedDifference
    mcnemar: float | None
    holm: float
    better: int
    shared: int
    welch: float | None
    has_noise: bool

    @property
    def is_win(self) -> bool:
        """Say whether the row is better by more than the noise of examples and of seeds.

        One seed tells nothing of the noise of training, so with one there is no win.
        """
        is_steady = self.better == self.shared and self.welch is not None and self.welch <= LEVEL
        return self.gap.difference > 0 and self.holm <= LEVEL and is_steady


@dataclass(frozen=True)
class Study:
    """All that a table of results says.

    Attributes:
        group: Its runs.
        rows: Their names, in order.
        tasks: In order.
        results: By row and task; what is not there is missing.
        averages: Over all tasks, of the rows that have them all.
        baseline: The row to compare with; None if there is none.
        comparisons: By row and task.
        average_comparisons: By row.
    """

    group: Group
    rows: Sequence[str]
    tasks: Sequence[str]
    results: Mapping[tuple[str, str], Result]
    averages: Mapping[str, Result]
    baseline: str | None
    comparisons: Mapping[tuple[str, str], Comparison]
    average_comparisons: Mapping[str, Comparison]

    @property
    def has_average(self) -> bool:
        """Say whether a mean over the columns means anything: several tasks, and no texts."""
        is_of_texts = any(run.each is not None for run in self.group.runs)
        return len(self.tasks) > 1 and not is_of_texts

    def first_run(self, row: str) -> Run | None:
        """Give any run of a row; None if all are missing."""
        return next(
            (self.results[row, t].runs[0] for t in self.tasks if (row, t) in self.results), None
        )


def compare_runs(group: Group, *, baseline: str | None = None) -> Study:
    """Put runs that belong together side by side.

    Args:
        group: The runs, at least one.
        baseline: The row to compare with; None takes the grid's, else fid, else plain.

    Raises:
        ArtifactError: If they cannot be compared.
        ConfigError: If the baseline is no row.
    """
    check_comparable(group)
    results = _collect(group)
    rows = _rows(group)
    known = [run.task for run in group.runs] + [gone.task for gone in group.missing if gone.task]
    tasks = in_order(known, TASKS)
    chosen = _choose_baseline(group, rows, baseline)
    is_of_texts = any(run.each is not None for run in group.runs)
    averages = {
        row: _average([results[row, t] for t in tasks])
        for row in rows
        if not is_of_texts and all((row, t) in results for t in tasks)
    }
    comparisons, by_average = {}, {}
    for row in rows:
        if chosen is not None and row != chosen:
            found, average = _compare_row(results, tasks, row, chosen)
            comparisons.update(found)
            by_average.update({row: average} if average is not None else {})
    return Study(group, rows, tasks, results, averages, chosen, comparisons, by_average)


def _rows(group: Group) -> list[str]:
    """Give the rows in order: a grid's as it lists them, else by system."""
    names, systems = row_names(group), [run.system for run in group.runs]
    if group.points:
        return list(group.points)
    place = {name: i for i, name in enumerate(in_order(systems, SYSTEMS))}
    pairs = zip(names, systems, strict=True)
    return list(dict.fromkeys(name for name, _ in sorted(pairs, key=lambda p: place[p[1]])))


def _collect(group: Group) -> dict[tuple[str, str], Result]:
    found: dict[tuple[str, str], list[Run]] = {}
    for name, run in zip(row_names(group), group.runs, strict=True):
        found.setdefault((name, run.task), []).append(run)
    missing: dict[tuple[str, str], list[int]] = {}
    tasks = {run.task for run in group.runs}
    for gone in group.missing:
        for task in [gone.task] if gone.task else sorted(tasks):
            missing.setdefault((gone.name, task), []).append(gone.seed)
    return {
        place: _result(sorted(runs, key=lambda run: run.seed), missing.get(place, []))
        for place, runs in found.items()
    }


def _result(runs: Sequence[Run], missing: Sequence[int]) -> Result:
    spread = mean_sd_interval([run.value for run in runs])
    ends = _ends_over_seeds(spread)
    if ends is not None:
        return Result(runs, missing, spread, ends, is_over_seeds=True)
    interval = runs[0].metrics.get("interval_95")
    pair = (float(interval[0]), float(interval[1])) if interval else None
    return Result(runs, missing, spread, pair, is_over_seeds=False)


def _ends_over_seeds(spread: Spread) -> tuple[float, float] | None:
    """Give the interval over seeds, where they differ: equal ones would have one of no width."""
    if spread.low is None or spread.high is None or (spread.sd or 0.0) < _LAST_DIGIT:
        return None
    return spread.low, spread.high


def _average(results: Sequence[Result]) -> Result:
    """Give the mean over tasks: of each seed if all tasks have the same, as the paper's Table 8."""
    seeds = [_seeds(result.runs) for result in results]
    missing = sorted({seed for result in results for seed in result.missing})
    if all(of == seeds[0] for of in seeds):
        by_seed = zip(*([run.value for run in result.runs] for result in results), strict=True)
        spread = mean_sd_interval([sum(values) / len(values) for values in by_seed])
    else:
        spread = mean_sd_interval([sum(r.spread.mean for r in results) / len(results)])
    ends = _ends_over_seeds(spread)
    if ends is not None:
        return Result((), missing, spread, ends, is_over_seeds=True)
    return Result((), missing, spread, _average_interval(results), is_over_seeds=False)


def _average_interval(results: Sequence[Result]) -> tuple[float, float]:
    """Give the bootstrap interval of an average: each task's examples are drawn on their own."""
    draws = [
        metric_draws(
            result.runs[0].metric,
            result.runs[0].decisions.labels,
            [run.decisions.predicted for run in result.runs],
            result.runs[0].decisions.names,
            seed=_BOOTSTRAP_SEED + place,
        ).mean(axis=0)
        for place, result in enumerate(results)
    ]
    low, high = np.percentile(np.mean(draws, axis=0), [2.5, 97.5])
    return float(low), float(high)


def _choose_baseline(group: Group, rows: Sequence[str], asked: str | None) -> str | None:
    if asked is not None:
        if asked not in rows:
            raise ConfigError(unknown_name("baseline", asked, rows))
        return asked
    if group.baseline is not None:
        wanted = group.baseline.items()
        fits = [
            name
            for name, values in group.points.items()
            if all(axis in values and values[axis] == value for axis, value in wanted)
        ]
        return fits[0] if fits else None
    return next((name for name in _USUAL_BASELINES if name in rows), None)


def _compare_row(
    results: Mapping[tuple[str, str], Result], tasks: Sequence[str], row: str, baseline: str
) -> tuple[dict[tuple[str, str], Comparison], Comparison | None]:
    """Compare a row with the baseline on each task that both have, and on all together."""
    places = [t for t in tasks if (row, t) in results and (baseline, t) in results]
    sides = {
        task: _paired(results[row, task].runs, results[baseline, task].runs) for task in places
    }
    gaps = {task: _gaps(*sides[task], seed=tasks.index(task)) for task in places}
    summaries = {task: gap.summarise() for task, gap in gaps.items()}
    adjusted = dict(zip(places, holm([summaries[t].p for t in places]), strict=True))
    found = {
        (row, task): Comparison(
            summaries[task],
            _mcnemar(*sides[task]),
            adjusted[task],
            *_won(*sides[task]),
            *_over_seeds(results[row, task].runs, results[baseline, task].runs),
        )
        for task in places
    }
    is_of_texts = any(result.runs[0].each is not None for result in results.values())
    if len(places) < len(tasks) or len(tasks) < 2 or is_of_texts:
        return found, None
    pairs = [(results[row, task].runs, results[baseline, task].runs) for task in places]
    overall = average_gaps([gaps[task] for task in places]).summarise()
    won = _won_on_average(list(sides.values()))
    return found, Comparison(overall, None, overall.p, *won, *_average_over_seeds(pairs))


_Pair = tuple[Sequence[Run], Sequence[Run]]


def _paired(a: Sequence[Run], b: Sequence[Run]) -> _Pair:
    """Keep the seeds that both have; if they share none, all of each.

    One run that no seed decides stands beside each seed of the other.
    """
    if any(len(side) == 1 and is_unseeded(side[0]) for side in (a, b)):
        return a, b
    shared = {run.seed for run in a} & {run.seed for run in b}
    if not shared:
        return a, b
    return [run for run in a if run.seed in shared], [run for run in b if run.seed in shared]


def _seeds(runs: Sequence[Run]) -> list[int]:
    return [run.seed for run in runs]


def _gaps(a: Sequence[Run], b: Sequence[Run], *, seed: int) -> Gaps:
    # Another stream for each task, so that an average adds up independent resamples.
    texts = [[run.each for run in side if run.each is not None] for side in (a, b)]
    if all(texts):
        return text_gaps(a[0].metric, *texts, seed=_BOOTSTRAP_SEED + seed)
    return paired_gaps(
        a[0].metric,
        a[0].decisions.labels,
        [run.decisions.predicted for run in a],
        [run.decisions.predicted for run in b],
        a[0].decisions.names,
        seed=_BOOTSTRAP_SEED + seed,
    )


def _matched(a: Sequence[Run], b: Sequence[Run]) -> list[tuple[Run, Run]] | None:
    """Pair runs by seed; None where the sides have other seeds."""
    if len(a) == 1 and is_unseeded(a[0]):
        return [(a[0], run) for run in b]
    if len(b) == 1 and is_unseeded(b[0]):
        return [(run, b[0]) for run in a]
    return list(zip(a, b, strict=True)) if _seeds(a) == _seeds(b) else None


def _mcnemar(a: Sequence[Run], b: Sequence[Run]) -> float | None:
    pairs = [(a[0], b[0])] if len(a) == len(b) == 1 else _matched(a, b)
    if pairs is None or a[0].each is not None:
        return None
    return combine_p([mcnemar(x.decisions.correct, y.decisions.correct) for x, y in pairs])


def _won(a: Sequence[Run], b: Sequence[Run]) -> tuple[int, int]:
    """Give in how many shared seeds a is better, and how many there are."""
    pairs = _matched(a, b) or []
    return sum(x.value > y.value for x, y in pairs), len(pairs)


def _over_seeds(a: Sequence[Run], b: Sequence[Run]) -> tuple[float | None, bool]:
    return _test_seeds(_values(a), _values(b))


def _average_over_seeds(sides: Sequence[_Pair]) -> tuple[float | None, bool]:
    """Test the averages over tasks, seed by seed, where all tasks have the same seeds."""
    values = []
    for own in zip(*sides, strict=True):
        if any(_seeds(runs) != _seeds(own[0]) for runs in own):
            return None, False
        by_task = zip(*(_values(runs) for runs in own), strict=True)
        values.append([sum(told) / len(told) for told in by_task])
    return _test_seeds(*values)


def _test_seeds(a: Sequence[float], b: Sequence[float]) -> tuple[float | None, bool]:
    """Give Welch's p, and whether there is any spread that it could go by."""
    return welch(a, b), any(max(side) - min(side) >= _LAST_DIGIT for side in (a, b))


def _values(runs: Sequence[Run]) -> list[float]:
    """Give a row's values, by seed; what has no seeds would come out the same again."""
    values = [run.value for run in runs]
    return values * 2 if len(runs) == 1 and is_unseeded(runs[0]) else values


def _won_on_average(sides: Sequence[_Pair]) -> tuple[int, int]:
    seeds = [_seeds(max(side, key=len)) for side in sides]
    matched = [_matched(*side) for side in sides]
    if any(of != seeds[0] for of in seeds) or not all(matched):
        return 0, 0
    gains = [[x.value - y.value for x, y in pairs or ()] for pairs in matched]
    return sum(sum(of_seed) > 0 for of_seed in zip(*gains, strict=True)), len(seeds[0])
