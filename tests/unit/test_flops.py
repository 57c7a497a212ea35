"""Costs from a configuration against the real model: its weights, its cache, its operations."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, OPTConfig

from pgra.errors import ModelError
from pgra.lm.causal_lm import CausalLM
from pgra.lm.cost import LmShape


@pytest.fixture
def lm(lm_dir):
    return CausalLM.from_name(str(lm_dir), device="cpu")


@pytest.fixture
def shape(lm):
    return LmShape.of(lm.config)


def test_weights_and_state_are_the_models(lm, shape):
    assert shape.weight_bytes(4) == sum(4 * p.numel() for p in lm.model.parameters())
    assert shape.weight_bytes(2) * 2 == shape.weight_bytes(4)
    assert shape.state == lm.width


def test_a_prefix_takes_what_the_models_cache_takes(lm, shape):
    cache = lm.model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=True).past_key_values
    kept = sum(4 * (layer.keys.numel() + layer.values.numel()) for layer in cache.layers)
    assert shape.cache_bytes(3, 4) == kept
    assert shape.cache_bytes(4, 4) > kept


def test_operations_are_those_that_are_counted_in_the_model(lm, shape):
    model = AutoModel.from_pretrained(lm.source.path, attn_implementation="eager").eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(40)[None])
    # Eager attention also multiplies what the mask hides: all 40 x 40, where 820 are looked at.
    hidden = 4 * shape.layers * shape.attended * (40 * 40 - 820)
    assert shape.flops([40]) + hidden == pytest.approx(counter.get_total_flops(), rel=1e-3)
    assert shape.flops([80]) > 2 * shape.flops([40])  # attention grows faster than the text


def test_operations_by_hand():
    shape = LmShape(3, 8, 8, attended=8, cached=4, middle=32, weights=1500, matrices=1000)
    # 3 tokens: 2 x 1000 each; they look at 1 + 2 + 3 keys, at 4 x 3 x 8 each.
    assert shape.flops([3]) == 6000 + 96 * 6
    assert shape.flops([3, 1]) == 6000 + 96 * 6 + 2000 + 96
    assert shape.flops([3], behind=5) == 6000 + 96 * (6 + 15)
    assert shape.flops([]) == 0
    whole = shape.flops([8])
    assert shape.flops([5]) + shape.flops([3], behind=5) == whole  # read in two parts or in one


def test_bytes_by_hand():
    shape = LmShape(3, 8, 8, attended=8, cached=4, middle=32, weights=1500, matrices=1000)
    assert shape.cache_bytes(10, 2) == 2 * 3 * 4 * 10 * 2
    assert shape.weight_bytes(2, "8bit") == 1000 + 500 * 2
    assert shape.weight_bytes(2, "4bit") == 562 + 500 * 2  # half a byte, and its scales
    assert shape.batch_bytes(10, 2) == 480 + (4 * 8 + 3 * 32) * 10 * 2


def test_a_13b_is_laid_out_without_its_memory():
    sizes = {"hidden_size": 5120, "ffn_dim": 20480, "word_embed_proj_dim": 5120}
    shape = LmShape.of(OPTConfig(num_hidden_layers=40, num_attention_heads=40, **sizes))
    assert shape.weights == 12_853_473_280
    assert shape.matrices == pytest.approx(12.58e9, rel=0.001)


def test_a_configuration_that_cannot_work_is_refused():
    with pytest.raises(ModelError, match="cannot lay out 'opt' from its configuration: embed_dim"):
        LmShape.of(OPTConfig(hidden_size=10, word_embed_proj_dim=10, num_attention_heads=4))
