"""The nearest training examples of a query, by each metric."""

from functools import partial

import numpy as np
import pytest

from pgra.encoders.encoder import Encoder
from pgra.exemplars import VECTOR_METRICS
from pgra.exemplars.selection import VectorSimilarity
from pgra.retrieval.neighbors import Neighbors
from pgra.types import Example

TEXTS = [
    "A great film about the sea.",
    "A dull story of a town.",
    "The cast was warm and funny.",
    "A  GREAT film about the sea. ",  # a copy of the first, but for case and spaces
    "A terrible album.",
    "He was born in 1925.",
    "Lifeless actors in a garden.",
]
TRAIN = [
    Example(f"train-{i}", {"text": text}, "negative" if i in (1, 4, 6) else "positive")
    for i, text in enumerate(TEXTS)
]
NEW = [Example("test-0", {"text": "The boats came home."}), Example("test-1", {"text": "Red sea"})]


@pytest.fixture
def neighbors(encoder_dir, tmp_path):
    load = partial(Encoder, str(encoder_dir), normalize=False, device="cpu")
    return Neighbors(load, TRAIN, tmp_path)


ROWS = np.array([0, 1, 2, 4, 6])


def by_definition(metric, a, b):
    if metric == "euclidean":
        return -np.sqrt(((a - b) ** 2).sum())
    product = (a * b).sum()
    return product / np.sqrt((a**2).sum() * (b**2).sum()) if metric == "cosine" else product


@pytest.mark.parametrize("metric", VECTOR_METRICS)
def test_nearest_and_farthest_follow_the_definition(neighbors, metric):
    similarity = VectorSimilarity(neighbors, metric)
    pool = neighbors.vectors().astype(np.float64)
    asked = neighbors.encoder.encode_examples(NEW).astype(np.float64)
    every = np.array([[by_definition(metric, q, pool[row]) for row in ROWS] for q in asked])
    near, far = similarity.nearest(NEW, ROWS, 3), similarity.nearest(NEW, ROWS, 3, sign=-1)
    np.testing.assert_array_equal(near.rows, ROWS[np.argsort(-every)[:, :3]])
    np.testing.assert_array_equal(far.rows, ROWS[np.argsort(every)[:, :3]])
    np.testing.assert_allclose(near.scores, -np.sort(-every)[:, :3], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(far.scores, -np.sort(every)[:, :3], rtol=1e-4, atol=1e-5)
