import math

import numpy as np
import pytest

from pgra.reader.calibrate import LEAST_EXAMPLES, fit_temperature, negative_log_likelihood


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


def test_scores_may_be_shifted_without_end():
    scores, truth = coin(2.0, 3, 4)
    shifted = negative_log_likelihood(scores - 1e4, truth)
    assert shifted == pytest.approx(negative_log_likelihood(scores, truth), rel=1e-5)


@pytest.mark.parametrize(("gap", "right"), [(2.0, 75), (0.5, 75), (8.0, 90)])
def test_the_fitted_temperature_makes_confidence_the_share_of_right_answers(gap, right):
    """sigmoid(gap / T) = right / 100, so T = gap / log(right / wrong)."""
    found = fit_temperature(*coin(gap, right, 100))
    assert found.temperature == pytest.approx(gap / math.log(right / (100 - right)), rel=1e-3)
    assert (found.num_examples, found.note) == (100, None)


def test_too_few_examples_leave_the_temperature_at_one():
    found = fit_temperature(*coin(2.0, 30, LEAST_EXAMPLES - 1))
    assert (found.temperature, found.num_examples) == (1.0, 0)
    assert found.note == (
        "probabilities are not calibrated, temperature is 1: "
        "49 dev examples are too few to fit it (at least 50)"
    )
    assert fit_temperature(*coin(2.0, 30, LEAST_EXAMPLES)).temperature != 1.0


def test_a_reader_that_is_always_right_is_not_made_surer():
    found = fit_temperature(*coin(2.0, 60, 60))
    assert (found.temperature, found.num_examples) == (1.0, 0)
    assert "the 60 dev examples are too easy to name another" in found.note


@pytest.mark.parametrize("right", [30, 0])
def test_a_reader_that_guesses_gets_the_largest_temperature(right):
    found = fit_temperature(*coin(2.0, right, 60))
    assert (found.temperature, found.num_examples) == (10.0, 60)
    assert found.note == "temperature is 10, the largest: probabilities tell little"


def test_equal_scores_have_no_better_temperature():
    found = fit_temperature(*coin(0.0, 30, 60))
    assert found.temperature == 1.0
    assert "no other is better on the 60 dev examples" in found.note
