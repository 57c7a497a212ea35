"""Greedy text and word scores of a causal LM, for many prompts at once.

Reading is bound by arithmetic, so small batches without padding are best; writing a token is bound
by reading the weights, so many prompts cost little more than one. Hence prompts are read in batches
by a token budget, a common beginning once, and wait until there are as many as the memory for keys
and values holds. Finished prompts leave, and others follow.

A prompt's keys and values are rows of a stock cache of transformers. While prompts are read they
are padded on the right, where no token sees the padding. For writing they are aligned at the right
edge, so that distances in the cache are those in the text, whatever an LM's attention does.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pgra.errors import ConfigError, ModelError
from pgra.lm import batching, kernels
from pgra.lm.base import Advance, Completion
from pgra.lm.batching import PrefixGroup, send
from pgra.lm.causal_lm import SHOWN, CausalLM, head_logits
from pgra.lm.load import batch_budget

logger = logging.getLogger(__name__)

Tokens = Sequence[int]
# given the tokens written so far, returns whether they are enough
IsDone = Callable[[Tokens], bool]

_PROBES = ("The answer is", "Question: who wrote it? The answer is not")
KEPT_BYTES = 1 << 29  # keys and values on a CPU
_KEPT_SHARE = 0.25  # of what is free on a GPU; they are copied when others join them
_HEADROOM = 64  # tokens that may follow a prompt, where a batch of prompts is cut
_DONE_SHARE = 4  # one in so many must be done before the others are moved together


@dataclass(frozen=True)
class KVCache:
    """Keys and values of R prompts that were read.

    Attributes:
        layers: Each layer's keys and values, (R, heads, S + room, width) each.
        lengths: Tokens of each prompt, (R,) int64, on the CPU.
        logits: Of the next token, (R, V) float32.
        is_right: Whether a prompt's tokens are the last of its row's S, not the first.
        room: Free columns after the tokens, for new ones, so that nothing is copied.
    """

    layers: list[tuple[Tensor, Tensor]]
    lengths: Tensor
    logits: Tensor
    is_right: bool = False
    room: int = 0

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        return int(self.layers[0][0].shape[2]) - self.room

    def take(self, rows: Sequence[int]) -> "KVCache":
        """Return some of the prompts, in this order, perhaps repeated."""
        if list(rows) == list(range(len(self))):
            return self
        chosen = torch.tensor(rows, dtype=torch.long)
        places = {part.device for layer in self.layers for part in layer}
        sent = {device: send(chosen, device) for device in places}
        layers = [(k[sent[k.device]], v[sent[v.device]]) for k, v in self.layers]
        logits = self.logits[send(chosen, self.logits.device)]
        return replace(self, layers=layers, lengths=self.lengths[chosen], logits=logits)


@torch.inference_mode()
def join(caches: Sequence[KVCache], *, room: int = 0) -> KVCache:
    """Join prompts of several caches in one, aligned at the right edge.

    A single cache is not copied, if possible. `room` columns are kept free after them, for new
    tokens.
    """
    first = caches[0]
    if len(caches) == 1 and first.is_right:
        return first
    if len(caches) == 1 and not room and bool((first.lengths == first.longest).all()):
        return replace(first, is_right=True)
    longest = max(int(cache.lengths.max()) for cache in caches)

    def lay(number: int, which: int) -> Tensor:
        parts = [cache.layers[number][which] for cache in caches]
        _, heads, _, width = parts[0].shape
        shape = (sum(map(len, caches)), heads, longest + room, width)
        joined, row = parts[0].new_empty(shape), 0
        for part, cache in zip(parts, caches, strict=True):
            for own, length in zip(part, cache.lengths.tolist(), strict=True):
                end = cache.longest if cache.is_right else length
                joined[row, :, : longest - length] = 0  # hidden, but it must be finite
                joined[row, :, longest - length : longest] = own[:, end - length : end]
                row += 1
        return joined

    layers = [(lay(number, 0), lay(number, 1)) for number in range(len(first.layers))]
    lengths = torch.cat([cache.lengths for cache in caches])
    logits = torch.cat([cache.logits for cache in caches])
    return KVCache(layers, lengths, logits, is_right=True, room=room)


class PromptReader:
    """Reads prompts with a causal LM that has its head, and continues them.

    `num_tokens` counts the tokens read so far, without padding.
    """

    def __init__(self, lm: CausalLM, batch_tokens: int = 2048) -> None:
        """Take an LM, and the tokens of one batch on a CPU; a GPU takes 16 times as many."""
        self.lm, self.num_tokens, self._is_checked = lm, 0, False
        most = batch_budget(batch_tokens, lm.device)
        self._cost = replace(batching.GroupCost.on(lm.device), max_tokens=most)
        self._back_off = lm.back_off(most)
        self._shared: tuple[Tokens, KVCache | None] = ((), None)  # the last shared beginning

    @torch.inference_mode()
    def read_batch(self, prompts: Sequence[Tokens], *, start: KVCache | None = None) -> KVCache:
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
    def extend(self, cache: KVCache, tokens: Sequence[Tokens]) -> tuple[Tensor, Any]:
        """Run more tokens after R joined prompts; return logits, and a stock cache with all.

        Logits are (R, T, V) float32, T the longest list; invalid past the end of a shorter one.
        """
        ids, _ = batching.pad(tokens)
        width = ids.shape[1]
        columns = torch.arange(width).expand_as(ids)
        mask = torch.arange(cache.longest + width) >= (cache.longest - cache.lengths)[:, None]
        stock = stock_cache(cache.layers, len(cache), room=cache.room, new=width)
        positions = cache.lengths[:, None] + columns
        return self._run(ids, positions, stock, columns, mask=mask.long()), stock

    @torch.inference_mode()
    def step(self, cache: KVCache, tokens: Tokens) -> KVCache:
        """Append one token to each of R joined prompts; uses up one column of their room."""
        logits, stock = self.extend(cache, [[token] for token in tokens])
        layers, room = kept_layers(stock, cache.longest + 1), 0
        if cache.room:
            layers, room = cache.layers, cache.room - 1
        return KVCache(layers, cache.lengths + 1, logits[:, 0], is_right=True, room=room)

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
        if self._head is None:
            columns, places = torch.unique(wanted, return_inverse=True)
            logits: Tensor = self.lm.whole(**inputs, logits_to_keep=send(columns, device)).logits
            return logits[send(rows, logits.device), send(places, logits.device)].float()
        hidden = self.lm.model(**inputs).last_hidden_state
        states = hidden[send(rows, hidden.device), send(wanted, hidden.device)]  # (R, W, H)
        return head_logits(self._head, states)

    @cached_property
    def _head(self) -> torch.nn.Linear | None:
        """The head, which reads states in float32; None where the LM does more to its logits."""
        try:
            return self.lm.head
        except ModelError as error:
            logger.info("logits are the LM's own, in %s: %s", self.lm.dtype, error)
            return None

    def check(self) -> None:
        """Compare batches with prompts read alone, once.

        Raises:
            ModelError: If they differ: an LM that keeps something else than a key and a value for
                each token, such as Mamba.
        """
        if self._is_checked:
            return
        start, other = (self.lm.lead_ids + ids for ids in self.lm.tokenize(_PROBES))
        longer, token = [*start, *other], start[-1]
        texts = (start, longer, other)
        whole = [*texts, *([*ids, token] for ids in texts)]
        truth = torch.stack([next_logits(self.lm, ids)[-1] for ids in whole])

        def side_by_side() -> Tensor:
            begun = self.read_batch([start[:-1]])
            blocks = [self.read_batch([start, longer], start=begun), self.read_batch([other])]
            cache = join(blocks, room=1)
            found = torch.cat([cache.logits, self.step(cache, [token] * 3).logits])
            return found.to(truth.device)

        # All of a vocabulary's logits tell texts apart: no row is measured by its own share.
        fault = kernels.find_fault(side_by_side, truth, dtype=self.lm.dtype, noise=math.inf)
        if fault is not None:
            raise ModelError(
                f"'{self.lm.source.name}' cannot read prompts side by side ({fault}): give a "
                "GPT-2, OPT, Llama, Qwen, ..., or ask it at an endpoint"
            )
        self._is_checked = True

    @cached_property
    def token_bytes(self) -> int:
        read = self.read_batch([self.lm.lead_ids + self.lm.tokenize(_PROBES)[0]])
        return max(1, sum(part[0, :, :1].nbytes for layer in read.layers for part in layer))

    @property
    def room(self) -> int:
        """Tokens whose keys and values may be kept at a time."""
        most = KEPT_BYTES
        if self.lm.device.type == "cuda":
            most = int(_KEPT_SHARE * torch.cuda.mem_get_info(self.lm.device)[0])
        return most // self.token_bytes

    def batches(self, prompts: Sequence[Tokens]) -> list[PrefixGroup]:
        """Cut prompts into batches with the least padding and calls; common beginnings together."""
        found, room = [], self.room if len(prompts) > 1 else 0
        for group in batching.group_by_prefix(prompts):
            own = np.array([len(prompts[row]) - len(group.shared) for row in group.rows])
            most = max(1, room // (len(group.shared) + int(own.max()) + _HEADROOM))
            batches = batching.group_by_length(own, self._cost)
            for places in sorted(batches, key=lambda places: -own[places].max()):
                rows = [group.rows[place] for place in reversed(places)]
                parts = [rows[i : i + most] for i in range(0, len(rows), most)]
                found += [replace(group, rows=part) for part in parts]
        return found

    def read(
        self, prompts: Sequence[Tokens], batch: PrefixGroup
    ) -> list[tuple[list[int], KVCache]]:
        """Read a batch; return rows and their caches, in parts where memory is short, in order.

        Raises:
            ModelError: If one prompt alone does not fit.
        """
        skip = len(batch.shared)

        def size(rows: Sequence[int]) -> int:
            return len(rows) * max(len(prompts[row]) - skip for row in rows)

        def run(rows: Sequence[int]) -> tuple[list[int], KVCache]:
            start = self._read_shared(batch.shared)
            cache = self.read_batch([prompts[row] for row in rows], start=start)
            self.num_tokens += sum(len(prompts[row]) - skip for row in rows)
            return list(rows), cache

        return self._back_off.run(batch.rows, size, run)

    def _read_shared(self, shared: tuple[int, ...]) -> KVCache | None:
        if shared and shared != self._shared[0]:
            self._shared = ((), None)  # gone before the next is read
            self._shared = (shared, self.read_batch([shared]))
            self.num_tokens += len(shared)
        return self._shared[1] if shared else None


def stock_cache(
    layers: Sequence[tuple[Tensor, Tensor]], rows: int, *, room: int = 0, new: int = 0
) -> Any:
    """Return a cache of transformers with so many rows; a single row is expanded to all of them.

    `room` columns at the layers' end are free; `new` tokens are written there, if they fit.

    Made without the LM's configuration, so that layers with a sliding window keep all tokens too:
    rows of different lengths would lose different ones, and the LM's mask hides them.
    """
    from transformers import DynamicCache

    cache = DynamicCache()
    for number, pair in enumerate(layers):
        keys, values = (part.expand(rows, -1, -1, -1) for part in pair)
        # Set, where `update` would copy them: they are copied once, when new ones are added.
        cache.update(keys[:, :, :0], values[:, :, :0], number)
        layer, used = cache.layers[number], keys.shape[2] - room
        layer.keys, layer.values = keys[:, :, :used], values[:, :, :used]
        if 0 < new <= room:
            kernels.update_in_place(layer, keys, values)
    return cache


def kept_layers(cache: Any, length: int) -> list[tuple[Tensor, Tensor]]:
    """Return a stock cache's keys and values; ValueError if they are not of `length` tokens."""
    layers = [(layer.keys, layer.values) for layer in cache.layers]
    if not layers or any(part.dim() != 4 or part.shape[2] != length for p in layers for part in p):
        raise ValueError("a layer keeps something else than a key and a value for each token")
    return layers


def write(
    reader: PromptReader,
    prompts: Sequence[Tokens],
    *,
    max_new_tokens: int,
    is_done: IsDone,
    advance: Advance = int,
) -> list[list[int]]:
    """Continue each prompt greedily; return the tokens written, in the order given.

    A GPU is synchronized once a step: which tokens were written decides who is done.

    Args:
        reader: Reads the prompts.
        prompts: Token ids, none empty; all fit the LM's window with the new tokens.
        max_new_tokens: Most new tokens of each.
        is_done: Called after each token; the token that ends a text is returned too.
        advance: Called with how many more prompts are done.

    Raises:
        ModelError: If a prompt does not fit the memory, or gives NaN or infinity.
    """
    written: list[list[int]] = [[] for _ in prompts]
    is_whole = [False] * len(prompts)

    def add(rows: Sequence[int], cache: KVCache) -> None:
        before = sum(is_whole)
        for row, token in zip(rows, _likeliest(cache.logits, reader.lm), strict=True):
            if not is_whole[row]:
                written[row].append(token)
                is_whole[row] = len(written[row]) >= max_new_tokens or is_done(written[row])
        advance(sum(is_whole) - before)

    def drop_done(rows: list[int], cache: KVCache, share: int) -> tuple[list[int], KVCache]:
        """Remove finished prompts if they are at least one in `share`: the rest must move."""
        left = [place for place, row in enumerate(rows) if not is_whole[row]]
        if left and (len(rows) - len(left)) * share < len(rows):
            return rows, cache
        return [rows[place] for place in left], cache.take(left)

    def fits(begun: Sequence[tuple[list[int], KVCache]], batch: PrefixGroup) -> bool:
        longest = max([len(prompts[row]) for row in batch.rows] + [c.longest for _, c in begun])
        count = len(batch.rows) + sum(len(rows) for rows, _ in begun)
        return not begun or count * (longest + max_new_tokens) <= room

    room, queue = reader.room, deque(reader.batches(prompts))
    free = max_new_tokens if kernels.are_allowed() else 0
    writing: list[tuple[list[int], KVCache]] = []
    while queue or writing:
        while queue and fits(writing, queue[0]):
            for rows, cache in reader.read(prompts, queue.popleft()):
                add(rows, cache)
                rows, cache = drop_done(rows, cache, share=len(rows))
                writing += [(rows, cache)] if rows else []
        if not writing:
            continue
        rows = [row for part, _ in writing for row in part]
        cache = join([part for _, part in writing], room=free)
        writing.clear()
        least = len(rows) // 2 if queue else 0
        while len(rows) > least:
            cache = reader.step(cache, [written[row][-1] for row in rows])
            add(rows, cache)
            rows, cache = drop_done(rows, cache, share=_DONE_SHARE)
        writing += [(rows, cache)] if rows else []
    return written


def _likeliest(logits: Tensor, lm: CausalLM) -> list[int]:
    best, tokens = logits.max(dim=1)
    found: list[int] = torch.where(torch.isfinite(best), tokens, -1).tolist()  # waited for once
    if -1 in found:
        raise lm.not_finite("for a prompt", "number")
    return found


def word_chances(
    reader: PromptReader,
    prompts: Sequence[Tokens],
    words: Sequence[Sequence[Tokens]],
    advance: Advance = int,
) -> list[list[float]]:
    """Return log P(word | prompt) over all of a word's tokens, a list for each prompt.

    `words` are for each prompt the token ids of its words. Prompts and words are not empty.

    Raises:
        ModelError: If a prompt does not fit the memory.
    """
    owners: list[tuple[int, int]] = []  # prompt and word of each token whose chance is held
    held: list[Tensor] = []

    def hold(chances: Tensor, places: Sequence[tuple[int, ...]]) -> None:
        if places:
            chosen = send(torch.tensor(places).T, chances.device)
            held.append(chances[tuple(chosen)])

    for batch in reader.batches(prompts):
        for rows, cache in reader.read(prompts, batch):
            pairs = [(place, i) for place, row in enumerate(rows) for i in range(len(words[row]))]
            own = [words[rows[place]][i] for place, i in pairs]
            firsts = [(place, word[0]) for (place, _), word in zip(pairs, own, strict=True)]
            hold(cache.logits.log_softmax(dim=1), firsts)
            owners += [(rows[place], i) for place, i in pairs]
            longer = [(pair, word) for pair, word in zip(pairs, own, strict=True) if len(word) > 1]
            joined = join([cache]) if longer else cache
            for start in range(0, len(longer), len(cache)):  # each copies what is kept of a prompt
                lines = longer[start : start + len(cache)]
                logits, _ = reader.extend(
                    joined.take([place for (place, _), _ in lines]), [w[:-1] for _, w in lines]
                )
                rest = [
                    (line, column, token)
                    for line, (_, word) in enumerate(lines)
                    for column, token in enumerate(word[1:])
                ]
                hold(logits.log_softmax(dim=2), rest)
                owners += [(rows[place], i) for (place, i), word in lines for _ in word[1:]]
            advance(len(rows))
    found: list[list[list[float]]] = [[[] for _ in own] for own in words]
    for (row, i), chance in zip(owners, torch.cat(held).tolist() if held else [], strict=True):
        found[row][i].append(chance)
    return [[first + sum(rest) for first, *rest in own] for own in found]


@torch.inference_mode()
def next_logits(lm: CausalLM, ids: Tokens) -> Tensor:
    """Return the logits after each of a text's tokens, (L, V) float32, without a cache."""
    whole = torch.tensor([list(ids)], device=lm.device)
    logits: Tensor = lm.whole(input_ids=whole, use_cache=False).logits
    return logits[0].float()


class LocalLM(CausalLM):
    """A causal LM with its head, which scores words and writes text: a `LanguageModel`."""

    def __init__(self, lm: Any, tokenizer: Any = None, **how: Any) -> None:
        super().__init__(lm, tokenizer, with_head=True, **how)

    def release(self) -> None:
        vars(self).pop("reader", None)
        super().release()

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of texts, (B,), including those that open every input."""
        return [len(ids) for ids in self._tokenize(texts)]

    def complete(
        self, prompts: Sequence[str], *, max_new_tokens: int, stop: str, advance: Advance = int
    ) -> list[Completion]:
        """Continue each prompt greedily until `stop`, the LM's own end, or `max_new_tokens`.

        This is KATE's LM call (Liu et al. 2022, section 3.3: temperature 0). The result is that of
        each prompt alone, whatever else is in the batch: in float32 exactly, except where two
        tokens are equally likely to the last digits; half precision has more such ties. A text may
        begin with a space, where the tokenizer makes it part of the first word.

        Raises:
            ConfigError: If a prompt is empty, or does not fit the window with what is written.
            ModelError: If the LM cannot be loaded, does not fit, or gives NaN or infinity.
        """

        def is_done(tokens: Tokens) -> bool:
            return tokens[-1] in self.ends or stop in self._text(tokens)

        ids = self._tokenize(prompts)
        self._check_room(prompts, ids, max_new_tokens)
        self.reader.check()
        with kernels.packed_for(self.whole, sum(map(len, ids))):
            written = write(
                self.reader, ids, max_new_tokens=max_new_tokens, is_done=is_done, advance=advance
            )
        return [
            Completion(self._text(tokens).split(stop)[0], len(prompt), len(tokens))
            for prompt, tokens in zip(ids, written, strict=True)
        ]

    def score(
        self, prompts: Sequence[str], words: Sequence[str], *, advance: Advance = int
    ) -> list[list[float]]:
        """Return the log-probability of all tokens of each word after each prompt.

        It is not divided by the word's tokens. A prompt is read once for all words; a word of
        several tokens costs those but its last. Errors are those of `complete`, and a ModelError
        if the tokenizer joins a word to the prompt before it.
        """
        pairs = [self.read_words(prompt, words) for prompt in prompts]
        ids, own = [prompt for prompt, _ in pairs], [after for _, after in pairs]
        self._check_room(prompts, ids, max((len(w) for line in own for w in line), default=0))
        self.reader.check()
        with kernels.packed_for(self.whole, sum(map(len, ids))):
            scores = word_chances(self.reader, ids, own, advance)
        if not all(math.isfinite(value) for values in scores for value in values):
            raise self.not_finite("for a prompt", "number")
        return scores

    def _check_room(
        self, prompts: Sequence[str], ids: Sequence[Tokens], max_new_tokens: int
    ) -> None:
        for number, (text, line) in enumerate(zip(prompts, ids, strict=True), 1):
            if not line:
                raise ConfigError(f"prompt {number} is empty: there is nothing to continue")
            if len(line) + max_new_tokens > self.window:
                raise ConfigError(
                    f"prompt {number} has {len(line)} tokens ({text[-SHOWN:]!r} at its end), and "
                    f"'{self.source.name}' holds {self.window} with the {max_new_tokens} that may "
                    "follow: use fewer exemplars (--num_exemplars), or an LM with a longer window"
                )

    def _text(self, tokens: Tokens) -> str:
        text: str = self.tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    @cached_property
    def reader(self) -> PromptReader:
        return PromptReader(self, self.how.lm_batch_tokens)

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens with which the LM ends a text by itself."""
        given = getattr(getattr(self.whole, "generation_config", None), "eos_token_id", None)
        ends = {*given} if isinstance(given, list) else {given}
        return frozenset({*ends, self.tokenizer.eos_token_id} - {None})
