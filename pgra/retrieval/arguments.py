"""Arguments of retrievers, and their table. Light: no torch, no FAISS."""

from dataclasses import dataclass

from pgra.config import Entry, arg
from pgra.encoders import PassageEncoderArguments

# For --retriever; `module:Class` and entry points in `pgra.retrievers` are taken too.
RETRIEVERS = {
    "bm25": Entry("pgra.retrieval.bm25:BM25Retriever"),
    "bm25+dense": Entry("pgra.retrieval.union:UnionRetriever"),
    "dense": Entry("pgra.retrieval.dense:Index"),
    "random": Entry("pgra.retrieval.base:RandomRetriever"),
    "run": Entry("pgra.retrieval.trec:RunRetriever", "pgra.retrieval.trec:RunFileArguments"),
}


@dataclass(kw_only=True)
class RetrieverArguments(PassageEncoderArguments):
    """First stage: k candidates a query."""

    GROUP = "Retriever"

    retriever: str = arg(
        "dense",
        "First stage: dense, bm25, bm25+dense (both, z-scores added), random (a control), "
        "run:FILE (of TREC), or module:Class.",
        choices=sorted(RETRIEVERS),
        is_open=True,
        is_common=True,
    )
    num_candidates: int = arg(150, "Candidates a query (the paper's k).", least=1, is_common=True)
    index_factory: str = arg("Flat", "FAISS factory string, such as Flat (exact) or IVF4096,Flat.")
    index_dir: str | None = arg(
        None, "A built index to use; default: found or built under artifacts_dir.", decides=False
    )
    shard_rows: int = arg(
        8192,
        "Passages in one shard, the unit that a stopped job does not repeat.",
        least=1,
        decides=False,
    )
    num_neighbors: int | None = arg(
        None,
        "Training examples that vote, with --method knn; default: as many as suit the dev set.",
        least=1,
    )
    neighbor_encoder: str = arg(
        "encoder",
        "What --method knn compares texts by: encoder, or reader (the paper's: its untrained T5).",
        choices=("encoder", "reader"),
    )
