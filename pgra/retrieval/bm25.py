"""First stage by words: `bm25s`' Okapi BM25."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from pgra.arrays import Rows, Scores
from pgra.artifacts import build_once, digest, is_finished, read_array
from pgra.data.text import WORDS, split_words
from pgra.progress import Bar
from pgra.retrieval import base
from pgra.types import Candidates, Fields

logger = logging.getLogger(__name__)

_STAGE = "bm25_index"
_SETTINGS: dict[str, Any] = {
    "k1": 1.5,
    "b": 0.75,
    "tf": "atire",
    "idf": "robertson",
    "words": WORDS,
}


class BM25Retriever(base.Retriever):
    """Okapi BM25 with the constants of the paper's code (k1 1.5, b 0.75), no stop words.

    Term weights and idf are those of `rank_bm25.BM25Okapi`, which the paper's code uses, with two
    differences: words are those of `pgra.data.text.split_words`, and a word in at least half of the
    passages counts 0, where `BM25Okapi` gives it a quarter of the mean idf. Passages that share no
    counting word with a query are missing, not listed with score 0.

    Attributes:
        removed: Rows that are never returned. Words are still weighted by all passages.
    """

    def __init__(self, index: Any, fingerprint: Fields) -> None:
        self.fingerprint = fingerprint
        self._index = index
        self.removed: Rows = np.empty(0, dtype=np.int64)

    @classmethod
    def of_texts(cls, texts: Sequence[str]) -> Self:
        """Search texts in memory, such as a task's training examples; nothing is written."""
        return cls(index_texts(texts), {**_SETTINGS, "texts": digest(list(texts))})

    @classmethod
    def open(cls, request: base.IndexRequest) -> Self:
        """Find or build the index; ArtifactError if one there is foreign or a given one missing."""
        fields = {**request.corpus.fingerprint, **_SETTINGS}
        folder = base.index_folder(request, "bm25", _STAGE, fields)
        if not is_finished(folder):
            base.refuse_strangers(folder, ())
        artifact = build_once(
            folder,
            stage=_STAGE,
            fingerprint=fields,
            build=lambda aside: _build(request, aside),
            context=request.context,
        )
        opened = cls(_quiet_bm25s().BM25.load(folder, mmap=True, load_vocab=True), fields)
        num_reused = len(request.corpus) if artifact.reused else 0
        opened.built = [replace(artifact, reused=num_reused)]
        return opened

    def retrieve(self, queries: Sequence[str], k: int) -> Candidates:
        """Return each query's best k passages, (B, k); scores are BM25's, above 0."""
        best = Candidates.missing(len(queries), k)
        for line, query in enumerate(queries):
            ids = self._index.get_tokens_ids(split_words(query))
            scores: Scores = self._index.get_scores_from_ids(ids)
            scores[self.removed] = 0
            # All that tie with the k-th, so that ties at the border go by row too.
            rows = np.flatnonzero((scores >= np.partition(scores, -k)[-k]) & (scores > 0))
            best.fill(line, rows, scores[rows])
        return best


def _build(request: base.IndexRequest, folder: Path) -> Fields:
    corpus = request.corpus
    is_quiet = not request.context.shows_progress
    index = index_texts(Bar(corpus, total=len(corpus), desc="bm25", unit="text", disable=is_quiet))
    index.save(folder, show_progress=False)
    for path in folder.glob("*.npy"):
        read_array(path)  # numpy does not see that a disk fills up when a file is closed
    return {
        **base.write_recipe(request.args, corpus),
        "rows": len(corpus),
        "words": len(index.vocab_dict),
        "bytes": sum(path.stat().st_size for path in folder.iterdir()),
    }


def index_texts(texts: Iterable[str]) -> Any:
    """Return bm25s' index of texts."""
    vocabulary: dict[str, int] = {}
    ids = [
        [vocabulary.setdefault(word, len(vocabulary)) for word in split_words(text, singles=True)]
        for text in texts
    ]
    vocabulary.setdefault("", len(vocabulary))  # bm25s wants a word even of a corpus without any
    index = _quiet_bm25s().BM25(
        k1=_SETTINGS["k1"],
        b=_SETTINGS["b"],
        method=_SETTINGS["tf"],
        idf_method=_SETTINGS["idf"],
    )
    index.index((ids, vocabulary), show_progress=False)
    return index


def _quiet_bm25s() -> Any:
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to DEBUG
    return bm25s
