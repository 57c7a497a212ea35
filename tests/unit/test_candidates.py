"""What is true of any rows and scores: sorting, keeping, fusing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pgra.retrieval.bm25 import fuse_by_rank
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


def ranking(*lines):
    rows = np.array(lines, dtype=np.int64)
    scores = np.where(rows < 0, -np.inf, -np.arange(rows.shape[1], dtype=np.float32))
    return Candidates(rows, scores.astype(np.float32))


@given(
    st.lists(st.lists(st.integers(0, 9), unique=True, max_size=8), min_size=1, max_size=4),
    st.integers(1, 12),
)
def test_fusion_is_a_plain_sum_in_whatever_order_the_rankings_come(rankings, k):
    padded = [ranking([*rows, *[-1] * (8 - len(rows))]) for rows in rankings]
    fused = fuse_by_rank(padded, k)
    sums = {}
    for rows in rankings:
        for rank, row in enumerate(rows, 1):
            sums[row] = sums.get(row, 0) + 1 / (60 + rank)
    best = sort_plainly(np.array([*sums]), np.array([*sums.values()], np.float32), k)
    assert fused.rows[0].tolist() == [row for row, _ in best]
    np.testing.assert_allclose(fused.scores[0], [score for _, score in best], rtol=1e-6)
    if len(rankings) == 2:  # of more the sums may differ in their last digit
        np.testing.assert_array_equal(fuse_by_rank(padded[::-1], k).rows, fused.rows)


def test_a_score_that_is_not_a_number_is_refused():
    with pytest.raises(ValueError, match="NaN"):
        Candidates.best(np.array([[1]]), np.array([[np.nan]]), 1)
    missing = Candidates.best(np.array([[MISSING_ROW]]), np.array([[np.nan]]), 1)
    assert missing.scores[0, 0] == -np.inf
    with pytest.raises(ValueError, match="2, 3"):
        Candidates(np.zeros((2, 3), np.int64), np.zeros((3, 2), np.float32))
