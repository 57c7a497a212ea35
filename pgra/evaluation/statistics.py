"""How sure one may be of a difference: seeds, examples, and many tasks at once.

Two kinds of chance are kept apart. Seeds: mean, sample standard deviation and t interval over runs,
and Welch's t-test of two systems' runs. Examples: a paired bootstrap over the test examples, given
the readers that were trained, and an exact test of those that differ; the larger p decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pgra.evaluation.metrics import (
    METRICS,
    Discordant,
    PairedDifference,
    confusion_cells,
    discordant,
    metric_of_counts,
    sign_flip,
)

_Values = npt.NDArray[np.float64]
# Equal seeds in another order sum up to a last digit of their own, which is no difference.
_DIGITS = 12
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
