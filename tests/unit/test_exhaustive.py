"""The search without a first stage, against a sort of all products written down plainly."""

import numpy as np
import pytest
import torch
from small_reranking import over_corpus

from ablations.exhaustive import ExhaustiveSearch
from pgra.data.corpus import CorpusArguments, open_corpus
from pgra.rerank.bank import query_key
from pgra.types import Example

pytestmark = pytest.mark.slow

QUERIES = [Example(f"test-{i}", {"text": f"Film number {i}."}) for i in range(9)]
NUM_ROWS, WIDTH = 400, 32


def put(bank, keys, states, shard_rows=64):
    """Write chosen states into a bank, as if an LM had given them."""
    of = dict(zip(keys.tolist(), torch.from_numpy(states), strict=True))
    bank.compute_missing(
        keys,
        lambda part: part,
        lambda part, advance: lambda: torch.stack([of[key] for key in part.tolist()]),
        shard_rows=shard_rows,
    )


def search_of(lm_dirs, tmp_path, passages, queries):
    """Search chosen states: passages' (P, H) and queries' (B, H)."""
    path = tmp_path / "passages.txt"
    path.write_text("".join(f"Text {i}.\n" for i in range(len(passages))))
    corpus = open_corpus(CorpusArguments(corpus=str(path)), tmp_path / "artifacts")
    how = {"shots": 2, "similarity": "dot", "bank_shard_rows": 64}
    search = ExhaustiveSearch(over_corpus(lm_dirs["gpt2"], corpus, tmp_path, **how))
    middle = np.arange(100, 164)  # there already, so that rows do not lie in order
    put(search.reranker.bank, middle, passages[middle])
    put(search.reranker.bank, np.arange(len(passages)), passages)
    keys = np.array([query_key(query) for query in QUERIES[: len(queries)]])
    put(search.reranker.query_bank, keys, queries)
    return search


# Small whole numbers: products are exact, and many are equal.
TIES = np.random.default_rng(2).integers(-1, 2, (NUM_ROWS, WIDTH)).astype(np.float32)


@pytest.mark.parametrize("depth", [1, 150, NUM_ROWS])
def test_ties_are_by_row_also_at_the_cut(lm_dirs, tmp_path, monkeypatch, depth):
    monkeypatch.setattr("ablations.exhaustive._SPARE", 1)
    monkeypatch.setattr("ablations.exhaustive._BLOCK_BYTES", 37 * 4 * WIDTH)  # many blocks
    queries = TIES[:9] * np.eye(WIDTH, dtype=np.float32)[:3].sum(0)  # products from -3 to 3
    search = search_of(lm_dirs, tmp_path, TIES, queries)
    found = search.retrieve_examples(QUERIES, depth)
    expected = np.argsort(-(queries @ TIES.T), axis=1, kind="stable")[:, :depth]
    np.testing.assert_array_equal(found.rows, expected)
