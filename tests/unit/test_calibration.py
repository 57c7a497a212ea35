import math
from dataclasses import replace

import numpy as np
import pytest

from pgra.arrays import log_softmax
from pgra.errors import ConfigError, ModelError
from pgra.reader.calibration import (
    LEAST_EXAMPLES,
    find_lean,
    fit_calibration,
    fit_temperature,
    match_shares,
    negative_log_likelihood,
)


def coin(gap, right, count):
    """Scores that always favour label 0 by `gap`, which is right so often."""
    scores = np.tile(np.array([[gap, 0.0]], dtype=np.float32), (count, 1))
    return scores, [0] * right + [1] * (count - right)


def test_negative_log_likelihood_is_worked_out_by_hand():
    scores = np.log(np.array([[0.8, 0.2], [0.3, 0.7]], dtype=np.float32))
    by_hand = -(math.log(0.2) + math.log(0.7)) / 2
    assert negative_log_likelihood(scores, [1, 1]) == pytest.approx(by_hand, rel=1e-6)
    # At T = 2 odds become their roots: 4 to 1 is then 2 to 1, so label 1 has a third.
    warm = negative_log_likelihood(scores[:1], [1], temperature=2.0)
    assert warm == pytest.approx(math.log(3), rel=1e-6)


@pytest.mark.parametrize(("gap", "right"), [(2.0, 75), (8.0, 90)])
def test_the_fitted_confidence_is_the_share_of_right_answers(gap, right):
    """sigmoid(gap / T) = right / 100, so T = gap / log(right / wrong)."""
    found = fit_temperature(*coin(gap, right, 100))
    assert found.temperature == pytest.approx(gap / math.log(right / (100 - right)), rel=1e-3)
    assert (found.num_examples, found.note) == (100, None)


@pytest.mark.parametrize(
    ("given", "temperature"),
    [
        (coin(2.0, 30, LEAST_EXAMPLES - 1), 1.0),
        (coin(2.0, 60, 60), 1.0),
        (coin(0.0, 30, 60), 1.0),
        (coin(2.0, 30, 60), 10.0),
    ],
)
def test_where_no_temperature_fits_it_is_one_or_the_largest(given, temperature):
    found = fit_temperature(*given)
    assert (found.temperature, found.num_examples) == (temperature, 60 if temperature > 1 else 0)
    assert fit_temperature(*coin(2.0, 30, LEAST_EXAMPLES)).temperature != 1.0  # the control


def leaning(shares, count=400, lean=2.0, seed=0):
    """Scores of texts with labels by `shares`, all leaning to label 0 whatever the text."""
    generator = np.random.default_rng(seed)
    truth = generator.choice(len(shares), size=count, p=shares)
    scores = generator.normal(size=(count, len(shares)))
    scores[np.arange(count), truth] += 2.5
    scores[:, 0] += lean
    return scores.astype(np.float32), truth


def accuracy(logits, truth):
    return float((logits.argmax(axis=1) == truth).mean())


@pytest.mark.parametrize("label_bias", ["dev", "batch"])
@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.1, 0.9), (0.2, 0.3, 0.5)])
def test_a_lean_to_one_label_is_taken_out(label_bias, shares):
    scores, truth = leaning(shares)
    texts, _ = leaning(shares, seed=1)
    calibration = fit_calibration(label_bias, scores, truth, np.array(shares), lambda: texts)
    others, right = leaning(shares, seed=2)
    plain, _ = leaning(shares, lean=0.0, seed=2)
    assert accuracy(calibration.apply(others), right) >= accuracy(plain, right) - 0.01
    assert accuracy(others, right) < accuracy(plain, right) - 0.05  # the control: it did lean
    kept = replace(calibration, is_bias_out=False)
    assert accuracy(kept.apply(others), right) == accuracy(others, right)


@pytest.mark.parametrize(
    ("count", "share", "label"),
    [(38, 0.5, 1), (35, 0.5, None), (38, 0.95, None)],  # of 40 texts; share of label 1 in training
)
def test_a_lean_to_one_label_is_seen(count, share, label):
    scores = np.zeros((40, 2), np.float32)
    scores[:count, 1] = 1.0
    assert find_lean(scores, np.array([1 - share, share])) == label


def test_the_mean_prediction_becomes_the_shares():
    scores, _ = leaning((0.5, 0.5))
    for shares in ((0.5, 0.5), (0.1, 0.9)):
        logits = scores + match_shares(scores, np.array(shares))
        mean = np.exp(log_softmax(logits)).mean(axis=0)
        np.testing.assert_allclose(mean, shares, atol=1e-4)
    assert np.exp(log_softmax(scores)).mean(axis=0)[0] > 0.6  # the control


@pytest.mark.parametrize(
    ("label_bias", "num_dev", "num_texts", "bias_from"),
    [
        ("auto", 200, 200, "dev"),
        ("auto", 10, 200, "batch"),
        ("batch", 200, 200, "batch"),
        ("none", 200, 200, "dev"),
        ("auto", 10, 20, "20 texts are too few to see a label bias (50)"),
    ],
)
def test_what_the_bias_is_fitted_on(label_bias, num_dev, num_texts, bias_from):
    scores, truth = leaning((0.5, 0.5))
    calibration = fit_calibration(
        label_bias,
        scores[:num_dev],
        truth[:num_dev],
        np.array([0.5, 0.5]),
        lambda: scores[:num_texts],
    )
    assert calibration.bias_from == bias_from
    assert calibration.is_bias_out == (label_bias != "none")
    assert len(calibration.bias) == (0 if num_texts == 20 else 2)


def test_bad_input_is_refused():
    scores, truth = leaning((0.5, 0.5), count=100)
    shares = np.array([0.5, 0.5])
    with pytest.raises(ConfigError, match="has 0"):
        fit_calibration("dev", scores, np.zeros_like(truth), shares, lambda: scores)
    broken = np.full_like(scores, np.nan)
    with pytest.raises(ModelError):
        fit_calibration("dev", broken, truth, shares, lambda: broken)
