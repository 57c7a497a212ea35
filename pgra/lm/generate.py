"""Prompts that a causal LM has read, kept so that it can go on with them: greedy text, scores.

A prompt's keys and values stand in rows of a stock cache of transformers. While prompts are read,
they are padded on the right, where no token sees the padding; when many are gone on with together,
they are laid against the right edge, so that tokens are as far apart in the cache as in the text,
whatever an LM's attention makes of that.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from pgra.errors import ModelError
from pgra.lm.batching import GroupCost, group_by_length
from pgra.lm.causal_lm import CausalLM
from pgra.lm.kernels import LastLayer
from pgra.lm.load import batch_budget
from pgra.lm.score import LMHead

# Prompts read one at a time by stock calls: as truth, and for LMs that read none side by side.
#
# Such are those that keep something else than a key and a value for each token (Mamba and its kin).


@torch.inference_mode()
def next_logits(lm: CausalLM, ids: Sequence[int]) -> Tensor:
    """Give what follows each of a text's tokens, (L, V) float32, without a cache."""
    whole = torch.tensor([list(ids)], device=lm.device)
    logits: Tensor = lm.whole(input_ids=whole, use_cache=False).logits
    return logits[0].float()


def chance_alone(lm: CausalLM, ids: Sequence[int], word: Sequence[int]) -> float:
    """Give the log-probability of a word's tokens behind a prompt."""
    logits = next_logits(lm, [*ids, *word[:-1]])[-len(word) :]
    chances = logits.log_softmax(dim=1).cpu()
    return sum(float(chances[place, token]) for place, token in enumerate(word))


def write_alone(
    lm: CausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    is_done: Callable[[Sequence[int]], bool],
    advance: Callable[[int], object] = int,
) -> list[list[int]]:
    """Write the likeliest tokens behind each prompt; see `GreedyDecoder.write`.

    With the cache of the LM's own kind, which `generate` knows how to use.
    """
    from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

    class Stop(StoppingCriteria):  # type: ignore[misc]
        def __init__(self, start: int) -> None:
            self.start = start

        def __call__(self, input_ids: Tensor, *_: object, **__: object) -> Tensor:
            is_over = is_done(input_ids[0, self.start :].tolist())
            return torch.tensor([is_over], device=input_ids.device)

    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        pad_token_id=0,
    )
    written = []
    for ids in prompts:
        whole = torch.tensor([list(ids)], device=lm.device)
        with torch.inference_mode():
            out = lm.whole.generate(
                input_ids=whole,
                attention_mask=torch.ones_like(whole),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([Stop(len(ids))]),
            )
        written.append(out[0, len(ids) :].tolist())
        advance(1)
    return written


logger = logging.getLogger(__name__)

_PROBES = ("The answer is", "Question: who wrote it? The answer is not")


@dataclass(frozen=True)
class KeptPrompts:
    """Prompts that were read, R of them.

    Attributes:
        layers: Each layer's keys and values, (R, heads, S + room, width) each.
        lengths: Tokens of each, (R,) int64, on the CPU.
        logits: Of what follows each, (R, V) float32.
        is_right: Whether a prompt's tokens are the last of its row's S, and not the first.
        room: Columns behind the tokens that nothing stands in yet: what is written goes there, and
            nothing is copied for it.
    """

    layers: list[tuple[Tensor, Tensor]]
    lengths: Tensor
    logits: Tensor
    is_right: bool = False
    room: int = 0

    def __len__(self) -> int:
        """Count the prompts."""
        return len(self.lengths)

    @property
    def longest(self) -> int:
        """Give S, the tokens of a row."""
        return int(self.layers[0][0].shape[2]) - self.room

    @property
    def token_bytes(self) -> int:
        """Give the bytes that one token takes in all layers."""
        sizes = (part[0, :, :1].nbytes for layer in self.layers for part in layer)
        return max(1, sum(sizes))

    def cut(self, length: int) -> "KeptPrompts":
        """Give the one prompt's first tokens, to read others behind; its logits say nothing."""
        layers = [(keys[:, :, :length], values[:, :, :length]) for keys, values in self.layers]
        return KeptPrompts(layers, torch.tensor([length]), self.logits)

    def take(self, places: Sequence[int]) -> "KeptPrompts":
        """Give some of the prompts, in this order, some perhaps more than once."""
        if list(places) == list(range(len(self))):
            return self
        chosen = torch.tensor(places, dtype=torch.long)
        layers = [
            (keys[chosen.to(keys.device)], values[chosen.to(values.device)])
            for keys, values in self.layers
        ]
        return self._chosen(layers, chosen)

    @torch.inference_mode()
    def keep(self, places: Sequence[int]) -> "KeptPrompts":
        """Give some of the prompts, in rising order, moved together within the same memory.

        What they were taken out of says nothing afterwards.
        """
        for tensor in (tensor for layer in self.layers for tensor in layer):
            for to, place in enumerate(places):
                if to != place:
                    tensor[to] = tensor[place]
        count = len(places)
        layers = [(keys[:count], values[:count]) for keys, values in self.layers]
        return self._chosen(layers, torch.tensor(places, dtype=torch.long))

    def _chosen(self, layers: list[tuple[Tensor, Tensor]], chosen: Tensor) -> "KeptPrompts":
        logits = self.logits[chosen.to(self.logits.device)]
        return KeptPrompts(layers, self.lengths[chosen], logits, self.is_right, self.room)


class Shelf:
    """Memory that prompts are joined in again and again.

    Tensors that come and go, each a bit larger than the last, would leave holes that nothing fits.
    """

    def __init__(self) -> None:
        """Take no memory yet."""
        self._num_tokens = 0
        self._flat: dict[tuple[int, int], Tensor] = {}

    def expect(self, num_tokens: int) -> None:
        """Take at least as much as so many tokens need, where it is too small for what comes."""
        self._num_tokens = num_tokens

    def lay(self, place: tuple[int, int], parts: list[Tensor], shape: tuple[int, ...]) -> Tensor:
        """Give memory of a shape, not set; parts that stand in it are replaced by copies.

        Args:
            place: Which layer, and whether keys or values.
            parts: What will be copied into it, (r, heads, S, width) each.
            shape: (R, heads, S, width).
        """
        flat, needed = self._flat.get(place), math.prod(shape)
        if flat is None or flat.numel() < needed:
            size = max(needed, self._num_tokens * shape[1] * shape[3])
            flat = self._flat[place] = parts[0].new_empty(size)
        start = flat.untyped_storage().data_ptr()
        for i, part in enumerate(parts):
            if part.untyped_storage().data_ptr() == start:
                parts[i] = part.clone()
        return flat[:needed].view(shape)


@torch.inference_mode()
def join(
    blocks: Sequence[KeptPrompts], *, room: int = 0, shelf: Shelf | None = None
) -> KeptPrompts:
    """Lay prompts of several blocks side by side, against the right edge.

    Args:
        blocks: Prompts; those of a single block stay where they are, if they can.
        room: Columns to keep free behind them, for as many tokens of each.
        shelf: Where to lay them; what was laid there before says nothing afterwards. None takes new
            memory.
    """
    only = blocks[0] if len(blocks) == 1 else None
    if only is not None and only.is_right:
        return only
    if only is not None and not room and _has_no_padding(only):
        return KeptPrompts(only.layers, only.lengths, only.logits, is_right=True)
    longest = max(int(block.lengths.max()) for block in blocks)
    shelf = shelf or Shelf()
    layers = []
    for number in range(len(blocks[0].layers)):
        keys, values = (_join((number, which), blocks, longest, room, shelf) for which in (0, 1))
        layers.append((keys, values))
    lengths = torch.cat([block.lengths for block in blocks])
    logits = torch.cat([block.logits for block in blocks])
    return KeptPrompts(layers, lengths, logits, is_right=True, room=room)


def _has_no_padding(block: KeptPrompts) -> bool:
    return bool((block.lengths == block.longest).all())


def _join(
    place: tuple[int, int], blocks: Sequence[KeptPrompts], longest: int, room: int, shelf: Shelf
) -> Tensor:
    """Join one layer's keys, or its values: (R, heads, `longest` + `room`, width)."""
    number, which = place
    parts = [block.layers[number][which] for block in blocks]
    _, heads, _, width = parts[0].shape
    shape = (sum(map(len, blocks)), heads, longest + room, width)
    joined = shelf.lay(place, parts, shape)
    row = 0
    for part, block in zip(parts, blocks, strict=True):
        for own, length in zip(part, block.lengths.tolist(), strict=True):
            end = block.longest if block.is_right else length
            joined[row, :, : longest - length] = 0  # hidden, but what is hidden must be finite
            joined[row, :, longest - length : longest] = own[:, end - length : end]
            row += 1
    return joined


class PromptReader:
    """Reads prompts with a causal LM, and goes on with what it has read."""

    def __init__(self, lm: CausalLM) -> None:
        """Take an LM that has its head; its weights are loaded when it first reads."""
        self.lm = lm
        self._is_trimmed = True  # whether the last layer works on last tokens only

    @torch.inference_mode()
    def read(
        self, prompts: Sequence[Sequence[int]], *, behind: KeptPrompts | None = None
    ) -> KeptPrompts:
        """Read prompts; those of like length in one call.

        Args:
            prompts: Token ids of R prompts, none empty.
            behind: One prompt that was read, and that all of these begin with: it is not read
                again, and each has at least one token more.
        """
        skip = 0 if behind is None else int(behind.lengths[0])
        own = [list(ids[skip:]) for ids in prompts]
        lengths = torch.tensor([len(ids) for ids in own])
        ids = torch.zeros(len(own), int(lengths.max()), dtype=torch.long)
        for row, tokens in enumerate(own):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        cache = _cache([] if behind is None else behind.layers, len(own))
        positions = skip + torch.arange(ids.shape[1]).expand_as(ids)
        # No mask: what is padded comes last, and an LM looks at no later token.
        logits = self._run(ids, positions, cache, (lengths - 1)[:, None])[:, 0]
        return KeptPrompts(_layers(cache, skip + ids.shape[1]), skip + lengths, logits)

    @torch.inference_mode()
    def go_on(self, kept: KeptPrompts, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Give what would follow each of more tokens behind prompts that were read.

        Args:
            kept: R prompts, joined.
            tokens: Those behind each, R lists.

        Returns:
            (R, T, V) float32 logits, T the longest list; behind a shorter one's end they say
            nothing.
        """
        return self._go_on(kept, tokens)[0]

    @torch.inference_mode()
    def step(self, kept: KeptPrompts, tokens: Sequence[int]) -> KeptPrompts:
        """Write one token behind each of R prompts, joined; their room is used up by it."""
        logits, cache = self._go_on(kept, [[token] for token in tokens])
        layers, room = _layers(cache, kept.longest + 1), 0
        if kept.room:
            layers, room = kept.layers, kept.room - 1
        return KeptPrompts(layers, kept.lengths + 1, logits[:, 0], is_right=True, room=room)

    def _go_on(self, kept: KeptPrompts, tokens: Sequence[Sequence[int]]) -> tuple[Tensor, Any]:
        if not kept.is_right:
            raise ValueError("prompts are gone on with after they were joined")
        width = max(map(len, tokens))
        ids = torch.tensor([[*own, *[0] * (width - len(own))] for own in tokens])
        columns = torch.arange(width).expand_as(ids)
        mask = torch.arange(kept.longest + width) >= (kept.longest - kept.lengths)[:, None]
        cache = _cache(kept.layers, len(kept), room=kept.room, new=width)
        logits = self._run(ids, kept.lengths[:, None] + columns, cache, columns, mask=mask.long())
        return logits, cache

    def _run(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: Any,
        wanted: Tensor,
        *,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Run tokens behind a cache, which grows by them.

        Args:
            ids: (R, T) int64.
            positions: Their places in their texts, (R, T).
            cache: What stands before them.
            wanted: Columns whose logits are wanted, (R, W).
            mask: 1 where there is a token, of the cache and of these, (R, S + T).

        Returns:
            (R, W, V) float32.
        """
        device = self.lm.device
        inputs = {
            "input_ids": ids.to(device),
            "position_ids": positions.to(device),
            "attention_mask": None if mask is None else mask.to(device),
            "past_key_values": cache,
            "use_cache": True,
        }
        rows = torch.arange(len(ids))[:, None]
        if self._head is None:
            columns, places = torch.unique(wanted, return_inverse=True)
            logits: Tensor = self.lm.whole(**inputs, logits_to_keep=columns.to(device)).logits
            return logits[rows.to(logits.device), places.to(logits.device)].float()
        # Flat places of the tokens whose states are wanted; where all are, nothing is left out.
        ends = (rows * ids.shape[1] + wanted).flatten() if wanted.shape[1] < ids.shape[1] else None
        with self._last.only_at(ends if self._is_trimmed else None):
            hidden = self.lm.model(**inputs).last_hidden_state
        states = hidden[rows.to(hidden.device), wanted.to(hidden.device)]  # (R, W, H)
        return self._head.logits(states)

    @cached_property
    def _last(self) -> LastLayer:
        return LastLayer(self.lm.model)

    @cached_property
    def _head(self) -> LMHead | None:
        """Give the head, which reads states in float32; None where it is not all there is."""
        try:
            return LMHead.of(self.lm)
        except ModelError as error:
            logger.info("logits are the LM's own, in %s: %s", self.lm.dtype, error)
            return None

    @cached_property
    def token_bytes(self) -> int:
        """Give the bytes that a token's keys and values take."""
        return self.read([self.lm.lead_ids + self.lm.tokenize(_PROBES)[0]]).token_bytes

    @cached_property
    def fault(self) -> str | None:
        """Say why prompts cannot be read side by side with this LM; None if they can.

        Two prompts are read behind their common beginning, joined, and gone on with, and the
        outcome compared with each alone and whole; also with a whole last layer, if part of it
        gives something else.
        """
        fault = self._find_fault()
        if fault is not None:
            self._is_trimmed = False
            fault = self._find_fault()
        return fault

    def _find_fault(self) -> str | None:
        start, other = (self.lm.lead_ids + ids for ids in self.lm.tokenize(_PROBES))
        longer, token = [*start, *other], start[-1]
        try:
            begun = self.read([start[:-1]])
            blocks = [self.read([start, longer], behind=begun), self.read([other])]
            kept = join(blocks, room=1)
            found = torch.cat([kept.logits, self.step(kept, [token] * 3).logits])
        except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
        texts = (start, longer, other)
        whole = [*texts, *([*ids, token] for ids in texts)]
        alone = [next_logits(self.lm, ids)[-1] for ids in whole]
        truth = torch.stack(alone).to(found.device)
        slack = self.lm.tolerance * float(truth.abs().max())
        if torch.allclose(found, truth, rtol=0, atol=slack):
            return None
        return "it gives other chances than for each prompt alone"


def _cache(
    layers: Sequence[tuple[Tensor, Tensor]], rows: int, *, room: int = 0, new: int = 0
) -> Any:
    """Give a stock cache that holds so many rows; a single row stands for all of them.

    Of `room` columns at the layers' end that are free, `new` tokens take theirs, if they suffice.

    Made without the LM's configuration, so that layers whose attention looks back only so far
    keep all tokens too: rows of different lengths lose other ones, and the LM's mask hides them.
    """
    from transformers import DynamicCache

    cache = DynamicCache()
    for place, pair in enumerate(layers):
        keys, values = (part.expand(rows, -1, -1, -1) for part in pair)
        # Set, where `update` would copy them; the copy behind which new ones are laid is enough.
        cache.update(keys[:, :, :0], values[:, :, :0], place)
        layer, used = cache.layers[place], keys.shape[2] - room
        layer.keys, layer.values = keys[:, :, :used], values[:, :, :used]
        if 0 < new <= room:
            layer.update = partial(_fill, layer, keys, values)
    return cache


def _fill(
    layer: Any,
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, Tensor]:
    """Update a cache's layer within tensors that have room, where its own way copies all of it."""
    start = layer.keys.shape[2]
    end = start + new_keys.shape[2]
    keys[:, :, start:end], values[:, :, start:end] = new_keys, new_values
    layer.keys, layer.values = keys[:, :, :end], values[:, :, :end]
    return layer.keys, layer.values


def _layers(cache: Any, length: int) -> list[tuple[Tensor, Tensor]]:
    """Take a cache's keys and values.

    Raises:
        ValueError: If a layer does not keep one of each for every token.
    """
    layers = [(layer.keys, layer.values) for layer in cache.layers]
    if not layers or any(part.dim() != 4 or part.shape[2] != length for p in layers for part in p):
        raise ValueError("a layer keeps something else than a key and a value for each token")
    return layers


# Which prompts begin alike: what they share is then read once (`pgra.lm.generate`).


LEAST_SHARED = 32
"""Fewer tokens are not worth a call of their own."""
_LEAST_PART = 4  # of a prompt: less than a quarter does not pay for batches that are cut smaller


@dataclass(frozen=True)
class PrefixGroup:
    """Prompts that begin with the same tokens.

    Attributes:
        num_shared: How many tokens; each prompt has at least one more. 0 where nothing is shared.
        rows: Which prompts.
    """

    num_shared: int
    rows: list[int]


def group_by_prefix(
    prompts: Sequence[Sequence[int]], *, least: int = LEAST_SHARED
) -> list[PrefixGroup]:
    """Group prompts so that reading each group's beginning once saves most.

    In the order of their tokens, prompts that begin alike are neighbours. The most alike are put
    together first; then groups, where all of them together save more than each for itself. So one
    odd prompt takes nothing from the others.

    Args:
        prompts: Token ids, none empty.
        least: Fewest tokens that are shared.

    Returns:
        Each prompt in one group; those that share nothing with others in the last one.
    """
    order = sorted(range(len(prompts)), key=lambda row: list(prompts[row]))
    # By their first and by their last place.
    spans = {place: _Span.of(place, len(prompts[row])) for place, row in enumerate(order)}
    shared = [_joint(prompts[a], prompts[b]) for a, b in pairwise(order)]
    for place in sorted(range(len(shared)), key=lambda i: (-shared[i], i)):
        left, right = spans[place], spans[place + 1]
        longest = max(left.longest, right.longest)
        is_long = shared[place] >= max(least, longest / _LEAST_PART)
        joined = left.join(right, shared[place] if is_long else 0)
        spans[joined.first] = spans[joined.last] = joined
    parts = spans[0].parts if order else []
    found = [(shared, order[first : last + 1]) for first, last, shared in parts]
    alone = sorted(rows[0] for _, rows in found if len(rows) == 1)
    groups = [PrefixGroup(shared, rows) for shared, rows in found if len(rows) > 1]
    return [*groups, PrefixGroup(0, alone)] if alone else groups


class _Part(NamedTuple):
    first: int
    last: int
    num_shared: int


@dataclass(frozen=True)
class _Span:
    """Neighbours, and the best groups of them that were found.

    Attributes:
        first: The first's place in the order.
        last: The last's.
        parts: Groups.
        saved: Tokens that need not be read.
        longest: Tokens of the longest prompt.
    """

    first: int
    last: int
    parts: list[_Part]
    saved: int
    longest: int

    @classmethod
    def of(cls, place: int, length: int) -> Self:
        return cls(place, place, [_Part(place, place, 0)], 0, length)

    def join(self, right: "_Span", shared: int) -> "_Span":
        """Put neighbours together, who all begin with so many tokens; 0 if that is too few."""
        parts, saved = [*self.parts, *right.parts], self.saved + right.saved
        together = (right.last - self.first) * shared
        if shared and together >= saved:
            parts, saved = [_Part(self.first, right.last, shared)], together
        return _Span(self.first, right.last, parts, saved, max(self.longest, right.longest))


def _joint(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens that two prompts begin with alike, but for each one's last."""
    most = min(len(one), len(other)) - 1
    return next((i for i in range(most) if one[i] != other[i]), most)


# Greedy decoding of many prompts: read in batches of like length, written on side by side.
#
# Reading is bound by arithmetic, so that small batches without padding are best; writing a token is
# bound by reading the weights, so that many prompts together cost little more than one. Hence the
# two have sizes of their own: prompts are read in batches of so many tokens, and wait until as many
# are there as the memory for keys and values takes. Those that are done leave, and others follow.


IsDone = Callable[[Sequence[int]], bool]
"""Told the tokens written so far, says whether they are enough."""

_KEPT_BYTES = 1 << 29  # keys and values on a CPU
_KEPT_SHARE = 0.3  # of what is free on a GPU; they are copied when others join them
_HEADROOM = 64  # tokens that may follow a prompt, where a batch of prompts is cut
_DONE_SHARE = 4  # one in so many must be done before the others are moved together


@dataclass(frozen=True)
class Batch:
    """Prompts that are read in one call.

    Attributes:
        rows: Which.
        shared: Tokens they all begin with, which are read once for all batches of a group.
    """

    rows: list[int]
    shared: tuple[int, ...] = ()


@dataclass
class BatchReader:
    """Reads many prompts, those that begin alike behind one reading of their beginning.

    Attributes:
        lm: An LM with its head.
        batch_tokens: Tokens in one batch on a CPU; a GPU takes 16 times as many.
        kept_bytes: Most bytes of keys and values that are kept at a time; None goes by the device.
        num_tokens: Tokens read so far, padding not counted.
    """

    lm: CausalLM
    batch_tokens: int = 2048
    kept_bytes: int | None = None
    num_tokens: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.reader = PromptReader(self.lm)
        most = batch_budget(self.batch_tokens, self.lm.device)
        self._cost = replace(GroupCost.on(self.lm.device), max_tokens=most)
        self._shared: tuple[int, ...] = ()
        self._behind: KeptPrompts | None = None
        self._shelf = Shelf()

    def shelf(self, num_tokens: int) -> Shelf:
        """Give where prompts that are written on can be laid, so many tokens at a time.

        On a CPU it is the same in every call, since memory that is new costs more there than what
        is written in it; a GPU's is needed elsewhere, and torch keeps it.
        """
        shelf = self._shelf if self.lm.device.type == "cpu" else Shelf()
        shelf.expect(num_tokens)
        return shelf

    @property
    def room(self) -> int:
        """Give the tokens whose keys and values may be kept at a time."""
        most = self.kept_bytes
        if most is None and self.lm.device.type == "cuda":
            most = int(_KEPT_SHARE * torch.cuda.mem_get_info(self.lm.device)[0])
        return (_KEPT_BYTES if most is None else most) // self.reader.token_bytes

    def batches(self, prompts: Sequence[Sequence[int]]) -> list[Batch]:
        """Cut prompts into batches: those that begin alike together, each kind longest first.

        The cuts fall where padding and calls together cost least. However short what prompts have
        of their own, each one's keys and values are whole.
        """
        found, room = [], self.room if len(prompts) > 1 else 0
        for group in group_by_prefix(prompts):
            shared = tuple(prompts[group.rows[0]][: group.num_shared])
            own = np.array([len(prompts[row]) - len(shared) for row in group.rows])
            most = max(1, room // (len(shared) + int(own.max()) + _HEADROOM))
            batches = group_by_length(own, self._cost)
            for places in sorted(batches, key=lambda places: -own[places].max()):
                rows = [group.rows[place] for place in reversed(places)]
                found += [Batch(rows[i : i + most], shared) for i in range(0, len(rows), most)]
        return found

    def read(self, prompts: Sequence[Sequence[int]], batch: Batch) -> list[KeptPrompts]:
        """Read a batch; in parts, where the memory does not take it whole.

        Raises:
            ModelError: If one prompt alone does not fit, or gives no finite number.
        """
        try:
            behind = self._read_shared(batch.shared)
            kept = self.reader.read([prompts[row] for row in batch.rows], behind=behind)
        except torch.OutOfMemoryError as error:
            if len(batch.rows) == 1:
                raise ModelError(
                    f"a prompt of {len(prompts[batch.rows[0]])} tokens does not fit the memory of "
                    f"{self.lm.device} with '{self.lm.source.name}': use a smaller LM or --lm_dtype"
                ) from error
        else:
            self.num_tokens += sum(len(prompts[r]) - len(batch.shared) for r in batch.rows)
            return [kept]
        torch.cuda.empty_cache()  # outside the handler, which holds what did not fit
        half = len(batch.rows) // 2
        logger.warning("out of memory: %d prompts are read in two parts", len(batch.rows))
        parts = (batch.rows[:half], batch.rows[half:])
        return [kept for rows in parts for kept in self.read(prompts, Batch(rows, batch.shared))]

    def count_unread(self, prompts: Sequence[Sequence[int]]) -> int:
        """Count the tokens that reading these prompts now would take."""
        batches = self.batches(prompts)
        own = sum(len(prompts[row]) - len(batch.shared) for batch in batches for row in batch.rows)
        shared = {batch.shared for batch in batches if batch.shared}
        return own + sum(len(one) - self._count_known(one) for one in shared)

    def _read_shared(self, shared: tuple[int, ...]) -> KeptPrompts | None:
        if not shared:
            return None
        if self._behind is None or self._shared != shared:
            known = self._count_known(shared)
            begun = self._behind.cut(known) if self._behind is not None and known else None
            self._behind = None  # gone before the next is read
            is_known = begun is not None and known == len(shared)
            self._behind = begun if is_known else self.reader.read([shared], behind=begun)
            self._shared = shared
            self.num_tokens += len(shared) - known
        return self._behind

    def _count_known(self, shared: Sequence[int]) -> int:
        """Count the tokens at its start that the last shared beginning started with too.

        A prompt that grows from call to call is so read once.
        """
        if self._behind is None:
            return 0
        pairs = zip(self._shared, shared, strict=False)
        most = min(len(self._shared), len(shared))
        joint = next((i for i, (one, other) in enumerate(pairs) if one != other), most)
        return joint if joint >= LEAST_SHARED else 0


@dataclass(frozen=True)
class _Writing:
    """Prompts that are gone on with.

    Attributes:
        rows: Which.
        kept: What was read of them, and the logits of what follows.
    """

    rows: list[int]
    kept: KeptPrompts


@dataclass(frozen=True)
class GreedyDecoder:
    """Writes the likeliest token behind a prompt, and then the likeliest behind that.

    Attributes:
        reader: What reads the prompts.
    """

    reader: BatchReader

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        is_done: IsDone,
        advance: Callable[[int], object] = int,
    ) -> list[list[int]]:
        """Go on with prompts.

        Args:
            prompts: Token ids, none empty; all fit the LM's window with the new tokens.
            max_new_tokens: Most tokens behind each.
            is_done: Asked after each token.
            advance: Told how many more prompts are done.

        Returns:
            The tokens written behind each prompt, in the order given; the one after which it was
            done included.

        Raises:
            ModelError: If a prompt does not fit the memory, or gives no finite number.
        """
        answers = _Answers(self.reader.lm, len(prompts), max_new_tokens, is_done, advance)
        room = self.reader.room
        queue = deque(self.reader.batches(prompts))
        longest = max(map(len, prompts), default=0) + max_new_tokens
        shelf = self.reader.shelf(min(room, len(prompts) * longest))
        writing: _Writing | None = None
        while queue or writing:
            begun = [writing] if writing else []
            while queue and _fits(begun, queue[0], prompts, max_new_tokens, room):
                begun += self._begin(prompts, queue.popleft(), answers)
            writing = _gather(begun, max_new_tokens, shelf)
            del begun  # what was read stands on the shelf
            least = len(writing.rows) // 2 if writing and queue else 0
            while writing and len(writing.rows) > least:
                tokens = [answers.written[row][-1] for row in writing.rows]
                kept = self.reader.reader.step(writing.kept, tokens)
                answers.add(writing.rows, kept)
                writing = answers.undone(_Writing(writing.rows, kept), share=_DONE_SHARE)
        return answers.written

    def _begin(
        self, prompts: Sequence[Sequence[int]], batch: Batch, answers: "_Answers"
    ) -> list[_Writing]:
        """Read a batch, and write each prompt's first token; those that are done leave."""
        begun, start = [], 0
        for kept in self.reader.read(prompts, batch):
            rows = batch.rows[start : start + len(kept)]
            start += len(kept)
            answers.add(rows, kept)
            left = answers.undone(_Writing(rows, kept))
            begun += [left] if left else []
        return begun


@dataclass
class _Answers:
    """What was written behind each prompt of a call."""

    lm: CausalLM
    count: int
    max_new_tokens: int
    is_done: IsDone
    advance: Callable[[int], object]

    def __post_init__(self) -> None:
        self.written: list[list[int]] = [[] for _ in range(self.count)]
        self._is_whole = [False] * self.count

    def add(self, rows: Sequence[int], kept: KeptPrompts) -> None:
        """Write the likeliest token behind each prompt that is not done."""
        before = sum(self._is_whole)
        for row, token in zip(rows, likeliest(kept.logits, self.lm), strict=True):
            if not self._is_whole[row]:
                self.written[row].append(token)
                is_full = len(self.written[row]) >= self.max_new_tokens
                self._is_whole[row] = is_full or self.is_done(self.written[row])
        self.advance(sum(self._is_whole) - before)

    def undone(self, writing: _Writing, *, share: int | None = None) -> _Writing | None:
        """Let those leave that are done; None if all are.

        Args:
            writing: Prompts.
            share: Only if at least one in so many is done, for the others are moved; None always.
        """
        left = [place for place, row in enumerate(writing.rows) if not self._is_whole[row]]
        if not left:
            return None
        if share is not None and (len(writing.rows) - len(left)) * share < len(writing.rows):
            return writing
        return _Writing([writing.rows[place] for place in left], writing.kept.keep(left))


def likeliest(logits: Tensor, lm: CausalLM) -> list[int]:
    """Give the likeliest token of each row.

    Raises:
        ModelError: If a row holds a number that is not finite.
    """
    best, tokens = logits.max(dim=1)
    if not torch.isfinite(best).all():
        raise ModelError(
            f"'{lm.source.name}' gives no finite number in {lm.dtype} for a prompt: "
            "use --lm_dtype bfloat16 or float32"
        )
    found: list[int] = tokens.tolist()
    return found


def _fits(
    begun: Sequence[_Writing],
    batch: Batch,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    room: int,
) -> bool:
    """Say whether a batch's keys and values fit beside what is kept already."""
    if not begun:
        return True
    longest = max(len(prompts[row]) for row in batch.rows)
    longest = max(longest, *(writing.kept.longest for writing in begun)) + max_new_tokens
    count = len(batch.rows) + sum(len(writing.rows) for writing in begun)
    return count * longest <= room


def _gather(begun: Sequence[_Writing], room: int, shelf: Shelf) -> _Writing | None:
    if not begun:
        return None
    rows = [row for writing in begun for row in writing.rows]
    return _Writing(rows, join([writing.kept for writing in begun], room=room, shelf=shelf))


# The log-probability of given words behind prompts that were read once.


Words = Sequence[Sequence[int]]


def word_chances(
    reader: PromptReader, kept: KeptPrompts, words: Sequence[Words]
) -> list[list[float]]:
    """Score words behind prompts: log P(word | prompt), over all of a word's tokens.

    Args:
        reader: What read the prompts.
        kept: R prompts.
        words: For each prompt the token ids of its words, none empty.

    Returns:
        For each prompt a value a word.
    """
    first = kept.logits.log_softmax(dim=1).cpu()
    found = [[float(first[row, word[0]]) for word in own] for row, own in enumerate(words)]
    longer = [
        (row, i) for row, own in enumerate(words) for i, word in enumerate(own) if len(word) > 1
    ]
    joined = join([kept]) if longer else kept
    for start in range(0, len(longer), len(kept)):  # each copies what is kept of its prompt
        lines = longer[start : start + len(kept)]
        logits = reader.go_on(
            joined.take([row for row, _ in lines]), [words[row][i][:-1] for row, i in lines]
        )
        rest = logits.log_softmax(dim=2).cpu()
        for line, (row, i) in enumerate(lines):
            later = enumerate(words[row][i][1:])
            found[row][i] += sum(float(rest[line, place, token]) for place, token in later)
    return found
