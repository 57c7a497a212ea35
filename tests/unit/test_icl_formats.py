"""What is taken off for nothing, and the vote."""

import numpy as np

from pgra.exemplars.selection import vote
from pgra.methods.answers import calibrate


def test_calibration_by_hand():
    scores = np.log(np.array([[0.06, 0.04], [0.2, 0.2]], np.float32))
    # Without content the LM says 0.8 and 0.2 on the mean of three inputs.
    free = np.log(np.array([[[0.9, 0.1], [0.8, 0.2], [0.07, 0.03]]] * 2, np.float32))
    expected = np.array([[0.6 / 0.8, 0.4 / 0.2], [0.5 / 0.8, 0.5 / 0.2]])
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(np.exp(calibrate(scores, free)), expected, rtol=1e-5)
    even = np.zeros((2, 3, 2), np.float32)  # the control: an LM that leans to nothing
    plain = np.array([[0.6, 0.4], [0.5, 0.5]])
    np.testing.assert_allclose(np.exp(calibrate(scores, even)), plain, rtol=1e-5)

    scores = np.array([[-2000.0, -1.0]], np.float32)  # chances of next to nothing stay finite
    assert np.isfinite(calibrate(scores, even[:1])).all()


def test_a_tie_of_the_vote_goes_to_the_nearest_of_the_tied():
    assert list(vote(["c", "a", "b", "b", "a"])) == ["a", "b", "c"]
    assert list(vote(["c", "b", "a", "b", "a"])) == ["b", "a", "c"]  # the control
    assert vote(["c", "a", "a", "c"]) == {"c": 0.5, "a": 0.5}
    assert vote([]) == {}
