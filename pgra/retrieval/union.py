"""Candidates of several first stages: by words and by meaning, `--retriever bm25+dense`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Self

import numpy as np

from pgra.retrieval import base
from pgra.types import MISSING_ROW, Candidates

MIN_DEPTH = 100


class UnionRetriever(base.Retriever):
    """First stages whose names are joined by +, each asked for max(k, 100) candidates.

    `index_dir` and `output_dir` are the last one's.
    """

    def __init__(self, stages: Mapping[str, base.Retriever], num_passages: int) -> None:
        self._stages = list(stages.values())
        self._num_passages = num_passages
        self.fingerprint = {name: stage.fingerprint for name, stage in stages.items()}
        self.fingerprint |= {"fusion": "z-scores", "min_depth": MIN_DEPTH}
        self.inputs = list(chain.from_iterable(stage.inputs for stage in self._stages))
        self.built = list(chain.from_iterable(stage.built for stage in self._stages))

    @classmethod
    def open(cls, request: base.IndexRequest) -> Self:
        stages = {}
        for name in reversed(request.args.retriever.split("+")):
            args = replace(request.args, retriever=name)
            stages[name] = base.find_retriever(name).open(replace(request, args=args))
            request = replace(request, args=replace(args, index_dir=None), output_dir=None)
        return cls(stages, len(request.corpus))

    def retrieve(self, queries: Sequence[str], k: int) -> Candidates:
        """Return each query's best k passages; scores are those of `fuse`."""
        depth = min(max(k, MIN_DEPTH), self._num_passages)
        return fuse([stage.retrieve(queries, depth) for stage in self._stages], k)


def fuse(rankings: Sequence[Candidates], k: int) -> Candidates:
    """Fuse rankings of the same queries by their standardized scores: (B, k).

    A passage's score is the sum over the rankings, of which one that lacks it counts its own last
    score. A ranking without any candidate of a query adds nothing. Ties go by row.
    """
    scores = [ranking.standardized() for ranking in rankings]
    best = Candidates.missing(len(rankings[0]), k)
    for line in range(len(best)):
        rows = np.unique(np.concatenate([ranking.rows[line] for ranking in rankings]))
        rows = rows[rows != MISSING_ROW]
        totals = np.zeros(len(rows))
        for ranking, values in zip(rankings, scores, strict=True):
            is_there = ranking.rows[line] != MISSING_ROW
            of_row = dict(zip(ranking.rows[line, is_there], values[line, is_there], strict=True))
            last = min(of_row.values(), default=0.0)
            totals += [of_row.get(row, last) for row in rows]
        best.fill(line, rows, totals)
    return best
