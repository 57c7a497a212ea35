"""Search without a first stage: the whole corpus is reranked, in the LM's own space.

A passage's state does not depend on the query, so a full bank is an index: each query's evidence
is the best of all passages by eq. 3 of Guo et al. 2023. Their k becomes the size of the corpus;
they stop at 150 and see the metric still rising.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Self

import numpy as np
import torch

from pgra.core import Candidates, Example, Rows
from pgra.errors import ConfigError
from pgra.rerank.bank import query_key
from pgra.rerank.base import BaseReranker
from pgra.rerank.reranker import Reranker
from pgra.retrieval.base import IndexRequest, Retriever
from pgra.retrieval.faiss import Vectors, nearest

logger = logging.getLogger(__name__)

_EVIDENCE_STEP = 150
_BLOCK_ROWS = 16_384  # of passages that are compared at once,
_BLOCK_BYTES = 1 << 27  # fewer where states are wide
_CHUNK_BYTES = 1 << 28  # of queries and their hits, for one pass over the bank
_SPARE = 32  # hits beyond those asked for, so that rounding does not decide who is in
_ROUNDING = 1e-6  # of float32 products, as a share of the largest


class ExhaustiveSearch(Retriever):
    """Finds each query's evidence among all passages of a corpus, by the reranker's states."""

    @classmethod
    def open(cls, request: IndexRequest) -> Self:  # noqa: ARG003
        """Refuse to search without a reranker: stages open it over theirs."""
        raise ConfigError(
            "retriever 'exhaustive' searches the LM's states under a task's prompt: use it with "
            "pgra rerank or pgra train, or choose another here"
        )

    def __init__(self, reranker: BaseReranker) -> None:
        """Open the search; a reranker without states is a ConfigError."""
        if not isinstance(reranker, Reranker):
            raise ConfigError(
                "retriever 'exhaustive' searches by the LM's states: use --reranker prompted"
            )
        self.reranker, self.num_rows = reranker, len(reranker.corpus)
        self._device = str(reranker.encoder.lm.device)

        how = {"retriever": "exhaustive", "index_factory": "Flat"}
        self.fingerprint = {**reranker.fingerprint, **how}

    def retrieve(self, queries: Sequence[str], k: int) -> Candidates:
        """Let the LM read texts and what it has yet to read of the corpus, and search it."""
        fields = self.reranker.prompt.template.passage_fields
        examples = [Example("", fields(text)) for text in queries]
        self.reranker.prepare(examples, np.arange(self.num_rows))
        return self.search(examples, k)

    def search(self, examples: Sequence[Example], depth: int) -> Candidates:
        """Return each query's evidence, (B, depth), by the reranker's scores, ties by row.

        The reranker must be prepared for the queries and all rows; `depth` is at most these.
        """
        return self._in_chunks(examples, depth, _SPARE)

    def _in_chunks(self, examples: Sequence[Example], depth: int, spare: int) -> Candidates:
        """Search for so many queries at a time as memory holds; the bank is read for each."""
        found = Candidates.missing(len(examples), depth)
        step = max(1, _CHUNK_BYTES // (4 * self.reranker.bank.width + 24 * (depth + spare)))
        for start in range(0, len(examples), step):
            chunk = slice(start, start + step)
            best = self._best_of_all(examples[chunk], depth, spare)
            found.rows[chunk], found.scores[chunk] = best.rows, best.scores
        return found

    def _best_of_all(self, examples: Sequence[Example], depth: int, spare: int) -> Candidates:
        """Rerank the nearest and a few more; where rounding might drop a tie, search deeper."""
        fetched = min(depth + spare, self.num_rows)
        queries = self._queries(examples)
        try:
            hits = nearest(queries, self._blocks(), fetched, device=self._device)
        except torch.OutOfMemoryError:
            logger.warning("out of memory: states are compared on the CPU, not on %s", self._device)
            self._device = "cpu"
            hits = nearest(queries, self._blocks(), fetched)
        best = self.reranker.rerank(examples, hits)
        kept = best.top(depth)
        if fetched == self.num_rows:
            return kept
        slack = _ROUNDING * np.abs(best.scores).max(axis=1)
        unsure = np.flatnonzero(best.scores[:, depth - 1] - best.scores[:, -1] <= slack)
        if len(unsure):
            again = [examples[i] for i in unsure.tolist()]
            deeper = self._in_chunks(again, depth, 4 * spare)
            kept.rows[unsure], kept.scores[unsure] = deeper.rows, deeper.scores
        return kept

    def _queries(self, examples: Sequence[Example]) -> Vectors:
        """Return queries so that their inner products with what is indexed are the scores."""
        bank = self.reranker.query_bank
        keys = np.array([query_key(example) for example in examples], np.int64)
        return self.reranker.fitting.similarity.of_queries(bank.states(keys), keys)

    def _blocks(self) -> Iterator[tuple[Rows, Vectors]]:
        """Return all states as they lie on disk."""
        similarity = self.reranker.fitting.similarity
        size = min(_BLOCK_ROWS, max(1, _BLOCK_BYTES // (4 * self.reranker.bank.width)))
        for keys, states in self.reranker.bank.blocks(rows=size):
            yield keys, similarity.of_passages(states)


def num_kept(num_evidence: int, num_passages: int) -> int:
    """Return how much evidence is kept on disk: the next multiple of 150, at most the corpus.

    So all settings of d up to the paper's k share one file.
    """
    return min(math.ceil(num_evidence / _EVIDENCE_STEP) * _EVIDENCE_STEP, num_passages)
