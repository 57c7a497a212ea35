"""What every retriever promises; one from outside: `tests/scripts/test_outside.py`."""

import resource
import shutil

import numpy as np
import pytest
from conftest import SENTENCES
from rank_bm25 import BM25Okapi
from small_index import World, flip_byte

from pgra.data.text import split_words
from pgra.errors import ArtifactError, ConfigError, DamageError
from pgra.retrieval import RETRIEVERS
from pgra.retrieval.base import RandomRetriever
from pgra.retrieval.bm25 import BM25Retriever
from pgra.retrieval.trec import RunFileArguments

QUERIES = ["red apple trees by the sea", "Critics of the film", SENTENCES[2], "xylophone", "sea"]


@pytest.fixture
def world(tmp_path, encoder_dir):
    return World(tmp_path, encoder_dir)


@pytest.mark.parametrize("name", sorted(RETRIEVERS))
def test_every_retriever_keeps_the_contract(name, world):
    options = None
    if name == "run":  # what a dense search found
        queries = {f"q{number}": text for number, text in enumerate([*QUERIES, *SENTENCES])}
        options = RunFileArguments(run_queries=str(world.write_queries("q.tsv", queries)))
        name = f"run:{world.write_run('run.txt', queries, 12)}"
    retriever = world.open(name, options=options)
    found = retriever.retrieve(QUERIES, 9)
    assert (found.rows.shape, found.rows.dtype) == ((5, 9), np.int64)
    assert found.scores.dtype == np.float32
    falls = found.scores[:, 1:] <= found.scores[:, :-1]
    ties = found.scores[:, 1:] == found.scores[:, :-1]
    is_there = found.rows[:, 1:] >= 0
    assert falls.all()  # best first, missing last
    assert (found.rows[:, 1:] > found.rows[:, :-1])[ties & is_there].all()  # ties by row
    assert (np.isneginf(found.scores) == (found.rows == -1)).all()
    assert found.rows.max() < len(SENTENCES)
    for line, query in enumerate(QUERIES):
        alone = retriever.retrieve([query], 9)
        np.testing.assert_array_equal(alone.rows[0], found.rows[line])
        present = found.rows[line][found.rows[line] >= 0]
        assert len(set(present.tolist())) == len(present)
    np.testing.assert_array_equal(retriever.retrieve(QUERIES[::-1], 9).rows, found.rows[::-1])
    np.testing.assert_array_equal(retriever.retrieve(QUERIES, 2).rows, found.rows[:, :2])
    assert len(retriever.retrieve([], 5)) == 0
    assert (found.rows[0] != found.rows[1]).any()  # the control: another query, other passages
    again = world.open(name, options=options)
    assert again.fingerprint == retriever.fingerprint
    assert {index.reused for index in again.built} <= {12}  # built once
    if name != "random":
        assert retriever.retrieve(SENTENCES, 1).rows[:, 0].tolist() == list(range(12))
    # Before anything is looked for or built.
    with pytest.raises(ConfigError, match="13"):
        world.open(name, num_candidates=13, index_dir="nowhere")


def test_an_array_that_the_disk_cut_short_makes_no_index(world):
    """Of its last bytes, which are written when the file is closed, numpy sees nothing."""
    texts = [f"a{line // 90} b{line % 90}" for line in range(8000)]
    request = world.request("bm25", world.write("many.txt", texts))
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64_127, most[1]))  # a byte less than the array has
    try:
        with pytest.raises(DamageError, match="index.npy"):
            BM25Retriever.open(request)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    BM25Retriever.open(request)  # the control: there is room


@pytest.mark.parametrize("name", ["bm25", "dense"])
def test_an_index_of_something_else_damaged_or_missing_is_refused(name, world):
    world.open(name)
    (folder,) = world.indexes()
    given = {"index_dir": str(folder)}
    with pytest.raises(ArtifactError, match=name):
        world.open({"bm25": "dense", "dense": "bm25"}[name], **given)
    with pytest.raises(ArtifactError, match="none"):
        world.open(name, index_dir=str(world.root / "none"))
    with pytest.raises(ArtifactError, match="corpus_sha256"):
        world.open(name, world.write("other.txt", SENTENCES[1:]), **given)
    data = next(p for p in sorted(folder.iterdir()) if p.suffix in (".npy", ".faiss"))
    flip_byte(data)
    with pytest.raises(DamageError, match=data.name):
        world.open(name, **given)
    world.open(name)  # by its fields it is made again
    world.open(name, **given)


def test_a_lossy_index_scores_its_hits_exactly(world, monkeypatch):
    exact = world.open().retrieve(SENTENCES, 3)
    found = world.open(index_factory="SQ4")
    np.testing.assert_allclose(found.retrieve(SENTENCES, 3).scores, exact.scores, rtol=1e-5)
    monkeypatch.setattr("pgra.retrieval.faiss.is_lossy", lambda _: False)
    own = world.open(index_factory="SQ4")
    assert abs(own.retrieve(SENTENCES, 3).scores - exact.scores).max() > 1e-4  # the control


@pytest.mark.slow
def test_beyond_the_memory_the_shards_are_searched_and_find_the_same(world, monkeypatch):
    whole = world.open()
    found, (folder,) = whole.retrieve(SENTENCES, 5), world.indexes()
    monkeypatch.setattr("pgra.retrieval.faiss._SHARE", 0)
    for has_file in (True, False):  # found with its file, and built without one
        parts = world.open()
        again = parts.retrieve(SENTENCES, 5)
        np.testing.assert_array_equal(again.rows, found.rows)
        np.testing.assert_allclose(again.scores, found.scores, rtol=1e-5)
        assert parts.fingerprint == whole.fingerprint
        assert (folder / "index.faiss").exists() == has_file
        shutil.rmtree(folder)


@pytest.mark.parametrize("num_passages", [30, (1 << 15) + 1])  # shuffled whole, and drawn
def test_passages_are_drawn_by_the_query_alone(num_passages):
    retriever, queries = RandomRetriever(num_passages, {}), [f"query {i}" for i in range(40)]
    found = retriever.retrieve(queries, 20)
    np.testing.assert_array_equal(retriever.retrieve(queries[5:], 7).rows, found.rows[5:, :7])
    whole = retriever.retrieve(["most"], num_passages - 5).rows[0]
    assert len(np.unique(whole)) == num_passages - 5


def test_scores_are_those_of_rank_bm25():
    retriever = BM25Retriever.of_texts(SENTENCES)
    words = [split_words(text) for text in SENTENCES]
    reference = BM25Okapi(words)  # k1 1.5, b 0.75
    rare = {w for w in reference.idf if sum(w in text for text in words) < len(words) / 2}
    for query in SENTENCES:  # both give idf differently to words of half of the passages or more
        counted = [word for word in split_words(query) if word in rare]
        found = retriever.retrieve([" ".join(counted)], len(SENTENCES))
        scores = np.zeros(len(SENTENCES))
        present = found.rows[0] >= 0
        scores[found.rows[0][present]] = found.scores[0][present]
        np.testing.assert_allclose(scores, reference.get_scores(counted), rtol=1e-5, atol=1e-6)


def test_a_frequent_word_counts_nothing_and_ties_go_by_row():
    retriever = BM25Retriever.of_texts(["the sea", "the town", "the hill", "red"])
    assert (retriever.retrieve(["the"], 2).rows == -1).all()
    found = retriever.retrieve(["the sea", "xylophone", ""], 2).rows
    assert found.tolist() == [[0, -1], [-1, -1], [-1, -1]]
    texts = [f"apple {word}" for word in ("aa", "bb", "cc", "dd")] + [f"pear {i}" for i in range(9)]
    retriever = BM25Retriever.of_texts(texts)
    assert retriever.retrieve(["apple"], 2).rows.tolist() == [[0, 1]]
    retriever.removed = np.array([0, 2])
    assert retriever.retrieve(["apple"], 3).rows.tolist() == [[1, 3, -1]]
