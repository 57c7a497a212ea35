"""How similar two examples are: by vectors under a metric, or by the words they share.

KATE (Liu et al. 2022, section 3.1) compares by negative Euclidean distance where the encoder is
plain RoBERTa, and by cosine where it is trained on sentence pairs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from pgra.config import find_class
from pgra.core import Candidates, Example, Json, Rows
from pgra.encoders import EncoderArguments, PassageEncoderArguments
from pgra.encoders.encoder import Encoder
from pgra.errors import ConfigError
from pgra.exemplars import BM25, SIMILARITIES, SelectionArguments
from pgra.retrieval.bm25 import BM25Retriever
from pgra.retrieval.faiss import Vectors, nearest
from pgra.retrieval.neighbors import ExampleEncoder, Neighbors

_GATHERED = 1 << 24  # numbers of vectors that are gathered at once to be compared exactly

# Returns the part of examples to compare, of pool and queries alike.
Key = Callable[[Sequence[Example]], list[Example]]


class PoolSimilarity(ABC):
    """Compares queries with a pool of labelled examples; higher is more similar."""

    metric: ClassVar[str]

    def __init__(self, neighbors: Neighbors, *, key: Key | None = None) -> None:
        """Encode nothing yet.

        `neighbors` has the pool, under `key`, and an encoder without unit length, or all metrics
        are one. `key` returns the part of queries to compare; None: all.
        """
        self._neighbors, self._key = neighbors, key

    def renewed(self) -> Self:
        """Return the same comparison with a pool that has grown; its vectors are reused."""
        return type(self)(self._neighbors, key=self._key)

    def load(self) -> None:
        """Load the encoder now; one that cannot be found or loaded is a ModelError."""
        _ = self._neighbors.encoder

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Everything that decides how similar two examples are: encoder, pool, metric and key."""
        key = {} if self._key is None else {"key": self._key.__name__}
        return {**self._made_of(), "metric": self.metric, **key}

    def _made_of(self) -> Mapping[str, Json]:
        return self._neighbors.fingerprint

    def nearest(
        self, queries: Sequence[Example], rows: Rows, depth: int, *, sign: int = 1
    ) -> Candidates:
        """Return each query's most similar of some rows of the pool, (B, depth), ties by row.

        With sign -1 the least similar, the least first; scores are negative similarities. BM25
        refuses that with a ConfigError.
        """
        compared = queries if self._key is None else self._key(queries)
        return self._search(compared, rows, depth, sign)

    @abstractmethod
    def _search(
        self, queries: Sequence[Example], rows: Rows, depth: int, sign: int
    ) -> Candidates: ...


class DotSimilarity(PoolSimilarity):
    """Compares by inner products of vectors as the model gives them, made once and stored."""

    metric = "dot"

    @cached_property
    def _pool(self) -> Vectors:
        return self._shape(self._neighbors.vectors())

    def _shape(self, vectors: Vectors) -> Vectors:
        """Change vectors so that the metric is simple on them, (n, D)."""
        return vectors

    def _of(self, rows: Rows) -> Vectors:
        return self._pool if len(rows) == len(self._pool) else self._pool[rows]

    def _search(self, queries: Sequence[Example], rows: Rows, depth: int, sign: int) -> Candidates:
        vectors = self._shape(self._neighbors.encoder.encode_examples(queries))
        return nearest(sign * vectors, [(rows, self._of(rows))], depth)


class CosineSimilarity(DotSimilarity):
    metric = "cosine"

    def _shape(self, vectors: Vectors) -> Vectors:
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        return np.asarray(vectors / np.maximum(lengths, np.finfo(np.float32).tiny), np.float32)


class EuclideanSimilarity(DotSimilarity):
    """Compares by the negative Euclidean distance."""

    metric = "euclidean"

    @cached_property
    def _middle(self) -> Vectors:
        # Distances do not change when all points move; float32 is finest near 0. The
        # states of a plain BERT share one huge component.
        mean = self._neighbors.vectors().mean(axis=0, dtype=np.float64)
        return np.asarray(mean, np.float32)

    def _shape(self, vectors: Vectors) -> Vectors:
        return vectors - self._middle

    def _search(self, queries: Sequence[Example], rows: Rows, depth: int, sign: int) -> Candidates:
        vectors = self._shape(self._neighbors.encoder.encode_examples(queries))
        # -|q - x|^2 / 2 = qx - |x|^2 / 2 - |q|^2 / 2, where the last part is the query's alone.
        pool = self._of(rows)
        halves = -0.5 * np.square(pool).sum(axis=1, keepdims=True)
        wide = np.hstack([vectors, np.ones((len(vectors), 1), np.float32)])
        found = nearest(sign * wide, [(rows, np.hstack([pool, halves]))], depth).rows
        # The distances themselves: their squares lose digits in the product.
        distances = np.empty(found.shape, dtype=np.float32)
        step = max(1, _GATHERED // max(1, found.shape[1] * vectors.shape[1]))
        for start in range(0, len(vectors), step):
            part = slice(start, start + step)
            gaps = self._pool[found[part]] - vectors[part, None, :]  # (b, K, D)
            distances[part] = np.sqrt(np.square(gaps).sum(axis=2))
        return Candidates.best(found, -sign * distances, depth)


class WordSimilarity(PoolSimilarity):
    """Compares by shared words, with Okapi BM25; a query misses examples without any."""

    metric = "bm25"

    @cached_property
    def _index(self) -> BM25Retriever:
        return BM25Retriever.of_texts([example.text for example in self._neighbors.examples])

    def load(self) -> None:
        """Load nothing: words need no model."""

    def _made_of(self) -> Mapping[str, Json]:
        return self._index.fingerprint

    def _search(self, queries: Sequence[Example], rows: Rows, depth: int, sign: int) -> Candidates:
        if sign < 0:  # most of a pool shares no word with a query, so the least alike all tie
            raise ConfigError(
                "encoder 'bm25' has no farthest examples, since most of a pool shares no word with "
                "a query: leave out --farthest, or use another --encoder"
            )
        self._index.removed = np.setdiff1d(np.arange(len(self._neighbors.examples)), rows)
        return self._index.retrieve([query.text for query in queries], depth)


def open_similarity(
    args: SelectionArguments,
    examples: Sequence[Example],
    root: Path | None = None,
    *,
    device: str,
    key: Key | None = None,
    encoder: ExampleEncoder | None = None,
) -> PoolSimilarity | None:
    """Open what `--encoder` and `--vector_metric` name; None if nothing is compared.

    The encoder is loaded when it is first needed.

    `root` is the folder of the pool's vectors; None: in memory alone. `key` returns the part of
    examples to compare, such as questions without their subject. `encoder` replaces `--encoder`.

    Raises:
        ModelError: If the encoder cannot be found or loaded.
    """
    if not args.compares:
        return None
    asked = {f.name: getattr(args, f.name) for f in fields(EncoderArguments)}
    plain = PassageEncoderArguments(normalize=False, **asked)  # lengths stay: the metric reads them
    pool = examples if key is None else key(examples)
    neighbors = Neighbors(lambda: encoder or Encoder.load(plain, device=device), pool, root)
    name = BM25 if args.encoder == BM25 else args.vector_metric
    opened: PoolSimilarity = find_class("similarity", name, SIMILARITIES)(neighbors, key=key)
    return opened
