"""Arguments of the first stage; `pgra.config` gives them with the others."""

import math
from dataclasses import dataclass

from pgra.checks import argument as _arg
from pgra.checks import at_least, choose
from pgra.errors import ConfigError

DTYPES = ("auto", "bfloat16", "float16", "float32")
NEIGHBOR_ENCODERS = ("encoder", "reader")
POOLINGS = ("auto", "cls", "cls_before_pooler", "last", "max", "mean", "pooler")
LEAK_JACCARD = 0.9
"""Share of common words from which on a text is nearly the query's own; see `LeakGuard`."""
RETRIEVERS = ("bm25", "dense", "exhaustive", "hybrid", "random")


@dataclass(kw_only=True)
class RetrieverArguments:
    """First stage: k candidates a query."""

    retriever: str = _arg(
        "dense",
        "First stage: dense, bm25, hybrid (both, fused by reciprocal rank), random (by chance, a "
        "control), or exhaustive (none: the LM reads the whole corpus once, and evidence is the "
        "best of all of it).",
    )
    num_candidates: int = _arg(
        150, "Candidates a query (the paper's k); with exhaustive it is the whole corpus."
    )
    encoder: str = _arg("google-bert/bert-base-uncased", "Encoder: hub id, folder or bundled:NAME.")
    pooling: str = _arg(
        "auto",
        "auto (the model's own, else mean), cls, last, max, mean, pooler or cls_before_pooler. "
        "Under another than its own a sentence-transformers model has no Dense and Normalize.",
    )
    normalize: bool = _arg(True, "Unit vectors, so that the inner product is the cosine.")
    max_encoder_tokens: int | None = _arg(
        None,
        "Tokens of a passage or query that the encoder reads; default: what a "
        "sentence-transformers model says, else 128.",
    )
    query_prompt: str | None = _arg(
        None,
        "What the encoder reads before each query, such as 'query: ' for E5; default: what a "
        "sentence-transformers model says, else nothing.",
    )
    passage_prompt: str | None = _arg(None, "The same before each passage, such as 'passage: '.")
    encoder_dtype: str = _arg(
        "auto", "auto (bfloat16 on a GPU, else float32), float32, bfloat16 or float16."
    )
    encoder_batch_tokens: int = _arg(
        1024, "Padded tokens in one encoder batch on a CPU; a GPU takes 16 times as many."
    )
    index_factory: str = _arg(
        "Flat",
        "FAISS factory string, such as Flat, IVF4096,Flat or HNSW32, or auto: by the corpus's size "
        "and the memory; with exhaustive it is for the LM's states, and Flat compares them all.",
    )
    index_memory_gb: float | None = _arg(
        None,
        "Memory in GB that an index may take: a Flat one beyond it is searched from the disk, and "
        "auto chooses by it; default: half of the machine's.",
    )
    rescore_factor: int = _arg(
        4,
        "Hits taken from a lossy index (such as PQ or SQ8) for each candidate, and scored again by "
        "the exact vectors; 0: the index's own scores.",
    )
    index_dir: str | None = _arg(
        None, "A built index to use; default: found or built under artifacts_dir."
    )
    shard_rows: int = _arg(
        8192, "Passages in one shard, the unit that a stopped job does not repeat."
    )
    num_neighbors: int | None = _arg(
        None,
        "Training examples that vote, with --system knn; default: as many as suit the dev set.",
    )
    neighbor_encoder: str = _arg(
        "encoder",
        "What --system knn compares texts by: encoder (the first stage's), or reader (the paper's: "
        "the encoder of the T5, untrained, the mean of its states).",
    )

    def __post_init__(self) -> None:
        """Refuse contradictions."""
        choose("retriever", self.retriever, RETRIEVERS)
        choose("pooling", self.pooling, POOLINGS)
        choose("encoder_dtype", self.encoder_dtype, DTYPES)
        choose("neighbor_encoder", self.neighbor_encoder, NEIGHBOR_ENCODERS)
        at_least("num_neighbors", self.num_neighbors, 1)
        at_least("num_candidates", self.num_candidates, 1)
        at_least("max_encoder_tokens", self.max_encoder_tokens, 4)
        at_least("encoder_batch_tokens", self.encoder_batch_tokens, 1)
        at_least("shard_rows", self.shard_rows, 1)
        at_least("rescore_factor", self.rescore_factor, 0)
        memory = self.index_memory_gb
        if memory is not None and not 0 < memory < math.inf:
            raise ConfigError(f"index_memory_gb is {memory}: it must be above 0")
