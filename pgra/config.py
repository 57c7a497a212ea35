"""Argument dataclasses: flat, with Hugging Face's names where it has one.

Every default stands once, here; a YAML in `configs/` holds what differs (`pgra.arguments`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pgra.checks import argument as _arg
from pgra.checks import at_least as at_least
from pgra.checks import choose as choose
from pgra.checks import config_root as config_root
from pgra.checks import read_yaml as read_yaml
from pgra.errors import ConfigError
from pgra.rerank_arguments import DEVICE_MAPS as DEVICE_MAPS
from pgra.rerank_arguments import PAIR_SIMILARITIES as PAIR_SIMILARITIES
from pgra.rerank_arguments import QUANTIZATIONS as QUANTIZATIONS
from pgra.rerank_arguments import SIMILARITIES as SIMILARITIES
from pgra.rerank_arguments import RerankArguments as RerankArguments
from pgra.retriever_arguments import DTYPES as DTYPES
from pgra.retriever_arguments import RetrieverArguments as RetrieverArguments

PROFILES = ("official", "paper", "pgra")
READER_SYSTEMS = ("exhaustive", "fid", "pgra", "plain", "random")
SYSTEMS: Mapping[str, Mapping[str, Any]] = {
    "exhaustive": {"retriever": "exhaustive", "reranker": "prompted"},
    "fid": {"reranker": "none"},
    "icl": {"num_evidence": 0},
    "knn": {"num_evidence": 0},
    "lm-bff": {"num_evidence": 0, "reranker": "none"},
    "pgra": {},
    "plain": {"num_evidence": 0},
    "rag": {"retriever": "dense", "reranker": "none"},
    "random": {"retriever": "random", "reranker": "none"},
}
"""What each system decides, whatever the defaults are; with pgra the arguments decide."""


@dataclass(kw_only=True)
class RuntimeArguments:
    """Where products go and what computes them."""

    artifacts_dir: str = _arg(
        "artifacts", "Folder of indexes, candidates, banks and evidence, shared by all runs."
    )
    device: str = _arg("auto", "auto (a GPU if there is one), cpu, cuda, cuda:1, ...")
    system: str = _arg(
        "pgra",
        "What decides labels. Readers: pgra (as the arguments say), exhaustive (without a first "
        "stage), fid (the first stage's best), random (random passages), plain (no evidence), "
        "rag (each evidence alone, the query encoder trained too), lm-bff (few shots, with "
        "demonstrations). Without training: icl (the LM scores the label words), knn (nearest "
        "training examples).",
    )

    def __post_init__(self) -> None:
        """Refuse what is no system."""
        choose("system", self.system, sorted(SYSTEMS))


@dataclass(kw_only=True)
class DataArguments:
    """Which task, and where its examples come from."""

    task: str | None = _arg(None, "Name of a YAML in configs/tasks, or the path of one.")
    dataset_name: str | None = _arg(
        None,
        "Hub id, local folder with {train,validation,test}.jsonl, or bundled:NAME; "
        "default: the task's own.",
    )
    train_file: str | None = _arg(
        None,
        "jsonl, csv or tsv (tsv: no quoting) with the task's input fields and 'label'; over "
        "dataset_name.",
    )
    validation_file: str | None = _arg(
        None, "The same, to choose a checkpoint on; without one a part of train is held out."
    )
    test_file: str | None = _arg(None, "The same, to report on.")
    max_train_samples: int | None = _arg(
        None, "Keep this many training examples (drawn with split_seed)."
    )
    max_dev_samples: int | None = _arg(500, "At most this many examples to choose a checkpoint on.")
    max_test_samples: int | None = _arg(
        None, "Keep this many test examples (drawn with split_seed)."
    )
    dev_fraction: float = _arg(
        0.1,
        "Share of train held out when there is no validation file, the same share of each label.",
    )
    split_seed: int = _arg(0, "Seed of the held-out part and of every sub-sample.")

    def __post_init__(self) -> None:
        """Refuse contradictions."""
        for name in ("max_train_samples", "max_dev_samples", "max_test_samples"):
            at_least(name, getattr(self, name), 1)
        if not 0 < self.dev_fraction < 1:
            raise ConfigError(f"dev_fraction is {self.dev_fraction}: it must lie between 0 and 1")


@dataclass(kw_only=True)
class CorpusArguments:
    """The sentences that are searched."""

    corpus: str | list[str] = field(  # of a factory: HfArgumentParser passes a list's default over
        default_factory=lambda: "princeton-nlp/datasets-for-simcse/wiki1m_for_simcse.txt",
        metadata={
            "help": "One passage a line (.txt) or a field a line (.jsonl), both also .gz or .zst; "
            "a column of a .parquet file; hub dataset/file; a hub data set (OWNER/SET:CONFIG:SPLIT,"
            " the last two where there are several); or bundled:NAME. Several are one corpus, in "
            "the order given."
        },
    )
    corpus_field: str = _arg("text", "Field that holds the passage, for all but .txt.")
    passage_words: int | None = _arg(
        None, "Cut each line, a document, into passages of so many words (DPR: 100)."
    )
    max_passages: int | None = _arg(None, "Keep the first so many passages.")
    drop_duplicates: bool = _arg(
        True, "Keep only the first of equal passages (their number is reported either way)."
    )
    strict: bool = _arg(
        False,
        "Refuse a corpus with blank, duplicate or non-UTF-8 lines, or passages longer than the "
        "encoder reads, rather than count them and go on.",
    )

    def __post_init__(self) -> None:
        """Refuse contradictions; several names of which there is one are that one."""
        if isinstance(self.corpus, list) and len(self.corpus) == 1:
            self.corpus = self.corpus[0]
        if not self.sources:
            raise ConfigError("corpus names no file: give one, or a bundled: name")
        at_least("max_passages", self.max_passages, 1)
        at_least("passage_words", self.passage_words, 1)

    @property
    def sources(self) -> list[str]:
        """Name the files that make up the corpus, in order."""
        return [self.corpus] if isinstance(self.corpus, str) else list(self.corpus)


@dataclass(kw_only=True)
class ReaderArguments:
    """The fused T5 that reads a query with its evidence."""

    model_name_or_path: str = _arg(
        "google-t5/t5-base", "Reader, any T5: hub id, folder or bundled:NAME."
    )
    reader_template: str | None = _arg(
        None,
        "How the reader sees a query; default: the task's. Holds the task's fields, and "
        "<extra_id_0> where the word goes.",
    )
    segment_order: str = _arg("query_first", "query_first, or evidence_first (the paper's code).")
    max_segment_tokens: int = _arg(
        128, "Tokens of one segment; evidence is cut first, the query's slot never."
    )
    decode: str = _arg(
        "verbalizer", "verbalizer (score every label's words), or official (one generated token)."
    )
    length_normalize: bool = _arg(
        False, "Divide a label's log-probability by its tokens (for a reader not trained on them)."
    )
    lora_rank: int | None = _arg(
        None,
        "Train low-rank adapters of this rank, not the weights: for readers too large to train. "
        "Needs pip install 'pgra[lora]'. The finished reader is a plain T5 all the same.",
    )
    lora_alpha: int | None = _arg(None, "Scale of the adapters, over the rank; default: peft's.")
    lora_dropout: float | None = _arg(None, "Dropout before the adapters; default: peft's.")
    lora_target_modules: list[str] | None = field(
        default=None,
        metadata={
            "help": "Layers that get one, by the end of their names; default: peft's, q and v."
        },
    )
    dropout_rate: float | None = _arg(
        None, "Share of activations dropped in training, 0 for none; default: the model's own."
    )
    evidence_attention: bool = _arg(
        False,
        "Write to predictions.jsonl what share of the reader's cross-attention each evidence gets "
        "(predicting then takes about 15 %% longer).",
    )

    def __post_init__(self) -> None:
        """Refuse contradictions."""
        choose("segment order", self.segment_order, ("evidence_first", "query_first"))
        choose("decode", self.decode, ("official", "verbalizer"))
        at_least("max_segment_tokens", self.max_segment_tokens, 8)
        if self.dropout_rate is not None and not 0 <= self.dropout_rate < 1:
            raise ConfigError(f"dropout_rate is {self.dropout_rate}: it must lie in [0, 1)")
        self._check_lora()

    def _check_lora(self) -> None:
        at_least("lora_rank", self.lora_rank, 1)
        at_least("lora_alpha", self.lora_alpha, 1)
        if self.lora_dropout is not None and not 0 <= self.lora_dropout < 1:
            raise ConfigError(f"lora_dropout is {self.lora_dropout}: it must be from 0 to below 1")
        for name in ("lora_alpha", "lora_dropout", "lora_target_modules"):
            if self.lora_rank is None and getattr(self, name) is not None:
                raise ConfigError(f"{name} needs adapters: add --lora_rank 8, or leave it out")


Section = TypeVar("Section", RetrieverArguments, RerankArguments)


def check_depths(retriever: RetrieverArguments, rerank: RerankArguments) -> None:
    """Refuse d > k, a search by states that are not there, and an index that nobody reads.

    Raises:
        ConfigError: If more evidence is asked for than the first stage returns, or there is no
            first stage and something asks for one.
    """
    name = retriever.retriever
    if name == "exhaustive" and rerank.exemplars == "knn":
        raise ConfigError(
            "exhaustive search compares states of one prompt, and with exemplars 'knn' each query "
            "has its own: use another --retriever (or --system pgra), or other --exemplars"
        )
    if name == "exhaustive" and rerank.num_prefixes > 1:
        raise ConfigError(
            f"exhaustive search compares states of one prompt, and num_prefixes is "
            f"{rerank.num_prefixes}: use another --retriever (or --system pgra), or one prefix"
        )
    if name in ("exhaustive", "random") and retriever.index_dir is not None:
        raise ConfigError(
            f"index_dir ({retriever.index_dir}) names a first stage's index, and retriever "
            f"'{name}' has none: leave it out, or use another --retriever"
        )
    if name == "exhaustive":
        if rerank.reranker == "none" and rerank.num_evidence:
            raise ConfigError(
                "retriever 'exhaustive' searches by the LM's states, and reranker 'none' has none: "
                "use --reranker prompted, or another --retriever"
            )
    elif rerank.num_evidence > retriever.num_candidates:
        raise ConfigError(
            f"num_evidence ({rerank.num_evidence}) exceeds num_candidates "
            f"({retriever.num_candidates}): the reranker can only keep what the retriever returned"
        )


def _settle(part: Section, system: str) -> Section:
    """Give a section as the system decides it."""
    decided = SYSTEMS[system].items()
    changes = {name: value for name, value in decided if getattr(part, name, value) != value}
    return replace(part, **changes) if changes else part


@dataclass(frozen=True, kw_only=True)
class PgraArguments:
    """Everything but the reader's training; what the system decides stands in its sections."""

    runtime: RuntimeArguments
    data: DataArguments
    corpus: CorpusArguments
    retriever: RetrieverArguments
    rerank: RerankArguments
    reader: ReaderArguments

    def __post_init__(self) -> None:
        """Let the system decide, and refuse contradictions between the stages."""
        object.__setattr__(self, "retriever", _settle(self.retriever, self.runtime.system))
        object.__setattr__(self, "rerank", _settle(self.rerank, self.runtime.system))
        check_depths(self.retriever, self.rerank)
        self._check_system()

    def _check_system(self) -> None:
        asked = self.runtime.system
        if asked in ("exhaustive", "fid", "rag", "random") and not self.rerank.num_evidence:
            raise ConfigError(
                f"system '{asked}' reads evidence, and num_evidence is 0: ask for at least 1, or "
                "use --system plain"
            )
        if asked == "icl" and self.rerank.num_prefixes > 1:
            raise ConfigError(
                f"num_prefixes is {self.rerank.num_prefixes}, and system 'icl' has one prompt: "
                "leave it out, and give other draws by --exemplar_seed"
            )
        if asked == "fid" and self.retriever.retriever == "random":
            raise ConfigError(
                "system 'fid' with retriever 'random' is a system of its own: use --system random, "
                "or another --retriever"
            )

    @property
    def artifacts(self) -> Path:
        """Give the root of all products."""
        return Path(self.runtime.artifacts_dir)

    @property
    def is_exhaustive(self) -> bool:
        """Say whether evidence is searched in the whole corpus, without a first stage."""
        return self.retriever.retriever == "exhaustive"

    @property
    def method(self) -> str:
        """Name the method as run folders do: a system, but t5 for plain, pgra-exhaustive."""
        if self.runtime.system not in READER_SYSTEMS:
            return self.runtime.system
        if self.rerank.num_evidence == 0:
            return "t5"
        if self.rerank.reranker == "none":
            return "random" if self.retriever.retriever == "random" else "fid"
        return "pgra-exhaustive" if self.is_exhaustive else "pgra"

    @property
    def system(self) -> str:
        """Name the system as --system does, also where only the other arguments tell it."""
        return {"t5": "plain", "pgra-exhaustive": "exhaustive"}.get(self.method, self.method)
