"""First stage: which corpus passages come near a text. One class a retriever."""

from pgra.retrieval.base import (
    RETRIEVERS,
    BuiltIndex,
    IndexRequest,
    Retriever,
    find_retriever,
    open_retriever,
)

__all__ = [
    "RETRIEVERS",
    "BuiltIndex",
    "IndexRequest",
    "Retriever",
    "find_retriever",
    "open_retriever",
]
