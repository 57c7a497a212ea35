"""Greedy text and word scores of a causal LM, for many prompts at once.

Reading is bound by arithmetic, so small batches without padding are best; writing a token is bound
by reading the weights, so many prompts cost little more than one. Hence prompts are read in batches
by a token budget, a common beginning once, and are continued together, as many as the memory for
keys and values holds.

A prompt's keys and values are rows of a stock cache of transformers. While prompts are read they
are padded on the right, where no token sees the padding. For writing they are aligned at the right
edge, so that distances in the cache are those in the text, whatever an LM's attention does.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pgra.errors import ModelError
from pgra.lm import batching, kernels
from pgra.lm.base import Prompts, Tokens
from pgra.lm.batching import send
from pgra.lm.load import batch_budget
from pgra.lm.transformers_lm import TransformersLM, head_logits

_PROBES = ("The answer is", "Question: who wrote it? The answer is not")
KEPT_BYTES = 1 << 29  # keys and values on a CPU
_KEPT_SHARE = 0.25  # of what is free on a GPU; they are copied when they are joined
_HEADROOM = 64  # tokens that may follow a prompt, where a batch of prompts is cut


@dataclass(frozen=True)
class KVCache:
    """Keys and values of R prompts that were read.

    Attributes:
        layers: Each layer's keys and values, (R, heads, S, width) each. A prompt's tokens are the
            first of its row; after `join` the last.
        lengths: Tokens of each prompt, (R,) int64, on the CPU.
        logits: Of the next token, (R, V) float32.
    """

    layers: list[tuple[Tensor, Tensor]]
    lengths: Tensor
    logits: Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        return int(self.layers[0][0].shape[2])

    def take(self, rows: Sequence[int]) -> "KVCache":
        """Return some of the prompts, in this order, perhaps repeated."""
        if list(rows) == list(range(len(self))):
            return self
        chosen = torch.tensor(rows, dtype=torch.long)
        layers = [(keys[chosen], values[chosen]) for keys, values in self.layers]
        return KVCache(layers, self.lengths[chosen], self.logits[chosen])


@torch.inference_mode()
def join(caches: Sequence[KVCache]) -> KVCache:
    """Join prompts of several caches in one, aligned at the right edge."""
    lengths = torch.cat([cache.lengths for cache in caches])
    logits = torch.cat([cache.logits for cache in caches])
    if len(caches) == 1 and bool((lengths == lengths.max()).all()):
        return caches[0]

    def align(tensors: Sequence[Tensor]) -> Tensor:
        rows = chain.from_iterable(tensors)
        texts = [row[:, :n].transpose(0, 1) for row, n in zip(rows, lengths.tolist(), strict=True)]
        return pad_sequence(texts, batch_first=True, padding_side="left").transpose(1, 2)

    layers = []
    for pairs in zip(*(cache.layers for cache in caches), strict=True):
        keys, values = zip(*pairs, strict=True)
        layers.append((align(keys), align(values)))
    return KVCache(layers, lengths, logits)


class PromptReader:
    """Reads prompts with a causal LM that has its head, and continues them."""

    def __init__(self, lm: TransformersLM, batch_tokens: int = 2048) -> None:
        """Take an LM, and the tokens of one batch on a CPU; a GPU takes more."""
        self.lm = lm
        self._is_checked = False
        most = batch_budget(batch_tokens, lm.device)
        self._cost = replace(batching.GroupCost.on(lm.device), max_tokens=most)
        self._back_off = lm.back_off(most)
        self._shared: tuple[Tokens, KVCache | None] = ((), None)  # the last shared beginning

    @torch.inference_mode()
    def read_batch(self, prompts: Prompts, *, start: KVCache | None = None) -> KVCache:
        """Read R prompts in one call; best those of similar lengths.

        With `start`, one prompt that all of these begin with, that is not read again; each has at
        least one token more.
        """
        skip = 0 if start is None else int(start.lengths[0])
        ids, mask = batching.pad([tokens[skip:] for tokens in prompts])
        lengths = mask.sum(1)
        cache = stock_cache([] if start is None else start.layers, len(ids))
        positions = skip + torch.arange(ids.shape[1]).expand_as(ids)
        # No mask: what is padded comes last, and an LM looks at no later token.
        logits = self._run(ids, positions, cache, (lengths - 1)[:, None])[:, 0]
        return KVCache(kept_layers(cache, skip + ids.shape[1]), skip + lengths, logits)

    @torch.inference_mode()
    def extend(self, cache: KVCache, tokens: Prompts) -> tuple[Tensor, Any]:
        """Run more tokens after R joined prompts; return logits, and a stock cache with all.

        Logits are (R, T, V) float32, T the longest list; invalid past the end of a shorter one.
        """
        ids, _ = batching.pad(tokens)
        columns = torch.arange(ids.shape[1]).expand_as(ids)
        longest = cache.longest
        mask = torch.arange(longest + ids.shape[1]) >= (longest - cache.lengths)[:, None]
        stock = stock_cache(cache.layers, len(cache))
        positions = cache.lengths[:, None] + columns
        return self._run(ids, positions, stock, columns, mask=mask.long()), stock

    def step(self, cache: KVCache, tokens: Tokens) -> KVCache:
        """Append one token to each of R joined prompts."""
        logits, stock = self.extend(cache, [[token] for token in tokens])
        layers = kept_layers(stock, cache.longest + 1)
        return KVCache(layers, cache.lengths + 1, logits[:, 0])

    def _run(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: Any,
        wanted: Tensor,
        *,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Run tokens (R, T) after a stock cache; return logits (R, W, V) of the wanted columns."""
        device = self.lm.device
        inputs = {
            "input_ids": send(ids, device),
            "position_ids": send(positions, device),
            "attention_mask": None if mask is None else send(mask, device),
            "past_key_values": cache,
            "use_cache": True,
        }
        rows = torch.arange(len(ids))[:, None]
        head = self.lm.head
        if head is None:
            columns, indices = torch.unique(wanted, return_inverse=True)
            logits: Tensor = self.lm.whole(**inputs, logits_to_keep=send(columns, device)).logits
            return logits[send(rows, logits.device), send(indices, logits.device)].float()
        hidden = self.lm.model(**inputs).last_hidden_state
        states = hidden[send(rows, hidden.device), send(wanted, hidden.device)]  # (R, W, H)
        return head_logits(head, states)

    def check(self) -> None:
        """Compare batches with prompts read alone, once.

        Raises:
            ModelError: If they differ: an LM that keeps something else than a key and a value for
                each token, such as Mamba.
        """
        if self._is_checked:
            return
        start, other = (self.lm.lead_ids + ids for ids in self.lm.tokenize(_PROBES))
        longer = [*start, *other]
        token = start[-1]
        texts = (start, longer, other)
        truth = torch.cat([next_logits(self.lm, [*ids, token])[-2:] for ids in texts])

        def side_by_side() -> Tensor:
            beginning = self.read_batch([start[:-1]])
            first = self.read_batch([start, longer], start=beginning)
            cache = join([first, self.read_batch([other])])
            logits = torch.stack([cache.logits, self.step(cache, [token] * 3).logits], dim=1)
            return logits.flatten(0, 1).to(truth.device)

        # All of a vocabulary's logits tell texts apart: no row is measured by its own share.
        fault = kernels.find_fault(side_by_side, truth, dtype=self.lm.dtype, noise=math.inf)
        if fault is not None:
            raise ModelError(f"'{self.lm.source.name}' cannot read prompts side by side ({fault})")
        self._is_checked = True

    @cached_property
    def room(self) -> int:
        """Tokens whose keys and values may be kept at a time."""
        most = KEPT_BYTES
        if self.lm.device.type == "cuda":
            most = int(_KEPT_SHARE * torch.cuda.mem_get_info(self.lm.device)[0])
        layers = self.read_batch([self.lm.lead_ids + self.lm.tokenize(_PROBES)[0]]).layers
        return most // sum(tensor[0, :, :1].nbytes for tensor in chain.from_iterable(layers))

    def read(self, prompts: Prompts) -> Iterator[tuple[list[int], KVCache]]:
        """Read prompts with the least padding and calls; yield rows of them and their caches.

        Raises:
            ModelError: If one prompt alone does not fit the memory.
        """
        for shared, rows in batching.group_by_prefix(prompts):
            yield from self._read_group(prompts, rows, shared)

    def _read_group(
        self, prompts: Prompts, rows: Sequence[int], shared: tuple[int, ...]
    ) -> Iterator[tuple[list[int], KVCache]]:
        skip = len(shared)
        if skip and shared != self._shared[0]:
            self._shared = ((), None)  # gone before the next is read
            self._shared = (shared, self.read_batch([shared]))
        start = self._shared[1] if skip else None
        lengths = np.array([len(prompts[row]) - skip for row in rows])
        most = max(1, self.room // (skip + int(lengths.max()) + _HEADROOM))

        def size(batch: Sequence[int]) -> int:
            return len(batch) * max(len(prompts[row]) - skip for row in batch)

        def run(batch: Sequence[int]) -> tuple[list[int], KVCache]:
            return list(batch), self.read_batch([prompts[row] for row in batch], start=start)

        batches = batching.group_by_length(lengths, self._cost)
        for batch in sorted(batches, key=lambda batch: -lengths[batch].max()):
            longest_first = [rows[index] for index in reversed(batch)]
            for first in range(0, len(batch), most):
                yield from self._back_off.run(longest_first[first : first + most], size, run)

    def read_joined(self, prompts: Prompts, num_new: int) -> Iterator[tuple[list[int], KVCache]]:
        """Read and join as many prompts as may be kept with so many new tokens each."""
        rows = list[int]()
        held = list[KVCache]()
        for more, cache in self.read(prompts):
            rows = rows + more
            held = [*held, cache]
            longest = max(len(prompts[row]) for row in rows) + num_new
            if (len(rows) + len(more)) * longest > self.room:
                yield rows, join(held)
                rows = []
                held = []
        if rows:
            yield rows, join(held)


def stock_cache(layers: Sequence[tuple[Tensor, Tensor]], rows: int) -> Any:
    """Return a cache of transformers with so many rows; a single row is expanded to all of them.

    Made without the LM's configuration, so that layers with a sliding window keep all tokens too:
    rows of different lengths would lose different ones, and the LM's mask hides them.
    """
    from transformers import DynamicCache

    cache = DynamicCache()
    for number, pair in enumerate(layers):
        keys, values = (tensor.expand(rows, -1, -1, -1) for tensor in pair)
        # Set, where `update` would copy them: they are copied once, when new ones are added.
        cache.update(keys[:, :, :0], values[:, :, :0], number)
        cache.layers[number].keys = keys
        cache.layers[number].values = values
    return cache


def kept_layers(cache: Any, length: int) -> list[tuple[Tensor, Tensor]]:
    """Return a stock cache's keys and values; ValueError if they are not of `length` tokens."""
    layers = [(layer.keys, layer.values) for layer in cache.layers]
    tensors = list(chain.from_iterable(layers))
    if not tensors or any(t.dim() != 4 or t.shape[2] != length for t in tensors):
        raise ValueError("a layer keeps something else than a key and a value for each token")
    return layers


@torch.inference_mode()
def next_logits(lm: TransformersLM, ids: Tokens) -> Tensor:
    """Return the logits after each of a text's tokens, (L, V) float32, without a cache."""
    whole = torch.tensor([list(ids)], device=lm.device)
    logits: Tensor = lm.whole(input_ids=whole, use_cache=False).logits
    return logits[0].float()
