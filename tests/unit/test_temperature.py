import math

import numpy as np
import pytest

from pgra.reader.predict import LEAST_EXAMPLES, fit_temperature, negative_log_likelihood


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
def test_the_fitted_temperature_makes_confidence_the_share_of_right_answers(gap, right):
    """sigmoid(gap / T) = right / 100, so T = gap / log(right / wrong)."""
    found = fit_temperature(*coin(gap, right, 100))
    assert found.temperature == pytest.approx(gap / math.log(right / (100 - right)), rel=1e-3)
    assert (found.num_examples, found.note) == (100, None)


@pytest.mark.parametrize(
    ("given", "temperature", "note"),
    [
        (coin(2.0, 30, LEAST_EXAMPLES - 1), 1.0, "49 dev examples are too few to fit it"),
        (coin(2.0, 60, 60), 1.0, "no other is better on the 60 dev examples"),
        (coin(0.0, 30, 60), 1.0, "no other is better on the 60 dev examples"),
        (coin(2.0, 30, 60), 10.0, None),
    ],
)
def test_where_no_temperature_fits_it_is_one_or_the_largest_with_a_note(given, temperature, note):
    found = fit_temperature(*given)
    assert (found.temperature, found.num_examples) == (temperature, 60 if temperature > 1 else 0)
    assert note in found.note if note else found.note is None
    assert fit_temperature(*coin(2.0, 30, LEAST_EXAMPLES)).temperature != 1.0  # the control
