"""LMs in 8 and 4 bits: near the states of the plain weights, smaller, and never mixed with them."""

import pytest
import torch
from conftest import SENTENCES
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pgra.errors import ConfigError, ModelError
from pgra.lm.causal_lm import CausalLM
from pgra.lm.prefix import PromptedEncoder
from pgra.prompts.fewshot import FewShotPrompt
from pgra.prompts.template import PromptTemplate

KINDS = ["gpt2", "llama", "opt", "opt-350m"]
IDS = [list(range(5, 25)), list(range(9, 18)), list(range(20, 50))]
# The 16 values of NF4 (Dettmers et al. 2023, appendix E), times the largest of 64 weights.
NF4 = torch.tensor(
    [
        *(-1.0, -0.69619280, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0),
        *(0.07958030, 0.16093020, 0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0),
    ]
)
WIDTHS = {
    "gpt2": {"n_embd": 64},
    "llama": {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16},
    "opt": {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128},
    "opt-350m": {"hidden_size": 128, "word_embed_proj_dim": 64, "ffn_dim": 128},
}


@pytest.fixture(scope="module")
def folders(lm_dirs, tmp_path_factory):
    """The tiny LMs, 64 and more wide: 4-bit weights share a scale by 64."""
    made = {}
    for kind in KINDS:
        made[kind] = folder = tmp_path_factory.mktemp(kind)
        config = AutoConfig.from_pretrained(lm_dirs[kind], **WIDTHS[kind])
        model = AutoModelForCausalLM.from_config(config)
        generator = torch.Generator().manual_seed(7)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(lm_dirs[kind]).save_pretrained(folder)
    return made


def load(folder, quantization="none", dtype="float32", **how):
    return CausalLM.from_name(
        str(folder), device="cpu", dtype=dtype, quantization=quantization, **how
    )


def relative_error(states, truth):
    states, truth = states.float(), truth.float()
    return float(((states - truth).norm(dim=1) / truth.norm(dim=1)).max())


def round_to_256_steps(weight):
    step = weight.abs().amax(1, keepdim=True) / 127.5
    # As it is written there: a row's largest weight lies between two steps.
    return (weight * (1 / step)).round().clamp(-128, 127) * step


def round_to_nf4(weight):
    blocks = weight.view(-1, 64)
    scale = blocks.abs().amax(1, keepdim=True)
    nearest = (blocks[..., None] / scale[..., None] - NF4).abs().argmin(-1)
    return (NF4[nearest] * scale).view_as(weight)


@pytest.mark.parametrize("kind", ["llama", "opt-350m"])
@pytest.mark.parametrize(
    ("quantization", "rounded_to", "least"),
    [("8bit", round_to_256_steps, 1e-3), ("4bit", round_to_nf4, 0.1)],
)
def test_states_are_those_of_rounded_weights(folders, kind, quantization, rounded_to, least):
    rounded, lm = load(folders[kind]), load(folders[kind], quantization)
    truth = rounded.states_of(IDS)
    for layer in rounded.model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = rounded_to(layer.weight.data)
    states = lm.states_of(IDS)
    assert relative_error(states, rounded.states_of(IDS)) < 1e-4
    assert relative_error(states, truth) > least
    spread = load(folders[kind], quantization, device_map="auto")
    assert torch.equal(spread.states_of(IDS), states)
    half = load(folders[kind], quantization, "bfloat16").states_of(IDS)
    assert half.dtype == torch.bfloat16
    assert relative_error(half, states) < 0.2


@pytest.mark.parametrize(("quantization", "most"), [("8bit", 0.28), ("4bit", 0.16)])
def test_the_layers_weights_take_a_quarter_and_an_eighth_of_the_bytes(folders, quantization, most):
    def stored(weight):
        if hasattr(weight, "__tensor_flatten__"):  # else it tells the bytes that it would have
            return sum(getattr(weight, name).nbytes for name in weight.__tensor_flatten__()[0])
        return weight.nbytes

    def layer_bytes(lm):
        return sum(stored(p) for p in lm.model.layers.parameters() if p.dim() > 1)

    plain, small = load(folders["llama"]), load(folders["llama"], quantization)
    assert layer_bytes(small) < most * layer_bytes(plain)


@pytest.mark.parametrize(("quantization", "kind"), [("8bit", "llama"), ("4bit", "gpt2")])
def test_the_prefix_is_shared_all_the_same(folders, kind, quantization):
    prompt = FewShotPrompt(PromptTemplate("Is this good?\n{text}"), "A plot.\nThe answer is bad")
    lm = load(folders[kind], quantization)
    shared, whole = PromptedEncoder(lm, prompt), PromptedEncoder(lm, prompt, sharing="none")
    assert relative_error(shared.encode(SENTENCES), whole.encode(SENTENCES)) < 1e-4
    assert shared.way != whole.way == "none"


def test_plain_and_quantized_states_are_never_taken_for_each_other(folders):
    prints = [load(folders["opt"], how).fingerprint for how in ("none", "8bit", "4bit")]
    assert [fields.get("quantization") for fields in prints] == [None, "8bit", "4bit"]


def test_what_a_library_would_get_wrong_is_refused(folders, lm_dirs):
    for folder, how, error, told in (
        (folders["gpt2"], ["8bit"], ModelError, "leaves 100% .* does not know its Conv1D layers"),
        (folders["opt"], ["8bit", "float16"], ConfigError, "overflows in float16: use --lm_dtype"),
        (lm_dirs["llama"], ["4bit"], ModelError, "a layer of width 32, no multiple of 64: in 4"),
    ):
        with pytest.raises(error, match=told):
            load(folder, *how).states_of(IDS)
