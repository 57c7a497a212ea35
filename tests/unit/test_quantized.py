"""LMs in 8 bits: near the states of the plain weights, smaller, and never mixed with them."""

import pytest
import torch
from conftest import SENTENCES

from pgra.errors import ConfigError, ModelError
from pgra.lm.causal_lm import CausalLM
from pgra.lm.prefix import PromptedEncoder
from pgra.prompts import FewShotPrompt, PromptTemplate

IDS = [list(range(5, 25)), list(range(9, 18)), list(range(20, 50))]


def load(folder, quantization="none", dtype="float32", **how):
    return CausalLM(str(folder), device="cpu", dtype=dtype, quantization=quantization, **how)


def relative_error(states, truth):
    states, truth = states.float(), truth.float()
    return float(((states - truth).norm(dim=1) / truth.norm(dim=1)).max())


def round_to_256_steps(weight):
    step = weight.abs().amax(1, keepdim=True) / 127.5
    # As it is written there: a row's largest weight lies between two steps.
    return (weight * (1 / step)).round().clamp(-128, 127) * step


def layer_bytes(lm):
    total = 0
    for weight in lm.model.layers.parameters():
        parts = getattr(weight, "__tensor_flatten__", lambda: (["data"], None))()[0]
        total += sum(getattr(weight, name).nbytes for name in parts) * (weight.dim() > 1)
    return total


@pytest.mark.parametrize("kind", ["llama", "opt-350m"])
def test_states_are_those_of_rounded_weights(lm_dirs, kind):
    rounded, lm = load(lm_dirs[kind]), load(lm_dirs[kind], "8bit")
    truth = rounded.states_of(IDS)
    for layer in rounded.model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = round_to_256_steps(layer.weight.data)
    states = lm.states_of(IDS)
    assert relative_error(states, rounded.states_of(IDS)) < 1e-4
    assert relative_error(states, truth) > 1e-3
    half = load(lm_dirs[kind], "8bit", "bfloat16").states_of(IDS)
    assert relative_error(half, states) < 0.2


def test_weights_take_a_third_of_the_bytes_and_the_prefix_is_shared_all_the_same(lm_dirs):
    plain, lm = load(lm_dirs["llama"]), load(lm_dirs["llama"], "8bit")
    assert layer_bytes(lm) < 0.35 * layer_bytes(plain)
    assert (plain.fingerprint.get("quantization"), lm.fingerprint["quantization"]) == (None, "8bit")
    prompt = FewShotPrompt(PromptTemplate("Is this good?\n{text}"), "A plot.\nThe answer is bad")
    shared, whole = PromptedEncoder(lm, prompt), PromptedEncoder(lm, prompt, sharing="none")
    assert relative_error(shared.encode(SENTENCES), whole.encode(SENTENCES)) < 1e-4
    assert shared.way != whole.way == "none"


def test_what_torchao_would_get_wrong_is_refused(lm_dirs):
    for kind, how, error, told in (
        ("gpt2", ["8bit"], ModelError, "leaves most weights"),
        ("opt", ["8bit", "float16"], ConfigError, "overflows in float16: use --lm_dtype"),
    ):
        with pytest.raises(error, match=told):
            load(lm_dirs[kind], *how).states_of(IDS)
