"""Candidates of several first stages: by words and by meaning, `--retriever bm25+dense`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Self

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
    """Fuse rankings of the same queries by their scores: (B, k).

    A passage's score is the sum, over the rankings that hold it, of how far it stands above the
    ranking's last one, in standard deviations of the query's scores. Ties go by row.
    """
    best = Candidates.missing(len(rankings[0]), k)
    standard = [ranking.standardized() for ranking in rankings]
    for line in range(len(best)):
        totals: dict[int, float] = {}
        for ranking, scores in zip(rankings, standard, strict=True):
            above = scores[line] - scores[line].min(initial=0)
            for row, score in zip(ranking.rows[line].tolist(), above.tolist(), strict=True):
                totals[row] = totals.get(row, 0) + score
        totals.pop(MISSING_ROW, None)
        best.fill(line, [*totals], [*totals.values()])
    return best
