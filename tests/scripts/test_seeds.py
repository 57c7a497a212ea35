"""Several seeds in one command, and trackers, as a user gives them."""

import shutil
import statistics

import pytest
from conftest import contents
from scripted import read_json

pytestmark = pytest.mark.slow

STEPS = {"num_evidence": 0, "max_steps": 2, "learning_rate": 5e-3}


@pytest.fixture(scope="module")
def three(bench):
    return bench.make("three", seed=None, seeds=[0, 1, 2], **STEPS)


def test_each_seed_is_the_run_with_that_seed_alone_and_mean_and_spread_are_theirs(bench, three):
    found = [read_json(bench.run("three") / f"seed-{s}/metrics.json")["value"] for s in range(3)]
    mean, sd = statistics.mean(found), statistics.stdev(found)
    assert f"{mean:.4f} ± {sd:.4f} (mean ± sample sd of 3 seeds: 0 1 2)" in three.out
    pattern = bench.run("p-{seed}")
    bench.make("", output_dir=pattern, seed=None, seeds=2, **STEPS)
    one, two, alone = (
        (folder / "reader/model.safetensors").read_bytes()
        for folder in (*(bench.run("three") / f"seed-{s}" for s in (1, 2)), bench.run("p-2"))
    )
    assert two == alone != one


def test_a_finished_seed_is_taken_up_a_stopped_one_goes_on_and_a_new_one_is_added(bench, three):
    broken, whole = bench.run("broken"), bench.run("three")
    shutil.copytree(whole, broken)
    for name in ("metrics.json", "predictions.jsonl", "training.json"):
        (broken / "seed-1" / name).unlink()
    shutil.rmtree(broken / "seed-1/reader")
    shutil.rmtree(broken / "seed-2")
    before = contents(broken / "seed-0")
    called = bench.make("broken", seed=None, seeds=[0, 1, 2], **STEPS)
    assert called.out.count("(reused)") == 1
    assert contents(broken / "seed-0") == before
    for seed in (0, 1, 2):
        for name in ("reader/model.safetensors", "predictions.jsonl"):
            inner = f"seed-{seed}/{name}"
            assert (broken / inner).read_bytes() == (whole / inner).read_bytes()
