"""A causal LM on one device or spread by a device map: the same states, or a refusal."""

import shutil
import weakref

import pytest
import torch
from conftest import one_quick
from tiny_models import build_lm, build_odd_lm
from transformers import AutoModel

from pgra.errors import ConfigError, ModelError
from pgra.lm import load
from pgra.lm.causal_lm import CausalLM
from pgra.lm.load import find_model, load_config, load_tokenizer
from pgra.lm.prefix import PromptedEncoder
from pgra.prompts import FewShotPrompt, PromptTemplate

IDS = [list(range(5, 25)), list(range(9, 18)), [7]]
PROMPT = FewShotPrompt(PromptTemplate("Is this good?\n{text}"), "A plot.\nThe answer is bad")


@pytest.fixture(scope="module", params=one_quick(["gpt2", "llama", "opt"], "opt"))
def folder(request, lm_dirs):
    return str(lm_dirs[request.param])


def open_lm(folder, **how):
    return CausalLM(str(folder), device="cpu", **how)


def test_states_are_those_of_a_plain_load_under_any_device_map(folder):
    plain = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        truth = [plain(input_ids=torch.tensor([ids])).last_hidden_state[0, -1] for ids in IDS]
    lm = open_lm(folder)
    torch.testing.assert_close(lm.states_of(IDS), torch.stack(truth), rtol=1e-5, atol=1e-5)
    for device_map in ("auto", "balanced", "sequential"):
        spread = open_lm(folder, device_map=device_map)
        assert torch.equal(spread.states_of(IDS), lm.states_of(IDS))
        assert spread.fingerprint == lm.fingerprint


def test_what_is_no_causal_lm_or_damaged_is_refused(lm_dirs, encoder_dir, tmp_path):
    lm, source = open_lm(lm_dirs["gpt2"]), find_model(str(encoder_dir))
    lm.source, lm.config, lm.tokenizer = source, load_config(source), load_tokenizer(source)
    with pytest.raises(ModelError, match=source.name):
        lm.states_of([[5, 6]])
    folder = shutil.copytree(lm_dirs["gpt2"], tmp_path / "broken")
    broken = AutoModel.from_pretrained(folder)
    broken.ln_f.weight.data[:] = float("nan")
    broken.save_pretrained(folder)
    with pytest.raises(ModelError, match="torch.float32"):
        open_lm(folder).states_of([[5, 6]])


GPU = torch.device("cuda")


def test_auto_on_a_gpu_is_the_checkpoints_half_precision(lm_dirs, tmp_path):
    folder = shutil.copytree(lm_dirs["opt"], tmp_path / "half")
    AutoModel.from_pretrained(folder, dtype="float16").save_pretrained(folder)
    half, whole = load_config(find_model(str(folder))), load_config(find_model(str(lm_dirs["opt"])))
    assert load.choose_dtype("auto", GPU, half) == torch.float16
    assert load.choose_dtype("auto", GPU, whole) == torch.bfloat16
    assert load.choose_dtype("auto", torch.device("cpu"), half) == torch.float32
    assert load.choose_dtype("bfloat16", GPU, half) == torch.bfloat16


def test_weights_that_are_let_go_of_are_gone_and_come_back(folder):
    lm = open_lm(folder)
    encoder = PromptedEncoder(lm, PROMPT)
    before, width = encoder.encode(["a", "A dull plot."]), lm.width
    weights = [weakref.ref(weight) for weight in lm.model.parameters()]
    keys = weakref.ref(encoder._begin.__self__._prefix[0][0])
    assert all(ref() is not None for ref in [*weights, keys])
    encoder.release()
    assert not any(ref() is not None for ref in [*weights, keys])
    assert (lm.width, lm.way) == (width, "cascade")  # what was found is kept
    torch.testing.assert_close(encoder.encode(["a", "A dull plot."]), before)


# An LM that ends with an earlier layer.

FINAL = ("norm", "ln_f", "decoder.final_layer_norm", "decoder.project_out")
"""What an LM does after its last layer, under its names; each has one of them."""


@pytest.fixture(
    scope="module", params=one_quick(["gpt2", "llama", "opt", "opt-350m", "gemma2"], "opt")
)
def deep(request, tmp_path_factory):
    """LMs of three layers; Gemma 2, whose layers differ in kind, of two."""
    path = tmp_path_factory.mktemp("deep") / request.param
    build = build_odd_lm if request.param == "gemma2" else build_lm
    return build(path, request.param, **({} if request.param == "gemma2" else {"layers": 3}))


@torch.inference_mode()
def states_by_hand(folder, ids, layer):
    """Read with the whole stock LM; then its own last step on the layer's output."""
    lm = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    output = lm(input_ids=torch.tensor([ids]), output_hidden_states=True)
    parts = dict(lm.named_modules())
    last = next(parts[name] for name in FINAL if name in parts)
    return last(output.hidden_states[layer][0, -1])


def test_a_state_is_the_final_norm_of_the_layers_output(deep):
    whole = open_lm(deep)
    for layer in range(1, whole.config.num_hidden_layers):
        lm = open_lm(deep, layer=str(layer))
        truth = torch.stack([states_by_hand(deep, ids, layer) for ids in IDS])
        torch.testing.assert_close(lm.states_of(IDS), truth, rtol=1e-4, atol=1e-4)
        assert (whole.states_of(IDS) - truth).norm() > 0.1 * truth.norm()
        assert lm.fingerprint == {**whole.fingerprint, "lm_layer": layer}
    named = open_lm(deep, layer=str(whole.config.num_hidden_layers))
    assert named.fingerprint == whole.fingerprint
    assert torch.equal(named.states_of(IDS), whole.states_of(IDS))


def test_a_share_is_the_nearest_layer(tmp_path):
    folder = build_lm(tmp_path / "lm", "gpt2", layers=9)
    shares = {"0.6": 5, "0.5": 5, ".01": 1, "0.99": None, "7": 7}  # 5.4, 4.5, 0.09, 8.91
    assert {asked: open_lm(folder, layer=asked).layer for asked in shares} == shares


@pytest.mark.parametrize("asked", ["0", "-1", "1.5", "first"])
def test_what_is_no_layer_is_refused(lm_dirs, asked):
    with pytest.raises(ConfigError, match=asked):
        open_lm(lm_dirs["gpt2"], layer=asked)
