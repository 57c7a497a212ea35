"""Texts behind a prefix that is run once, in one of several ways that give the same states.

cascade   attention in two parts; the prefix's keys and values stand once (`pgra.models.cascade`)
packed    rows of many texts behind a copy of the prefix each, with a mask; stock calls only
expanded  a row a text, a copy of the prefix behind each; stock calls only
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from pgra.models import cascade
from pgra.models.causal_lm import CausalLM
from pgra.models.last_layer import LastLayer
from pgra.models.packing import RowLayout, pack_rows

WAYS = ("cascade", "packed", "expanded")
ROW_TOKENS = 512  # own tokens behind one copy of the prefix: more cost attention, fewer copies


class SharedPrefix:
    """The state of an LM after a prefix, and texts run from there."""

    def __init__(self, lm: CausalLM, ids: Sequence[int], *, is_short: bool = True) -> None:
        """Remember what is to be shared; nothing runs yet.

        Args:
            lm: The LM.
            ids: The prefix's tokens.
            is_short: Whether the last layer works only where its output is wanted.
        """
        self.lm, self.ids, self.is_short = lm, list(ids), is_short
        self._caches: dict[int, object] = {}

    def run(self, own: Sequence[Sequence[int]], way: str) -> Tensor:
        """Run texts behind the prefix.

        Args:
            own: Token ids of n texts, without the prefix; those of like length in one call.
            way: One of `WAYS`.

        Returns:
            (n, H) in the LM's dtype, on its device: the state at each text's last token.
        """
        lengths = [len(ids) for ids in own]
        if way == "cascade":
            rows = cascade.cascade_rows(len(own), self.lm.device)
        else:
            rows = pack_rows(lengths, ROW_TOKENS if way == "packed" else 1)
        layout = RowLayout.of(lengths, rows)
        ids, positions = layout.place(own), layout.positions + len(self.ids)
        ends = self._send(layout.flat_ends)
        run = self._run_cascade if way == "cascade" else self._run_masked
        _ = self._prefix  # runs whole, before the last layer is shortened
        with torch.inference_mode(), self._last_layer.only_at(ends if self.is_short else None):
            hidden = run(self._send(ids), self._send(positions), layout)  # (R, T, H)
        states: Tensor = hidden.flatten(0, 1)[ends.to(hidden.device)]
        return states

    def forget(self) -> None:
        """Let go of copies of the prefix, to make room."""
        self._caches.clear()

    def _send(self, values: Tensor) -> Tensor:
        """Send to the LM's device without waiting for what it does now."""
        if self.lm.device.type == "cuda":
            return values.pin_memory().to(self.lm.device, non_blocking=True)
        return values.to(self.lm.device)

    def _run_cascade(self, ids: Tensor, positions: Tensor, layout: RowLayout) -> Tensor:
        cascade.register()
        before = self.lm.model.config._attn_implementation  # there is no other way to ask
        self.lm.model.set_attn_implementation(cascade.NAME)
        spans = cascade.find_spans(layout, len(self.ids), self.lm.device)
        try:
            hidden: Tensor = self.lm.model(
                input_ids=ids,
                position_ids=positions,
                # Any mask of four axes keeps transformers from making one; it is not looked at.
                attention_mask=torch.zeros(1, 1, 1, 1, dtype=self.lm.dtype, device=ids.device),
                use_cache=False,
                cascade=cascade.Cascade(self._prepared_prefix, spans),
            ).last_hidden_state
        finally:
            self.lm.model.set_attn_implementation(before)
        return hidden

    def _run_masked(self, ids: Tensor, positions: Tensor, layout: RowLayout) -> Tensor:
        rows = len(ids)
        cache = self._cache(rows)
        hidden: Tensor = self.lm.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=self._send(layout.mask(len(self.ids), self.lm.dtype)),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        cache.crop(-ids.shape[1])  # type: ignore[attr-defined]
        self._caches = {rows: cache}  # kept for the next batch, which mostly has as many rows
        return hidden

    def _cache(self, rows: int) -> object:
        """Give a cache that holds the prefix for so many rows."""
        if rows in self._caches:
            return self._caches.pop(rows)
        from transformers import DynamicCache

        cache = DynamicCache(config=self.lm.config)
        for layer, (keys, values) in enumerate(self._prefix):
            shape = (rows, *keys.shape[1:])
            cache.update(keys.expand(shape), values.expand(shape), layer)
        return cache

    @cached_property
    def _prefix(self) -> list[tuple[Tensor, Tensor]]:
        """Run the prefix: a (1, heads, S, width) key and value for each layer."""
        ids = torch.tensor([self.ids], device=self.lm.device)
        with torch.inference_mode():
            cache = self.lm.model(
                input_ids=ids,
                position_ids=torch.arange(ids.shape[1], device=self.lm.device)[None],
                use_cache=True,
            ).past_key_values
        return [(layer.keys, layer.values) for layer in cache.layers]

    @cached_property
    def _prepared_prefix(self) -> list[tuple[Tensor, Tensor]]:
        return cascade.prepare_prefix(self._prefix, self.lm.config.num_attention_heads)

    @cached_property
    def _last_layer(self) -> LastLayer:
        return LastLayer(self.lm.model)
