import numpy as np
import pytest
from small_training import classifier_of, tokens

from pgra.reader.fid import FusionReader
from pgra.reader.inputs import SeparateInputs

ROWS = [
    ("a", ("A warm film <extra_id_0>", "A dull film <extra_id_0>"), "positive"),
    ("b", ("A story <extra_id_0>",), "negative"),
]
SCORES = np.log(np.array([[0.5, 0.5], [0.125, 0.5], [0.25, 0.5]], dtype=np.float32))


@pytest.fixture
def inputs(t5_dir):
    return tokens(t5_dir, ROWS)


def test_scores_are_averaged_over_an_examples_segments(inputs):
    """The means of log 1/2 and log 1/8, and of log 1/2 twice."""
    combined = SeparateInputs.over(inputs).combine(SCORES)
    expected = np.log([[0.25, 0.5], [0.25, 0.5]])
    np.testing.assert_allclose(combined, expected, rtol=1e-6)


def test_weighted_chances_are_summed(inputs):
    """0.75 * 1/2 + 0.25 * 1/8, and so on; one segment is sure to be read."""
    weighted = SeparateInputs.over(inputs, np.log([0.75, 0.25, 1.0]))
    expected = [[0.40625, 0.5], [0.25, 0.5]]
    np.testing.assert_allclose(np.exp(weighted.combine(SCORES)), expected, rtol=1e-6)


def test_a_segment_of_no_weight_says_nothing(inputs):
    weighted = SeparateInputs.over(inputs, np.array([0.0, -np.inf, 0.0]))
    np.testing.assert_allclose(weighted.combine(SCORES), SCORES[[0, 2]], rtol=1e-6)


def test_weights_must_be_one_for_each_segment(inputs):
    with pytest.raises(ValueError, match="2 weights, 3 segments"):
        SeparateInputs.over(inputs, np.zeros(2))


def test_segments_are_read_alone_and_not_together(t5_dir, inputs):
    reader = FusionReader.from_name(str(t5_dir))
    score = classifier_of(reader, t5_dir, batch_tokens=40).score
    each = score(tokens(t5_dir, [(t, (t,), None) for _, texts, _ in ROWS for t in texts]))
    apart, fused = score(SeparateInputs.over(inputs)), score(inputs)
    np.testing.assert_allclose(apart[0], each[:2].mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(apart[1], each[2], rtol=1e-5)
    np.testing.assert_allclose(fused[1], each[2], rtol=1e-5)
    assert abs(fused[0] - apart[0]).min() > 1e-3
