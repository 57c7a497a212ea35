"""`pgra plan` as a user calls it: lines, the same as numbers, and one line for a mistake."""

import json

import pytest
from scripted import call, contents

from pgra.commands.plan import main as plan_main

_SKIPPED = ("model_name_or_path", "max_steps", "per_device_train_batch_size", "seed")


def plan(bench, **changes):
    flags = {name: value for name, value in bench.flags.items() if name not in _SKIPPED}
    pairs = [(f"--{name}", str(value)) for name, value in {**flags, **changes}.items()]
    return call(plan_main, [word for pair in pairs for word in pair])


@pytest.mark.slow
def test_after_a_run_there_is_nothing_left_to_read(new_bench, tmp_path):
    new_bench.make("x", num_candidates=2)
    before, path = contents(new_bench.artifacts), tmp_path / "plan.json"
    called = plan(new_bench, num_candidates=2, json=path)
    assert called.code == 0, called.err
    assert contents(new_bench.artifacts) == before
    numbers = json.loads(path.read_text())
    assert (numbers["to_read"], numbers["seconds"], numbers["pairs"]) == (0, 0.0, 100)
    assert "to read  0 texts" in called.out
    assert "to read  0 texts" not in plan(new_bench, bank="full").out  # the control
