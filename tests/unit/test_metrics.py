"""Metrics of labels against hand-worked values; every metric keeps one contract."""

import math

import numpy as np
import pytest

from pgra.data.tasks import METRICS, find_metric
from pgra.report.metrics import accuracy, macro_f1, mcc, no_better_than_one_label

TWO = ["n", "p"]


def from_counts(tp, fp, fn, tn):
    labels = ["p"] * tp + ["n"] * fp + ["p"] * fn + ["n"] * tn
    predictions = ["p"] * tp + ["p"] * fp + ["n"] * fn + ["n"] * tn
    return labels, predictions


def test_a_value_that_one_label_alone_gives_too_is_said():
    for value in (0.75, 0.5, 0.76):
        note = no_better_than_one_label("dev", "accuracy", value, ["p", "p", "n", "p"], TWO)
        assert (note is None) == (value > 0.75)
    assert no_better_than_one_label("dev", "accuracy", 0.5, ["p", "p"], TWO) is None


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_mcc_is_the_correlation_of_indicator_matrices(names):
    rng, k = np.random.default_rng(0), len(names)
    true, guess = rng.integers(0, k, 60), rng.integers(0, k, 60)
    guess[:30] = true[:30]
    x, y = np.eye(k)[true], np.eye(k)[guess]
    x, y = x - x.mean(0), y - y.mean(0)
    expected = (x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum())
    sides = [[names[i] for i in side] for side in (true, guess)]
    assert mcc(*sides, names) == pytest.approx(expected)
    assert mcc(["p", "n"], ["p", "p"], TWO) == mcc(["p", "p"], ["p", "p"], TWO) == 0  # undefined


def test_accuracy_and_macro_f1_by_hand():
    labels, predictions = from_counts(tp=2, fp=1, fn=1, tn=1)
    assert accuracy(labels, predictions, TWO) == pytest.approx(3 / 5)
    # F1 of p: 2*2 / (3 + 3); of n: 2*1 / (2 + 2)
    assert macro_f1(labels, predictions, TWO) == pytest.approx((4 / 6 + 2 / 4) / 2)
    assert macro_f1(labels, predictions, [*TWO, "unused"]) == pytest.approx((4 / 6 + 2 / 4) / 3)


@pytest.mark.parametrize("name", sorted(METRICS))
def test_every_metric_is_one_when_all_is_right_and_ignores_order(name):
    metric = find_metric(name)
    labels, predictions = from_counts(5, 2, 3, 4)
    assert metric(labels, labels, TWO) == pytest.approx(1)
    shuffled = metric(labels[::-1], predictions[::-1], TWO)
    assert shuffled == pytest.approx(metric(labels, predictions, TWO))
    assert shuffled < 1
