"""Runs side by side: differences to a baseline with tests, and the papers' values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any

import numpy as np

from pgra.arrays import Values
from pgra.config import choose, config_root, read_yaml
from pgra.report.metrics import (
    Difference,
    average_differences,
    bootstrap,
    compare_methods,
    holm,
    interval_95,
    t_interval,
    welch,
)
from pgra.report.results import (
    METHOD_ORDER,
    TASK_ORDER,
    FinishedRun,
    Group,
    check_comparable,
    in_order,
    row_names,
)
from pgra.types import Fields

LEVEL = 0.05
AVERAGE = "average"
METRIC = "metric"
_LAST_DIGIT = 1e-12
_USUAL_BASELINES = ("fid", "plain")
Column = tuple[str, str]  # a row, and a task or `AVERAGE`


# The papers' own tables (`configs/reference/`), to print beside ours.


@dataclass(frozen=True)
class ReferenceTable:
    """One table of a paper.

    Attributes:
        columns: Tasks, and "average" where it is printed.
        rows: Values as printed (in percent), by row and column; some rows lack some.
        match: By row the run that it is compared with: values by argument, and "method".
        notes: A "text" each, and the "task" that it concerns where it is one.
        measure: "metric" where the values are the tasks' metrics, else another word.
    """

    title: str
    columns: Sequence[str]
    rows: Mapping[str, Mapping[str, float]]
    match: Mapping[str, Fields] = field(default_factory=dict)
    notes: Sequence[Mapping[str, str]] = ()
    measure: str = METRIC

    def find_row(self, run: FinishedRun) -> str | None:
        """Return the row that matches a run, by the most arguments; None if none does."""
        # The run knows its method: `--num_evidence 0` is plain, whatever --method says.
        values = {**run.values, "method": run.method}
        fits = [row for row, match in self.match.items() if match.items() <= values.items()]
        return max(fits, key=lambda row: len(self.match[row]), default=None)

    def beside(
        self, run: FinishedRun, tasks: Sequence[str], columns: Sequence[str]
    ) -> dict[str, float]:
        """Return the values printed for a run, by column: tasks, or the `AVERAGE` of just these."""
        row = self.find_row(run)
        printed = dict(self.rows[row]) if row is not None else {}
        if {*tasks, AVERAGE} != {*self.columns}:
            printed.pop(AVERAGE, None)
        return {column: printed[column] for column in columns if column in printed}

    def notes_on(self, tasks: Sequence[str]) -> list[str]:
        return [note["text"] for note in self.notes if note.get("task") in (None, *tasks)]


@cache
def load_references() -> Mapping[str, ReferenceTable]:
    """Read all tables, by name."""
    tables: dict[str, ReferenceTable] = {}
    for paper in ("pgra", "kate"):
        values = read_yaml(config_root() / "reference" / f"{paper}.yaml")
        notes = values.pop("notes")
        for name, table in values.items():
            rows = {}
            for row, cells in table["rows"].items():
                pairs = zip(table["columns"], cells, strict=True)
                rows[row] = {column: float(v) for column, v in pairs if v is not None}
            table_notes = [notes[note] for note in table.get("notes", ())]
            tables[name] = ReferenceTable(**{**table, "rows": rows, "notes": table_notes})
    return tables


def load_reference(name: str) -> ReferenceTable:
    """Read one of the papers' tables; a ConfigError if there is none of this name."""
    choose("reference", name, load_references())
    return load_references()[name]


@dataclass(frozen=True)
class Result:
    """One row on one task, or on average (without runs).

    Attributes:
        runs: By seed, rising.
        missing: Seeds that should be there and are not.
        values: The metric, by seed.
        over_examples: 95 % interval over examples, by the bootstrap.
    """

    runs: Sequence[FinishedRun]
    missing: Sequence[int]
    values: Sequence[float]
    over_examples: tuple[float, float]

    @property
    def interval(self) -> tuple[float, float]:
        """95 %: over seeds by Student's t; of one seed, or of equal ones, over examples."""
        # Seeds that are all equal would have an interval of no width.
        is_spread = max(self.values) - min(self.values) >= _LAST_DIGIT
        return t_interval(self.values) if is_spread else self.over_examples

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def sd(self) -> float | None:
        """Sample standard deviation over seeds; None of one."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Comparison:
    """A row against the baseline on one task (or on average), over the seeds that both have.

    Attributes:
        gap: Difference of the means over seeds, over resamples of the examples.
        p: The gap's, adjusted over the row's tasks (Holm); of an average as it is. Tasks with a
            measure in their name ("webquestions hit@1") are adjusted apart, each measure by itself.
        better: In how many of the `shared` seeds the row is better.
        seeds_p: Of Welch's test over seeds; None where a trained side has one seed only, 0 where
            no seed decides either side.
    """

    gap: Difference
    p: float
    better: int
    shared: int
    seeds_p: float | None

    @property
    def verdict(self) -> str:
        """The difference in a word: "better" or "worse" if it is beyond examples' and seeds' noise.

        With one seed of a trained method it is neither: the noise of training is unknown.
        """
        if self.p > LEVEL:
            return "within noise"
        if self.seeds_p is None:
            return "only one seed"
        is_higher = self.gap.difference > 0
        if self.better != (self.shared if is_higher else 0) or self.seeds_p > LEVEL:
            return "seeds disagree"
        return "better" if is_higher else "worse"


@dataclass(frozen=True)
class Study:
    """All that a table of results shows.

    Attributes:
        columns: The tasks, and for each measure the `AVERAGE` of its tasks, where it makes sense
            and a row has them all.
        results: By row and column; absent where missing.
        baseline: The row to compare with; None if there is none.
        comparisons: By row and column.
        paper: Values of the paper's table, `reference`, in percent, by row and column.
    """

    group: Group
    rows: Sequence[str]
    tasks: Sequence[str]
    columns: Sequence[str]
    results: Mapping[Column, Result]
    baseline: str | None
    comparisons: Mapping[Column, Comparison]
    reference: ReferenceTable | None
    paper: Mapping[Column, float]


def compare_runs(
    group: Group, *, baseline: str | None = None, reference: ReferenceTable | None = None
) -> Study:
    """Compare runs that belong together with a baseline, and with a paper's table (`reference`).

    The baseline is a row; None takes the grid's, else fid, else plain.

    Raises:
        ArtifactError: If they cannot be compared.
        ConfigError: If the baseline is not a row.
    """
    check_comparable(group)
    named_runs = list(zip(row_names(group), group.runs, strict=True))
    runs_of: dict[Column, list[FinishedRun]] = {}
    for row, run in sorted(named_runs, key=lambda pair: pair[1].seed):
        runs_of.setdefault((row, run.task), []).append(run)
    # The measure of written answers follows the task's name.
    without_measure = {run.task: run.task.partition(" ")[0] for run in group.runs}
    unfinished = {missing.task for missing in group.missing} - {*without_measure.values()}
    tasks = in_order([*without_measure, *unfinished], TASK_ORDER)
    by_measure: dict[str, list[str]] = {}
    for task in tasks:
        by_measure.setdefault(task.partition(" ")[2], []).append(task)
    # A metric of all texts together has no mean over tasks.
    sums = {run.task for run in group.runs if not run.labels and run.outcomes.parts is None}
    rows = list(group.points)
    if not rows:
        order = in_order([run.method for run in group.runs], METHOD_ORDER)
        pairs = sorted(named_runs, key=lambda pair: order.index(pair[1].method))
        rows = list(dict.fromkeys(row for row, _ in pairs))
    results: dict[Column, Result] = {}
    for (row, task), runs in runs_of.items():
        point = (row, without_measure[task])
        seeds = [missing.seed for missing in group.missing if (missing.name, missing.task) == point]
        results[row, task] = Result(runs, seeds, [run.value for run in runs], runs[0].interval)
    base = _choose_baseline(group, rows, baseline)
    comparisons: dict[Column, Comparison] = {}
    for row in rows:
        for measure, family in by_measure.items():
            average = None  # where a mean over tasks makes no sense
            if len(family) > 1 and sums.isdisjoint(family):
                average = f"{AVERAGE} {measure}".rstrip()
            if base not in (None, row):
                comparisons |= _compare_row(results, family, row, str(base), average=average)
            complete = [results[row, task] for task in family if (row, task) in results]
            if average is not None and len(complete) == len(family):
                results[row, average] = _average(complete)
    columns = list(dict.fromkeys([*tasks, *(column for _, column in results)]))
    paper: dict[Column, float] = {}
    if reference is not None and reference.measure == METRIC:
        for (row, _), runs in reversed(runs_of.items()):
            printed = reference.beside(runs[0], by_measure.get("", tasks), columns)
            paper |= {(row, column): value for column, value in printed.items()}
    return Study(group, rows, tasks, columns, results, base, comparisons, reference, paper)


def _average(results: Sequence[Result]) -> Result:
    """Return the mean over tasks: by seed if all tasks have the same (the paper's Table 8)."""
    missing = sorted(set(chain.from_iterable(result.missing for result in results)))
    values = _average_by_seed([result.runs for result in results])
    draws = [
        bootstrap([run.outcomes for run in result.runs], seed=number).mean(axis=0)
        for number, result in enumerate(results)
    ]
    interval = interval_95(np.mean(draws, axis=0))
    overall = float(np.mean([result.mean for result in results]))
    return Result((), missing, list(values) or [overall], interval)


def _average_by_seed(tasks: Sequence[Sequence[FinishedRun]]) -> Values:
    """Return the mean over tasks of each seed; nothing if their seeds differ."""
    if len({tuple(run.seed for run in runs) for runs in tasks}) > 1:
        return np.zeros(0)
    values = [[run.value for run in runs] for runs in tasks]
    return np.asarray(np.mean(values, axis=0), np.float64)


def _choose_baseline(group: Group, rows: Sequence[str], name: str | None) -> str | None:
    if name is not None:
        choose("baseline", name, rows)
        return name
    if group.baseline is not None:
        values = group.baseline.items()
        return next((row for row, point in group.points.items() if values <= point.items()), None)
    return next((name for name in _USUAL_BASELINES if name in rows), None)


def _compare_row(
    results: Mapping[Column, Result],
    tasks: Sequence[str],
    row: str,
    baseline: str,
    *,
    average: str | None,
) -> dict[Column, Comparison]:
    """Compare a row with the baseline on each task where they share a seed, and on average.

    `average` is that column; None where there is no mean over the tasks.
    """
    sides: dict[str, list[Sequence[FinishedRun]]] = {}
    for task in tasks:
        if (row, task) in results and (baseline, task) in results:
            shared = _shared(results[row, task].runs, results[baseline, task].runs)
            if all(shared):
                sides[task] = shared
    gaps = []
    for task, (ours, theirs) in sides.items():
        seed = tasks.index(task)  # another for each, so that an average adds independent resamples
        outcomes = [run.outcomes for run in ours]
        gaps.append(compare_methods(outcomes, [run.outcomes for run in theirs], seed=seed))
    adjusted = holm([gap.p for gap in gaps])
    is_seeded = any(runs[0].is_seeded for runs in chain.from_iterable(sides.values()))
    comparisons = {}
    for (task, shared), gap, p in zip(sides.items(), gaps, adjusted, strict=True):
        values = [[run.value for run in runs] for runs in shared]
        comparisons[row, task] = _compare(gap, p, values, is_seeded=is_seeded)
    if average is not None and len(sides) == len(tasks):
        overall = average_differences(gaps)
        means = [_average_by_seed(runs) for runs in zip(*sides.values(), strict=True)]
        comparisons[row, average] = _compare(overall, overall.p, means, is_seeded=is_seeded)
    return comparisons


def _shared(a: Sequence[FinishedRun], b: Sequence[FinishedRun]) -> list[Sequence[FinishedRun]]:
    """Return the runs of the seeds that both have; a run without a seed is compared with each."""
    if a[0].is_seeded and b[0].is_seeded:
        seeds = {run.seed for run in a} & {run.seed for run in b}
        return [[run for run in side if run.seed in seeds] for side in (a, b)]
    return [side if side[0].is_seeded else side[:1] for side in (a, b)]


def _compare(gap: Difference, p: float, values: Sequence[Any], *, is_seeded: bool) -> Comparison:
    a, b = np.broadcast_arrays(*values)
    seeds_p = welch(a, b) if is_seeded else 0.0
    return Comparison(gap, p, int((a > b).sum()), len(a), seeds_p)
