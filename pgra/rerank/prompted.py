"""The prompted reranker: an LM reads query and candidates under one prompt, states are compared.

Guo et al. 2023, section 2.2: states by eq. 2, similarity by eq. 3. The softmax of eq. 3 does not
change the order, so scores are the plain products.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash
from torch import Tensor

from pgra.data.corpus import Corpus
from pgra.io import artifact_dir, canonical_json
from pgra.models.prefix import PromptedEncoder
from pgra.processes import Processes
from pgra.rerank.bank import Advance, Bank
from pgra.rerank.base import Work
from pgra.types import MISSING_ROW, Candidates, Example, Json, Rows

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 28  # of gathered states, while scores are computed


class PromptedReranker:
    """Orders candidates by the likeness of their prompted states to the query's.

    Attributes:
        encoder: Gives the states.
        similarity: "dot" (the paper) or "cosine" (its code).
    """

    def __init__(
        self,
        encoder: PromptedEncoder,
        corpus: Corpus,
        artifacts: Path,
        *,
        similarity: str = "dot",
        shard_rows: int = 512,
        name: str = "bank",
    ) -> None:
        """Open the banks of an LM, a prompt and a corpus.

        Raises:
            ArtifactError: If a bank is damaged.
        """
        self.encoder, self.corpus, self.similarity = encoder, corpus, similarity
        self._shard_rows = shard_rows
        of_corpus = {**encoder.fingerprint, **corpus.fingerprint}
        self.bank = _open_bank(artifacts, name, of_corpus)
        self.query_bank = _open_bank(artifacts, f"{name}-queries", encoder.fingerprint)

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give all that the order of candidates depends on, besides the candidates."""
        return {**self.bank.fingerprint, "reranker": "prompted", "similarity": self.similarity}

    def prepare(
        self,
        examples: Sequence[Example],
        rows: Rows,
        *,
        processes: Processes = Processes(),  # noqa: B008 (frozen)
        progress: bool = False,
    ) -> Work:
        """Let the LM read the queries and candidates that it has not read yet.

        Args:
            examples: The queries, of all splits at once.
            rows: Their candidates, any shape; missing ones are passed over.
            processes: Who shares the work.
            progress: Whether to show a bar.
        """
        start, tokens, cut = time.perf_counter(), self.encoder.num_tokens, self.encoder.num_cut
        wanted = np.unique(rows[rows != MISSING_ROW])
        by_key = {query_key(example): example for example in examples}

        def read_passages(keys: Rows, advance: Advance) -> Tensor:
            return self.encoder.encode(self.corpus.texts(keys), advance=advance)

        def read_queries(keys: Rows, advance: Advance) -> Tensor:
            fields = [by_key[int(key)].fields for key in keys]
            return self.encoder.encode_fields(fields, advance=advance)

        todo = self.bank.missing(wanted)
        logger.info(
            "reranker: %d distinct passages among the candidates, %d for the LM to read",
            len(wanted),
            len(todo),
        )
        new = 0
        for bank, keys, read, title in (
            (self.query_bank, np.array(list(by_key), np.int64), read_queries, "LM reads queries"),
            (self.bank, wanted, read_passages, "LM reads candidates"),
        ):
            new += bank.fill(
                keys,
                read,
                shard_rows=self._shard_rows,
                processes=processes,
                progress=progress,
                title=title,
            )
        encoder = self.encoder
        return Work(
            len(wanted),
            new,
            encoder.num_tokens - tokens,
            encoder.num_cut - cut,
            time.perf_counter() - start,
        )

    def rerank(self, examples: Sequence[Example], candidates: Candidates) -> Candidates:
        """Order each query's candidates by eq. 3; `prepare` must have seen them.

        Args:
            examples: B queries.
            candidates: (B, K).

        Returns:
            The same rows (B, K) with the states' products (or cosines), best first, ties by row.

        Raises:
            KeyError: If a state is missing.
        """
        keys = np.array([query_key(example) for example in examples], np.int64)
        scores = np.full(candidates.rows.shape, -np.inf, dtype=np.float32)
        step = max(1, _BLOCK_BYTES // max(1, candidates.rows.shape[1] * self.bank.width * 4))
        for start in range(0, len(examples), step):
            block = slice(start, start + step)
            scores[block] = self._score(keys[block], candidates.rows[block])
        return Candidates.best(candidates.rows, scores, candidates.rows.shape[1])

    def _score(self, keys: Rows, rows: Rows) -> npt.NDArray[np.float32]:
        if (rows == MISSING_ROW).all():
            return np.full(rows.shape, -np.inf, dtype=np.float32)
        distinct, place = np.unique(rows, return_inverse=True)
        present = distinct != MISSING_ROW
        states = np.zeros((len(distinct), self.bank.width), dtype=np.float32)
        states[present] = self.bank.states(distinct[present])
        queries = self.query_bank.states(keys)
        scores = np.einsum("bkh,bh->bk", states[place.reshape(rows.shape)], queries, optimize=True)
        if self.similarity == "cosine":
            norms = np.ones(len(distinct), dtype=np.float32)
            norms[present] = self.bank.norms(distinct[present])
            scores /= norms[place.reshape(rows.shape)] * self.query_bank.norms(keys)[:, None]
        return np.asarray(scores, dtype=np.float32)


def query_key(example: Example) -> int:
    """Give the key of a query's state: a 64-bit hash of its fields."""
    text = canonical_json(dict(example.fields))
    unsigned = np.uint64(xxhash.xxh3_64_intdigest(text.encode()))
    return int(unsigned.astype(np.int64))


def _open_bank(artifacts: Path, name: str, fingerprint: Mapping[str, Json]) -> Bank:
    return Bank(artifact_dir(artifacts / "banks", name, fingerprint), fingerprint)
