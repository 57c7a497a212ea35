"""First stage: which corpus passages come near a text. One class a retriever."""

from pathlib import Path
from typing import TYPE_CHECKING

from pgra.config import RetrieverArguments, choose
from pgra.core import ALONE, Context
from pgra.encoders.encoder import load_encoder
from pgra.errors import ConfigError
from pgra.retrieval.base import (
    BuiltIndex,
    IndexRequest,
    Retriever,
    check_num_candidates,
)
from pgra.retrieval.bm25 import BM25Retriever, bm25_folder
from pgra.retrieval.dense import DenseRetriever, dense_folder
from pgra.retrieval.hybrid import HybridRetriever
from pgra.retrieval.random import RandomRetriever

if TYPE_CHECKING:
    from pgra.data.corpus import Corpus

__all__ = [
    "RETRIEVERS",
    "BuiltIndex",
    "IndexRequest",
    "Retriever",
    "check_first_stage",
    "find_indexes",
    "open_retriever",
    "prepare_index",
]

RETRIEVERS: dict[str, type[Retriever]] = {
    "bm25": BM25Retriever,
    "dense": DenseRetriever,
    "hybrid": HybridRetriever,
    "random": RandomRetriever,
}


def open_retriever(
    args: RetrieverArguments,
    corpus: "Corpus",
    artifacts: Path,
    *,
    device: str = "auto",
    context: Context = ALONE,
    progress: bool = True,
) -> Retriever:
    """Open the first stage: find its finished index, or build it.

    Args:
        args: Which retriever; with `index_dir`, that index is used or refused, never built.
        corpus: What is searched.
        artifacts: Root of all products.
        device: What encodes and searches.
        context: Who shares the building.
        progress: Whether to show bars.

    Raises:
        ConfigError: If more candidates are asked for than there are passages, or the index's
            settings cannot work.
        ArtifactError: If the index was made from something else (the field and both values are
            named), is damaged, unfinished, or in use by another job.
        ModelError: If the encoder cannot be used.
    """
    check_first_stage(args.retriever)
    check_num_candidates(args.num_candidates, len(corpus))
    request = IndexRequest(
        args=args,
        corpus=corpus,
        artifacts=artifacts,
        device=device,
        context=context,
        progress=progress,
    )
    return RETRIEVERS[args.retriever].open(request)


def check_first_stage(name: str) -> None:
    """Refuse a retriever that has no index of its own to build or to search.

    Raises:
        ConfigError: If it is unknown, or the exhaustive search, which needs a task's prompt.
    """
    if name == "exhaustive":
        raise ConfigError(
            "retriever 'exhaustive' is no first stage: it searches the LM's states under a task's "
            "prompt. Use it with pgra rerank or train.py, or choose "
            f"{', '.join(sorted(RETRIEVERS))} here"
        )
    choose("retriever", name, sorted(RETRIEVERS))


def prepare_index(request: IndexRequest) -> list[BuiltIndex]:
    """Find or build the indexes of a retriever (two for hybrid) without loading them.

    Raises:
        PgraError: As `open_retriever`, but for the number of candidates.
    """
    check_first_stage(request.args.retriever)
    return RETRIEVERS[request.args.retriever].prepare(request)


def find_indexes(request: IndexRequest) -> list[Path]:
    """Give the folders where a retriever's indexes stand, or would; nothing is built.

    Raises:
        ConfigError: If the retriever has no index.
        ModelError: If the encoder cannot be used.
    """
    name = request.args.retriever
    check_first_stage(name)
    if name == "random":
        raise ConfigError("retriever 'random' draws passages by chance and has no index")
    folders = []
    if name in ("dense", "hybrid"):
        folders.append(dense_folder(request, load_encoder(request.args, request.device)))
    if name in ("bm25", "hybrid"):
        folders.append(bm25_folder(request))
    return folders
