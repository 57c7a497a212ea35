"""Tests by betting: wealth by hand, bounds that hold whenever one looks, arms that are alike."""

import math

import numpy as np
import pytest

from pgra.report.betting import SHARES, find_bounds, judge, log_wealth
from pgra.report.compare import LEVEL


def test_wealth_is_that_of_the_bets_by_hand():
    mean_share = sum(SHARES) / len(SHARES)
    assert log_wealth(np.array([1.0])) == pytest.approx(math.log(1 + mean_share))
    assert log_wealth(np.array([0.5]), 0.25) == pytest.approx(math.log(1 + mean_share * 0.2))
    # A loss comes after: the most wealth so far stays, and it begins with 1.
    assert log_wealth(np.array([1.0, -1.0])) == log_wealth(np.array([1.0]))
    assert log_wealth(np.array([-1.0, -1.0])) == log_wealth(np.zeros(0)) == 0
    lost = np.mean([(1 - share) * (1 + share) ** 3 for share in SHARES])
    assert log_wealth(np.array([-1.0, 1, 1, 1])) == pytest.approx(math.log(lost))


def test_bounds_close_in_and_mirror():
    values = np.random.default_rng(1).choice([-1.0, 0, 1], 400, p=[0.1, 0.6, 0.3])
    low, high = find_bounds(values)
    assert 0 < low < values.mean() < high < 0.4
    for first in range(0, 60, 5):  # p and the lower bound say the same
        is_sure = log_wealth(values[:first]) >= -math.log(LEVEL)
        assert is_sure == (find_bounds(values[:first])[0] > 0)
    assert find_bounds(-values) == (-high, -low)
    early = find_bounds(values[:100])
    assert early[0] <= low < high <= early[1]  # all hold together, so none is taken back
    assert find_bounds(values[:0]) == (-1, 1)


def test_whoever_looks_after_each_query_errs_as_rarely_as_the_test_says():
    generator = np.random.default_rng(0)
    false_gains = false_bounds = naive = 0
    for _ in range(100):
        arms = generator.random((3, 100)) < 0.4  # none is better than another
        false_gains += judge(arms.astype(float), 0.05).best != 0
        gaps = arms[1] - arms[0].astype(float)
        false_bounds += find_bounds(gaps)[0] > 0
        count = np.arange(1, 101)
        z = np.cumsum(gaps) / np.sqrt(np.maximum(np.cumsum(gaps**2), 1))
        naive += (z[count > 20] > 1.64).any()
    assert max(false_gains, false_bounds) <= 5
    assert naive > 10  # a one-sided test of 5 % at each look


def test_a_verdict_names_what_is_beaten_and_stops_where_no_arm_can_matter():
    bare = np.zeros(100)
    good = np.tile([1.0, 0, 1, 0], 25)
    verdict = judge([bare, good, bare], 0.05)
    assert (verdict.best, verdict.is_sure, verdict.beaten) == (1, True, {0, 2})
    assert verdict.p[0] == verdict.p[2] == 1 > 0.001 > verdict.p[1]
    copies = judge([bare, good, good], 0.05)  # neither beats the other
    assert (copies.beaten, copies.is_sure) == ({0}, False)
    more = [np.tile(values, 2) for values in (bare, good, good)]
    assert judge(more, 0.05).is_sure  # but one cannot be 5 points better
    assert judge([bare, bare], 0.05) == judge([bare + 1, bare + 1], 0.05)
    assert (judge([bare, bare], 0.05).best, judge([bare, bare], 0.05).is_sure) == (0, True)
    assert not judge([bare[:40], bare[:40]], 0.05).is_sure
    assert not judge([bare, bare], 0.02).is_sure
