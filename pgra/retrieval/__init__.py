"""First stage: which corpus passages come near a text. One class a retriever."""

from pgra.retrieval.arguments import RETRIEVERS as RETRIEVERS
from pgra.retrieval.base import IndexRequest as IndexRequest
from pgra.retrieval.base import Retriever as Retriever
from pgra.retrieval.base import find_retriever as find_retriever
from pgra.retrieval.base import open_retriever as open_retriever
