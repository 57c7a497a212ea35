"""What a model's folder must hold, whoever loads it: all weights, and an embedding for each token.

Each is tried for all kinds of models, beside the same folder in order.
"""

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
)

from pgra.encoders.encoder import Encoder
from pgra.errors import ModelError
from pgra.lm.causal_lm import CausalLM
from pgra.lm.load import find_model, load_tokenizer
from pgra.reader.fid import FusionReader
from pgra.retrieval.base import RetrieverArguments
from pgra.retrieval.neighbors import open_neighbor_encoder

pytestmark = pytest.mark.slow

TEXT = "The sea was red."
WEIGHTS = "model.safetensors"


def states(folder):
    lm = CausalLM(folder, device="cpu")
    return lm.states_of(lm.tokenize([TEXT]))


def words(folder):
    return torch.tensor(CausalLM(folder, device="cpu").score([TEXT], [" a"]))


def encode(folder, **how):
    return torch.tensor(Encoder(folder, device="cpu", **how).encode([TEXT]))


def by_t5(folder):
    args = RetrieverArguments(neighbor_encoder="reader")
    return torch.tensor(open_neighbor_encoder(args, folder, "cpu").encode([TEXT]))


def norms(module):
    return torch.stack([weight.norm() for weight in module.state_dict().values()])


LOADERS = {  # what is built, who loads it, and a name in all layers that are taken away
    "gpt2 states": ("gpt2", states, ".h.1."),
    "opt words": ("opt-350m", words, ".layers.1."),
    "llama words": ("llama", words, "lm_head"),
    "flan-t5 reader": (
        "flan-t5",
        lambda folder: norms(FusionReader.from_source(find_model(folder))),
        "lm_head",
    ),
    "t5 shared": (
        "t5",
        lambda folder: norms(FusionReader.from_source(find_model(folder))),
        "shared",
    ),
    "t5 encoder": ("t5", by_t5, "encoder.block.1."),
    "bert encoder": ("bert", encode, "layer.1."),
    "bert pooler": ("bert", lambda folder: encode(folder, pooling="pooler"), "pooler"),
}


@pytest.fixture
def built(lm_dirs, t5_dirs, encoder_dirs, tmp_path):
    def copy(kind, rename=lambda name: name):
        """Copy a folder, its weights renamed; None leaves one out."""
        folder = tmp_path / kind
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree({**lm_dirs, **t5_dirs, **encoder_dirs}[kind], folder)
        weights = load_file(folder / WEIGHTS)
        kept = {new: weight for name, weight in weights.items() if (new := rename(name))}
        save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})
        return str(folder)

    return copy


@pytest.mark.parametrize("loader", LOADERS)
def test_missing_weights_are_refused(built, loader):
    kind, load, part = LOADERS[loader]
    load(built(kind))  # the control
    with pytest.raises(ModelError, match=kind):
        load(built(kind, lambda name: name if part not in f".{name}" else None))


@pytest.mark.parametrize("form", ["beside the model", "in its weights"])
def test_adapters_that_are_not_merged_are_refused(built, form):
    folder = Path(built("gpt2"))
    if form == "in its weights":
        more = {"transformer.h.0.attn.c_attn.lora_A.default.weight": torch.ones(4, 32)}
        weights = load_file(folder / WEIGHTS) | more
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    else:
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ModelError, match="peft"):
        states(str(folder))


OPENERS = {
    "gpt2": states,
    "bert": encode,
    "flan-t5": by_t5,
    "mt5": lambda folder: load_tokenizer(find_model(folder)),  # as a reader is opened
}


@pytest.mark.parametrize("kind", OPENERS)
def test_a_token_beyond_the_embeddings_is_refused(built, kind):
    folder = built(kind)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    number = len(tokenizer)
    tokenizer.add_tokens(["[NEW]"])
    tokenizer.save_pretrained(folder)
    message = f"{number} .*{number + 1}"
    with pytest.raises(ModelError, match=message):
        OPENERS[kind](folder)
    model = {"gpt2": AutoModelForCausalLM, "bert": AutoModel}.get(kind, AutoModelForSeq2SeqLM)
    model = model.from_pretrained(folder)
    if kind == "gpt2":
        with pytest.raises(ModelError, match=message):
            CausalLM(model, tokenizer)
    model.resize_token_embeddings(number + 8)  # the control: more embeddings are usual
    model.save_pretrained(folder)
    OPENERS[kind](folder)


@pytest.mark.parametrize("kind", ["gpt2", "bert", "flan-t5"])
def test_weights_that_may_hold_code_are_refused(built, kind):
    folder = Path(built(kind))
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        OPENERS[kind](str(folder))


@pytest.mark.parametrize("kind", OPENERS)
def test_no_code_of_a_model_runs_whatever_is_on_stdin(built, kind, tmp_path, monkeypatch):
    folder, ran = Path(built(kind)), tmp_path / "ran"
    (folder / "planted.py").write_text(
        f"import pathlib\npathlib.Path({str(ran)!r}).write_text('it ran')\n"
        "from transformers import BertConfig\nclass PlantedConfig(BertConfig):\n    pass\n"
    )
    path = folder / "config.json"
    named = {"model_type": "planted", "auto_map": {"AutoConfig": "planted.PlantedConfig"}}
    path.write_text(json.dumps(named))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with pytest.raises(ModelError, match=kind):
        OPENERS[kind](str(folder))
    assert not ran.exists()
    AutoConfig.from_pretrained(folder)  # the control: transformers asks, and the "y" runs it
    assert ran.exists()
