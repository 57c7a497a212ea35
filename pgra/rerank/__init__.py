"""Second stage: candidates to evidence, in an order that a model decides. One class a reranker."""

from dataclasses import replace

from pgra.config import Entry, find_class
from pgra.rerank.arguments import FitData as FitData
from pgra.rerank.base import BaseReranker as BaseReranker
from pgra.rerank.base import ReadyReranker as ReadyReranker
from pgra.rerank.base import RerankRequest as RerankRequest

# For --reranker; `module:Class` and entry points in `pgra.rerankers` are taken too. Those with
# arguments of their own are scorers of pairs, which `pgra.Reranker(by=...)` and `pgra serve` open.
RERANKERS = {
    "causal": Entry(
        "pgra.rerank.causal:CausalReranker", "pgra.rerank.arguments:CausalRerankerArguments"
    ),
    "cross-encoder": Entry(
        "pgra.rerank.cross_encoder:CrossEncoderReranker",
        "pgra.rerank.arguments:CrossEncoderArguments",
    ),
    "likelihood": Entry(
        "pgra.rerank.likelihood:LikelihoodReranker", "pgra.rerank.arguments:LikelihoodArguments"
    ),
    "none": Entry("pgra.rerank.base:FirstStageOrder"),
    "prompted": Entry("pgra.rerank.states:BankedReranker"),
}
PAIR_RERANKERS = [name for name, entry in RERANKERS.items() if entry.arguments]


def find_reranker(name: str) -> type[BaseReranker]:
    """Return the class of a reranker: of `RERANKERS`, of an entry point, or `module:Class`.

    Raises:
        ConfigError: If the name is unknown, or its class is not a `BaseReranker`.
    """
    cls: type[BaseReranker] = find_class("reranker", name, RERANKERS, BaseReranker)
    return cls


def open_reranker(request: RerankRequest) -> BaseReranker:
    """Open the second stage; options that are left out are the class's defaults."""
    cls = find_reranker(request.args.reranker)
    if request.options is None and cls.options_class is not None:
        request = replace(request, options=cls.options_class())
    return cls(request)
