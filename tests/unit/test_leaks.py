"""The leak guard: what is nearly the query's own text is left out, and replaced."""

import numpy as np
import pytest

from pgra.errors import ConfigError
from pgra.retrieval.leaks import LeakGuard, text_key
from pgra.types import MISSING_ROW, Candidates

POOL = [
    "A great film, by the sea!",
    "a  GREAT film by the sea",
    "A dull town.",
    "The sea by a great film",  # the words of the first
    "one two three four five six seven eight nine ten",
    "Red apples grow here.",
]


def test_case_spaces_and_punctuation_do_not_count():
    assert text_key("  It's GREAT --  really!! ") == text_key("it s great really")
    assert text_key("Straße") == text_key("STRASSE")
    assert text_key("a great film") != text_key("a great town")  # the control
    assert text_key("?!") != text_key("...")


def test_of_copies_the_first_stands_for_all():
    assert LeakGuard(POOL).distinct.tolist() == [0, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("query", "jaccard", "expected"),
    [
        ("a great film by the sea", 1.0, {0, 1, 3}),
        ("A great film by the blue sea", 1.0, set()),  # 6 common words of 7
        ("A great film by the blue sea", 6 / 7, {0, 1, 3}),
        ("A great film by the blue sea", 0.9, set()),
        ("one two three four five six seven eight nine", 0.9, {4}),  # 9 of 10
        ("one two three four five six seven eight nine", 0.91, set()),
    ],
)
def test_nearly_the_same_is_told_by_the_share_of_common_words(query, jaccard, expected):
    is_leak = LeakGuard(POOL, jaccard=jaccard).leaks(query)
    assert {row for row in range(len(POOL)) if is_leak(row)} == expected


def search_all(rows):
    """Give one query's nearest in this order, and count how deep was looked."""
    depths = []

    def search(depth):
        depths.append(depth)
        line = np.array([rows[:depth]], dtype=np.int64)
        return Candidates(line, -np.arange(line.shape[1], dtype=np.float32)[None, :])

    return search, depths


def test_what_is_left_out_is_counted_and_replaced_by_the_next():
    search, depths = search_all([3, 0, 2, 5, 4])
    allowed = LeakGuard(POOL).nearest(search, ["A great film by the sea"], 2)
    assert allowed.candidates.rows.tolist() == [[2, 5]]
    assert allowed.candidates.scores.tolist() == [[-2, -3]]
    assert allowed.num_dropped.tolist() == [2]
    assert depths == [3, 5]  # deeper only because two of three fell
    search, depths = search_all([3, 0, 2, 5, 4])
    other = LeakGuard(POOL).nearest(search, ["Blue boats"], 2)  # the control
    assert (other.candidates.rows.tolist(), other.num_dropped.tolist()) == ([[3, 0]], [0])
    assert depths == [3]


def test_a_search_that_finds_no_more_is_not_repeated():
    def search(depth):
        depths.append(depth)
        rows = np.full((1, depth), MISSING_ROW)
        rows[0, 0] = 2
        return Candidates(rows, np.where(rows == 2, 1.0, -np.inf).astype(np.float32))

    depths = []
    allowed = LeakGuard(POOL).nearest(search, ["A town"], 2)
    assert allowed.candidates.rows.tolist() == [[2, MISSING_ROW]]
    assert depths == [3]


@pytest.mark.parametrize("jaccard", [0, 1.5])
def test_a_share_that_is_none_is_refused(jaccard):
    with pytest.raises(ConfigError, match=rf"leak_jaccard is {jaccard}: it must be above 0"):
        LeakGuard(POOL, jaccard=jaccard)
