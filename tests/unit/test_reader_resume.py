"""A training that was stopped and goes on is the training that was never stopped, bit for bit."""

import signal

import pytest
from processes import launch
from small_training import at_batch, run_files, signal_self, train_long, train_told
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from pgra.errors import Stopped
from pgra.reader.resume import last_checkpoint


@pytest.fixture(scope="module")
def whole(t5_dir, tmp_path_factory):
    """The unbroken run, with dropout, two accumulated batches and shuffled epochs."""
    folder = tmp_path_factory.mktemp("whole")
    _, progress = train_long(t5_dir, folder)
    return folder, progress


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code", "batch"), [("SIGTERM", 143, 8), ("SIGUSR1", 138, 32)])
def test_a_signal_saves_the_step_it_came_in(whole, t5_dir, tmp_path, number, code, batch):
    before = signal.getsignal(signal.Signals[number])
    with (
        at_batch(batch, signal_self(signal.Signals[number])),
        pytest.raises(Stopped, match=number) as stop,
    ):
        train_long(t5_dir, tmp_path)
    assert stop.value.code == code
    assert signal.getsignal(signal.Signals[number]) == before
    step = 7 * (batch // 13) + (batch % 13 + 1) // 2  # 13 batches are 7 steps
    assert last_checkpoint(tmp_path) == tmp_path / f"checkpoint-{step}"
    assert not (tmp_path / "reader").exists()
    _, progress = train_long(t5_dir, tmp_path)
    assert run_files(tmp_path) == run_files(whole[0])
    assert progress == whole[1]


@pytest.mark.slow
def test_two_processes_killed_stopped_and_out_of_time_go_on_as_one_run(t5_dir, tmp_path):
    """What befalls one of them ends both, at the same step."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    size = {"per_device_train_batch_size": 1, "max_steps": 24}

    def both(folder, **told):
        return launch(train_told, t5_dir, folder, {**size, **told})

    assert both(whole) == ["", ""]
    with pytest.raises(ChildFailedError):
        both(broken, signal=signal.SIGKILL, batch=13, rank=1)
    assert last_checkpoint(broken) == broken / "checkpoint-5"
    assert not (broken / "reader").exists()
    stops = both(broken, signal=signal.SIGTERM, batch=9, rank=1)
    assert stops[0] == stops[1]
    assert "" not in both(broken, max_train_minutes=1e-9)
    assert both(broken) == ["", ""]
    assert run_files(broken) == run_files(whole)
