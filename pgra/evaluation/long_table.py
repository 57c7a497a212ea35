"""A study with all its numbers, a row for each row and task: for further work, as CSV."""

from pgra.evaluation.comparison import Study
from pgra.evaluation.reference import ReferenceTable
from pgra.evaluation.summary import (
    MISSING,
    columns_of,
    comparison_of,
    paper_cell,
    result_of,
    told_over,
    told_seeds,
)
from pgra.evaluation.tables import Cell, Table

_NOTHING = Cell("")


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
