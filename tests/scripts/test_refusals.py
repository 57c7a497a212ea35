"""What can be refused at the start is refused there; what changed since is never measured."""

import re

import pytest
from scripted import Bench


@pytest.fixture
def bench(tmp_path, lm_dirs, encoder_dirs, t5_dirs):
    return Bench(tmp_path, lm_dirs["opt"], encoder_dirs["bert"], t5_dirs["t5"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": "-1"}, r"learning_rate is -1\.0: it must be above 0"),
        ({"learning_rate": "nan"}, "learning_rate is nan: it must be a finite number"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size is 0: it must be at"),
        ({"seed": -1}, "seed is -1: it must"),
        ({"max_steps": 0}, "max_steps is 0: it must be at least 1"),
        ({"max_steps": -5}, "max_steps is -5: it must be at least 1"),
        ({"lm": "nope/nope"}, "cannot find model 'nope/nope'"),
        ({"max_prompt_tokens": 20}, r"the prompt has \d+ tokens before any text"),
        ({"num_candidates": 99}, r"num_candidates \(99\) exceeds the corpus"),
        ({"per_device_train_batch_size": 39}, r"exceeds the \d+ training examples: lower it"),
    ],
)
def test_it_is_refused_before_anything_is_encoded(bench, change, message):
    error = bench.train("x", **change).error
    assert re.search(message, error), error
    assert not (bench.artifacts / "indexes").exists()
    assert not bench.run("x").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("neftune_noise_alpha", 5),
        ("train_sampling_strategy", "group_by_length"),
        ("weight_decay", "nan"),
        ("num_train_epochs", "inf"),
        ("lr_scheduler_type", "cosine_with_min_lr"),
        ("metric_for_best_model", "unknown"),
    ],
)
def test_a_value_the_trainer_cannot_use_is_refused_before_anything_is_made(bench, name, value):
    error = bench.train("x", **{name: value}).error
    assert name in error
    assert str(value) in error
    assert not bench.artifacts.exists()
    assert not bench.run("x").exists()


def test_an_encoder_as_lm_is_refused_before_anything_is_encoded(bench):
    assert "is a bert, not a causal LM" in bench.train("x", lm=bench.encoder).error
    assert not (bench.artifacts / "indexes").exists()


def test_a_run_is_not_measured_on_inputs_that_changed_since(bench):
    task = bench.root / "mine.yaml"
    text = (
        "labels: [negative, positive]\nprompt: 'Good?\\n{text}'\nreader_template: '{text} It was'\n"
    )
    task.write_text(text + "verbalizer: {negative: terrible, positive: great}\n")
    assert bench.train("x", task=task).code == 0
    before = {p.name: p.read_bytes() for p in bench.run("x").iterdir() if p.is_file()}
    assert bench.evaluate("x").code == 0
    lines = bench.train_file.read_text().splitlines(keepends=True)
    changes = {
        "corpus": (bench.corpus, bench.corpus.read_text() + "One more sentence stands here now.\n"),
        "dev|train|reranker": (bench.train_file, "".join(reversed(lines))),
        "reranker": (task, task.read_text().replace("Good?", "Is it good?")),
    }
    for name, (path, changed) in changes.items():
        kept = path.read_text()
        path.write_text(changed)
        error = bench.evaluate("x").error
        assert re.search(f"was made with ({name}) .* changed since", error), error
        after = {p.name: p.read_bytes() for p in bench.run("x").iterdir() if p.is_file()}
        assert after["predictions.jsonl"] == before["predictions.jsonl"]
        path.write_text(kept)
    assert bench.evaluate("x").code == 0  # the control: as they were
