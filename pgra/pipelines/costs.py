"""The numbers of a plan: what the second stage has to read, what that costs, what it takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from pgra.models.calibration import Speed
from pgra.models.causal_lm import CausalLM
from pgra.models.loading import dtype_name
from pgra.retrieval.survey import FirstStage

WHOLE = "whole corpus"
"""A basis beside those of `pgra.retrieval.survey`: all passages are read."""
PAIRS, MOST_PAIRS = "every pair", "at most every pair"
"""Two more: each query has a prefix of its own, and its candidates are read under it."""


@dataclass(frozen=True)
class Texts:
    """What the LM has to read.

    Attributes:
        queries: By split.
        num_candidates: k; with the whole corpus, its size.
        pairs: Queries times k: what reading every pair would mean.
        distinct_queries: Different ones; each is read once.
        distinct_passages: Different passages among the candidates, or expected; with a prefix a
            query a passage counts once with each query.
        most_passages: No more than this, whatever is found.
        basis: How that was found; "stored", "searched", "whole corpus" and "every pair"
            are exact.
        banked: Of both, how many the bank has.
        to_read: Of both, how many the LM has yet to read.
    """

    queries: Mapping[str, int]
    num_candidates: int
    pairs: int
    distinct_queries: int
    distinct_passages: int
    most_passages: int
    basis: str
    banked: int
    to_read: int

    @property
    def is_exact(self) -> bool:
        """Say whether the numbers are counts, not estimates."""
        return self.basis in ("stored", "searched", WHOLE, PAIRS)


@dataclass(frozen=True)
class Reading:
    """Tokens and operations of reading it.

    Attributes:
        prefix: Tokens that all prompts share; with a prefix a query those of one, on average.
        own_mean: Own tokens of a text, on average.
        sampled: Texts tokenised to find that.
        cut: Share of them that are cut to fit the LM's window.
        tokens: With the prefix run once, or as often as the arguments say.
        tokens_whole: With the prefix run for every text.
        flops: As `tokens`.
        flops_whole: As `tokens_whole`.
        num_prefixes: How many prefixes there are to read: one, several that scores are averaged
            over, or one a query.
    """

    prefix: int
    own_mean: float
    sampled: int
    cut: float
    tokens: int
    tokens_whole: int
    flops: float
    flops_whole: float
    num_prefixes: int = 1

    @property
    def is_shared(self) -> bool:
        """Say whether running the prefix once saves anything; with `--prefix_sharing none` not."""
        return self.tokens < self.tokens_whole


@dataclass(frozen=True)
class Sizes:
    """Bytes.

    Attributes:
        bank: On disk, that the bank grows by.
        index: On disk: the first stage's, vectors and FAISS file; estimated if it is not built.
        weights: On the device.
        prefix: On the device: keys and values of the shared tokens.
        batch: On the device: one batch, estimated.
    """

    bank: int
    index: int
    weights: int
    prefix: int
    batch: int

    @property
    def device(self) -> int:
        """Give all that lies on the device."""
        return self.weights + self.prefix + self.batch


@dataclass(frozen=True)
class Plan:
    """A task's second stage, foreseen.

    Attributes:
        task: Its name.
        lm: As the user wrote it.
        device: Where the LM runs, and in which dtype.
        first: The first stage.
        texts: What is to be read.
        reading: What that costs.
        sizes: What it takes on disk and device.
        shards: Units of work that processes share.
        speed: What was measured; None without calibration.
    """

    task: str
    lm: str
    device: str
    first: FirstStage | None
    texts: Texts
    reading: Reading
    sizes: Sizes
    shards: int
    speed: Speed | None

    @property
    def has_own_prefixes(self) -> bool:
        """Say whether each query has a prefix of its own."""
        return self.texts.basis in (PAIRS, MOST_PAIRS)

    def seconds(self, processes: int = 1) -> float | None:
        """Predict how long the LM will read, on so many devices like this one.

        Returns:
            None without calibration; 0 if nothing is left to read.
        """
        if not self.texts.to_read:
            return 0.0
        if self.speed is None:
            return None
        share = -(-self.shards // processes) / self.shards  # of the process with the most shards
        return self.speed.load_seconds + share * self.reading.tokens / self.speed.tokens_per_second


def add_plans(plans: Sequence[Plan]) -> Plan:
    """Give the plan of several prefixes of one LM: texts and queries are counted once.

    Args:
        plans: One a prefix, of one task and first stage.
    """
    first, readings = plans[0], [plan.reading for plan in plans]
    most = max(plans, key=lambda plan: plan.texts.to_read)
    reading = replace(
        most.reading,
        tokens=sum(reading.tokens for reading in readings),
        tokens_whole=sum(reading.tokens_whole for reading in readings),
        flops=sum(reading.flops for reading in readings),
        flops_whole=sum(reading.flops_whole for reading in readings),
        num_prefixes=len(plans),
    )
    texts = replace(
        first.texts,
        banked=sum(plan.texts.banked for plan in plans),
        to_read=sum(plan.texts.to_read for plan in plans),
    )
    return replace(
        first,
        texts=texts,
        reading=reading,
        sizes=replace(first.sizes, bank=sum(plan.sizes.bank for plan in plans)),
        shards=sum(plan.shards for plan in plans),
        speed=next((plan.speed for plan in plans if plan.speed is not None), None),
    )


def describe_device(lm: CausalLM) -> str:
    """Name where an LM runs, and in which dtype."""
    name, dtype = lm.device.type, dtype_name(lm.dtype)
    if name == "cuda":
        return f"{torch.cuda.get_device_name(lm.device)}, {dtype}"
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}, {dtype}"


def index_bytes(first: FirstStage, num_rows: int) -> int:
    """Give the bytes of a first stage's index; of one that is not built, about."""
    if first.index_bytes or not first.width:
        return first.index_bytes
    return num_rows * first.width * (2 + 4)  # float16 shards, and FAISS' float32
