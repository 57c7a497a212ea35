"""The names for classes of your own, each with its home; `extend.py` reads them from here."""

from pgra.config import Arguments, arg
from pgra.exemplars.selection import Selector
from pgra.lm.state_lm import StateLM
from pgra.methods.base import Method
from pgra.report.results import Decisions
from pgra.rerank.base import BaseReranker, RerankRequest
from pgra.rerank.pairs import PairReranker
from pgra.rerank.similarity import Sample, Similarity
from pgra.retrieval.base import IndexRequest, Retriever
from pgra.types import Candidates, Example, Prediction

__all__ = [
    "Arguments",
    "BaseReranker",
    "Candidates",
    "Decisions",
    "Example",
    "IndexRequest",
    "Method",
    "PairReranker",
    "Prediction",
    "RerankRequest",
    "Retriever",
    "Sample",
    "Selector",
    "Similarity",
    "StateLM",
    "arg",
]
