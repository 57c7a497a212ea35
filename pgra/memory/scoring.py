"""Scores outputs that stand in a file: the paper's Acc(u), and Acc(y), by type.

Files are jsonl or csv, a question a row, with one output or those of several systems side by side:
the release's `results.csv` has `question`, `gold`, `GPT-3 generated` and
`with_mem_learned_ir generated`; a run's `steps.jsonl` has `expected` and `generated`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from pgra.data.tables import Row, json_rows, table_rows
from pgra.data.textfile import check_file
from pgra.errors import DataError
from pgra.memory.families import Family
from pgra.memory.situations import judge_situation
from pgra.memory.steps import Step, is_answered

_GOLD = ("gold", "expected", "expected_answer")
_KIND = ("type", "kind")
_OUTPUT = "generated"


@dataclass(frozen=True)
class Scored:
    """What one column of outputs reached.

    Attributes:
        column: Its name.
        counts: Outputs by type.
        understood: Acc(u) by type, and of "all", which is over outputs.
        answered: Acc(y) of all.
    """

    column: str
    counts: Mapping[str, int]
    understood: Mapping[str, float]
    answered: float


@dataclass(frozen=True)
class _Judged:
    kind: str
    understood: bool
    answered: bool


def score_file(path: Path, family: Family, *, as_released: bool = False) -> list[Scored]:
    """Score each column of outputs, those whose names end in "generated".

    A row's type is its `type` or `kind`, else that whose expected output begins as its own does.

    Args:
        path: jsonl or csv.
        family: Whose questions they answer.
        as_released: Whether the understanding is told as the paper's release does.

    Raises:
        DataError: If the family's understanding is not told, there is no row or no such column, or
            a row has no type.
    """
    if family.is_of_answers:
        raise DataError(
            f"the family '{family.name}' has no understanding to score: pgra icl scores answers"
        )
    judged: dict[str, list[_Judged]] = {}
    for row in _rows(path):
        gold = _text(row, _GOLD)
        if gold is None:
            raise DataError(f"{row.place} has none of {', '.join(_GOLD)}: the right output")
        kind = _kind(row, gold, family)
        for column in _columns(row):
            output = str(row.values[column])
            told = _judge(output, gold, kind, family=family, as_released=as_released)
            judged.setdefault(column, []).append(told)
    if not judged:
        raise DataError(f"{path} holds no row of outputs")
    if len({len(ones) for ones in judged.values()}) > 1:
        raise DataError(f"{path}: not every row has every output column: {', '.join(judged)}")
    return [_score(column, ones, family.kinds) for column, ones in judged.items()]


def _rows(path: Path) -> Iterator[Row]:
    kind = check_file(path, ("jsonl", "csv"))
    return json_rows(path) if kind == "jsonl" else table_rows(path, kind, ())


def _text(row: Row, names: Sequence[str]) -> str | None:
    found = (row.values.get(name) for name in names)
    return next((text for text in found if isinstance(text, str) and text.strip()), None)


def _columns(row: Row) -> list[str]:
    columns = [name for name in row.values if name.endswith(_OUTPUT)]
    if not columns:
        raise DataError(f"{row.place} has no output: its column's name must end in '{_OUTPUT}'")
    return columns


def _kind(row: Row, gold: str, family: Family) -> str:
    if family.situations is not None and not family.situations.categories:
        return family.kinds[0]
    told = _text(row, _KIND)
    found = told if told is not None else _kind_of(gold, family)
    if found not in family.kinds:
        raise DataError(
            f"{row.place}: the right output '{gold[:80]}' is of no type of the family "
            f"'{family.name}' ({', '.join(family.kinds)}): name the file's own with --family"
        )
    return found


def _kind_of(gold: str, family: Family) -> str | None:
    for kind, frame in family.answers.items():
        parts = re.split(r"\{word\}|\{answer\}", frame)
        shape = ".*".join(map(re.escape, parts))
        if re.fullmatch(shape, gold, re.IGNORECASE | re.DOTALL):
            return kind
    return None


def _judge(output: str, gold: str, kind: str, *, family: Family, as_released: bool) -> _Judged:
    if family.situations is not None:
        return _Judged(kind, *judge_situation(output, gold))
    understood = family.is_understood(kind, output, as_released=as_released)
    step = Step("", kind, "", "", "", (gold,))
    return _Judged(kind, understood, is_answered(step, output))


def _score(column: str, ones: Sequence[_Judged], kinds: Sequence[str]) -> Scored:
    by_kind = {kind: [one.understood for one in ones if one.kind == kind] for kind in kinds}
    met = {kind: outcomes for kind, outcomes in by_kind.items() if outcomes}
    return Scored(
        column,
        {**{kind: len(outcomes) for kind, outcomes in met.items()}, "all": len(ones)},
        {
            **{kind: fmean(outcomes) for kind, outcomes in met.items()},
            "all": fmean(one.understood for one in ones),
        },
        fmean(one.answered for one in ones),
    )
