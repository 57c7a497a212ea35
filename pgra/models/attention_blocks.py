"""Causal attention of whole prompts on a CPU, a block of queries at a time.

A block's queries see no key behind the block's end, so the stock kernel is given the keys up to
there. Of several prompts that takes less time than all queries at once (`benchmarks/icl.py` tells
how much). Models get it by name through the attention interface of transformers; nothing in them is
replaced.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from pgra.models.attention import attending, register, stock_attention

NAME = "pgra_blocks"
"""The attention implementation's name in transformers."""

_BLOCK = 64  # queries; with 32 or 128 the same to a few percent
# What the stock attention is told that would change the weights.
_UNKNOWN = ("is_causal", "position_bias", "cache", "softcap")


@contextmanager
def in_blocks(model: Any) -> Iterator[None]:
    """Let a model attend in blocks while it reads on a CPU; elsewhere nothing changes.

    States agree with the stock ones to rounding.

    Args:
        model: Of transformers; one that was given another attention than sdpa keeps it.
    """
    if model.device.type != "cpu" or model.config._attn_implementation != "sdpa":
        yield
        return
    register(NAME, attend)
    with attending(model, NAME):
        yield


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend to earlier tokens; the stock way where there is more to it, or nothing to cut.

    Args:
        module: The attention layer.
        query: (R, heads, T, width).
        key: (R, key heads, S, width); heads that share keys stand side by side.
        value: The same; its width may be another.
        attention_mask: With one, the stock way is taken.
        scaling: Of the scores; None is one over the root of the width.
        dropout: With any, the stock way is taken.
        **kwargs: As the model gives them.

    Returns:
        (R, T, heads, the values' width), and None for the weights.
    """
    R, heads, T, _ = query.shape
    is_causal = getattr(module, "is_causal", True)
    is_told = attention_mask is not None or any(kwargs.get(n) is not None for n in _UNKNOWN)
    if is_told or dropout or not is_causal or key.shape[2] != T or T <= _BLOCK:
        return stock_attention(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    # Row i hides what is behind column T + i: its last columns are any block's own keys.
    hidden = query.new_full((_BLOCK, T + _BLOCK), float("-inf")).triu(T + 1)
    out = query.new_empty(R, T, heads, value.shape[3])
    for start in range(0, T, _BLOCK):
        end = min(T, start + _BLOCK)
        seen = F.scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, :end],
            value[:, :, :end],
            attn_mask=hidden[: end - start, T - start : T - start + end],
            scale=scaling,
            enable_gqa=key.shape[1] != heads,
        )
        out[:, start:end] = seen.transpose(1, 2)
    return out, None
