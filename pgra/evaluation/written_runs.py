"""Runs that are measured on what was written, as reports compare them: BLEU and PARENT.

Neither is a matter of right and wrong. BLEU (Papineni et al. 2002) is of all texts together and
follows from the sum of each text's counts; PARENT's F (Dhingra et al. 2019) is the mean of each
text's. So both follow from a row of numbers for each query, and a resample of the queries is a
resample of rows: the paired bootstrap of Koehn 2004, which sacrebleu has for BLEU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pgra.errors import ArtifactError
from pgra.evaluation.metrics import Discordant
from pgra.evaluation.statistics import Gaps
from pgra.evaluation.table_text import bleu_of_counts
from pgra.evaluation.written import SUBSETS

if TYPE_CHECKING:
    from pgra.evaluation.runs import Run

Each = npt.NDArray[np.float64]
TEXT_METRICS = ("bleu", "parent")
_KEYS = {"bleu": "bleu_counts", "parent": "parent"}
_DRAWS = 2000
_SEED = 0
_DIGITS = 12
_ROUNDING = 1e-6


def split_measures(run: "Run") -> list["Run"]:
    """Give a run as one for each of its measures, its task named "totto bleu"; others as they are.

    Raises:
        ArtifactError: If the run lacks each query's numbers, or its metrics are not theirs.
    """
    if run.metric not in TEXT_METRICS:
        return [run]
    lines = [dict(line) for line in run.predictions]
    names = [name for name in run.metrics["metrics"] if name.rpartition("/")[2] in TEXT_METRICS]
    return [_part(run, name, lines) for name in names]


def _part(run: "Run", name: str, lines: Sequence[Mapping[str, Any]]) -> "Run":
    subset, _, metric = name.rpartition("/")
    wanted = {"": None, SUBSETS[0]: True, SUBSETS[1]: False}[subset]
    own = [line for line in lines if wanted is None or line.get("is_overlap") is wanted]
    each, value = _read_each(run.folder, metric, own), float(run.metrics["metrics"][name])
    found = value_of(metric, each)
    if not abs(found - value) <= _ROUNDING:
        raise ArtifactError(
            f"{run.folder}/metrics.json is damaged ({name} is {value:.4f}, and {found:.4f} by its "
            f"predictions): delete {run.folder} and run its command again, or give another folder"
        )
    low, high = np.percentile(draws_of(metric, [each], seed=_SEED)[0], [2.5, 97.5])
    told = {"metric": metric, "value": value, "interval_95": [float(low), float(high)]}
    return replace(
        run, task=f"{run.task} {name}", metrics={**run.metrics, **told, "n": len(own)}, each=each
    )


def _read_each(folder: Path, metric: str, lines: Sequence[Mapping[str, Any]]) -> Each:
    if not lines or any(_KEYS[metric] not in line for line in lines):
        raise ArtifactError(
            f"{folder} does not say {metric} of each query, being made by an earlier version: "
            "delete its metrics.json and run its command again (what the LM answered is kept)"
        )
    return np.array([np.atleast_1d(line[_KEYS[metric]]) for line in lines], np.float64)


def value_of(metric: str, each: Each) -> float:
    """Give a measure of B queries' numbers, (B, S): BLEU's counts, or (B, 1) values."""
    if metric == "bleu":
        return bleu_of_counts(each.sum(axis=0).astype(np.int64).tolist())
    return float(each.mean())


def draws_of(metric: str, sides: Sequence[Each], *, seed: int, draws: int = _DRAWS) -> Each:
    """Give a measure of several runs in the same resamples of the queries, (S, draws).

    Args:
        metric: Of `TEXT_METRICS`.
        sides: Each run's numbers, of the same B queries.
        seed: Of the resampling.
        draws: How many resamples.
    """
    count = len(sides[0])
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=draws)
    sums = [drawn.astype(np.float64) @ side for side in sides]  # (draws, S) each
    if metric != "bleu":
        return np.stack([own[:, 0] / count for own in sums])
    return np.array([[bleu_of_counts(row) for row in np.rint(own).astype(int)] for own in sums])


def text_gaps(metric: str, a: Sequence[Each], b: Sequence[Each], *, seed: int) -> Gaps:
    """Compare two systems of several seeds, resampled together; see `statistics.paired_gaps`.

    Args:
        metric: Of `TEXT_METRICS`.
        a: Numbers of one system, for each of its seeds (B, S).
        b: Of the other.
        seed: Of the resampling.
    """
    values = draws_of(metric, [*a, *b], seed=seed)
    sides = [[value_of(metric, each) for each in side] for side in (a, b)]
    gaps = values[: len(a)].mean(axis=0) - values[len(a) :].mean(axis=0)
    apart = np.round(np.mean(a, axis=0) - np.mean(b, axis=0), _DIGITS)  # (B, S)
    parts = None if metric == "bleu" else apart[:, 0] / len(apart)  # BLEU is no mean over texts
    return Gaps(
        float(np.mean(sides[0]) - np.mean(sides[1])),
        np.round(gaps, _DIGITS),
        Discordant(int(apart.any(axis=1).sum()), parts),
    )
