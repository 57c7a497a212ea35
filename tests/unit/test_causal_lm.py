"""A causal LM on one device or spread by a device map: the same states, or a refusal."""

import shutil

import psutil
import pytest
import torch
from conftest import SENTENCES
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from pgra.errors import ConfigError, ModelError
from pgra.lm.causal_lm import CausalLM
from pgra.lm.load import check_placement
from pgra.lm.prefix import PromptedEncoder
from pgra.prompts.fewshot import FewShotPrompt
from pgra.prompts.template import PromptTemplate

IDS = [list(range(5, 25)), list(range(9, 18)), [7]]


@pytest.fixture(scope="module", params=["gpt2", "llama", "opt"])
def kind(request):
    return request.param


@pytest.mark.parametrize("device_map", ["auto", "balanced", "sequential"])
def test_a_device_map_changes_no_state(lm_dirs, kind, device_map):
    plain = CausalLM.from_name(str(lm_dirs[kind]), device="cpu")
    spread = CausalLM.from_name(str(lm_dirs[kind]), device="cpu", device_map=device_map)
    assert torch.equal(spread.states_of(IDS), plain.states_of(IDS))
    assert spread.fingerprint == plain.fingerprint
    assert not torch.equal(spread.states_of([[8]]), plain.states_of([[7]]))


def test_weights_go_to_their_device_in_their_dtype_and_are_not_trained(lm_dirs, kind):
    lm = CausalLM.from_name(str(lm_dirs[kind]), dtype="bfloat16", device="cpu")
    found = {(p.dtype, p.device.type, p.requires_grad) for p in lm.model.parameters()}
    assert found == {(torch.bfloat16, "cpu", False)}
    assert not lm.model.training


def test_states_equal_those_of_a_plain_load(lm_dirs, kind):
    plain = AutoModel.from_pretrained(lm_dirs[kind], dtype=torch.float32).eval()
    ids = torch.tensor([IDS[0]])
    with torch.inference_mode():
        truth = plain(input_ids=ids).last_hidden_state[:, -1]
    lm = CausalLM.from_name(str(lm_dirs[kind]), device="cpu")
    torch.testing.assert_close(lm.states_of(IDS[:1]), truth)


def scatter(folder, memory, offload_folder):
    """Keep parts off their device, as for a GPU on its host: hooks fetch them, here from disk."""
    lm = CausalLM.from_name(str(folder), device="cpu", device_map="auto")
    lm.__dict__["model"] = AutoModel.from_pretrained(  # `lm.model` refuses the disk
        folder,
        dtype=torch.float32,
        device_map="auto",
        max_memory={"cpu": memory},
        offload_folder=offload_folder,
    ).eval()
    assert "disk" in lm.model.hf_device_map.values()
    return lm


@pytest.mark.parametrize("memory", [60_000, 110_000])
def test_layers_that_wait_elsewhere_give_the_same_states(lm_dirs, kind, memory, tmp_path):
    truth = CausalLM.from_name(str(lm_dirs[kind]), device="cpu").states_of(IDS)
    states = scatter(lm_dirs[kind], memory, tmp_path).states_of(IDS)
    assert not states.is_meta
    torch.testing.assert_close(states, truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("memory", [60_000, 110_000])
def test_they_give_them_behind_a_shared_prefix_too(lm_dirs, kind, memory, tmp_path):
    prompt = FewShotPrompt(PromptTemplate("Is this good?\n{text}"), "A plot.\nThe answer is bad")
    lm = CausalLM.from_name(str(lm_dirs[kind]), device="cpu")
    plain = PromptedEncoder(lm, prompt)
    spread = PromptedEncoder(scatter(lm_dirs[kind], memory, tmp_path), prompt)
    torch.testing.assert_close(
        spread.encode(SENTENCES), plain.encode(SENTENCES), rtol=1e-4, atol=1e-4
    )
    assert spread.way == plain.way != "none"


def test_an_lm_that_would_be_read_from_disk_is_refused(lm_dirs, monkeypatch):
    little = psutil.virtual_memory()._replace(available=60_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: little)
    lm = CausalLM.from_name(str(lm_dirs["opt"]), device="cpu", device_map="auto")
    with pytest.raises(ModelError, match=r"does not fit the memory here: \d+ of its \d+ parts"):
        lm.states_of(IDS)


def test_parts_on_the_cpu_of_a_gpu_machine_are_said(lm_dirs, caplog):
    lm = CausalLM.from_name(str(lm_dirs["opt"]), device="cpu")
    lm.model.hf_device_map = {"embed": 0, "layers.0": 1, "layers.1": "cpu"}
    check_placement(lm.model, lm.source, torch.device("cuda", 0))
    assert "1 of 3 parts of" in caplog.text
    caplog.clear()
    lm.model.hf_device_map = {"embed": 0, "layers.0": 1, "layers.1": 1}
    check_placement(lm.model, lm.source, torch.device("cuda", 0))
    assert caplog.text == ""


def test_an_lm_that_lies_where_no_ids_go_is_refused(lm_dirs):
    lm = CausalLM.from_name(str(lm_dirs["opt"]), device="cpu")
    check_placement(lm.model, lm.source, torch.device("cpu"))
    with pytest.raises(ModelError, match="was put on cpu and cuda:0 is too full for it: name"):
        check_placement(lm.model, lm.source, torch.device("cuda", 0))


def test_a_device_map_is_for_one_process(lm_dirs, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="lm_device_map is 'auto' and there are 2 processes"):
        CausalLM.from_name(str(lm_dirs["opt"]), device_map="auto")
    assert CausalLM.from_name(str(lm_dirs["opt"]), device="cpu").device.type == "cpu"
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert CausalLM.from_name(str(lm_dirs["opt"]), device="cpu", device_map="auto")


def test_a_device_map_takes_no_single_gpu(lm_dirs):
    with pytest.raises(ConfigError, match="device 'cpu:0' is one .* 'auto' takes all of them"):
        CausalLM.from_name(str(lm_dirs["opt"]), device="cpu:0", device_map="auto")


def test_unknown_ways_to_load_are_refused(lm_dirs):
    name = str(lm_dirs["opt"])
    with pytest.raises(ConfigError, match="unknown lm_device_map 'autos'. Did you mean 'auto'"):
        CausalLM.from_name(name, device_map="autos")
    with pytest.raises(ConfigError, match="unknown lm_quantization '9bit'"):
        CausalLM.from_name(name, quantization="9bit")


def test_weights_that_do_not_fit_name_the_ways_out(lm_dirs, monkeypatch):
    def too_large(*args, **kwargs):
        raise torch.OutOfMemoryError("too small")

    monkeypatch.setattr(AutoModel, "from_pretrained", too_large)
    lm = CausalLM.from_name(str(lm_dirs["opt"]), device="cpu")
    with pytest.raises(ModelError, match=r"do not fit cpu: use --lm_device_map auto"):
        lm.states_of(IDS)


def test_an_lm_whose_weights_are_not_finite_is_refused(lm_dirs, tmp_path):
    folder = shutil.copytree(lm_dirs["gpt2"], tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "ln_f" in name)
    broken = {**weights, name: weights[name] * float("nan")}
    save_file(broken, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="gives no finite state in torch.float32, even for plain"):
        CausalLM.from_name(str(folder)).states_of([[5, 6]])
