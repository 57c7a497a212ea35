"""What a user can get wrong: one line that names it, exit code 2, early, and nothing half-written.

What each line says of an argument, a corpus, a task or a data file stands in the tests of these.
"""

import errno
import os
import re

import pytest
from conftest import SENTENCES, largest_file
from scripted import Bench, call, contents, half_written
from tiny_models import build_encoder, build_lm

from index_build.__main__ import main as index_main

TASK = """
labels: [negative, positive]
prompt: "{text}"
reader_template: "{text} <extra_id_0>"
verbalizer: {negative: terrible, positive: great}
"""


@pytest.fixture
def bench(tmp_path, lm_dirs, encoder_dir, t5_dir):
    return Bench(tmp_path, lm_dirs["gpt2"], encoder_dir, t5_dir)


@pytest.fixture(scope="module")
def shared(tmp_path_factory, lm_dirs, encoder_dir, t5_dir):
    """For mistakes that are found before anything is written."""
    return Bench(tmp_path_factory.mktemp("errors"), lm_dirs["gpt2"], encoder_dir, t5_dir)


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
def test_what_cannot_work_is_refused_before_anything_is_encoded(shared, change, message):
    assert message in shared.train("never", **change).error
    assert "metrics.json" not in contents(shared.run("never"))
    assert not list(shared.artifacts.glob("indexes/*/vectors*"))
    assert not list(shared.artifacts.glob("banks/*/*.npy"))
    assert half_written(shared.root) == []


def test_a_prefix_over_the_lms_window_is_refused_and_a_long_text_is_cut_and_counted(bench):
    lm = build_lm(bench.root / "small", "gpt2", window=128)
    assert "num_exemplars" in bench.train("never", lm=lm, num_exemplars=16).error
    bench.corpus.write_text("\n".join([*SENTENCES[:-1], "the sea " * 300]) + "\n")
    called = bench.train("cut", lm=lm, num_candidates=12, num_exemplars=1)
    assert called.code == 0, called.err
    assert ", 1 texts cut" in called.err


def test_an_index_of_another_corpus_or_encoder_is_refused(bench, tmp_path):
    index = tmp_path / "index"
    flags = {"corpus": bench.corpus, "encoder": bench.encoder, "output_dir": index, "device": "cpu"}
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    assert call(index_main, [*words, "--artifacts_dir", str(bench.artifacts)]).code == 0
    before = contents(index)
    other = build_encoder(tmp_path / "roberta", "roberta")
    error = bench.train("x", index_dir=index, encoder=other).error
    assert re.search(f"{index} was made with .*this run asks for", error), error
    bench.corpus.write_text("\n".join(SENTENCES[::-1]) + "\n")
    assert f"{index} was made with corpus_sha256" in bench.train("x", index_dir=index).error
    assert contents(index) == before
    assert not bench.run("x").exists()


def test_a_damaged_lm_is_named(shared, tmp_path):
    lm = build_lm(tmp_path / "lm", "gpt2")
    weights = lm / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert f"cannot load model '{lm}'" in shared.train("never", lm=lm).error


def test_a_run_is_not_measured_on_inputs_that_changed_since(bench):
    task = bench.root / "mine.yaml"
    task.write_text(TASK)
    assert bench.train("x", task=task).code == 0
    assert bench.evaluate("x").code == 0
    before = bench.predictions("x")
    lines = bench.train_file.read_text().splitlines(keepends=True)
    changes = {
        "corpus": (bench.corpus, bench.corpus.read_text() + "One more sentence stands here now.\n"),
        "dev|train|reranker": (bench.train_file, "".join(reversed(lines))),
        "reranker": (task, task.read_text().replace("{text}", "Is it good? {text}", 1)),
    }
    for name, (path, changed) in changes.items():
        kept = path.read_text()
        path.write_text(changed)
        error = bench.evaluate("x").error
        assert re.search(f"was made with ({name}) .* changed since", error), error
        assert bench.predictions("x") == before
        path.write_text(kept)
    assert bench.evaluate("x").code == 0  # the control: as they were


@pytest.mark.parametrize("change", ["output_dir", "artifacts_dir"])
def test_an_output_below_a_file_is_refused(shared, tmp_path, change):
    (tmp_path / "file").write_text("mine")
    called = shared.train("never", **{change: tmp_path / "file" / "run"})
    assert str(tmp_path / "file") in called.error
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_is_said_and_the_same_command_goes_on(bench, monkeypatch):
    """Whichever file does not fit, nothing half-written stays; with room, the run goes on."""
    fsync, handles, places = os.fsync, [], (2, 5, 9, 20, 45)

    def full(handle):
        handles.append(handle)
        if len(handles) in places:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    for place in places:
        error = bench.train("x").error
        assert len(handles) == place
        assert "the disk is full" in error or "No space left" in error
        assert str(bench.root) in error
        assert half_written(bench.root) == []
        assert "metrics.json" not in contents(bench.root)
    assert bench.train("x").code == 0
    broken = bench.predictions("x")
    assert bench.train("whole", artifacts_dir=bench.root / "other").code == 0
    assert broken == bench.predictions("whole")


@pytest.mark.slow
@pytest.mark.parametrize("limit", [2_000, 30_000, 100_000])
def test_a_file_larger_than_the_system_allows_is_one_line(bench, limit):
    """Everything that writes meets a real limit: our code, safetensors, tokenizers, torch.save."""
    with largest_file(limit):
        called = bench.train("x")
    assert called.error.startswith("cannot ")
    assert half_written(bench.root) == []
    assert bench.train("x").code == 0
