"""The bank: each state once, the same bytes however often it was stopped, no byte unchecked."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from safetensors.numpy import load_file

from pgra.artifacts import Inputs
from pgra.core import Context, Worker
from pgra.errors import ArtifactError, DamageError, ModelError
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
    bank.fill(keys, same, slopes, shard_rows=shard_rows, context=context)
    return bank


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    with path.open("r+b") as file:  # a disk takes its time over a file that is written anew
        file.write(data)


def keys_of(record):
    return {*load_file(record.with_suffix(".safetensors"))["keys"].tolist()}


KEYS = st.lists(st.integers(-30, 30), min_size=1, max_size=12)


PARTS = st.sampled_from(["json", "safetensors"])


class FilledKilledDamaged(RuleBasedStateMachine):
    """A bank against a set of keys, however it is filled, stopped, damaged and opened again."""

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")))
        self.known = set()
        self.reopen()

    def teardown(self):
        shutil.rmtree(self.root)

    @rule()
    def reopen(self):
        self.bank = Bank(self.root, FIELDS)

    @rule(keys=KEYS, shard_rows=st.integers(1, 5))
    def fill(self, keys, shard_rows):
        asked = []

        def encode(part, advance):
            asked.extend(part.tolist())
            return slopes(part, advance)

        new = set(keys) - self.known
        count = self.bank.fill(keys, same, encode, shard_rows=shard_rows, context=QUIET)
        assert (count, sorted(asked)) == (len(new), sorted(new))
        self.known |= new

    @rule(keys=KEYS, shard_rows=st.integers(1, 3), nth=st.integers(0, 3))
    def kill(self, keys, shard_rows, nth):
        """Stop in the nth shard, with the bank dropped as it is, and a part of a file left."""
        begun = []

        def encode(part, advance):
            if len(begun) == nth:
                raise KeyboardInterrupt
            begun.append(part)
            return slopes(part, advance)

        try:
            self.bank.fill(keys, same, encode, shard_rows=shard_rows, context=QUIET)
        except KeyboardInterrupt:
            (self.root / ".0123.partial.npy").write_bytes(b"half")
        self.reopen()
        kept = {int(key) for part in begun for key in part}
        self.known |= kept

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 99), part=PARTS)
    def damage(self, pick, part):
        """Change a byte: it is found before it is used, and the shard is computed again."""
        records = sorted(p for p in self.root.glob("[!.]*.json") if p.stem != "manifest")
        record = records[pick % len(records)]
        path = record.with_suffix(f".{part}")
        lost = keys_of(record)
        flip(path)
        with pytest.raises((DamageError, KeyError)):
            Bank(self.root, FIELDS).states(sorted(lost))
        self.reopen()
        assert self.bank.fill(sorted(lost), same, slopes, shard_rows=64, context=QUIET)
        self.reopen()

    @invariant()
    def holds_what_is_known(self):
        keys = sorted(self.known, reverse=True)
        assert len(self.bank) == len(keys)
        if keys:
            states = slopes(keys)().numpy()
            np.testing.assert_array_equal(self.bank.states(keys), states)
        wanted = range(-31, 32)
        assert self.bank.missing(wanted).tolist() == sorted(set(wanted) - self.known)
        with pytest.raises(KeyError):
            self.bank.states([*keys, 31])
        blocks = list(self.bank.blocks(rows=3))
        assert sorted(key for keys, _ in blocks for key in keys.tolist()) == sorted(self.known)


FilledKilledDamaged.TestCase.settings = settings(
    max_examples=12,
    stateful_step_count=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestFilledKilledDamaged = pytest.mark.slow(FilledKilledDamaged.TestCase)


def test_shards_of_another_bank_are_not_taken(tmp_path):
    for name in ("ours", "theirs"):
        bank = Bank(tmp_path / name, {**FIELDS, "model": name})
        bank.fill([1, 2], same, slopes, shard_rows=2)
    for path in (tmp_path / "theirs").glob("[0-9a-f]*.*"):
        shutil.copy(path, tmp_path / "ours")
    assert not len(Bank(tmp_path / "ours", {**FIELDS, "model": "ours"}))


@pytest.mark.parametrize(("count", "world"), [(17, 2), (9, 4), (3, 8), (16, 2)])
def test_every_process_gets_as_many_shards(tmp_path, count, world):
    made = []
    for rank in range(world):
        bank, sizes = Bank(tmp_path / str(rank), FIELDS), []

        def encode(keys, advance, sizes=sizes):
            sizes.append(len(keys))
            return slopes(keys, advance)

        context = Context(Worker(rank, world), progress=False)
        bank.fill(range(count), same, encode, shard_rows=8, context=context)
        made.append(sizes)
    assert sum(map(sum, made)) == count
    assert max(size for sizes in made for size in sizes) <= 8
    assert max(map(len, made)) == -(-count // (8 * world))


def test_two_jobs_do_not_fill_one_bank_but_take_up_what_the_other_wrote(tmp_path):
    late = Bank(tmp_path, FIELDS)
    fill(tmp_path, range(4), shard_rows=2)
    assert late.fill(range(6), same, slopes, shard_rows=2, context=QUIET) == 2
    # One fills between the other's look and its lock, in shards that are cut otherwise.
    barriers = iter([lambda: None, lambda: fill(tmp_path, range(8, 14), shard_rows=3)])
    context = Context(barrier=lambda: next(barriers, lambda: None)(), progress=False)
    late.fill(range(18), same, slopes, shard_rows=4, context=context)
    assert len(late) == len(Bank(tmp_path, FIELDS)) == 18  # a key of both counts once
    np.testing.assert_array_equal(late.states(range(18))[:, 0], np.arange(18))


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
    with pytest.raises(ModelError, match=r"state of key 5 .* is not finite"):
        write(tmp_path, states)
    assert not list(tmp_path.iterdir())


def test_no_byte_of_a_record_changes_a_state(tmp_path):
    record = write(tmp_path, states_of()).record
    whole, states = record.read_bytes(), BankShard(record).states(ALL)
    for at in range(len(whole)):
        flip(record, at)
        with contextlib.suppress(DamageError):
            np.testing.assert_array_equal(BankShard(record).states(ALL), states)
        flip(record, at)
    record.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DamageError, match=r"\.json cannot be read"):
        BankShard(record)


@pytest.mark.parametrize("is_changed", [True, False])
def test_no_state_is_kept_of_a_model_whose_files_changed(is_changed, tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_text("first")
    bank = Bank(tmp_path / "bank", FIELDS, inputs=Inputs.of([weights]))

    def encode(keys, advance):
        if is_changed and 7 in keys:
            weights.write_text("other")
        return slopes(keys, advance)

    expected = contextlib.nullcontext()
    if is_changed:
        expected = pytest.raises(ArtifactError, match="model.safetensors changed while it was in")
    with expected:
        bank.fill(range(20), same, encode, shard_rows=5, context=QUIET)
    # The first shard is written while the second is encoded: before or after the change.
    assert len(Bank(tmp_path / "bank", FIELDS)) in ((0, 5) if is_changed else (20,))
