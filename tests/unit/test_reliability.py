import math

import numpy as np
import pytest

from pgra.report.metrics import expected_calibration_error, measure_reliability


def test_calibration_error_is_worked_out_by_hand():
    chances = np.array([[0.9, 0.1], [0.9, 0.1], [0.55, 0.45], [0.3, 0.7]])
    truth = [0, 1, 0, 1]
    # Bin (13/15, 14/15]: two at 0.9, one right, a gap of 0.4; (8/15, 9/15]: 0.55, right, 0.45;
    # (10/15, 11/15]: 0.7, right, 0.3. So (2 * 0.4 + 0.45 + 0.3) / 4.
    assert expected_calibration_error(chances, truth) == pytest.approx(0.3875)
    # In one bin they nearly cancel: |0.7625 - 0.75|.
    assert expected_calibration_error(chances, truth, bins=1) == pytest.approx(0.0125)


def test_a_bin_holds_its_upper_border_and_not_its_lower():
    chances = np.array([[0.5, 0.5], [0.6, 0.4]])  # the first is wrong, the second right
    # Of two bins 0.5 lies in the first: (0.5 + 0.4) / 2. In one bin it would be |0.5 - 0.4| / 2.
    assert expected_calibration_error(chances, [1, 0], bins=2) == pytest.approx(0.45)
    assert expected_calibration_error(chances, [1, 0], bins=1) == pytest.approx(0.05)


def test_a_sure_reader_that_is_right_errs_by_nothing_and_a_wrong_one_by_all():
    chances = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert expected_calibration_error(chances, [0, 1]) == 0.0
    assert expected_calibration_error(chances, [1, 0]) == 1.0


def test_a_temperature_is_taken_before_both():
    scores = np.log(np.array([[0.8, 0.2]], dtype=np.float32))
    plain = measure_reliability(scores, [0])
    assert plain.nll == pytest.approx(-math.log(0.8), rel=1e-5)
    assert plain.ece == pytest.approx(0.2, rel=1e-5)
    warm = measure_reliability(scores, [0], temperature=2.0)  # 4 to 1 is then 2 to 1
    assert warm.nll == pytest.approx(-math.log(2 / 3), rel=1e-5)
    assert warm.ece == pytest.approx(1 / 3, rel=1e-5)
