"""What the report's browser of examples looks through, as one value for JSON.

Texts, and lists of evidence that several runs share (the seeds of one system do), stand there once:
10,000 queries of several runs stay a page that opens.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from pgra.errors import ArtifactError
from pgra.evaluation.comparable import row_names
from pgra.evaluation.results import PREDICTIONS_FILE
from pgra.evaluation.runs import Group, Run
from pgra.types import Json

MOST_EVIDENCE = 16
"""How many of a query's evidence the page holds: the paper's d."""

_UNKNOWN = -1
_CHANCE_DIGITS = 5
_SCORE_DIGITS = 7  # dot products are in the thousands, and differ in the first decimal


class Places:
    """Numbers for values, from 0, in the order in which they are first met."""

    def __init__(self) -> None:
        self._places: dict[Any, int] = {}

    def of(self, value: Hashable) -> int:
        """Give a value's number, a new one if it is new."""
        return self._places.setdefault(value, len(self._places))

    @property
    def values(self) -> list[Any]:
        """Give the values by number."""
        return list(self._places)


def browser_data(groups: Sequence[Group], *, most_evidence: int = MOST_EVIDENCE) -> dict[str, Json]:
    """Gather all examples, with what each run read and said.

    Args:
        groups: Runs; those of one test set are laid side by side, whatever group they are of.
        most_evidence: How many of each query's evidence are kept, from the best.

    Returns:
        `{"texts": [...], "tasks": [...]}`, as `page/choose.js` describes it.

    Raises:
        ArtifactError: If a run's predictions are damaged.
    """
    texts = Places()
    sets: dict[tuple[str, str], list[tuple[str, Run]]] = {}
    for group in groups:
        for row, run in zip(row_names(group), group.runs, strict=True):
            known = sets.setdefault((run.task, run.decisions.examples), [])
            if run.folder.resolve() not in [other.folder.resolve() for _, other in known]:
                known.append((row, run))
    names = _distinct([task for task, _ in sets])
    tasks = [
        _task_data(name, runs, texts, most_evidence=most_evidence)
        for name, runs in zip(names, sets.values(), strict=True)
    ]
    return {"texts": texts.values, "tasks": tasks}


def _distinct(names: Sequence[str]) -> list[str]:
    """Number the names that stand there already: "sst2", "sst2 (2)"."""
    given: list[str] = []
    for name in names:
        number, mine = 1, name
        while mine in given:
            number += 1
            mine = f"{name} ({number})"
        given.append(mine)
    return given


def _task_data(
    name: str, runs: Sequence[tuple[str, Run]], texts: Places, *, most_evidence: int
) -> dict[str, Json]:
    labels, lists = Places(), Places()
    systems = [system for system, _ in runs]
    shown = _distinct([f"{s} (seed {run.seed})" if systems.count(s) > 1 else s for s, run in runs])
    laid = []
    for (system, run), run_name in zip(runs, shown, strict=True):
        try:
            laid.append(
                {
                    "name": run_name,
                    "system": system,
                    **_run_data(run.predictions, labels, lists, texts, most=most_evidence),
                }
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ArtifactError(
                f"{run.folder / PREDICTIONS_FILE} is damaged ({type(error).__name__}: {error}): "
                f"leave {run.folder} out, or delete it and run it again"
            ) from None
    lines = runs[0][1].predictions
    gold = [_UNKNOWN if line["label"] is None else labels.of(line["label"]) for line in lines]
    return {
        "name": name,
        "ids": [str(line["id"]) for line in lines],
        "queries": [texts.of(str(line["text"])) for line in lines],
        "gold": gold,
        "labels": labels.values,
        "lists": [list(flat) for flat in lists.values],
        "runs": laid,
    }


def _run_data(
    lines: Sequence[Mapping[str, Any]],
    labels: Places,
    lists: Places,
    texts: Places,
    *,
    most: int,
) -> dict[str, Json]:
    answers, chances, evidence, attention = [], [], [], []
    for line in lines:
        scores = line.get("scores") or {}
        for label in scores:  # first of all, for their order is the task's
            labels.of(label)
        seen = line.get("evidence") or []
        answers.append(labels.of(line["prediction"]))
        chances.append([[labels.of(k), _short(v, _CHANCE_DIGITS)] for k, v in scores.items()])
        evidence.append(lists.of(_flat(seen[:most], texts)))
        attention.append([_short(one.get("attention"), _CHANCE_DIGITS) for one in seen[:most]])
    knows = any(share is not None for shares in attention for share in shares)
    return {
        "answers": answers,
        "chances": chances,
        "evidence": evidence,
        "attention": attention if knows else None,
        "read": max((len(line.get("evidence") or []) for line in lines), default=0),
    }


def _flat(seen: Sequence[Mapping[str, Any]], texts: Places) -> tuple[float | int | None, ...]:
    """Lay evidence in a row, four numbers each: text, stage-1 rank, both stages' scores."""
    numbers: list[float | int | None] = []
    for one in seen:
        numbers += [texts.of(str(one["text"])), one.get("stage1_rank")]
        numbers += [_short(one.get(name), _SCORE_DIGITS) for name in ("stage1_score", "score")]
    return tuple(numbers)


def _short(value: float | None, digits: int) -> float | None:
    """Keep as many digits as a person reads; None for what is no number."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")
