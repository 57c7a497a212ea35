"""Ways to compare states, by hand."""

import numpy as np

from pgra.rerank.base import add_topic
from pgra.rerank.head import column_stats
from pgra.rerank.similarity import find_similarity
from pgra.types import MISSING_ROW, Candidates

PASSAGES = np.array([[0, 0], [2, 20]], np.float32)
QUERIES = np.array([[1, 7], [3, 7]], np.float32)


def scores(similarity, passages=PASSAGES, queries=QUERIES):
    """Give (queries, passages) inner products."""
    left = similarity.of_passages(passages)
    return similarity.of_queries(queries, np.arange(len(queries))) @ left.T


def whitened(passages=PASSAGES, queries=QUERIES, *, is_unit=False):
    kind = find_similarity("whitened_cosine" if is_unit else "whitened")
    return kind(passages=column_stats(passages), queries=column_stats(queries))


def test_whitened_by_hand():
    """Passages become (-1, -1) and (1, 1), queries (-1, 0) and (1, 0): 7 is all they have there."""
    assert scores(whitened()).tolist() == [[1, -1], [-1, 1]]
    half, unit = 0.5**0.5, whitened(is_unit=True)
    np.testing.assert_allclose(scores(unit), [[half, -half], [-half, half]], rtol=1e-6)
    mean = PASSAGES.mean(axis=0, keepdims=True)
    assert scores(unit, passages=mean).tolist() == [[0], [0]]  # it is like nothing


def test_the_topic_is_added_by_hand():
    """Two of three are there: standardized they are -1 and 1, whatever their offset and scale."""
    rows = np.array([[4, 2, MISSING_ROW], [0, 1, 2], [5, 6, 7]])
    first = Candidates(rows, np.array([[9, 7, -np.inf], [0, 0, 0], [2, 1, 0]], np.float32))
    scores = np.array([[1, 3, -np.inf], [5, 3, 1], [0.1, 0.1, 0.1]], np.float32)
    root = 1.5**0.5
    expected = [[-1 + 0.5, 1 - 0.5, -np.inf], [root, 0, -root], [root / 2, 0, -root / 2]]
    np.testing.assert_allclose(add_topic(scores, first, 0.5), expected, atol=1e-6)
    moved = Candidates(rows, first.scores * 7 - 3)
    np.testing.assert_allclose(add_topic(scores * 100 + 1, moved, 0.5), expected, atol=1e-5)
