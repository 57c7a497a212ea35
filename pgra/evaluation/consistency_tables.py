"""Tables of label consistency: scores, and queries by number of consistent evidence."""

from collections.abc import Mapping, Sequence

from pgra.evaluation.consistency import Consistency, compare_consistency
from pgra.evaluation.tables import Cell, Table

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
