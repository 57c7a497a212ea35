"""Several seeds in one command, and trackers, as a user gives them."""

import statistics

import pytest
from conftest import contents
from scripted import read_json

pytestmark = pytest.mark.slow

STEPS = {"num_evidence": 0, "max_steps": 2, "learning_rate": 5e-3}


def test_each_seed_is_the_run_with_that_seed_alone_and_is_taken_up_beside_a_new_one(bench):
    three = bench.make("three", seed=None, seeds=[0, 1, 2], **STEPS)
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
    before = contents(bench.run("three"))
    called = bench.make("three", seed=None, seeds=[0, 1, 2, 3], **STEPS)
    assert called.out.count("(reused)") == 3
    assert before.items() <= contents(bench.run("three")).items()
