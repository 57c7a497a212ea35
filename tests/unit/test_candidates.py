"""What is true of any rows and scores: sorting, keeping, fusing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pgra.retrieval.union import fuse
from pgra.types import MISSING_ROW, Candidates

few_scores = st.sampled_from([-1.0, 0.0, 0.5, 2.0, 3.0, 7.0])


@st.composite
def lines(draw):
    """Some queries' rows in any order, each once, some missing, with few different scores."""
    count, width = draw(st.integers(0, 4)), draw(st.integers(1, 12))
    rows = [draw(st.permutations(range(width))) for _ in range(count)]
    rows = np.array(rows, np.int64).reshape(count, width)
    is_missing = draw(arrays.arrays(bool, (count, width), elements=st.booleans()))
    scores = draw(arrays.arrays(np.float32, (count, width), elements=few_scores))
    return np.where(is_missing, MISSING_ROW, rows), scores


def sort_plainly(rows, scores, k):
    present = sorted((-s, r) for r, s in zip(rows.tolist(), scores.tolist(), strict=True) if r >= 0)
    kept = [(row, -score) for score, row in present][:k]
    return kept + [(MISSING_ROW, -np.inf)] * (k - len(kept))


@given(lines(), st.integers(1, 15))
def test_best_is_a_plain_sort_whatever_the_order_and_top_its_beginning(given_lines, k):
    rows, scores = given_lines
    best = Candidates.best(rows, scores, k)
    assert (best.rows.dtype, best.scores.dtype) == (np.int64, np.float32)
    for line in range(len(rows)):
        pairs = zip(best.rows[line].tolist(), best.scores[line].tolist(), strict=True)
        assert list(pairs) == sort_plainly(rows[line], scores[line], k)
    again = Candidates.best(rows[:, ::-1], scores[:, ::-1], k)
    np.testing.assert_array_equal(again.rows, best.rows)
    kept, shorter = best.top(k // 2), Candidates.best(rows, scores, k // 2)
    np.testing.assert_array_equal(kept.rows, shorter.rows)
    np.testing.assert_array_equal(kept.scores, shorter.scores)


@given(lines())
def test_fusion_needs_no_order_scale_or_stage_that_finds_nothing(given_lines):
    rankings = [Candidates.best(*given_lines, 12), Candidates.best(*given_lines, 3)]
    moved = [Candidates(r.rows, r.scores * 4 - 8) for r in rankings[::-1]]
    other = fuse([*moved, Candidates.missing(len(moved[0]), 5)], 9)
    np.testing.assert_allclose(fuse(rankings, 9).scores, other.scores, atol=1e-6)


def test_fusion_by_hand():
    """Standardized they are 1, -1 and 1, -1: 2 and 0 above the last. Row 7 has one stage alone."""
    first = Candidates(np.array([[5, 4], [-1, -1]]), np.array([[9, 7], [-np.inf] * 2], np.float32))
    second = Candidates(np.array([[4, 3], [7, -1]]), np.array([[2, 1], [3, -np.inf]], np.float32))
    fused = fuse([first, second], 3)
    assert fused.rows.tolist() == [[4, 5, 3], [7, -1, -1]]
    assert fused.scores.tolist() == [[2, 2, 0], [0, -np.inf, -np.inf]]


def test_a_score_that_is_not_a_number_is_refused():
    with pytest.raises(ValueError, match="NaN"):
        Candidates.best(np.array([[1]]), np.array([[np.nan]]), 1)
    missing = Candidates.best(np.array([[MISSING_ROW]]), np.array([[np.nan]]), 1)
    assert missing.scores[0, 0] == -np.inf
    with pytest.raises(ValueError, match="2, 3"):
        Candidates(np.zeros((2, 3), np.int64), np.zeros((3, 2), np.float32))
