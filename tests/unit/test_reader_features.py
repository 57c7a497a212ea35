"""What a training can do, through the fused reader."""

import shutil
from unittest.mock import Mock

import pytest
import torch
from small_training import classifier_of, losses, make_arguments, make_inputs, tokens, train
from transformers import modeling_utils

from pgra.lm.load import find_model
from pgra.reader.fid import FusionReader

EVIDENCE = ("the sea", "a town on a hill", "her second album")


def run(t5_dir, folder, **changes):
    arguments = make_arguments(folder, max_steps=2, eval_steps=2, **changes)
    rows = make_inputs(18, extra=EVIDENCE)
    reader, _ = train(t5_dir, arguments, rows=rows, dropout=0.0)
    return losses(folder), reader


@pytest.fixture(scope="module")
def plain(t5_dir, tmp_path_factory):
    return run(t5_dir, tmp_path_factory.mktemp("plain"))


def test_gradient_checkpointing_computes_the_same(plain, t5_dir, tmp_path, monkeypatch):
    spy = Mock(wraps=modeling_utils.checkpoint)
    monkeypatch.setattr(modeling_utils, "checkpoint", spy)
    found, reader = run(t5_dir, tmp_path, gradient_checkpointing=True)
    assert spy.called
    assert found == pytest.approx(plain[0], rel=1e-6)
    for name, weight in plain[1].state_dict().items():
        torch.testing.assert_close(reader.state_dict()[name], weight)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles by a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # torch warns itself while it compiles
def test_compiled_layers_compute_the_same(plain, t5_dir, tmp_path):
    found, reader = run(t5_dir, tmp_path, torch_compile=True)
    layers = reader.model.get_encoder().block
    assert all(layer._compiled_call_impl is not None for layer in layers)
    assert plain[1].model.get_encoder().block[0]._compiled_call_impl is None
    assert found == pytest.approx(plain[0], rel=1e-5)
    for name, weight in plain[1].state_dict().items():
        torch.testing.assert_close(reader.state_dict()[name], weight)


@pytest.mark.slow
def test_bfloat16_keeps_float32_weights_and_decides(plain, t5_dir, tmp_path):
    dev = tokens(t5_dir, make_inputs(7, name="dev"))

    def scores(reader):
        return classifier_of(reader, t5_dir).score(dev).tolist()

    found, reader = run(t5_dir, tmp_path / "half", bf16=True)
    assert found == pytest.approx(plain[0], rel=0.03)
    assert found != pytest.approx(plain[0], rel=1e-6)
    assert {weight.dtype for weight in reader.state_dict().values()} == {torch.float32}
    again = FusionReader.from_source(find_model(str(tmp_path / "half" / "reader")))
    assert reader.is_half
    assert again.is_half
    assert scores(again) == scores(reader)
    again.is_half = False
    assert scores(again) != scores(reader)  # the control
    again.save_pretrained(tmp_path)
    assert "pgra" not in (tmp_path / "config.json").read_text()  # a plain T5's
