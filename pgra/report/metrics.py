"""Metrics on labels, how sure one may be of them and of differences, and calibration.

All take the true labels, the predictions, and the task's label names. Values are fractions; MCC
lies between -1 and 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pgra.core import Scores
from pgra.reader.calibrate import label_chances, negative_log_likelihood

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


# How sure one may be of a difference: seeds, examples, and many tasks at once.
#
# Two kinds of chance are kept apart. Seeds: mean, sample standard deviation and t interval over
# runs, and Welch's t-test of two systems' runs. Examples: a paired bootstrap over the test
# examples, given the readers that were trained, and an exact test of those that differ; the
# larger p decides.

_SAME = 1e-12


@dataclass(frozen=True)
class Spread:
    """Values of several runs.

    Attributes:
        mean: Of the values.
        sd: Sample standard deviation (n - 1); None for one value.
        low: Lower end of the mean's 95 % interval by Student's t; None for one value.
        high: Upper end.
        n: How many values.
    """

    mean: float
    sd: float | None
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True)
class Gaps:
    """How much better one system is than another, and what it is in resamples.

    Attributes:
        difference: Metric of a minus metric of b, mean over seeds.
        draws: The same in each resample of the examples, (draws,).
        discordant: The examples that differ.
    """

    difference: float
    draws: _Values
    discordant: Discordant

    def summarise(self) -> PairedDifference:
        """Give interval and two-sided p-value, as `metrics.paired_bootstrap` does."""
        other_side = min(int((self.draws <= 0).sum()), int((self.draws >= 0).sum()))
        p = max(min(1.0, 2 * (other_side + 1) / (len(self.draws) + 1)), self.discordant.p)
        low, high = np.percentile(self.draws, [2.5, 97.5])
        return PairedDifference(self.difference, float(low), float(high), p)


def mean_sd_interval(values: Sequence[float]) -> Spread:
    """Give mean, standard deviation and the mean's 95 % interval by Student's t.

    Raises:
        ValueError: If there are no values.
    """
    n = len(values)
    if not n:
        raise ValueError("there are no values to take the mean of")
    mean = float(np.mean(values))
    if n == 1:
        return Spread(mean, None, None, None, 1)
    from scipy.special import stdtrit

    sd = float(np.std(values, ddof=1))
    half = float(stdtrit(n - 1, 0.975)) * sd / n**0.5
    return Spread(mean, sd, mean - half, mean + half, n)


def welch(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Give the two-sided p-value that two systems' seeds have one mean (Welch 1947).

    Args:
        a: Values of one system, one a seed.
        b: Of the other.

    Returns:
        None where there are too few seeds to say; seeds that all agree decide by themselves.
    """
    if len(a) < 2 or len(b) < 2:
        return None
    gap = abs(float(np.mean(a) - np.mean(b)))
    parts = [float(np.var(values, ddof=1)) / len(values) for values in (a, b)]
    if sum(parts) < _SAME**2:
        return 1.0 if gap < _SAME else 0.0
    from scipy.special import stdtr  # scipy.stats warns where one side has no spread

    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (a, b), strict=True)
    )
    return float(2 * stdtr(freedom, -gap / sum(parts) ** 0.5))


def mcnemar(correct_a: Sequence[bool], correct_b: Sequence[bool]) -> float:
    """Give the two-sided p-value of McNemar's test, exact by the binomial (McNemar 1947).

    Only examples that one system decides rightly and the other wrongly count; without any p is 1.

    Raises:
        ValueError: If the lengths differ.
    """
    if len(correct_a) != len(correct_b):
        raise ValueError(f"{len(correct_a)} decisions and {len(correct_b)}")
    return sign_flip(np.asarray(correct_a, np.float64) - np.asarray(correct_b, np.float64))


def combine_p(p_values: Sequence[float]) -> float:
    """Give one p-value of several tests of one claim, however they depend on each other.

    Rueger 1978: the k-th smallest of n, times n / k, is a p-value; here k is the lower middle. It
    is what McNemar's tests of several seeds become, since their examples are the same.

    Raises:
        ValueError: If there are none.
    """
    if not p_values:
        raise ValueError("there are no p-values to combine")
    n, k = len(p_values), (len(p_values) + 1) // 2
    return min(1.0, sorted(p_values)[k - 1] * n / k)


def holm(p_values: Sequence[float]) -> list[float]:
    """Give p-values that hold for all tests together (Holm 1979), in the order given.

    The i-th smallest of n, from 0, times n - i; none below the one before it, none above 1.
    """
    n, adjusted, before = len(p_values), [0.0] * len(p_values), 0.0
    for place, index in enumerate(sorted(range(n), key=lambda i: p_values[i])):
        before = max(before, min(1.0, p_values[index] * (n - place)))
        adjusted[index] = before
    return adjusted


def paired_gaps(
    metric: str,
    labels: Sequence[str],
    a: Sequence[Sequence[str]],
    b: Sequence[Sequence[str]],
    names: Sequence[str],
    *,
    seed: int,
    draws: int = 2000,
) -> Gaps:
    """Compare two systems of several seeds on the same examples, resampled together.

    What is compared is the mean of the metric over a system's seeds; for accuracy that is the mean
    over examples of the share of seeds that are right. With one seed each it is
    `metrics.paired_bootstrap`.

    Args:
        metric: The task's.
        labels: The true labels, of B examples.
        a: Predictions of one system, for each of its seeds B of them.
        b: Of the other; its seeds may be other ones.
        names: The task's labels.
        seed: Of the resampling.
        draws: How many resamples.

    Raises:
        ValueError: As `metrics.confusion_cells`, or if a system has no seed.
    """
    if not a or not b:
        raise ValueError("a system has no predictions")
    values = metric_draws(metric, labels, [*a, *b], names, seed=seed, draws=draws)
    sides = [METRICS[metric](labels, side, names) for side in (*a, *b)]
    gaps = values[: len(a)].mean(axis=0) - values[len(a) :].mean(axis=0)
    return Gaps(
        float(np.mean(sides[: len(a)]) - np.mean(sides[len(a) :])),
        np.round(gaps, _DIGITS),
        discordant(metric, labels, a, b),
    )


def metric_draws(
    metric: str,
    labels: Sequence[str],
    sides: Sequence[Sequence[str]],
    names: Sequence[str],
    *,
    seed: int,
    draws: int = 2000,
) -> _Values:
    """Give the metric of several predictions in the same resamples of the examples, (S, draws).

    Args:
        metric: The task's.
        labels: The true labels, of B examples.
        sides: S times B predictions.
        names: The task's labels.
        seed: Of the resampling.
        draws: How many resamples.

    Raises:
        ValueError: As `metrics.confusion_cells`.
    """
    cells = np.stack([confusion_cells(labels, side, names) for side in sides])  # (S, B)
    patterns, counts = np.unique(cells, axis=1, return_counts=True)  # (S, U), (U,)
    generator = np.random.default_rng(seed)
    # Examples that all systems decide alike are one kind; a resample is counts of kinds.
    drawn = generator.multinomial(len(labels), counts / len(labels), size=draws)  # (draws, U)
    return np.stack([_metric_by_draw(metric, drawn, kinds, len(names)) for kinds in patterns])


def _metric_by_draw(metric: str, drawn: Any, kinds: Any, num_labels: int) -> _Values:
    """Give one system's metric in each resample, (draws,).

    Args:
        metric: The task's.
        drawn: How often each kind of example was drawn, (draws, U).
        kinds: The confusion matrix' cell of each kind, (U,).
        num_labels: Its width.
    """
    is_cell = kinds[:, None] == np.arange(num_labels**2)  # (U, cells)
    # As float64 the product runs on BLAS; counts are far below 2**53, so it is exact.
    counts = drawn.astype(np.float64) @ is_cell.astype(np.float64)
    matrices = np.rint(counts).astype(np.int64).reshape(-1, num_labels, num_labels)
    return metric_of_counts(metric, matrices)


def average_gaps(gaps: Sequence[Gaps]) -> Gaps:
    """Give the mean over tasks: their examples are drawn independently of each other.

    Raises:
        ValueError: If there are none.
    """
    if not gaps:
        raise ValueError("there are no tasks to take the mean of")
    parts = [gap.discordant.parts for gap in gaps]
    known = [part / len(gaps) for part in parts if part is not None]
    return Gaps(
        float(np.mean([gap.difference for gap in gaps])),
        np.round(np.stack([gap.draws for gap in gaps]).mean(axis=0), _DIGITS),
        Discordant(
            sum(gap.discordant.count for gap in gaps),
            np.concatenate(known) if len(known) == len(gaps) else None,
        ),
    )


# How far a reader's probabilities can be believed.


BINS = 15


@dataclass(frozen=True)
class Reliability:
    """How well probabilities fit what happened.

    Attributes:
        nll: Mean of -log p of the true labels.
        ece: Expected calibration error, in 0..1.
    """

    nll: float
    ece: float


def measure_reliability(
    scores: Scores, truth: Sequence[int], *, temperature: float = 1.0
) -> Reliability:
    """Measure scores divided by a temperature.

    Args:
        scores: Log-probability of each of C labels, (B, C), all finite.
        truth: The true label's column, of each example.
        temperature: What scores are divided by before the softmax.
    """
    return Reliability(
        negative_log_likelihood(scores, truth, temperature=temperature),
        expected_calibration_error(label_chances(scores, temperature), truth),
    )


def expected_calibration_error(
    chances: npt.NDArray[np.float64], truth: Sequence[int], *, bins: int = BINS
) -> float:
    """Give the mean gap between how sure a reader is and how often it is right.

    Guo et al. 2017, eq. 3: examples are put into bins by the probability of the label decided for,
    which is the confidence. The bins are of equal width, bin m of M from (m - 1) / M, which it does
    not hold, to m / M, which it holds. Each bin's gap between its mean confidence and its share of
    right decisions counts by its share of the examples.

    Args:
        chances: Probability of each of C labels, (B, C).
        truth: The true label's column, of each example.
        bins: How many bins.
    """
    decided = chances.argmax(axis=1)
    confidence = chances.max(axis=1)
    places = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    # n / B times |mean confidence - share right| is |sum of both's differences| / B.
    gaps = np.bincount(places, weights=confidence - (decided == np.asarray(truth)), minlength=bins)
    return float(np.abs(gaps).sum() / len(chances))
