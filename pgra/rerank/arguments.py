"""Arguments of rerankers, and what their defaults depend on. Light: no torch."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from pgra.config import Arguments, arg
from pgra.data.text import copy_key
from pgra.errors import ConfigError
from pgra.exemplars import DRAWN_EXEMPLARS
from pgra.lm.base import StateArguments
from pgra.types import Example, Fields

logger = logging.getLogger(__name__)

AUTO = "auto"
_HEAD_EXAMPLES = 8  # of each label
_WHITENED_QUERIES = 32  # which give a column's mean and spread


@dataclass(kw_only=True)
class DrawnArguments(StateArguments):
    """The frozen LM that gives states, and the examples that are drawn for its prompt."""

    num_exemplars: int = arg(
        8, "Labelled examples in the prompt's prefix (the paper's m).", least=0, is_common=True
    )
    exemplars: str = arg(
        "balanced",
        "How they are drawn: random, balanced, official (as PGRA's code) or fixed (the first).",
        choices=DRAWN_EXEMPLARS,
    )
    exemplar_seed: int = arg(0, "Seed of their choice and order; one draw serves all splits.")
    bank_shard_rows: int = arg(
        512,
        "Texts in one shard of states, which a stopped job does not repeat; 64 times on a GPU.",
        least=1,
        decides=False,
    )


@dataclass(kw_only=True)
class HeadArguments(DrawnArguments):
    """What else heads learn from."""

    head_encoder: str = arg(
        "auto",
        "Text encoder on whose vectors a head decides too, for topics and for languages that the "
        "LM does not know: hub id, folder or bundled:NAME; none; auto: MiniLM, if it is at hand.",
    )


@dataclass(kw_only=True)
class RerankArguments(DrawnArguments):
    """Second stage: which model orders the candidates, and how many become evidence."""

    GROUP = "Reranker"

    reranker: str = arg(
        "prompted",
        "prompted (the paper's), likelihood (for questions and facts), cross-encoder, causal, none "
        "(the first stage's best), or module:Class.",
        is_open=True,
        is_common=True,
    )
    num_evidence: int = arg(
        16, "Evidence kept a query (the paper's d); 0 is the plain reader.", least=0, is_common=True
    )
    similarity: str = arg(
        AUTO,
        "Of states: dot (the paper), cosine (its code), whitened (columns standardised), "
        "whitened_cosine, head (the chance of one label, by a logistic head on the training "
        "examples), calibrated (needs no data) or module:Class. auto: head where each label has 8 "
        "training examples beside the prompt's; else whitened_cosine; calibrated with under 32.",
        is_open=True,
        is_common=True,
    )
    topic_weight: float | None = arg(
        None,
        "Weight of the first stage's scores beside the second's, z-scores of a query; default: 1 "
        "where auto takes head, and for likelihood after dense.",
        least=0,
    )

    def chosen(self, data: "FitData") -> "RerankArguments":
        """Return the same with what `auto` stands for, given a task's training queries."""
        earlier = data.fingerprint or {}
        if self.similarity != AUTO or self.reranker != "prompted":
            return self
        if "similarity" in earlier:
            weight: Any = earlier.get("topic_weight", 0.0)
            return replace(self, similarity=str(earlier["similarity"]), topic_weight=weight)
        name = choose_similarity(data)
        weight = float(name == "head") if self.topic_weight is None else self.topic_weight
        logger.info("reranker: --similarity %s --topic_weight %g (auto)", name, weight)
        return replace(self, similarity=name, topic_weight=weight)


@dataclass(kw_only=True)
class PairArguments(Arguments):
    """Own arguments of a reranker of pairs, which `pgra.Reranker(by=...)` opens too.

    `FIELDS` maps that constructor's `lm` and `template` to a field here.
    """

    GROUP = "Reranker"
    FIELDS: ClassVar[Mapping[str, str]] = {}


@dataclass(kw_only=True)
class CrossEncoderArguments(PairArguments):
    """Which cross-encoder; the LM's dtype, batches, shards and --max_prompt_tokens are its too."""

    FIELDS: ClassVar = {"lm": "cross_encoder"}

    cross_encoder: str = arg(
        "cross-encoder/ms-marco-MiniLM-L6-v2",
        "Classifier that reads pairs of query and passage: hub id, folder or bundled:NAME.",
        is_common=True,
    )


@dataclass(kw_only=True)
class LikelihoodArguments(PairArguments):
    """How query and passage stand together; --lm and its arguments say which LM reads them."""

    FIELDS: ClassVar = {"template": "likelihood_template"}

    likelihood_template: str = arg(
        "Passage: {passage}\nQuestion: {query}",
        "Text whose {query}, at its end, the LM scores after the {passage}.",
    )

    def check(self) -> None:
        check_slots("likelihood_template", self.likelihood_template)
        if not self.likelihood_template.rstrip().endswith("{query}"):
            raise ConfigError(
                f"likelihood_template is {self.likelihood_template!r}: end it with {{query}}"
            )


@dataclass(kw_only=True)
class CausalRerankerArguments(PairArguments):
    """Which causal LM answers whether a passage is relevant, and how it is asked."""

    FIELDS: ClassVar = {"lm": "causal_reranker", "template": "causal_template"}

    causal_reranker: str = arg(
        "Qwen/Qwen3-Reranker-0.6B",
        "A causal LM: Qwen3-Reranker, mxbai-rerank-v2, bge-reranker-v2-gemma, or with a template.",
        is_common=True,
    )
    causal_template: str | None = arg(
        None, "The text it reads, with {query} and {passage}, for another model."
    )
    causal_words: list[str] | None = arg(
        None, "The words that it answers for and against (or for alone); default: yes no."
    )

    def check(self) -> None:
        if self.causal_template is not None:
            check_slots("causal_template", self.causal_template)


def check_slots(name: str, template: str) -> None:
    """Refuse a template in which {query} and {passage} do not stand once each."""
    if any(template.count(slot) != 1 for slot in ("{query}", "{passage}")):
        raise ConfigError(f"{name} is {template!r}: it needs {{query}} and {{passage}}, once each")


@dataclass(frozen=True)
class FitData:
    """A task's part in a reranker that is fitted to it.

    `queries` are the training queries without those in the prompt, `words` the word of each label.
    `fingerprint` is the reranker's in an earlier run, whose fit is used again without the queries;
    `folder` is that of the run's reader, where `BaseReranker.save` wrote it.
    """

    queries: Sequence[Example] = ()
    words: Mapping[str, str] = field(default_factory=dict)
    fingerprint: Fields | None = None
    folder: Path | None = None


def choose_similarity(data: FitData) -> str:
    """Return what works best (docs/worth.md) with a task's training queries."""
    texts = {(example.label, copy_key(example.text)) for example in data.queries}
    counts = Counter(label for label, _ in texts)
    if data.words and min(counts[label] for label in data.words) >= _HEAD_EXAMPLES:
        return "head"
    return "whitened_cosine" if len(data.queries) >= _WHITENED_QUERIES else "calibrated"
