import faiss
import numpy as np
import pytest
import torch

from pgra.retrieval.faiss import ask, most_hits, nearest, quick_products

RNG = np.random.default_rng(0)
QUERIES = RNG.standard_normal((7, 16)).astype(np.float32)
VECTORS = RNG.standard_normal((101, 16)).astype(np.float32)
WAYS = ["cpu", "cpu:0"]  # FAISS, and the way of a GPU


def cut(rows, size):
    return [(rows[i : i + size], VECTORS[rows[i : i + size]]) for i in range(0, len(rows), size)]


@pytest.mark.parametrize("device", WAYS)
@pytest.mark.parametrize("size", [3, 40, 101])
def test_it_is_a_sort_of_all_products_whatever_the_blocks(device, size):
    shuffled = np.random.default_rng(size).permutation(101)
    found = nearest(QUERIES, cut(shuffled, size), 9, device=device)
    products = QUERIES @ VECTORS.T
    order = np.argsort(-products, axis=1)[:, :9]
    np.testing.assert_array_equal(found.rows, order)
    np.testing.assert_allclose(found.scores, np.take_along_axis(products, order, 1), rtol=1e-5)
    control = nearest(-QUERIES, cut(shuffled, size), 9, device=device)
    assert (control.rows != order).all(axis=1).any()


@pytest.mark.parametrize("device", WAYS)
def test_a_small_collection_leaves_entries_missing(device):
    found = nearest(QUERIES, cut(np.array([5, 2]), 1), 3, device=device)
    assert (np.sort(found.rows[:, :2], axis=1) == [2, 5]).all()
    assert (found.rows[:, 2] == -1).all()
    assert np.isneginf(found.scores[:, 2]).all()


def test_queries_are_taken_in_parts_on_a_gpu(monkeypatch):
    whole = nearest(QUERIES, cut(np.arange(101), 40), 9, device="cpu:0")
    monkeypatch.setattr("pgra.retrieval.faiss._QUERY_ROWS", 2)
    parts = nearest(QUERIES, cut(np.arange(101), 40), 9, device="cpu:0")
    np.testing.assert_array_equal(parts.rows, whole.rows)


def test_one_query_is_compared_and_more_are_multiplied_and_the_setting_is_put_back():
    before = faiss.cvar.distance_compute_blas_threshold
    for num_queries, is_multiplied in ((1, False), (2, True), (1024, True)):
        with quick_products(num_queries):
            threshold = faiss.cvar.distance_compute_blas_threshold
        # FAISS 1.15 multiplies where queries times dimensions reach it; the largest are 8192 wide.
        assert (threshold <= num_queries) == is_multiplied
        assert (threshold > 8192 * num_queries) == (not is_multiplied)
    with pytest.raises(ZeroDivisionError), quick_products(64):
        1 / 0  # noqa: B018
    assert faiss.cvar.distance_compute_blas_threshold == before


def test_few_and_many_queries_find_the_same():
    index = faiss.IndexFlatIP(16)
    index.add(VECTORS)
    many = ask(index, QUERIES, 9)
    for line, query in enumerate(QUERIES):
        one = ask(index, query[None], 9)
        np.testing.assert_array_equal(one.rows[0], many.rows[line])
        np.testing.assert_allclose(one.scores[0], many.scores[line], rtol=1e-5)
    assert (many.rows[0] != many.rows[1]).any()
    assert most_hits(index) == 101


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_finds_what_the_cpu_finds():
    cpu, gpu = (nearest(QUERIES, cut(np.arange(101), 40), 9, device=d) for d in ("cpu", "cuda"))
    np.testing.assert_array_equal(gpu.rows, cpu.rows)
    np.testing.assert_allclose(gpu.scores, cpu.scores, rtol=1e-5)
