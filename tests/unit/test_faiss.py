"""Exact search, exact scores for lossy hits."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgra.retrieval.faiss import VectorSource, is_lossy, nearest, scan

RNG = np.random.default_rng(0)
QUERIES = RNG.standard_normal((7, 16)).astype(np.float32)
VECTORS = RNG.standard_normal((101, 16)).astype(np.float16).astype(np.float32)
PRODUCTS = QUERIES @ VECTORS.T
ORDER = np.argsort(-PRODUCTS, axis=1)[:, :9]
WAYS = ["cpu", "cpu:0"]  # FAISS, and the way of a GPU


def cut(rows, size):
    return [(rows[i : i + size], VECTORS[rows[i : i + size]]) for i in range(0, len(rows), size)]


@pytest.mark.parametrize("device", WAYS)
@pytest.mark.parametrize("size", [3, 40, 101])
def test_a_search_in_blocks_is_a_sort_of_all_products(device, size):
    shuffled = np.random.default_rng(size).permutation(101)
    found = scan(QUERIES, cut(shuffled, size), 9, device=device)
    np.testing.assert_array_equal(found.rows, ORDER)
    np.testing.assert_allclose(found.scores, np.take_along_axis(PRODUCTS, ORDER, 1), rtol=1e-5)
    few = scan(QUERIES, cut(np.array([5, 2]), 1), 3, device=device)
    assert (np.sort(few.rows, axis=1) == [-1, 2, 5]).all()
    assert np.isneginf(few.scores[:, 2]).all()


@pytest.mark.parametrize("device", [*WAYS[1:], pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("are_kept", [True, False])
def test_float16_chooses_and_float32_scores(device, are_kept, monkeypatch):
    """Near neighbours that float16 swaps, and long queries whose products float16 does not hold."""
    rng = np.random.default_rng(3)
    vectors = (1 + rng.standard_normal((3000, 64)) / 256).astype(np.float16)
    queries = np.float32(1e4) * (1 + rng.standard_normal((20, 64)) / 8).astype(np.float32)
    products = queries.astype(np.float64) @ vectors.T.astype(np.float64)
    true = -np.sort(-products, axis=1)[:, :9]
    halves = lambda: iter(np.array_split(vectors, 7))  # noqa: E731
    source = VectorSource(3000, 64, None, halves, device)
    if not are_kept:
        monkeypatch.setattr(VectorSource, "_held", [])
    monkeypatch.setattr("pgra.retrieval.faiss._GPU_ROWS", 1000)
    monkeypatch.setattr("pgra.retrieval.faiss._GATHERED", 64 * 41 * 3)
    found = replace(source).search(queries, 9)
    np.testing.assert_allclose(found.scores, true, rtol=1e-6)
    np.testing.assert_allclose(np.take_along_axis(products, found.rows, 1), true, rtol=1e-6)
    monkeypatch.setattr("pgra.retrieval.faiss._SPARE", 0)  # the control
    assert np.abs(replace(source).search(queries, 9).scores / true - 1).max() > 1e-6


@given(
    st.lists(st.lists(st.integers(-2, 2), min_size=3, max_size=3), min_size=1, max_size=30),
    st.integers(1, 12),
    st.integers(1, 4),
)
def test_in_memory_ties_go_by_row_at_the_border_too(vectors, k, num_queries):
    """Small whole numbers: products are exact, and many are equal."""
    vectors = np.array(vectors, np.float32)
    queries = np.array([[1, 0, -1], [1, 1, 1], [0, 2, 0], [0, 0, 0]], np.float32)[:num_queries]
    rows = np.arange(len(vectors)) * 3 + 5
    found = nearest(queries, [(rows, vectors)], k)
    true = np.argsort(-(queries @ vectors.T), axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(found.rows[:, : true.shape[1]], rows[true])
    assert (found.rows[:, true.shape[1] :] == -1).all()


def test_an_index_is_lossy_where_it_keeps_less_than_the_shards():
    exact = ["Flat", "IVF16,Flat", "IVF65536_HNSW32,Flat", "HNSW32", "HNSW32,Flat", "SQfp16"]
    lossy = "SQ8 PQ8 IVF16,PQ8 OPQ8_16,IVF16,PQ8 PCA8,Flat IVF16,SQfp16 HNSW32,SQ8 SQfp16,Flat LSH"
    assert [name for name in [*exact, *lossy.split()] if not is_lossy(name)] == exact
