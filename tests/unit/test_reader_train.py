import math

import pytest
import torch
from small_training import (
    VERBALIZER,
    accuracy,
    at_batch,
    classifier_of,
    losses,
    make_arguments,
    make_inputs,
    tokens,
    train,
)
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from pgra.errors import ModelError
from pgra.lm.load import find_model
from pgra.parallel import Worker
from pgra.reader.fid import FusionReader
from pgra.reader.predict import T5Classifier
from pgra.reader.resume import Progress, last_checkpoint
from pgra.reader.train import LossLog, load_epoch


@pytest.mark.slow
def test_the_loss_falls_and_the_best_reader_is_written(t5_dir, tmp_path):
    run = tmp_path / "run"
    values = []

    def measure(labels, predictions):
        values.append(accuracy(labels, predictions)["accuracy"])
        return {"accuracy": values[-1]}

    arguments = make_arguments(run, max_steps=30, eval_steps=10)
    reader, progress = train(t5_dir, arguments, measure=measure)
    found = losses(run)
    assert len(found) == progress.step == 30
    assert sum(found[-5:]) < 0.6 * sum(found[:5])
    measured = dict(zip((10, 20, 30), values, strict=True))
    assert progress.best_value == max(measured.values()) == measured[progress.best_step]
    plain = AutoModelForSeq2SeqLM.from_pretrained(run / "reader")
    again = FusionReader(plain).eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "reader")
    dev = tokens(t5_dir, make_inputs(7, name="dev"))
    found = T5Classifier(again, tokenizer, VERBALIZER).predict(dev)
    assert found == classifier_of(reader, t5_dir).predict(dev)
    assert accuracy(dev.labels, [p.label for p in found]) == {"accuracy": progress.best_value}


def test_no_step_leaves_the_reader_as_it_is(t5_dir, tmp_path):
    before = FusionReader.from_source(find_model(str(t5_dir))).state_dict()
    for steps in (0, 1):
        run = tmp_path / str(steps)
        _, progress = train(t5_dir, make_arguments(run, max_steps=steps))
        written = FusionReader.from_source(find_model(str(run / "reader"))).state_dict()
        assert all(torch.equal(written[n], w) for n, w in before.items()) == (steps == 0)
        assert (progress.step, progress.best_step) == (steps, steps or None)
        assert len(losses(run)) == steps
    assert last_checkpoint(tmp_path / "0") is None


def test_the_order_of_examples_depends_on_the_seed_and_the_epoch_alone(tmp_path):
    def order(seed, epoch, done=0, size=18):
        arguments = make_arguments(tmp_path, seed=seed)
        arguments.share_batch(1)
        rows = [f"row {number}" for number in range(size)]
        return list(load_epoch(rows, tuple, arguments, Worker(), epoch, done))

    assert order(1, 0) == order(1, 0)
    assert order(1, 0)[2:] == order(1, 0, done=2)
    assert [len(batch) for batch in order(1, 0)] == [4] * 4  # the last, smaller batch is left out
    assert len({tuple(order(*which)) for which in ((1, 0), (2, 0), (1, 2))}) == 3


def test_a_step_is_the_sum_of_its_accumulated_parts_to_the_last_bit(tmp_path):
    log = LossLog(tmp_path, Progress(), Worker())
    log.add([torch.tensor(0.1), torch.tensor(0.2)])
    log.flush()
    exact = float(torch.tensor([0.1, 0.2]).sum())
    assert losses(tmp_path) == [exact] != [0.1 + 0.2]


def test_a_loss_that_is_nan_stops_and_names_the_last_good_checkpoint(t5_dir, tmp_path):
    run = tmp_path / "run"
    with (
        at_batch(5, breaks=True),
        pytest.raises(ModelError, match="nan at step 5"),
    ):
        train(t5_dir, make_arguments(run))
    assert sorted(p.name for p in run.glob("checkpoint-*")) == ["checkpoint-3"]
    assert not (run / "reader").exists()
    assert len(losses(run)) == 4


def test_broken_weights_reach_no_checkpoint(t5_dir, tmp_path):
    reader = FusionReader.from_source(find_model(str(t5_dir)))

    def spoil():  # after the third loss is computed: nothing else would tell
        reader.model.decoder.final_layer_norm.weight.register_hook(lambda g: g * float("nan"))

    with (
        at_batch(3, spoil),
        pytest.raises(ModelError, match="step 3"),
    ):
        train(t5_dir, make_arguments(tmp_path / "run", max_grad_norm=0), reader=reader)
    assert last_checkpoint(tmp_path / "run") is None


def test_a_tracker_gets_the_log(t5_dir, tmp_path):
    train(t5_dir, make_arguments(tmp_path, max_steps=1, report_to=["tensorboard"]))
    (events,) = (tmp_path / "pgra").glob("events*")
    assert b"dev_accuracy" in events.read_bytes()


@pytest.mark.gpu
def test_a_t5_learns_in_bfloat16_on_a_gpu(t5_dir, tmp_path):
    """Its position bias too, which cuDNN's attention would give no gradient."""
    before = FusionReader.from_source(find_model(str(t5_dir))).model
    arguments = make_arguments(tmp_path, max_steps=1, eval_steps=1, bf16=True)
    reader, _ = train(t5_dir, arguments, device="cuda")
    assert reader.device.type == "cuda"
    assert all(map(math.isfinite, losses(tmp_path)))
    for name, weight in before.state_dict().items():
        if "relative_attention_bias" in name:
            assert not torch.equal(reader.model.state_dict()[name].cpu(), weight)
