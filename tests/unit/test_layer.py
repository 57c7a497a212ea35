"""An LM that ends with an earlier layer: its states, and what they cost."""

import pytest
import torch
from conftest import one_quick
from tiny_models import build_lm, build_odd_lm
from transformers import AutoModel

from pgra.errors import ConfigError
from pgra.lm.causal_lm import CausalLM

IDS = [list(range(5, 25)), list(range(9, 18)), [7]]
FINAL = ("norm", "ln_f", "decoder.final_layer_norm", "decoder.project_out")
"""What an LM does after its last layer, under its names; each has one of them."""


@pytest.fixture(
    scope="module", params=one_quick(["gpt2", "llama", "opt", "opt-350m", "gemma2"], "opt")
)
def folder(request, tmp_path_factory):
    """LMs of three layers; Gemma 2, whose layers differ in kind, of two."""
    path = tmp_path_factory.mktemp("deep") / request.param
    build = build_odd_lm if request.param == "gemma2" else build_lm
    return build(path, request.param, **({} if request.param == "gemma2" else {"layers": 3}))


def open_lm(folder, layer="last"):
    return CausalLM(str(folder), layer=layer, device="cpu")


@torch.inference_mode()
def states_by_hand(folder, ids, layer):
    """Read with the whole stock LM; then its own last step on the layer's output."""
    lm = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    output = lm(input_ids=torch.tensor([ids]), output_hidden_states=True)
    parts = dict(lm.named_modules())
    last = next(parts[name] for name in FINAL if name in parts)
    return last(output.hidden_states[layer][0, -1])


def test_a_state_is_the_final_norm_of_the_layers_output(folder):
    whole = open_lm(folder)
    for layer in range(1, whole.config.num_hidden_layers):
        lm = open_lm(folder, str(layer))
        truth = torch.stack([states_by_hand(folder, ids, layer) for ids in IDS])
        torch.testing.assert_close(lm.states_of(IDS), truth, rtol=1e-4, atol=1e-4)
        assert (whole.states_of(IDS) - truth).norm() > 0.1 * truth.norm()
        assert lm.fingerprint == {**whole.fingerprint, "lm_layer": layer}
    named = open_lm(folder, str(whole.config.num_hidden_layers))
    assert named.fingerprint == whole.fingerprint
    assert torch.equal(named.states_of(IDS), whole.states_of(IDS))


@pytest.mark.parametrize(
    ("asked", "depth", "number"),
    [("0.6", 30, 18), ("0.5", 3, 2), (".01", 30, 1), ("0.99", 30, None), ("7", 12, 7)],
)
def test_a_share_is_the_nearest_layer(tmp_path, asked, depth, number):
    folder = build_lm(tmp_path / "lm", "gpt2", layers=depth)
    assert open_lm(folder, asked).layer == number


@pytest.mark.parametrize("asked", ["0", "-1", "1.5", "first"])
def test_what_is_no_layer_is_refused(lm_dirs, asked):
    with pytest.raises(ConfigError, match=f"lm_layer is '{asked}'"):
        open_lm(lm_dirs["gpt2"], asked)
