"""How like two examples are: by vectors under a metric, or by the words they share.

KATE (Liu et al. 2022, section 3.1) compares by negative Euclidean distance where the encoder is
plain RoBERTa, and by cosine where it is trained on sentence pairs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pgra.errors import ConfigError
from pgra.models.prefix import PromptedEncoder
from pgra.processes import Processes
from pgra.retrieval.bm25 import BM25Retriever
from pgra.retrieval.exact import Vectors, nearest
from pgra.retrieval.neighbors import Neighbors
from pgra.types import Candidates, Example, Json, Rows

METRICS = ("cosine", "dot", "euclidean")
_GATHERED = 1 << 24  # numbers of vectors that are gathered at once to be compared exactly


class Likeness(Protocol):
    """Compares queries with a pool of labelled examples; higher is more alike."""

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give all that decides who is like whom."""
        ...

    def nearest(self, queries: Sequence[Example], rows: Rows, depth: int) -> Candidates:
        """Give each query's most alike among some rows of the pool, (B, depth), ties by row."""
        ...

    def farthest(self, queries: Sequence[Example], rows: Rows, depth: int) -> Candidates:
        """Give each query's least alike, the least first; scores are negative likenesses.

        Raises:
            ConfigError: If there is no such thing.
        """
        ...

    def among(self, rows: Rows) -> npt.NDArray[np.float32]:
        """Give the likeness of some rows of the pool with each other, (n, n).

        Raises:
            ConfigError: If there is no such thing.
        """
        ...


class VectorLikeness:
    """Compares by vectors, which are made once and kept."""

    def __init__(
        self,
        neighbors: Neighbors,
        metric: str,
        processes: Processes = Processes(),  # noqa: B008 (frozen)
    ) -> None:
        """Remember what is compared; nothing is encoded yet.

        Args:
            neighbors: The pool, and what gives vectors; as the model gives them, not of unit
                length, or all metrics are one.
            metric: One of `METRICS`.
            processes: Who waits while the main one encodes the pool.
        """
        self._neighbors, self._metric, self._processes = neighbors, metric, processes

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give encoder, pool and metric."""
        return {**self._neighbors.fingerprint, "metric": self._metric}

    @cached_property
    def _pool(self) -> Vectors:
        """Give the pool's vectors so that the metric is simple on them, (n, D)."""
        return self._shape(self._neighbors.vectors(self._processes))

    @cached_property
    def _middle(self) -> Vectors:
        # Distances do not change when all points move; near 0 float32 tells them apart best. The
        # states of a plain BERT share one huge component.
        mean = self._neighbors.vectors(self._processes).mean(axis=0, dtype=np.float64)
        return np.asarray(mean, np.float32)

    def _shape(self, vectors: Vectors) -> Vectors:
        if self._metric == "cosine":
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            return np.asarray(vectors / np.maximum(lengths, np.finfo(np.float32).tiny), np.float32)
        return vectors - self._middle if self._metric == "euclidean" else vectors

    def _encode(self, queries: Sequence[Example]) -> Vectors:
        return self._shape(self._neighbors.encode(queries))

    def nearest(self, queries: Sequence[Example], rows: Rows, depth: int) -> Candidates:
        """Give each query's most alike; see `Likeness`."""
        return self._search(queries, rows, depth, sign=1)

    def farthest(self, queries: Sequence[Example], rows: Rows, depth: int) -> Candidates:
        """Give each query's least alike; see `Likeness`."""
        return self._search(queries, rows, depth, sign=-1)

    def _search(
        self, queries: Sequence[Example], rows: Rows, depth: int, *, sign: int
    ) -> Candidates:
        asked, pool = self._encode(queries), self._pool[rows]
        if self._metric != "euclidean":
            return nearest(sign * asked, [(rows, pool)], depth)
        # -|q - x|^2 / 2 = qx - |x|^2 / 2 - |q|^2 / 2, where the last part is the query's alone.
        halves = -0.5 * np.square(pool).sum(axis=1, keepdims=True)
        ones = np.ones((len(asked), 1), np.float32)
        found = nearest(sign * np.hstack([asked, ones]), [(rows, np.hstack([pool, halves]))], depth)
        return Candidates.best(found.rows, -sign * self._distances(asked, found.rows), depth)

    def _distances(self, asked: Vectors, rows: Rows) -> npt.NDArray[np.float32]:
        """Give the distances themselves, (B, K): their squares lose digits in the product."""
        distances = np.empty(rows.shape, dtype=np.float32)
        step = max(1, _GATHERED // max(1, rows.shape[1] * asked.shape[1]))
        for start in range(0, len(asked), step):
            part = slice(start, start + step)
            gaps = self._pool[rows[part]] - asked[part, None, :]  # (b, K, D)
            distances[part] = np.sqrt(np.square(gaps).sum(axis=2))
        return distances

    def among(self, rows: Rows) -> npt.NDArray[np.float32]:
        """Give the likeness of rows with each other; see `Likeness`."""
        vectors = self._pool[rows]
        products = np.asarray(vectors @ vectors.T, np.float32)
        if self._metric != "euclidean":
            return products
        squares = np.diagonal(products)
        gaps = squares[:, None] + squares[None, :] - 2 * products
        return np.asarray(-np.sqrt(np.maximum(gaps, 0)), np.float32)


class WordLikeness:
    """Compares by shared words: Okapi BM25, the pool's examples being the passages."""

    def __init__(self, pool: Sequence[Example]) -> None:
        """Remember the pool; it is indexed when it is first searched."""
        self._texts = [example.text for example in pool]

    @cached_property
    def _index(self) -> BM25Retriever:
        return BM25Retriever.of_texts(self._texts)

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give BM25's constants and a digest of the pool."""
        return {"metric": "bm25", **self._index.fingerprint}

    def nearest(self, queries: Sequence[Example], rows: Rows, depth: int) -> Candidates:
        """Give each query's most alike; those that share no word with it are missing."""
        self._index.removed = np.setdiff1d(np.arange(len(self._texts)), rows)
        return self._index.retrieve([query.text for query in queries], depth)

    def farthest(self, queries: Sequence[Example], rows: Rows, depth: int) -> Candidates:  # noqa: ARG002
        """Refuse: most of a pool shares no word with a query, so the least alike all tie.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "encoder 'bm25' has no farthest examples, since most of a pool shares no word with a "
            "query: leave out --farthest, or use another --encoder"
        )

    def among(self, rows: Rows) -> npt.NDArray[np.float32]:  # noqa: ARG002
        """Refuse: BM25 compares a query with a passage, not two passages.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "exemplars 'knn-mmr' compares exemplars with each other, and encoder 'bm25' cannot: "
            "use --exemplars knn, or another --encoder"
        )


@dataclass(frozen=True)
class PromptedStates:
    """Vectors of examples that are an LM's states under a task's prompt: h*(x) of PGRA.

    Guo et al. 2023, eq. 2, compare queries with corpus passages by these; here they compare queries
    with the examples that KATE chooses from.

    Attributes:
        encoder: The LM under the task's prompt.
        advance: Told how many more are done, for a bar.
    """

    encoder: PromptedEncoder
    advance: Callable[[int], object] = int

    @property
    def query_fingerprint(self) -> Mapping[str, Json]:
        """Give all that determines a state, besides the example."""
        return self.encoder.fingerprint

    def encode_examples(self, examples: Sequence[Example]) -> Vectors:
        """Give the states of examples, (B, H) float32.

        Raises:
            ModelError: If one is not finite.
        """
        fields = [example.fields for example in examples]
        states = self.encoder.encode_fields(fields, advance=self.advance)
        return np.asarray(states.float().numpy(), np.float32)
