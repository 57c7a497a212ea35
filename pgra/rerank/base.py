"""The second stage's contract: candidates in, the same candidates in another order out.

A reranker of your own (`--reranker module:Class`) derives from `BaseReranker` and writes
`fingerprint` and `rerank`; all else has defaults. `examples/add_reranker.py` is one.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import xxhash

from pgra.arrays import Rows, Scores
from pgra.artifacts import canonical_json
from pgra.config import Arguments
from pgra.context import ALONE, Context
from pgra.rerank.arguments import FitData
from pgra.rerank.arguments import RerankArguments as RerankArguments
from pgra.types import MISSING_ROW, Candidates, Example, Fields

if TYPE_CHECKING:
    from pgra.data.corpus import Corpus
    from pgra.prompts import FewShotPrompt


@dataclass(frozen=True, kw_only=True)
class ScorerRequest:
    """A model that scores texts, without a corpus.

    Attributes:
        args: With what `auto` stands for.
        context: The device, and where scores are stored.
        options: The reranker's own arguments; None where it declares none.
    """

    args: RerankArguments
    context: Context = ALONE
    options: Arguments | None = None


@dataclass(frozen=True, kw_only=True)
class RerankRequest(ScorerRequest):
    """The second stage that a run needs.

    Attributes:
        fit_data: The task's part in a reranker that is fitted to it; also decides what `auto` in
            the arguments stands for.
    """

    prompt: "FewShotPrompt"
    corpus: "Corpus"
    fit_data: FitData = field(default_factory=FitData)

    def __post_init__(self) -> None:
        object.__setattr__(self, "args", self.args.chosen(self.fit_data))


@dataclass(frozen=True)
class RerankCost:
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
        detail = "(reused)"
        if self.num_new:
            detail = f"in {self.seconds:.0f} s, {self.num_cut} texts cut"
        return f"{self.num_new} LM forwards, one for each new text, {detail}"


class BaseReranker(ABC):
    """Orders each query's candidates.

    `options_class` is the class of its own flags; an instance comes as `RerankRequest.options`.
    `reads_prompt` says whether it reads `RerankRequest.prompt`, whose exemplars no reader is then
    trained on, and `reads_lm` whether its model is `--lm`. A run sets the `corpus` of an object
    that `pgra.train` is given.
    """

    options_class: ClassVar[type[Arguments] | None] = None
    reads_prompt: ClassVar[bool] = True
    reads_lm: ClassVar[bool] = False
    corpus: "Corpus"

    def __init__(self, request: RerankRequest) -> None:  # noqa: B027 (some keep nothing)
        """Open what is quick to open; what can be refused is refused here, by a `PgraError`."""

    @property
    @abstractmethod
    def fingerprint(self) -> Fields:
        """All that the order depends on, besides queries and candidates."""

    @abstractmethod
    def rerank(self, examples: Sequence[Example], candidates: Candidates) -> Candidates:
        """Return the same rows in a new order: (B, K), best first, ties by row."""

    def prepare(self, examples: Sequence[Example], rows: Rows) -> RerankCost:  # noqa: ARG002
        """Do what is worth doing once for all splits, over all processes.

        `rows` are the candidates, (B, K); or fewer lines for more queries. Missing ones are -1.
        """
        return RerankCost()

    @classmethod
    def models(cls, args: RerankArguments, options: Arguments | None) -> list[str]:  # noqa: ARG003
        """Name the models that it uses, as the user wrote them."""
        return [args.lm] if cls.reads_lm else []

    def count_missing(self, examples: Sequence[Example], rows: Rows) -> int | None:  # noqa: ARG002
        """Count the texts that `prepare` would read; None where that is unknown."""
        return None

    def save(self, folder: Path) -> None:  # noqa: B027 (most are fitted to nothing)
        """Write what it was fitted to into a reader's folder, which may go elsewhere."""

    def release(self) -> None:  # noqa: B027 (most hold nothing large)
        """Free models, which are loaded again when they are next needed."""

    def whole_prompt(self, query: Example) -> str:  # noqa: ARG002
        """Return the prompt that a query is read in; "" without prompts."""
        return ""


@dataclass(frozen=True)
class ReadyReranker:
    """A reranker made in Python, which a run opens on its own corpus.

    Attributes:
        arguments: The arguments that open a reranker like it by its name.
        open: Returns it for a request's corpus.
        prompt: Its prompt; None where it reads none.
        exemplar_keys: The `query_key`s of the prompt's exemplars, which no reader is trained on.
    """

    arguments: Mapping[str, Any]
    open: Callable[[RerankRequest], BaseReranker]
    prompt: "FewShotPrompt | None" = None
    exemplar_keys: Collection[int] = ()


class FirstStageOrder(BaseReranker):
    """Keeps the first stage's order: FiD on its best hits, the paper's main baseline."""

    reads_prompt = False

    @property
    def fingerprint(self) -> Fields:
        return {"reranker": "none"}

    def rerank(self, examples: Sequence[Example], candidates: Candidates) -> Candidates:  # noqa: ARG002
        return candidates


class ScoringReranker(BaseReranker):
    """Orders candidates by a model's scores, for which it reads texts once and keeps banks.

    `counter` has the model's `num_cut`, `topic_weight` is of `add_topic`, `made_from` all that the
    scores before it depend on.
    """

    counter: Any
    made_from: Fields
    topic_weight = 0.0

    @property
    def fingerprint(self) -> Fields:
        if not self.topic_weight:
            return self.made_from
        return {**self.made_from, "topic_weight": self.topic_weight}

    @abstractmethod
    def compute_missing(self, examples: Sequence[Example], rows: Rows) -> int:
        """Let the model read what it has not read yet, and return how many texts that were."""

    @abstractmethod
    def score_rows(self, examples: Sequence[Example], rows: Rows) -> Scores:
        """Return candidates' scores (B, K), -inf where a row is missing.

        Raises:
            KeyError: If `prepare` has not seen a query or passage.
        """

    def prepare(self, examples: Sequence[Example], rows: Rows) -> RerankCost:
        start = time.perf_counter()
        num_cut = self.counter.num_cut
        num_new = self.compute_missing(examples, rows)
        return RerankCost(num_new, self.counter.num_cut - num_cut, time.perf_counter() - start)

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
    mixed = Candidates(first.rows, scores).standardized() + weight * first.standardized()
    return np.where(first.rows != MISSING_ROW, mixed, -np.inf).astype(np.float32)


def query_key(example: Example) -> int:
    """Return the key of a query's state: a hash of its fields."""
    text = canonical_json(dict(example.fields))
    unsigned = np.uint64(xxhash.xxh3_64_intdigest(text.encode()))
    return int(unsigned.astype(np.int64))


def query_keys(examples: Sequence[Example]) -> Rows:
    """Return the keys of queries' states, (n,)."""
    return np.array([query_key(example) for example in examples], np.int64)
