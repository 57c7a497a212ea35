"""The Trainer's features, through the fused reader."""

import json
from unittest.mock import Mock

import pytest
import torch
from small_training import make_arguments, make_inputs, script, train
from transformers import modeling_utils

from pgra.reader.fid import FusionReader
from pgra.reader.train import read_losses

EVIDENCE = ("the sea", "a town on a hill", "her second album")


def losses(folder):
    return [record.loss for record in read_losses(folder / "losses.jsonl", 99)]


def run(t5_dir, folder, **changes):
    values = {"max_steps": 4, "eval_steps": 4, **changes}
    rows = make_inputs(18, extra=EVIDENCE)
    reader, result = train(t5_dir, make_arguments(folder, **values), rows=rows, dropout=0.0)
    return losses(folder), reader, result


@pytest.fixture(scope="module")
def plain(t5_dir, tmp_path_factory):
    return run(t5_dir, tmp_path_factory.mktemp("plain"))


def test_eight_at_once_are_twice_four_accumulated(t5_dir, tmp_path):
    once, *_ = run(t5_dir, tmp_path / "once", per_device_train_batch_size=8)
    twice, *_ = run(t5_dir, tmp_path / "twice", gradient_accumulation_steps=2)
    assert once == pytest.approx(twice, rel=1e-5)
    four, *_ = run(t5_dir, tmp_path / "four")
    assert once != pytest.approx(four, rel=1e-3)


def test_gradient_checkpointing_computes_the_same(plain, t5_dir, tmp_path, monkeypatch):
    spy = Mock(wraps=modeling_utils.checkpoint)
    monkeypatch.setattr(modeling_utils, "checkpoint", spy)
    found, reader, _ = run(t5_dir, tmp_path, gradient_checkpointing=True)
    assert spy.called
    assert found == pytest.approx(plain[0], rel=1e-6)
    for name, weight in plain[1].state_dict().items():
        torch.testing.assert_close(reader.state_dict()[name], weight)


def test_bfloat16_is_near_and_keeps_float32_weights(plain, t5_dir, tmp_path):
    found, reader, result = run(t5_dir, tmp_path, bf16=True)
    assert found == pytest.approx(plain[0], rel=0.03)
    assert found != pytest.approx(plain[0], rel=1e-6)
    assert {weight.dtype for weight in reader.state_dict().values()} == {torch.float32}
    assert result.best_metric is not None


@pytest.mark.slow
def test_a_compiled_reader_trains_alike_and_is_saved_plain(t5_dir, tmp_path):
    told = {"max_steps": 2, "gradient_accumulation_steps": 1, "dropout": 0.0}
    # Without code generation, which takes half a minute: what is tested is what is compiled.
    compiled = {**told, "torch_compile": True, "torch_compile_backend": "eager"}
    for name, values in (("plain", told), ("compiled", compiled)):
        done = script(t5_dir, tmp_path / name, json.dumps(values))
        assert done.returncode == 0, done.stderr[-2000:]
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)
    one, other = (
        FusionReader.from_name(str(tmp_path / name / "reader")).state_dict()
        for name in ("plain", "compiled")
    )
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight)
