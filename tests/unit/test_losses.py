import json
import math

import pytest
import torch
from accelerate import Accelerator

from pgra.errors import ModelError
from pgra.reader.train import LossLog, LossRecord, read_losses


@pytest.fixture
def log(tmp_path):
    log = LossLog(tmp_path / "losses.jsonl", Accelerator(cpu=True), way_out=lambda: "do better")
    log.begin(0, None)
    return log


def step(log, *parts, rate=0.1):
    for part in parts:
        log.add(torch.tensor(part))
    log.set_rate(rate)
    log.end_step()


def test_a_step_is_the_sum_of_its_accumulated_parts_to_the_last_bit(log):
    step(log, 0.1, 0.2, rate=1e-5)
    log.flush()
    (line,) = log.path.read_text().splitlines()
    exact = float(torch.tensor([0.1, 0.2]).sum())
    assert exact != 0.1 + 0.2
    assert json.loads(line) == {"step": 1, "loss": exact, "learning_rate": 1e-5}


def test_losses_are_written_by_the_chunk_and_cut_back_to_a_checkpoint(log):
    for number in range(55):
        step(log, float(number))
    assert len(log.path.read_text().splitlines()) == 50
    log.flush()
    assert (log.mean(), log.mean(after=52)) == (27.0, 53.0)
    assert math.isnan(log.mean(after=55))
    log.begin(5, log.path)
    whole = log.path.read_text()
    log.path.write_text(whole + '{"step": 6, "lo')
    log.begin(3, log.path)
    assert len(log.path.read_text().splitlines()) == 3
    for number in (3, 4):
        step(log, float(number))
    log.flush()
    assert log.path.read_text() == whole
    log.begin(0, None)
    assert log.path.read_text() == ""


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_loss_is_named_and_what_went_before_is_kept(log, broken):
    step(log, 1.0)
    step(log, 1.0, broken)
    step(log, 1.0)
    with pytest.raises(ModelError, match=rf"^the loss is {broken} at step 2: do better"):
        log.flush()
    assert read_losses(log.path, 9) == [LossRecord(1, 1.0, 0.1)]
