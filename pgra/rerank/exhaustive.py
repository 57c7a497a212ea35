"""Search without a first stage: the whole corpus is reranked, in the LM's own space.

A passage's state does not depend on the query, so a full bank is an index: each query's evidence
is the best of all passages by eq. 3 of Guo et al. 2023. Their k becomes the size of the corpus;
they stop at 150 and see the metric still rising.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from pgra.artifacts import artifact_dir, build_once
from pgra.core import Candidates, Example, Json, Rows
from pgra.errors import ConfigError
from pgra.lm.load import LmShape
from pgra.rerank.bank import query_key
from pgra.rerank.base import BaseReranker, Work
from pgra.rerank.prompted import PromptedReranker
from pgra.retrieval.faiss import (
    AUTO,
    DEPTHS,
    EXACT,
    INDEX_FILE,
    SAMPLE,
    IndexPlan,
    Vectors,
    VectorSource,
    ask,
    build_faiss,
    choose_factory,
    empty_index,
    import_faiss,
    load_faiss,
    most_hits,
    nearest_in_blocks,
)

logger = logging.getLogger(__name__)

STAGE = "state_index"
_EVIDENCE_STEP = 150
_BLOCK_ROWS = 16_384  # of passages that are compared at once,
_BLOCK_BYTES = 1 << 27  # fewer where states are wide
_CHUNK_BYTES = 1 << 28  # of queries and their hits, for one pass over the bank
_SPARE = 32  # hits beyond those asked for, so that rounding does not decide who is in
_ROUNDING = 1e-6  # of float32 products, as a share of the largest
_QUERY_BATCH = 1024


class ExhaustiveSearch:
    """Finds each query's evidence among all passages of a corpus.

    Attributes:
        reranker: Gives the states, and the scores of what is found.
        factory: "Flat" compares with every state; any other FAISS factory string builds an index
            of the states, which is faster in a large corpus and may miss some.
        num_rows: Passages of the corpus.
        is_exact: Whether every passage is compared.
    """

    def __init__(
        self, reranker: BaseReranker, *, factory: str = EXACT, memory_gb: float | None = None
    ) -> None:
        """Open the search without a first stage.

        Args:
            reranker: The second stage.
            factory: FAISS factory string for the states, or auto; "Flat" compares them all.
            memory_gb: Memory that an index may take, for auto; None: half of the machine's.

        Raises:
            ConfigError: If the reranker has no states to search by.
        """
        if not isinstance(reranker, PromptedReranker):
            raise ConfigError(
                "retriever 'exhaustive' searches by the LM's states: use --reranker prompted"
            )
        self.reranker, self.factory, self.num_rows = reranker, factory, len(reranker.corpus)
        if factory == AUTO:
            self.factory = choose_factory(factory, self.num_rows, self._num_columns, memory_gb)
        self.is_exact = self.factory == EXACT
        self._device = str(reranker.encoder.lm.device)

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Return all that the evidence of a query depends on."""
        how = {"retriever": "exhaustive", "index_factory": self.factory}
        return {**self.reranker.fingerprint, **how}

    def prepare(self, examples: Sequence[Example]) -> Work:
        """Let the LM read all passages and these queries, as far as it has not yet.

        Raises:
            ConfigError: If the factory cannot work, before anything is read.
        """
        self.check()
        return self.reranker.prepare(examples, np.arange(self.num_rows))

    def check(self) -> None:
        """Refuse what would only show when the LM has read everything.

        Raises:
            ConfigError: If FAISS is missing, or the factory cannot work.
        """
        if self._device == "cpu":
            import_faiss()
        if not self.is_exact:
            empty_index(self.factory, self._num_columns, self.num_rows)

    def search(self, examples: Sequence[Example], depth: int) -> Candidates:
        """Find each query's evidence; `prepare` must have seen the queries.

        One process does it alone: reading a text costs an LM thousands of times what comparing its
        state with all queries does, so there is little to share.

        Args:
            examples: B queries.
            depth: Evidence a query, at most the corpus.

        Returns:
            (B, depth) with the scores that the reranker gives, best first, ties by row. Only an
            approximate index leaves entries missing.

        Raises:
            ConfigError: If the factory cannot work, or not so deep on a GPU.
            ArtifactError: If the index or a state on disk is damaged.
        """
        return self._in_chunks(examples, depth, self._best_of_all if self.is_exact else self._ask)

    def measure_recall(self, examples: Sequence[Example], found: Candidates) -> dict[str, float]:
        """Return the share of the true evidence that was found, by depth, on a sample of queries.

        Args:
            examples: The queries.
            found: What `search` gave for them.
        """
        depth = found.rows.shape[1]
        depths = sorted({min(d, depth) for d in (*DEPTHS, depth)})
        if self.is_exact:
            return {str(d): 1.0 for d in depths}
        size = min(SAMPLE, len(examples))
        sample = np.linspace(0, len(examples) - 1, size).astype(int).tolist()
        true = self._in_chunks([examples[i] for i in sample], depth, self._best_of_all).rows
        pairs = list(zip(found.rows[sample], true, strict=True))
        shared = {d: [len(np.intersect1d(a[:d], b[:d])) / d for a, b in pairs] for d in depths}
        return {str(d): round(float(np.mean(shares)), 4) for d, shares in shared.items()}

    @cached_property
    def _width(self) -> int:
        return self.reranker.bank.width or LmShape.of(self.reranker.encoder.lm.config).state

    @property
    def _num_columns(self) -> int:
        """Return D, of what is compared."""
        return self.reranker.fitting.num_columns(self._width)

    def _in_chunks(
        self,
        examples: Sequence[Example],
        depth: int,
        find: Callable[[Sequence[Example], int, int], Candidates],
        *,
        spare: int = _SPARE,
    ) -> Candidates:
        """Search for so many queries at a time as memory holds; the bank is read for each.

        Args:
            examples: The queries.
            depth: Hits a query.
            find: Finds queries their best `depth`, having looked at `spare` more.
            spare: How many more.
        """
        rows = np.empty((len(examples), depth), dtype=np.int64)
        scores = np.empty((len(examples), depth), dtype=np.float32)
        width = max(self._width, self._num_columns)
        step = max(1, _CHUNK_BYTES // (4 * width + 24 * (depth + spare)))
        for start in range(0, len(examples), step):
            chunk = slice(start, start + step)
            best = find(examples[chunk], depth, spare)
            rows[chunk], scores[chunk] = best.rows, best.scores
        return Candidates(rows, scores)

    def _best_of_all(self, examples: Sequence[Example], depth: int, spare: int) -> Candidates:
        """Compare with every state, then let the reranker score the best and a few more.

        A query whose last hit scores as the last one that is kept might have lost one of equal
        score to rounding: it is searched again, deeper.
        """
        fetched = min(depth + spare, self.num_rows)
        queries = self._queries(examples)
        try:
            hits = nearest_in_blocks(queries, self._blocks(), fetched, device=self._device)
        except torch.OutOfMemoryError:
            logger.warning("out of memory: states are compared on the CPU, not on %s", self._device)
            self._device = "cpu"
            hits = nearest_in_blocks(queries, self._blocks(), fetched)
        best = self.reranker.rerank(examples, hits)
        kept = best.top(depth)
        if fetched == self.num_rows:
            return kept
        slack = _ROUNDING * np.abs(best.scores).max(axis=1)
        unsure = np.flatnonzero(best.scores[:, depth - 1] - best.scores[:, -1] <= slack)
        if len(unsure):
            again = [examples[i] for i in unsure.tolist()]
            deeper = self._in_chunks(again, depth, self._best_of_all, spare=4 * spare)
            kept.rows[unsure], kept.scores[unsure] = deeper.rows, deeper.scores
        return kept

    def _ask(self, examples: Sequence[Example], depth: int, spare: int) -> Candidates:
        """Ask the FAISS index, then let the reranker score what it gives."""
        index = self._index
        most = most_hits(index)
        if depth > most:
            raise ConfigError(
                f"{depth} evidence a query exceed what FAISS finds on a GPU ({most}): "
                "use --index_factory Flat, or a smaller --num_evidence"
            )
        fetched = min(depth + spare, most)
        queries = self._queries(examples)
        batches = [queries[i : i + _QUERY_BATCH] for i in range(0, len(queries), _QUERY_BATCH)]
        answers = [ask(index, batch, fetched) for batch in batches]
        rows = np.concatenate([answer.rows for answer in answers])
        scores = np.concatenate([answer.scores for answer in answers])
        return self.reranker.rerank(examples, Candidates(rows, scores)).top(depth)

    @cached_property
    def _index(self) -> Any:
        """Find the FAISS index of all states, or build it."""
        bank = self.reranker.bank
        fields = {**self.reranker.fingerprint, "factory": self.factory, "metric": "ip"}
        name = bank.folder.name.rpartition("-")[0]
        root = self.reranker.context.artifacts / "indexes"
        folder = artifact_dir(root, f"{name}-states", fields)
        plan = IndexPlan(factory=self.factory)  # the reranker itself scores what is found
        source = VectorSource(self.num_rows, self._num_columns, self._states, self._in_order)
        built = build_once(
            folder,
            stage=STAGE,
            fingerprint=fields,
            build=lambda aside: build_faiss(source, plan, aside / INDEX_FILE),
        )
        logger.info("exhaustive: index %s, recall %s", folder, built.manifest.counts["recall"])
        return load_faiss(folder, self._device)

    def _queries(self, examples: Sequence[Example]) -> Vectors:
        """Return queries so that their inner products with what is indexed are the scores."""
        bank = self.reranker.query_bank
        keys = np.array([query_key(example) for example in examples], np.int64)
        states, norms = bank.states(keys), bank.norms(keys)
        return self.reranker.fitting.similarity.of_queries(states, norms, keys)

    def _states(self, rows: Rows) -> Vectors:
        bank = self.reranker.bank
        return self.reranker.fitting.similarity.of_passages(bank.states(rows), bank.norms(rows))

    def _in_order(self) -> Iterator[Vectors]:
        """Return all states by row: an index must not depend on how the bank was filled."""
        for start in range(0, self.num_rows, self._block_rows):
            yield self._states(np.arange(start, min(start + self._block_rows, self.num_rows)))

    def _blocks(self) -> Iterator[tuple[Rows, Vectors]]:
        """Return all states as they lie on disk."""
        for block in self.reranker.bank.blocks(rows=self._block_rows):
            yield (
                block.keys,
                self.reranker.fitting.similarity.of_passages(block.states, block.norms),
            )

    @property
    def _block_rows(self) -> int:
        return min(_BLOCK_ROWS, max(1, _BLOCK_BYTES // (4 * max(self._width, self._num_columns))))


def num_kept(num_evidence: int, num_passages: int) -> int:
    """Return how much evidence is kept on disk: the next multiple of 150, at most the corpus.

    So all settings of d up to the paper's k share one product.
    """
    return min(math.ceil(num_evidence / _EVIDENCE_STEP) * _EVIDENCE_STEP, num_passages)
