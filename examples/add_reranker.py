r"""A reranker of your own in one file: passages that share most words with the query come first.

    python add_reranker.py
    PYTHONPATH=. pgra search "a warm and funny film" --reranker add_reranker:SharedWords \
        --task sst2 --dataset_name bundled:rotten-tomatoes --corpus bundled:wikipedia-19k \
        --encoder bundled:minilm-l6 --num_candidates 50

The name `module:Class` is taken wherever a reranker is named: pgra search, train, a grid's
YAML, `pgra.train(reranker=...)`. Guide: docs/extend.md.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import pgra
from pgra.cli import dispatch, run


def words(text: str) -> set[str]:
    """Return the words of a text, of four letters or more."""
    return set(re.findall(r"[a-z]{4,}", text.lower()))


class SharedWords(pgra.BaseReranker):
    """Orders candidates by the words that they share with the query."""

    def __init__(self, request: pgra.RerankRequest) -> None:
        self.corpus = request.corpus

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """All that the order depends on: what is stored under another one is not used."""
        return {"reranker": "shared-words", **self.corpus.fingerprint}

    def rerank(
        self, examples: Sequence[pgra.Example], candidates: pgra.Candidates
    ) -> pgra.Candidates:
        """Score the candidates' rows (B, K), -1 where there is none, and sort them."""
        scores = np.full(candidates.rows.shape, -np.inf, np.float32)
        for line, example in enumerate(examples):
            present = candidates.rows[line] >= 0
            texts = self.corpus.texts(candidates.rows[line][present])
            scores[line][present] = [len(words(example.text) & words(text)) for text in texts]
        return pgra.Candidates.best(candidates.rows, scores, scores.shape[1])


def main(argv: Sequence[str] | None = None) -> int:
    """Show the order of a search by this reranker."""
    parser = argparse.ArgumentParser(description="A reranker of your own, at work.")
    parser.add_argument("query", nargs="?", default="the anarchist workers of Spain")
    parser.add_argument("--corpus", default="bundled:wikipedia-19k")
    parser.add_argument("--max_passages", default="300")
    args = parser.parse_args(argv)
    name = f"{SharedWords.__module__}:SharedWords".replace("__main__", "add_reranker")
    data = "--task sst2 --dataset_name bundled:rotten-tomatoes --encoder bundled:minilm-l6"
    words = [*data.split(), "--num_candidates", "20", "--max_passages", args.max_passages]
    return dispatch(["search", args.query, "--reranker", name, "--corpus", args.corpus, *words])


if __name__ == "__main__":
    raise SystemExit(run(main))
