"""What reading costs a model: operations and bytes from its configuration, seconds by a trial."""

import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch

from pgra.lm.load import ModelSource, batch_budget, dtype_name, lay_out
from pgra.lm.prefix import PromptedEncoder, Prompts

_BATCHES_A_PIECE = 6  # of `batch_tokens`, on a CPU: few enough to read several pieces
_PATIENCE = 6  # times the seconds given that a piece may seem to take
_SEED = 0

Trial = Callable[[float], "Speed"]
"""Reads for about so many seconds and says how fast that was."""


@dataclass(frozen=True)
class Speed:
    """What was measured.

    Attributes:
        texts: How many were read.
        tokens: Their own tokens, the shared prefix not counted.
        seconds: How long it took.
        load_seconds: How long the model took to be ready: weights, prefix, a first text.
    """

    texts: int
    tokens: int
    seconds: float
    load_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Own tokens a second."""
        return self.tokens / self.seconds


class Counter(Protocol):
    """A model that counts what it reads: tokens, and texts that were cut."""

    num_tokens: int
    num_cut: int


def time_reading(
    counter: Counter,
    shards: Iterator[tuple[Sequence[Any], Sequence[int]]],
    read: Callable[..., object],
    seconds: float,
    *,
    batch_tokens: int,
    is_cpu: bool,
) -> Speed:
    """Time a model on pieces of shards, the first of them once more: that is slow at first.

    A bank sorts each shard by length before it fills batches, so the pieces are runs of a sorted
    shard, taken in random order: each is batched as it would be among its neighbours. On a CPU a
    piece is a few batches, on a GPU, which runs behind the program, the whole shard; less where
    that would take far too long. Many texts at once are read faster than one alone, so only a gross
    excess tells.

    Args:
        counter: Counts the tokens that are read.
        shards: Texts, tokenised already, and their lengths; at least one shard must come, and more
            are asked for while time is left.
        read: Reads such texts; `advance` is told how many more are done, a batch at a time.
        seconds: How long; one piece at least is read.
        batch_tokens: Own tokens in one batch on a CPU.
        is_cpu: Whether it runs there. The last of several batches is then left out: it is mostly
            too small to be fast, and a piece has it far more often than a shard.
    """

    def timed(texts: Sequence[Any]) -> tuple[int, int, float]:
        before, start = counter.num_tokens, time.perf_counter()
        marks: list[tuple[int, int, float]] = [(0, before, start)]

        def advance(more: int) -> None:
            marks.append((marks[-1][0] + more, counter.num_tokens, time.perf_counter()))

        read(texts, advance=advance)
        count, tokens, end = len(texts), counter.num_tokens, time.perf_counter()
        if is_cpu and len(marks) > 2:
            count, tokens, end = marks[-2]
        return count, tokens - before, end - start

    def pieces() -> Iterator[list[Any]]:
        rng = random.Random(_SEED)
        for texts, lengths in itertools.chain([shard], shards):
            order = sorted(range(len(texts)), key=lambda i: (-lengths[i], i))
            total, done = sum(lengths), 0
            runs: list[list[Any]] = [[] for _ in range(math.ceil(total / min(most, total)))]
            for i in order:
                runs[done * len(runs) // total].append(texts[i])
                done += lengths[i]
            runs = [run for run in runs if run]
            yield from rng.sample(runs, len(runs))

    start = time.perf_counter()
    shard = next(shards)
    timed(shard[0][:1])  # loads, runs the prefix, and compares the ways
    load_seconds = time.perf_counter() - start
    _, tokens, spent = timed(shard[0][:1])
    most = _BATCHES_A_PIECE * batch_tokens if is_cpu else math.inf
    rate = tokens / spent
    if min(most, sum(shard[1])) > rate * _PATIENCE * seconds:
        most = max(1.0, rate * seconds)
    found = pieces()
    first = next(found)
    timed(first)
    parts = []
    start = time.perf_counter()
    for piece in itertools.chain(found, [first]):
        parts.append(timed(piece))
        if time.perf_counter() - start >= seconds:
            break
    texts, tokens, spent = (sum(part) for part in zip(*parts, strict=True))
    return Speed(int(texts), int(tokens), spent, load_seconds)


def measure_speed(
    encoder: PromptedEncoder, shards: Iterable[Sequence[str]], *, seconds: float
) -> Speed:
    """Time an LM under a prompt on texts; it is loaded now, if it was not.

    Args:
        encoder: The LM with its prompt.
        shards: Texts, a real shard's number at a time; at least one must come.
        seconds: How long.
    """

    def tokenized() -> Iterator[tuple[list[Any], list[int]]]:
        for texts in shards:
            fields = [encoder.prompt.template.passage_fields(text) for text in texts]
            ids = encoder.tokenize(fields).ids
            yield list(zip(fields, ids, strict=True)), own_lengths(encoder, ids)

    def read(texts: Sequence[Any], advance: Callable[[int], object]) -> None:
        fields, ids = zip(*texts, strict=True)
        encoder.encode_prompts(Prompts(fields, list(ids)), advance=advance)

    return time_reading(
        encoder,
        tokenized(),
        read,
        seconds,
        batch_tokens=encoder.batch_tokens,
        is_cpu=encoder.lm.device.type == "cpu",
    )


def own_lengths(encoder: PromptedEncoder, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Count the tokens of each prompt that the LM must read, with the prefix shared."""
    shared = [] if encoder.sharing == "none" else encoder.shared_ids
    skip = len(shared)
    return [len(ids) - (skip if list(ids[:skip]) == shared else 0) for ids in prompts]


# What reading costs a model, from its configuration alone: operations and bytes.
#
# A token that looks at c keys (its own among them) costs 2 N + 4 L W c operations: a
# multiplication and an addition for each of the N weights that stand in matrices, and the same
# for its query with each key and its weight with each value, in L layers whose heads are W wide
# together. That is the forward third of 6 N + 12 L H Q T in Chowdhery et al. 2022 ("PaLM",
# appendix B), after Kaplan et al. 2020, section 2.1. Embeddings are looked up, not multiplied,
# and do not count. A mixture of experts is counted as if all experts ran, and the last layer as
# if it served every token.


_BYTES_A_WEIGHT = {"8bit": 1.0, "4bit": 0.5625}  # nf4: a float32 scale for every 64 weights
_LIVE_WIDTHS = 4  # a token's residual, its normed copy, its query and its attended values
_LIVE_MIDDLES = 3  # an MLP's gate, its product and one copy


@dataclass(frozen=True)
class LmShape:
    """The sizes of an LM that decide its cost.

    Attributes:
        layers: L.
        hidden: Width of the residual stream.
        state: Width of a state; OPT-350m's is not its hidden one.
        attended: W, all heads' queries together.
        cached: Width of a token's keys, or values, in one layer.
        middle: Widest inner matrix: the MLP's, mostly.
        weights: All parameters of the base model.
        matrices: N, those that stand in matrices and are multiplied.
        is_causal: Whether a token looks at those before it only.
    """

    layers: int
    hidden: int
    state: int
    attended: int
    cached: int
    middle: int
    weights: int
    matrices: int
    is_causal: bool = True

    @classmethod
    def of(cls, config: Any, *, is_causal: bool = True) -> Self:
        """Read the sizes off a base model's configuration.

        Raises:
            ModelError: If no model can be laid out from it.
        """
        model = lay_out(config)
        tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
        inner = [p for p in model.parameters() if p.dim() > 1 and id(p) not in tables]
        hidden = int(config.hidden_size)
        heads = int(getattr(config, "num_attention_heads", None) or 0)  # none in a state-space LM
        head = int(getattr(config, "head_dim", None) or (hidden // heads if heads else 0))
        shared_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        return cls(
            layers=int(config.num_hidden_layers),
            hidden=hidden,
            state=int(getattr(config, "word_embed_proj_dim", None) or hidden),
            attended=heads * head,
            cached=shared_heads * head,
            middle=max((max(p.shape) for p in inner), default=0),
            weights=sum(p.numel() for p in model.parameters()),
            matrices=sum(p.numel() for p in inner),
            is_causal=is_causal,
        )

    def flops(self, lengths: Iterable[int], *, behind: int = 0) -> float:
        """Count the operations of reading texts.

        Args:
            lengths: Own tokens of each text.
            behind: Tokens before them that were read already; each text's tokens look at them.
        """
        tokens, looks = 0, 0
        for length in lengths:
            tokens += length
            own = length * (length + 1) // 2 if self.is_causal else length * length
            looks += length * behind + own
        return 2.0 * self.matrices * tokens + 4.0 * self.layers * self.attended * looks

    def weight_bytes(self, itemsize: int, quantization: str = "none") -> int:
        """Return the memory of the weights; quantised LMs keep their embeddings as they are."""
        each = _BYTES_A_WEIGHT.get(quantization, itemsize)
        return int(self.matrices * each) + (self.weights - self.matrices) * itemsize

    def cache_bytes(self, tokens: int, itemsize: int) -> int:
        """Return the memory of the keys and values of so many tokens."""
        return 2 * self.layers * self.cached * tokens * itemsize

    def batch_bytes(self, tokens: int, itemsize: int) -> int:
        """Estimate the memory of one batch: its keys and values, and one layer's activations."""
        live = _LIVE_WIDTHS * self.hidden + _LIVE_MIDDLES * self.middle
        return self.cache_bytes(tokens, itemsize) + live * tokens * itemsize


TextSample = tuple[int, Sequence[int], Sequence[int]]
"""How many texts of one kind there are, and of some of them the tokens that are read for each
alone, and the same with what it shares with others."""


@dataclass(frozen=True)
class Reading:
    """What reading texts costs.

    Attributes:
        model: What reads, as the user wrote it.
        device: Where it runs, and in which dtype.
        prefix: Tokens that prompts share; with a prefix a query those of one, on average.
        num_prefixes: How many prefixes there are: none, one, several that scores are averaged
            over, or one a query.
        own_mean: Own tokens of a text, on average.
        sampled: Texts tokenised to find that.
        cut: Share of them that are cut to fit the model's window.
        tokens: With the prefix run once, or as often as the arguments say.
        tokens_whole: With the prefix run for every text.
        flops: As `tokens`.
        flops_whole: As `tokens_whole`.
        weights: Bytes on the device.
        cache: Bytes on the device: keys and values of the shared tokens.
        batch: Bytes on the device: one batch, estimated.
    """

    model: str
    device: str
    prefix: int
    num_prefixes: int
    own_mean: float
    sampled: int
    cut: float
    tokens: int
    tokens_whole: int
    flops: float
    flops_whole: float
    weights: int
    cache: int
    batch: int

    @property
    def is_shared(self) -> bool:
        """Whether running the prefix once saves anything; with `--prefix_sharing none` not."""
        return self.tokens < self.tokens_whole

    @property
    def device_bytes(self) -> int:
        """All that lies on the device."""
        return self.weights + self.cache + self.batch


class Model(Protocol):
    """What is known of a model before its weights are loaded."""

    source: ModelSource
    config: Any
    device: torch.device
    dtype: torch.dtype

    @property
    def quantization(self) -> str: ...


def estimate_reading(
    model: Model,
    kinds: Sequence[TextSample],
    *,
    prefix: int = 0,
    num_prefixes: int = 0,
    is_shared: bool = False,
    num_cut: int = 0,
    batch_tokens: int,
    is_causal: bool = True,
) -> Reading:
    """Add up what texts cost; each sampled one stands for its share of its kind.

    Args:
        model: What reads.
        kinds: The texts.
        prefix: Tokens that stand before each text.
        num_prefixes: How many prefixes there are.
        is_shared: Whether each prefix is read once; else it is in the samples' `own` tokens.
        num_cut: How many sampled texts were cut.
        batch_tokens: Own tokens in one batch on a CPU; a GPU takes 16 times as many.
        is_causal: Whether a token looks at those before it only.

    Raises:
        ModelError: If no model can be laid out from its configuration.
    """
    shape, device = LmShape.of(model.config, is_causal=is_causal), model.device
    behind, item = prefix if is_shared else 0, model.dtype.itemsize
    threads = torch.get_num_threads()
    place = f"{device.type}, {threads} thread{'s' if threads > 1 else ''}"
    if device.type == "cuda":
        place = torch.cuda.get_device_name(device)
    sampled, total = sum(len(own) for _, own, _ in kinds), sum(count for count, _, _ in kinds)
    once = num_prefixes if is_shared and sampled else 0
    tokens = tokens_whole = flops = flops_whole = 0.0
    for count, own, whole in kinds:
        times = count / max(1, len(own))
        tokens += times * sum(own)
        tokens_whole += times * sum(whole)
        flops += times * shape.flops(own, behind=behind)
        flops_whole += times * shape.flops(whole)
    return Reading(
        model=model.source.name,
        device=f"{place}, {dtype_name(model.dtype)}",
        prefix=prefix,
        num_prefixes=num_prefixes,
        own_mean=tokens / max(1, total),
        sampled=sampled,
        cut=num_cut / max(1, sampled),
        tokens=round(tokens) + once * behind,
        tokens_whole=round(tokens_whole),
        flops=flops + once * shape.flops([behind]),
        flops_whole=flops_whole,
        weights=shape.weight_bytes(item, model.quantization),
        cache=shape.cache_bytes(behind, item),
        batch=shape.batch_bytes(
            batch_budget(batch_tokens, device, weights=shape.weights if is_causal else None), item
        ),
    )


def foresee_prompts(
    encoder: PromptedEncoder,
    kinds: Iterable[tuple[int, Sequence[Mapping[str, str]]]],
    shards: Iterable[Sequence[str]],
    *,
    prefix: int | None = None,
    num_prefixes: int = 1,
) -> tuple[Reading, Trial]:
    """Return what reading texts under a prompt costs, and what times the LM on such texts.

    Args:
        encoder: The LM with its prompt, or with one of many.
        kinds: Of each kind of text how many there are, and the fields of some.
        shards: Texts to time the LM on; see `measure_speed`.
        prefix: Tokens of the prefixes, on average; None: as long as the encoder's.
        num_prefixes: How many prefixes there are.
    """
    skip, is_shared, cut = len(encoder.shared_ids), encoder.sharing != "none", encoder.num_cut
    prefix = skip if prefix is None else prefix
    samples: list[TextSample] = []
    for count, fields in kinds:
        ids = encoder.tokenize(fields).ids
        whole = [len(prompt) - skip + prefix for prompt in ids]
        samples.append((count, own_lengths(encoder, ids) if is_shared else whole, whole))
    reading = estimate_reading(
        encoder.lm,
        samples,
        prefix=prefix,
        num_prefixes=num_prefixes,
        is_shared=is_shared,
        num_cut=encoder.num_cut - cut,
        batch_tokens=encoder.batch_tokens,
    )
    return reading, lambda seconds: measure_speed(encoder, shards, seconds=seconds)
