import random

import pytest

from pgra.lm.batching import token_budget_batches


def test_a_hand_worked_case():
    # Longest first: 9 alone (2 rows of 9 are 18 > 12); 4, 3, 3 pad to 12; 2, 1 are left.
    assert token_budget_batches([3, 9, 1, 4, 2, 3], 12) == [[1], [3, 0, 5], [4, 2]]


def test_each_index_comes_once_and_each_batch_keeps_the_budget():
    lengths = [random.Random(0).randint(1, 64) for _ in range(500)]
    batches = token_budget_batches(lengths, 256)
    assert sorted(i for batch in batches for i in batch) == list(range(500))
    assert all(len(b) * max(lengths[i] for i in b) <= 256 for b in batches)
    firsts = [lengths[b[0]] for b in batches]
    assert firsts == sorted(firsts, reverse=True)


def test_a_text_over_the_budget_goes_alone():
    assert token_budget_batches([50, 2, 2], 10) == [[0], [1, 2]]


def test_max_rows_limits_a_batch():
    assert token_budget_batches([1, 1, 1], 10, max_rows=2) == [[0, 1], [2]]


def test_nothing_gives_nothing_and_empty_texts_fit():
    assert token_budget_batches([], 5) == []
    assert token_budget_batches([0, 0], 5) == [[0, 1]]


def test_a_budget_below_one_is_refused():
    with pytest.raises(ValueError, match="budget is 0"):
        token_budget_batches([1], 0)
