"""Linear layers with weights laid out once for oneDNN, while a float32 model only reads on a CPU.

torch multiplies float32 by MKL, which lays a weight out anew in every call. oneDNN takes weights
laid out beforehand, and does what follows a product (a GELU, a gated activation, the residual sum)
while it writes the result. `benchmarks/reader.py` tells what share of the matrix rate is
reached. Inductor does the same when it freezes a model, after minutes of compiling.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import GELUActivation, GELUTanh, SiLUActivation

from pgra.processes import machine_memory

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
