"""Runs side by side: differences to a baseline with tests, tables of them, the papers' values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from pgra.config import config_root, read_yaml
from pgra.core import Json
from pgra.errors import ConfigError, unknown_name
from pgra.report.metrics import (
    Gaps,
    PairedDifference,
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
from pgra.report.results import (
    SYSTEMS,
    TASKS,
    Group,
    Run,
    check_comparable,
    in_order,
    is_unseeded,
    row_names,
    text_gaps,
)
from pgra.report.tables import Cell, Table

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


# The papers' own tables (`configs/reference/`), to print beside ours.


AVERAGE = "average"
METRIC = "metric"
_INDEX = ("same_as", "notes")
_PAPERS = ("pgra", "kate")


@dataclass(frozen=True)
class Note:
    """What a reader of a table must know.

    Attributes:
        text: In a sentence or two.
        task: It concerns this task only; None for all.
    """

    text: str
    task: str | None = None


@dataclass(frozen=True)
class ReferenceTable:
    """One table of the paper.

    Attributes:
        name: Such as "T2a".
        title: What it is, and under which setting.
        columns: Tasks, and "average" where it is printed.
        rows: Values as printed (in hundredths), by row, in the columns' order.
        match: Of a row, which run it stands beside: values by argument, and "system".
        notes: Artefacts and settings.
        measure: What the values are: "metric", or another word where they are not the tasks'
            metrics.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Mapping[str, Sequence[float]]
    match: Mapping[str, Mapping[str, Json]]
    notes: Sequence[Note]
    measure: str = METRIC

    def value(self, row: str, column: str) -> float | None:
        """Give a printed value; None where the paper has none."""
        if column not in self.columns:
            return None
        return self.rows[row][self.columns.index(column)]

    def average(self, row: str, tasks: Sequence[str]) -> float | None:
        """Give the mean over some tasks: as printed for all of the table's, else of its cells.

        Args:
            row: Of the table.
            tasks: Which; None is given if the paper lacks one of them.
        """
        own = {column for column in self.columns if column != AVERAGE}
        if set(tasks) == own and AVERAGE in self.columns:
            return self.value(row, AVERAGE)
        if not tasks or not own.issuperset(tasks):
            return None
        return sum(self.value(row, task) or 0.0 for task in tasks) / len(tasks)

    def find_row(self, run: Run) -> str | None:
        """Give the row that stands beside a run: all its names match, and it has most of them."""
        # What decided is told by the run: `--num_evidence 0` is plain, whatever --system says.
        return self.find_row_of({**_settings(run), "system": run.system})

    def find_row_of(self, known: Mapping[str, Any]) -> str | None:
        """Give the row that stands beside a run with these arguments and this "system"."""
        fits = [
            (len(wanted), row)
            for row, wanted in self.match.items()
            if all(name in known and known[name] == value for name, value in wanted.items())
        ]
        return max(fits, key=lambda fit: fit[0])[1] if fits else None

    def told_of(self, tasks: Sequence[str]) -> list[str]:
        """Give the notes that concern some tasks."""
        return [note.text for note in self.notes if note.task is None or note.task in tasks]


def _settings(run: Run) -> dict[str, Any]:
    sections = [values for values in run.arguments.values() if isinstance(values, Mapping)]
    return {name: value for section in sections for name, value in section.items()}


@cache
def load_references() -> Mapping[str, ReferenceTable]:
    """Read all tables, by name; a figure that shows a table's values is another name of it.

    Raises:
        ConfigError: If the YAML is damaged.
    """
    tables: dict[str, ReferenceTable] = {}
    for paper in _PAPERS:
        tables |= _read_paper(config_root() / "reference" / f"{paper}.yaml")
    return tables


def _read_paper(path: Path) -> dict[str, ReferenceTable]:
    values = read_yaml(path)
    try:
        notes = {name: Note(**note) for name, note in values["notes"].items()}
        tables = {
            name: _read_table(name, table, notes)
            for name, table in values.items()
            if name not in _INDEX
        }
        aliases = {name: tables[other] for name, other in values["same_as"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged ({error}): restore it") from None
    return {**tables, **aliases}


def load_reference(name: str) -> ReferenceTable:
    """Read one of the papers' tables.

    Raises:
        ConfigError: If there is none of this name.
    """
    tables = load_references()
    if name not in tables:
        raise ConfigError(unknown_name("reference", name, tables))
    return tables[name]


def _read_table(name: str, values: Mapping[str, Any], notes: Mapping[str, Note]) -> ReferenceTable:
    columns = list(values["columns"])
    rows = {str(row): [float(cell) for cell in cells] for row, cells in values["rows"].items()}
    for row, cells in rows.items():
        if len(cells) != len(columns):
            raise ValueError(f"{name}, row {row}: {len(cells)} values, {len(columns)} columns")
    match = dict(values.get("match", {}))
    if not match.keys() <= rows.keys():
        raise ValueError(f"{name} matches rows it does not have")
    return ReferenceTable(
        name,
        str(values["title"]),
        columns,
        rows,
        match,
        [notes[note] for note in values.get("notes", ())],
        str(values.get("measure", METRIC)),
    )


# A study as tables: one to look at, one with every test, and one for further work.


MISSING = "missing"
_NOTHING = Cell("")


def results_table(study: Study, reference: ReferenceTable | None = None) -> Table:
    """Give rows by tasks: mean, spread over seeds, and the paper's value beside it.

    Args:
        study: The runs.
        reference: The paper's table; None leaves its columns out.

    Raises:
        ConfigError: If the paper's table holds no results of tasks.
    """
    _check_reference(reference)
    columns = [_head(study)]
    for column in columns_of(study):
        columns += [
            column,
            *([f"{column} (paper)"] if has_paper(reference, study, column) else []),
        ]
    rows = []
    for row in study.rows:
        cells = [Cell(row)]
        for column in columns_of(study):
            cells.append(_value_cell(study, row, column))
            if has_paper(reference, study, column):
                cells.append(paper_cell(study, reference, row, column))
        rows.append(cells)
    return Table(study.group.title, columns, rows, _notes(study, reference))


def detail_table(study: Study, reference: ReferenceTable | None = None) -> Table:
    """Give every value with its interval, and its difference to the baseline with all tests.

    Args:
        study: The runs.
        reference: The paper's table, whose own difference is printed too.
    """
    is_beside = any(has_paper(reference, study, column) for column in columns_of(study))
    columns = [_head(study), "task", "value", "sd", "95 % interval", "over"]
    if study.comparisons:
        columns += ["difference", "its 95 % interval", "p", "McNemar p", "Holm p"]
        columns += ["seeds better", "seeds p", *(["paper's difference"] if is_beside else [])]
    rows = []
    for row in study.rows:
        for column in columns_of(study):
            cells = [Cell(row), Cell(column), *_interval_cells(result_of(study, row, column))]
            if study.comparisons:
                cells += _test_cells(comparison_of(study, row, column))
                cells += [_paper_gap(study, reference, row, column)] if is_beside else []
            rows.append(cells)
    against = f", and its difference to {study.baseline}" if study.comparisons else ""
    title = f"{study.group.title}: every value{against}"
    return Table(title, columns, rows, _detail_notes(study))


def summarise(study: Study, reference: ReferenceTable | None) -> Sequence[Table]:
    """Give the tables for people: results, then every value with its interval and tests."""
    return [results_table(study, reference), detail_table(study, reference)]


def paper_value(
    study: Study, reference: ReferenceTable | None, row: str, column: str
) -> float | None:
    """Give what the paper prints for a row's runs, in hundredths; None where it prints nothing.

    Args:
        study: The runs.
        reference: The paper's table; None gives None.
        row: Of the study.
        column: A task, or "average": over the study's tasks.
    """
    run = study.first_run(row)
    place = reference.find_row(run) if reference is not None and run is not None else None
    if reference is None or place is None:
        return None
    if column == AVERAGE:
        return reference.average(place, study.tasks)
    return reference.value(place, column)


def has_paper(reference: ReferenceTable | None, study: Study, column: str) -> bool:
    """Say whether the paper prints a value for any row of a column."""
    return any(paper_value(study, reference, row, column) is not None for row in study.rows)


def _check_reference(reference: ReferenceTable | None) -> None:
    if reference is not None and reference.measure != METRIC:
        raise ConfigError(
            f"reference {reference.name} ({reference.title}) holds {reference.measure}, not the "
            "tasks' metrics: choose another --reference"
        )


def _head(study: Study) -> str:
    return "point" if study.group.points else "system"


def columns_of(study: Study) -> list[str]:
    """Give the tasks, and "average" where there are several."""
    return [*study.tasks, *([AVERAGE] if study.has_average else [])]


def result_of(study: Study, row: str, column: str) -> Result | None:
    """Give what a row has in a column; None where it is missing."""
    if column == AVERAGE:
        return study.averages.get(row)
    return study.results.get((row, column))


def comparison_of(study: Study, row: str, column: str) -> Comparison | None:
    """Give a row's comparison with the baseline in a column; None where there is none."""
    if column == AVERAGE:
        return study.average_comparisons.get(row)
    return study.comparisons.get((row, column))


def _value_cell(study: Study, row: str, column: str) -> Cell:
    result = result_of(study, row, column)
    if result is None:
        return Cell(MISSING)
    text = _percent(result.spread.mean)
    if result.spread.sd is not None:
        text += f" ± {_percent(result.spread.sd)}"
    if result.missing:
        text += f" ({result.spread.n} of {result.spread.n + len(result.missing)} seeds)"
    found = comparison_of(study, row, column)
    return Cell(text, is_bold=found is not None and found.is_win, value=100 * result.spread.mean)


def paper_cell(study: Study, reference: ReferenceTable | None, row: str, column: str) -> Cell:
    """Give the paper's value as a cell; an empty one where it has none."""
    value = paper_value(study, reference, row, column)
    return _NOTHING if value is None else Cell(f"{value:.1f}", value=value)


def _paper_gap(study: Study, reference: ReferenceTable | None, row: str, column: str) -> Cell:
    own = paper_value(study, reference, row, column)
    base = paper_value(study, reference, study.baseline or "", column)
    if own is None or base is None or row == study.baseline:
        return _NOTHING
    return Cell(f"{own - base:+.1f}", value=own - base)


def _interval_cells(result: Result | None) -> list[Cell]:
    if result is None:
        return [Cell(MISSING), *(_NOTHING,) * 3]
    spread = result.spread
    ends = result.interval
    return [
        Cell(_percent(spread.mean)),
        _NOTHING if spread.sd is None else Cell(_percent(spread.sd)),
        _NOTHING if ends is None else Cell(f"{_percent(ends[0])} to {_percent(ends[1])}"),
        Cell(told_over(result)),
    ]


def _test_cells(found: Comparison | None) -> list[Cell]:
    if found is None:
        return [_NOTHING] * 7
    gap = found.gap
    return [
        Cell(f"{100 * gap.difference:+.1f}", is_bold=found.is_win, value=100 * gap.difference),
        Cell(f"{100 * gap.low:+.1f} to {100 * gap.high:+.1f}"),
        *(_p_cell(p) for p in (gap.p, found.mcnemar, found.holm)),
        Cell(told_seeds(found)),
        _p_cell(found.welch) if found.has_noise else _NOTHING,
    ]


def _p_cell(p: float | None) -> Cell:
    if p is None:
        return _NOTHING
    return Cell("< 0.001" if p < 0.001 else f"{p:.3f}", value=p)


def told_seeds(found: Comparison) -> str:
    """Say in how many shared seeds the row is better."""
    return f"{found.better} of {found.shared}" if found.shared else "none shared"


def told_over(result: Result) -> str:
    """Say what an interval is over."""
    if result.interval is None:
        return ""
    return "seeds" if result.is_over_seeds else "examples"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _notes(study: Study, reference: ReferenceTable | None) -> list[str]:
    """Say what the numbers are, what stands out and why, and what a reader must know."""
    metrics = {run.task: run.metric for run in study.group.runs}
    named = ", ".join(
        task if task.endswith(metric) else f"{task} {metric}" for task, metric in metrics.items()
    )
    notes = [f"In hundredths: {named}."]
    if any(result.spread.sd is not None for result in study.results.values()):
        notes.append("± is the standard deviation over seeds.")
    if len(set(metrics.values())) > 1 and study.has_average:
        notes.append("The average mixes metrics, as the paper's does.")
    notes.append(_bold_note(study))
    if study.group.missing:
        notes.append(
            f"Missing: {len({one.folder for one in study.group.missing})} run(s) of the grid."
        )
    if reference is not None:
        notes += _paper_notes(study, reference)
    told = [note for run in study.group.runs for note in run.metrics.get("notes", ())]
    return [*notes, *dict.fromkeys(str(note) for note in told)]


def _paper_notes(study: Study, reference: ReferenceTable) -> list[str]:
    if not any(has_paper(reference, study, column) for column in columns_of(study)):
        return [f"The paper has no value for these rows and tasks ({reference.title})."]
    return [f"Paper: {reference.title}.", *reference.told_of(study.tasks)]


def _bold_note(study: Study) -> str:
    if study.baseline is None:
        return "No baseline, so nothing is tested and nothing stands out."
    return (
        f"Standing out (bold, or *): better than {study.baseline} by more than noise, that is by "
        f"a paired test over the examples (p at most {LEVEL} after Holm over the tasks; the "
        "average by itself), in each seed that both have, and by Welch's t-test over seeds (p at "
        f"most {LEVEL}; one seed tells nothing of the noise of training)."
    )


def _detail_notes(study: Study) -> list[str]:
    notes = [
        "In hundredths. Intervals are 95 %: over seeds by Student's t; of one seed, or of equal "
        "ones, over the test examples by the bootstrap."
    ]
    if not study.comparisons:
        return notes
    return [
        *notes,
        "Differences are of means over the seeds that both have; their interval is of a paired "
        "bootstrap over the test examples, given the readers as they were trained, and p is the "
        "larger of the bootstrap's and of a test by swapping the sides of the examples that "
        f"differ. Holm is over the {len(study.tasks)} task(s) of a row.",
        "McNemar's test is exact; of several seeds it is the lower middle p, times seeds over its "
        "place (Rueger 1978).",
    ]


# A study with all its numbers, a row for each row and task: for further work, as CSV.


def long_table(study: Study, reference: ReferenceTable | None = None) -> Table:
    """Give a row for each row and task with all numbers, unrounded in CSV.

    Args:
        study: The runs.
        reference: The paper's table.
    """
    columns = [
        *(
            "table",
            "row",
            "task",
            "metric",
            "n",
            "seeds",
            "missing_seeds",
            "value",
            "sd",
            "low",
            "high",
        ),
        *("interval_over", "baseline", "difference", "difference_low", "difference_high"),
        *("p", "p_mcnemar", "p_holm", "seeds_better", "p_welch", "paper"),
    ]
    rows = [
        [
            *(Cell(study.group.title), Cell(row), Cell(column)),
            *_long_result(study, row, column),
            *_long_tests(study, row, column),
            paper_cell(study, reference, row, column),
        ]
        for row in study.rows
        for column in columns_of(study)
    ]
    return Table(study.group.title, columns, rows)


def _long_result(study: Study, row: str, column: str) -> list[Cell]:
    result = result_of(study, row, column)
    if result is None:
        return [*(Cell(""),) * 4, Cell(MISSING), *(Cell(""),) * 4]
    run = result.runs[0] if result.runs else None
    low, high = result.interval or (None, None)
    numbers = (result.spread.mean, result.spread.sd, low, high)
    return [
        Cell(run.metric if run else ""),
        Cell(str(run.metrics["n"]) if run else ""),
        Cell(" ".join(str(run.seed) for run in result.runs) or str(result.spread.n)),
        Cell(" ".join(str(seed) for seed in result.missing)),
        *(_number(None if value is None else 100 * value) for value in numbers),
        Cell(told_over(result)),
    ]


def _long_tests(study: Study, row: str, column: str) -> list[Cell]:
    found = comparison_of(study, row, column)
    if found is None:
        return [Cell("")] * 9
    gap = found.gap
    return [
        Cell(study.baseline or ""),
        *(_number(100 * value) for value in (gap.difference, gap.low, gap.high)),
        *(_number(p) for p in (gap.p, found.mcnemar, found.holm)),
        Cell(told_seeds(found)),
        _number(found.welch),
    ]


def _number(value: float | None) -> Cell:
    return _NOTHING if value is None else Cell(f"{value:.4g}", value=value)
