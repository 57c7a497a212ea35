"""Metrics against hand-worked values, and the bootstrap against what is known of it."""

import math

import numpy as np
import pytest

from pgra.report.metrics import (
    METRICS,
    accuracy,
    bootstrap_interval,
    macro_f1,
    mcc,
    measure,
    paired_bootstrap,
)

TWO = ["n", "p"]


def from_counts(tp, fp, fn, tn):
    labels = ["p"] * tp + ["n"] * fp + ["p"] * fn + ["n"] * tn
    predictions = ["p"] * tp + ["p"] * fp + ["n"] * fn + ["n"] * tn
    return labels, predictions


@pytest.mark.parametrize("counts", [(6, 2, 1, 3), (1, 5, 4, 2), (10, 0, 0, 7)])
def test_mcc_of_two_labels_is_the_textbook_formula(counts):
    tp, fp, fn, tn = counts
    expected = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert mcc(*from_counts(*counts), TWO) == pytest.approx(expected)


def test_mcc_of_three_labels_is_the_correlation_of_indicator_matrices():
    rng = np.random.default_rng(0)
    true, guess = rng.integers(0, 3, 60), rng.integers(0, 3, 60)
    guess[:30] = true[:30]
    x, y = np.eye(3)[true], np.eye(3)[guess]
    x, y = x - x.mean(0), y - y.mean(0)
    expected = (x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum())
    names = ["a", "b", "c"]
    assert mcc([names[i] for i in true], [names[i] for i in guess], names) == pytest.approx(
        expected
    )


def test_mcc_is_zero_where_it_is_undefined_and_minus_one_when_all_is_wrong():
    assert mcc(["p", "n"], ["p", "p"], TWO) == 0
    assert mcc(["p", "p"], ["p", "p"], TWO) == 0
    assert mcc(["p", "n"], ["n", "p"], TWO) == -1


def test_accuracy_and_macro_f1_by_hand():
    labels, predictions = from_counts(tp=2, fp=1, fn=1, tn=1)
    assert accuracy(labels, predictions, TWO) == pytest.approx(3 / 5)
    # F1 of p: 2*2 / (3 + 3); of n: 2*1 / (2 + 2)
    assert macro_f1(labels, predictions, TWO) == pytest.approx((4 / 6 + 2 / 4) / 2)
    assert macro_f1(labels, predictions, [*TWO, "unused"]) == pytest.approx((4 / 6 + 2 / 4) / 3)


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_every_metric_is_one_when_all_is_right_and_ignores_order(metric):
    labels, predictions = from_counts(5, 2, 3, 4)
    assert METRICS[metric](labels, labels, TWO) == pytest.approx(1)
    shuffled = METRICS[metric](labels[::-1], predictions[::-1], TWO)
    assert shuffled == pytest.approx(METRICS[metric](labels, predictions, TWO))
    assert shuffled < 1


def test_measure_gives_the_tasks_metric_first():
    labels, predictions = from_counts(5, 2, 3, 4)
    values = measure("mcc", labels, predictions, TWO)
    assert list(values) == ["mcc", "accuracy", "macro_f1"]
    assert values["accuracy"] == pytest.approx(9 / 14)


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="unknown metric 'acc'"):
        measure("acc", ["p"], ["p"], TWO)
    with pytest.raises(ValueError, match="1 labels, 2 predictions"):
        accuracy(["p"], ["p", "n"], TWO)
    with pytest.raises(ValueError, match="nothing to measure"):
        accuracy([], [], TWO)
    with pytest.raises(ValueError, match="'x' is not among the label names: n, p"):
        accuracy(["p"], ["x"], TWO)


def test_interval_of_accuracy_is_the_binomial_one():
    labels, predictions = from_counts(tp=400, fp=50, fn=50, tn=500)  # 0.9 of 1,000
    interval = bootstrap_interval("accuracy", labels, predictions, TWO, seed=0)
    error = math.sqrt(0.9 * 0.1 / 1000)
    assert interval.low == pytest.approx(0.9 - 1.96 * error, abs=0.003)
    assert interval.high == pytest.approx(0.9 + 1.96 * error, abs=0.003)
    assert interval == bootstrap_interval("accuracy", labels, predictions, TWO, seed=0)
    mccs = {bootstrap_interval("mcc", labels, predictions, TWO, seed=s) for s in (0, 0, 1)}
    assert len(mccs) == 2


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_interval_agrees_with_resampling_examples_one_by_one(metric):
    labels, predictions = from_counts(60, 20, 10, 40)
    rng = np.random.default_rng(3)
    values = []
    for _ in range(1500):
        rows = rng.integers(0, len(labels), len(labels))
        values.append(
            METRICS[metric]([labels[i] for i in rows], [predictions[i] for i in rows], TWO)
        )
    interval = bootstrap_interval(metric, labels, predictions, TWO, seed=0)
    low, high = np.percentile(values, [2.5, 97.5])
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=0.025)


def test_paired_bootstrap_of_equal_systems_finds_nothing():
    labels, predictions = from_counts(60, 20, 10, 40)
    same = paired_bootstrap("accuracy", labels, predictions, predictions, TWO, seed=0)
    assert (same.difference, same.low, same.high, same.p) == (0, 0, 0, 1)


def test_paired_bootstrap_sees_a_gain_and_its_sign():
    labels, worse = from_counts(60, 20, 10, 40)
    better = paired_bootstrap("mcc", labels, labels, worse, TWO, seed=0)
    assert better.difference == pytest.approx(1 - mcc(labels, worse, TWO))
    assert 0 < better.low <= better.difference <= better.high
    assert better.p == pytest.approx(2 / 2001)
    mirrored = paired_bootstrap("mcc", labels, worse, labels, TWO, seed=0)
    assert mirrored.difference == -better.difference
    assert mirrored.p == better.p


def test_pairing_is_what_makes_a_small_gain_certain():
    labels, base = from_counts(tp=400, fp=50, fn=50, tn=500)
    fixed = list(base)
    wrong = [i for i, (x, y) in enumerate(zip(labels, base, strict=True)) if x != y][:10]
    for i in wrong:
        fixed[i] = labels[i]
    gain = paired_bootstrap("accuracy", labels, fixed, base, TWO, seed=0)
    assert gain.difference == pytest.approx(0.01)
    assert gain.p < 0.01
    # Alone, the two intervals overlap by far.
    assert bootstrap_interval("accuracy", labels, base, TWO, seed=0).high > 0.91
