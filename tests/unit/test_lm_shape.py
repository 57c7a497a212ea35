"""What an LM costs, from its configuration, against the real model."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, OPTConfig

from pgra.lm.causal_lm import CausalLM
from pgra.lm.load import LmShape


@pytest.fixture
def lm(lm_dir):
    return CausalLM(str(lm_dir), device="cpu")


def test_weights_and_state_are_the_models(lm):
    shape = LmShape.of(lm.config)
    assert shape.weights == sum(p.numel() for p in lm.model.parameters())
    assert shape.state == lm.width


def test_operations_are_those_that_are_counted_in_the_model(lm):
    shape = LmShape.of(lm.config)
    model = AutoModel.from_pretrained(lm.source.path, attn_implementation="eager").eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(40)[None])
    # Eager attention also multiplies what the mask hides: all 40 x 40, where 820 are looked at.
    hidden = 4 * shape.layers * shape.attended * (40 * 40 - 820)
    assert shape.flops([40]) + hidden == pytest.approx(counter.get_total_flops(), rel=1e-3)


def test_operations_by_hand():
    shape = LmShape(layers=3, state=8, attended=8, weights=1500, matrices=1000)
    # 3 tokens: 2 x 1000 each; they look at 1 + 2 + 3 keys, at 4 x 3 x 8 each.
    assert shape.flops([3]) == 6000 + 96 * 6
    assert replace(shape, is_causal=False).flops([3]) == 6000 + 96 * 9  # it looks both ways
    assert shape.flops([3, 1]) == 6000 + 96 * 6 + 2000 + 96
    assert shape.flops([5]) + shape.flops([3], behind=5) == shape.flops([8])


def test_a_13b_is_laid_out_without_its_memory():
    sizes = {"hidden_size": 5120, "ffn_dim": 20480, "word_embed_proj_dim": 5120}
    shape = LmShape.of(OPTConfig(num_hidden_layers=40, num_attention_heads=40, **sizes))
    assert shape.weights == 12_853_473_280
    assert shape.matrices == pytest.approx(12.58e9, rel=0.001)
