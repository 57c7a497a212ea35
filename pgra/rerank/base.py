"""The second stage's contract: candidates in, the same candidates in another order out.

A reranker of your own (`--reranker module:Class`) derives from `BaseReranker` and writes
`fingerprint` and `rerank`; all else has defaults. `examples/add_reranker.py` is one.
"""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from pgra.arrays import Rows, Scores
from pgra.config import Arguments, Rule, arg
from pgra.context import ALONE, Context
from pgra.data.text import copy_key
from pgra.errors import ConfigError
from pgra.exemplars import DRAWN_EXEMPLARS, SELECTORS
from pgra.lm.base import StateArguments
from pgra.types import MISSING_ROW, Candidates, Example, Json

if TYPE_CHECKING:
    from pgra.data.corpus import Corpus
    from pgra.exemplars.selector import NearestExemplars
    from pgra.prompts import FewShotPrompt


logger = logging.getLogger(__name__)

AUTO = "auto"
_HEAD_EXAMPLES = 8  # of each label
_WHITENED_QUERIES = 32  # which give a column's mean and spread


@dataclass(kw_only=True)
class RerankArguments(StateArguments):
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
        "training examples beside the prompt's; else whitened_cosine; calibrated with under 32; "
        "cosine where each query has its own exemplars.",
        is_open=True,
        is_common=True,
    )
    topic_weight: float | None = arg(
        None,
        "Weight of the first stage's scores beside the second's; default: 1 where auto takes head.",
        least=0,
        below=math.inf,
    )
    num_exemplars: int = arg(
        8, "Labelled examples in the prompt's prefix (the paper's m).", least=0, is_common=True
    )
    exemplars: str = arg(
        "balanced",
        "random, balanced, official (as PGRA's code), fixed (the first); or for each query anew: "
        "knn (KATE: its nearest, by --neighbor_encoder) or module:Class.",
        choices=SELECTORS,
        is_open="selector",
    )
    exemplar_seed: int = arg(0, "Seed of their choice and order; one draw serves all splits.")
    bank_shard_rows: int = arg(
        512,
        "Texts in one shard of states, which a stopped job does not repeat; 64 times on a GPU.",
        least=1,
        decides=False,
    )

    def check(self) -> None:
        super().check()
        if not self.per_query:
            return
        Rule(least=1).check(f"num_exemplars with '{self.exemplars}'", self.num_exemplars)
        if self.similarity not in (AUTO, "cosine", "dot"):  # the others are fitted
            raise ConfigError(f"exemplars '{self.exemplars}' differ by query: use dot or cosine")

    @property
    def per_query(self) -> bool:
        """Whether each query has exemplars of its own, as from all classes from outside."""
        return self.exemplars not in DRAWN_EXEMPLARS

    def chosen(self, reference: "Reference") -> "RerankArguments":
        """Return the same with what `auto` stands for, given a task's training queries."""
        made = reference.made or {}
        if self.similarity != AUTO or self.reranker != "prompted":
            return replace(self, topic_weight=self.topic_weight or 0.0)
        if "similarity" in made:  # an earlier run's
            weight: Any = made.get("topic_weight", 0.0)
            return replace(self, similarity=str(made["similarity"]), topic_weight=weight)
        name = "cosine" if self.per_query else choose_similarity(reference)
        weight = float(name == "head") if self.topic_weight is None else self.topic_weight
        logger.info("reranker: --similarity %s --topic_weight %g (auto)", name, weight)
        return replace(self, similarity=name, topic_weight=weight)


@dataclass(kw_only=True)
class CrossEncoderArguments(Arguments):
    """Which cross-encoder; --lm_dtype, --lm_batch_tokens and --bank_shard_rows are its too."""

    GROUP = "Reranker"

    cross_encoder: str = arg(
        "cross-encoder/ms-marco-MiniLM-L6-v2",
        "Classifier that reads pairs of query and passage: hub id, folder or bundled:NAME.",
        is_common=True,
    )
    cross_encoder_tokens: int | None = arg(
        None, "Longest pair; default: the cross-encoder's window.", least=8
    )


@dataclass(kw_only=True)
class LikelihoodArguments(Arguments):
    """How query and passage stand together; --lm and its arguments say which LM reads them."""

    GROUP = "Reranker"

    likelihood_template: str = arg(
        "Passage: {passage}\nQuestion: {query}",
        "Text whose {query}, at its end, the LM scores after the {passage}.",
    )

    def check(self) -> None:
        check_places("likelihood_template", self.likelihood_template)
        if not self.likelihood_template.rstrip().endswith("{query}"):
            raise ConfigError(
                f"likelihood_template is {self.likelihood_template!r}: end it with {{query}}"
            )

    @property
    def parts(self) -> tuple[str, str]:
        """What stands before the passage, and between passage and query."""
        before, rest = self.likelihood_template.split("{passage}")
        return before, rest.rstrip().removesuffix("{query}").rstrip()


@dataclass(kw_only=True)
class CausalRerankerArguments(Arguments):
    """Which causal LM answers whether a passage is relevant, and how it is asked."""

    GROUP = "Reranker"

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
    causal_tokens: int | None = arg(
        None, "Longest text of query and passage; default: the LM's window.", least=8
    )

    def check(self) -> None:
        if self.causal_template is not None:
            check_places("causal_template", self.causal_template)


def check_places(name: str, template: str) -> None:
    """Refuse a template in which {query} and {passage} do not stand once each."""
    if any(template.count(place) != 1 for place in ("{query}", "{passage}")):
        raise ConfigError(f"{name} is {template!r}: it needs {{query}} and {{passage}}, once each")


@dataclass(frozen=True)
class Reference:
    """The task's part in a reranker that is fitted to it.

    `queries` are the training queries without those in the prompt, `words` the word of each label.
    `made` is the reranker's fingerprint in an earlier run, to be used again without the queries,
    `folder` that of the run's reader, which has what `BaseReranker.save` left.
    """

    queries: Sequence[Example] = ()
    words: Mapping[str, str] = field(default_factory=dict)
    made: Mapping[str, Json] | None = None
    folder: Path | None = None


def choose_similarity(reference: Reference) -> str:
    """Return what works best (docs/worth.md) with a task's training queries."""
    texts = {(example.label, copy_key(example.text)) for example in reference.queries}
    counts = Counter(label for label, _ in texts)
    if reference.words and min(counts[label] for label in reference.words) >= _HEAD_EXAMPLES:
        return "head"
    return "whitened_cosine" if len(reference.queries) >= _WHITENED_QUERIES else "calibrated"


@dataclass(frozen=True, kw_only=True)
class RerankRequest:
    """The second stage that is asked for.

    Attributes:
        args: With what `auto` stands for.
        options: The reranker's own arguments; None where it declares none.
        exemplars: Each query's own, with exemplars "knn"; the prompt has none then.
        reference: The task's part in a reranker that is fitted to it.
    """

    args: RerankArguments
    prompt: "FewShotPrompt"
    corpus: "Corpus"
    context: Context = ALONE
    options: Arguments | None = None
    exemplars: "NearestExemplars | None" = None
    reference: Reference = Reference()

    def __post_init__(self) -> None:
        object.__setattr__(self, "args", self.args.chosen(self.reference))


@dataclass(frozen=True)
class Work:
    """The cost of preparing a rerank.

    Attributes:
        num_new: Texts (or pairs) that the model read now, in all processes.
        num_cut: Texts cut to fit its window, in this process.
        seconds: Wall-clock time.
    """

    num_new: int = 0
    num_cut: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        """Describe it in a sentence; one text is one forward, whatever its batch."""
        how = f"in {self.seconds:.0f} s, {self.num_cut} texts cut" if self.num_new else "(reused)"
        return f"{self.num_new} LM forwards, one for each new text, {how}"


_ROUNDING = 1e-6  # of a line's largest score: less spread than this is float32's own


class BaseReranker(ABC):
    """Orders each query's candidates.

    `options_class` is the class of its own flags; an instance comes as `RerankRequest.options`.
    `reads_prompt` says whether it reads `RerankRequest.prompt`, whose exemplars no reader is then
    trained on; `reads_lm` whether the LM of `--lm` reads texts for it.
    """

    options_class: ClassVar[type[Arguments] | None] = None
    reads_prompt: ClassVar[bool] = True
    reads_lm: ClassVar[bool] = False
    corpus: "Corpus"

    def __init__(self, request: RerankRequest) -> None:  # noqa: B027 (some keep nothing)
        """Open what is quick to open; what can be refused is refused here, by a `PgraError`."""

    @classmethod
    def open(cls, request: RerankRequest) -> "BaseReranker":
        """Open the reranker, or another class that serves the request."""
        return cls(request)

    def over(self, request: RerankRequest) -> "BaseReranker":
        """Return a ready object, as `pgra.train(reranker=...)` takes it, for the corpus of a run.

        By default itself, with the run's `corpus`.
        """
        self.corpus = request.corpus
        return self

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that would open a ready object like this one by its name."""
        return {"reranker": f"{type(self).__module__}:{type(self).__qualname__}"}

    def shows(self, example: Example) -> bool:  # noqa: ARG002
        """Whether a ready object's prompt shows an example, which no reader is then trained on."""
        return False

    @property
    @abstractmethod
    def fingerprint(self) -> Mapping[str, Json]:
        """All that the order depends on, besides queries and candidates."""

    @abstractmethod
    def rerank(self, examples: Sequence[Example], candidates: Candidates) -> Candidates:
        """Return the same rows in a new order: (B, K), best first, ties by row."""

    def prepare(self, examples: Sequence[Example], rows: Rows) -> Work:  # noqa: ARG002
        """Do what is worth doing once for all splits, over all processes.

        `rows` are the candidates, (B, K); or fewer lines for more queries. Missing ones are -1.
        """
        return Work()

    @classmethod
    def models(cls, args: RerankArguments, options: Arguments | None = None) -> list[str]:  # noqa: ARG003
        """Name the models that it uses, as the user wrote them."""
        return []

    @classmethod
    def learns_labels(cls, args: RerankArguments) -> bool:  # noqa: ARG003
        """Whether it is fitted to the labels of training queries."""
        return False

    def count_missing(self, examples: Sequence[Example], rows: Rows) -> int | None:  # noqa: ARG002
        """Count the texts that `prepare` would read; None where that is not known."""
        return None

    def count_texts(self, examples: Sequence[Example], rows: Rows) -> int:  # noqa: ARG002
        """Count the texts (or pairs) that the model reads for these, whatever it has read."""
        return 0

    def save(self, folder: Path) -> None:  # noqa: B027 (most are fitted to nothing)
        """Write what it was fitted to into a reader's folder, which may go elsewhere."""

    def release(self) -> None:  # noqa: B027 (most hold nothing large)
        """Free models, which are loaded again when they are next needed."""

    def whole_prompt(self, query: Example) -> str:  # noqa: ARG002
        """Return the prompt that a query is read in; "" without prompts."""
        return ""


class FirstStageOrder(BaseReranker):
    """Keeps the first stage's order: FiD on its best hits, the paper's main baseline."""

    reads_prompt = False

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        return {"reranker": "none"}

    def rerank(self, examples: Sequence[Example], candidates: Candidates) -> Candidates:  # noqa: ARG002
        return candidates


class ScoringReranker(BaseReranker):
    """Orders candidates by a model's scores, for which it reads texts once and keeps banks.

    `counter` has the model's `num_cut`, `topic_weight` is of `add_topic`.
    """

    counter: Any
    topic_weight = 0.0

    def with_topic(self, fingerprint: Mapping[str, Json]) -> Mapping[str, Json]:
        """Return a fingerprint with the topic's weight, where there is one."""
        return {**fingerprint, **({"topic_weight": self.topic_weight} if self.topic_weight else {})}

    @abstractmethod
    def fill(self, examples: Sequence[Example], rows: Rows) -> int:
        """Let the model read what it has not read yet, and return how many texts that were."""

    @abstractmethod
    def score_rows(self, examples: Sequence[Example], rows: Rows) -> Scores:
        """Return candidates' scores (B, K), -inf where a row is missing.

        Raises:
            KeyError: If `prepare` has not seen a query or passage.
        """

    def prepare(self, examples: Sequence[Example], rows: Rows) -> Work:
        start = time.perf_counter()
        num_cut = self.counter.num_cut
        num_new = self.fill(examples, rows)
        return Work(num_new, self.counter.num_cut - num_cut, time.perf_counter() - start)

    def rerank(self, examples: Sequence[Example], candidates: Candidates) -> Candidates:
        """Order each query's candidates by their scores; `prepare` must have seen them."""
        scores = self.score_rows(examples, candidates.rows)
        if self.topic_weight:
            scores = add_topic(scores, candidates, self.topic_weight)
        return Candidates.best(candidates.rows, scores, candidates.rows.shape[1])


def add_topic(scores: Scores, first: Candidates, weight: float) -> Scores:
    """Add the first stage's scores, times a weight, to the second's, each query's standardized.

    The second stage may go by the label alone, and give all queries of a label the same evidence;
    the first goes by a query's topic. Scores are (B, K), -inf where a candidate is missing.
    """
    present = first.rows != MISSING_ROW
    topic = _standardized(first.scores, present)
    mixed = (_standardized(scores, present) + weight * topic).astype(np.float32)
    return np.where(present, mixed, np.float32(-np.inf))


def _standardized(scores: Scores, present: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Return each line less its mean, over its standard deviation; 0 where all are equal."""
    values = np.where(present, scores, 0).astype(np.float64)
    count = np.maximum(1, present.sum(axis=1, keepdims=True))
    off = np.where(present, values - values.sum(axis=1, keepdims=True) / count, 0)
    spread = np.sqrt((off**2).sum(axis=1, keepdims=True) / count)
    varies = spread > _ROUNDING * np.abs(values).max(axis=1, initial=0, keepdims=True)
    standard: npt.NDArray[np.float64] = off / np.where(varies, spread, 1) * varies
    return standard
