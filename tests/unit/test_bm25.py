import numpy as np
from conftest import SENTENCES
from rank_bm25 import BM25Okapi

from pgra.data.text import split_words
from pgra.retrieval.bm25 import BM25Retriever


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


def test_a_frequent_word_counts_nothing_and_ties_go_by_row_at_the_border_too():
    retriever = BM25Retriever.of_texts(["the sea", "the town", "the hill", "red"])
    assert (retriever.retrieve(["the"], 2).rows == -1).all()
    found = retriever.retrieve(["the sea", "xylophone", ""], 2).rows
    assert found.tolist() == [[0, -1], [-1, -1], [-1, -1]]
    texts = [f"apple {word}" for word in ("aa", "bb", "cc", "dd")] + [f"pear {i}" for i in range(9)]
    retriever = BM25Retriever.of_texts(texts)
    assert retriever.retrieve(["apple"], 2).rows.tolist() == [[0, 1]]
    retriever.removed = np.array([0, 2])
    assert retriever.retrieve(["apple"], 3).rows.tolist() == [[1, 3, -1]]
