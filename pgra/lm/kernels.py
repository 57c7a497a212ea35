"""Fast ways through an LM or T5 that give what the stock way gives.

Cascade attention behind a shared prefix, attention in blocks, weights laid out for oneDNN, the last
layer at last tokens only, and a T5's cross-attention.

For the attentions of causal LMs nothing in a model is replaced: its layers ask transformers'
attention interface for the name they were told. Packed weights and a T5's cross-attention set the
`forward` of the layers concerned.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from types import MethodType
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.activations import GELUActivation, GELUTanh, SiLUActivation

from pgra.core import machine_memory
from pgra.lm.batching import RowLayout, send

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


# Attention in two parts: to a shared prefix that stands once, and to a text's own tokens.
#
# Softmax attention over two sets of keys is the mean of the two attentions, weighted by their
# sums of exponentials (Juravsky et al. 2024, Hydragen, eq. 4-6; the merge is that of
# FlashAttention, Dao et al. 2022). So the prefix's keys and values are never copied behind any
# text, all texts' queries meet them in one matrix product, and no mask is needed. Models get it
# by name through the attention interface of transformers; nothing in them is replaced.


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


# Causal attention of whole prompts on a CPU, a block of queries at a time.
#
# A block's queries see no key behind the block's end, so the stock kernel is given the keys up to
# there. Of several prompts that takes less time than all queries at once (`benchmarks/icl.py`
# tells how much). Models get it by name through the attention interface of transformers; nothing
# in them is replaced.


BLOCKS = "pgra_blocks"
"""The attention implementation's name in transformers."""

_BLOCK = 64  # queries; with 32 or 128 the same to a few percent
# What the stock attention is told that would change the weights.
_UNKNOWN_BLOCKS = ("is_causal", "position_bias", "cache", "softcap")


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
    register(BLOCKS, attend_in_blocks)
    with attending(model, BLOCKS):
        yield


def attend_in_blocks(
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
    is_told = attention_mask is not None or any(kwargs.get(n) is not None for n in _UNKNOWN_BLOCKS)
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


# Linear layers with weights laid out once for oneDNN, while a float32 model only reads on a CPU.
#
# torch multiplies float32 by MKL, which lays a weight out anew in every call. oneDNN takes
# weights laid out beforehand, and does what follows a product (a GELU, a gated activation, the
# residual sum) while it writes the result. `benchmarks/reader.py` tells what share of the matrix
# rate is reached. Inductor does the same when it freezes a model, after minutes of compiling.


Forward = Callable[..., Tensor]
MANY_TOKENS = 4096
"""Packing takes as long as reading some hundred tokens."""
_SHARE = 0.25  # of the machine's memory, for the packed copies
_ACTIVATIONS = {  # as oneDNN names them
    **{SiLUActivation: ("swish", ""), nn.SiLU: ("swish", "")},
    **{GELUTanh: ("gelu", "tanh"), GELUActivation: ("gelu", "none")},
}


class Packer:
    """Packs a module's linear layers once there is enough to read, and keeps the copies.

    For one who reads again and again: the module's weights must not change as long as it is used.
    """

    def __init__(self, module: nn.Module) -> None:
        """Take a module as `packed_linears` does; nothing is packed yet."""
        self._module = module
        self._num_tokens = 0
        self._found: list[tuple[Any, Forward]] | None = None

    def packed(self, num_tokens: int) -> AbstractContextManager[None]:
        """Pack if all tokens so far are worth it, and memory holds the copies.

        Args:
            num_tokens: What is about to be read.
        """
        self._num_tokens += num_tokens
        if self._num_tokens < MANY_TOKENS or not _is_useful():
            return nullcontext()
        if self._found is None:
            self._found = _find(self._module) if self._fits() else []
        return _replaced(self._found)

    def _fits(self) -> bool:
        linears = (part for part in self._module.modules() if isinstance(part, nn.Linear))
        needed = sum(part.weight.nbytes for part in linears if _is_plain(part))
        return needed <= _SHARE * machine_memory()


def packed_for(module: nn.Module, num_tokens: int) -> AbstractContextManager[None]:
    """Pack a module's linear layers if so many tokens are worth it; no copy is kept afterwards.

    Args:
        module: As `packed_linears` takes it.
        num_tokens: What it is about to read.
    """
    return Packer(module).packed(num_tokens)


def packed_linears(module: nn.Module) -> AbstractContextManager[None]:
    """Have a module's linear layers read packed copies of their weights.

    Results agree with the plain layers' to rounding. Where this brings nothing (not on a CPU, not
    float32, under autocast, oneDNN absent) layers stay as they are; so do those that are more than
    an `nn.Linear`. Weights must not change meanwhile, and nothing is differentiated.

    Args:
        module: Its parts are the same again afterwards.
    """
    return _replaced(_find(module) if _is_useful() else [])


def _is_useful() -> bool:
    is_there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return is_there and not torch.is_autocast_enabled("cpu")


def _find(module: nn.Module) -> list[tuple[Any, Forward]]:
    """Pack, and give the parts that can be replaced and what does their work."""
    found: list[tuple[Any, Forward]] = []
    for is_one, fuse in ((_is_gated, _gated), (_is_bent, _bent), (_is_opened, _opened)):
        found += [(part, fuse(part)) for part in module.modules() if is_one(part)]
    inside = {inner for part, _ in found for inner in part.modules()}
    return found + [(p, _linear(p)) for p in module.modules() if _is_plain(p) and p not in inside]


@contextmanager
def _replaced(found: list[tuple[Any, Forward]]) -> Iterator[None]:
    for part, forward in found:
        part.forward = forward
    try:
        with torch.inference_mode():
            yield
    finally:
        for part, _ in found:
            del part.forward


def _is_plain(part: Any) -> bool:
    """Say whether it is a float32 layer on a CPU, and nothing stands around it."""
    return (
        type(part) is nn.Linear
        and "forward" not in vars(part)
        and part.weight.device.type == "cpu"
        and part.weight.dtype is torch.float32
        and type(part.weight.data) is Tensor  # a quantized weight says float32 too
    )


def _is_gated(part: Any) -> bool:
    """Say whether it is the feed-forward layer of a T5 v1.1 or flan-T5."""
    inner = getattr(part, "DenseReluDense", None)
    layers = [getattr(inner, name, None) for name in ("wi_0", "wi_1", "wo")]
    does_gelu = isinstance(getattr(inner, "act", None), GELUTanh)
    return does_gelu and all(map(_is_plain, layers)) and "forward" not in vars(part)


def _is_bent(part: Any) -> bool:
    """Say whether it is a product and a GELU, and no more: the middle of a BERT's layer."""
    inner = dict(part.named_children())
    if inner.keys() != {"dense", "intermediate_act_fn"} or "forward" in vars(part):
        return False
    return type(inner["intermediate_act_fn"]) is GELUActivation and _is_plain(inner["dense"])


def _is_opened(part: Any) -> bool:
    """Say whether it is the feed-forward layer of a Llama, by its parts and what they give."""
    inner, names = dict(part.named_children()), ("gate_proj", "up_proj", "down_proj", "act_fn")
    if inner.keys() != {*names} or "forward" in vars(part):
        return False
    *layers, act = (inner[name] for name in names)
    if type(act) not in _ACTIVATIONS or not all(map(_is_plain, layers)):
        return False
    probe = torch.linspace(-1, 1, 2 * layers[0].in_features).view(2, -1)
    with torch.inference_mode():
        plain: Tensor = part(probe)
        expected = layers[2](act(layers[0](probe)) * layers[1](probe))
    return torch.equal(plain, expected)


def _bent(part: Any) -> Forward:
    weight, bias = _pack(part.dense), part.dense.bias
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda hidden_states: multiply(hidden_states, weight, bias, "gelu", [], "none")


def _linear(layer: Any) -> Forward:
    weight, bias = _pack(layer), layer.bias
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda input: multiply(input, weight, bias, "none", [], "")


def _opened(part: Any) -> Forward:
    """Give down (act(gate x) * up x)."""
    layers = (part.gate_proj, part.up_proj, part.down_proj)
    (gate, up, down), (opens, lifts, ends) = map(_pack, layers), (layer.bias for layer in layers)
    multiply, (act, how) = torch.ops.mkldnn._linear_pointwise, _ACTIVATIONS[type(part.act_fn)]

    def forward(x: Tensor) -> Tensor:
        opened = multiply(x, gate, opens, act, [], how)
        passed = multiply.binary(x, opened, up, lifts, "mul")
        output: Tensor = multiply(passed, down, ends, "none", [], "")
        return output

    return forward


def _gated(layer: Any) -> Forward:
    """Give x + wo (gelu(wi_0 n) * wi_1 n), n the layer's norm of x: dropout does nothing here."""
    inner, norm = layer.DenseReluDense, layer.layer_norm
    gate, up, down = map(_pack, (inner.wi_0, inner.wi_1, inner.wo))
    multiply = torch.ops.mkldnn._linear_pointwise

    def forward(hidden_states: Tensor) -> Tensor:
        normed = norm(hidden_states)
        opened = multiply(normed, gate, None, "gelu", [], "tanh")
        passed = multiply.binary(normed, opened, up, None, "mul")
        output: Tensor = multiply.binary(passed, hidden_states, down, None, "add")
        return output

    return forward


def _pack(layer: nn.Linear) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), None)
    return packed


# The last layer only where its output is wanted: at each text's last token.
#
# A state is the last layer's output at one token a text, yet the layer works on all of them. Keys
# and values are needed of every token; queries, the output projection and the feed-forward part
# only of the last. Hooks around these modules gather the tokens before and lay the result back
# after, so the saving is nearly one layer of all, whatever the layout of the batch.


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
    examples' encoded tokens and mask, and reads those once for all C. Modules and weights keep
    their names.

    Args:
        decoder: A `T5Stack`.
    """
    for block in decoder.block:
        attention = block.layer[1].EncDecAttention
        attention.forward = MethodType(_attend, attention)


def _attend(
    self: Any,
    hidden_states: Tensor,
    mask: Tensor | None = None,
    key_value_states: Tensor | None = None,
    position_bias: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Any:
    """Stand in for `T5Attention.forward` as `T5LayerCrossAttention` calls it.

    Args:
        self: The `T5Attention`.
        hidden_states: The decoder's, (N, T, D), N a multiple of B.
        mask: Which encoded tokens are real, (B, 1, 1 or T, S): True, or what is added to a score.
        key_value_states: Encoded tokens, (B, S, D).
        position_bias: None: there are no positions across.
        past_key_values: A cache, when text is written: its keys and values then serve every step,
            and transformers' own way is taken.
        **kwargs: For transformers' own way.

    Returns:
        Output (N, T, D), None for a bias, and the weights (N, H, T, S).
    """
    if past_key_values is not None or key_value_states is None:
        return type(self).forward(
            self, hidden_states, mask, key_value_states, position_bias, past_key_values, **kwargs
        )
    (N, T, D), (B, S, _) = hidden_states.shape, key_value_states.shape
    H, C = self.n_heads, N // B
    queries = _split_heads(self.q(hidden_states.reshape(B, C * T, D)), H)  # (B, H, C T, W)
    # An adapter around a projection may do anything (dropout, scale): then it is asked itself.
    is_plain = all(type(projection) is nn.Linear for projection in (self.k, self.v))
    if is_plain:
        to_keys = self.k.weight.view(H, -1, D)
        queries = torch.einsum("bhtw,hwd->bhtd", queries, to_keys).flatten(1, 2)  # (B, H C T, D)
        keys = values = key_value_states
    else:
        keys, values = (_split_heads(to(key_value_states), H) for to in (self.k, self.v))
    scores = (queries @ keys.transpose(-1, -2)).view(B, H, C * T, S)  # T5 does not scale them
    if mask is not None:
        mask = mask[:, :, :1]  # the same for every target token
        if mask.dtype is torch.bool:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + mask
    weights = scores.float().softmax(dim=-1).type_as(scores)
    weights = nn.functional.dropout(weights, p=self.dropout, training=self.training)
    if is_plain:
        read = (weights.flatten(1, 2) @ values).view(B, H, C * T, D)
        output = torch.einsum("bhtd,hwd->bthw", read, self.v.weight.view(H, -1, D))
    else:
        output = (weights @ values).transpose(1, 2)  # (B, C T, H, W)
    weights = weights.view(B, H, C, T, S).transpose(1, 2).flatten(0, 1)
    return self.o(output.reshape(N, T, -1)), None, weights


def _split_heads(states: Tensor, heads: int) -> Tensor:
    """Give (B, H, L, W) of (B, L, H W)."""
    B, L, _ = states.shape
    return states.view(B, L, heads, -1).transpose(1, 2)
