"""Metrics on labels by name, and how sure one may be of them.

All take the true labels, the predictions, and the task's label names. Values are fractions; MCC
lies between -1 and 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Metric = Callable[[Sequence[str], Sequence[str], Sequence[str]], float]
_Counts = npt.NDArray[np.int64]
_Values = npt.NDArray[np.float64]
_CHUNK_CELLS = 4_000_000
_FEW, _FLIPS = 16, 9_999
_DIGITS = 12  # sums in another order differ in a last digit


def accuracy(labels: Sequence[str], predictions: Sequence[str], names: Sequence[str]) -> float:
    """Give the share of predictions that are right."""
    return float(_accuracy(_confusion(labels, predictions, names))[0])


def mcc(labels: Sequence[str], predictions: Sequence[str], names: Sequence[str]) -> float:
    """Give Matthews' correlation, for any number of labels; 0 where it is undefined.

    The closed form of Gorodkin 2004, R_K. Undefined is: only one label, or only one prediction.
    """
    return float(_mcc(_confusion(labels, predictions, names))[0])


def macro_f1(labels: Sequence[str], predictions: Sequence[str], names: Sequence[str]) -> float:
    """Give the mean over all names of F1; a name that neither side uses counts 0."""
    return float(_macro_f1(_confusion(labels, predictions, names))[0])


METRICS: dict[str, Metric] = {
    "accuracy": accuracy,
    "macro_f1": macro_f1,
    "mcc": mcc,
    "exact_match": accuracy,  # of what was written: RIGHT or WRONG, and all should be RIGHT
}
RIGHT, WRONG = "right", "wrong"
_OF_TEXTS = ("exact_match",)
_MEANS = ("accuracy", "exact_match")  # over the examples
LABEL_METRICS = tuple(name for name in METRICS if name not in _OF_TEXTS)


@dataclass(frozen=True)
class Interval:
    """A 95 % interval: the 2.5th and 97.5th percentile."""

    low: float
    high: float


@dataclass(frozen=True)
class PairedDifference:
    """How much better one system is than another on the same examples.

    Attributes:
        difference: Metric of a minus metric of b.
        low: 2.5th percentile of the difference over resamples.
        high: 97.5th percentile.
        p: Two-sided p-value of no difference: the larger of the bootstrap's (twice the share of
            resamples on the other side of 0, where 0 itself counts, at least 2 / (draws + 1)) and
            of `Discordant.p`, for where few examples differ the bootstrap's is too small.
    """

    difference: float
    low: float
    high: float
    p: float


@dataclass(frozen=True)
class Discordant:
    """The examples on which two systems differ, for a p-value that holds however few they are.

    Attributes:
        count: How many of the examples.
        parts: What each example adds to the difference, (B,), where the metric is a mean over
            examples; else None.
    """

    count: int
    parts: _Values | None = None

    @property
    def p(self) -> float:
        """Give a two-sided p-value: exact for a mean over examples, else the least that there is.

        Were the systems alike, each example could as well stand with its sides swapped. Of `count`
        examples that differ there are 2 ** count ways, and at least the observed one and its
        mirror image are as extreme, whatever the metric (Noreen 1989; Yeh 2000).
        """
        if self.parts is None:
            return min(1.0, 2.0 ** (1 - self.count))
        return sign_flip(self.parts)


def sign_flip(parts: Sequence[float] | _Values) -> float:
    """Give the two-sided p-value of a sum whose parts could each have the other sign (Fisher 1935).

    Of parts of one size it is the binomial test, so of right and wrong it is McNemar's exact test
    (McNemar 1947). It is exact for these and for up to 16 parts other than 0; else by 9,999 draws.
    """
    signed = np.asarray(parts, np.float64)
    if not signed.any():
        return 1.0
    signed = np.round(signed / np.abs(signed).max(), _DIGITS)
    signed = signed[signed != 0]
    sizes, counts = np.unique(np.abs(signed), return_counts=True)
    if len(sizes) == 1:
        from scipy.stats import binomtest

        return float(binomtest(int((signed > 0).sum()), len(signed), 0.5).pvalue)
    least = abs(float(signed.sum())) - 1e-9  # in another order it differs in a last digit
    if len(signed) <= _FEW:
        sums = np.zeros(1)
        for size in np.abs(signed):
            sums = np.concatenate([sums + size, sums - size])
        return float((np.abs(sums) >= least).mean())
    generator = np.random.default_rng(0)
    sums = np.zeros(_FLIPS)
    for size, count in zip(sizes, counts, strict=True):
        sums += size * (2.0 * generator.binomial(count, 0.5, size=_FLIPS) - count)
    return float((1 + (np.abs(sums) >= least).sum()) / (_FLIPS + 1))


def discordant(
    metric: str,
    labels: Sequence[str],
    a: Sequence[Sequence[str]],
    b: Sequence[Sequence[str]],
) -> Discordant:
    """Find the examples on which two systems differ.

    Args:
        metric: The task's.
        labels: The true labels, of B examples.
        a: Predictions of one system, for each of its seeds B of them.
        b: Of the other.
    """
    if metric in _MEANS:
        truth = np.asarray(labels)
        shares = [np.mean([np.asarray(one) == truth for one in side], axis=0) for side in (a, b)]
        parts = np.round(shares[0] - shares[1], _DIGITS) / len(truth)
        return Discordant(int((parts != 0).sum()), parts)
    sides = (zip(*side, strict=True) for side in (a, b))
    differs = [sorted(ours) != sorted(theirs) for ours, theirs in zip(*sides, strict=True)]
    return Discordant(sum(differs))


def measure(
    metric: str, labels: Sequence[str], predictions: Sequence[str], names: Sequence[str]
) -> dict[str, float]:
    """Give the task's metric first, then the others that labels have, by name.

    Raises:
        ValueError: If the metric is unknown, the lengths differ, or there is nothing to measure.
    """
    _check_metric(metric)
    others = [name for name in LABEL_METRICS if name != metric]
    order = [metric, *(others if metric not in _OF_TEXTS else ())]
    return {name: METRICS[name](labels, predictions, names) for name in order}


def bootstrap_interval(
    metric: str,
    labels: Sequence[str],
    predictions: Sequence[str],
    names: Sequence[str],
    *,
    seed: int,
    draws: int = 2000,
) -> Interval:
    """Give the percentile interval over resamples of the examples (Efron 1979).

    Raises:
        ValueError: As `measure`.
    """
    _check_metric(metric)
    cells = confusion_cells(labels, predictions, names)
    size = len(names) ** 2
    values = _resampled(metric, cells, size, (len(names), len(names)), seed=seed, draws=draws)
    low, high = np.percentile(values[:, 0], [2.5, 97.5])
    return Interval(float(low), float(high))


def paired_bootstrap(
    metric: str,
    labels: Sequence[str],
    a: Sequence[str],
    b: Sequence[str],
    names: Sequence[str],
    *,
    seed: int,
    draws: int = 2000,
) -> PairedDifference:
    """Compare two systems' predictions on the same examples, resampled together.

    Raises:
        ValueError: As `measure`.
    """
    _check_metric(metric)
    n = len(names)
    # One cell an example: its label and both predictions, so one resample serves both systems.
    cells = confusion_cells(labels, a, names) * n + confusion_cells(labels, b, names) % n
    values = _resampled(metric, cells, n**3, (n, n, n), seed=seed, draws=draws)
    gaps = values[:, 0] - values[:, 1]
    difference = METRICS[metric](labels, a, names) - METRICS[metric](labels, b, names)
    other_side = min(int((gaps <= 0).sum()), int((gaps >= 0).sum()))
    p = max(min(1.0, 2 * (other_side + 1) / (draws + 1)), discordant(metric, labels, [a], [b]).p)
    low, high = np.percentile(gaps, [2.5, 97.5])
    return PairedDifference(difference, float(low), float(high), p)


def _check_metric(metric: str) -> None:
    if metric not in METRICS:
        raise ValueError(f"unknown metric '{metric}'. Known: {', '.join(METRICS)}.")


def confusion_cells(
    labels: Sequence[str], predictions: Sequence[str], names: Sequence[str]
) -> _Counts:
    """Give each example's cell in the confusion matrix, row label and column prediction, (B,).

    Raises:
        ValueError: As `measure`.
    """
    if len(labels) != len(predictions):
        raise ValueError(f"{len(labels)} labels, {len(predictions)} predictions")
    if not len(labels):
        raise ValueError("there is nothing to measure: no labels")
    place = {name: i for i, name in enumerate(names)}
    for name in (*labels, *predictions):
        if name not in place:
            raise ValueError(f"'{name}' is not among the label names: {', '.join(names)}")
    rows = np.array([place[name] for name in labels], dtype=np.int64)
    columns = np.array([place[name] for name in predictions], dtype=np.int64)
    return rows * len(names) + columns


def _confusion(labels: Sequence[str], predictions: Sequence[str], names: Sequence[str]) -> _Counts:
    n = len(names)
    cells = confusion_cells(labels, predictions, names)
    return np.bincount(cells, minlength=n * n).reshape(1, n, n)


def _resampled(
    metric: str, cells: _Counts, size: int, shape: tuple[int, ...], *, seed: int, draws: int
) -> _Values:
    """Give the metric of each resample, (draws, 1), or (draws, 2) for cells of a pair.

    Resampling examples is drawing counts of cells from a multinomial, which needs no example.
    """
    generator = np.random.default_rng(seed)
    shares = np.bincount(cells, minlength=size) / len(cells)
    values = []
    step = max(1, _CHUNK_CELLS // size)
    for start in range(0, draws, step):
        counts: Any = generator.multinomial(len(cells), shares, size=min(step, draws - start))
        counts = counts.reshape(-1, *shape)
        systems = [counts] if len(shape) == 2 else [counts.sum(axis=3), counts.sum(axis=2)]
        values.append(np.stack([metric_of_counts(metric, system) for system in systems], axis=1))
    return np.concatenate(values)


def _accuracy(counts: _Counts) -> _Values:
    return np.asarray(_diagonal(counts).sum(-1) / counts.sum((-2, -1)), np.float64)


def _mcc(counts: _Counts) -> _Values:
    counts = counts.astype(np.float64)
    true, guessed, total = counts.sum(-1), counts.sum(-2), counts.sum((-2, -1))
    top = _diagonal(counts).sum(-1) * total - (true * guessed).sum(-1)
    below = np.sqrt((total**2 - (guessed**2).sum(-1)) * (total**2 - (true**2).sum(-1)))
    return np.asarray(np.divide(top, below, out=np.zeros_like(top), where=below > 0), np.float64)


def _macro_f1(counts: _Counts) -> _Values:
    both = (counts.sum(-1) + counts.sum(-2)).astype(np.float64)
    right = 2.0 * _diagonal(counts)
    return np.asarray(
        np.divide(right, both, out=np.zeros_like(right), where=both > 0).mean(-1), np.float64
    )


def metric_of_counts(metric: str, counts: _Counts) -> _Values:
    """Give a metric of confusion matrices, (S,) of (S, C, C), row label and column prediction."""
    return _FROM_COUNTS[metric](counts)


def _diagonal(counts: Any) -> Any:
    return np.diagonal(counts, axis1=-2, axis2=-1)


_FROM_COUNTS: dict[str, Callable[[Any], _Values]] = {
    "accuracy": _accuracy,
    "macro_f1": _macro_f1,
    "mcc": _mcc,
    "exact_match": _accuracy,
}
