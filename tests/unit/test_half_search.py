"""Exact search by a GPU's way, run on a CPU: sorted true products, whatever the blocks and ties."""

import gc
import weakref

import numpy as np
import pytest
import torch
from conftest import SENTENCES
from hypothesis import given, settings
from hypothesis import strategies as st
from meta_device import MetaDevice
from small_index import World
from torch.utils._python_dispatch import TorchDispatchMode

from pgra.errors import ModelError
from pgra.retrieval import dense, half_search
from pgra.retrieval.dense import DenseRetriever
from pgra.retrieval.faiss import VectorSource, ask, nearest_in_blocks
from pgra.retrieval.half_search import HalfSearch

RNG = np.random.default_rng(0)


def opened(vectors, block=10**6, device="cpu"):
    def halves():
        return (vectors[i : i + block] for i in range(0, len(vectors), block))

    def read(rows):
        return vectors[rows].astype(np.float32)

    return HalfSearch(VectorSource(*vectors.shape, read, lambda: iter(()), halves), device)


def sorted_products(queries, vectors, k):
    """The rule: true products rounded to float32 once, best first, ties by row."""
    scores = (queries.astype(np.float64) @ vectors.astype(np.float64).T).astype(np.float32)
    rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    scores, short = np.take_along_axis(scores, rows, 1), k - rows.shape[1]
    pad = ((0, 0), (0, max(0, short)))
    return np.pad(scores, pad, constant_values=-np.inf), np.pad(rows, pad, constant_values=-1)


@st.composite
def collections(draw):
    """Vectors with ties and duplicates, or none, of any length; queries, some of them vectors."""
    n, width = draw(st.integers(1, 200)), draw(st.sampled_from([1, 2, 16, 65]))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    vectors = rng.standard_normal((n, width)).astype(np.float32)
    if draw(st.booleans()):
        vectors = np.round(vectors)
    if draw(st.booleans()):
        vectors = vectors[rng.integers(0, draw(st.integers(1, 5)), n) % n]
    if draw(st.booleans()):  # nearly one vector, as prompted states are
        vectors += draw(st.sampled_from([10, 100])) * rng.standard_normal(width)
    vectors = vectors * draw(st.sampled_from([1, 1e-4, 300]))
    vectors = np.clip(vectors, -65504, 65504).astype(np.float16)
    queries = rng.standard_normal((draw(st.integers(1, 5)), width))
    queries *= draw(st.sampled_from([1, 1e-6, 1e5, 0]))
    queries[0] = vectors[0]
    return vectors, queries.astype(np.float32)


@pytest.mark.parametrize("share", [0.5, 0])  # all on the device, or block by block
@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    collections(),
    st.integers(1, 210),
    st.integers(1, 210),
    st.sampled_from([1, 30, 1000, 10**6]),
    st.integers(0, 3),
)
def test_scores_are_the_true_ones_rounded_once_and_ties_go_by_row(
    share, collection, k, block, cells, spare
):
    vectors, queries = collection
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(half_search, "_SPARE", spare)  # little, so that some go deeper
        patch.setattr(half_search, "free_memory", lambda device: 10**9 if share else 0)
        search = opened(vectors, block)
        search._cells = cells
        found = search.search(queries, k)
    for ours, true in zip(found, sorted_products(queries, vectors, k), strict=True):
        np.testing.assert_array_equal(ours, true)


def test_it_finds_what_faiss_finds_in_any_number_of_dimensions():
    for width in (384, 768):
        vectors = RNG.standard_normal((3000, width)).astype(np.float32)
        vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)
        queries = vectors[::100].astype(np.float32) + 0.02 * RNG.standard_normal((30, width))
        queries = queries.astype(np.float32)
        index = pytest.importorskip("faiss").IndexFlatIP(width)
        index.add(vectors.astype(np.float32))
        ours, theirs = ask(opened(vectors, 512), queries, 150), ask(index, queries, 150)
        assert (ours.rows == theirs.rows).mean() > 0.999  # float32's sums swap near neighbours
        np.testing.assert_allclose(ours.scores, theirs.scores, atol=1e-6)
        true = sorted_products(queries, vectors, 150)
        np.testing.assert_array_equal(ours.scores, true[0])
        np.testing.assert_array_equal(ours.rows, true[1])


def test_where_float16_leaves_it_open_the_query_is_searched_deeper():
    near = np.tile(RNG.standard_normal(32), (400, 1)) + 0.003 * RNG.standard_normal((400, 32))
    vectors, queries = near.astype(np.float16), near[:3].astype(np.float32)
    search, (_, true) = opened(vectors), sorted_products(queries, vectors, 5)
    shallow = search._find(queries, 5, 5)  # the control: float16 alone chooses others
    assert not shallow.is_sure.any()
    assert (shallow.rows != true).any()
    np.testing.assert_array_equal(search.search(queries, 5)[1], true)


def test_what_a_querys_own_rounding_hides_is_found_too(monkeypatch):
    """1 + 0.9 / 2048 becomes 1: the better vector's product is then 0, and it is left out."""
    query = np.array([[1 + 0.9 / 2048] * 32 + [1] * 32], np.float32)
    vectors = np.zeros((3, 64), np.float16)
    vectors[0, -1], vectors[1], vectors[2, -1] = 0.005, [1] * 32 + [-1] * 32, 0.002
    monkeypatch.setattr(half_search, "_SPARE", 1)
    scores, rows = opened(vectors).search(query, 1)
    assert rows.tolist() == [[1]]
    np.testing.assert_allclose(scores, 32 * 0.9 / 2048, atol=1e-5)


def test_vectors_are_copied_once_as_float16_and_then_queries_only():
    vectors, queries = np.ones((1000, 16), np.float16), np.ones((8, 16), np.float32)
    search = opened(vectors, 256, device="meta")
    copied, made = [], []
    for _ in range(2):
        with MetaDevice() as device:
            search.search(queries, 3)
        copied.append(sum(size for size, kind in device.sent if kind == torch.float16))
        made.append(sum(size for size, kind in device.sent if kind != torch.float16))
    assert copied == [2 * vectors.size, 0]
    assert made == 2 * [queries.nbytes]


def test_vectors_beyond_the_memory_are_copied_for_each_search(monkeypatch, caplog):
    vectors, queries = np.ones((1000, 16), np.float16), np.ones((8, 16), np.float32)
    monkeypatch.setattr(half_search, "free_memory", lambda device: 2 * vectors.nbytes - 1)
    search = opened(vectors, 256)
    search.search(queries, 3)
    assert (
        "3.2e-05 GB of vectors exceed half of the 6.4e-05 GB free on cpu: they are" in caplog.text
    )
    assert search._loaded[0] is None


@pytest.mark.parametrize("reduces", [(True, True), (False, True), (False, False)])
def test_float16_sums_are_whole_while_it_searches_and_as_they_were_afterwards(reduces, monkeypatch):
    settings, seen = torch.backends.cuda.matmul, []

    def see():
        names = ("", "_split_k")
        return tuple(
            getattr(settings, f"allow_fp16_reduced_precision_reduction{name}") for name in names
        )

    plain, before = HalfSearch._choose, see()
    monkeypatch.setattr(HalfSearch, "_choose", lambda *args: [seen.append(see()), plain(*args)][1])
    try:
        settings.allow_fp16_reduced_precision_reduction = reduces
        opened(np.ones((8, 16), np.float16)).search(np.ones((2, 16), np.float32), 3)
        assert see() == reduces
    finally:
        settings.allow_fp16_reduced_precision_reduction = before
    assert not any(first for first, _ in seen)


class SmallDevice(TorchDispatchMode):
    """Has room for so many products at a time."""

    def __init__(self, room):
        super().__init__()
        self.room, self.failed = room, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == "mm" and made.numel() > self.room:
            self.failed.append(weakref.ref(made))
            raise torch.OutOfMemoryError("no room")
        return made


def test_where_memory_is_short_blocks_are_smaller_and_nothing_is_lost(monkeypatch, caplog):
    vectors = RNG.standard_normal((3000, 16)).astype(np.float16)
    queries, search = RNG.standard_normal((40, 16)).astype(np.float32), opened(vectors)
    alive = []
    monkeypatch.setattr(search, "_cells", 1 << 20)
    with SmallDevice(20_000) as device:
        empty = lambda: alive.append(any(each() is not None for each in device.failed))  # noqa: E731
        monkeypatch.setattr(torch.cuda, "empty_cache", empty)
        found = search.search(queries, 10)
    np.testing.assert_array_equal(found[1], sorted_products(queries, vectors, 10)[1])
    assert alive == [False] * 3  # 2^20, 2^18 and 2^16 products do not fit
    assert "out of memory: the search now holds 16384 products at a time" in caplog.text
    with SmallDevice(100), pytest.raises(ModelError, match="cpu does not hold 4,096 products of"):
        search.search(queries, 10)


def test_a_device_that_fails_is_named_with_the_way_out():
    class Lost(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise error

    error = torch.AcceleratorError("CUDA error: unspecified launch failure\nmore of it")
    search = opened(np.ones((9, 4), np.float16))
    told = (
        r"the search: the GPU failed \(CUDA error: unspecified launch failure\): what was finished"
    )
    with pytest.raises(ModelError, match=told), Lost():
        search.search(np.ones((1, 4), np.float32), 2)
    error = RuntimeError("shapes do not match")  # ours
    with pytest.raises(RuntimeError, match="shapes do not match"), Lost():
        search.search(np.ones((1, 4), np.float32), 2)


def test_a_flat_index_is_searched_so_on_the_gpu_that_was_asked_for(
    tmp_path, encoder_dir, monkeypatch
):
    world = World(tmp_path, encoder_dir, SENTENCES)
    built = world.prepare("dense")
    plain = world.open("dense")
    monkeypatch.setattr(dense, "choose_device", lambda name: torch.device("cuda:1"))
    retriever = world.open("dense")
    index = retriever._index
    assert type(index) is HalfSearch
    assert index._device == "cuda:1"
    assert isinstance(retriever, DenseRetriever)
    assert built
    index._device = "cpu"
    for removed in ([], [0, 3, 4]):
        ours, theirs = (each for each in (retriever, plain))
        ours.removed = theirs.removed = np.array(removed, np.int64)
        one, other = (each.retrieve(SENTENCES[:5], 6) for each in (ours, theirs))
        np.testing.assert_array_equal(one.rows, other.rows)
        np.testing.assert_allclose(one.scores, other.scores, atol=1e-6)
    gc.collect()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_finds_the_true_products_too():
    vectors = RNG.standard_normal((200_000, 768)).astype(np.float16)
    vectors[100_000:100_300] = vectors[7]
    queries = RNG.standard_normal((64, 768)).astype(np.float32)
    queries[0] = vectors[7]
    found = opened(vectors, 65_536, device="cuda").search(queries, 150)
    true = sorted_products(queries, vectors, 150)
    for ours, theirs in zip(found, true, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    few, rows = vectors[:2000].astype(np.float32), np.arange(2000)
    blocks = [(rows[start : start + 700], few[start : start + 700]) for start in (0, 700, 1400)]
    near = nearest_in_blocks(queries, blocks, 9, device="cuda")
    exactly = sorted_products(queries, few, 9)
    np.testing.assert_allclose(near.scores, exactly[0], rtol=1e-5, atol=1e-4)
    assert (near.rows == exactly[1]).mean() > 0.99  # float32's sums swap near neighbours
