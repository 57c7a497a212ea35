import logging

import numpy as np
import pytest
from conftest import SENTENCES
from rank_bm25 import BM25Okapi

from pgra.config import CorpusArguments, RetrieverArguments
from pgra.data.corpus import open_corpus
from pgra.errors import ArtifactError, ConfigError
from pgra.retrieval import IndexRequest
from pgra.retrieval.bm25 import BM25Retriever, split_words


def open_bm25(sentences, tmp_path, **kwargs):
    path = tmp_path / "sentences.txt"
    path.write_text("\n".join(sentences) + "\n")
    corpus = open_corpus(CorpusArguments(corpus=str(path)), tmp_path)
    args = RetrieverArguments(retriever="bm25", num_candidates=2, **kwargs)
    return BM25Retriever.open(
        IndexRequest(args=args, corpus=corpus, artifacts=tmp_path, progress=False)
    )


def test_words_are_lower_case_without_punctuation():
    assert split_words("The B-52's, née 1976!") == ["the", "b", "52", "s", "née", "1976"]


def test_scores_are_those_of_rank_bm25(tmp_path):
    retriever = open_bm25(SENTENCES, tmp_path)
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


def test_a_frequent_word_counts_nothing(tmp_path):
    retriever = open_bm25(["the sea", "the town", "the hill", "red"], tmp_path)
    assert (retriever.retrieve(["the"], 2).rows == -1).all()
    assert retriever.retrieve(["the sea"], 2).rows.tolist() == [[0, -1]]


def test_passages_without_a_common_word_are_missing(tmp_path):
    found = open_bm25(SENTENCES, tmp_path).retrieve(["xylophone", "", "apples"], 3)
    assert found.rows.tolist() == [[-1, -1, -1], [-1, -1, -1], [4, -1, -1]]
    assert np.isneginf(found.scores[0]).all()


def test_ties_go_by_row_at_the_border_too(tmp_path):
    texts = [f"apple {word}" for word in ("aa", "bb", "cc", "dd")] + [f"pear {i}" for i in range(9)]
    assert open_bm25(texts, tmp_path).retrieve(["apple"], 2).rows.tolist() == [[0, 1]]


def test_a_loaded_index_answers_as_the_built_one(tmp_path):
    built = open_bm25(SENTENCES, tmp_path).retrieve(SENTENCES[:4], 5)
    loaded = open_bm25(SENTENCES, tmp_path).retrieve(SENTENCES[:4], 5)
    np.testing.assert_array_equal(built.rows, loaded.rows)
    np.testing.assert_array_equal(built.scores, loaded.scores)
    assert built.rows[:, 0].tolist() == [0, 1, 2, 3]  # each query has its own answer


def test_a_damaged_index_is_refused(tmp_path):
    open_bm25(SENTENCES, tmp_path)
    (data,) = tmp_path.glob("indexes/bm25-*/data.csc.index.npy")
    raw = bytearray(data.read_bytes())
    raw[-1] ^= 1
    data.write_bytes(raw)
    with pytest.raises(ArtifactError, match=r"data\.csc\.index\.npy is damaged"):
        open_bm25(SENTENCES, tmp_path)


def test_an_index_of_another_corpus_is_refused(tmp_path):
    open_bm25(SENTENCES, tmp_path)
    (folder,) = tmp_path.glob("indexes/bm25-*")
    with pytest.raises(ArtifactError, match="was made with corpus_sha256 .* this run asks for"):
        open_bm25(SENTENCES[1:], tmp_path, index_dir=str(folder))


def test_more_candidates_than_passages_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"num_candidates \(13\) exceeds the corpus \(12 pass"):
        open_bm25(SENTENCES, tmp_path).retrieve(["sea"], 13)


def test_bm25s_does_not_speak(tmp_path, caplog):
    with caplog.at_level(logging.DEBUG):
        open_bm25(SENTENCES, tmp_path).retrieve(["sea"], 2)
    assert not [record for record in caplog.records if record.name == "bm25s"]
