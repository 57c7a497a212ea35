"""Runs side by side: differences to a baseline with tests, and the papers' values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from pgra.config import choose, config_root, read_yaml
from pgra.report import metrics
from pgra.report.results import (
    METHOD_ORDER,
    TASK_ORDER,
    FinishedRun,
    Group,
    check_comparable,
    in_order,
    row_names,
)
from pgra.types import Json

LEVEL = 0.05
AVERAGE = "average"
METRIC = "metric"
_SEED = 0
_LAST_DIGIT = 1e-12
_USUAL_BASELINES = ("fid", "plain")
Column = tuple[str, str]  # a row, and a task or `AVERAGE`


# The papers' own tables (`configs/reference/`), to print beside ours.


@dataclass(frozen=True)
class ReferenceTable:
    """One table of a paper.

    Attributes:
        name: Such as "T2a".
        columns: Tasks, and "average" where it is printed.
        rows: Values as printed (in percent), by row and column; some rows lack some.
        match: By row the run that it is compared with: values by argument, and "method".
        notes: A "text" each, and the "task" that it concerns where it is one.
        measure: "metric" where the values are the tasks' metrics, else another word.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Mapping[str, Mapping[str, float]]
    match: Mapping[str, Mapping[str, Json]] = field(default_factory=dict)
    notes: Sequence[Mapping[str, str]] = ()
    measure: str = METRIC

    def find_row(self, run: FinishedRun) -> str | None:
        """Return the row that matches a run, by the most arguments; None if none does."""
        # The run knows its method: `--num_evidence 0` is plain, whatever --method says.
        known = {**run.values, "method": run.method}
        fits = [row for row, wanted in self.match.items() if wanted.items() <= known.items()]
        return max(fits, key=lambda row: len(self.match[row]), default=None)

    def beside(
        self, run: FinishedRun, tasks: Sequence[str], columns: Sequence[str]
    ) -> dict[str, float]:
        """Return the values printed for a run, by column: tasks, or the `AVERAGE` of just these."""
        row = self.find_row(run)
        is_whole = {*tasks, AVERAGE} == {*self.columns}
        wanted = [column for column in columns if column != AVERAGE or is_whole]
        printed = self.rows[row] if row is not None else {}
        return {column: printed[column] for column in wanted if column in printed}

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
            own = {**table, "notes": [notes[note] for note in table.get("notes", ())]}
            own["rows"] = {
                row: {
                    column: float(value)
                    for column, value in zip(table["columns"], cells, strict=True)
                    if value is not None  # not every row has all
                }
                for row, cells in table["rows"].items()
            }
            tables[name] = ReferenceTable(name, **own)
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
        interval: 95 %: over seeds by Student's t; of one seed, or of equal ones, over examples by
            the bootstrap.
    """

    runs: Sequence[FinishedRun]
    missing: Sequence[int]
    values: Sequence[float]
    interval: tuple[float, float]

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

    gap: metrics.Difference
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
        ConfigError: If the baseline is no row.
    """
    check_comparable(group)
    names = row_names(group)
    runs_of: dict[Column, list[FinishedRun]] = {}
    for name, run in sorted(zip(names, group.runs, strict=True), key=lambda pair: pair[1].seed):
        runs_of.setdefault((name, run.task), []).append(run)
    # The measure of written answers follows the task's name.
    known = {run.task: run.task.partition(" ")[0] for run in group.runs}
    gone = {one.task for one in group.missing} - {*known.values()}
    tasks = in_order([*known, *gone], TASK_ORDER)
    by_measure: dict[str, list[str]] = {}
    for task in tasks:
        by_measure.setdefault(task.partition(" ")[2], []).append(task)
    rows = list(group.points)
    if not rows:
        order = in_order([run.method for run in group.runs], METHOD_ORDER)
        pairs = sorted(zip(names, group.runs, strict=True), key=lambda p: order.index(p[1].method))
        rows = list(dict.fromkeys(name for name, _ in pairs))
    results: dict[Column, Result] = {}
    for (row, task), runs in runs_of.items():
        missing = [m.seed for m in group.missing if (m.name, m.task) == (row, known[task])]
        values = [run.value for run in runs]
        results[row, task] = _result(runs, missing, values, runs[0].interval)
    base = _choose_baseline(group, rows, baseline)
    comparisons: dict[Column, Comparison] = {}
    for row in rows:
        for measure, family in by_measure.items():
            average = _average_column(measure, family, group.runs)
            if base not in (None, row):
                comparisons |= _compare_row(results, family, row, str(base), average=average)
            whole = [results[row, task] for task in family if (row, task) in results]
            if average is not None and len(whole) == len(family):
                results[row, average] = _average(whole)
    columns = list(dict.fromkeys([*tasks, *(column for _, column in results)]))
    paper: dict[Column, float] = {}
    for (row, _), runs in reversed(runs_of.items()):
        if reference is not None and reference.measure == METRIC:
            printed = reference.beside(runs[0], by_measure.get("", tasks), columns)
            paper |= {(row, column): value for column, value in printed.items()}
    return Study(group, rows, tasks, columns, results, base, comparisons, reference, paper)


def _average_column(measure: str, tasks: Sequence[str], runs: Sequence[FinishedRun]) -> str | None:
    """Return the column of a mean over tasks; None where it makes no sense."""
    has_labels = all(run.labels for run in runs if run.task in tasks)
    return f"{AVERAGE} {measure}".rstrip() if has_labels and len(tasks) > 1 else None


def _result(
    runs: Sequence[FinishedRun],
    missing: Sequence[int],
    values: Sequence[float],
    over_examples: tuple[float, float],
) -> Result:
    # Seeds that are all equal would have an interval of no width.
    is_spread = max(values) - min(values) >= _LAST_DIGIT
    return Result(runs, missing, values, metrics.t_interval(values) if is_spread else over_examples)


def _average(results: Sequence[Result]) -> Result:
    """Return the mean over tasks: by seed if all tasks have the same (the paper's Table 8)."""
    missing = sorted({seed for result in results for seed in result.missing})
    values = _average_by_seed([result.runs for result in results])
    draws = [
        metrics.bootstrap([run.outcomes for run in result.runs], seed=_SEED + number).mean(axis=0)
        for number, result in enumerate(results)
    ]
    interval = metrics.interval_95(np.mean(draws, axis=0))
    overall = float(np.mean([result.mean for result in results]))
    return _result((), missing, list(values) or [overall], interval)


def _average_by_seed(tasks: Sequence[Sequence[FinishedRun]]) -> metrics.Values:
    """Return the mean over tasks of each seed; nothing if their seeds differ."""
    if len({tuple(run.seed for run in runs) for runs in tasks}) > 1:
        return np.zeros(0)
    return np.asarray(np.mean([_values(runs) for runs in tasks], axis=0), np.float64)


def _values(runs: Sequence[FinishedRun]) -> metrics.Values:
    return np.array([run.value for run in runs])


def _choose_baseline(group: Group, rows: Sequence[str], asked: str | None) -> str | None:
    if asked is not None:
        choose("baseline", asked, rows)
        return asked
    if group.baseline is not None:
        wanted = group.baseline.items()
        fits = (name for name, values in group.points.items() if wanted <= values.items())
        return next(fits, None)
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
    pairs = {
        task: sides
        for task in tasks
        if (row, task) in results and (baseline, task) in results
        if all(sides := _shared(results[row, task].runs, results[baseline, task].runs))
    }
    # Another stream for each task, so that an average adds up independent resamples.
    gaps = [
        metrics.compare_methods(
            *([run.outcomes for run in side] for side in sides), seed=tasks.index(task)
        )
        for task, sides in pairs.items()
    ]
    adjusted = metrics.holm([gap.p for gap in gaps])
    is_seeded = any(side[0].is_seeded for sides in pairs.values() for side in sides)
    found = {
        (row, task): _compare(gap, p, *map(_values, sides), is_seeded=is_seeded)
        for (task, sides), gap, p in zip(pairs.items(), gaps, adjusted, strict=True)
    }
    if average is not None and len(pairs) == len(tasks):
        overall = metrics.average_differences(gaps)
        means = map(_average_by_seed, zip(*pairs.values(), strict=True))
        found[row, average] = _compare(overall, overall.p, *means, is_seeded=is_seeded)
    return found


def _shared(
    a: Sequence[FinishedRun], b: Sequence[FinishedRun]
) -> tuple[Sequence[FinishedRun], Sequence[FinishedRun]]:
    """Return the runs of the seeds that both have; what no seed decides stands beside them all."""
    if not (a[0].is_seeded and b[0].is_seeded):
        first, second = (side if side[0].is_seeded else side[:1] for side in (a, b))
        return first, second
    seeds = {run.seed for run in a} & {run.seed for run in b}
    return [run for run in a if run.seed in seeds], [run for run in b if run.seed in seeds]


def _compare(
    gap: metrics.Difference,
    p: float,
    ours: metrics.Values,
    theirs: metrics.Values,
    *,
    is_seeded: bool,
) -> Comparison:
    a, b = np.broadcast_arrays(ours, theirs)
    seeds_p = metrics.welch(a, b) if is_seeded else 0.0
    return Comparison(gap, p, int((a > b).sum()), len(a), seeds_p)
