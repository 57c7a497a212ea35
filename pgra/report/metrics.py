"""Metrics of decided labels, their resampling over examples, and tests of a difference.

Seeds: mean, sample standard deviation and t interval over runs, and Welch's t-test of two methods'
runs. Examples: one paired bootstrap over the test examples with the trained readers fixed, and an
exact test of the examples that differ; the larger p decides. Metrics are fractions; MCC lies
between -1 and 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from pgra.config import find_class
from pgra.data.tasks import METRICS
from pgra.report.text_metrics import bleu_of_counts

# of true labels, predictions and the task's label names
Metric = Callable[[Sequence[str], Sequence[str], Sequence[str]], float]
Values = npt.NDArray[np.float64]
_Counts = npt.NDArray[np.int64]
DRAWS = 2000
_FEW, _FLIPS = 16, 9_999
_DIGITS = 12  # sums in another order differ in a last digit
_SAME = 1e-12
RIGHT, WRONG = "right", "wrong"


@dataclass(frozen=True)
class CountsMetric:
    """A metric of the confusion matrix alone, so that resampling needs no examples.

    Attributes:
        of_counts: Values (S,) of S matrices (S, C, C), row label and column prediction.
        is_mean: Whether it is the share of examples that are right.
    """

    of_counts: Callable[[_Counts], Values]
    is_mean: bool = False

    def __call__(
        self, labels: Sequence[str], predictions: Sequence[str], names: Sequence[str]
    ) -> float:
        n, cells = len(names), confusion_cells(labels, predictions, names)
        return float(self.of_counts(np.bincount(cells, minlength=n * n).reshape(1, n, n))[0])


def _accuracy(counts: _Counts) -> Values:
    return np.asarray(_diagonal(counts).sum(-1) / counts.sum((-2, -1)), np.float64)


def _macro_f1(counts: _Counts) -> Values:
    both = (counts.sum(-1) + counts.sum(-2)).astype(np.float64)
    right = 2.0 * _diagonal(counts)
    f1 = np.divide(right, both, out=np.zeros_like(right), where=both > 0)
    return np.asarray(f1.mean(-1), np.float64)


def _mcc(counts: _Counts) -> Values:
    values = counts.astype(np.float64)
    true, guessed, total = values.sum(-1), values.sum(-2), values.sum((-2, -1))
    top = _diagonal(values).sum(-1) * total - (true * guessed).sum(-1)
    below = np.sqrt((total**2 - (guessed**2).sum(-1)) * (total**2 - (true**2).sum(-1)))
    return np.asarray(np.divide(top, below, out=np.zeros_like(top), where=below > 0), np.float64)


def _diagonal(counts: Any) -> Any:
    return np.diagonal(counts, axis1=-2, axis2=-1)


accuracy = CountsMetric(_accuracy, is_mean=True)
macro_f1 = CountsMetric(_macro_f1)  # mean of F1 over all names; 0 for a name that neither side uses
# Matthews' correlation for C labels (R_K of Gorodkin 2004); 0 where undefined (a constant side)
mcc = CountsMetric(_mcc)


def find_metric(name: str) -> Metric:
    """Return a metric by name, or from a module ("module:NAME"); a ConfigError if there is none."""
    if name == "exact_match":  # of RIGHT or WRONG: all should be RIGHT
        return accuracy
    metric: Metric = find_class("metric", name, METRICS)
    return metric


def measure(
    metric: str, labels: Sequence[str], predictions: Sequence[str], names: Sequence[str]
) -> dict[str, float]:
    """Return the task's metric first, then the others for labels, by name.

    Raises:
        ValueError: If the lengths differ, or there is nothing to measure.
    """
    others = METRICS if metric != "exact_match" else ()
    order = dict.fromkeys([metric, *others])
    return {name: float(find_metric(name)(labels, predictions, names)) for name in order}


def no_better_than_one_label(
    split: str, metric: str, value: float, labels: Sequence[str], names: Sequence[str]
) -> str | None:
    """Return a note if a value on a split is not above the commonest label's metric; else None."""
    common = max(names, key=labels.count)
    alone = measure(metric, labels, [common] * len(labels), names)[metric]
    if len(set(labels)) < 2 or value > alone:
        return None
    return (
        f"{metric} {value:.4f} on {split} is no better than answering '{common}' to everything "
        f"({alone:.4f})"
    )


def confusion_cells(
    labels: Sequence[str], predictions: Sequence[str], names: Sequence[str]
) -> _Counts:
    """Return each example's cell in the confusion matrix, row label and column prediction, (B,).

    Raises:
        ValueError: If the lengths differ, or there is nothing.
        KeyError: If a label has no name.
    """
    if not len(labels):
        raise ValueError("there is nothing to measure: no labels")
    number, n = {name: i for i, name in enumerate(names)}, len(names)
    pairs = zip(labels, predictions, strict=True)
    return np.array([number[a] * n + number[b] for a, b in pairs], dtype=np.int64)


# What a run's metric is made of, for each of B examples. A resample of the examples is how often
# each kind was drawn: examples of one kind count alike.


@dataclass(frozen=True)
class LabelOutcomes:
    """The true and the predicted label of each example; `names` are the task's labels."""

    metric: str
    labels: Sequence[str]
    predicted: Sequence[str]
    names: Sequence[str]

    @property
    def value(self) -> float:
        return float(find_metric(self.metric)(self.labels, self.predicted, self.names))

    @property
    def correct(self) -> list[bool]:
        return [a == b for a, b in zip(self.labels, self.predicted, strict=True)]

    @property
    def kinds(self) -> _Counts:
        """Each example's cell of the confusion matrix, (B,)."""
        return confusion_cells(self.labels, self.predicted, self.names)

    @property
    def parts(self) -> Values | None:
        """What each example adds to B times the metric, (B,); None where it is no mean."""
        metric = find_metric(self.metric)
        is_mean = isinstance(metric, CountsMetric) and metric.is_mean
        return np.array(self.correct, np.float64) if is_mean else None

    @property
    def traits(self) -> Values:
        """Numbers of each example, (B, R), that differ where two runs' outcomes do."""
        columns = self.kinds[:, None] % len(self.names) == np.arange(len(self.names))
        return np.asarray(columns, np.float64)

    def resample(self, kinds: _Counts, counts: Values) -> Values:
        """Return the metric of resamples, (draws,): how often each kind (U,) was drawn."""
        metric, n = find_metric(self.metric), len(self.names)
        if isinstance(metric, CountsMetric):
            # As float64 the product runs on BLAS; counts are far below 2**53, so it is exact.
            matrices = np.rint(counts @ (kinds[:, None] == np.arange(n * n)).astype(np.float64))
            return metric.of_counts(matrices.astype(np.int64).reshape(-1, n, n))
        names, values = np.array(self.names), []
        for row in counts:
            drawn = np.repeat(kinds, row.astype(np.int64))
            sides = names[drawn // n].tolist(), names[drawn % n].tolist()
            values.append(metric(*sides, self.names))
        return np.array(values, np.float64)


@dataclass(frozen=True, eq=False)
class TextOutcomes:
    """Measures of written texts, as rows of numbers; a duck type of `LabelOutcomes`.

    BLEU (Papineni et al. 2002) follows from the sum of the texts' counts (B, 10), PARENT's F
    (Dhingra et al. 2019) is the mean over texts (B, 1): such are `traits`. So a resample of the
    queries is a resample of rows: the paired bootstrap of Koehn 2004.
    """

    metric: str
    traits: Values

    @property
    def value(self) -> float:
        return float(self._of_sums(self.traits.sum(axis=0)[None])[0])

    @property
    def kinds(self) -> _Counts:
        return np.arange(len(self.traits))

    @property
    def parts(self) -> Values | None:
        return None if self.metric == "bleu" else self.traits[:, 0]

    def resample(self, kinds: _Counts, counts: Values) -> Values:
        return self._of_sums(counts @ self.traits[kinds])

    def _of_sums(self, sums: Values) -> Values:
        if self.metric == "bleu":
            return np.array([bleu_of_counts(row) for row in np.rint(sums).astype(np.int64)])
        return sums[:, 0] / len(self.traits)


Outcomes = LabelOutcomes | TextOutcomes


def draw_counts(
    kinds: npt.NDArray[Any], *, seed: int, draws: int = DRAWS
) -> tuple[npt.NDArray[Any], Values]:
    """Resample B examples (Efron 1979), as counts of those that all S runs decide alike.

    Returns the distinct columns (S, U) of `kinds` (S, B), and how often each was drawn, (draws, U).
    """
    distinct, counts = np.unique(kinds, axis=1, return_counts=True)
    shares = counts / kinds.shape[1]
    drawn = np.random.default_rng(seed).multinomial(kinds.shape[1], shares, size=draws)
    return distinct, drawn.astype(np.float64)


def bootstrap(runs: Sequence[Outcomes], *, seed: int, draws: int = DRAWS) -> Values:
    """Return the metric of several runs in the same resamples of their examples, (S, draws)."""
    kinds, counts = draw_counts(np.stack([run.kinds for run in runs]), seed=seed, draws=draws)
    return np.stack([run.resample(own, counts) for run, own in zip(runs, kinds, strict=True)])


def interval_95(draws: Values) -> tuple[float, float]:
    """Return the 2.5th and the 97.5th percentile."""
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)


@dataclass(frozen=True, eq=False)
class Difference:
    """How much better one method is than another on the same examples.

    Attributes:
        difference: Metric of a minus metric of b, each the mean over its seeds.
        draws: The same in each resample of the examples, (draws,).
        differing: How many of the examples the methods decide differently.
        parts: What each example adds to the difference, (B,); None if the metric is no mean.
    """

    difference: float
    draws: Values
    differing: int
    parts: Values | None = None

    @property
    def low(self) -> float:
        """2.5th percentile over resamples."""
        return interval_95(self.draws)[0]

    @property
    def high(self) -> float:
        """97.5th percentile over resamples."""
        return interval_95(self.draws)[1]

    @cached_property
    def p(self) -> float:
        """Two-sided p-value of no difference: the larger of the bootstrap's and `exact_p`.

        The bootstrap's is twice the share of resamples on the other side of 0, where 0 itself
        counts, at least 2 / (draws + 1); where few examples differ it is too small.
        """
        other_side = min(int((self.draws <= 0).sum()), int((self.draws >= 0).sum()))
        return max(min(1.0, 2 * (other_side + 1) / (len(self.draws) + 1)), self.exact_p)

    @cached_property
    def exact_p(self) -> float:
        """Two-sided p-value by swapping sides: exact for a mean, else its lower bound.

        If the methods are alike, each example's sides can be swapped. Of the 2 ** k ways for k
        examples that differ, at least the observed one and its mirror image are as extreme,
        whatever the metric (Noreen 1989; Yeh 2000).
        """
        if self.parts is None:
            return min(1.0, 2.0 ** (1 - self.differing))
        return sign_flip(self.parts)


def compare_methods(a: Sequence[Outcomes], b: Sequence[Outcomes], *, seed: int) -> Difference:
    """Compare two methods' mean metric over seeds on the same examples, resampled together."""
    values = bootstrap([*a, *b], seed=seed)
    traits = [np.mean([run.traits for run in side], axis=0) for side in (a, b)]
    differs = np.round(traits[0] - traits[1], _DIGITS).any(axis=1)
    known = [[p for run in side if (p := run.parts) is not None] for side in (a, b)]
    parts = None
    if all(known):
        parts = np.mean(known[0], axis=0) - np.mean(known[1], axis=0)
        parts = np.round(parts, _DIGITS) / len(parts)
        differs = parts != 0
    return Difference(
        float(np.mean([run.value for run in a]) - np.mean([run.value for run in b])),
        np.round(values[: len(a)].mean(axis=0) - values[len(a) :].mean(axis=0), _DIGITS),
        int(differs.sum()),
        parts,
    )


def bootstrap_mean(values: Values, *, seed: int) -> Values:
    """Return the mean of each resample of some examples' values, (draws,)."""
    (distinct,), counts = draw_counts(values[None], seed=seed)
    return np.asarray(np.round(counts @ distinct / len(values), _DIGITS), np.float64)


def compare_means(a: Values, b: Values, *, seed: int) -> Difference:
    """Compare two methods by a value of each example, (B,)."""
    gaps = np.round(a - b, _DIGITS)
    draws = bootstrap_mean(gaps, seed=seed)
    return Difference(float(gaps.mean()), draws, int((gaps != 0).sum()), gaps / len(gaps))


def average_differences(differences: Sequence[Difference]) -> Difference:
    """Return the mean over tasks, whose examples are resampled independently."""
    count = len(differences)
    known = [one.parts / count for one in differences if one.parts is not None]
    return Difference(
        float(np.mean([one.difference for one in differences])),
        np.round(np.stack([one.draws for one in differences]).mean(axis=0), _DIGITS),
        sum(one.differing for one in differences),
        np.concatenate(known) if len(known) == count else None,
    )


def sign_flip(parts: Sequence[float] | Values) -> float:
    """Return the two-sided p of a sum under random signs of its parts (Fisher 1935).

    For parts of one size it is the binomial test, so for right and wrong McNemar's exact test
    (McNemar 1947). Exact for these and for up to 16 parts other than 0; else by 9,999 draws.
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


def mcnemar(correct_a: Sequence[bool], correct_b: Sequence[bool]) -> float:
    """Return the two-sided p of McNemar's test, exact by the binomial (McNemar 1947).

    It is 1 if no example is right for one method only.
    """
    return sign_flip(np.asarray(correct_a, np.float64) - np.asarray(correct_b, np.float64))


def combine_p(p_values: Sequence[float]) -> float:
    """Return one p-value of several tests of one claim, under any dependence (Rueger 1978).

    The k-th smallest of n, times n / k, is a p-value; here k is the lower middle. It combines
    McNemar's tests of several seeds, whose examples are the same.
    """
    n, k = len(p_values), (len(p_values) + 1) // 2
    return min(1.0, sorted(p_values)[k - 1] * n / k)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for all tests together (Holm 1979), in the order given."""
    n, adjusted, before = len(p_values), [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(n), key=lambda i: p_values[i])):
        before = max(before, min(1.0, p_values[index] * (n - rank)))
        adjusted[index] = before
    return adjusted


@dataclass(frozen=True)
class Spread:
    """Mean of several runs' values, sample sd (n - 1), and the mean's 95 % interval by Student's t.

    All but mean and n are None for one value.
    """

    mean: float
    sd: float | None
    low: float | None
    high: float | None
    n: int


def mean_sd_interval(values: Sequence[float]) -> Spread:
    """Return mean, standard deviation and the mean's 95 % interval by Student's t."""
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
    """Return the two-sided p-value that two methods' seeds have one mean (Welch 1947).

    None where a side has one seed; 0 or 1 where all seeds of each side agree.
    """
    if len(a) < 2 or len(b) < 2:
        return None
    sides = [(float(np.mean(v)), float(np.std(v, ddof=1)), len(v)) for v in (a, b)]
    if sum(sd**2 / n for _, sd, n in sides) < _SAME**2:
        return 1.0 if abs(sides[0][0] - sides[1][0]) < _SAME else 0.0
    from scipy.stats import ttest_ind_from_stats

    return float(ttest_ind_from_stats(*sides[0], *sides[1], equal_var=False).pvalue)
