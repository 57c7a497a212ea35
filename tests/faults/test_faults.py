"""The short form of `benchmarks/faults.py`: some cases of each kind, and a control that fails."""

import io
import json
import os
import shutil

import damage
import figures
import kills
import long
import numpy as np
import pytest
import torch
import trust
from safetensors.torch import save_file
from transformers import AutoConfig
from world import (
    JOBS,
    QUESTION,
    READ_ONLY,
    UNCHECKED,
    Job,
    World,
    alike,
    can_mount,
    differing,
)

from pgra.artifacts import write_json

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def unbroken(world):
    return kills.Unbroken(world)


@pytest.fixture
def control(monkeypatch):
    """A command that checks nothing, and what reads a run's predictions by it."""
    monkeypatch.setitem(JOBS, UNCHECKED, Job([UNCHECKED, "corpus.txt", "copy.txt"]))
    name = "runs/icl/predictions.jsonl"
    monkeypatch.setitem(damage.READERS, UNCHECKED, [UNCHECKED, name, "copy.txt"])
    monkeypatch.setattr(damage, "READ_BY", {"runs/icl/*": (UNCHECKED,)})
    return damage.Case(name, "flip", 0)


@pytest.mark.parametrize("kind", damage.KINDS)
def test_damage_is_named_or_changes_nothing(world, kind):
    whole = {}
    for seed in range(2):
        case = damage.draw(world, kind, seed)
        assert not damage.run(world, case, whole), case


@pytest.mark.parametrize(
    "pattern", ["memory.sqlite", "artifacts/answers/*.sqlite", "runs/pgra/losses.jsonl"]
)
def test_damage_of_what_a_few_draws_may_miss_is_named_or_changes_nothing(world, pattern):
    world.after(*damage.STATE)
    for seed in range(3):
        assert not damage.run(world, damage.Case(world.resolve(pattern), "flip", seed), {})


@pytest.mark.parametrize(
    "name",
    [
        *("runs/pgra/metrics.json", "runs/pgra/losses.jsonl", "runs/pgra/reader/pgra.json"),
        *("runs/grid/one/seed-1/metrics.json", "runs/grid/grid.json", "runs/icl/run.json"),
    ],
)
def test_what_a_run_or_a_grid_lost_is_named_or_made_again_to_the_same(world, name):
    world.after(*damage.STATE)
    assert not damage.run(world, damage.Case(name, "delete", 0), {})


def test_damaged_states_are_named_when_they_are_used_and_else_change_nothing(world):
    for reader, code in (("train anew", 0), ("train otherwise", 2)):
        world.after("train")
        path = sorted(world.here.glob("artifacts/banks/*/*.states.npy"))[0]
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        ended = world.call(damage.READERS[reader])
        assert ended.code == code, ended
        assert (f"{path.relative_to(world.here)} is damaged" in ended.told) == bool(code)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"seed": 1', '"seed": 7', "is damaged (other content than was written), by metrics.json"),
        ('"num_candidates"', '"num_kandidates"', "that this version of pgra does not know"),
    ],
)
def test_an_edited_record_with_a_digest_of_its_own_is_named_all_the_same(world, old, new, told):
    world.after("train")
    path = world.here / "runs" / "pgra" / "arguments.json"
    text = path.read_text()
    assert old in text
    write_json(path, json.loads(text.replace(old, new)))
    ended = world.call(JOBS["evaluate"].words)
    assert ended.is_refused
    assert "runs/pgra/arguments.json" in ended.told
    assert told in ended.told


def test_damage_that_nobody_looks_for_is_told(world, control):
    assert "silently other" in damage.run(world, control, {})


@pytest.mark.parametrize("name", ["index", "train", "icl", "lookup", "report", "memory", "erase"])
def test_a_killed_command_goes_on_to_the_same_product(world, unbroken, name):
    assert not kills.kill(world, name, 0, unbroken)


@pytest.mark.parametrize("how", [kills.fill, kills.forbid, kills.two_at_once])
@pytest.mark.parametrize("name", ["index", "report"])
def test_what_cannot_write_says_so_and_leaves_nothing(world, unbroken, how, name):
    assert not how(world, name, 0, unbroken)


def test_what_shares_a_command_with_a_killed_process_goes_on_with_another(world, unbroken):
    assert not kills.kill_one_of_two(world, "icl", 0, unbroken)


@pytest.mark.parametrize("name", ["index", "icl"])
def test_a_batch_that_does_not_fit_is_read_in_parts_or_told_of(world, unbroken, name):
    assert kills.exhaust(world, name, 0, unbroken) == ""


@pytest.mark.parametrize("name", ["index", "train"])
def test_a_process_without_memory_says_so_and_leaves_nothing(world, unbroken, name):
    for seed in range(2):
        assert not kills.starve(world, name, seed, unbroken)


def test_commands_that_are_not_killed_write_nothing(world):
    for name, job in {**READ_ONLY, "control": JOBS["memory"]}.items():
        world.after(*job.needs)
        before = kills.everything(world)
        assert world.call(job.words).code == 0, name
        assert (kills.everything(world) == before) == (name != "control"), name


@pytest.mark.parametrize("near", [1.0000001, 1.1])
def test_rounding_alone_is_no_difference_between_what_two_processes_leave(near):
    one, two = (
        {"a": f"x {n} y".encode(), "b": [n, "z"], "c": _array([n, 2.0])} for n in (1.0, near)
    )
    assert bool(differing(one, two, same=alike)) == (near == 1.1)
    assert len(differing(one, two)) == 3
    for one, two in ((b"x 1.0", b"y 1.0"), ("1.0", "1.0 1.0"), (_array([1]), _array([2]))):
        assert differing(one, two, same=alike)


def _array(values):
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def test_a_command_that_writes_in_place_is_told(world, unbroken, control):
    assert any(kills.kill(world, UNCHECKED, seed, unbroken) for seed in range(5))
    assert kills.two_at_once(world, UNCHECKED, 0, unbroken)
    assert kills.kill_one_of_two(world, UNCHECKED, 0, unbroken)
    assert "exit code 1" in kills.forbid(world, UNCHECKED, 0, unbroken)
    for seed in (1, 2):  # a full disk, and a longest file
        assert "exit code 1" in kills.fill(world, UNCHECKED, seed, unbroken)


def test_a_shard_that_is_made_again_is_told(world, unbroken, monkeypatch):
    def forgetful(world, *args):
        for path in world.here.glob("artifacts/indexes/*/vectors-*.json"):
            os.utime(path)
        return ""

    monkeypatch.setattr(kills, "again", forgetful)
    assert "made again" in kills.kill(world, "rerank", 0, unbroken)


def test_a_memory_that_lost_an_entry_or_has_a_stranger_is_told(world, unbroken):
    other, whole = unbroken["correct"].files, unbroken["memory"].files
    world.after("memory")
    assert kills.holders(world, QUESTION) == [str(world.here / "memory.sqlite")]
    assert kills.again(world, "memory", whole) == ""  # as one that was killed behind its write
    assert "event" in kills.again(world, "memory", whole)  # three times
    world.after()
    assert "event" in kills.again(world, "memory", other)


def test_a_command_that_lets_a_lack_of_memory_pass_is_told(world, unbroken, monkeypatch):
    words = [UNCHECKED, "../models/encoder", "copy.txt"]
    monkeypatch.setitem(JOBS, "unchecked model", Job(words))
    assert "exit code 1" in kills.exhaust(world, "unchecked model", 0, unbroken)
    assert any(
        "code 1" in kills.starve(world, "unchecked model", seed, unbroken) for seed in range(9)
    )


@pytest.mark.parametrize("name", figures.READ_BY)
def test_weights_that_are_no_numbers_are_refused(world, name):
    assert not figures.spoil_weights(world, name, 0)


@pytest.mark.parametrize("name", ["icl", "figure"])
def test_the_same_command_gives_the_same_bytes(world, name):
    assert not figures.twice(world, name)


def test_a_command_that_gives_other_bytes_is_told(world, monkeypatch):
    words = [UNCHECKED, "/proc/sys/kernel/random/uuid", "copy.txt"]
    monkeypatch.setitem(JOBS, UNCHECKED, Job(words))
    assert "copy.txt" in figures.twice(world, UNCHECKED)


def test_what_depends_on_the_weights_unseen_is_told(world, control, monkeypatch):
    monkeypatch.setattr(figures, "READ_BY", {"encoder": (UNCHECKED,)})
    told = [figures.spoil_weights(world, "encoder", seed) for seed in range(6)]
    assert {"exit code 0" in one for one in told} == {True, False}  # of large numbers nothing left


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_file_with_what_is_no_number_is_told(tmp_path, bad):
    for value in (1.0, bad):
        (tmp_path / "a.json").write_text(json.dumps({"x": [value]}))
        np.save(tmp_path / "a.npy", value)
        save_file({"x": torch.tensor(value)}, tmp_path / "a.safetensors")
        (tmp_path / "a.txt").write_text("NaN is a word here")
        found = {file.suffix for file in tmp_path.iterdir() if not figures.is_finite(file)}
        assert found == (set() if value == 1 else {".json", ".npy", ".safetensors"})


@pytest.mark.parametrize("name", trust.PARTS)
def test_nothing_planted_runs_and_nothing_secret_is_written(world, name):
    assert not trust.PARTS[name](world)


def test_what_is_planted_would_run(world, tmp_path, monkeypatch):
    torch.save(trust.Planted(tmp_path / "ran"), tmp_path / "planted.pt")
    torch.load(tmp_path / "planted.pt", weights_only=False)
    assert (tmp_path / "ran").exists()
    folder = shutil.copytree(world.root / "models" / "encoder", tmp_path / "encoder")
    trust.name_code(folder, tmp_path / "code-ran")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert (tmp_path / "code-ran").exists()


def test_markup_and_a_key_that_come_through_are_told(world, monkeypatch):
    monkeypatch.setitem(JOBS, "html", Job([UNCHECKED, "train.jsonl", "page.html"]))
    assert trust.escape(world, ()) == "the page has a tag of a text"
    assert trust.keep_secrets(world, ("memory",)) == ""
    for secret in (trust.KEY, str(world.root)):
        monkeypatch.setitem(JOBS, "memory", Job(["memory", "add", secret, "I want a synonym"]))
        assert secret in trust.keep_secrets(world, ("memory",))
    monkeypatch.setitem(JOBS, "memory", Job([UNCHECKED, "/proc/sys/kernel/hostname", "copy.txt"]))
    if can_mount(world):
        assert trust.HOST in trust.keep_secrets(world, ("memory",))


def test_rounds_of_commands_take_no_more_and_more(world):
    found = long.measure(world, 1.0, rounds=long.FEWEST)
    assert len(found) == long.FEWEST
    assert not long.verdict(found)


def _rounds(**grown):
    """Give 400 rounds, of which some figures grow so much a round; now and then one is far off."""
    usual = {"mib": 500.0, "files": 10, "mapped": 2, "cpu": 0.3}
    made = [{k: v + n * grown.get(k, 0) for k, v in usual.items()} for n in range(400)]
    for n in range(0, 400, 9):
        made[n] = {name: 3 * value for name, value in made[n].items()}
    return made


@pytest.mark.parametrize(
    ("name", "little", "much", "told"),
    [
        ("mib", 0.05, 0.5, "memory grew by 512.0 KiB a round"),
        ("files", 0, 0.01, "open files grew"),
        ("mapped", 0.01, 1, "mapped files grew"),
        ("cpu", 0.0001, 0.01, "of CPU time"),
    ],
)
def test_what_grows_a_round_is_told(name, little, much, told):
    assert not long.verdict(_rounds(**{name: little}))
    assert told in long.verdict(_rounds(**{name: much}))


def test_memory_that_is_taken_once_is_no_growth():
    found = _rounds()
    for one in found[60:]:
        one["mib"] += 200
    assert not long.verdict(found)
