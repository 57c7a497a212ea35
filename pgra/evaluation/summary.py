"""A study as tables: one to look at, one with every test, and one for further work."""

from collections.abc import Sequence

from pgra.errors import ConfigError
from pgra.evaluation.comparison import LEVEL, Comparison, Result, Study
from pgra.evaluation.reference import METRIC, ReferenceTable
from pgra.evaluation.tables import Cell, Table

MISSING = "missing"
AVERAGE = "average"
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
