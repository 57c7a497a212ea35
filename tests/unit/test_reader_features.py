"""The Trainer's features, through the fused reader."""

import json
from types import SimpleNamespace

import pytest
import torch
from small_training import make_arguments, make_inputs, script, tokens, train

from pgra.lm.batching import GroupCost
from pgra.lm.load import find_model, load_tokenizer
from pgra.reader.fid import FusionReader
from pgra.reader.inputs import collate
from pgra.reader.train import compiled_blocks, read_losses

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
    from transformers import modeling_utils

    calls = []
    original = modeling_utils.checkpoint

    def spy(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(modeling_utils, "checkpoint", spy)
    found, reader, _ = run(t5_dir, tmp_path, gradient_checkpointing=True)
    assert calls
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


@torch.no_grad()
def test_compiling_takes_each_block_of_the_encoder_and_gives_it_back(t5_dir, tmp_path):
    reader = FusionReader.from_name(str(t5_dir))
    compiled, seen = [], SimpleNamespace(state=SimpleNamespace(dynamo_plugin=SimpleNamespace()))
    plain = SimpleNamespace(torch_compile=False)
    asked = SimpleNamespace(
        torch_compile=True,
        torch_compile_backend=lambda graph, _: compiled.append(graph) or graph.forward,
        torch_compile_mode=None,
    )
    ids = torch.arange(3, 27).view(3, 8)
    expected = reader.model.get_encoder()(input_ids=ids).last_hidden_state
    for arguments, is_compiled in ((plain, False), (asked, True)):
        with compiled_blocks(reader, arguments, seen):
            found = reader.model.get_encoder()(input_ids=ids).last_hidden_state
        assert bool(compiled) == is_compiled
        torch.testing.assert_close(found, expected)
    assert seen.state.dynamo_plugin.backend == "NO"
    count = len(compiled)
    reader.model.get_encoder()(input_ids=ids[:, :5])
    assert len(compiled) == count


def test_without_dropout_a_batch_has_one_loss(t5_dir):
    tokenizer = load_tokenizer(find_model(str(t5_dir)))
    reader = FusionReader.from_name(str(t5_dir)).train()
    rows = tokens(t5_dir, make_inputs(4, extra=EVIDENCE))
    cost = GroupCost.on(reader.device)
    batch = collate([rows[i] for i in range(4)], pad_token_id=tokenizer.pad_token_id, cost=cost)
    del batch["example_ids"]

    def loss():
        return float(reader(**batch).loss.detach())

    assert loss() != loss()
    reader.set_dropout(0.0)
    assert loss() == loss()
    assert reader.model.config.dropout_rate == 0
    reader.set_dropout(0.3)
    assert loss() != loss()
