"""First stage by words: Okapi BM25, with `bm25s` (scores stored at build time, memory-mapped)."""

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from pgra.artifacts import artifact_dir, build_once, digest, is_finished, read_manifest
from pgra.core import MISSING_ROW, Candidates, Json, Rows
from pgra.retrieval.base import BuiltIndex, IndexRequest, check_num_candidates, refuse_strangers
from pgra.retrieval.dense import write_recipe

if TYPE_CHECKING:
    from pgra.data.corpus import Corpus

logger = logging.getLogger(__name__)

STAGE = "bm25_index"
_SETTINGS: dict[str, Json] = {
    "k1": 1.5,
    "b": 0.75,
    "tf": "atire",
    "idf": "robertson",
    "words": r"lower-case \w+",
}
_WORD = re.compile(r"\w+")
_CHUNK = 8192


def split_words(text: str) -> list[str]:
    """Split a text into lower-case words: runs of letters, digits and underscores."""
    return _WORD.findall(text.lower())


class BM25Retriever:
    """Okapi BM25 with the constants of the paper's code (k1 1.5, b 0.75), no stop words.

    Term weights and idf are those of `rank_bm25.BM25Okapi`, which the paper's code uses, with two
    differences: words are lower-cased and stripped of punctuation, and a word in at least half of
    the passages counts 0, where `BM25Okapi` gives it a quarter of the mean idf.

    Passages that share no counting word with a query are missing, not listed with score 0.

    Attributes:
        removed: Rows that are never given: those of the dense half of hybrid. Words are still
            weighted by all passages.
    """

    def __init__(self, index: Any, fingerprint: Mapping[str, Json]) -> None:
        self.fingerprint = fingerprint
        self._index = index
        self.removed: Rows = np.empty(0, dtype=np.int64)
        self._num_passages: int = index.scores["num_docs"]

    @classmethod
    def of_texts(cls, texts: Sequence[str]) -> Self:
        """Search texts that are in memory, such as a task's training examples; nothing is kept.

        Args:
            texts: The passages, in the order of their rows.
        """
        return cls(_weigh_words([texts], int), {**_SETTINGS, "texts": digest(list(texts))})

    @classmethod
    def prepare(cls, request: IndexRequest) -> list[BuiltIndex]:
        """Find the finished index, or build it.

        Raises:
            ArtifactError: If the one there is foreign, damaged or in use.
        """
        return [_find_or_build(request)]

    @classmethod
    def open(cls, request: IndexRequest) -> Self:
        """Find or build the index, and load it."""
        built = _find_or_build(request)
        return cls(_load(built.folder), built.manifest.fingerprint)

    def retrieve(self, queries: Sequence[str], k: int) -> Candidates:
        """Give each query its best k passages.

        Args:
            queries: Texts.
            k: Candidates a query.

        Returns:
            (B, k); scores are BM25's, above 0; lines with fewer such passages end in missing ones.

        Raises:
            ConfigError: If k exceeds the corpus.
        """
        check_num_candidates(k, self._num_passages - len(self.removed))
        rows = np.full((len(queries), k), MISSING_ROW, dtype=np.int64)
        scores = np.full((len(queries), k), -np.inf, dtype=np.float32)
        for line, query in enumerate(queries):
            best = self._best(query, k)
            rows[line], scores[line] = best.rows[0], best.scores[0]
        return Candidates(rows, scores)

    def _best(self, query: str, k: int) -> Candidates:
        ids = self._index.get_tokens_ids(split_words(query))
        every: npt.NDArray[np.float32] = self._index.get_scores_from_ids(ids)
        every[self.removed] = 0
        # Keep all that tie with the k-th, so that ties at the border go by row too.
        bar = np.partition(every, -k)[-k]
        rows = np.flatnonzero((every >= bar) & (every > 0))
        return Candidates.best(rows[None, :], every[rows][None, :], k)


def bm25_fingerprint(corpus: "Corpus") -> dict[str, Json]:
    """Give all that determines a BM25 index."""
    return {**corpus.fingerprint, **_SETTINGS}


def bm25_folder(request: IndexRequest) -> Path:
    """Give the folder where this index stands, or will."""
    is_own = (
        request.args.retriever == "bm25"
    )  # hybrid's index_dir and output_dir are the dense one's
    if is_own and request.args.index_dir is not None:
        return Path(request.args.index_dir)
    if is_own and request.output_dir is not None:
        return request.output_dir
    return artifact_dir(request.artifacts / "indexes", "bm25", bm25_fingerprint(request.corpus))


def _find_or_build(request: IndexRequest) -> BuiltIndex:
    fields, folder = bm25_fingerprint(request.corpus), bm25_folder(request)
    if request.args.retriever == "bm25" and request.args.index_dir is not None:
        manifest = read_manifest(folder, stage=STAGE, fingerprint=fields)
        return BuiltIndex(folder, manifest, len(request.corpus))
    if not is_finished(folder):
        refuse_strangers(folder, ())
    built = build_once(
        folder,
        stage=STAGE,
        fingerprint=fields,
        build=lambda aside: _build(request, aside),
    )
    return BuiltIndex(folder, built.manifest, len(request.corpus) if built.reused else 0)


def _build(request: IndexRequest, folder: Path) -> dict[str, Json]:
    corpus, progress = request.corpus, request.progress and request.context.worker.is_main
    began = time.monotonic()
    with tqdm(total=len(corpus), desc="bm25", unit="text", disable=not progress) as bar:
        index = _weigh_words(corpus.batched(_CHUNK), bar.update)
    index.save(folder, show_progress=False)
    seconds = time.monotonic() - began
    recipe = write_recipe(request.args, corpus)
    return {
        **({} if recipe is None else {"recipe": recipe}),
        "rows": len(corpus),
        "words": len(index.vocab_dict),
        "bytes": sum(path.stat().st_size for path in folder.iterdir()),
        "texts_per_second": round(len(corpus) / max(seconds, 1e-6), 1),
    }


def _weigh_words(batches: Iterable[Sequence[str]], advance: Callable[[int], object]) -> Any:
    vocabulary: dict[str, int] = {}
    ids: list[list[int]] = []
    for texts in batches:
        ids += [
            [vocabulary.setdefault(word, len(vocabulary)) for word in split_words(text)]
            for text in texts
        ]
        advance(len(texts))
    vocabulary.setdefault("", len(vocabulary))  # bm25s wants a word even of a corpus without any
    index = _quiet_bm25s().BM25(
        k1=_SETTINGS["k1"],
        b=_SETTINGS["b"],
        method=_SETTINGS["tf"],
        idf_method=_SETTINGS["idf"],
    )
    index.index((ids, vocabulary), show_progress=False)
    return index


def _load(folder: Path) -> Any:
    return _quiet_bm25s().BM25.load(folder, mmap=True, load_vocab=True)


def _quiet_bm25s() -> Any:
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to DEBUG
    return bm25s
