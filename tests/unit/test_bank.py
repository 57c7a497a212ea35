"""The bank: each state once, the same bytes however often the job was stopped."""

import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from pgra.artifacts import lock_folder
from pgra.core import Context, Worker
from pgra.errors import ArtifactError, ModelError
from pgra.rerank.bank import Bank

FIELDS = {"model": "m", "dtype": "float32"}


def same(keys):
    return keys


def slopes(keys, advance):
    """A state that tells its key: (key, 2 key, 1)."""
    advance(len(keys))
    column = torch.from_numpy(keys.astype(np.float32))
    return torch.stack([column, 2 * column, torch.ones(len(keys))], dim=1)


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.glob("*") if p.suffix == ".npy"}


def test_states_come_back_in_the_order_asked(tmp_path):
    bank = Bank(tmp_path, FIELDS)
    assert bank.fill([9, 4, 7, 4], same, slopes, shard_rows=2) == 3
    np.testing.assert_array_equal(bank.states([7, 4, 7])[:, 0], [7, 4, 7])
    np.testing.assert_allclose(bank.norms([4]), np.sqrt([16 + 64 + 1]), rtol=1e-6)


def test_only_missing_keys_are_computed(tmp_path):
    Bank(tmp_path, FIELDS).fill([1, 2, 3], same, slopes, shard_rows=2)
    asked = []

    def watch(keys, advance):
        asked.extend(keys.tolist())
        return slopes(keys, advance)

    bank = Bank(tmp_path, FIELDS)
    assert bank.fill([3, 5, 1], same, watch, shard_rows=2) == 1
    assert asked == [5]
    assert bank.fill([3, 5, 1], same, watch, shard_rows=2) == 0
    assert len(bank) == 4


def test_shards_of_another_bank_are_refused(tmp_path):
    for name in ("ours", "theirs"):
        fields = {**FIELDS, "model": name}
        Bank(tmp_path / name, fields).fill([1, 2], same, slopes, shard_rows=2)
    for path in (tmp_path / "theirs").glob("[0-9a-f]*.*"):
        shutil.copy(path, tmp_path / "ours")
    with pytest.raises(ArtifactError, match=r"json belongs to another bank: delete"):
        Bank(tmp_path / "ours", {**FIELDS, "model": "ours"})


def test_a_key_that_two_jobs_computed_counts_once(tmp_path):
    """One fills between the other's look and its lock, in shards that are cut otherwise."""

    def meanwhile():
        Bank(tmp_path, FIELDS).fill(range(2, 8), same, slopes, shard_rows=3)

    barriers = iter([meanwhile])
    bank = Bank(tmp_path, FIELDS)
    context = Context(barrier=lambda: next(barriers, lambda: None)())
    bank.fill(range(12), same, slopes, shard_rows=4, context=context)
    assert len(bank) == len(Bank(tmp_path, FIELDS)) == 12
    keys = np.concatenate([block.keys for block in bank.blocks(rows=5)])
    assert sorted(keys.tolist()) == list(range(12))
    np.testing.assert_array_equal(bank.states(range(12))[:, 0], range(12))


def test_a_key_without_state_is_an_error(tmp_path):
    bank = Bank(tmp_path, FIELDS)
    with pytest.raises(KeyError):
        bank.states([1])
    bank.fill([1], same, slopes, shard_rows=2)
    with pytest.raises(KeyError):
        bank.states([1, 2])


def test_bfloat16_states_keep_their_bits(tmp_path):
    states = torch.randn(5, 8, dtype=torch.bfloat16)
    bank = Bank(tmp_path, FIELDS)
    bank.fill(range(5), same, lambda keys, _: states[torch.from_numpy(keys)], shard_rows=2)
    np.testing.assert_array_equal(bank.states(range(5)), states.float().numpy())


def test_two_workers_leave_what_one_leaves(tmp_path):
    Bank(tmp_path / "one", FIELDS).fill(range(11), same, slopes, shard_rows=3)
    for rank in (1, 0):  # in turn: the second sees none of the first's in its list of missing keys
        bank = Bank(tmp_path / f"two-{rank}", FIELDS)
        bank.fill(range(11), same, slopes, shard_rows=3, context=Context(Worker(rank, 2)))
    both = contents(tmp_path / "two-0") | contents(tmp_path / "two-1")
    assert both == contents(tmp_path / "one")
    assert not contents(tmp_path / "two-0").keys() & contents(tmp_path / "two-1").keys()


def test_a_bank_of_another_model_is_refused(tmp_path):
    Bank(tmp_path, FIELDS).fill([1], same, slopes, shard_rows=2)
    with pytest.raises(ArtifactError, match='made with model "m", this run asks for "n"'):
        Bank(tmp_path, {**FIELDS, "model": "n"})


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def test_a_damaged_shard_is_refused_by_name_before_its_states_are_used(tmp_path):
    Bank(tmp_path, FIELDS).fill(range(6), same, slopes, shard_rows=2)
    path = max(tmp_path.glob("*.states.npy"), key=lambda path: np.load(path)[0, 0])
    flip(path)
    bank = Bank(tmp_path, FIELDS)  # does not read states
    np.testing.assert_array_equal(bank.states([3, 1])[:, 0], [3, 1])  # control: whole shards
    for _ in range(2):
        with pytest.raises(ArtifactError, match=rf"{path.name} is damaged.*delete .*\.json"):
            bank.states([4])
    with pytest.raises(ArtifactError, match=rf"{path.name} is damaged.*delete .*\.json"):
        list(bank.blocks(rows=4))


@pytest.mark.parametrize("part", ["keys.npy", "norms.npy", "json"])
def test_a_damaged_shard_is_refused_by_name_when_opened(tmp_path, part):
    Bank(tmp_path, FIELDS).fill([1, 2], same, slopes, shard_rows=2)
    path = next(p for p in tmp_path.glob(f"*.{part}") if p.stem != "manifest")
    flip(path)
    with pytest.raises(ArtifactError, match=rf"{path.name} is damaged.*delete .*\.json"):
        Bank(tmp_path, FIELDS)


@pytest.mark.parametrize("part", ["keys", "norms", "states"])
def test_a_shard_cut_short_is_refused_by_name_when_opened(tmp_path, part):
    Bank(tmp_path, FIELDS).fill([1, 2], same, slopes, shard_rows=2)
    path = next(tmp_path.glob(f"*.{part}.npy"))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ArtifactError, match=rf"{path.name} is damaged.*delete .*\.json"):
        Bank(tmp_path, FIELDS)


def test_states_written_by_this_process_are_checked_too(tmp_path):
    bank = Bank(tmp_path, FIELDS)
    bank.fill([1, 2], same, slopes, shard_rows=2)
    flip(next(tmp_path.glob("*.states.npy")))
    with pytest.raises(ArtifactError, match="states.npy is damaged"):
        bank.states([1])


@pytest.mark.parametrize("rows", [1, 3, 4, 100])
def test_blocks_hold_all_states_so_many_at_a_time(tmp_path, rows):
    bank = Bank(tmp_path, FIELDS)
    bank.fill([20, 21, 30, 40, 5], same, slopes, shard_rows=2)  # (5, 20), (21, 30), (40)
    bank.fill(range(3), same, slopes, shard_rows=2)
    blocks = list(bank.blocks(rows=rows))
    assert [len(block.keys) for block in blocks[:-1]] == [rows] * (len(blocks) - 1)
    keys = np.concatenate([block.keys for block in blocks])
    assert keys.tolist() == [5, 20, 21, 30, 40, 0, 1, 2]  # as they lie on disk
    np.testing.assert_array_equal(
        np.concatenate([block.states for block in blocks]), bank.states(keys)
    )
    np.testing.assert_array_equal(
        np.concatenate([block.norms for block in blocks]), bank.norms(keys)
    )
    again = np.concatenate([block.keys for block in Bank(tmp_path, FIELDS).blocks(rows=rows)])
    assert again.tolist() == [
        0,
        1,
        2,
        5,
        20,
        21,
        30,
        40,
    ]  # by first key, where all is found at once


def test_blocks_of_some_keys_hold_these(tmp_path):
    bank = Bank(tmp_path, FIELDS)
    bank.fill(range(10), same, slopes, shard_rows=3)
    blocks = list(bank.blocks(np.array([7, 0, 8, 3]), rows=3))
    assert [block.keys.tolist() for block in blocks] == [[0, 3, 7], [8]]
    assert blocks[0].states[:, 0].tolist() == [0, 3, 7]
    with pytest.raises(KeyError):
        list(bank.blocks(np.array([10]), rows=3))
    assert list(Bank(tmp_path / "new", FIELDS).blocks(rows=3)) == []


def test_a_bank_seen_by_two_takes_up_what_the_other_wrote(tmp_path):
    one, two = Bank(tmp_path, FIELDS), Bank(tmp_path, FIELDS)
    one.fill(range(4), same, slopes, shard_rows=2)
    assert two.fill(range(6), same, slopes, shard_rows=2) == 2
    np.testing.assert_array_equal(two.states(range(6))[:, 0], np.arange(6))


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_a_smaller_dtype_is_close_and_not_equal(tmp_path, dtype):
    whole, small = Bank(tmp_path / "a", FIELDS), Bank(tmp_path / "b", FIELDS, dtype=dtype)
    for bank in (whole, small):
        bank.fill(range(3000, 3010), same, slopes, shard_rows=4)
    keys = [3003, 3008, 3001]
    off = np.abs(small.states(keys) - whole.states(keys)).max()
    assert 0 < off < 3
    norms = np.linalg.norm(small.states(keys), axis=1)
    np.testing.assert_allclose(small.norms(keys), norms, rtol=1e-6)


@pytest.mark.parametrize(
    ("step", "match"),
    [("prepare", "cannot read"), ("encode", "no memory"), ("write", "is not finite")],
)
def test_a_fill_that_fails_keeps_whole_shards_and_goes_on_to_the_same_bytes(tmp_path, step, match):
    def prepare(keys):
        if step == "prepare" and 8 in keys:
            raise OSError("cannot read")
        return keys

    def encode(keys, advance):
        if step == "encode" and 8 in keys:
            raise MemoryError("no memory")
        states = slopes(keys, advance)
        return states * torch.nan if step == "write" and 8 in keys else states

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    Bank(whole, FIELDS).fill(range(20), same, slopes, shard_rows=2)
    bank = Bank(broken, FIELDS)
    with pytest.raises((OSError, MemoryError, ModelError), match=match):
        bank.fill(range(20), prepare, encode, shard_rows=2)
    assert len(Bank(broken, FIELDS)) == 8
    assert not list(broken.glob(".*partial*"))
    assert bank.fill(range(20), same, slopes, shard_rows=2) == 12  # and the folder is free again
    assert contents(broken) == contents(whole)


def test_a_shard_without_record_is_computed_again(tmp_path):
    Bank(tmp_path, FIELDS).fill(range(5), same, slopes, shard_rows=2)
    before = contents(tmp_path)
    next(p for p in tmp_path.glob("*.json") if p.stem != "manifest").unlink()
    bank = Bank(tmp_path, FIELDS)
    assert bank.fill(range(5), same, slopes, shard_rows=2) in (1, 2)
    assert contents(tmp_path) == before


def test_two_jobs_do_not_fill_one_bank(tmp_path):
    with lock_folder(tmp_path), pytest.raises(ArtifactError, match="in use by another pgra job"):
        Bank(tmp_path, FIELDS).fill([1], same, slopes, shard_rows=2)


FILL = f"""
import signal, sys, time, torch
from pathlib import Path
from pgra.rerank.bank import Bank
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
def states(keys, advance):
    time.sleep(0.05)
    return torch.from_numpy(keys)[:, None].float().repeat(1, 3)
Bank(Path(sys.argv[1]), {FIELDS!r}).fill(range(60), lambda keys: keys, states, shard_rows=3)
"""


@pytest.mark.slow
def test_a_stopped_and_a_killed_job_go_on_and_leave_the_same_bytes(tmp_path):
    def states(keys, _):
        return torch.from_numpy(keys)[:, None].float().repeat(1, 3)

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    Bank(whole, FIELDS).fill(range(60), same, states, shard_rows=3)
    for number, code in ((4, signal.SIGINT), (9, signal.SIGKILL)):
        job = subprocess.Popen(
            [sys.executable, "-c", FILL, str(broken)], stderr=subprocess.PIPE, text=True
        )
        while len(list(broken.glob("[!.]*.json"))) < number + 1:
            assert job.poll() is None
            time.sleep(0.005)
        job.send_signal(code)
        asked = time.perf_counter()
        errors = job.communicate()[1]
        if code == signal.SIGINT:
            assert errors.endswith("KeyboardInterrupt\n")
            assert time.perf_counter() - asked < 10
            assert not list(broken.glob(".*partial*"))
        assert number <= len(list(broken.glob("[!.]*.json"))) - 1 < 19
    assert Bank(broken, FIELDS).fill(range(60), same, states, shard_rows=3) > 0
    assert contents(broken) == contents(whole)
    assert not list(broken.glob(".*partial*"))


def test_a_bank_of_many_shards_needs_few_file_descriptors(tmp_path):
    bank = Bank(tmp_path, FIELDS)
    bank.fill(range(150), same, slopes, shard_rows=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    try:
        states = Bank(tmp_path, FIELDS).states(range(150))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    np.testing.assert_array_equal(states[:, 0], np.arange(150))
