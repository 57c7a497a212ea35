"""Prompts fit the window by leaving exemplars out, never by cutting the query."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgra.errors import ConfigError, DataError
from pgra.prompts.fitting import fit_prompts


def fit(window, wanted=(5, 5, 5), written=None):
    """Fit prompts of an LM that counts words."""
    return fit_prompts(
        lambda texts: [len(text.split()) for text in texts],
        written or write,
        wanted,
        names=["a", "b", "c"],
        window=window,
        num_new_tokens=3,
    )


LENGTHS = [[3, 1, 4, 1, 5], [2, 2, 2, 2, 2], [9, 1, 1, 1, 1]]  # words of each exemplar
QUERIES = [2, 3, 4]


def write(query, count):
    return [" ".join(["w"] * (sum(LENGTHS[query][:count]) + QUERIES[query]))]


@given(
    lengths=st.lists(st.lists(st.integers(1, 9), max_size=6), min_size=1, max_size=5),
    room=st.integers(3, 30),
)
@settings(derandomize=True, deadline=None, max_examples=60)
def test_as_many_exemplars_are_kept_as_fit_and_the_query_is_whole(lengths, room):
    def words(query, count):
        return "e " * sum(lengths[query][:count]) + "the query"

    asked = []

    def count_tokens(texts):
        asked.extend(texts)
        return [len(text.split()) for text in texts]

    has_no_room = all(own and own[0] + 2 > room for own in lengths)
    refused = pytest.raises(ConfigError, match="no query has room for one exemplar")
    with refused if has_no_room else contextlib.nullcontext():
        found = fit_prompts(
            count_tokens,
            lambda query, count: [words(query, count)],
            [len(own) for own in lengths],
            names=[str(i) for i in range(len(lengths))],
            window=room + 3,
            num_new_tokens=3,
        )
    if has_no_room:
        return
    for query, own in enumerate(lengths):
        fits = [n for n in range(len(own) + 1) if len(words(query, n).split()) <= room]
        assert (found.counts[query], found.num_dropped[query]) == (fits[-1], len(own) - fits[-1])
        assert found.num_tokens[query] == len(words(query, fits[-1]).split())
    assert all(text.endswith("the query") for text in asked)


def test_prompts_that_fit_are_counted_once_and_the_longest_of_a_querys_must_fit():
    counted = []

    def count_tokens(texts):
        counted.extend(texts)
        return [len(text.split()) for text in texts]

    values = {"names": ["a", "b", "c"], "window": 100, "num_new_tokens": 3}
    found = fit_prompts(count_tokens, write, [5, 5, 4], **values)
    assert (found.counts.tolist(), len(counted)) == ([5, 5, 4], 2)  # two of them are equal

    def two(query, count):
        return [*write(query, count), "w " * 15]

    assert fit(18, [1, 1, 1], two).num_tokens.tolist() == [15, 15, 15]
    with pytest.raises(DataError, match="query a has 15 tokens"):
        fit(17, [1, 1, 1], two)


def test_a_query_that_does_not_fit_alone_is_named():
    message = (
        r"query b has 3 tokens without any exemplar, and the LM reads 5, 3 of them its answer "
        r"\(1 more are too long\): leave it out"
    )
    with pytest.raises(DataError, match=message):
        fit(5)
    assert fit(7, [0, 0, 0]).counts.tolist() == [0, 0, 0]
