import faiss
import numpy as np
import pytest
import torch
from conftest import SENTENCES

from pgra.config import CorpusArguments, RetrieverArguments
from pgra.data.corpus import open_corpus
from pgra.encoders.encoder import load_encoder
from pgra.errors import ArtifactError, ConfigError
from pgra.retrieval import RETRIEVERS, open_retriever
from pgra.retrieval.base import IndexRequest
from pgra.retrieval.dense import DenseRetriever, load_faiss


@pytest.fixture
def corpus(corpus_file, tmp_path):
    return open_corpus(CorpusArguments(corpus=str(corpus_file)), tmp_path)


def arguments(encoder_dir, **kwargs):
    return RetrieverArguments(**{"encoder": str(encoder_dir), "num_candidates": 5, **kwargs})


def open_one(args, corpus, tmp_path):
    return open_retriever(args, corpus, tmp_path, device="cpu", progress=False)


@pytest.mark.parametrize("name", sorted(RETRIEVERS))
def test_every_retriever_keeps_the_contract(name, encoder_dir, corpus, tmp_path):
    retriever = open_one(arguments(encoder_dir, retriever=name), corpus, tmp_path)
    queries = ["red apple trees by the sea", "Critics of the film", SENTENCES[2]]
    found = retriever.retrieve(queries, 5)
    assert (found.rows.shape, found.rows.dtype) == ((3, 5), np.int64)
    assert found.scores.dtype == np.float32
    assert (found.scores[:, 1:] <= found.scores[:, :-1]).all()
    assert found.rows.max() < len(corpus)
    assert (np.isneginf(found.scores) == (found.rows == -1)).all()
    for line, query in enumerate(queries):
        alone = retriever.retrieve([query], 5)
        np.testing.assert_array_equal(alone.rows[0], found.rows[line])
        present = found.rows[line][found.rows[line] >= 0]
        assert len(set(present.tolist())) == len(present)
    if name != "random":  # which looks at no passage
        assert found.rows[2, 0] == 2  # a passage finds itself
    np.testing.assert_array_equal(retriever.retrieve(queries, 2).rows, found.rows[:, :2])
    assert len(retriever.retrieve([], 5)) == 0
    again = open_one(arguments(encoder_dir, retriever=name), corpus, tmp_path)
    assert again.fingerprint == retriever.fingerprint
    np.testing.assert_array_equal(again.retrieve(queries, 5).rows, found.rows)


@pytest.mark.parametrize("name", sorted(RETRIEVERS))
def test_every_retriever_refuses_more_candidates_than_passages(name, encoder_dir, corpus, tmp_path):
    message = r"num_candidates \(13\) exceeds the corpus \(12 passages\): lower it"
    args = arguments(encoder_dir, retriever=name)
    with pytest.raises(ConfigError, match=message):
        open_one(args, corpus, tmp_path).retrieve(["sea"], 13)
    wider = arguments(encoder_dir, retriever=name, num_candidates=13, index_dir="nowhere")
    with pytest.raises(ConfigError, match=message):  # before anything is looked for or built
        open_one(wider, corpus, tmp_path)


def test_dense_scores_are_the_inner_products_of_the_vectors(encoder_dir, corpus, tmp_path):
    args = arguments(encoder_dir, normalize=False)
    encoder = load_encoder(args, "cpu")
    passages = encoder.encode(corpus.slice(0, 12)).astype(np.float16).astype(np.float32)
    scores = encoder.encode(["red sea"]) @ passages.T
    found = open_one(args, corpus, tmp_path).retrieve(["red sea"], 12)
    np.testing.assert_array_equal(found.rows[0], np.argsort(-scores[0], kind="stable"))
    np.testing.assert_allclose(found.scores[0], np.sort(scores[0])[::-1], rtol=1e-5)


def test_a_normalised_score_is_the_cosine(encoder_dir, corpus, tmp_path):
    found = open_one(arguments(encoder_dir), corpus, tmp_path).retrieve([SENTENCES[3]], 1)
    assert found.scores[0, 0] == pytest.approx(1, abs=1e-3)


def test_an_index_of_another_encoder_is_refused(encoder_dirs, corpus, tmp_path):
    open_one(arguments(encoder_dirs["bert"]), corpus, tmp_path)
    (folder,) = tmp_path.glob("indexes/bert-*")
    other = arguments(encoder_dirs["roberta"], index_dir=str(folder))
    with pytest.raises(ArtifactError, match='was made with encoder "[0-9a-f]+", this run asks'):
        open_one(other, corpus, tmp_path)


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("pooling", {"pooling": "cls"}),
        ("normalize", {"normalize": False}),
        ("max_tokens", {"max_encoder_tokens": 16}),
        ("factory", {"index_factory": "SQ8"}),
    ],
)
def test_an_index_made_otherwise_is_refused(encoder_dir, corpus, tmp_path, field, changed):
    open_one(arguments(encoder_dir), corpus, tmp_path)
    (folder,) = tmp_path.glob("indexes/bert-*")
    args = arguments(encoder_dir, index_dir=str(folder), **changed)
    with pytest.raises(ArtifactError, match=f"was made with {field} "):
        open_one(args, corpus, tmp_path)


def test_an_index_of_another_corpus_is_refused(encoder_dir, corpus, tmp_path):
    open_one(arguments(encoder_dir), corpus, tmp_path)
    (folder,) = tmp_path.glob("indexes/bert-*")
    (tmp_path / "other.txt").write_text("\n".join(SENTENCES[1:]))
    other = open_corpus(CorpusArguments(corpus=str(tmp_path / "other.txt")), tmp_path)
    with pytest.raises(ArtifactError, match='corpus_sha256 "[0-9a-f]+", this run asks for "'):
        open_one(arguments(encoder_dir, index_dir=str(folder)), other, tmp_path)


def test_an_index_of_another_retriever_is_refused(encoder_dir, corpus, tmp_path):
    open_one(arguments(encoder_dir, retriever="bm25"), corpus, tmp_path)
    (folder,) = tmp_path.glob("indexes/bm25-*")
    with pytest.raises(ArtifactError, match="made by stage 'bm25_index', not by 'dense_index'"):
        open_one(arguments(encoder_dir, index_dir=str(folder)), corpus, tmp_path)


def test_an_index_dir_is_never_built(encoder_dir, corpus, tmp_path):
    args = arguments(encoder_dir, index_dir=str(tmp_path / "none"))
    with pytest.raises(
        ArtifactError,
        match="none does not exist: it has no manifest.json: run the 'dense_index' stage",
    ):
        open_one(args, corpus, tmp_path)
    assert not (tmp_path / "none").exists()


def test_a_finished_index_is_found_without_encoding(encoder_dir, corpus, tmp_path, monkeypatch):
    open_one(arguments(encoder_dir), corpus, tmp_path)
    monkeypatch.setattr("pgra.retrieval.dense.encode_shards", None)
    assert isinstance(open_one(arguments(encoder_dir), corpus, tmp_path), DenseRetriever)


def test_beyond_the_memory_the_shards_are_searched_and_find_the_same(encoder_dir, corpus, tmp_path):
    whole = open_one(arguments(encoder_dir, shard_rows=5), corpus, tmp_path / "a")
    found = whole.retrieve(SENTENCES, 5)
    little = arguments(encoder_dir, shard_rows=5, index_memory_gb=1e-7)  # 100 bytes
    for root in ("a", "b"):  # found there with its file, and built without one
        parts = open_one(little, corpus, tmp_path / root)
        again = parts.retrieve(SENTENCES, 5)
        np.testing.assert_array_equal(again.rows, found.rows)
        np.testing.assert_allclose(again.scores, found.scores, rtol=1e-5)
        assert parts.fingerprint == whole.fingerprint
        assert type(parts._index).__name__ == "BlockSearch"
    assert type(whole._index).__name__ != "BlockSearch"
    assert len(list(tmp_path.glob("a/indexes/*/index.faiss"))) == 1
    assert not list(tmp_path.glob("b/indexes/*/index.faiss"))
    large = open_one(arguments(encoder_dir, shard_rows=5), corpus, tmp_path / "b")
    np.testing.assert_array_equal(large.retrieve(SENTENCES, 5).rows, found.rows)


def test_a_lossy_index_gives_exact_scores_unless_told_not_to(encoder_dir, corpus, tmp_path):
    exact = open_one(arguments(encoder_dir), corpus, tmp_path).retrieve(SENTENCES, 3)
    args = arguments(encoder_dir, index_factory="SQ4")
    again = open_one(args, corpus, tmp_path)
    found = again.retrieve(SENTENCES, 3)
    np.testing.assert_array_equal(found.rows, exact.rows)
    np.testing.assert_allclose(found.scores, exact.scores, rtol=1e-5)
    own = open_one(arguments(encoder_dir, index_factory="SQ4", rescore_factor=0), corpus, tmp_path)
    assert abs(own.retrieve(SENTENCES, 3).scores - exact.scores).max() > 1e-4
    # One index, other candidates.
    assert len(list(tmp_path.glob("indexes/*"))) == 2
    assert {**own.fingerprint, "rescore_factor": 4} == again.fingerprint
    assert "rescore_factor" not in own.fingerprint


def test_auto_is_the_index_that_is_given_or_the_one_that_suits(
    encoder_dir, corpus, tmp_path, caplog
):
    open_one(arguments(encoder_dir, index_factory="HNSW4"), corpus, tmp_path)
    (folder,) = tmp_path.glob("indexes/bert-*")
    auto = arguments(encoder_dir, index_factory="auto")
    given = arguments(encoder_dir, index_factory="auto", index_dir=str(folder))
    assert open_one(given, corpus, tmp_path).fingerprint["factory"] == "HNSW4"
    with caplog.at_level("INFO"):
        assert open_one(auto, corpus, tmp_path).fingerprint["factory"] == "Flat"
    assert "index_factory auto is Flat: 12 passages x 16 are few enough" in caplog.text


def test_settings_of_the_search_that_cannot_be_are_refused(encoder_dir):
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=f"index_memory_gb is {wrong}: it must be above 0"):
            arguments(encoder_dir, index_memory_gb=wrong)
    with pytest.raises(ConfigError, match="rescore_factor is -1: it must be at least 0"):
        arguments(encoder_dir, rescore_factor=-1)


def test_queries_beyond_one_batch_are_all_answered(encoder_dir, corpus, tmp_path, monkeypatch):
    retriever = open_one(arguments(encoder_dir), corpus, tmp_path)
    whole = retriever.retrieve(SENTENCES, 3)
    monkeypatch.setattr("pgra.retrieval.dense._QUERY_BATCH", 5)
    np.testing.assert_array_equal(retriever.retrieve(SENTENCES, 3).rows, whole.rows)
    assert whole.rows[:, 0].tolist() == list(range(12))


@pytest.mark.parametrize("free", [10**9, 0])
def test_an_index_goes_to_the_gpu_that_was_asked_for(
    free, encoder_dir, corpus, tmp_path, monkeypatch
):
    """And its free memory decides; that of another GPU does not."""
    (built,) = DenseRetriever.prepare(
        IndexRequest(
            args=arguments(encoder_dir),
            corpus=corpus,
            artifacts=tmp_path,
            device="cpu",
            progress=False,
        )
    )
    asked = []

    def free_of(number):
        asked.append(number)
        return free, 10**9

    monkeypatch.setattr("pgra.retrieval.dense.choose_device", torch.device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", free_of)
    for name, value in {
        "get_num_gpus": lambda: 2,
        "StandardGpuResources": lambda: None,
        "index_cpu_to_gpu": lambda resources, number, index: f"on {number}",
    }.items():  # those of faiss-gpu
        monkeypatch.setattr(faiss, name, value, raising=False)
    index = load_faiss(built.folder, "cuda:1")
    assert asked == [1]
    assert index == "on 1" if free else index.ntotal == len(corpus)
