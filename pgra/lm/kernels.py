"""Fast ways through an LM or a T5, each checked against the stock way.

    cascade          attention to a shared prefix that is stored once, and to a text's own tokens
    packed weights   laid out once for oneDNN, for float32 inference on a CPU
    encoded tokens   a T5 decoder's cross-attention without keys and values of them
    norms            a T5's by torch's own function, on a GPU one operation each

All that depends on internals of torch and transformers is here, with one switch: the environment
variable `PGRA_FAST_KERNELS=off` gives stock calls only. Else a kernel is compared with the stock
way when a model first uses it, on real input, and dropped with one warning where it differs, is
missing or raises. `pgra.lm.prefix` compares cascade on whole prompts by `find_fault`; the others
compare themselves, layer by layer (`_is_trusted`), except norms, which are a function of torch's.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import MethodType
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pgra.context import machine_memory
from pgra.lm.batching import send

logger = logging.getLogger(__name__)

OTHER_VALUES = "it gives other values than the stock way"
_FAILURES = (AttributeError, TypeError, ValueError, RuntimeError, IndexError)
# Prompted states are nearly one vector: what tells texts apart is a tenth of their length or less
# (SmolLM2-135M after 8 exemplars: 6 to 7 %). So in half precision an error counts against that.
_OWN_SHARE = {torch.bfloat16: 1 / 3, torch.float16: 1 / 24}  # of its rounding: 8 bits, and 11
_TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.05 / 8}
_NOISE_TIMES = 2.0  # the same prompts in another batch differ too, there by up to a fifth of it


def are_allowed() -> bool:
    return os.environ.get("PGRA_FAST_KERNELS") != "off"


def tolerance(dtype: torch.dtype) -> float:
    """Return how far two computations of a vector may differ, relative to its length."""
    return _TOLERANCE.get(dtype, 1e-4)


def find_fault(fast: "Way", truth: Tensor, *, dtype: torch.dtype, noise: float = 0.0) -> str | None:
    """Return why a fast way cannot be used; None if its values are those of the stock way.

    A row's distance to the truth must be within `tolerance` of its length. In half precision that
    is coarse, so it must also be within a share of the row's own part (the truth less the mean of
    the truths): a third in bfloat16, an eighth of that in float16.

    Args:
        fast: Computes (c * n, D): the n rows, c times.
        truth: The stock way's, (n, D).
        dtype: What both were computed in.
        noise: A distance that has other causes; twice as much always passes the second test.
    """
    whole = truth.float()
    try:
        off = fast().float().view(-1, *whole.shape) - whole  # (c, n, D)
    except _FAILURES as error:  # out of memory too: then the way takes more than there is
        return f"{type(error).__name__}: {error}".splitlines()[0]
    most = tolerance(dtype) * torch.linalg.vector_norm(whole, dim=1)
    if dtype in _OWN_SHARE and len(whole) > 1:
        spread = torch.linalg.vector_norm(whole - whole.mean(0), dim=1)
        most = most.minimum((_OWN_SHARE[dtype] * spread).clamp(min=_NOISE_TIMES * noise))
    is_same = bool((torch.linalg.vector_norm(off, dim=2) <= most).all())
    return None if is_same else OTHER_VALUES


Way = Callable[[], Tensor]


_compared: "WeakKeyDictionary[nn.Module, dict[tuple[object, ...], bool]]" = WeakKeyDictionary()


def _is_trusted(part: nn.Module, kernel: str, fast: Way, stock: Way, at: Tensor) -> bool:
    """Return whether a part may use a kernel; at its first use on a device it is compared."""
    if not are_allowed():
        return False
    verdicts = _compared.setdefault(part, {})
    key = (kernel, at.device.type, at.dtype, torch.is_autocast_enabled(at.device.type))
    if key not in verdicts:
        with torch.no_grad():
            truth = stock()
            dtype = truth.dtype
            if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
                dtype = torch.bfloat16  # of its precision, or near it
            # As one vector: a part's rows differ far more than the states of whole texts.
            reason = find_fault(lambda: fast().reshape(1, -1), truth.reshape(1, -1), dtype=dtype)
        verdicts[key] = reason is None
        if reason is not None:
            _warn(kernel, reason)
    return verdicts[key]


@cache
def _warn(kernel: str, reason: str) -> None:
    logger.warning("%s does not work here (%s): the stock way is slower", kernel, reason)


@contextmanager
def attending(model: Any, name: str, attention: Callable[..., Any]) -> Iterator[None]:
    """Replace a model's attention inside the block, under a name; its masks are those of sdpa."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, AttentionMaskInterface()["sdpa"])
    before = model.config._attn_implementation  # there is no other way to ask
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


# Attention in two parts: to a shared prefix that is stored once, and to a text's own tokens.
#
# Softmax attention over two sets of keys is the mean of the two attentions, weighted by their
# sums of exponentials (Juravsky et al. 2024, Hydragen, eq. 4-6; the merge is that of
# FlashAttention, Dao et al. 2022). So the prefix's keys and values are never copied for any
# text, all texts' queries meet them in one matrix product, and no mask is needed. Models get it
# by name through the attention interface of transformers; nothing in them is replaced.


NAME = "pgra_cascade"  # the attention implementation's name in transformers

_UNKNOWN = ("sliding_window", "softcap", "s_aux")  # change the weights in ways not followed here


@dataclass(frozen=True)
class Cascade:
    """What the attention gets as the keyword `cascade`; `spans` on a GPU, where texts share a row.

    `prefix` holds for each layer the prefix's keys and values, (1, heads, S, width) each.
    """

    prefix: Sequence[tuple[Tensor, Tensor]]
    spans: "Spans | None" = None


@dataclass(frozen=True)
class Spans:
    """Sequence borders, int32, as a GPU's variable-length kernel reads them.

    `texts` (n + 1,) are of n texts side by side, `row` (2,) is all texts as one sequence, `prefix`
    (2,) the prefix.
    """

    texts: Tensor
    longest: int
    row: Tensor
    prefix: Tensor

    @classmethod
    def of(cls, lengths: Tensor, prefix_tokens: int, device: torch.device) -> Self:
        """Return the spans of texts of these lengths, (n,), by one copy to the device."""
        ends = torch.cumsum(lengths, 0)
        fixed = torch.tensor([0, prefix_tokens, 0])
        values = send(torch.cat([fixed, ends[-1:], ends.new_zeros(1), ends]).int(), device)
        return cls(values[4:], int(lengths.max()), row=values[2:4], prefix=values[:2])


def takes_one_row(device: torch.device) -> bool:
    """Return whether a device's kernel takes texts of several lengths in one row: only a GPU's."""
    return device.type == "cuda"


def prepare_prefix(
    prefix: Sequence[tuple[Tensor, Tensor]], heads: int
) -> list[tuple[Tensor, Tensor]]:
    """Return a prefix's keys and values for its device's kernel: a CPU needs all query heads."""
    if takes_one_row(prefix[0][0].device):
        return list(prefix)
    return [(_widen(keys, heads), _widen(values, heads)) for keys, values in prefix]


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    cascade: Cascade,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend to the prefix and to a text's own earlier tokens.

    Args:
        module: The attention layer; its `layer_idx` selects the prefix's keys.
        query: (R, heads, T, width).
        key: (R, key heads, T, width) of the own tokens.
        value: As `key`.
        _mask: Not looked at: rows are padded on the right.
        cascade: The shared prefix.
        scaling: Of the scores; None is one over the root of the width.
        **kwargs: As the model gives them; ValueError for those that change the weights.

    Returns:
        (R, T, heads, width), and None for the weights.
    """
    for name in _UNKNOWN:
        if kwargs.get(name) is not None:
            raise ValueError(f"an attention with {name} cannot be taken in two parts")
    prefix = cascade.prefix[module.layer_idx]
    if cascade.spans is None:
        return _attend_rows(query, key, value, prefix, scaling), None
    return _attend_flat(query, key, value, prefix, cascade.spans, scaling), None


def _attend_rows(
    query: Tensor, key: Tensor, value: Tensor, prefix: tuple[Tensor, Tensor], scaling: float | None
) -> Tensor:
    """Attend with a row for each text, padded on the right; the prefix sees all rows as one."""
    R, heads, T, width = query.shape
    # Views only: models and kernel alike keep (R, T, heads, width) in memory.
    folded = query.transpose(1, 2).reshape(1, R * T, heads, width).transpose(1, 2)
    far, far_lse = _attend_cpu(folded, *prefix, scaling, is_causal=False)
    far = far.transpose(1, 2).view(R, T, heads, width)
    far_lse = far_lse.transpose(1, 2)
    near, near_lse = _attend_cpu(query, _widen(key, heads), _widen(value, heads), scaling)
    return _merge(far, far_lse.reshape(R, T, heads), near.transpose(1, 2), near_lse.transpose(1, 2))


def _widen(keys: Tensor, heads: int) -> Tensor:
    repeats = heads // keys.shape[1]
    return keys.repeat_interleave(repeats, dim=1) if repeats > 1 else keys


def _attend_cpu(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, *, is_causal: bool = True
) -> tuple[Tensor, Tensor]:
    # What scaled_dot_product_attention runs on a CPU; itself it does not give the sums. The name is
    # private to torch: should it change, the check at the start takes another way.
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
    """Attend with all texts side by side in one row, on a GPU."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, heads, width)
    far_k, far_v = (x[0].transpose(0, 1) for x in prefix)
    # With the layers spread over several GPUs, the spans follow them.
    row, before, texts = (x.to(q.device) for x in (spans.row, spans.prefix, spans.texts))
    longest = spans.longest
    attend = partial(
        varlen_attn,
        q,
        scale=scaling,
        return_aux=AuxRequest(lse=True),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    far, far_lse = attend(far_k, far_v, row, before, len(q), len(far_k))
    near, near_lse = attend(k, v, texts, texts, longest, longest, window_size=(-1, 0))
    return _merge(far, far_lse.T, near, near_lse.T)[None]  # (1, T, heads, width)


def _merge(far: Tensor, far_lse: Tensor, near: Tensor, near_lse: Tensor) -> Tensor:
    """Average two attentions, weighted by their log-sum-exps."""
    share = torch.sigmoid(far_lse - near_lse)[..., None].to(near.dtype)
    return torch.lerp(near, far, share)


# Linear layers with weights laid out once for oneDNN, while a float32 model only reads on a CPU.
#
# torch multiplies float32 by MKL, which lays a weight out anew in every call. oneDNN takes
# weights laid out beforehand. Inductor does the same when it freezes a model, after minutes of
# compiling.


MANY_TOKENS = 4096  # packing takes as long as reading some hundred tokens
_SHARE = 0.25  # of the machine's memory, for the packed copies


@contextmanager
def packed_for(module: nn.Module, num_tokens: int = MANY_TOKENS) -> Iterator[None]:
    """Use packed copies of a module's linear layers inside the block, if so many tokens justify it.

    Results agree to rounding. Layers stay as they are where this does not help (not on a CPU, not
    float32, under autocast, oneDNN absent, too little memory), and where they are more than an
    `nn.Linear`. Weights must not change, and there are no gradients. No copy is kept afterwards.
    """
    is_there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    is_useful = is_there and num_tokens >= MANY_TOKENS and not torch.is_autocast_enabled("cpu")
    packed: list[Any] = []
    if is_useful:
        packed = [layer for layer in module.modules() if _is_plain(layer)]
    is_large = sum(layer.weight.nbytes for layer in packed) > _SHARE * machine_memory()
    if is_large or not all(map(_is_packed_same, packed[:1])):
        packed = []
    for layer in packed:
        layer.forward = _pack(layer)
    try:
        with torch.inference_mode(bool(packed)):
            yield
    finally:
        for layer in packed:
            del layer.forward


def _is_packed_same(layer: nn.Linear) -> bool:
    probe = torch.randn(2, layer.in_features, generator=torch.Generator().manual_seed(0))
    return _is_trusted(
        layer,
        "oneDNN's packed product",
        fast=lambda: _pack(layer)(probe),
        stock=lambda: layer(probe),
        at=probe,
    )


def _is_plain(part: Any) -> bool:
    """Return whether it is a float32 layer on a CPU without a wrapper."""
    return (
        type(part) is nn.Linear
        and "forward" not in vars(part)
        and part.weight.device.type == "cpu"
        and part.weight.dtype is torch.float32
    )


def _pack(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """Return the packed `forward` of a layer, with the same argument name."""
    multiply = torch.ops.mkldnn._linear_pointwise
    weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), None)
    return lambda input: multiply(input, weight, layer.bias, "none", [], "")


# The decoder's attention to an example's encoded tokens, without making keys and values of them.
#
# A reader's targets are a few tokens long, its evidence thousands. To project every encoded token
# to keys and values, in each layer, costs T5-small a sixth of what encoding it did. The products
# can be taken in another order: with q the projected queries and E the encoded tokens, (q W_k) E'
# is q (E W_k')', and (p E) W_v' is p (E W_v'). Then the few queries are projected and all heads
# read the encoded tokens themselves. DeepSeek-V2 (2024, section 2.1.2) absorbs its projections
# likewise.


def read_encoded_tokens(decoder: Any) -> None:
    """Let a T5 decoder's cross-attention read the encoded tokens themselves.

    It then also takes C rows of targets for each of B examples, (B * C, T, D), beside the B
    examples' encoded tokens and mask, and reads those once for all C; where the kernel is not used,
    they are repeated C times. Modules and weights keep their names.
    """
    for block in decoder.block:
        attention = block.layer[1].EncDecAttention
        attention.forward = MethodType(_attend_across, attention)


def _attend_across(
    self: Any,
    hidden_states: Tensor,
    mask: Tensor | None = None,
    key_value_states: Tensor | None = None,
    position_bias: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Any:
    """Replace `T5Attention.forward`: (N, T, D), with encoded tokens (B, S, D) and N = C * B."""
    if past_key_values is not None or key_value_states is None:
        return type(self).forward(
            self, hidden_states, mask, key_value_states, position_bias, past_key_values, **kwargs
        )
    C = len(hidden_states) // len(key_value_states)
    if mask is not None:
        mask = mask[:, :, :1]  # the same for every target token
        if mask.dtype is torch.bool:
            lowest = torch.finfo(hidden_states.dtype).min
            mask = torch.zeros_like(mask, dtype=hidden_states.dtype).masked_fill(~mask, lowest)
    few = (hidden_states[:C], None if mask is None else mask[:1], key_value_states[:1])
    was_training = self.training

    def run(attend: Callable[..., Any]) -> Tensor:
        self.eval()  # dropout would make any two runs differ
        try:
            out: Tensor = attend(self, *few)[0]
        finally:
            self.train(was_training)
        return out

    is_same = _is_trusted(
        self,
        "cross-attention to encoded tokens",
        fast=lambda: run(_attend_encoded),
        stock=lambda: run(_attend_projected),
        at=hidden_states,
    )
    attend = _attend_encoded if is_same else _attend_projected
    return attend(self, hidden_states, mask, key_value_states)


def _attend_projected(
    self: Any, hidden_states: Tensor, mask: Tensor | None, encoded: Tensor
) -> Any:
    """Attend by the T5's own forward, eagerly, for its weights."""
    C = len(hidden_states) // len(encoded)
    mask = None if mask is None else mask.repeat_interleave(C, dim=0)
    before = self.config._attn_implementation
    self.config._attn_implementation = "eager"
    try:
        return type(self).forward(self, hidden_states, mask, encoded.repeat_interleave(C, dim=0))
    finally:
        self.config._attn_implementation = before


def _attend_encoded(self: Any, hidden_states: Tensor, mask: Tensor | None, encoded: Tensor) -> Any:
    N, T, D = hidden_states.shape
    B, S, _ = encoded.shape
    H = self.n_heads
    C = N // B
    queries = self.q(hidden_states.reshape(B, C * T, D)).view(B, C * T, H, -1).transpose(1, 2)
    to_keys = self.k.weight.view(H, -1, D)
    queries = torch.einsum("bhtw,hwd->bhtd", queries, to_keys).flatten(1, 2)  # (B, H C T, D)
    scores = (queries @ encoded.transpose(-1, -2)).view(B, H, C * T, S)  # T5 does not scale them
    masked = scores if mask is None else scores + mask
    weights = masked.float().softmax(dim=-1).type_as(scores)
    weights = nn.functional.dropout(weights, p=self.dropout, training=self.training)
    read = (weights.flatten(1, 2) @ encoded).view(B, H, C * T, D)
    output = torch.einsum("bhtd,hwd->bthw", read, self.v.weight.view(H, -1, D))
    weights = weights.view(B, H, C, T, S).transpose(1, 2).flatten(0, 1)
    return self.o(output.reshape(N, T, -1)), None, weights


def fuse_norms(t5: nn.Module) -> None:
    """Replace a T5's norms by torch's: on a GPU one operation each way, not six and some twelve.

    They are the same products in the same order, bit for bit on a CPU, so they are not compared. In
    half precision transformers rounds between the products, and its own way is taken.
    """
    for module in t5.modules():
        if type(module).__name__ in ("T5LayerNorm", "MT5LayerNorm"):
            module.forward = MethodType(_normalize, module)


def _normalize(self: Any, hidden_states: Tensor) -> Tensor:
    """Replace `T5LayerNorm.forward`: root mean square, without mean or bias."""
    if not (are_allowed() and hidden_states.dtype == self.weight.dtype == torch.float32):
        stock: Tensor = type(self).forward(self, hidden_states)
        return stock
    return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)
