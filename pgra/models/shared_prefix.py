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
from pgra.models.attention import attending, register
from pgra.models.causal_lm import CausalLM
from pgra.models.last_layer import LastLayer
from pgra.models.packing import RowLayout, pack_rows, send

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

    def run(self, own: Sequence[Sequence[int]], way: str) -> Tensor:
        """Run texts behind the prefix.

        Args:
            own: Token ids of n texts, without the prefix; those of like length in one call.
            way: One of `WAYS`.

        Returns:
            (n, H) in the LM's dtype, on its device: the state at each text's last token.
        """
        device, lengths = self.lm.device, [len(ids) for ids in own]
        if way == "cascade":
            rows = cascade.cascade_rows(len(own), device)
        else:
            rows = pack_rows(lengths, ROW_TOKENS if way == "packed" else 1)
        layout = RowLayout.of(lengths, rows)
        ids, positions = layout.place(own), layout.positions + len(self.ids)
        ends = send(layout.flat_ends, device)
        run = self._run_cascade if way == "cascade" else self._run_masked
        _ = self._prefix  # runs whole, before the last layer is shortened
        with torch.inference_mode(), self._last_layer.only_at(ends if self.is_short else None):
            hidden = run(send(ids, device), send(positions, device), layout)  # (R, T, H)
        states: Tensor = hidden.flatten(0, 1)[ends.to(hidden.device)]
        return states

    def cost_of(self, way: str) -> str:
        """Say what a way costs that the first of `WAYS` does not."""
        size = sum(keys.nbytes + values.nbytes for keys, values in self._prefix) / 1e6
        batch = f"{ROW_TOKENS} tokens" if way == "packed" else "text"
        return f"a mask, and a copy of the prefix's {size:.3g} MB for every {batch}"

    def _run_cascade(self, ids: Tensor, positions: Tensor, layout: RowLayout) -> Tensor:
        register(cascade.NAME, cascade.attend)
        spans = cascade.find_spans(layout, len(self.ids), self.lm.device)
        with attending(self.lm.model, cascade.NAME):
            hidden: Tensor = self.lm.model(
                input_ids=ids,
                position_ids=positions,
                # Any mask of four axes keeps transformers from making one; it is not looked at.
                attention_mask=torch.zeros(1, 1, 1, 1, dtype=self.lm.dtype, device=ids.device),
                use_cache=False,
                cascade=cascade.Cascade(self._prepared_prefix, spans),
            ).last_hidden_state
        return hidden

    def _run_masked(self, ids: Tensor, positions: Tensor, layout: RowLayout) -> Tensor:
        hidden: Tensor = self.lm.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=send(layout.mask(len(self.ids), self.lm.dtype), self.lm.device),
            past_key_values=self._cache(len(ids)),  # gone with its batch
            use_cache=True,
        ).last_hidden_state
        return hidden

    def _cache(self, rows: int) -> object:
        """Give a cache that begins with the prefix for so many rows, and holds it once.

        The LM lays a batch's keys behind it, and that makes the one copy that is needed.
        """
        from transformers import DynamicCache

        cache = DynamicCache(config=self.lm.config)
        for place, (keys, values) in enumerate(self._prefix):
            cache.update(keys, values, place)
            layer = cache.layers[place]
            layer.keys = layer.keys.expand(rows, -1, -1, -1)
            layer.values = layer.values.expand(rows, -1, -1, -1)
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
