"""Tests of paired differences that may be looked at after every question, by betting.

    wealth(m) = mean over shares f of prod_i (1 + f (x_i - m) / (1 + m))

Someone who bets a share f of their money on each value x in [-1, 1] that its mean is above m has
this wealth, from 1 on. If the mean is at most m no bet pays on average, so the wealth ever reaches
1 / error with a probability of at most `error` (Ville 1939), whenever one looks and stops. It is
Waudby-Smith and Ramdas 2024 ("Estimating means of bounded random variables by betting", arXiv
2010.09686), section 4, with the diversified Kelly bets of its appendix. The wealth falls in m, so
all m that it does not refute are an interval, which holds at all times together.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from pgra.arrays import Values
from pgra.report.compare import LEVEL
from pgra.report.metrics import holm

SHARES = np.array([0.0625, 0.25, 0.5, 0.75, 1.0])
_STEPS = 1 << 23  # of a bound, from 0 to 1


def log_wealth(values: Values, mean: float = 0.0) -> float:
    """Return the log of the most wealth so far against a mean of at most `mean`, above -1.

    `values` are (n,) in [-1, 1], in the order in which they were seen; 0 for none.
    """
    growth = np.maximum(1 + SHARES[:, None] * (values - mean) / (1 + mean), 0)
    with np.errstate(divide="ignore"):  # who bets all may lose all
        paths = np.cumsum(np.log(growth), axis=1)
    wealth = np.logaddexp.reduce(paths, axis=0) - math.log(len(SHARES))
    return float(wealth.max(initial=0))


def find_bounds(values: Values) -> tuple[float, float]:
    """Return bounds of the mean of values in [-1, 1]; each always holds, but with error `LEVEL`.

    The lower one is above 0 where the p of "no gain" is below `LEVEL`: both are one-sided.
    """
    return _find_lower(values), -_find_lower(-values)


def _find_lower(values: Values) -> float:
    limit = -math.log(LEVEL)
    lower = bisect_left(
        range(1 - _STEPS, _STEPS),
        True,
        key=lambda step: log_wealth(values, step / _STEPS) < limit,
    )
    return lower / _STEPS - 1


@dataclass(frozen=True)
class Verdict:
    """What is sure of K arms, the first of which is the one to beat.

    Attributes:
        p: Of no gain over the first, by arm, after Holm over all of them; the first's is 1.
        beaten: Arms that another one surely beats.
        best: The arm to take: of those that surely gain, and are not beaten, the highest mean; the
            first if there is none.
        is_sure: Whether surely no other arm is better than the best by `least`.
    """

    p: Sequence[float]
    beaten: frozenset[int]
    best: int
    is_sure: bool


def judge(values: Sequence[Values], least: float) -> Verdict:
    """Judge K arms by their values of the same questions, in the order in which they were asked.

    Values are in [0, 1], or differ by at most 1; an arm may have been asked fewer questions than
    others. At each time, and at all of them together, there is a false gain with a probability of
    at most `LEVEL`, and so of a false "beaten" and of a false "sure" (Ville; Holm 1979 over pairs).
    """
    count = len(values)
    logs = {pair: log_wealth(gaps(values, *pair)) for pair in permutations(range(count), 2)}
    p: dict[tuple[int, int], float] = {}
    for is_gain in (True, False):
        pairs = [pair for pair in logs if (pair[1] == 0) == is_gain]
        p |= zip(pairs, holm([math.exp(-logs[pair]) for pair in pairs]), strict=True)
    beaten = frozenset(worse for (_, worse), value in p.items() if value <= LEVEL)
    of_gain = [1.0, *(p[arm, 0] for arm in range(1, count))]
    sure = [arm for arm in range(count) if of_gain[arm] <= LEVEL and arm not in beaten]
    best = max(sure, key=lambda arm: float(values[arm].mean()), default=0)
    # Any arm could be the best one by chance, but the first is always asked about.
    wanted = math.log((count if best else 1) / LEVEL)
    rivals = [arm for arm in range(count) if arm != best and arm not in beaten]
    is_sure = all(log_wealth(gaps(values, best, arm), -least) >= wanted for arm in rivals)
    return Verdict(of_gain, beaten, best, is_sure)


def gaps(values: Sequence[Values], a: int, b: int) -> Values:
    """Return how much better one arm is than another on each question that both were asked.

    A gap beyond 1 counts as 1.
    """
    count = min(len(values[a]), len(values[b]))
    return np.clip(values[a][:count] - values[b][:count], -1, 1)
