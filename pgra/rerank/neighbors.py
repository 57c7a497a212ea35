"""The prompted reranker with a prefix of its own for every query: KATE inside PGRA.

A query and its candidates are read under the query's nearest training examples (Liu et al. 2022,
section 2.3) and compared as in Guo et al. 2023, eq. 3. A passage then has another state for every
query, so states are not kept: k + 1 texts are read a query, and its prefix once. What is kept is
each pair's dot product and cosine, by a hash of prefix, query and passage: a stopped job goes on
with the queries that are missing, fewer candidates or the other similarity cost nothing.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from pgra.artifacts import artifact_dir, canonical_json
from pgra.core import ALONE, MISSING_ROW, Candidates, Context, Example, Json, Rows
from pgra.data.corpus import Corpus
from pgra.exemplars.prompt import NearestExemplars
from pgra.lm.prefix import PromptedEncoder, Prompts
from pgra.rerank.bank import Advance, Bank
from pgra.rerank.base import Work

KEPT = ("dot", "cosine")
"""What a pair's entry in the bank holds, in this order."""


class NeighborReranker:
    """Orders candidates by the likeness of states under the query's own exemplars.

    Attributes:
        encoder: The LM, without exemplars.
        exemplars: Chooses each query's.
        similarity: "dot" (the paper) or "cosine" (its code).
        shard_rows: Pairs in one shard of the bank, about: a query's new pairs stay together.
        bank: Products and cosines of pairs.
    """

    def __init__(
        self,
        encoder: PromptedEncoder,
        exemplars: NearestExemplars,
        corpus: Corpus,
        artifacts: Path,
        *,
        similarity: str = "dot",
        shard_rows: int = 512,
        name: str = "bank",
    ) -> None:
        """Open the bank of an LM, a template and a corpus, whatever the exemplars.

        Args:
            encoder: The LM, without exemplars.
            exemplars: Chooses each query's.
            corpus: What rows stand for.
            artifacts: Root of all products.
            similarity: "dot" or "cosine".
            shard_rows: Pairs in one shard of the bank.
            name: How the bank's folder begins.

        Raises:
            ArtifactError: If the bank is damaged.
        """
        self.encoder, self.exemplars, self.corpus = encoder, exemplars, corpus
        self.similarity, self.shard_rows = similarity, shard_rows
        fields = {**encoder.fingerprint, **corpus.fingerprint, "kept of a pair": list(KEPT)}
        self.bank = Bank(artifact_dir(artifacts / "banks", f"{name}-pairs", fields), fields)

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give all that the order of candidates depends on, besides the candidates."""
        return {
            **self.bank.fingerprint,
            **self.exemplars.fingerprint,
            "reranker": "prompted",
            "similarity": self.similarity,
        }

    def prepare(
        self,
        examples: Sequence[Example],
        rows: Rows,
        *,
        context: Context = ALONE,
        progress: bool = False,
    ) -> Work:
        """Let the LM read the queries with those candidates that it has not read with them yet.

        Args:
            examples: B queries, of all splits at once.
            rows: Their candidates, (B, K); missing ones are passed over.
            context: Who shares the work.
            progress: Whether to show a bar.
        """
        start, tokens, cut = time.perf_counter(), self.encoder.num_tokens, self.encoder.num_cut
        pairs = self.pairs(examples, rows, context)
        num_queries = self.count_queries(pairs)
        new = self.bank.fill(
            pairs.keys,
            partial(self._read, pairs),
            self._score,
            shard_rows=self.shard_rows,
            cut=partial(pairs.cut, shard_rows=self.shard_rows),
            context=context,
            progress=progress,
            title="LM reads candidates",
        )
        self.exemplars.warn_shortened()
        return Work(
            len(np.unique(pairs.rows)),
            new + num_queries,
            self.encoder.num_tokens - tokens,
            self.encoder.num_cut - cut,
            time.perf_counter() - start,
        )

    def pairs(
        self,
        examples: Sequence[Example],
        rows: Rows,
        context: Context = ALONE,
    ) -> "Pairs":
        """Name the pairs of queries and candidates, (B, K); finds the queries' exemplars."""
        self.exemplars.look_up(examples, context)
        return Pairs.of(examples, self._keys(examples, rows), rows)

    def count_queries(self, pairs: "Pairs") -> int:
        """Count the queries with a pair that was not read yet: each is read once more."""
        return len(np.unique(pairs.queries[pairs.places(self.bank.missing(pairs.keys))]))

    def _keys(self, examples: Sequence[Example], rows: Rows) -> Rows:
        """Give the keys of pairs, (B, K): hashes of prefix, query and passage."""
        keys = np.empty(rows.shape, dtype=np.uint64)
        for place, example in enumerate(examples):
            prefix = self.exemplars.prompt(self.exemplars.of(example)).prefix
            asked = canonical_json({"prefix": prefix, "fields": dict(example.fields)})
            seed = xxhash.xxh3_64_intdigest(asked.encode())
            keys[place] = [xxhash.xxh3_64_intdigest(row.tobytes(), seed) for row in rows[place]]
        return keys.astype(np.int64)

    def _read(self, pairs: "Pairs", keys: Rows) -> "_Shard":
        """Write and tokenise a shard's prompts, query by query."""
        places = pairs.places(keys)
        queries = pairs.queries[places]
        units: deque[_Unit] = deque()
        for query in np.unique(queries):
            example, mine = pairs.examples[query], np.flatnonzero(queries == query)
            encoder = self.exemplars.encoder_for(self.encoder, example)
            template = encoder.prompt.template
            texts = self.corpus.texts(pairs.rows[places[mine]])
            fields = [example.fields, *(template.passage_fields(text) for text in texts)]
            _ = encoder.shared_ids  # here, not while the next shard is with the tokeniser
            units.append(_Unit(encoder, encoder.tokenize(fields), mine))
        return _Shard(units, len(keys))

    def _score(self, shard: "_Shard", advance: Advance) -> Tensor:
        """Read a shard's queries, each under its own prefix: (n, 2) float32, as `KEPT` says."""
        found = torch.empty(shard.num_pairs, len(KEPT))
        while shard.units:  # a prefix's keys and values are gone with its query
            unit = shard.units.popleft()
            states = unit.encoder.encode_prompts(unit.prompts).float()  # (1 + n, H)
            query, passages = states[0], states[1:]
            dot = (passages * query).sum(1)
            lengths = torch.linalg.vector_norm(states, dim=1)
            found[unit.places] = torch.stack([dot, dot / (lengths[1:] * lengths[0])], dim=1)
            self.encoder.num_tokens += unit.encoder.num_tokens
            self.encoder.num_cut += unit.encoder.num_cut
            advance(len(passages))
        return found

    def rerank(self, examples: Sequence[Example], candidates: Candidates) -> Candidates:
        """Order each query's candidates by eq. 3; `prepare` must have seen them.

        Args:
            examples: B queries.
            candidates: (B, K).

        Returns:
            The same rows (B, K) with the states' products (or cosines), best first, ties by row.

        Raises:
            KeyError: If a pair was not read.
        """
        rows, column = candidates.rows, KEPT.index(self.similarity)
        scores = np.full(rows.shape, -np.inf, dtype=np.float32)
        present = rows != MISSING_ROW
        if present.any():
            scores[present] = self.bank.states(self._keys(examples, rows)[present])[:, column]
        return Candidates.best(rows, scores, rows.shape[1])


@dataclass(frozen=True)
class _Unit:
    """A query with candidates, tokenised; the query's prompt comes first."""

    encoder: PromptedEncoder
    prompts: Prompts
    places: npt.NDArray[np.intp]  # of the candidates in the shard


@dataclass(frozen=True)
class _Shard:
    """What is read and written at once."""

    units: deque[_Unit]
    num_pairs: int


@dataclass(frozen=True)
class Pairs:
    """Distinct pairs of queries and passages.

    Attributes:
        examples: The queries.
        keys: (n,) int64, rising.
        queries: Places of the queries in `examples`, (n,).
        rows: Passages, (n,).
    """

    examples: Sequence[Example]
    keys: Rows
    queries: Rows
    rows: Rows

    @classmethod
    def of(cls, examples: Sequence[Example], keys: Rows, rows: Rows) -> Self:
        """Gather pairs.

        Args:
            examples: B queries.
            keys: (B, K).
            rows: Candidates, (B, K), `MISSING_ROW` where missing.
        """
        present = rows != MISSING_ROW
        distinct, first = np.unique(keys[present], return_index=True)
        queries = np.nonzero(present)[0].astype(np.int64)
        return cls(examples, distinct, queries[first], rows[present][first])

    def places(self, keys: Rows) -> npt.NDArray[np.intp]:
        """Give where keys that are there stand, (n,)."""
        return np.searchsorted(self.keys, keys)

    def cut(self, keys: Rows, *, shard_rows: int) -> list[Rows]:
        """Make shards of keys: whole queries, until there are `shard_rows` keys or more."""
        queries = self.queries[self.places(keys)]
        order = np.argsort(queries, kind="stable")
        ends = [*np.flatnonzero(np.diff(queries[order])) + 1, len(order)]
        shards, begin = [], 0
        for end in ends:
            if end - begin >= shard_rows or end == len(order):
                shards.append(np.sort(keys[order[begin:end]]))
                begin = end
        return shards
