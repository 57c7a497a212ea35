"""The last layer only where its output is wanted: at each text's last token.

A state is the last layer's output at one token a text, yet the layer works on all of them. Keys and
values are needed of every token; queries, the output projection and the feed-forward part only of
the last. Hooks around these modules gather the tokens before and lay the result back after, so the
saving is nearly one layer of all, whatever the layout of the batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# First and last module of each stretch that looks at one token at a time, by their names in the
# layers of Llama, Qwen, Mistral; OPT; GPT-2. Those that a layer lacks are passed over.
_STRETCHES = (
    ("self_attn.q_proj", "self_attn.q_proj"),
    ("self_attn.o_proj", "self_attn.o_proj"),
    ("self_attn.out_proj", "self_attn.out_proj"),
    ("attn.c_proj", "attn.c_proj"),
    ("fc1", "fc2"),
    ("mlp", "mlp"),
)


class LastLayer:
    """Hooks on a model's last layer, idle but inside `only_at`."""

    def __init__(self, model: Any) -> None:
        """Find the last layer, and the stretches of it that are known."""
        self._ends: Tensor | None = None
        layers = [
            module
            for module in model.modules()
            if isinstance(module, torch.nn.ModuleList)
            and len(module) == model.config.num_hidden_layers
        ]
        modules = dict(layers[0][-1].named_modules()) if layers else {}
        for first, last in _STRETCHES:
            if first in modules and last in modules:
                _Stretch(self).around(modules[first], modules[last])

    @contextmanager
    def only_at(self, ends: Tensor | None) -> Iterator[None]:
        """Compute the last layer's output right at these tokens only.

        Args:
            ends: Places among the batch's R*T tokens, (n,) int64; None for all of them.
        """
        self._ends = ends
        try:
            yield
        finally:
            self._ends = None

    @property
    def ends(self) -> Tensor | None:
        """Give the tokens that are wanted now; None for all."""
        return self._ends


class _Stretch:
    """Gathers tokens before a stretch of modules, and lays the results back after it."""

    def __init__(self, layer: LastLayer) -> None:
        self._layer = layer
        self._shape = torch.Size()

    def around(self, first: torch.nn.Module, last: torch.nn.Module) -> None:
        first.register_forward_pre_hook(self._gather)
        last.register_forward_hook(self._lay_back)

    def _gather(self, _: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        ends = self._layer.ends
        if ends is None:
            return None
        self._shape = args[0].shape[:-1]
        return (args[0].flatten(0, -2)[ends.to(args[0].device)], *args[1:])

    def _lay_back(self, _: torch.nn.Module, __: tuple[Tensor, ...], out: Tensor) -> Tensor | None:
        ends = self._layer.ends
        if ends is None:
            return None
        whole = out.new_zeros(self._shape.numel(), out.shape[-1])
        whole[ends.to(out.device)] = out
        return whole.view(*self._shape, -1)
