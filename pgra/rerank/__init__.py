"""Second stage: candidates to evidence, in an order that a model decides. One class a reranker."""

from dataclasses import replace

from pgra.config import find_class
from pgra.errors import ConfigError
from pgra.rerank.base import BaseReranker as BaseReranker
from pgra.rerank.base import Reference as Reference
from pgra.rerank.base import RerankRequest as RerankRequest
from pgra.rerank.base import Work as Work

RERANKERS = {
    "causal": "pgra.rerank.causal:CausalReranker",
    "cross-encoder": "pgra.rerank.cross_encoder:CrossEncoderReranker",
    "likelihood": "pgra.rerank.likelihood:LikelihoodReranker",
    "none": "pgra.rerank.base:FirstStageOrder",
    "prompted": "pgra.rerank.reranker:Reranker",
}


def find_reranker(name: str) -> type[BaseReranker]:
    """Return the class of a reranker: of `RERANKERS`, of an entry point, or `module:Class`.

    Raises:
        ConfigError: If there is none of that name, or it is no `BaseReranker`.
    """
    cls = find_class("reranker", name, RERANKERS)
    if not (isinstance(cls, type) and issubclass(cls, BaseReranker)):
        raise ConfigError(f"reranker '{name}' is no subclass of pgra.rerank.BaseReranker")
    return cls


def open_reranker(request: RerankRequest) -> BaseReranker:
    """Open the second stage; options that are not given are the class's defaults."""
    cls = find_reranker(request.args.reranker)
    if request.options is None and cls.options_class is not None:
        request = replace(request, options=cls.options_class())
    return cls.open(request)
