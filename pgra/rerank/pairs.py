"""Scores of pairs of query and passage, each computed once and kept in a bank by a hash of both.

For rerankers that read a passage together with its query, so that it has no state of its own.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from pgra.artifacts import Inputs, artifact_dir, canonical_json
from pgra.core import MISSING_ROW, Example, Json, Rows, Scores
from pgra.lm.load import batch_budget
from pgra.rerank.bank import Advance, Bank, bank_name
from pgra.rerank.base import RerankRequest, ScoringReranker


@dataclass(frozen=True)
class Pairs:
    """Distinct pairs of queries and passages: n rising keys, and the passages' rows.

    `queries` are indices in `examples`, (n,).
    """

    examples: Sequence[Example]
    keys: Rows
    queries: Rows
    rows: Rows

    def find(self, keys: Rows) -> npt.NDArray[np.intp]:
        """Return the indices of keys that are there, (n,)."""
        return np.searchsorted(self.keys, keys)

    def cut(self, keys: Rows, shard_rows: int) -> list[Rows]:
        """Make shards of keys: whole queries, until there are `shard_rows` keys or more."""
        queries = self.queries[self.find(keys)]
        order = np.argsort(queries, kind="stable")
        ends = [*np.flatnonzero(np.diff(queries[order])) + 1, len(order)]
        shards, begin = [], 0
        for end in ends:
            if end - begin >= shard_rows or end == len(order):
                shards.append(np.sort(keys[order[begin:end]]))
                begin = end
        return shards


class PairReranker(ScoringReranker):
    """Orders candidates by a score of query and passage read together.

    Attributes:
        bank: Scores of pairs, a column for each kind of score.
        column: The one that decides.
        shard_rows: Pairs in one shard of the bank, about: a query's new pairs stay together.
        reads_queries: Whether each query with new pairs is a text of its own, too.
    """

    reads_queries = False
    column = 0

    def __init__(
        self,
        request: RerankRequest,
        model: str,
        device: torch.device,
        fields: Mapping[str, Json],
        inputs: Inputs,
    ) -> None:
        """Open the bank; `fields` are what scores depend on, besides corpus, query and passage."""
        self.corpus, self.context = request.corpus, request.context
        self.topic_weight = request.args.topic_weight
        self.shard_rows = batch_budget(request.args.bank_shard_rows, device)
        fields = {**fields, **self.corpus.fingerprint}
        root = self.context.artifacts / "banks"
        folder = artifact_dir(root, f"{bank_name(model)}-pairs", fields)
        self.bank = Bank(folder, fields, inputs=inputs)

    @abstractmethod
    def identify(self, example: Example) -> Mapping[str, Json]:
        """Return what a query's pairs depend on, besides the passage."""

    @abstractmethod
    def read(self, pairs: Pairs, keys: Rows) -> Any:
        """Tokenise a shard's pairs, in another thread."""

    @abstractmethod
    def compute(self, shard: Any, advance: Advance) -> Tensor | Callable[[], Tensor]:
        """Score what `read` returned, (n, columns) float32, or return a function that does."""

    def pairs(self, examples: Sequence[Example], rows: Rows) -> Pairs:
        """List the pairs of queries and candidates, (B, K)."""
        present = rows != MISSING_ROW
        keys, first = np.unique(self._keys(examples, rows)[present], return_index=True)
        queries = np.nonzero(present)[0].astype(np.int64)
        return Pairs(examples, keys, queries[first], rows[present][first])

    def _keys(self, examples: Sequence[Example], rows: Rows) -> Rows:
        """Return the keys of pairs, (B, K): hashes of query and passage."""
        keys = np.empty(rows.shape, dtype=np.uint64)
        for i, example in enumerate(examples):
            seed = xxhash.xxh3_64_intdigest(canonical_json(self.identify(example)).encode())
            keys[i] = [xxhash.xxh3_64_intdigest(row.tobytes(), seed) for row in rows[i]]
        return keys.astype(np.int64)

    def fill(self, examples: Sequence[Example], rows: Rows) -> tuple[int, int]:
        pairs = self.pairs(examples, rows)
        new_queries = self._count_queries(pairs)
        new = self.bank.fill(
            pairs.keys,
            partial(self.read, pairs),
            self.compute,
            shard_rows=self.shard_rows,
            cut=pairs.cut,
            context=self.context,
            title="reads candidates",
        )
        return len(np.unique(pairs.rows)), new + new_queries * self.reads_queries

    def _count_queries(self, pairs: Pairs) -> int:
        return len(np.unique(pairs.queries[pairs.find(self.bank.missing(pairs.keys))]))

    def score(self, examples: Sequence[Example], rows: Rows) -> Scores:
        """Look up the pairs' scores, (B, K), -inf where a row is missing."""
        scores = np.full(rows.shape, -np.inf, dtype=np.float32)
        present = rows != MISSING_ROW
        if present.any():
            keys = self._keys(examples, rows)[present]
            scores[present] = self.bank.states(keys)[:, self.column]
        return scores

    def count_missing(self, examples: Sequence[Example], rows: Rows) -> int:
        """Count the pairs that are yet to be read, and their queries where these are read too."""
        pairs = self.pairs(examples, rows)
        new = len(self.bank.missing(pairs.keys))
        return new + self._count_queries(pairs) * self.reads_queries
