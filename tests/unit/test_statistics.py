"""Spreads, tests and the bootstrap against scipy, brute force, and values worked by hand."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_runs import NAMES, decided, labels_of, places
from scipy import stats

from pgra.data.tasks import METRICS
from pgra.report.metrics import (
    Decisions,
    Difference,
    average_differences,
    bootstrap,
    bootstrap_mean,
    combine_p,
    compare_means,
    compare_methods,
    find_metric,
    holm,
    interval_95,
    mcnemar,
    mean_sd_interval,
    sign_flip,
    welch,
)

CASES = [[0.5, 0.75], [1.0, 2.0, 4.0], [0.939, 0.944, 0.935, 0.94, 0.931]]
some = settings(derandomize=True, deadline=None, max_examples=30)
answers = st.lists(st.tuples(*[st.sampled_from(NAMES)] * 3), min_size=1, max_size=12)
"""Of each example the label and what two methods decided."""


def of(metric, labels, *sides):
    return [Decisions(metric, labels, side, NAMES) for side in sides]


def compare(metric, labels, a, b, seed=0):
    return compare_methods(of(metric, labels, *a), of(metric, labels, *b), seed=seed)


@pytest.mark.parametrize("values", CASES)
def test_the_interval_over_seeds_is_scipys(values):
    found = mean_sd_interval(values)
    low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-12)
    assert found.n == len(values)


def test_the_papers_table_8_by_hand():
    """SST-2 of three runs: 94.4, 93.5, 93.9; printed are 93.9 and 0.45; t of 2 is 4.303."""
    found = mean_sd_interval([94.4, 93.5, 93.9])
    assert found.mean == pytest.approx(93.9333, abs=1e-4)
    assert found.sd == pytest.approx(0.4509, abs=1e-4)
    assert found.high - found.mean == pytest.approx(4.3027 * 0.4509 / 3**0.5, abs=1e-3)


def test_welchs_test_is_scipys_in_either_order():
    for a, b in ((CASES[1], CASES[2]), (CASES[2], CASES[0])):
        p = stats.ttest_ind(a, b, equal_var=False).pvalue
        assert welch(a, b) == pytest.approx(p, rel=1e-9)
        assert welch(b, a) == welch(a, b) != pytest.approx(stats.ttest_ind(a, b).pvalue)


def test_welchs_test_where_seeds_agree_or_are_too_few():
    assert welch([0.9, 0.9], [0.9, 0.9]) == 1.0
    assert welch([0.9, 0.9], [0.8, 0.8]) == 0.0
    assert welch([0.9], [0.8, 0.7]) is None
    assert 0 < welch([0.9, 0.9], [0.8, 0.7]) < 1


@some
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40), st.randoms())
def test_mcnemar_is_scipys_binomial_whatever_the_order_and_the_side(pairs, random):
    a, b = zip(*pairs, strict=True)
    only_a = sum(x and not y for x, y in pairs)
    only_b = sum(y and not x for x, y in pairs)
    p = mcnemar(a, b)
    wanted = stats.binomtest(only_a, only_a + only_b).pvalue if only_a + only_b else 1.0
    assert p == pytest.approx(wanted)
    assert mcnemar(b, a) == p
    random.shuffle(pairs)
    assert mcnemar(*zip(*pairs, strict=True)) == p
    alike = [*pairs, (True, True), (False, False)]  # what both decide alike does not count
    assert mcnemar(*zip(*alike, strict=True)) == p


def test_mcnemar_by_hand():
    """3 against 9 of 12: 2 (1 + 12 + 66 + 220) / 2**12."""
    a = [True] * 5 + [True] * 3 + [False] * 9 + [False] * 2
    b = [True] * 5 + [False] * 3 + [True] * 9 + [False] * 2
    assert mcnemar(a, b) == pytest.approx(598 / 4096, rel=1e-12)
    with pytest.raises(ValueError, match="3 decisions and 2"):
        mcnemar([True] * 3, [True] * 2)


def test_holm_by_hand():
    """Smallest times 4, next times 3, next times 2 but not below the one before, last as it is."""
    assert holm([0.01, 0.04, 0.03, 0.2]) == pytest.approx([0.04, 0.09, 0.09, 0.2])
    assert holm([0.4, 0.9]) == pytest.approx([0.8, 0.9])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


@some
@given(st.lists(st.floats(0, 1), max_size=8), st.randoms())
def test_holm_is_monotone_never_smaller_and_goes_with_its_test(p_values, random):
    adjusted = holm(p_values)
    assert all(p <= a <= 1 for p, a in zip(p_values, adjusted, strict=True))
    pairs = sorted(zip(p_values, adjusted, strict=True))
    assert [a for _, a in pairs] == sorted(adjusted)
    order = random.sample(range(len(p_values)), len(p_values))
    assert holm([p_values[i] for i in order]) == [adjusted[i] for i in order]


@pytest.mark.parametrize(
    ("p_values", "combined"),
    [([0.3], 0.3), ([0.01, 0.5], 0.02), ([0.5, 0.02, 0.01], 0.03), ([0.9, 0.8, 0.7], 1.0)],
)
def test_several_p_values_become_the_lower_middle_times_seeds_over_its_place(p_values, combined):
    assert combine_p(p_values) == pytest.approx(combined)


parts_of = st.lists(st.integers(-9, 9), max_size=9)


@some
@given(parts_of, st.randoms())
def test_a_sum_of_signs_is_counted_over_all_signs_whatever_the_order_and_the_side(parts, random):
    signs = itertools.product((1, -1), repeat=len(parts))
    sums = [abs(sum(s * x for s, x in zip(own, parts, strict=True))) for own in signs]
    p = sign_flip(parts)
    assert p == pytest.approx(np.mean([value >= abs(sum(parts)) for value in sums]))
    assert sign_flip([-x for x in parts]) == pytest.approx(p)
    assert sign_flip([x / 7 for x in parts]) == pytest.approx(p)
    random.shuffle(parts)
    assert sign_flip([*parts, 0]) == pytest.approx(p)


def test_many_signs_are_drawn_and_near_the_t_test():
    many = np.random.default_rng(1).normal(0.2, 1, size=200)
    assert sign_flip(many) == pytest.approx(stats.ttest_1samp(many, 0).pvalue, abs=0.02)


@some
@given(answers, st.sampled_from(sorted(METRICS)))
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


@some
@given(answers, st.sampled_from(sorted(METRICS)), st.randoms())
def test_a_comparison_depends_on_no_order_of_examples_and_turns_with_the_sides(
    rows, metric, random
):
    def differ(rows):
        labels, a, b = ([row[i] for row in rows] for i in range(3))
        return compare(metric, labels, [a], [b]), compare(metric, labels, [b], [a])

    one, turned = differ(rows)
    # Kinds are drawn in another order with the sides turned, so only the exact part is the same.
    assert turned.difference == pytest.approx(-one.difference)
    assert turned.exact_p == pytest.approx(one.exact_p)
    assert 0 < one.p <= 1
    random.shuffle(rows)
    again, _ = differ(rows)
    np.testing.assert_array_equal(again.draws, one.draws)
    assert (again.difference, again.p) == (pytest.approx(one.difference), pytest.approx(one.p))


def test_the_bootstrap_has_the_spread_of_scipys():
    labels = labels_of(120)
    (draws,) = bootstrap(of("mcc", labels, decided(labels, places(120, 0.2, 0))), seed=0)
    theirs = stats.bootstrap(
        (
            [NAMES.index(x) for x in labels],
            [NAMES.index(x) for x in decided(labels, places(120, 0.2, 0))],
        ),
        lambda x, y: np.corrcoef(x, y)[0, 1],
        vectorized=False,
        paired=True,
        n_resamples=1000,
        method="percentile",
        random_state=0,
    )
    interval = theirs.confidence_interval
    assert interval_95(draws) == pytest.approx((interval.low, interval.high), abs=0.03)
    assert draws.std() == pytest.approx(theirs.standard_error, rel=0.1)


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_equal_predictions_give_p_1(metric):
    labels = labels_of(100)
    runs = [decided(labels, places(100, 0.2, seed)) for seed in range(3)]
    found = compare(metric, labels, runs, [runs[2], runs[0], runs[1]])
    assert (found.p, found.low, found.high) == (1.0, 0.0, 0.0)
    assert found.difference == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_planted_gap_of_5_points_on_500_examples_is_found(seeds):
    """One of twenty is wrong of the baseline only; both err elsewhere too, in 30 places alike."""
    labels, both = labels_of(500), places(500, 0.06, 99)
    free = [i for i in range(500) if i not in set(both)]
    others = [np.random.default_rng(s).choice(free, size=25, replace=False) for s in range(seeds)]
    b = [decided(labels, [*both, *more]) for more in others]
    found = compare("accuracy", labels, [decided(labels, both)] * seeds, b)
    assert found.difference == pytest.approx(0.05)
    assert found.p <= 0.001
    assert 0.02 < found.low < 0.05 < found.high < 0.08


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
    means = compare_means(share[0], share[1], seed=0)
    assert means.difference == pytest.approx(found.difference)
    assert means.exact_p == pytest.approx(found.exact_p)
    assert bootstrap_mean(by_example, seed=1).std() == pytest.approx(found.draws.std(), rel=0.1)


def test_the_average_of_tasks_has_the_spread_of_independent_ones():
    generator = np.random.default_rng(0)
    gaps = [
        Difference(0.02, generator.normal(0.02, 0.01, 5000), 9),
        Difference(0.04, generator.normal(0.04, 0.02, 5000), 9),
    ]
    found = average_differences(gaps)
    assert found.difference == pytest.approx(0.03)
    assert found.draws.std() == pytest.approx((0.01**2 + 0.02**2) ** 0.5 / 2, rel=0.05)


def test_a_mean_over_tasks_counts_the_examples_of_all():
    labels = labels_of(50)
    one = compare("accuracy", labels, [labels], [decided(labels, range(3))])
    two = compare("mcc", labels, [labels], [decided(labels, range(4))], seed=1)
    assert average_differences([one, one]).exact_p == pytest.approx(2 / 2**6)
    assert average_differences([one, two]).exact_p == 2 / 2**7


def gap_of(metric, only_a, only_b, n=60):
    """Compare two methods that differ on so many examples, each right where the other is wrong."""
    labels = labels_of(n)
    a, b = decided(labels, range(only_a, only_a + only_b)), decided(labels, range(only_a))
    return compare(metric, labels, [a], [b])


def test_seven_against_none_is_one_in_64():
    """2 / 2**7; a resample without any of the seven is one in 1,200, so the bootstrap says less."""
    found = gap_of("accuracy", 7, 0)
    assert found.p == 0.015625 == gap_of("accuracy", 0, 7).p
    assert found.low > 0


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_five_examples_cannot_be_significant_by_any_metric(metric):
    assert gap_of(metric, 5, 0).p >= 2 / 2**5
    assert gap_of(metric, 12, 0).p < 0.05  # the control


def test_more_examples_on_one_side_never_raise_p():
    found = [gap_of("accuracy", only_a, 2).p for only_a in range(2, 20)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]
