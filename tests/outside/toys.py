"""A package as somebody outside writes it: one class each of what pgra lets users add."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pgra.config import Arguments, arg
from pgra.core import MISSING_ROW, Candidates, Prediction
from pgra.exemplars.selection import Selector
from pgra.methods.base import Decisions, Method
from pgra.rerank.base import BaseReranker
from pgra.rerank.similarity import Similarity
from pgra.retrieval.base import Retriever


@dataclass(kw_only=True)
class StrideArguments(Arguments):
    """How far apart the stride's passages are."""

    stride: int = arg(1, "Every so many rows of the corpus.", least=1)


class Stride(Retriever):
    """Finds every n-th passage, from where a query's length says."""

    Arguments = StrideArguments

    def __init__(self, size, stride):
        self.size, self.stride = size, stride

    @classmethod
    def open(cls, request):
        return cls(len(request.corpus), request.options.stride)

    @property
    def fingerprint(self):
        return {"retriever": "stride", "rows": self.size, "stride": self.stride}

    def retrieve(self, queries, k):
        steps = self.stride * np.arange(k, dtype=np.int64)
        rows = np.stack([(len(query) + steps) % self.size for query in queries])
        scores = np.broadcast_to(-np.arange(k, dtype=np.float32), rows.shape)
        return Candidates(rows, np.ascontiguousarray(scores))


@dataclass(kw_only=True)
class LengthArguments(Arguments):
    """Which passages are best."""

    shortest: bool = arg(False, "Take the shortest passages, not the longest.")


class ByLength(BaseReranker):
    """Takes the longest passages, or the shortest."""

    Arguments = LengthArguments

    def __init__(self, corpus, sign):
        self.corpus, self.sign = corpus, sign

    @classmethod
    def open(cls, request):
        return cls(request.corpus, -1 if request.options.shortest else 1)

    @property
    def fingerprint(self):
        return {"reranker": "length", "sign": self.sign, **self.corpus.fingerprint}

    def rerank(self, examples, candidates):
        del examples
        scores = [
            [0 if row == MISSING_ROW else self.sign * len(self.corpus[row]) for row in line]
            for line in candidates.rows.tolist()
        ]
        scores = np.array(scores, dtype=np.float32)
        return Candidates.best(candidates.rows, scores, scores.shape[1])


class LastFirst(Selector):
    """Chooses the pool's last examples."""

    def rank(self, queries, depth):
        rows = self.pool.guard.distinct[::-1][:depth]
        rows = np.broadcast_to(rows, (len(queries), len(rows)))
        scores = np.broadcast_to(-np.arange(rows.shape[1], dtype=np.float32), rows.shape)
        return Candidates(np.ascontiguousarray(rows), np.ascontiguousarray(scores))


class Halves(Similarity):
    """Compares the first half of two states."""

    def change(self, states, stats):
        del stats
        return states[:, : states.shape[1] // 2]


def positives(labels, predictions, names):
    """A metric: how many of those decided positive are so."""
    del names
    found = [a == "positive" for a, b in zip(labels, predictions, strict=True) if b == "positive"]
    return sum(found) / max(1, len(found))


@dataclass(kw_only=True)
class OneLabelArguments(Arguments):
    """Which label."""

    one_label: str = arg("positive", "The label that all examples get.")


class OneLabel(Method):
    """Gives every example the same label."""

    SECTIONS: ClassVar = {"toy": OneLabelArguments}

    def decide(self, examples):
        label = self.args["toy"].one_label
        scores = {name: float(name == label) for name in self.data.labels}
        return Decisions([Prediction(example.id, label, scores) for example in examples])
