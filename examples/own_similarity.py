r"""A similarity of your own in one file: cosine, but passages that are near every query lose.

    python own_similarity.py "a warm and funny film"
    PYTHONPATH=. pgra train --similarity own_similarity:Csls --task sst2 ...

CSLS (Conneau et al. 2018, arXiv 1710.04087): 2 cos(x, e) less e's mean cosine with its 10 nearest
training queries. The name `module:Class` is taken wherever a similarity is named: pgra search,
train, plan, a grid's YAML, `pgra.Reranker(similarity=...)`. Guide: docs/extend.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from pgra.arrays import Vectors, unit
from pgra.cli import dispatch, run
from pgra.rerank.similarity import Sample, Similarity

NEAREST = 10
DATA = "--task sst2 --dataset_name bundled:rotten-tomatoes --max_train_samples 200"
CORPUS = "--corpus bundled:wikipedia-19k --max_passages 100"
STAGES = "--retriever bm25 --num_candidates 20 --lm bundled:smollm2-135m"


@dataclass(frozen=True, kw_only=True)
class Csls(Similarity):
    """Scores are inner products of what `of_passages` and `of_queries` return."""

    queries: Vectors  # all fields are arrays: they are what is kept of a fit

    is_fitted = True

    @classmethod
    def fit(cls, sample: Sample) -> Self:
        """Keep the training queries' states, of length 1."""
        return cls(queries=unit(sample.queries))

    def of_passages(self, states: Vectors) -> Vectors:
        """Return 2 e / |e|, and less how near e is to queries."""
        values = unit(states)
        # In float32 the last digits would depend on how many passages there are.
        cosines = np.sort(values.astype(np.float64) @ self.queries.T.astype(np.float64), axis=1)
        hub = cosines[:, -NEAREST:].mean(axis=1, keepdims=True)
        return np.concatenate([2 * values, -hub.astype(np.float32)], axis=1)

    def of_queries(self, states: Vectors, keys: Any) -> Vectors:  # noqa: ARG002
        """Return x / |x|, and 1."""
        return np.concatenate([unit(states), np.ones((len(states), 1), np.float32)], axis=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Show the best of the first stage and of this similarity side by side."""
    query, *more = argv or ["a warm and funny film"]
    words = [query, *f"{DATA} {CORPUS} {STAGES}".split(), *more]
    return dispatch(["search", *words, "--similarity", "own_similarity:Csls"])


if __name__ == "__main__":
    raise SystemExit(run(main))
