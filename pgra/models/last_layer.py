"""The last layer only where its output is wanted: at each text's last token.

A state is the last layer's output at one token a text, yet the layer works on all of them. Keys and
values are needed of every token; queries, the output projection and the feed-forward part only of
the last. Hooks around these modules gather the tokens before and lay the result back after, so the
saving is nearly one layer of all, whatever the layout of the batch.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

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
    """Hooks on a model's last layer, there only inside `only_at`."""

    def __init__(self, model: Any) -> None:
        """Find the last layer, and the stretches of it that are known."""
        layers = [
            module
            for module in model.modules()
            if isinstance(module, torch.nn.ModuleList)
            and len(module) == model.config.num_hidden_layers
        ]
        modules = dict(layers[0][-1].named_modules()) if layers else {}
        self._stretches = [
            (modules[first], modules[last])
            for first, last in _STRETCHES
            if first in modules and last in modules
        ]

    @contextmanager
    def only_at(self, ends: Tensor | None) -> Iterator[None]:
        """Compute the last layer's output right at these tokens only.

        Args:
            ends: Places among the batch's R*T tokens, (n,) int64; None for all of them.
        """
        with ExitStack() as hooks:
            if ends is not None:
                for first, last in self._stretches:
                    for handle in _Stretch(ends).around(first, last):
                        hooks.callback(handle.remove)
            yield


class _Stretch:
    """Gathers tokens before a stretch of modules, and lays the results back after it."""

    def __init__(self, ends: Tensor) -> None:
        self._ends = ends
        self._shape = torch.Size()

    def around(self, first: torch.nn.Module, last: torch.nn.Module) -> list[RemovableHandle]:
        return [
            first.register_forward_pre_hook(self._gather),
            last.register_forward_hook(self._lay_back),
        ]

    def _gather(self, _: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self._shape = args[0].shape[:-1]
        return (args[0].flatten(0, -2)[self._ends.to(args[0].device)], *args[1:])

    def _lay_back(self, _: torch.nn.Module, __: tuple[Tensor, ...], out: Tensor) -> Tensor:
        whole = out.new_zeros(self._shape.numel(), out.shape[-1])
        whole[self._ends.to(out.device)] = out
        return whole.view(*self._shape, -1)
