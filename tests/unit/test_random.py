from collections import Counter

import numpy as np
import pytest

from pgra.retrieval.random import RandomRetriever

QUERIES = [f"query number {i}" for i in range(400)]


def draw(num_passages, k, queries=QUERIES):
    return RandomRetriever(num_passages, {}).retrieve(queries, k)


@pytest.mark.parametrize("num_passages", [30, 100_000])  # shuffled whole, and drawn
def test_passages_are_drawn_without_repeats_and_by_the_query_alone(num_passages):
    found = draw(num_passages, 20)
    assert all(len(set(line)) == 20 for line in found.rows.tolist())
    assert found.rows.min() >= 0
    assert found.rows.max() < num_passages
    np.testing.assert_array_equal(draw(num_passages, 20, QUERIES[5:]).rows, found.rows[5:])
    np.testing.assert_array_equal(draw(num_passages, 7).rows, found.rows[:, :7])
    assert (found.rows[0] != found.rows[1]).any()  # the control: another query, other passages
    assert found.scores[3].tolist() == [-place for place in range(20)]


def test_every_passage_is_as_likely_as_the_others():
    """400 queries by 10 of 40 passages: each is drawn 100 times, give or take 5 x 8.7."""
    counts = Counter(draw(40, 10).rows.ravel().tolist())
    assert len(counts) == 40
    assert max(abs(count - 100) for count in counts.values()) < 44
    firsts = Counter(draw(4, 4).rows[:, 0].tolist())  # and in the first place: 100, 5 x 8.7
    assert max(abs(firsts[row] - 100) for row in range(4)) < 44


def test_a_corpus_can_be_drawn_to_its_end():
    assert sorted(draw(25, 25, ["all"]).rows[0].tolist()) == list(range(25))
    large = (1 << 15) + 1  # beyond those that are shuffled
    assert len(set(draw(large, large - 5, ["most"]).rows[0].tolist())) == large - 5
