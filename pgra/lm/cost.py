"""What reading costs an LM: operations and bytes from its configuration, seconds by a trial."""

import itertools
import logging
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from pgra.errors import ModelError
from pgra.lm.prefix import PromptedEncoder, Prompts

logger = logging.getLogger(__name__)

_BATCHES_A_PIECE = 6  # of `batch_tokens`, on a CPU: few enough to read several pieces
_PATIENCE = 6  # times the seconds given that a piece may seem to take
_SEED = 0


@dataclass(frozen=True)
class Speed:
    """What was measured.

    Attributes:
        texts: How many were read.
        tokens: Their own tokens, the shared prefix not counted.
        seconds: How long it took.
        load_seconds: How long the LM took to be ready: weights, prefix, a first text.
    """

    texts: int
    tokens: int
    seconds: float
    load_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Give own tokens a second."""
        return self.tokens / self.seconds


def measure_speed(
    encoder: PromptedEncoder, shards: Iterator[Sequence[str]], *, seconds: float
) -> Speed:
    """Read pieces of shards until the time is up.

    A bank sorts each shard by length before it fills batches, so the pieces are runs of a sorted
    shard, taken in random order: each is batched as it would be among its neighbours.

    Args:
        encoder: The LM with its prompt; it is loaded now, if it was not.
        shards: Texts, a real shard's number at a time; asked for more while time is left. At least
            one must come.
        seconds: How long; one piece at least is read.
    """
    shard = next(shards)
    start = time.perf_counter()
    encoder.encode(shard[:1])  # loads, runs the prefix, and compares the ways
    load_seconds = time.perf_counter() - start
    most = _piece_tokens(encoder, shard, seconds)
    pieces = _pieces(encoder, itertools.chain([shard], shards), most)
    first = next(pieces)
    encoder.encode_prompts(first)  # the first of its size is slow
    total = _Read()
    start = time.perf_counter()
    for piece in itertools.chain(pieces, [first]):  # a single piece is read twice
        total = total.plus(_read(encoder, piece))
        if time.perf_counter() - start >= seconds:
            break
    logger.info("calibration: the LM read %d texts in %.1f s", total.texts, total.seconds)
    return Speed(total.texts, total.tokens, total.seconds, load_seconds)


@dataclass(frozen=True)
class _Read:
    texts: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def plus(self, other: "_Read") -> "_Read":
        return _Read(
            self.texts + other.texts, self.tokens + other.tokens, self.seconds + other.seconds
        )


def _read(encoder: PromptedEncoder, piece: Prompts) -> _Read:
    """Read a piece, which is tokenised already: in a fill that runs ahead of the LM.

    On a CPU the last batch is left out if there are others. It is mostly too small to be fast, and
    a piece has it far more often than a shard. A GPU runs behind the program, so that only the
    whole can be timed.
    """
    start = time.perf_counter()
    marks = [(0, start)]
    encoder.encode_prompts(
        piece, advance=lambda more: marks.append((marks[-1][0] + more, time.perf_counter()))
    )
    texts, end = len(piece.ids), time.perf_counter()
    if encoder.lm.device.type == "cpu" and len(marks) > 2:
        texts, end = marks[-2]
    return _Read(texts, sum(own_lengths(encoder, piece.ids[:texts])), end - start)


def own_lengths(encoder: PromptedEncoder, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Give how many tokens of each prompt the LM must read, with the prefix shared."""
    shared = [] if encoder.sharing == "none" else encoder.shared_ids
    skip = len(shared)
    return [len(ids) - (skip if list(ids[:skip]) == shared else 0) for ids in prompts]


def _piece_tokens(encoder: PromptedEncoder, shard: Sequence[str], seconds: float) -> int:
    """Give a few batches' tokens, or on a GPU a shard's; fewer where that would take far too long.

    Many texts at once are read faster than one alone, so only a gross excess tells.
    """
    prompts = encoder.tokenize([encoder.prompt.template.passage_fields(text) for text in shard])
    lengths = own_lengths(encoder, prompts.ids)
    most = sum(lengths)
    if encoder.lm.device.type == "cpu":
        most = min(most, _BATCHES_A_PIECE * encoder.batch_tokens)
    start = time.perf_counter()
    encoder.encode_prompts(Prompts(prompts.fields[:1], prompts.ids[:1]))
    rate = lengths[0] / (time.perf_counter() - start)
    return max(1, int(rate * seconds)) if most / rate > _PATIENCE * seconds else most


def _pieces(
    encoder: PromptedEncoder, shards: Iterable[Sequence[str]], most: int
) -> Iterator[Prompts]:
    rng = random.Random(_SEED)
    for texts in shards:
        fields = [encoder.prompt.template.passage_fields(text) for text in texts]
        prompts = encoder.tokenize(fields)
        lengths = own_lengths(encoder, prompts.ids)
        runs = _cut(_order(lengths, prompts.ids), lengths, most)
        for run in rng.sample(runs, len(runs)):
            yield Prompts([prompts.fields[i] for i in run], [prompts.ids[i] for i in run])


def _order(lengths: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[int]:
    """Sort as the encoder does: longest first, and last those that must be read whole."""
    is_whole = [own == len(ids) for own, ids in zip(lengths, prompts, strict=True)]
    return sorted(range(len(lengths)), key=lambda i: (is_whole[i], -lengths[i], i))


def _cut(order: Sequence[int], lengths: Sequence[int], most: int) -> list[list[int]]:
    """Cut a sorted shard into runs of about equal tokens, `most` or fewer each."""
    count = max(1, -(-sum(lengths) // most))
    goal = sum(lengths) / count
    runs: list[list[int]] = [[] for _ in range(count)]
    done = 0
    for i in order:
        runs[min(count - 1, int(done / goal))].append(i)
        done += lengths[i]
    return [run for run in runs if run]


# What reading costs an LM, from its configuration alone: operations and bytes. Loads no weights.
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
    """

    layers: int
    hidden: int
    state: int
    attended: int
    cached: int
    middle: int
    weights: int
    matrices: int

    @classmethod
    def of(cls, config: Any) -> Self:
        """Read the sizes off a base model's configuration.

        Raises:
            ModelError: If no model can be laid out from it.
        """
        from transformers import AutoModel

        try:
            with torch.device("meta"):  # shapes without memory
                model = AutoModel.from_config(config)
        except (ValueError, KeyError, AttributeError, RuntimeError) as error:
            kind = getattr(config, "model_type", "model")
            raise ModelError(f"cannot lay out '{kind}' from its configuration: {error}") from error
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
            looks += length * behind + length * (length + 1) // 2
        return 2.0 * self.matrices * tokens + 4.0 * self.layers * self.attended * looks

    def weight_bytes(self, itemsize: int, quantization: str = "none") -> int:
        """Give the memory of the weights; quantised LMs keep their embeddings as they are."""
        each = _BYTES_A_WEIGHT.get(quantization, itemsize)
        return int(self.matrices * each) + (self.weights - self.matrices) * itemsize

    def cache_bytes(self, tokens: int, itemsize: int) -> int:
        """Give the memory of the keys and values of so many tokens."""
        return 2 * self.layers * self.cached * tokens * itemsize

    def batch_bytes(self, tokens: int, itemsize: int) -> int:
        """Estimate the memory of one batch: its keys and values, and one layer's activations."""
        live = _LIVE_WIDTHS * self.hidden + _LIVE_MIDDLES * self.middle
        return self.cache_bytes(tokens, itemsize) + live * tokens * itemsize
