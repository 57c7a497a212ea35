"""A causal LM on one device or spread by a device map: the same states, or a refusal."""

import shutil

import pytest
import torch
from conftest import SENTENCES
from transformers import AutoModel

from pgra.errors import ConfigError, ModelError
from pgra.lm.causal_lm import CausalLM
from pgra.lm.load import find_model, load_config, load_tokenizer
from pgra.lm.prefix import PromptedEncoder
from pgra.prompts.fewshot import FewShotPrompt
from pgra.prompts.template import PromptTemplate

IDS = [list(range(5, 25)), list(range(9, 18)), [7]]
PROMPT = FewShotPrompt(PromptTemplate("Is this good?\n{text}"), "A plot.\nThe answer is bad")


@pytest.fixture(scope="module", params=["gpt2", "llama", "opt"])
def folder(request, lm_dirs):
    return str(lm_dirs[request.param])


def open_lm(folder, **how):
    return CausalLM.from_name(str(folder), device="cpu", **how)


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


def test_layers_that_wait_elsewhere_give_the_same_states(folder, tmp_path):
    """As on a GPU with parts on its host: hooks fetch them, here from disk."""
    lm, spread = open_lm(folder), open_lm(folder, device_map="auto")
    spread.__dict__["model"] = AutoModel.from_pretrained(  # `lm.model` refuses the disk
        folder,
        dtype=torch.float32,
        device_map="auto",
        max_memory={"cpu": 60_000},
        offload_folder=tmp_path,
    ).eval()
    assert "disk" in spread.model.hf_device_map.values()
    shared, whole = (PromptedEncoder(one, PROMPT) for one in (spread, lm))
    torch.testing.assert_close(
        shared.encode(SENTENCES), whole.encode(SENTENCES), rtol=1e-4, atol=1e-4
    )
    assert shared.way == whole.way != "none"


def test_a_device_map_is_for_one_process(lm_dirs, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="lm_device_map is 'auto' and there are 2 processes"):
        open_lm(lm_dirs["opt"], device_map="auto")


def test_what_is_no_causal_lm_or_damaged_is_refused(lm_dirs, encoder_dir, tmp_path):
    lm, source = open_lm(lm_dirs["gpt2"]), find_model(str(encoder_dir))
    lm.source, lm.config, lm.tokenizer = source, load_config(source), load_tokenizer(source)
    with pytest.raises(ModelError, match="is not a causal LM: a later token changes"):
        lm.states_of([[5, 6]])
    folder = shutil.copytree(lm_dirs["gpt2"], tmp_path / "broken")
    broken = AutoModel.from_pretrained(folder)
    broken.ln_f.weight.data[:] = float("nan")
    broken.save_pretrained(folder)
    with pytest.raises(ModelError, match="gives no finite state in torch.float32, even for plain"):
        open_lm(folder).states_of([[5, 6]])
