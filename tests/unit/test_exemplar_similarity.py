"""Similarities against their definitions, and what cannot be compared."""

from functools import partial

import numpy as np
import pytest
from conftest import SENTENCES

from pgra.core import Example
from pgra.encoders.encoder import Encoder
from pgra.exemplars import METRICS
from pgra.exemplars.selection import VectorSimilarity
from pgra.retrieval.neighbors import Neighbors

POOL = [Example(f"train-{i}", {"text": text}, str(i % 2)) for i, text in enumerate(SENTENCES)]
QUERIES = [Example("q0", {"text": "A dull film"}), Example("q1", {"text": "The blue sea of Rome"})]
ROWS = np.array([0, 1, 2, 4, 5, 7, 9, 11])


@pytest.fixture(scope="module")
def neighbors(encoder_dirs, tmp_path_factory):
    load = partial(Encoder.load, str(encoder_dirs["bert"]), normalize=False, device="cpu")
    return Neighbors(load, POOL, tmp_path_factory.mktemp("neighbors"))


def by_definition(metric, a, b):
    if metric == "euclidean":
        return -np.sqrt(((a - b) ** 2).sum())
    product = (a * b).sum()
    return product / np.sqrt((a**2).sum() * (b**2).sum()) if metric == "cosine" else product


@pytest.mark.parametrize("metric", METRICS)
def test_nearest_and_farthest_follow_the_definition(neighbors, metric):
    similarity = VectorSimilarity(neighbors, metric)
    pool = neighbors.vectors().astype(np.float64)
    asked = neighbors.encoder.encode_examples(QUERIES).astype(np.float64)
    every = np.array([[by_definition(metric, q, pool[row]) for row in ROWS] for q in asked])
    near, far = similarity.nearest(QUERIES, ROWS, 3), similarity.nearest(QUERIES, ROWS, 3, sign=-1)
    np.testing.assert_array_equal(near.rows, ROWS[np.argsort(-every)[:, :3]])
    np.testing.assert_array_equal(far.rows, ROWS[np.argsort(every)[:, :3]])
    np.testing.assert_allclose(near.scores, -np.sort(-every)[:, :3], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(far.scores, -np.sort(every)[:, :3], rtol=1e-4, atol=1e-5)
