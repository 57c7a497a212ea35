"""Arguments of the second stage; `pgra.config` gives them on."""

from dataclasses import dataclass

from pgra.checks import argument as _arg
from pgra.checks import at_least, choose
from pgra.errors import ConfigError
from pgra.retriever_arguments import DTYPES

SIMILARITIES = ("cosine", "dot", "label_words", "whitened", "whitened_cosine")
PAIR_SIMILARITIES = ("cosine", "dot")
"""Of two states alone: where each query has a prefix of its own there is no space to fit to."""
EXEMPLARS = ("balanced", "knn", "official", "random")
PREFIX_SHARINGS = ("auto", "cascade", "expanded", "none", "packed")
BANKS = ("full", "lazy")
BANK_DTYPES = ("auto", "float16", "int8")
QUANTIZATIONS = ("4bit", "8bit", "none")
DEVICE_MAPS = ("auto", "balanced", "none", "sequential")


@dataclass(kw_only=True)
class RerankArguments:
    """Second stage: which LM orders the candidates, and how many become evidence."""

    reranker: str = _arg(
        "prompted", "prompted (the paper's), or none: evidence is the first stage's best."
    )
    lm: str = _arg("facebook/opt-13b", "Causal LM: hub id, folder or bundled:NAME.")
    num_evidence: int = _arg(16, "Evidence kept a query (the paper's d); 0 is the plain reader.")
    similarity: str = _arg(
        "dot",
        "Of states: dot (the paper), cosine (its code), whitened (each column standardised) or "
        "whitened_cosine; or label_words (of the log-chances that the LM gives the label words, "
        "each standardised). The last three are fitted to up to 2,000 passages and training "
        "queries, which the LM then reads.",
    )
    num_exemplars: int = _arg(8, "Labelled examples in the prompt's prefix (the paper's m).")
    exemplars: str = _arg(
        "balanced",
        "How they are chosen: random, balanced, official (first in the file, capped a class), or "
        "knn (KATE: each query its own nearest ones, by --neighbor_encoder, nearest first; the LM "
        "then reads each query's candidates anew: see pgra plan).",
    )
    exemplar_seed: int = _arg(0, "Seed of their choice and order; one draw serves all splits.")
    num_prefixes: int = _arg(
        1,
        "Draws of exemplars (seeds exemplar_seed, exemplar_seed + 1, ...): the LM reads every text "
        "under each, and a candidate's score is the mean.",
    )
    lm_dtype: str = _arg(
        "auto", "auto (bfloat16 on a GPU, else float32), float32, bfloat16 or float16."
    )
    lm_quantization: str = _arg(
        "none",
        "none, 8bit (torchao: not for GPT-2, not in float16) or 4bit (bitsandbytes: NF4) weights; "
        "needs pip install 'pgra[int8]'. benchmarks/quantized.py measures what changes.",
    )
    lm_device_map: str = _arg(
        "none", "none (one device), or over all GPUs of one process: auto, balanced, sequential."
    )
    lm_batch_tokens: int = _arg(
        512, "Own tokens in one LM batch on a CPU; a GPU takes 16 times as many."
    )
    max_prompt_tokens: int | None = _arg(
        None, "Longest prompt; default: the LM's window. Longer texts are cut, never the tail."
    )
    prefix_sharing: str = _arg(
        "auto",
        "How the prefix is run once: auto, cascade, packed, expanded, or none (run it with every "
        "text). A way that is named is tried when the LM first reads; a full bank needs no way.",
    )
    bank_shard_rows: int = _arg(
        512,
        "Texts in one shard of states, the unit that a stopped job does not repeat; on a GPU 16 "
        "times as many.",
    )
    bank: str = _arg(
        "lazy", "lazy (the LM reads the candidates), or full (it reads the whole corpus, once)."
    )
    bank_dtype: str = _arg(
        "auto", "How passages' states are kept on disk: auto (as the LM gives them), float16, int8."
    )

    def __post_init__(self) -> None:
        """Refuse contradictions."""
        choose("reranker", self.reranker, ("none", "prompted"))
        choose("similarity", self.similarity, SIMILARITIES)
        choose("exemplars", self.exemplars, EXEMPLARS)
        choose("lm_dtype", self.lm_dtype, DTYPES)
        choose("lm_quantization", self.lm_quantization, QUANTIZATIONS)
        choose("lm_device_map", self.lm_device_map, DEVICE_MAPS)
        choose("bank", self.bank, BANKS)
        choose("bank_dtype", self.bank_dtype, BANK_DTYPES)
        choose("prefix_sharing", self.prefix_sharing, PREFIX_SHARINGS)
        at_least("num_evidence", self.num_evidence, 0)
        at_least("num_exemplars", self.num_exemplars, 0)
        at_least("num_prefixes", self.num_prefixes, 1)
        at_least("lm_batch_tokens", self.lm_batch_tokens, 1)
        at_least("bank_shard_rows", self.bank_shard_rows, 1)
        at_least("max_prompt_tokens", self.max_prompt_tokens, 8)
        if self.exemplars == "knn":
            self._check_nearest()

        if self.num_prefixes > 1 and (self.exemplars == "knn" or not self.num_exemplars):
            raise ConfigError(
                f"num_prefixes is {self.num_prefixes}: several draws need exemplars that are drawn "
                "for the task: ask for --num_exemplars of at least 1, and not --exemplars knn"
            )

    def _check_nearest(self) -> None:
        at_least("num_exemplars with exemplars 'knn'", self.num_exemplars, 1)
        if self.bank == "full":
            raise ConfigError(
                "bank 'full' reads the corpus once under one prompt, and with exemplars 'knn' each "
                "query has its own: use --bank lazy, or other --exemplars"
            )
        if self.similarity not in PAIR_SIMILARITIES:
            raise ConfigError(
                f"similarity '{self.similarity}' compares states of one prompt, and with exemplars "
                "'knn' each query has its own: use --similarity dot or cosine"
            )
