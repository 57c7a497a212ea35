"""Spreads, tests and the bootstrap against scipy, brute force, and values worked by hand."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted_runs import NAMES, decided, labels_of, places
from scipy import stats

from pgra.data.tasks import METRICS, find_metric
from pgra.report.metrics import (
    LabelOutcomes,
    bootstrap,
    combine_p,
    compare_methods,
    holm,
    sign_flip,
    t_interval,
    welch,
)

CASES = [[0.5, 0.75], [1.0, 2.0, 4.0], [0.939, 0.944, 0.935, 0.94, 0.931]]
# of each example the label and what two methods decided
answers = st.lists(st.tuples(*[st.sampled_from(NAMES)] * 3), min_size=1, max_size=12)


def of(metric, labels, *sides):
    return [LabelOutcomes(metric, labels, side, NAMES) for side in sides]


def compare(metric, labels, a, b, seed=0):
    return compare_methods(of(metric, labels, *a), of(metric, labels, *b), seed=seed)


def test_the_interval_over_seeds_and_welchs_test_are_scipys():
    for values in CASES:
        low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
        assert t_interval(values) == pytest.approx((low, high), rel=1e-12)
    for a, b in ((CASES[1], CASES[2]), (CASES[2], CASES[0])):
        p = stats.ttest_ind(a, b, equal_var=False).pvalue
        assert welch(a, b) == pytest.approx(p, rel=1e-9)
        assert welch(b, a) == welch(a, b) != pytest.approx(stats.ttest_ind(a, b).pvalue)
    assert welch([0.9, 0.9], [0.9, 0.9]) == 1.0  # seeds that agree
    assert welch([0.9, 0.9], [0.8, 0.8]) == 0.0
    assert welch([0.9], [0.8, 0.7]) is None  # too few


def test_holm_and_combined_p_values_by_hand():
    # Smallest times 4, next times 3, next times 2 but not below the one before, last as it is.
    assert holm([0.01, 0.04, 0.03, 0.2]) == pytest.approx([0.04, 0.09, 0.09, 0.2])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    # Of several seeds the lower middle, times the seeds over its place.
    several = [[0.3], [0.01, 0.5], [0.5, 0.02, 0.01], [0.9, 0.8, 0.7]]
    assert [combine_p(one) for one in several] == pytest.approx([0.3, 0.02, 0.03, 1.0])


parts_of = st.lists(st.integers(-9, 9), max_size=9)


@given(parts_of, st.randoms())
def test_a_sum_of_signs_is_counted_over_all_signs(parts, random):
    signs = itertools.product((1, -1), repeat=len(parts))
    sums = [abs(sum(s * x for s, x in zip(own, parts, strict=True))) for own in signs]
    p = sign_flip(parts)
    assert p == pytest.approx(np.mean([value >= abs(sum(parts)) for value in sums]))
    assert sign_flip([-x for x in parts]) == pytest.approx(p)
    random.shuffle(parts)
    assert sign_flip([*parts, 0]) == pytest.approx(p)


def test_many_signs_are_drawn_and_near_the_t_test():
    many = np.random.default_rng(1).normal(0.2, 1, size=200)
    assert sign_flip(many) == pytest.approx(stats.ttest_1samp(many, 0).pvalue, abs=0.02)
    right = [1] * 30 + [-1] * 10 + [0] * 9  # for one method only, for the other, for both
    assert sign_flip(right) == pytest.approx(stats.binomtest(30, 40).pvalue)


def share_of_good(labels, predictions, names):
    """Be a metric of the user's own, which is asked of each draw."""
    return list(predictions).count(names[1]) / len(labels)


@given(answers, st.sampled_from([*sorted(METRICS), f"{__name__}:share_of_good"]))
def test_the_bootstrap_is_the_metric_of_the_examples_that_were_drawn(rows, metric):
    """Each resample of the kinds is one of the examples: written out, it has the same value."""
    labels, a, b = ([row[i] for row in rows] for i in range(3))
    sides = of(metric, labels, a, b)
    values = bootstrap(sides, seed=0, draws=20)
    kinds = sorted(set(rows), key=lambda row: [NAMES.index(x) for x in row])
    shares = [rows.count(kind) / len(rows) for kind in kinds]
    drawn = np.random.default_rng(0).multinomial(len(rows), shares, size=20)
    for counts, value in zip(drawn, values.T, strict=True):
        again = [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
        truth, *both = ([row[i] for row in again] for i in range(3))
        wanted = [find_metric(metric)(truth, side, NAMES) for side in both]
        assert value.tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_seven_against_none_is_one_in_64(metric):
    """2 / 2**7; a resample without any of the seven is one in 1,200: the bootstrap says less."""
    labels = labels_of(60)
    one, none = decided(labels, range(7)), labels
    assert compare("accuracy", labels, [none], [one]).p == 2 / 2**7
    assert compare(metric, labels, [none], [decided(labels, range(5))]).p >= 2 / 2**5


def test_several_seeds_are_the_bootstrap_of_the_mean_correctness():
    """Accuracy is a mean over examples, and a mean's bootstrap spread is sd / sqrt(n)."""
    labels = labels_of(400)
    a = [decided(labels, places(400, 0.1, s)) for s in range(3)]
    b = [decided(labels, places(400, 0.2, 10 + s)) for s in range(2)]
    found = compare("accuracy", labels, a, b)
    share = [np.mean([np.array(p) == np.array(labels) for p in side], axis=0) for side in (a, b)]
    by_example = share[0] - share[1]
    assert found.difference == pytest.approx(by_example.mean())
    assert found.draws.mean() == pytest.approx(by_example.mean(), abs=0.002)
    assert found.draws.std() == pytest.approx(by_example.std() / 20, rel=0.05)
