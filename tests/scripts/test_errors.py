"""What a user can get wrong: one line that names it, exit code 2, early, and nothing half-written.

What each line says of an argument, a corpus, a task or a data file stands in the tests of these.
"""

import errno
import os
import re

import pytest
from conftest import SENTENCES, largest_file
from scripted import contents, half_written
from tiny_models import build_lm

TASK = """
labels: [negative, positive]
prompt: "{text}"
reader_template: "{text} <extra_id_0>"
verbalizer: {negative: terrible, positive: great}
"""


EARLY = [  # refused before anything is encoded, each by another part
    ({"dataset_name": "bundled:rotten-tomatos", "train_file": None}, "'rotten-tomatoes'?"),
    ({"device": "cuda:99"}, "cannot use device 'cuda:99'"),
    ({"num_candidates": 13}, "num_candidates (13) exceeds the corpus (12 passages): lower it"),
    ({"num_exemplars": 36}, "all 36 training examples stand in the prompt: lower --num_exemplars"),
    ({"max_prompt_tokens": 20}, " tokens before any text"),
    ({"index_factory": "Flatt"}, "index_factory 'Flatt' does not work for 16-wide vectors"),
    ({"per_device_train_batch_size": 39}, " training examples: lower it"),
    ({"lr_scheduler_type": "cosine_with_min_lr"}, "cosine_with_min_lr"),  # by the Trainer
]


@pytest.mark.parametrize(("change", "message"), EARLY, ids=[str(change) for change, _ in EARLY])
def test_what_cannot_work_is_refused_before_anything_is_encoded(bench, change, message):
    assert message in bench.train("never", **change).error
    assert "metrics.json" not in contents(bench.run("never"))
    assert not list(bench.artifacts.glob("indexes/*/vectors*"))
    assert not list(bench.artifacts.glob("banks/*/*.npy"))
    assert half_written(bench.root) == []


def test_a_prefix_over_the_lms_window_is_refused_and_a_long_text_is_cut_and_counted(new_bench):
    lm = build_lm(new_bench.root / "small", "gpt2", window=128)
    assert "num_exemplars" in new_bench.train("never", lm=lm, num_exemplars=16).error
    new_bench.corpus.write_text("\n".join([*SENTENCES[:-1], "the sea " * 300]) + "\n")
    called = new_bench.make("cut", lm=lm, num_candidates=12, num_exemplars=1)
    assert ", 1 texts cut" in called.err


def test_a_damaged_lm_is_named(bench, tmp_path):
    lm = build_lm(tmp_path / "lm", "gpt2")
    weights = lm / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert f"cannot load model '{lm}'" in bench.train("never", lm=lm).error


def test_a_run_is_not_measured_on_inputs_that_changed_since(new_bench):
    task = new_bench.root / "mine.yaml"
    task.write_text(TASK)
    assert new_bench.train("x", task=task).code == 0
    assert new_bench.evaluate("x").code == 0
    before = new_bench.predictions("x")
    lines = new_bench.train_file.read_text().splitlines(keepends=True)
    changes = {
        "corpus": (
            new_bench.corpus,
            new_bench.corpus.read_text() + "One more sentence stands here now.\n",
        ),
        "dev|train|reranker": (new_bench.train_file, "".join(reversed(lines))),
        "reranker": (task, task.read_text().replace("{text}", "Is it good? {text}", 1)),
    }
    for name, (path, changed) in changes.items():
        kept = path.read_text()
        path.write_text(changed)
        error = new_bench.evaluate("x").error
        assert re.search(f"was made with ({name}) .* changed since", error), error
        assert new_bench.predictions("x") == before
        path.write_text(kept)
    assert new_bench.evaluate("x").code == 0  # the control: as they were


@pytest.mark.parametrize("change", ["output_dir", "artifacts_dir"])
def test_an_output_below_a_file_is_refused(bench, tmp_path, change):
    (tmp_path / "file").write_text("mine")
    called = bench.train("never", **{change: tmp_path / "file" / "run"})
    assert str(tmp_path / "file") in called.error
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_is_said_and_the_same_command_goes_on(new_bench, monkeypatch):
    """Whichever file does not fit, nothing half-written stays; with room, the run goes on."""
    fsync, handles, places = os.fsync, [], (2, 5, 9, 20, 45)

    def full(handle):
        handles.append(handle)
        if len(handles) in places:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    for place in places:
        error = new_bench.train("x").error
        assert len(handles) == place
        assert "the disk is full" in error or "No space left" in error
        assert str(new_bench.root) in error
        assert half_written(new_bench.root) == []
        assert "metrics.json" not in contents(new_bench.root)
    assert new_bench.train("x").code == 0
    broken = new_bench.predictions("x")
    assert new_bench.train("whole", artifacts_dir=new_bench.root / "other").code == 0
    assert broken == new_bench.predictions("whole")


@pytest.mark.slow
@pytest.mark.parametrize("limit", [2_000, 30_000, 100_000])
def test_a_file_larger_than_the_system_allows_is_one_line(new_bench, limit):
    """Everything that writes meets a real limit: our code, safetensors, tokenizers, torch.save."""
    with largest_file(limit):
        called = new_bench.train("x")
    assert called.error.startswith("cannot ")
    assert half_written(new_bench.root) == []
    assert new_bench.train("x").code == 0
