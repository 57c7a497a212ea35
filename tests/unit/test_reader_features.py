"""The Trainer's features, through the fused reader."""

import pytest
import torch
from small_training import VERBALIZER, make_arguments, make_inputs, tokens, train

from pgra.models.fid import FusionReader
from pgra.models.loading import find_model, load_tokenizer
from pgra.models.segments import GroupCost
from pgra.reader.collate import Collator
from pgra.reader.losses import read_losses
from pgra.reader.trainer import set_dropout

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


def test_without_dropout_a_batch_has_one_loss(t5_dir):
    tokenizer = load_tokenizer(find_model(str(t5_dir)))
    reader = FusionReader.from_name(str(t5_dir)).train()
    rows = tokens(t5_dir, make_inputs(4, extra=EVIDENCE))
    collate = Collator(tokenizer.pad_token_id, GroupCost.on(reader.device))
    batch = collate([rows[i] for i in range(4)])

    def loss():
        return float(reader(**batch.packed.as_inputs(), labels=batch.labels).loss.detach())

    assert loss() != loss()
    set_dropout(reader, 0.0)
    assert loss() == loss()
    assert reader.t5.config.dropout_rate == 0
    set_dropout(reader, 0.3)
    assert loss() != loss()
    assert VERBALIZER.labels == ("negative", "positive")
