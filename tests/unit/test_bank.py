"""The bank: each state once, the same bytes however often it was stopped, no byte unchecked."""

import contextlib
import shutil
from itertools import islice
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from conftest import contents

from pgra.artifacts import Inputs
from pgra.commands.verify import main as verify
from pgra.context import Context
from pgra.errors import ArtifactError, DamageError, ModelError
from pgra.parallel import Worker, claim_path
from pgra.rerank.bank import Bank, BankShard, write_shard

FIELDS = {"model": "m", "dtype": "float32"}
QUIET = Context(progress=False)


def same(keys):
    return keys


def slopes(keys, advance=int):
    """A state that tells its key: (key, 2 key, 1)."""
    advance(len(keys))
    column = torch.from_numpy(np.asarray(keys).astype(np.float32))
    states = torch.stack([column, 2 * column, torch.ones(len(keys))], dim=1)
    return lambda: states


def fill(folder, keys, *, shard_rows, context=QUIET):
    bank = Bank(folder, FIELDS)
    bank.compute_missing(keys, same, slopes, shard_rows=shard_rows, context=context)
    return bank


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    with path.open("r+b") as file:  # a disk takes its time over a file that is written anew
        file.write(data)


def test_each_state_is_computed_once(tmp_path):
    asked = []

    def encode(keys, advance):
        if 7 in keys:
            raise KeyboardInterrupt
        asked.extend(keys.tolist())
        return slopes(keys, advance)

    with pytest.raises(KeyboardInterrupt):
        Bank(tmp_path, FIELDS).compute_missing(range(9), same, encode, shard_rows=3, context=QUIET)
    (tmp_path / ".0123.partial.npy").write_bytes(b"half")
    bank = Bank(tmp_path, FIELDS)
    assert (asked, len(bank)) == ([*range(6)], 6)
    assert bank.compute_missing([4, 8, 7, 6], same, slopes, shard_rows=3, context=QUIET) == 3
    np.testing.assert_array_equal(bank.states([8, 0, 5]), slopes([8, 0, 5])().numpy())
    assert bank.missing(range(-1, 10)).tolist() == [-1, 9]
    with pytest.raises(KeyError):
        bank.states([0, 9])
    for part in ("json", "safetensors"):
        flip(sorted(tmp_path.glob(f"[0-9a-f]*.{part}"))[0])
        with pytest.raises((DamageError, KeyError)):
            Bank(tmp_path, FIELDS).states(range(9))
        again = Bank(tmp_path, FIELDS)
        assert again.compute_missing(range(9), same, slopes, shard_rows=9, context=QUIET) == 3
        np.testing.assert_array_equal(again.states(range(9)), slopes(range(9))().numpy())


def test_shards_of_another_bank_are_not_taken(tmp_path):
    for name in ("ours", "theirs"):
        bank = Bank(tmp_path / name, {**FIELDS, "model": name})
        bank.compute_missing([1, 2], same, slopes, shard_rows=2)
    for path in (tmp_path / "theirs").glob("[0-9a-f]*.*"):
        shutil.copy(path, tmp_path / "ours")
    assert not len(Bank(tmp_path / "ours", {**FIELDS, "model": "ours"}))


@pytest.mark.parametrize("world", [1, 3])
def test_workers_claim_each_unit_once_whoever_is_slow(tmp_path, world):
    units = [tmp_path / f"{number}.json" for number in range(7)]
    claims = [Worker(rank, world).claim(units, lambda unit: unit) for rank in range(world)]
    done = []
    for number in [0, 0, *range(world), *[0] * 9]:
        for unit in islice(claims[number], 1):
            done.append(unit)
            unit.touch()
            claim_path(unit).unlink()
    assert sorted(done) == units


def test_two_jobs_take_up_what_the_other_wrote(tmp_path):
    late = Bank(tmp_path, FIELDS)
    fill(tmp_path, range(4), shard_rows=2)
    assert late.compute_missing(range(6), same, slopes, shard_rows=2, context=QUIET) == 2
    # One fills between the other's look and its lock, in shards that are cut otherwise.
    barriers = iter([lambda: None, lambda: fill(tmp_path, range(8, 14), shard_rows=3)])
    context = Context(barrier=lambda: next(barriers, lambda: None)(), progress=False)
    late.compute_missing(range(18), same, slopes, shard_rows=4, context=context)
    assert len(late) == len(Bank(tmp_path, FIELDS)) == 18  # a key of both counts once
    np.testing.assert_array_equal(late.states(range(18))[:, 0], np.arange(18))


def part(rank, world=2):
    return Context(Worker(rank, world, is_part=True), progress=False)


@pytest.mark.parametrize("last", [part(0), QUIET], ids=["again", "whole"])
def test_parts_fill_one_bank_as_one_process_does(tmp_path, last):
    fill(tmp_path / "one", range(23), shard_rows=4)
    folder, asked = tmp_path / "parts", []

    def encode(keys, advance):
        asked.append(keys[0])
        if len(asked) == 1:  # this one is slow: the other does all that it has not taken
            fill(folder, range(23), shard_rows=4, context=part(1))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return slopes(keys, advance)

    with pytest.raises(KeyboardInterrupt):
        Bank(folder, FIELDS).compute_missing(range(23), same, encode, shard_rows=4, context=part(0))
    for context in (part(1), last):
        assert asked == [0, 8]
        assert Bank(folder, FIELDS).missing(range(23)).tolist() == [8, 9, 10, 11]
        fill(folder, range(23), shard_rows=4, context=context)
    assert contents(folder) == {**contents(tmp_path / "one"), "manifest.json": ANY}


# One shard on disk: what comes back, and what is refused.

ROWS = np.array([2, 5, 9])
ALL = np.arange(3)


def states_of(seed=0, dtype=torch.float32):
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)


def write(folder, states):
    return BankShard(write_shard(folder, ROWS, states))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_states_come_back_bit_for_bit(tmp_path, dtype):
    states = states_of(dtype=dtype).float().numpy()
    found = write(tmp_path, states_of(dtype=dtype))
    np.testing.assert_array_equal(found.keys, ROWS)
    for at in (ALL, np.array([2, 0])):
        np.testing.assert_array_equal(found.states(at), states[at])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_refused(tmp_path, value):
    states = states_of()
    states[1, 3] = value
    with pytest.raises(ModelError, match="key 5"):
        write(tmp_path, states)
    assert not list(tmp_path.iterdir())


def test_a_record_with_any_byte_changed_is_refused(tmp_path):
    record = write(tmp_path, states_of()).record
    for at in range(len(record.read_bytes())):
        flip(record, at)
        with pytest.raises(DamageError):
            BankShard(record)
        flip(record, at)
        assert BankShard(record).keys.tolist() == ROWS.tolist()  # the control
    flip(record)
    assert verify([str(tmp_path)]) == 1


@pytest.mark.parametrize("is_changed", [True, False])
def test_no_state_is_kept_of_a_model_whose_files_changed(is_changed, tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_text("first")
    bank = Bank(tmp_path / "bank", FIELDS, inputs=Inputs.of([weights]))

    def encode(keys, advance):
        if is_changed:
            weights.write_text("other")
        return slopes(keys, advance)

    expected = contextlib.nullcontext()
    if is_changed:
        expected = pytest.raises(ArtifactError, match="model.safetensors")
    with expected:
        bank.compute_missing(range(20), same, encode, shard_rows=5, context=QUIET)
    assert len(Bank(tmp_path / "bank", FIELDS)) == (0 if is_changed else 20)
