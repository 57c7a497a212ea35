"""Scores of candidates from their states (Guo et al. 2023, eq. 3), going once through the bank.

A passage that is a candidate of many queries is read once for all of them, and shards are read in
the order in which they lie on disk: no query fetches its own 150 states from 2,000 files.
"""

import numpy as np
import numpy.typing as npt

from pgra.rerank.bank import Bank
from pgra.rerank.similarity import Similarity
from pgra.rerank.storage import Floats
from pgra.types import MISSING_ROW, Rows

_QUERY_BYTES = 1 << 28  # of query states: the bank is gone through once for so many queries
_NUM_PAIRS = 1 << 22  # of query and candidate, likewise: each takes some 60 bytes on the way
_BLOCK_BYTES = 1 << 25  # of passage states at a time
_PAIR_BYTES = 1 << 19  # of states on either side of a product: the processor's cache holds both

Places = npt.NDArray[np.intp]


def score_candidates(
    bank: Bank, rows: Rows, *, query_bank: Bank, query_keys: Rows, similarity: Similarity
) -> Floats:
    """Give each candidate's score: the product of its state and the query's, both changed.

    Args:
        bank: Holds the candidates' states.
        rows: Candidates, (B, K), `MISSING_ROW` where missing.
        query_bank: Holds the queries' states.
        query_keys: Queries, (B,).
        similarity: Changes the states.

    Returns:
        (B, K) float32, -inf where a candidate is missing.

    Raises:
        KeyError: If a state is missing.
        ArtifactError: If states are not what was written.
    """
    scores = np.full(rows.shape, -np.inf, dtype=np.float32)
    by_bytes = _QUERY_BYTES // (4 * max(1, query_bank.width))
    step = max(1, min(by_bytes, _NUM_PAIRS // max(1, rows.shape[1])))
    for start in range(0, len(rows), step):
        some = slice(start, start + step)
        keys = query_keys[some]
        queries = similarity.of_queries(query_bank.states(keys), query_bank.norms(keys))
        scores[some] = _score(bank, rows[some], queries=queries, similarity=similarity)
    return scores


def _score(bank: Bank, rows: Rows, *, queries: Floats, similarity: Similarity) -> Floats:
    flat = rows.ravel()
    pairs = np.argsort(flat, kind="stable")  # places in `flat`, those of one passage together
    pairs = pairs[np.searchsorted(flat, MISSING_ROW, side="right", sorter=pairs) :]
    distinct, first, count = np.unique(flat[pairs], return_index=True, return_counts=True)
    scores = np.full(flat.shape, -np.inf, dtype=np.float32)
    for block in bank.blocks(distinct, rows=max(1, _BLOCK_BYTES // (4 * max(1, bank.width)))):
        at = np.searchsorted(distinct, block.keys)
        passage = np.repeat(np.arange(len(at)), count[at])
        place = pairs[_runs(first[at], count[at])]
        query = place // rows.shape[1]
        passages = similarity.of_passages(block.states, block.norms)
        scores[place] = _products(passages, passage, right=queries, right_rows=query)
    return scores.reshape(rows.shape)


def _runs(first: Places, count: Places) -> Places:
    """Give `count` numbers from each `first` on, end to end."""
    ends = np.cumsum(count)
    return np.arange(count.sum()) + np.repeat(first - ends + count, count)


def _products(left: Floats, left_rows: Places, *, right: Floats, right_rows: Places) -> Floats:
    """Give the inner products of pairs of rows, (n,), so few at a time that the cache holds them.

    A matrix product would compute all pairs, and of 500,000 passages a query has 150.
    """
    out = np.empty(len(left_rows), dtype=np.float32)
    step = max(1, _PAIR_BYTES // (4 * max(1, left.shape[1])))
    for start in range(0, len(out), step):
        part = slice(start, start + step)
        out[part] = np.vecdot(left[left_rows[part]], right[right_rows[part]])
    return out
