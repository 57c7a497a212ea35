"""Attention in blocks of queries equals attention to all at once, and is told what it cannot do."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from transformers import AttentionInterface

from pgra.lm.causal_lm import CausalLM
from pgra.lm.generate import PromptReader
from pgra.lm.kernels import BLOCKS as NAME
from pgra.lm.kernels import attend_in_blocks as attend
from pgra.lm.kernels import in_blocks

LAYER = SimpleNamespace(layer_idx=0, is_causal=True, num_key_value_groups=2)
STOCK = AttentionInterface()["sdpa"]


def draw(tokens, *, heads=4, key_heads=2, width=8):
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((3, n, tokens, width) for n in (heads, key_heads, key_heads))
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.fixture
def lengths(monkeypatch):
    """Note the number of queries in each call of the kernel."""
    seen, kernel = [], functional.scaled_dot_product_attention

    def spy(query, *args, **kwargs):
        seen.append(query.shape[2])
        return kernel(query, *args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    return seen


@pytest.mark.parametrize("tokens", [65, 128, 200])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_blocks_are_the_whole(tokens, scaling, lengths):
    tensors = draw(tokens)
    whole = STOCK(LAYER, *tensors, None, scaling=scaling)[0]
    lengths.clear()
    found, weights = attend(LAYER, *tensors, None, scaling=scaling)
    assert sum(lengths) == tokens
    assert max(lengths) == 64
    assert weights is None
    torch.testing.assert_close(found, whole)


def test_a_head_of_its_own_keys_needs_no_group():
    layer = SimpleNamespace(is_causal=True, num_key_value_groups=1)
    tensors = draw(100, key_heads=4)
    torch.testing.assert_close(attend(layer, *tensors, None)[0], STOCK(layer, *tensors, None)[0])


def test_values_may_be_narrower_than_keys():
    query, key, value = draw(100)
    whole = STOCK(LAYER, query, key, value[..., :5], None)[0]
    torch.testing.assert_close(attend(LAYER, query, key, value[..., :5], None)[0], whole)


def test_a_key_moves_what_comes_after_it_and_nothing_before():
    query, key, value = draw(150)
    before = attend(LAYER, query, key, value, None)[0]
    key[:, :, 100] += 3
    is_moved = (attend(LAYER, query, key, value, None)[0] != before).any(dim=(0, 2, 3))
    assert not is_moved[:100].any()
    assert is_moved[100:].all()


def test_what_blocks_cannot_do_is_left_to_the_stock_attention(lengths):
    query, key, value = draw(150)
    mask = torch.rand(3, 1, 150, 150, generator=torch.Generator().manual_seed(1)) < 0.5
    mask |= torch.eye(150, dtype=torch.bool)
    cases = {
        "mask": ((LAYER, query, key, value, mask), {}),
        "not causal": ((LAYER, query, key, value, None), {"is_causal": False}),
        "another layer": (
            (SimpleNamespace(is_causal=False, num_key_value_groups=2), query, key, value, None),
            {},
        ),
        "behind others": ((LAYER, query[:, :, -70:], key, value, None), {}),
        "short": ((LAYER, *draw(64), None), {}),
    }
    in_parts = attend(LAYER, query, key, value, None)[0]
    for name, (given, kwargs) in cases.items():
        lengths.clear()
        found = attend(*given, **kwargs)[0]
        assert lengths == [given[1].shape[2]], name
        torch.testing.assert_close(found, STOCK(*given, **kwargs)[0], msg=name)
        if found.shape == in_parts.shape:  # the control: it matters
            assert (found - in_parts).abs().max() > 0.1, name


def test_an_lm_reads_the_same_in_blocks(lm_dir, lengths):
    lm = CausalLM.from_name(str(lm_dir), device="cpu", with_head=True)
    reader = PromptReader(lm)
    assert reader.fault is None
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 90, (n,), generator=generator).tolist() for n in (170, 131, 90)]
    plain = reader.read(prompts)
    lengths.clear()
    with in_blocks(lm.whole):
        assert lm.model.config._attn_implementation == NAME
        found = reader.read(prompts)
        behind = reader.read(prompts[:1], behind=plain.take([0]).cut(50))  # a cache stands before
    assert lengths[:3] == [64, 64, 42]
    assert lengths[-1] == 120
    assert lm.model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(found.logits, plain.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(behind.logits, plain.logits[:1], atol=1e-4, rtol=1e-4)
    for own, other in zip(found.layers, plain.layers, strict=True):
        torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4)


def test_an_attention_that_was_chosen_is_kept_and_sdpa_is_back_after_an_error(lm_dirs):
    lm = CausalLM.from_name(str(lm_dirs["llama"]), device="cpu")
    with pytest.raises(KeyError), in_blocks(lm.model):
        raise KeyError
    assert lm.model.config._attn_implementation == "sdpa"
    lm.model.set_attn_implementation("eager")
    with in_blocks(lm.model):
        assert lm.model.config._attn_implementation == "eager"
    assert lm.model.config._attn_implementation == "eager"
