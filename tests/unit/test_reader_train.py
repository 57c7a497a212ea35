import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import reader_inputs
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from pgra.arguments import parse_arguments
from pgra.config import ReaderArguments
from pgra.errors import ArtifactError, ConfigError, DataError, ModelError
from pgra.models.fid import FusionReader
from pgra.models.loading import find_model, load_tokenizer
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.reader.checkpoints import last_checkpoint
from pgra.reader.predict import predict
from pgra.reader.train import train_reader

VERBALIZER = Verbalizer({"negative": "terrible", "positive": "great"}, "{text} <extra_id_0>")
GOOD, BAD = ["warm", "funny", "praised"], ["dull", "lifeless", "wastes"]
THINGS = ["film", "story", "plot", "acting", "album"]


def _inputs(count, *, name="train", extra=()):
    rows = []
    for i in range(count):
        label, words = ("positive", GOOD) if i % 2 else ("negative", BAD)
        query = f"A {words[i // 2 % 3]} {THINGS[i % 5]} <extra_id_0>"
        segments = tuple(f"{query} {text}" for text in extra) or (query,)
        rows.append((f"{name}-{i}", segments, label))
    return rows


def _tokens(t5_dir, items):
    return reader_inputs(load_tokenizer(find_model(str(t5_dir))), VERBALIZER, items)


def _accuracy(labels, predictions):
    right = sum(a == b for a, b in zip(labels, predictions, strict=True))
    return {"accuracy": right / len(labels)}


def _arguments(folder, **changes):
    values = {
        "output_dir": str(folder),
        "max_steps": 6,
        "eval_steps": 3,
        "logging_steps": 1,
        "learning_rate": 5e-3,
        "per_device_train_batch_size": 4,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return ReaderTrainingArguments(**{**values, **changes})


def _train(t5_dir, arguments, *, train=None, dev=None, reader=None, measure=_accuracy):
    reader = reader or FusionReader.from_name(str(t5_dir))
    tokenizer = load_tokenizer(find_model(str(t5_dir)))
    result = train_reader(
        reader,
        tokenizer,
        _tokens(t5_dir, train or _inputs(18)),
        _tokens(t5_dir, dev or _inputs(7, name="dev")),
        verbalizer=VERBALIZER,
        measure=measure,
        metric="accuracy",
        arguments=arguments,
    )
    return reader, result


def _weights(reader):
    return {name: tensor.clone() for name, tensor in reader.state_dict().items()}


def _losses(result):
    return [entry["loss"] for entry in result.history if "loss" in entry]


def test_the_loss_falls_and_the_best_reader_is_written(t5_dir, tmp_path):
    run = tmp_path / "run"
    reader, result = _train(t5_dir, _arguments(run, max_steps=30, eval_steps=10))
    losses = _losses(result)
    assert len(losses) == 30
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    assert result.steps == 30
    assert result.best_step in (10, 20, 30)
    measured = {e["step"]: e["eval_accuracy"] for e in result.history if "eval_accuracy" in e}
    assert sorted(measured) == [10, 20, 30]
    assert result.best_metric == max(measured.values()) == measured[result.best_step]
    assert result.folder == run / "reader"
    plain = AutoModelForSeq2SeqLM.from_pretrained(result.folder)
    again = FusionReader(plain).eval()
    tokenizer = AutoTokenizer.from_pretrained(result.folder)
    dev = _tokens(t5_dir, _inputs(7, name="dev"))
    found = predict(again, tokenizer, dev, VERBALIZER)
    assert found == predict(reader, tokenizer, dev, VERBALIZER)
    assert _accuracy(dev.labels, [p.label for p in found]) == {"accuracy": result.best_metric}


def test_the_checkpoint_with_the_highest_metric_is_kept_not_the_last(t5_dir, tmp_path):
    values = iter([0.2, 0.9, 0.5])
    reader, result = _train(
        t5_dir,
        _arguments(tmp_path, eval_steps=2),
        measure=lambda labels, predictions: {"accuracy": next(values)},
    )
    assert (result.best_step, result.best_metric) == (4, 0.9)
    kept = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "checkpoint-4").shared.weight
    assert torch.equal(kept, reader.t5.shared.weight)
    written = AutoModelForSeq2SeqLM.from_pretrained(result.folder).shared.weight
    assert torch.equal(written, kept)


def test_a_stopped_run_that_is_resumed_is_the_unbroken_run(t5_dir, tmp_path):
    whole, _ = _train(t5_dir, _arguments(tmp_path / "whole", max_steps=9))
    broken = tmp_path / "broken"
    with pytest.MonkeyPatch.context() as patch:
        from pgra.reader import train as module

        class Stopping(module._KeepWhole):
            def on_save(self, args, state, control, **kwargs):
                super().on_save(args, state, control, **kwargs)
                raise KeyboardInterrupt

        patch.setattr(module, "_KeepWhole", Stopping)
        with pytest.raises(KeyboardInterrupt):
            _train(t5_dir, _arguments(broken, max_steps=9))
    found = last_checkpoint(broken)
    assert found is not None
    assert found.name == "checkpoint-3"
    resumed, result = _train(t5_dir, _arguments(broken, max_steps=9, resume_from_checkpoint="true"))
    assert result.steps == 9
    expected = _weights(whole)
    for name, tensor in _weights(resumed).items():
        assert torch.equal(tensor, expected[name]), name
    other, _ = _train(t5_dir, _arguments(tmp_path / "other", max_steps=9, seed=43))
    assert not torch.equal(_weights(other)["shared.weight"], expected["shared.weight"])


def test_eight_at_once_are_twice_four_accumulated(t5_dir, tmp_path):
    readers = []
    for name, batch, accumulated in (("once", 8, 1), ("twice", 4, 2)):
        still = AutoModelForSeq2SeqLM.from_pretrained(t5_dir, dropout_rate=0.0)
        reader = FusionReader(still)
        arguments = _arguments(
            tmp_path / name,
            max_steps=2,
            eval_steps=2,
            learning_rate=1e-3,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulated,
        )
        _, result = _train(t5_dir, arguments, reader=reader)
        readers.append((_losses(result), reader))
    assert readers[0][0] == pytest.approx(readers[1][0], rel=1e-4)


def test_examples_come_in_the_same_order_whatever_the_evidence(t5_dir, tmp_path, monkeypatch):
    from pgra.reader import collate

    orders = []
    plain = collate.Collator.__call__
    for name, extra in (("none", ()), ("two", ("the sea", "a town"))):
        train = _inputs(18, extra=extra)
        seen = []

        def spy(self, rows, seen=seen):
            seen.append([row.target.tolist() + row.segments[0].tolist()[:5] for row in rows])
            return plain(self, rows)

        monkeypatch.setattr(collate.Collator, "__call__", spy)
        _train(
            t5_dir,
            _arguments(tmp_path / name, eval_strategy="no", load_best_model_at_end=False),
            train=train,
        )
        orders.append(seen[:6])
    assert orders[0] == orders[1]


def test_a_loss_that_is_nan_stops_and_keeps_the_good_checkpoint(t5_dir, tmp_path, monkeypatch):
    from pgra.models import fid

    calls = []
    plain = fid.FusionReader.forward

    def breaking(self, *args, **kwargs):
        output = plain(self, *args, **kwargs)
        calls.append(1)
        if len(calls) == 5:
            output.loss = output.loss * float("nan")
        return output

    monkeypatch.setattr(fid.FusionReader, "forward", breaking)
    run = tmp_path / "run"
    with pytest.raises(ModelError, match=r"loss is nan at step 5: the last good one is .*point-3"):
        _train(t5_dir, _arguments(run))
    assert sorted(p.name for p in run.glob("checkpoint-*")) == ["checkpoint-3"]
    assert not (run / "reader").exists()


def test_broken_weights_reach_no_checkpoint(t5_dir, tmp_path, monkeypatch):
    from pgra.reader import train as module

    monkeypatch.setattr(module, "_sums", lambda _: [float("inf")])
    with pytest.raises(ModelError, match="a weight is not a number after step 3"):
        _train(t5_dir, _arguments(tmp_path / "run"))
    assert last_checkpoint(tmp_path / "run") is None


def test_a_checkpoint_is_a_t5_folder_and_a_half_one_is_passed_over(t5_dir, tmp_path):
    run = tmp_path / "run"
    _train(t5_dir, _arguments(run))
    whole = last_checkpoint(run)
    assert whole is not None
    AutoModelForSeq2SeqLM.from_pretrained(whole)
    half = run / "checkpoint-99"
    shutil.copytree(whole, half)
    (half / "trainer_state.json").unlink()
    assert last_checkpoint(run) == whole


def test_an_output_folder_in_use_is_not_written_over(t5_dir, tmp_path):
    run = tmp_path / "run"
    _train(t5_dir, _arguments(run))
    with pytest.raises(ArtifactError, match=r"holds checkpoints .*--resume_from_checkpoint true"):
        _train(t5_dir, _arguments(run))
    with pytest.raises(ArtifactError, match="holds no whole checkpoint to resume from"):
        _train(t5_dir, _arguments(tmp_path / "no", resume_from_checkpoint="true"))
    with pytest.raises(ArtifactError, match=r"is no whole checkpoint \(trainer_state.json is"):
        _train(t5_dir, _arguments(tmp_path / "no", resume_from_checkpoint=str(tmp_path)))


def test_what_cannot_be_learnt_from_is_refused(t5_dir, tmp_path):
    with pytest.raises(
        ConfigError, match=r"batch_size \(4\) times 1 processes exceeds the 3 train"
    ):
        _train(t5_dir, _arguments(tmp_path), train=_inputs(3))
    with pytest.raises(DataError, match="has label None"):
        _train(t5_dir, _arguments(tmp_path), train=[("x", ("y",), None)])


def test_arguments_have_the_papers_defaults():
    arguments = ReaderTrainingArguments(use_cpu=True)
    assert (arguments.learning_rate, arguments.max_steps, arguments.weight_decay) == (
        8e-5,
        5000,
        0.01,
    )
    assert (arguments.per_device_train_batch_size, arguments.seed) == (8, 42)
    assert (arguments.eval_steps, arguments.save_steps, arguments.max_grad_norm) == (500, 500, 1.0)
    assert arguments.load_best_model_at_end
    assert arguments.report_to == []
    assert arguments.lr_scheduler_type == "linear"


def test_a_short_run_is_measured_at_its_end():
    arguments = ReaderTrainingArguments(use_cpu=True, max_steps=40)
    assert (arguments.eval_steps, arguments.save_steps) == (40, 40)
    arguments = ReaderTrainingArguments(use_cpu=True, max_steps=40, eval_steps=20)
    assert (arguments.eval_steps, arguments.save_steps) == (20, 20)


def test_arguments_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="fp16 overflows in a T5"):
        ReaderTrainingArguments(fp16=True)
    with pytest.raises(ConfigError, match=r"save_steps \(500\) differs from eval_steps \(20\)"):
        ReaderTrainingArguments(save_steps=500, eval_steps=20)
    with pytest.raises(ConfigError, match="label_smoothing_factor is not supported"):
        ReaderTrainingArguments(label_smoothing_factor=0.1)
    with pytest.raises(ConfigError, match="training arguments: --load_best_model_at_end requires"):
        ReaderTrainingArguments(eval_strategy="no")


def test_arguments_come_from_yaml_and_command_line(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("learning_rate: 0.001\nmax_steps: 40\nmax_segment_tokens: 64\n")
    reader, training = parse_arguments(
        [ReaderArguments, ReaderTrainingArguments],
        ["--config", str(path), "--max_steps", "20", "--use_cpu"],
        prog="train.py",
        description="Train.",
    )
    assert reader.max_segment_tokens == 64
    assert (training.learning_rate, training.max_steps, training.eval_steps) == (0.001, 20, 20)


_TWO = """
import json, sys
sys.path.insert(0, sys.argv[1])
from test_reader_train import _arguments, _inputs, _tokens, _train
reader, result = _train(sys.argv[2], _arguments(sys.argv[3]), dev=_inputs(7, name="dev"))
import torch.distributed as dist
from pgra.models.loading import find_model, load_tokenizer
from pgra.reader.predict import predict
from pgra.types import Worker
from test_reader_train import VERBALIZER
tokenizer = load_tokenizer(find_model(sys.argv[2]))
args = (reader, tokenizer, _tokens(sys.argv[2], _inputs(7, name="dev")), VERBALIZER)
alone = predict(*args)
shared = predict(*args, batch_tokens=30, worker=Worker(dist.get_rank(), 2))
same = [(p.example_id, p.label) for p in alone] == [(p.example_id, p.label) for p in shared]
if dist.get_rank() == 0:
    steps = [e["step"] for e in result.history if "eval_accuracy" in e]
    found = [dist.get_world_size(), result.best_metric, steps, same]
    print("RESULT", json.dumps(found), flush=True)
dist.barrier()  # one that ends before the other takes the store with it
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_count_each_dev_example_once(t5_dir, tmp_path):
    script = tmp_path / "two.py"
    script.write_text(_TWO)
    root = Path(__file__).parents[2]
    paths = [str(root), str(root / "tests"), str(Path(__file__).parent)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
         str(script), str(Path(__file__).parent), str(t5_dir), str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    world, best, steps, same = json.loads(line.removeprefix("RESULT "))
    assert (world, steps, same) == (2, [3, 6], True)
    assert best * 7 == pytest.approx(round(best * 7))  # sevenths: no example counted twice
    assert (tmp_path / "run" / "reader" / "model.safetensors").is_file()
