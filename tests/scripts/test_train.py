"""`pgra train` and `evaluate` as commands: what is taken up, refused, shared and repeated."""

import statistics

import pytest
from conftest import contents
from processes import launch
from scripted import call

from pgra.artifacts import lock_folder
from pgra.commands.train import main as train_main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def first(bench):
    """The run that most tests look at."""
    return bench.make("first")


def test_a_second_run_makes_what_a_kill_took(bench, first):
    before = contents(bench.root)
    card = bench.run("first") / "reader" / "README.md"
    card.unlink()
    (bench.run("first") / "checkpoint-2").mkdir()
    (bench.run("first") / ".01234567.partial.json").write_text("{")
    (card.parent / ".README.md.4194305.01234567.partial.md").write_text("half")
    assert "(reused)" in bench.make("first").out
    assert "add --output_dir" in bench.evaluate("first", "--test_file", bench.train_file).error
    assert contents(bench.root) == before


def test_a_run_in_use_is_refused(bench, first):
    with lock_folder(bench.run("first")):
        for refused in (bench.evaluate("first"), bench.train("first")):
            assert "is in use by another pgra job" in refused.error


def test_two_processes_train_as_one(bench, first):
    two = {"artifacts_dir": bench.root / "two", "per_device_train_batch_size": 2}
    called = launch(call, train_main, bench.argv("two", **two))
    assert [each.code for each in called] == [0, 0], called
    told = "".join(each.out + each.err for each in called)
    assert told.count("95 % interval") == told.count("sst2: 36 training") == 1  # one speaks
    one, both = bench.predictions("first"), bench.predictions("two")
    for a, b in zip(one, both, strict=True):
        assert a["id"] == b["id"]
        assert [e["row"] for e in a["evidence"]] == [e["row"] for e in b["evidence"]]
        assert [e["score"] for e in a["evidence"]] == pytest.approx(
            [e["score"] for e in b["evidence"]], rel=1e-3
        )
        assert a["scores"] == pytest.approx(b["scores"], abs=1e-3)
    # The number of processes is nothing of the run's own; what a step learns from is.
    assert bench.evaluate("two", "--output_dir", bench.root / "again").code == 0
    two["per_device_train_batch_size"] = 4
    assert "(reused)" in bench.make("two", **two).out
    two["per_device_train_batch_size"] = 2
    assert "--total_train_batch_size 4 (now 2)" in bench.train("two", **two).error


STEPS = {"num_evidence": 0, "max_steps": 2, "learning_rate": 5e-3}


def test_each_seed_is_the_run_with_that_seed_alone(bench):
    three = bench.make("three", seed=None, seeds=[0, 1, 2], **STEPS)
    found = [bench.metrics(f"three/seed-{s}")["value"] for s in range(3)]
    mean, sd = statistics.mean(found), statistics.stdev(found)
    assert f"{mean:.4f} ± {sd:.4f} (mean ± sample sd of 3 seeds: 0 1 2)" in three.out
    bench.make("alone", **{**STEPS, "seed": 2})
    folders = (bench.run(name) / "reader" for name in ("three/seed-1", "three/seed-2", "alone"))
    one, two, alone = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert two == alone != one
    before = contents(bench.run("three"))
    called = bench.make("three", seed=None, seeds=[0, 1, 2, 3], **STEPS)
    assert called.out.count("(reused)") == 3
    assert before.items() <= contents(bench.run("three")).items()
