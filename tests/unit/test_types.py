import numpy as np
import pytest

from pgra.core import MISSING_ROW, Candidates, Example, Worker

INF = float("inf")


def test_best_sorts_by_score_then_row_and_puts_missing_last():
    rows = np.array([[7, 3, MISSING_ROW, 5], [1, 0, 2, 9]])
    scores = np.array([[0.5, 0.5, 9.0, 2.0], [-1.0, -2.0, -1.0, -INF]])
    best = Candidates.best(rows, scores, 4)
    np.testing.assert_array_equal(best.rows, [[5, 3, 7, MISSING_ROW], [1, 2, 0, 9]])
    np.testing.assert_array_equal(best.scores, [[2.0, 0.5, 0.5, -INF], [-1.0, -1.0, -2.0, -INF]])
    assert best.rows.dtype == np.int64
    assert best.scores.dtype == np.float32


def test_best_keeps_k_and_fills_short_lines():
    rows, scores = np.array([[4, 2]]), np.array([[1.0, 3.0]])
    np.testing.assert_array_equal(Candidates.best(rows, scores, 1).rows, [[2]])
    wide = Candidates.best(rows, scores, 4)
    np.testing.assert_array_equal(wide.rows, [[2, 4, MISSING_ROW, MISSING_ROW]])
    np.testing.assert_array_equal(wide.scores, [[3.0, 1.0, -INF, -INF]])


def test_order_of_input_does_not_matter():
    rng = np.random.default_rng(0)
    rows = rng.permutation(50)[None]
    scores = rng.integers(0, 5, (1, 50)).astype(float)
    order = rng.permutation(50)
    one, other = (
        Candidates.best(rows, scores, 9),
        Candidates.best(rows[:, order], scores[:, order], 9),
    )
    np.testing.assert_array_equal(one.rows, other.rows)
    assert (Candidates.best(rows, -scores, 9).rows != one.rows).any()  # the control


def test_a_score_that_is_no_number_is_refused_unless_its_row_is_missing():
    with pytest.raises(ValueError, match="a score is NaN"):
        Candidates.best(np.array([[1]]), np.array([[np.nan]]), 1)
    missing = Candidates.best(np.array([[MISSING_ROW]]), np.array([[np.nan]]), 1)
    assert missing.scores[0, 0] == -INF


@pytest.mark.parametrize(("rows", "scores"), [((2, 3), (2, 4)), ((3,), (3,)), ((2, 3), (3, 2))])
def test_shapes_that_do_not_fit_are_refused(rows, scores):
    with pytest.raises(ValueError, match="rows are .*, scores are"):
        Candidates(np.zeros(rows, np.int64), np.zeros(scores, np.float32))


def test_top_keeps_the_first():
    best = Candidates(np.array([[3, 1, 2]]), np.array([[3.0, 2.0, 1.0]], np.float32))
    np.testing.assert_array_equal(best.top(2).rows, [[3, 1]])
    assert len(best.top(2)) == len(best) == 1
    np.testing.assert_array_equal(best.top(9).rows, best.rows)


def test_an_examples_text_joins_its_fields_in_order():
    assert Example("test-0", {"premise": "It rains.", "claim": "Wet."}).text == "It rains. Wet."


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_workers_share_all_units_once(world):
    shares = [Worker(rank, world).share(list("abcde")) for rank in range(world)]
    assert sorted(unit for share in shares for unit in share) == list("abcde")
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert [Worker(rank, world).is_main for rank in range(world)] == [True] + [False] * (world - 1)


def test_lines_are_sorted_each_for_itself():
    """Some fall already, some hold equal scores, a missing row or any order: as if alone."""
    rng = np.random.default_rng(0)
    rows = rng.permuted(np.tile(np.arange(20), (64, 1)), axis=1)
    scores = -np.sort(-rng.integers(0, 900, (64, 20)).astype(np.float32), axis=1)
    rows[3, 5], scores[3, 5] = MISSING_ROW, -np.inf
    scores[7] = rng.permuted(scores[7])
    is_falling = (np.diff(scores, axis=1) < 0).all(axis=1)
    assert 10 < is_falling.sum() < 60
    for k in (6, 20, 25):
        best = Candidates.best(rows, scores, k)
        for line in range(64):
            order = sorted(
                range(20), key=lambda i: (rows[line, i] < 0, -scores[line, i], rows[line, i])
            )
            expected = [*rows[line, order], *[MISSING_ROW] * 5][:k]
            np.testing.assert_array_equal(best.rows[line], expected)
            np.testing.assert_array_equal(best.scores[line, : min(k, 20)], scores[line, order][:k])
