"""Search of the whole corpus in the LM's own space, as a first stage.

A passage's state does not depend on the query, so a full bank is an index: candidates are the best
of all passages by eq. 3 of Guo et al. 2023, who stop at 150 and see the metric still rising.

    PYTHONPATH=. pgra train --retriever ablations.exhaustive:ExhaustiveSearch --task sst2
"""

import logging
from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np

from pgra.errors import ConfigError
from pgra.rerank.bank import query_keys
from pgra.rerank.states import BankedReranker
from pgra.retrieval.base import IndexRequest, Retriever
from pgra.retrieval.faiss import scan
from pgra.types import Candidates, Example

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 27  # of passages that are compared at once
_SPARE = 32  # hits beyond those asked for, so that rounding does not decide who is in
_ROUNDING = 1e-6  # of float32 products, as a share of the largest


class ExhaustiveSearch(Retriever):
    """Finds the best of all passages by the prompted reranker's scores."""

    reads_corpus: ClassVar[bool] = True

    def __init__(self, reranker: BankedReranker) -> None:
        self.reranker = reranker
        self.num_rows = len(reranker.corpus)
        self.fingerprint = {**reranker.fingerprint, "retriever": "exhaustive"}

    @classmethod
    def open(cls, request: IndexRequest) -> Self:
        """Open it over a run's reranker; one without states is a ConfigError."""
        if not isinstance(request.reranker, BankedReranker):
            raise ConfigError("exhaustive search needs --reranker prompted")
        return cls(request.reranker)

    def prepare(self, examples: Sequence[Example]) -> None:
        logger.info("%s", self.reranker.prepare(examples, np.arange(self.num_rows)))

    def retrieve(self, queries: Sequence[str], k: int) -> Candidates:
        """Let the LM read texts and what it has yet to read of the corpus, and search it."""
        fields = self.reranker.encoder.prompt.template.passage_fields
        examples = [Example("", fields(text)) for text in queries]
        self.prepare(examples)
        return self.retrieve_examples(examples, k)

    def retrieve_examples(self, examples: Sequence[Example], k: int) -> Candidates:
        """Return each query's best, (B, k), by the reranker's scores, ties by row.

        The nearest and a few more are scored; where rounding might drop a tie, it goes deeper.
        """
        keys = query_keys(examples)
        similarity = self.reranker.fitting.similarity
        queries = similarity.of_queries(self.reranker.query_bank.states(keys), keys)
        device = str(self.reranker.encoder.lm.device)
        size = max(1, _BLOCK_BYTES // (4 * self.reranker.bank.width))
        spare = _SPARE
        while True:
            depth = min(k + spare, self.num_rows)
            blocks = self.reranker.bank.blocks(rows=size)
            among = ((rows, similarity.of_passages(states)) for rows, states in blocks)
            hits = scan(queries, among, depth, device=device)
            scores = self.reranker.score_rows(examples, hits.rows)
            best = Candidates.best(hits.rows, scores, depth)
            slack = _ROUNDING * np.abs(best.scores).max(axis=1)
            is_sure = best.scores[:, k - 1] - best.scores[:, -1] > slack
            if depth == self.num_rows or is_sure.all():
                return best.top(k)
            spare *= 4
