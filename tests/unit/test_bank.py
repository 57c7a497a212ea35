"""The bank: each state once, the same bytes however often the job was stopped."""

import resource
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import torch

from pgra.errors import ArtifactError
from pgra.io import lock_folder
from pgra.processes import Processes
from pgra.rerank.bank import Bank
from pgra.types import Worker

FIELDS = {"model": "m", "dtype": "float32"}


def slopes(keys, advance):
    """A state that tells its key: (key, 2 key, 1)."""
    advance(len(keys))
    column = torch.from_numpy(keys.astype(np.float32))
    return torch.stack([column, 2 * column, torch.ones(len(keys))], dim=1)


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.glob("*") if p.suffix == ".npy"}


def test_states_come_back_in_the_order_asked(tmp_path):
    bank = Bank(tmp_path, FIELDS)
    assert bank.fill([9, 4, 7, 4], slopes, shard_rows=2) == 3
    np.testing.assert_array_equal(bank.states([7, 4, 7])[:, 0], [7, 4, 7])
    np.testing.assert_allclose(bank.norms([4]), np.sqrt([16 + 64 + 1]), rtol=1e-6)


def test_only_missing_keys_are_computed(tmp_path):
    Bank(tmp_path, FIELDS).fill([1, 2, 3], slopes, shard_rows=2)
    asked = []

    def watch(keys, advance):
        asked.extend(keys.tolist())
        return slopes(keys, advance)

    bank = Bank(tmp_path, FIELDS)
    assert bank.fill([3, 5, 1], watch, shard_rows=2) == 1
    assert asked == [5]
    assert bank.fill([3, 5, 1], watch, shard_rows=2) == 0
    assert len(bank) == 4


def test_a_key_without_state_is_an_error(tmp_path):
    bank = Bank(tmp_path, FIELDS)
    with pytest.raises(KeyError):
        bank.states([1])
    bank.fill([1], slopes, shard_rows=2)
    with pytest.raises(KeyError):
        bank.states([1, 2])


def test_bfloat16_states_keep_their_bits(tmp_path):
    states = torch.randn(5, 8, dtype=torch.bfloat16)
    bank = Bank(tmp_path, FIELDS)
    bank.fill(range(5), lambda keys, _: states[torch.from_numpy(keys)], shard_rows=2)
    np.testing.assert_array_equal(bank.states(range(5)), states.float().numpy())


def test_two_workers_leave_what_one_leaves(tmp_path):
    Bank(tmp_path / "one", FIELDS).fill(range(11), slopes, shard_rows=3)
    for rank in (1, 0):  # in turn: the second sees none of the first's in its list of missing keys
        bank = Bank(tmp_path / f"two-{rank}", FIELDS)
        bank.fill(range(11), slopes, shard_rows=3, processes=Processes(Worker(rank, 2)))
    both = contents(tmp_path / "two-0") | contents(tmp_path / "two-1")
    assert both == contents(tmp_path / "one")
    assert not contents(tmp_path / "two-0").keys() & contents(tmp_path / "two-1").keys()


def test_a_bank_of_another_model_is_refused(tmp_path):
    Bank(tmp_path, FIELDS).fill([1], slopes, shard_rows=2)
    with pytest.raises(ArtifactError, match='made with model "m", this run asks for "n"'):
        Bank(tmp_path, {**FIELDS, "model": "n"})


def test_a_damaged_shard_is_refused_by_name(tmp_path):
    Bank(tmp_path, FIELDS).fill([1, 2], slopes, shard_rows=2)
    path = next(tmp_path.glob("*.states.npy"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ArtifactError, match=rf"{path.name} is damaged.*delete .*\.json"):
        Bank(tmp_path, FIELDS)


def test_a_shard_without_record_is_computed_again(tmp_path):
    Bank(tmp_path, FIELDS).fill(range(5), slopes, shard_rows=2)
    before = contents(tmp_path)
    next(p for p in tmp_path.glob("*.json") if p.stem != "manifest").unlink()
    bank = Bank(tmp_path, FIELDS)
    assert bank.fill(range(5), slopes, shard_rows=2) in (1, 2)
    assert contents(tmp_path) == before


def test_two_jobs_do_not_fill_one_bank(tmp_path):
    with lock_folder(tmp_path), pytest.raises(ArtifactError, match="in use by another pgra job"):
        Bank(tmp_path, FIELDS).fill([1], slopes, shard_rows=2)


def test_a_killed_job_goes_on_and_leaves_the_same_bytes(tmp_path):
    program = textwrap.dedent(
        f"""
        import sys, time, torch, numpy as np
        from pathlib import Path
        from pgra.rerank.bank import Bank
        def states(keys, advance):
            time.sleep(0.05)
            return torch.from_numpy(keys)[:, None].float().repeat(1, 3)
        Bank(Path(sys.argv[1]), {FIELDS!r}).fill(range(60), states, shard_rows=3)
        """
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    subprocess.run([sys.executable, "-c", program, str(whole)], check=True)
    job = subprocess.Popen([sys.executable, "-c", program, str(broken)])
    while len(list(broken.glob("*.json"))) < 5:
        time.sleep(0.01)
    job.send_signal(signal.SIGKILL)
    job.wait()
    done = len(list(broken.glob("*.json"))) - 1
    assert 4 <= done < 20
    subprocess.run([sys.executable, "-c", program, str(broken)], check=True)
    assert contents(broken) == contents(whole)


def test_a_bank_of_many_shards_needs_few_file_descriptors(tmp_path):
    bank = Bank(tmp_path, FIELDS)
    bank.fill(range(150), slopes, shard_rows=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    try:
        states = Bank(tmp_path, FIELDS).states(range(150))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    np.testing.assert_array_equal(states[:, 0], np.arange(150))
