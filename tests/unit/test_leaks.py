"""The leak guard: what is nearly the query's own text is left out, and replaced."""

import numpy as np
import pytest

from pgra.data.text import text_key
from pgra.retrieval.neighbors import LeakGuard
from pgra.types import MISSING_ROW, Candidates

POOL = [
    "A great film, by the sea!",
    "a  GREAT film by the sea",
    "A dull town.",
    "The sea by a great film",  # the words of the first
    "one two three four five six seven eight nine thirteen",
    "Red apples grow here.",
]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("what is C++", "what is C#"),
        ("I love it :)", "I love it :("),
        ("is -5 a prime", "is 5 a prime"),
        ("कि", "की"),  # letters of Devanagari are marks
    ],
)
def test_signs_that_change_the_meaning_count(one, other):
    assert text_key(one) != text_key(other)
    assert text_key(f"{one} !") == text_key(f"“{one}”.")  # the control
    guard = LeakGuard([one, other, one.upper(), f" {one}"])
    assert guard.distinct.tolist() == [0, 1]


QUESTIONS = [
    *("who wrote Hamlet", "what is C++", "is 5 a prime", "what is the capital of Iran"),
    *("how do you get to the web site", "it is n't a very good film", "the county fair"),
    *("what country is the old town in", "what county is the river in"),
    *("what country is the lake in", "北京在哪里"),
]


@pytest.mark.parametrize(
    ("query", "row"),
    [
        *(("who wrote Hamlett please", 0), ("is 5 prime?", 2), ("it isn't a very good film", 5)),
        *(("what is teh capital of Iran", 3), ("how do you get to the website", 4)),
        *(("who wrote Macbeth", None), ("what is C", None), ("is 15 a prime", None)),
        ("what county is the old town in", None),  # a letter less; both words are known
        *(("please", None), ("南京在哪里", None)),
    ],
)
def test_a_short_text_is_the_same_with_a_little_changed_and_no_more(query, row):
    is_leak = LeakGuard(QUESTIONS).leaks(query)
    assert [n for n in range(len(QUESTIONS)) if is_leak(n)] == ([] if row is None else [row])


@pytest.mark.parametrize(
    ("query", "jaccard", "expected"),
    [
        ("a great film by the sea", 1.0, {0, 1, 3}),
        ("A great film by the blue sea", 6 / 7, {0, 1, 3}),
        ("A great film by the blue sea", 0.9, set()),  # 6 common words of 7
        ("one, two, three, four, five, six, seven, eight, nine, thirten", 1.0, {4}),  # a slip
    ],
)
def test_nearly_the_same_is_told_by_the_share_of_common_words(query, jaccard, expected):
    is_leak = LeakGuard(POOL, jaccard=jaccard).leaks(query)
    assert {row for row in range(len(POOL)) if is_leak(row)} == expected


@pytest.mark.parametrize(
    ("query", "ranked", "expected", "dropped", "depths"),
    [
        ("A great film by the sea", [3, 0, 2, 5, 4, 1], [2, 5], 2, [3, 6]),  # two of three fell
        ("Blue boats", [3, 0, 2, 5, 4], [3, 0], 0, [3]),  # the control
        ("A town", [2, MISSING_ROW, MISSING_ROW], [2, MISSING_ROW], 0, [3]),  # there is no more
    ],
)
def test_what_is_left_out_is_counted_and_replaced_by_the_next(
    query, ranked, expected, dropped, depths
):
    asked = []

    def search(depth):
        asked.append(depth)
        line = np.array([ranked[:depth]], dtype=np.int64)
        return Candidates(line, np.zeros(line.shape, np.float32))

    found, num_dropped = LeakGuard(POOL).nearest(search, [query], 2)
    assert (found.rows.tolist(), num_dropped.tolist(), asked) == ([expected], [dropped], depths)
