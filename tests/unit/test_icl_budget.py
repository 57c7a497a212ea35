"""Prompts fit the window by leaving exemplars out, never by cutting the query."""

import pytest

from pgra.errors import ConfigError, DataError
from pgra.exemplars.fitting import fit_prompts


class Words:
    """An LM that counts words; nothing else of it is asked."""

    def __init__(self, window):
        self.window, self.counted = window, 0

    def count_tokens(self, texts):
        self.counted += len(texts)
        return [len(text.split()) for text in texts]


LENGTHS = [[3, 1, 4, 1, 5], [2, 2, 2, 2, 2], [9, 1, 1, 1, 1]]  # words of each exemplar
QUERIES = [2, 3, 4]


def write(query, count):
    return [" ".join(["w"] * (sum(LENGTHS[query][:count]) + QUERIES[query]))]


@pytest.mark.parametrize("window", range(8, 25))
def test_as_many_exemplars_are_kept_as_fit(window):
    fit = fit_prompts(Words(window), write, [5, 5, 5], names=["a", "b", "c"], num_new_tokens=3)
    for query in range(3):
        words = [len(write(query, count)[0].split()) for count in range(6)]
        expected = max(count for count in range(6) if words[count] <= window - 3)
        assert (fit.counts[query], fit.num_dropped[query]) == (expected, 5 - expected)
        assert fit.num_tokens[query] == words[expected]


def test_prompts_that_fit_are_counted_once():
    lm = Words(100)
    fit = fit_prompts(lm, write, [5, 5, 4], names=["a", "b", "c"], num_new_tokens=3)
    assert (fit.counts.tolist(), lm.counted) == ([5, 5, 4], 2)  # two of them are equal


def test_the_longest_of_a_querys_prompts_must_fit():
    def two(query, count):
        return [*write(query, count), "w " * 15]

    fit = fit_prompts(Words(18), two, [1, 1, 1], names=["a", "b", "c"], num_new_tokens=3)
    assert fit.num_tokens.tolist() == [15, 15, 15]
    with pytest.raises(DataError, match="query a has 15 tokens"):
        fit_prompts(Words(17), two, [1, 1, 1], names=["a", "b", "c"], num_new_tokens=3)


def test_a_query_that_does_not_fit_alone_is_named():
    told = (
        r"query b has 3 tokens without any exemplar, and the LM reads 5, 3 of them its answer "
        r"\(1 more are too long\): leave it out"
    )
    with pytest.raises(DataError, match=told):
        fit_prompts(Words(5), write, [5, 5, 5], names=["a", "b", "c"], num_new_tokens=3)


def test_a_window_without_room_for_one_exemplar_is_refused():
    with pytest.raises(ConfigError, match="reads 7 tokens, .* no query has room for one exemplar"):
        fit_prompts(Words(7), write, [5, 5, 5], names=["a", "b", "c"], num_new_tokens=3)
    bare = fit_prompts(Words(7), write, [0, 0, 0], names=["a", "b", "c"], num_new_tokens=3)
    assert bare.counts.tolist() == [0, 0, 0]
