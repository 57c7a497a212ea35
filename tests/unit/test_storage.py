"""A shard on disk: what each dtype keeps, and what is refused."""

import numpy as np
import pytest
import torch

from pgra.errors import ArtifactError, ConfigError, ModelError
from pgra.rerank.bank import read_shard, write_shard

KEYS = np.array([2, 5, 9])
PLACES = np.arange(3)


def states_of(seed=0, dtype=torch.float32):
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    with path.open("r+b") as file:  # a disk takes its time over a file that is written anew
        file.write(data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_states_come_back_bit_for_bit(tmp_path, dtype):
    states = states_of(dtype=dtype)
    record = write_shard(tmp_path, KEYS, states, dtype="auto").shard.record
    found = read_shard(record)
    np.testing.assert_array_equal(found.keys, KEYS)
    np.testing.assert_array_equal(found.shard.states(PLACES), states.float().numpy())
    np.testing.assert_array_equal(
        found.shard.states(np.array([2, 0])), states.float().numpy()[[2, 0]]
    )
    assert (found.shard.rows, found.shard.width) == (3, 8)


def test_int8_is_off_by_half_a_step_of_its_column_at_most(tmp_path):
    states = torch.tensor([[0.0, 7.0, 1000.0], [127.0, 7.0, 1254.0], [254.0, 7.0, 1100.3]])
    shard = write_shard(tmp_path, KEYS, states, dtype="int8").shard
    # The steps of the columns are 254 / 254, none, and 254 / 254 from 1127.
    expected = [[0, 7, 1000], [127, 7, 1254], [254, 7, 1100]]
    np.testing.assert_array_equal(shard.states(PLACES), expected)
    np.testing.assert_array_equal(shard.states(np.array([2])), expected[2:])
    np.testing.assert_array_equal(
        np.load(shard.path("states")), [[-127, 0, -127], [0, 0, 127], [127, 0, -27]]
    )
    assert np.load(shard.path("states")).dtype == np.int8


def test_int8_keeps_small_columns_beside_large_ones(tmp_path):
    states = states_of()
    states[:, 0] += 1000
    kept = write_shard(tmp_path, KEYS, states, dtype="int8").shard.states(PLACES)
    off = np.abs(kept - states.numpy())
    width = (states.amax(0) - states.amin(0)).numpy()
    assert (off <= width / 254 / 2 * 1.01 + 1e-4).all()
    assert off.max() > 0


@pytest.mark.parametrize("dtype", ["auto", "float16", "int8"])
def test_norms_are_those_of_the_states_as_kept(tmp_path, dtype):
    states = states_of()
    found = write_shard(tmp_path, KEYS, states, dtype=dtype)
    kept = np.linalg.norm(found.shard.states(PLACES), axis=1)
    np.testing.assert_allclose(found.norms, kept, rtol=1e-6)
    given = torch.linalg.vector_norm(states, dim=1).numpy()
    assert np.allclose(found.norms, given, rtol=1e-6) == (dtype == "auto")  # control


def test_a_state_too_large_for_float16_is_refused(tmp_path):
    states = states_of()
    states[1, 3] = -70000
    message = "state of key 5 reaches 70000, and float16 holds at most 65504: use --bank_dtype auto"
    with pytest.raises(ConfigError, match=message):
        write_shard(tmp_path, KEYS, states, dtype="float16")
    assert not list(tmp_path.iterdir())
    states[1, 3] = -65504
    shard = write_shard(tmp_path, KEYS, states, dtype="float16").shard
    assert shard.states(PLACES)[1, 3] == -65504


@pytest.mark.parametrize("dtype", ["auto", "float16", "int8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_refused(tmp_path, dtype, value):
    states = states_of()
    states[2, 0] = value
    with pytest.raises(ModelError, match="state of key 9 .* is not finite"):
        write_shard(tmp_path, KEYS, states, dtype=dtype)
    assert not list(tmp_path.iterdir())


def test_equal_states_leave_equal_bytes_and_others_do_not(tmp_path):
    contents = []
    for number, seed in enumerate([0, 0, 1]):
        write_shard(tmp_path / str(number), KEYS, states_of(seed), dtype="int8")
        contents.append({p.name: p.read_bytes() for p in (tmp_path / str(number)).iterdir()})
    assert contents[0] == contents[1] != contents[2]


@pytest.mark.parametrize("part", ["keys", "norms"])
def test_changed_keys_and_norms_are_refused_when_opened(tmp_path, part):
    shard = write_shard(tmp_path, KEYS, states_of(), dtype="int8").shard
    flip(shard.path(part))
    with pytest.raises(ArtifactError, match=rf"{part}.npy is damaged.*delete .*\.json"):
        read_shard(shard.record)


@pytest.mark.parametrize("part", ["states", "scales"])
def test_changed_states_are_refused_when_first_read(tmp_path, part):
    record = write_shard(tmp_path, KEYS, states_of(), dtype="int8").shard.record
    read_shard(record).shard.states(PLACES[:1])  # control: whole
    shard = read_shard(record).shard
    flip(shard.path(part))
    with pytest.raises(ArtifactError, match=rf"{part}.npy is damaged.*delete .*\.json"):
        shard.states(PLACES[:1])


@pytest.mark.parametrize("part", ["keys", "states", "scales", "norms"])
def test_a_file_cut_short_or_gone_is_refused_when_opened(tmp_path, part):
    shard = write_shard(tmp_path, KEYS, states_of(), dtype="int8").shard
    path = shard.path(part)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match=rf"{part}.npy is damaged.*delete .*\.json"):
        read_shard(shard.record)
    path.unlink()
    with pytest.raises(ArtifactError, match=rf"{part}.npy is missing.*delete .*\.json"):
        read_shard(shard.record)


def test_no_byte_of_a_record_can_change(tmp_path):
    record = write_shard(tmp_path, KEYS, states_of(), dtype="auto").shard.record
    whole = record.read_bytes()
    for at in range(len(whole)):
        flip(record, at)
        with pytest.raises(ArtifactError, match=r"\.json is damaged .* delete .*\.json, and only"):
            read_shard(record)
        flip(record, at)
    assert record.read_bytes() == whole
    record.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ArtifactError, match=r"\.json is damaged"):
        read_shard(record)
    record.write_bytes(whole)
    read_shard(record)  # control
