"""`pgra plan` as a user calls it: a table, the same as numbers, and one line for a mistake."""

import json
import re

from scripted import call, contents

from pgra.commands.plan import main as plan_main

_SKIPPED = ("model_name_or_path", "max_steps", "per_device_train_batch_size", "seed")


def plan(bench, *words, **changes):
    flags = {name: value for name, value in bench.flags.items() if name not in _SKIPPED}
    pairs = [(f"--{name}", str(value)) for name, value in {**flags, **changes}.items()]
    return call(plan_main, [*(word for pair in pairs for word in pair), *map(str, words)])


def value_of(table, name):
    """Give the middle column of the first line of that name."""
    return re.search(rf"^ +{name}  +(.+?)(  |$)", table, flags=re.M)[1]


def test_the_table_holds_what_the_numbers_say(new_bench, tmp_path):
    called = plan(new_bench, "--calibration_seconds", 1, "--json", tmp_path / "out" / "plan.json")
    assert called.code == 0, called.err
    numbers = json.loads((tmp_path / "out" / "plan.json").read_text())
    cost, queries = numbers["cost"], sum(numbers["queries"].values())
    assert called.out.startswith(f"plan of sst2 with {new_bench.lm} on cpu, ")
    assert value_of(called.out, "queries") == str(queries) == "50"
    assert value_of(called.out, "pairs") == str(queries * 6) == "300"
    assert value_of(called.out, "to read") == str(cost["to_read"])
    assert cost["to_read"] == cost["passages"] + cost["queries"]
    assert "counted: the first stage was searched in memory" in called.out
    reading = cost["reading"]
    assert reading["flops_whole"] > reading["flops"] > 0
    assert reading["device_bytes"] == reading["weights"] + reading["cache"] + reading["batch"]
    assert numbers["seconds"]["1"] >= numbers["seconds"]["8"] > 0
    assert numbers["versions"]["torch"]
    assert "rows" not in numbers["first"]


def test_after_a_run_there_is_nothing_left_to_read(new_bench):
    new_bench.make("x", num_candidates=2)
    before = contents(new_bench.artifacts)
    told = plan(new_bench, num_candidates=2).out
    assert contents(new_bench.artifacts) == before
    assert value_of(told, "to read") == "0"
    assert "counted: the candidates are stored" in told
    assert "0 LM forwards" in told
    assert value_of(plan(new_bench, bank="full").out, "to read") != "0"  # the control
