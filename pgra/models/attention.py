"""Attentions of our own in models of transformers: known by name, and chosen for a while.

Nothing in a model is replaced: its layers ask the attention interface for the name they were told.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor

Attention = Callable[..., tuple[Tensor, Tensor | None]]


@cache
def register(name: str, attention: Attention) -> None:
    """Make an attention known to transformers, once; its masks are those of sdpa."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, AttentionMaskInterface()["sdpa"])


@contextmanager
def attending(model: Any, name: str) -> Iterator[None]:
    """Let a model attend in the way of that name; its own is back afterwards."""
    before = model.config._attn_implementation  # there is no other way to ask
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def stock_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Attend as sdpa does, with what a model gives an attention."""
    from transformers import AttentionInterface

    out: tuple[Tensor, None] = AttentionInterface()["sdpa"](*args, **kwargs)
    return out
