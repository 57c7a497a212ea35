"""Each fast kernel gives what the stock way gives; where one does not, it is dropped and said."""

from types import SimpleNamespace

import pytest
import torch
from conftest import one_quick
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModel

from pgra.lm import kernels
from pgra.lm.kernels import Cascade, attend, find_fault, packed_for, prepare_prefix
from pgra.lm.load import find_model
from pgra.reader.fid import FusionReader

HEADS, KEY_HEADS, WIDTH, S = 4, 2, 8, 11
LAYER = SimpleNamespace(layer_idx=1, is_causal=True, num_key_value_groups=HEADS // KEY_HEADS)


def draw(rows, tokens, heads=HEADS):
    generator = torch.Generator().manual_seed(rows * tokens + heads)
    return torch.randn(rows, heads, tokens, WIDTH, generator=generator)


def draw_all(rows, tokens):
    return draw(rows, tokens), draw(rows, tokens, KEY_HEADS), draw(rows, tokens, KEY_HEADS) + 1


PREFIX = (draw(1, S, KEY_HEADS), draw(1, S, KEY_HEADS) - 1)


# What counts as the same.

# Two texts: (10, 1) and (10, -1). Their mean is (10, 0), so each has 1 of its own, at length 10.05.
TRUTH = torch.tensor([[10.0, 1.0], [10.0, -1.0]])


@pytest.mark.parametrize(
    ("by", "dtype", "noise", "same"),
    [
        (0.0012, torch.float32, 0.0, False),  # 1e-4 of the length
        (0.5, torch.bfloat16, 0.0, False),  # a third of its own; 0.05 of the length is 0.5
        (0.03, torch.float16, 0.0, True),
        (0.05, torch.float16, 0.0, False),  # a 24th; 0.00625 of the length is 0.06
        (0.05, torch.float16, 0.04, True),
        (0.5, torch.bfloat16, 0.25, True),  # an error of the dtype itself is no fault of a way
        (float("nan"), torch.bfloat16, 9.0, False),
    ],
)
def test_what_counts_as_the_same_vectors(by, dtype, noise, same):
    truth, found = TRUTH.to(dtype), TRUTH.clone()
    found[1, 1] += by
    for copies in (found.to(dtype), torch.cat([truth, found.to(dtype)])):  # every copy
        fault = find_fault(lambda copies=copies: copies, truth, dtype=dtype, noise=noise)
        assert fault == (None if same else "it gives other values than the stock way")


# Cascade: attention in two parts.


def in_two_parts(query, key, value, prefix=PREFIX, scaling=0.3, **kwargs):
    other = tuple(torch.zeros_like(part) for part in prefix)
    cascade = Cascade(prepare_prefix([other, prefix], HEADS))  # the layer takes its own: the second
    return attend(LAYER, query, key, value, None, scaling=scaling, cascade=cascade, **kwargs)[0]


@settings(max_examples=12)
@given(st.integers(1, 4), st.integers(1, 7), st.sampled_from([1.0, 1000.0]))
def test_two_parts_are_softmax_over_all_keys(rows, tokens, scale):
    query, key, value = draw_all(rows, tokens)
    query = query * scale  # huge scores do not overflow
    keys, values = (
        torch.cat([far.expand(rows, -1, -1, -1), near], dim=2).repeat_interleave(2, 1).double()
        for far, near in zip(PREFIX, (key, value), strict=True)
    )
    seen = torch.ones(tokens, S + tokens, dtype=torch.bool).tril(S)
    scores = (query.double() @ keys.transpose(2, 3) * 0.3).masked_fill(~seen, -torch.inf)
    truth = (scores.softmax(-1) @ values).transpose(1, 2).float()
    torch.testing.assert_close(in_two_parts(query, key, value), truth, rtol=1e-4, atol=1e-4)
    key[:, :, -1] += 9  # a later token moves nothing before it
    found = in_two_parts(query, key, value)[:, :-1]
    torch.testing.assert_close(found, truth[:, :-1], rtol=1e-4, atol=1e-4)
    for name in ("sliding_window", "softcap", "s_aux"):
        with pytest.raises(ValueError, match=name):
            in_two_parts(query, key, value, **{name: 4})


# Packed weights.


@pytest.fixture
def module():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8, bias=False))


def is_packed(part):
    return "forward" in vars(part)


@pytest.mark.parametrize("kind", one_quick(["opt", "bert"], "opt"))
def test_models_give_the_same_with_packed_weights(kind, lm_dirs, encoder_dirs):
    model = AutoModel.from_pretrained({**lm_dirs, **encoder_dirs}[kind]).eval()
    how = {"input_ids": torch.arange(3, 27).view(3, 8), "attention_mask": torch.ones(3, 8).long()}
    how["attention_mask"][1, 5:] = 0
    with torch.inference_mode():
        plain = model(**how).last_hidden_state
    with packed_for(model):
        assert any(map(is_packed, model.modules()))
        packed = model(**how).last_hidden_state
    torch.testing.assert_close(packed, plain, atol=1e-4, rtol=1e-4)
    assert not any(map(is_packed, model.modules()))


# The switch, and what happens where a kernel is wrong, missing or raises. That cross-attention to
# encoded tokens is the stock one: tests/unit/test_fid.py.


@pytest.mark.parametrize("way", ["gives other values", "RuntimeError: it raises"])
def test_a_kernel_that_fails_is_dropped_with_one_warning(module, t5_dirs, monkeypatch, caplog, way):
    def broken(kernel):
        def call(*args, **kwargs):
            if "raises" in way:
                raise RuntimeError("it raises\nand more")
            found = kernel(*args, **kwargs)
            return (found[0] * 1.01, *found[1:]) if isinstance(found, tuple) else found * 1.01

        return call

    torch.manual_seed(5)
    decoder = FusionReader.from_source(find_model(str(t5_dirs["t5"]))).eval().model.decoder
    across, width = decoder.block[1].layer[1].EncDecAttention, decoder.config.d_model
    x, hidden, encoded = torch.randn(5, 16), torch.randn(6, 2, width), torch.randn(2, 9, width)
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)

    def use():
        with packed_for(module), torch.no_grad():
            return module(x), across(hidden, mask=mask, key_value_states=encoded)[0]

    monkeypatch.setenv("PGRA_FAST_KERNELS", "off")
    truth = use()
    monkeypatch.setenv("PGRA_FAST_KERNELS", "auto")
    monkeypatch.setattr(kernels, "_pack", lambda layer: broken(layer.forward))
    monkeypatch.setattr(kernels, "_attend_encoded", broken(kernels._attend_encoded))
    kernels._warn.cache_clear()
    for _ in range(2):
        torch.testing.assert_close(use(), truth)
    told = [r.getMessage() for r in caplog.records if r.name == "pgra.lm.kernels"]
    assert [message.split(" does not work here")[0] for message in told] == [
        "oneDNN's packed product",
        "cross-attention to encoded tokens",
    ]
    assert all(way in message and "and more" not in message for message in told)
