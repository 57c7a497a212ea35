"""Attention in two parts: to a shared prefix that stands once, and to a text's own tokens.

Softmax attention over two sets of keys is the mean of the two attentions, weighted by their sums of
exponentials (Juravsky et al. 2024, Hydragen, eq. 4-6; the merge is that of FlashAttention, Dao et
al. 2022). So the prefix's keys and values are never copied behind any text, all texts' queries meet
them in one matrix product, and no mask is needed. Models get it by name through the attention
interface of transformers; nothing in them is replaced.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor

from pgra.models.attention import stock_attention
from pgra.models.packing import RowLayout, send

NAME = "pgra_cascade"
"""The attention implementation's name in transformers."""

_UNKNOWN = ("sliding_window", "softcap", "s_aux")  # change the weights in ways not followed here


@dataclass(frozen=True)
class Cascade:
    """What the attention is told with each call, as the keyword `cascade`.

    Attributes:
        prefix: For each layer the prefix's keys and values, (1, heads, S, width) each.
        spans: On a GPU, where each text stands in the one row; None where each has its own row.
    """

    prefix: Sequence[tuple[Tensor, Tensor]]
    spans: "Spans | None" = None


@dataclass(frozen=True)
class Spans:
    """Where sequences start and where the last ends, as a GPU's kernel for many lengths wants it.

    Attributes:
        texts: (n + 1,) int32, of n texts side by side.
        longest: Tokens of the longest text.
        row: (2,) int32, all texts as one sequence.
        prefix: (2,) int32, the prefix.
    """

    texts: Tensor
    longest: int
    row: Tensor
    prefix: Tensor

    @classmethod
    def of(cls, lengths: Tensor, prefix_tokens: int, device: torch.device) -> Self:
        """Say it for texts of these lengths, (n,), in one copy to the device."""
        ends = torch.cumsum(lengths, 0)
        fixed = torch.tensor([0, prefix_tokens, 0])
        values = send(torch.cat([fixed, ends[-1:], ends.new_zeros(1), ends]).int(), device)
        return cls(values[4:], int(lengths.max()), row=values[2:4], prefix=values[:2])


def takes_one_row(device: torch.device) -> bool:
    """Say whether a device's kernel takes texts of different lengths side by side: a GPU's does."""
    return device.type == "cuda"


def cascade_rows(count: int, device: torch.device) -> list[list[int]]:
    """Say in which rows the texts must stand: one row for all on a GPU, else a row each.

    A CPU's kernel takes texts of equal lengths, so there the batch is padded, which costs little
    when texts of like length are together.
    """
    return [list(range(count))] if takes_one_row(device) else [[i] for i in range(count)]


def prepare_prefix(
    prefix: Sequence[tuple[Tensor, Tensor]], heads: int
) -> list[tuple[Tensor, Tensor]]:
    """Give a prefix's keys and values as the kernel of their device wants them.

    A GPU's takes fewer key heads than query heads; for a CPU's they are repeated, once.
    """
    if takes_one_row(prefix[0][0].device):
        return list(prefix)
    return [(_widen(keys, heads), _widen(values, heads)) for keys, values in prefix]


def find_spans(layout: RowLayout, prefix_tokens: int, device: torch.device) -> Spans | None:
    """Say where the texts of a batch stand that was laid out by `cascade_rows`."""
    if not takes_one_row(device):
        return None
    return Spans.of(layout.lengths, prefix_tokens, device)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    cascade: Cascade | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend to the prefix and to a text's own earlier tokens; without `cascade` as sdpa does.

    Args:
        module: The attention layer; its `layer_idx` says which of the prefix's keys are meant.
        query: (R, heads, T, width).
        key: (R, key heads, T, width) of the own tokens.
        value: The same.
        attention_mask: Not looked at with `cascade`: rows are padded on the right.
        scaling: Of the scores; None is one over the root of the width.
        cascade: The shared prefix.
        **kwargs: As the model gives them.

    Returns:
        (R, T, heads, width), and None for the weights.

    Raises:
        ValueError: If the model weighs its keys in a way that is not followed here.
    """
    if cascade is None:
        return stock_attention(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    for name in _UNKNOWN:
        if kwargs.get(name) is not None:
            raise ValueError(f"an attention with {name} cannot be taken in two parts")
    prefix = cascade.prefix[module.layer_idx]
    if cascade.spans is None:
        return _attend_rows(query, key, value, prefix, scaling), None
    return _attend_flat(query, key, value, prefix, cascade.spans, scaling), None


def _attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix: tuple[Tensor, Tensor],
    scaling: float | None,
) -> Tensor:
    """Take a row a text, padded on the right: to the prefix all rows as one, then each its own."""
    R, heads, T, width = query.shape
    # Views only: models and kernel alike keep (R, T, heads, width) in memory.
    folded = query.transpose(1, 2).reshape(1, R * T, heads, width).transpose(1, 2)
    far, far_lse = _attend_cpu(folded, *prefix, scaling, is_causal=False)
    far, far_lse = far.transpose(1, 2).view(R, T, heads, width), far_lse.transpose(1, 2)
    near, near_lse = _attend_cpu(query, _widen(key, heads), _widen(value, heads), scaling)
    return _merge(far, far_lse.reshape(R, T, heads), near.transpose(1, 2), near_lse.transpose(1, 2))


def _widen(keys: Tensor, heads: int) -> Tensor:
    """Repeat keys or values for the query heads that share them."""
    repeats = heads // keys.shape[1]
    return keys.repeat_interleave(repeats, dim=1) if repeats > 1 else keys


def _attend_cpu(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, *, is_causal: bool = True
) -> tuple[Tensor, Tensor]:
    # What scaled_dot_product_attention runs on a CPU; itself it does not give the sums. The name is
    # torch's own affair: should it change, the self-check at the start takes another way.
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=None, scale=scaling
    )
    return out, lse


def _attend_flat(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix: tuple[Tensor, Tensor],
    spans: Spans,
    scaling: float | None,
) -> Tensor:
    """Take one row of texts side by side, with nothing between them, on a GPU."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, heads, width)
    far_k, far_v = (x[0].transpose(0, 1) for x in prefix)
    # With the layers spread over several GPUs, the spans follow them.
    row, behind, texts = (x.to(q.device) for x in (spans.row, spans.prefix, spans.texts))
    longest = spans.longest
    how: dict[str, Any] = {"scale": scaling, "return_aux": AuxRequest(lse=True)}
    if q.shape[1] != k.shape[1] and _must_be_told_of_gqa(varlen_attn):
        how["enable_gqa"] = True
    far, far_lse = varlen_attn(q, far_k, far_v, row, behind, len(q), len(far_k), **how)
    near, near_lse = varlen_attn(
        q, k, v, texts, texts, longest, longest, window_size=(-1, 0), **how
    )
    return _merge(far, far_lse.T, near, near_lse.T)[None]  # (1, T, heads, width)


@cache
def _must_be_told_of_gqa(varlen_attn: Callable[..., object]) -> bool:
    """Say whether fewer key heads must be announced; torch 2.11 takes them without a word."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _merge(far: Tensor, far_lse: Tensor, near: Tensor, near_lse: Tensor) -> Tensor:
    """Weigh two attentions by their sums of exponentials, given as logarithms."""
    share = torch.sigmoid(far_lse - near_lse)[..., None].to(near.dtype)
    return torch.lerp(near, far, share)
