import faiss
import numpy as np
import pytest

from pgra.retrieval.faiss import Rescored, is_lossy

RNG = np.random.default_rng(0)
VECTORS = RNG.standard_normal((300, 16)).astype(np.float16).astype(np.float32)
QUERIES = RNG.standard_normal((7, 16)).astype(np.float32)
EXACT = np.argsort(-(QUERIES @ VECTORS.T), axis=1)[:, :10]


@pytest.fixture(scope="module")
def lossy():
    index = faiss.index_factory(16, "SQ4", faiss.METRIC_INNER_PRODUCT)
    index.train(VECTORS)
    index.add(VECTORS)
    return index


@pytest.mark.parametrize(
    ("factory", "lossy"),
    [
        *((name, False) for name in ("Flat", "IVF16,Flat", "IVF65536_HNSW32,Flat", "HNSW32")),
        *((name, False) for name in ("HNSW32,Flat", "SQfp16")),
        *((name, True) for name in ("SQ8", "PQ8", "IVF16,PQ8", "OPQ8_16,IVF16,PQ8", "PCA8,Flat")),
        *((name, True) for name in ("IVF16,SQfp16", "HNSW32,SQ8", "SQfp16,Flat", "LSH")),
    ],
)
def test_an_index_is_lossy_where_it_keeps_less_than_the_shards(factory, lossy):
    assert is_lossy(factory) == lossy


def test_enough_hits_scored_again_are_the_exact_search(lossy):
    found = Rescored(lossy, VECTORS.__getitem__, factor=30).search(QUERIES, 10)
    np.testing.assert_array_equal(found.rows, EXACT)
    truth = np.take_along_axis(QUERIES @ VECTORS.T, EXACT, 1)
    np.testing.assert_allclose(found.scores, truth, rtol=1e-5)
    assert (lossy.search(QUERIES, 10)[1] != EXACT).any()  # the control


def test_a_factor_of_one_changes_the_order_and_not_the_hits(lossy):
    found = Rescored(lossy, VECTORS.__getitem__, factor=1).search(QUERIES, 10)
    own = lossy.search(QUERIES, 10)[1]
    np.testing.assert_array_equal(np.sort(found.rows), np.sort(own))
    assert (np.diff(found.scores) <= 0).all()
    assert (found.rows != own).any()


def test_queries_are_scored_in_groups_as_alone(lossy, monkeypatch):
    whole = Rescored(lossy, VECTORS.__getitem__, factor=4).search(QUERIES, 10)
    monkeypatch.setattr("pgra.retrieval.faiss._GROUP_BYTES", 2 * 4 * 16 * 40)
    parts = Rescored(lossy, VECTORS.__getitem__, factor=4).search(QUERIES, 10)
    np.testing.assert_array_equal(parts.rows, whole.rows)


def test_hits_that_an_index_leaves_missing_stay_missing():
    index = faiss.index_factory(16, "IVF16,SQ8", faiss.METRIC_INNER_PRODUCT)
    index.train(np.repeat(VECTORS, 3, axis=0))
    index.add(VECTORS)
    found = Rescored(index, VECTORS.__getitem__, factor=4).search(QUERIES, 200)
    missing = found.rows == -1
    assert missing.any()
    assert not missing[:, 0].any()
    assert (np.isneginf(found.scores) == missing).all()
