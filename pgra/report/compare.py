"""Runs side by side: differences to a baseline with tests, the papers' values, tables of both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

import numpy as np

from pgra.config import config_root, read_yaml
from pgra.core import Json
from pgra.errors import ConfigError, unknown_name
from pgra.report.metrics import (
    Difference,
    Spread,
    average_differences,
    bootstrap,
    combine_p,
    compare_methods,
    holm,
    interval_95,
    mcnemar,
    mean_sd_interval,
    welch,
)
from pgra.report.results import (
    METHOD_ORDER,
    TASK_ORDER,
    Group,
    Trial,
    check_comparable,
    in_order,
    row_names,
)
from pgra.report.tables import Cell, Table

LEVEL = 0.05
AVERAGE = "average"
METRIC = "metric"
MISSING = "missing"
_SEED = 0
_LAST_DIGIT = 1e-12
_USUAL_BASELINES = ("fid", "plain")
_PAPERS = ("pgra", "kate")
T = TypeVar("T")
Column = tuple[str, str]  # a row, and a task or `AVERAGE`


# The papers' own tables (`configs/reference/`), to print beside ours.


@dataclass(frozen=True)
class ReferenceTable:
    """One table of a paper.

    Attributes:
        name: Such as "T2a".
        columns: Tasks, and "average" where it is printed.
        rows: Values as printed (in hundredths), by row and column; some rows lack some.
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

    def average(self, row: str, tasks: Sequence[str]) -> float | None:
        """Return the mean over tasks, as printed if for all of them; None if one is missing."""
        cells = self.rows[row]
        if {*tasks, AVERAGE} == {*self.columns}:
            return cells[AVERAGE]
        is_whole = tasks and set(tasks) <= cells.keys()
        return sum(cells[task] for task in tasks) / len(tasks) if is_whole else None

    def find_row(self, run: Trial) -> str | None:
        """Return the row that matches a run, by the most arguments; None if none does."""
        sections = [values for values in run.arguments.values() if isinstance(values, Mapping)]
        known = {name: value for section in sections for name, value in section.items()}
        # The run knows its method: `--num_evidence 0` is plain, whatever --method says.
        known["method"] = run.method
        fits = [row for row, wanted in self.match.items() if wanted.items() <= known.items()]
        return max(fits, key=lambda row: len(self.match[row]), default=None)

    def beside(self, run: Trial, tasks: Sequence[str], columns: Sequence[str]) -> dict[str, float]:
        """Return the values printed for a run, by column: tasks, or their `AVERAGE`."""
        row = self.find_row(run)
        if row is None:
            return {}
        values = {**self.rows[row], AVERAGE: self.average(row, tasks)}
        found = {column: values.get(column) for column in columns}
        return {column: value for column, value in found.items() if value is not None}

    def notes_on(self, tasks: Sequence[str]) -> list[str]:
        return [note["text"] for note in self.notes if note.get("task") in (None, *tasks)]


@cache
def load_references() -> Mapping[str, ReferenceTable]:
    """Read all tables, by name; a figure that shows a table's values is an alias of it."""
    tables: dict[str, ReferenceTable] = {}
    for paper in _PAPERS:
        values = read_yaml(config_root() / "reference" / f"{paper}.yaml")
        notes, aliases = values.pop("notes"), values.pop("same_as")
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
        tables |= {name: tables[other] for name, other in aliases.items()}
    return tables


def load_reference(name: str) -> ReferenceTable:
    """Read one of the papers' tables; a ConfigError if there is none of this name."""
    tables = load_references()
    if name not in tables:
        raise ConfigError(unknown_name("reference", name, tables))
    return tables[name]


@dataclass(frozen=True)
class Result:
    """One row on one task, or on average (without runs).

    Attributes:
        runs: By seed, rising.
        missing: Seeds that should be there and are not.
        spread: Of the metric over seeds.
        interval: 95 %: over seeds by Student's t; of one seed, or of equal ones, over examples by
            the bootstrap; None where there is neither.
    """

    runs: Sequence[Trial]
    missing: Sequence[int]
    spread: Spread
    interval: tuple[float, float] | None
    is_over_seeds: bool


@dataclass(frozen=True)
class Comparison:
    """A row against the baseline on one task (or on average).

    Attributes:
        gap: Difference of the means over seeds, over resamples of the examples.
        mcnemar: p of the exact test; of several seeds combined by `combine_p`; None for an average,
            or where no seed is shared and there are several.
        holm: The gap's p, adjusted over the row's tasks; of an average as it is.
        better: In how many of the `shared` seeds the row is better.
        welch: p of Welch's t-test over seeds; None where a trained side has one seed only.
        has_noise: Whether seeds differ on either side; if not, `welch` is 0 or 1, without meaning.
    """

    gap: Difference
    mcnemar: float | None
    holm: float
    better: int
    shared: int
    welch: float | None
    has_noise: bool

    @property
    def verdict(self) -> str:
        """The difference in a word: "better" or "worse" if it is beyond examples' and seeds' noise.

        With one seed of a trained method it is neither: the noise of training is unknown.
        """
        if self.holm > LEVEL:
            return "within noise"
        if self.welch is None:
            return "only one seed"
        is_higher = self.gap.difference > 0
        agree = self.better == (self.shared if is_higher else 0) and self.gap.difference != 0
        if not agree or self.welch > LEVEL:
            return "seeds disagree"
        return "better" if is_higher else "worse"

    @property
    def is_win(self) -> bool:
        return self.verdict == "better"


@dataclass(frozen=True)
class Study:
    """All that a table of results shows.

    Attributes:
        columns: The tasks, and `AVERAGE` where a mean over them makes sense.
        results: By row and column; absent where missing.
        baseline: The row to compare with; None if there is none.
        comparisons: By row and column.
        paper: Values of the paper's table, `reference`, in hundredths, by row and column.
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
        ConfigError: If the baseline is no row, or the paper's table holds no results of tasks.
    """
    if reference is not None and reference.measure != METRIC:
        raise ConfigError(
            f"reference {reference.name} ({reference.title}) holds {reference.measure}, not the "
            "tasks' metrics: choose another --reference"
        )
    check_comparable(group)
    names = row_names(group)
    known = [run.task for run in group.runs] + [gone.task for gone in group.missing if gone.task]
    tasks = in_order(known, TASK_ORDER)
    has_average = len(tasks) > 1 and all(run.decisions for run in group.runs)
    columns = [*tasks, *([AVERAGE] if has_average else [])]
    rows = list(group.points)
    if not rows:
        order = in_order([run.method for run in group.runs], METHOD_ORDER)
        pairs = sorted(zip(names, group.runs, strict=True), key=lambda p: order.index(p[1].method))
        rows = list(dict.fromkeys(name for name, _ in pairs))
    results: dict[Column, Result] = {}
    for row, task in dict.fromkeys(zip(names, (run.task for run in group.runs), strict=True)):
        named = zip(names, group.runs, strict=True)
        runs = [run for name, run in named if (name, run.task) == (row, task)]
        runs.sort(key=lambda run: run.seed)
        gone = [m.seed for m in group.missing if m.name == row and m.task in (None, task)]
        results[row, task] = _result(runs, gone, [run.value for run in runs], runs[0].interval)
    base = _choose_baseline(group, rows, baseline)
    comparisons: dict[Column, Comparison] = {}
    for row in rows:
        if base not in (None, row):
            comparisons |= _compare_row(results, tasks, row, str(base), has_average=has_average)
        if has_average and all((row, task) in results for task in tasks):
            results[row, AVERAGE] = _average([results[row, task] for task in tasks])
    paper: dict[Column, float] = {}
    for row in rows:
        runs = [run for task in tasks if (row, task) in results for run in results[row, task].runs]
        if reference is not None and runs:
            paper |= {(row, c): v for c, v in reference.beside(runs[0], tasks, columns).items()}
    return Study(group, rows, tasks, columns, results, base, comparisons, reference, paper)


def _result(
    runs: Sequence[Trial],
    missing: Sequence[int],
    values: Sequence[float],
    over_examples: tuple[float, float] | None,
) -> Result:
    spread = mean_sd_interval(values)
    # Seeds that are all equal would have an interval of no width.
    if spread.low is None or spread.high is None or (spread.sd or 0.0) < _LAST_DIGIT:
        return Result(runs, missing, spread, over_examples, is_over_seeds=False)
    return Result(runs, missing, spread, (spread.low, spread.high), is_over_seeds=True)


def _average(results: Sequence[Result]) -> Result:
    """Return the mean over tasks: by seed if all tasks have the same (the paper's Table 8)."""
    missing = sorted({seed for result in results for seed in result.missing})
    sides = [_by_seed(result.runs) for result in results]
    by_seed = _average_by_seed([{s: run.value for s, run in side.items()} for side in sides])
    values = list(by_seed.values()) or [float(np.mean([one.spread.mean for one in results]))]
    draws = [
        bootstrap([run.outcomes for run in result.runs], seed=_SEED + number).mean(axis=0)
        for number, result in enumerate(results)
    ]
    return _result((), missing, values, interval_95(np.mean(draws, axis=0)))


def _choose_baseline(group: Group, rows: Sequence[str], asked: str | None) -> str | None:
    if asked is not None:
        if asked not in rows:
            raise ConfigError(unknown_name("baseline", asked, rows))
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
    has_average: bool,
) -> dict[Column, Comparison]:
    """Compare a row with the baseline on each task that both have, and on average."""
    both = [t for t in tasks if (row, t) in results and (baseline, t) in results]
    gaps, tests, seeds = [], [], []
    for task in both:
        sides = [_by_seed(results[name, task].runs) for name in (row, baseline)]
        pairs = [(_at(sides[0], seed), _at(sides[1], seed)) for seed in _shared(*sides)]
        seeds.append([{seed: run.value for seed, run in side.items()} for side in sides])
        # The seeds that both have; if they share none, all of each.
        paired = [run for pair in pairs for run in pair]
        kept = [[r for r in s.values() if not pairs or any(r is p for p in paired)] for s in sides]
        # Another stream for each task, so that an average adds up independent resamples.
        outcomes = [[run.outcomes for run in side] for side in kept]
        gaps.append(compare_methods(*outcomes, seed=_SEED + tasks.index(task)))
        if len(kept[0]) == len(kept[1]) == 1:
            pairs = [(kept[0][0], kept[1][0])]
        sides_of = [(a.decisions, b.decisions) for a, b in pairs]
        exact = [mcnemar(a.correct, b.correct) for a, b in sides_of if a and b]
        tests.append(combine_p(exact) if exact else None)
    found = {
        (row, task): Comparison(gap, exact, p, *_compare_seeds(*by_seed))
        for task, gap, exact, p, by_seed in zip(
            both, gaps, tests, holm([gap.p for gap in gaps]), seeds, strict=True
        )
    }
    if has_average and len(both) == len(tasks):
        overall = average_differences(gaps)
        average = [_average_by_seed(side) for side in zip(*seeds, strict=True)]
        found[row, AVERAGE] = Comparison(overall, None, overall.p, *_compare_seeds(*average))
    return found


# What no seed decides stands under None, beside each seed of the other.


def _by_seed(runs: Sequence[Trial]) -> dict[int | None, Trial]:
    if len(runs) == 1 and not runs[0].is_seeded:
        return {None: runs[0]}
    return {run.seed: run for run in runs}


def _shared(a: Mapping[int | None, T], b: Mapping[int | None, T]) -> list[int | None]:
    return list(b) if None in a else list(a) if None in b else [seed for seed in a if seed in b]


def _at(side: Mapping[int | None, T], seed: int | None) -> T:
    return side[seed] if seed in side else side[None]


def _average_by_seed(tasks: Sequence[Mapping[int | None, float]]) -> dict[int | None, float]:
    """Return the mean over tasks of each seed; nothing if their seeds differ."""
    if any(values.keys() != tasks[0].keys() for values in tasks):
        return {}
    return {seed: sum(values[seed] for values in tasks) / len(tasks) for seed in tasks[0]}


def _compare_seeds(
    a: Mapping[int | None, float], b: Mapping[int | None, float]
) -> tuple[int, int, float | None, bool]:
    """Return in how many seeds a is better, of how many; Welch's p; whether seeds differ."""
    shared = _shared(a, b)
    better = sum(_at(a, seed) > _at(b, seed) for seed in shared)
    # What has no seeds would come out the same again.
    sides = [[*side.values()] * (2 if None in side else 1) for side in (a, b)]
    has_noise = any(side and max(side) - min(side) >= _LAST_DIGIT for side in sides)
    return better, len(shared), welch(*sides), has_noise


# A study as tables: one to look at, one with every test, and one for further work.


def summarise(study: Study) -> list[Table]:
    """Return the tables for people: results, then every value with its interval and tests."""
    return [results_table(study), detail_table(study)]


def results_table(study: Study) -> Table:
    """Return rows by tasks: mean, spread over seeds, and the paper's value beside it."""
    has_paper = {column for _, column in study.paper}
    columns = [_first_column(study)]
    for column in study.columns:
        columns += [column, *([f"{column} (paper)"] if column in has_paper else [])]
    rows = []
    for row in study.rows:
        cells = [Cell(row)]
        for column in study.columns:
            cells.append(_value_cell(study, row, column))
            if column in has_paper:
                cells.append(Cell.of(study.paper.get((row, column)), ".1f"))
        rows.append(cells)
    return Table(study.group.title, columns, rows, _notes(study))


def _first_column(study: Study) -> str:
    return "point" if study.group.points else "method"


_VALUES = {
    **{"task": "task", "value": "value", "sd": "sd"},
    **{"95 % interval": "low high", "over": "interval_over"},
}
_TESTS = {
    **{"difference": "difference", "its 95 % interval": "difference_low difference_high"},
    **{"p": "p", "McNemar p": "p_mcnemar", "Holm p": "p_holm"},
    **{"seeds better": "seeds_better", "seeds p": "p_welch"},
}


def detail_table(study: Study) -> Table:
    """Return every value with its interval, and its difference to the baseline with all tests."""
    shown = {**_VALUES, **(_TESTS if study.comparisons else {})}
    last = ["paper's difference"] if study.comparisons and study.paper else []
    verdict = ["verdict"] if study.comparisons else []
    rows = []
    for row in study.rows:
        for column in study.columns:
            numbers = _numbers(study, row, column)
            found = study.comparisons.get((row, column))
            if found is not None and not found.has_noise:
                numbers["p_welch"] = None
            is_win = found is not None and found.is_win
            cells = [Cell(row), *(_cell(numbers, n, is_win=is_win) for n in shown.values())]
            ours, base = (study.paper.get((r, column)) for r in (row, study.baseline or ""))
            is_alone = ours is None or base is None or row == study.baseline
            cells += [Cell.of(None if is_alone else ours - base, "+.1f") for _ in last]  # type: ignore[operator]
            said = "baseline" if row == study.baseline else found.verdict if found else ""
            cells += [Cell(said) for _ in verdict]
            rows.append(cells)
    title = f"{study.group.title}: every value"
    notes = [
        "In hundredths. Intervals are 95 %: over seeds by Student's t; of one seed, or of equal "
        "ones, over the test examples by the bootstrap."
    ]
    if study.comparisons:
        title += f", and its difference to {study.baseline}"
        notes += [
            "Differences are of means over the seeds that both have; their interval is of a paired "
            "bootstrap over the test examples, given the readers as they were trained, and p is "
            "the larger of the bootstrap's and of a test by swapping the sides of the examples "
            f"that differ. Holm is over the {len(study.tasks)} task(s) of a row.",
            "McNemar's test is exact; of several seeds it is the lower middle p, times seeds over "
            "its place (Rueger 1978).",
        ]
    return Table(title, [_first_column(study), *shown, *last, *verdict], rows, notes)


def _cell(numbers: Mapping[str, "_Number"], names: str, *, is_win: bool) -> Cell:
    values = [numbers[name] for name in names.split()]
    form = "+.1f" if names.startswith("difference") else ".1f"
    if len(values) == 2:
        return Cell.interval(values, form)
    if names.startswith("p"):
        return Cell.of_p(values[0])
    return Cell.of(values[0], form, is_bold=is_win and names == "difference")


def long_table(study: Study) -> Table:
    """Return a row for each row and task with all numbers, unrounded in CSV."""
    rows = [_numbers(study, row, column) for row in study.rows for column in study.columns]
    cells = [[Cell.of(value, ".4g") for value in row.values()] for row in rows]
    return Table(study.group.title, _LONG, cells)


_Number = float | str | None
_LONG = (
    *("table", "row", "task", "metric", "n", "seeds", "missing_seeds", "value", "sd"),
    *("low", "high", "interval_over", "baseline", "difference", "difference_low"),
    *("difference_high", "p", "p_mcnemar", "p_holm", "seeds_better", "p_welch", "paper"),
)


def _numbers(study: Study, row: str, column: str) -> dict[str, _Number]:
    """Return all numbers of a row and column in hundredths; p-values as they are."""
    result, found = study.results.get((row, column)), study.comparisons.get((row, column))
    numbers: dict[str, _Number] = dict.fromkeys(_LONG)
    numbers |= {"table": study.group.title, "row": row, "task": column, "value": MISSING}
    numbers["paper"] = study.paper.get((row, column))
    if result is not None:
        spread, run = result.spread, result.runs[0] if result.runs else None
        numbers |= {
            "metric": None if run is None else run.metric,
            "n": None if run is None else str(run.metrics["n"]),
            "seeds": " ".join(str(run.seed) for run in result.runs) or str(spread.n),
            "missing_seeds": " ".join(str(seed) for seed in result.missing),
            "value": 100 * spread.mean,
            "sd": None if spread.sd is None else 100 * spread.sd,
        }
        if result.interval is not None:
            numbers |= {"low": 100 * result.interval[0], "high": 100 * result.interval[1]}
            numbers["interval_over"] = "seeds" if result.is_over_seeds else "examples"
    if found is not None:
        numbers |= {
            "baseline": study.baseline,
            "difference": 100 * found.gap.difference,
            "difference_low": 100 * found.gap.low,
            "difference_high": 100 * found.gap.high,
            "p": found.gap.p,
            "p_mcnemar": found.mcnemar,
            "p_holm": found.holm,
            "seeds_better": f"{found.better} of {found.shared}" if found.shared else "none shared",
            "p_welch": found.welch,
        }
    return numbers


def _value_cell(study: Study, row: str, column: str) -> Cell:
    result = study.results.get((row, column))
    if result is None:
        return Cell(MISSING)
    text = f"{100 * result.spread.mean:.1f}"
    if result.spread.sd is not None:
        text += f" ± {100 * result.spread.sd:.1f}"
    if result.missing:
        text += f" ({result.spread.n} of {result.spread.n + len(result.missing)} seeds)"
    found = study.comparisons.get((row, column))
    return Cell(text, is_bold=found is not None and found.is_win, value=100 * result.spread.mean)


def _notes(study: Study) -> list[str]:
    metrics = {run.task: run.metric for run in study.group.runs}
    named = ", ".join(
        task if task.endswith(metric) else f"{task} {metric}" for task, metric in metrics.items()
    )
    notes = [f"In hundredths: {named}."]
    if any(result.spread.sd is not None for result in study.results.values()):
        notes.append("± is the standard deviation over seeds.")
    if len(set(metrics.values())) > 1 and AVERAGE in study.columns:
        notes.append("The average mixes metrics, as the paper's does.")
    if study.baseline is None:
        notes.append("No baseline, so nothing is tested and nothing stands out.")
    else:
        notes.append(
            f"Standing out (bold, or *): better than {study.baseline} by more than noise, that is "
            f"by a paired test over the examples (p at most {LEVEL} after Holm over the tasks; the "
            "average by itself), in each seed that both have, and by Welch's t-test over seeds (p "
            f"at most {LEVEL}; one seed shows nothing of the noise of training)."
        )
    if study.group.missing:
        folders = {gone.folder for gone in study.group.missing}
        notes.append(f"Missing: {len(folders)} run(s) of the grid.")
    if study.reference is not None and study.paper:
        notes += [f"Paper: {study.reference.title}.", *study.reference.notes_on(study.tasks)]
    elif study.reference is not None:
        title = study.reference.title
        notes.append(f"The paper has no value for these rows and tasks ({title}).")
    said = [note for run in study.group.runs for note in run.metrics.get("notes", ())]
    return [*notes, *dict.fromkeys(str(note) for note in said)]
