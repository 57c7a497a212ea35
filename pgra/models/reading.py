"""Prompts that a causal LM has read, kept so that it can go on with them.

A prompt's keys and values stand in rows of a stock cache of transformers. While prompts are read,
they are padded on the right, where no token sees the padding; when many are gone on with together,
they are laid against the right edge, so that tokens are as far apart in the cache as in the text,
whatever an LM's attention makes of that.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from pgra.errors import ModelError
from pgra.models.causal_lm import CausalLM
from pgra.models.last_layer import LastLayer
from pgra.models.lm_head import LMHead
from pgra.models.one_by_one import next_logits

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
