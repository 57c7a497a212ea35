import numpy as np
import pytest
from planted_runs import NAMES, decided, labels_of, places
from scipy import stats

from pgra.report.metrics import (
    METRICS,
    Discordant,
    Gaps,
    average_gaps,
    combine_p,
    holm,
    mcnemar,
    mean_sd_interval,
    paired_bootstrap,
    paired_gaps,
    sign_flip,
    welch,
)

CASES = [[0.5, 0.75], [1.0, 2.0, 4.0], [0.939, 0.944, 0.935, 0.94, 0.931]]

TABLES = [(5, 3, 9, 2), (0, 1, 0, 0), (50, 10, 10, 5), (7, 0, 6, 1)]


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


def test_one_value_has_no_spread_and_none_is_refused():
    found = mean_sd_interval([0.5])
    assert (found.mean, found.sd, found.low, found.high) == (0.5, None, None, None)
    with pytest.raises(ValueError, match="no values"):
        mean_sd_interval([])


def right(both, only_a, only_b, neither):
    a = [True] * both + [True] * only_a + [False] * only_b + [False] * neither
    b = [True] * both + [False] * only_a + [True] * only_b + [False] * neither
    return a, b


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


def test_mcnemar_by_hand():
    """3 against 9 of 12: 2 (1 + 12 + 66 + 220) / 2**12."""
    assert mcnemar(*right(5, 3, 9, 2)) == pytest.approx(598 / 4096, rel=1e-12)


@pytest.mark.parametrize("table", TABLES)
def test_mcnemar_is_the_binomial_tail_of_scipy(table):
    _, only_a, only_b, _ = table
    p = mcnemar(*right(*table))
    tail = stats.binom.cdf(min(only_a, only_b), only_a + only_b, 0.5)
    assert p == pytest.approx(min(1.0, 2 * tail), rel=1e-9)


def test_interval_mcnemar_and_holm_are_those_of_statsmodels():
    """Where it is installed; the values by hand and by scipy are checked everywhere."""
    tables = pytest.importorskip("statsmodels.stats.contingency_tables")
    weightstats = pytest.importorskip("statsmodels.stats.weightstats")
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    for values in CASES:
        found = mean_sd_interval(values)
        theirs = weightstats.DescrStatsW(np.array(values)).tconfint_mean()
        assert (found.low, found.high) == pytest.approx(theirs, rel=1e-9)
    for both, only_a, only_b, neither in TABLES:
        theirs = tables.mcnemar([[both, only_a], [only_b, neither]], exact=True).pvalue
        ours = mcnemar(*right(both, only_a, only_b, neither))
        assert ours == pytest.approx(float(theirs), rel=1e-9)
    p_values = np.random.default_rng(0).uniform(0, 0.3, size=8).tolist()
    theirs = multitest.multipletests(p_values, method="holm")[1]
    assert holm(p_values) == pytest.approx(theirs.tolist(), rel=1e-12)


def test_mcnemar_does_not_depend_on_which_comes_first_nor_on_what_both_decide_alike():
    a, b = right(5, 3, 9, 2)
    assert mcnemar(a, b) == mcnemar(b, a)
    assert mcnemar(a, b) == mcnemar(*right(500, 3, 9, 100))
    assert mcnemar(a, b) != mcnemar(*right(5, 2, 10, 2))
    assert mcnemar(a, a) == 1.0
    with pytest.raises(ValueError, match="3 decisions and 2"):
        mcnemar([True] * 3, [True] * 2)


def test_holm_by_hand():
    """Smallest times 4, next times 3, next times 2 but not below the one before, last as it is."""
    assert holm([0.01, 0.04, 0.03, 0.2]) == pytest.approx([0.04, 0.09, 0.09, 0.2])
    assert holm([0.4, 0.9]) == pytest.approx([0.8, 0.9])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([0.03]) == [0.03]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("p_values", "combined"),
    [([0.3], 0.3), ([0.01, 0.5], 0.02), ([0.5, 0.02, 0.01], 0.03), ([0.9, 0.8, 0.7], 1.0)],
)
def test_several_p_values_become_the_lower_middle_times_seeds_over_its_place(p_values, combined):
    assert combine_p(p_values) == pytest.approx(combined)


def test_no_p_values_are_refused():
    with pytest.raises(ValueError, match="no p-values"):
        combine_p([])


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_equal_predictions_give_p_1(metric):
    labels = labels_of(100)
    runs = [decided(labels, places(100, 0.2, seed)) for seed in range(3)]
    found = paired_gaps(metric, labels, runs, [runs[2], runs[0], runs[1]], NAMES, seed=0)
    summary = found.summarise()
    assert (summary.p, summary.low, summary.high) == (1.0, 0.0, 0.0)
    assert found.difference == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_planted_gap_of_5_points_on_500_examples_is_found(seeds):
    """One of twenty is wrong of the baseline only; both err elsewhere too, in 30 places alike."""
    labels = labels_of(500)
    both = places(500, 0.06, 99)
    b = [decided(labels, [*both, *_others(both, 25, s)]) for s in range(seeds)]
    a = [decided(labels, both) for _ in range(seeds)]
    found = paired_gaps("accuracy", labels, a, b, NAMES, seed=0).summarise()
    assert found.difference == pytest.approx(0.05)
    assert found.low > 0
    assert found.p <= 0.001
    assert 0.02 < found.low < 0.05 < found.high < 0.08


def test_a_gap_within_noise_is_not_found():
    """13 against 12 examples that only one decides rightly."""
    labels = labels_of(500)
    a, b = decided(labels, range(12)), decided(labels, range(100, 113))
    found = paired_gaps("accuracy", labels, [a], [b], NAMES, seed=0).summarise()
    assert found.difference == pytest.approx(0.002)
    assert found.low < 0 < found.high
    assert found.p > 0.5


def _others(taken, count, seed):
    free = [i for i in range(500) if i not in set(taken)]
    return np.random.default_rng(seed).choice(free, size=count, replace=False).tolist()


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_with_one_seed_it_is_the_paired_bootstrap_of_the_metrics(metric):
    labels = labels_of(300)
    a, b = decided(labels, places(300, 0.1, 1)), decided(labels, places(300, 0.15, 2))
    ours = paired_gaps(metric, labels, [a], [b], NAMES, seed=3, draws=4000).summarise()
    known = paired_bootstrap(metric, labels, a, b, NAMES, seed=4, draws=4000)
    assert ours.difference == pytest.approx(known.difference)
    assert (ours.low, ours.high) == pytest.approx((known.low, known.high), abs=0.006)
    assert ours.p == pytest.approx(known.p, abs=0.03)


def test_several_seeds_are_the_bootstrap_of_the_mean_correctness():
    """Accuracy is a mean over examples, and a mean's bootstrap spread is sd / sqrt(n)."""
    labels = labels_of(400)
    a = [decided(labels, places(400, 0.1, s)) for s in range(3)]
    b = [decided(labels, places(400, 0.2, 10 + s)) for s in range(2)]
    found = paired_gaps("accuracy", labels, a, b, NAMES, seed=0, draws=4000)
    share = [np.mean([np.array(p) == np.array(labels) for p in side], axis=0) for side in (a, b)]
    by_example = share[0] - share[1]
    assert found.difference == pytest.approx(by_example.mean())
    assert found.draws.mean() == pytest.approx(by_example.mean(), abs=0.002)
    assert found.draws.std() == pytest.approx(by_example.std() / 20, rel=0.05)


def test_more_seeds_of_one_difference_narrow_the_interval():
    labels = labels_of(400)
    a = [decided(labels, places(400, 0.2, s)) for s in range(8)]
    b = [decided(labels, places(400, 0.2, 50 + s)) for s in range(8)]
    one = paired_gaps("accuracy", labels, a[:1], b[:1], NAMES, seed=0).draws.std()
    assert paired_gaps("accuracy", labels, a, b, NAMES, seed=0).draws.std() < one / 2


def test_the_average_of_tasks_has_the_spread_of_independent_ones():
    generator = np.random.default_rng(0)
    gaps = [
        Gaps(0.02, generator.normal(0.02, 0.01, 5000), Discordant(9)),
        Gaps(0.04, generator.normal(0.04, 0.02, 5000), Discordant(9)),
    ]
    found = average_gaps(gaps)
    assert found.difference == pytest.approx(0.03)
    assert found.draws.std() == pytest.approx((0.01**2 + 0.02**2) ** 0.5 / 2, rel=0.05)
    with pytest.raises(ValueError, match="no tasks"):
        average_gaps([])


def test_a_system_without_predictions_is_refused():
    with pytest.raises(ValueError, match="no predictions"):
        paired_gaps("accuracy", ["bad"], [], [["bad"]], NAMES, seed=0)


def gap_of(metric, only_a, only_b, n=60):
    """Compare two systems that differ on so many examples, each right where the other is wrong."""
    labels = labels_of(n)
    a, b = decided(labels, range(only_a, only_a + only_b)), decided(labels, range(only_a))
    both = paired_gaps(metric, labels, [a], [b], NAMES, seed=0).summarise()
    assert paired_bootstrap(metric, labels, a, b, NAMES, seed=0).p == pytest.approx(both.p, abs=0.1)
    return both


def bootstrap_p(gaps):
    return min(1.0, 2 * (1 + min((gaps.draws <= 0).sum(), (gaps.draws >= 0).sum())) / 2001)


def test_seven_against_none_is_one_in_64():
    """2 / 2**7; a resample without any of the seven is one in 1,200, so the bootstrap says less."""
    found = gap_of("accuracy", 7, 0)
    assert found.p == 0.015625
    assert found.low > 0
    assert gap_of("accuracy", 0, 7).p == found.p


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_five_examples_cannot_be_significant_by_any_metric(metric):
    if metric == "exact_match":
        pytest.skip("of texts")
    assert gap_of(metric, 5, 0).p >= 2 / 2**5
    assert gap_of(metric, 12, 0).p < 0.05  # the control


def test_where_many_differ_the_exact_test_and_the_bootstrap_agree():
    labels = labels_of(400)
    a, b = decided(labels, range(60, 100)), decided(labels, range(60))
    gaps = paired_gaps("accuracy", labels, [a], [b], NAMES, seed=0)
    assert gaps.discordant.p == pytest.approx(stats.binomtest(40, 100).pvalue)
    assert bootstrap_p(gaps) == pytest.approx(gaps.discordant.p, abs=0.02)
    assert gaps.summarise().p == max(bootstrap_p(gaps), gaps.discordant.p)


def test_more_examples_on_one_side_never_raise_p():
    found = [gap_of("accuracy", only_a, 2).p for only_a in range(2, 20)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


def test_a_sum_of_signs_is_scipys_permutation_test():
    generator = np.random.default_rng(1)
    for count in (2, 5, 11):
        parts = generator.normal(0.4, 1, size=count)
        theirs = stats.permutation_test(
            (parts, np.zeros(count)),
            lambda x, y, axis: np.sum(x - y, axis=axis),
            permutation_type="samples",
            n_resamples=np.inf,
        ).pvalue
        assert sign_flip(parts) == pytest.approx(theirs)
    many = generator.normal(0.2, 1, size=200)
    assert sign_flip(many) == pytest.approx(stats.ttest_1samp(many, 0).pvalue, abs=0.02)
    assert sign_flip([]) == sign_flip([0.0]) == 1.0


def test_a_mean_over_tasks_counts_the_examples_of_all():
    labels = labels_of(50)
    one = paired_gaps("accuracy", labels, [labels], [decided(labels, range(3))], NAMES, seed=0)
    two = paired_gaps("mcc", labels, [labels], [decided(labels, range(4))], NAMES, seed=1)
    assert average_gaps([one, one]).discordant.p == pytest.approx(2 / 2**6)
    assert average_gaps([one, two]).discordant == Discordant(7)
    assert average_gaps([one, two]).summarise().p >= 2 / 2**7
