"""First stage by words: Okapi BM25, with `bm25s` (scores stored at build time, memory-mapped)."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pgra.artifacts import artifact_dir, build_once, digest, is_finished, read_manifest
from pgra.core import Candidates, Json, Rows
from pgra.data.text import WORDS, split_words
from pgra.progress import Bar
from pgra.retrieval.base import (
    BuiltIndex,
    IndexRequest,
    Retriever,
    check_num_candidates,
    refuse_strangers,
    write_recipe,
)

logger = logging.getLogger(__name__)

_STAGE = "bm25_index"
_SETTINGS: dict[str, Json] = {
    "k1": 1.5,
    "b": 0.75,
    "tf": "atire",
    "idf": "robertson",
    "words": WORDS,
}
_CHUNK = 8192


class BM25Retriever(Retriever):
    """Okapi BM25 with the constants of the paper's code (k1 1.5, b 0.75), no stop words.

    Term weights and idf are those of `rank_bm25.BM25Okapi`, which the paper's code uses, with two
    differences: words are those of `pgra.data.text.split_words`, and a word in at least half of the
    passages counts 0, where `BM25Okapi` gives it a quarter of the mean idf. Passages that share no
    counting word with a query are missing, not listed with score 0.

    Attributes:
        removed: Rows that are never returned. Words are still weighted by all passages.
    """

    def __init__(self, index: Any, fingerprint: Mapping[str, Json]) -> None:
        self.fingerprint = fingerprint
        self._index = index
        self.removed: Rows = np.empty(0, dtype=np.int64)
        self._num_passages: int = index.scores["num_docs"]

    @classmethod
    def of_texts(cls, texts: Sequence[str]) -> Self:
        """Search texts in memory, such as a task's training examples; nothing is written."""
        return cls(index_texts(texts), {**_SETTINGS, "texts": digest(list(texts))})

    @classmethod
    def open(cls, request: IndexRequest) -> Self:
        """Find or build the index; ArtifactError if one there is foreign or a given one missing."""
        fields, folder = _locate(request)
        if not is_finished(folder):
            refuse_strangers(folder, ())
        built = build_once(
            folder,
            stage=_STAGE,
            fingerprint=fields,
            build=lambda aside: _build(request, aside),
            context=request.context,
        )
        index = _quiet_bm25s().BM25.load(folder, mmap=True, load_vocab=True)
        opened, num_reused = cls(index, fields), len(request.corpus) if built.reused else 0
        opened.built = [BuiltIndex(folder, built.manifest, num_reused)]
        return opened

    def retrieve(self, queries: Sequence[str], k: int) -> Candidates:
        """Return each query's best k passages, (B, k); scores are BM25's, above 0."""
        check_num_candidates(k, self._num_passages - len(self.removed))
        found = Candidates.missing(len(queries), k)
        for line, query in enumerate(queries):
            ids = self._index.get_tokens_ids(split_words(query))
            every: npt.NDArray[np.float32] = self._index.get_scores_from_ids(ids)
            every[self.removed] = 0
            # Keep all that tie with the k-th, so that ties at the border go by row too.
            bar = np.partition(every, -k)[-k]
            shared = np.flatnonzero((every >= bar) & (every > 0))
            best = Candidates.best(shared[None, :], every[shared][None, :], k)
            found.rows[line], found.scores[line] = best.rows[0], best.scores[0]
        return found


def _locate(request: IndexRequest) -> tuple[dict[str, Json], Path]:
    """Return an index's fields and folder; hybrid's given folders are the dense one's."""
    fields = {**request.corpus.fingerprint, **_SETTINGS}
    folder = artifact_dir(request.home, "bm25", fields)
    if request.args.retriever == "bm25":
        folder = Path(request.args.index_dir or request.output_dir or folder)
        if request.args.index_dir is not None:
            read_manifest(folder, stage=_STAGE, fingerprint=fields)
    return fields, folder


def _build(request: IndexRequest, folder: Path) -> dict[str, Json]:
    corpus, began = request.corpus, time.monotonic()
    is_quiet = not request.context.shows_progress
    texts = (text for batch in corpus.batched(_CHUNK) for text in batch)
    bar = Bar(texts, total=len(corpus), desc="bm25", unit="text", disable=is_quiet)
    index = index_texts(bar)
    index.save(folder, show_progress=False)
    seconds = time.monotonic() - began
    return {
        **write_recipe(request.args, corpus),
        "rows": len(corpus),
        "words": len(index.vocab_dict),
        "bytes": sum(path.stat().st_size for path in folder.iterdir()),
        "texts_per_second": round(len(corpus) / max(seconds, 1e-6), 1),
    }


def index_texts(texts: Iterable[str]) -> Any:
    vocabulary: dict[str, int] = {}
    ids = [
        [vocabulary.setdefault(word, len(vocabulary)) for word in split_words(text, singles=True)]
        for text in texts
    ]
    vocabulary.setdefault("", len(vocabulary))  # bm25s wants a word even of a corpus without any
    settings: Any = _SETTINGS
    index = _quiet_bm25s().BM25(
        k1=settings["k1"], b=settings["b"], method=settings["tf"], idf_method=settings["idf"]
    )
    index.index((ids, vocabulary), show_progress=False)
    return index


def _quiet_bm25s() -> Any:
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to DEBUG
    return bm25s
