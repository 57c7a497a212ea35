import json
import math

import pytest
import torch
from small_training import losses

from pgra.core import Worker
from pgra.errors import ModelError
from pgra.reader.resume import Progress
from pgra.reader.train import LossLog


@pytest.fixture
def log(tmp_path):
    return LossLog(tmp_path, Progress(), Worker())


def step(log, *parts):
    log.add([torch.tensor(part) for part in parts])


def test_a_step_is_the_sum_of_its_accumulated_parts_to_the_last_bit(log, tmp_path):
    step(log, 0.1, 0.2)
    log.flush()
    (line,) = (tmp_path / "losses.jsonl").read_text().splitlines()
    exact = float(torch.tensor([0.1, 0.2]).sum())
    assert exact != 0.1 + 0.2
    assert json.loads(line) == {"step": 1, "loss": exact}


def test_losses_are_written_by_the_chunk_and_cut_back_to_a_checkpoint(log, tmp_path):
    for number in range(55):
        step(log, float(number))
    assert len(losses(tmp_path)) == 50
    log.flush()
    whole = (tmp_path / "losses.jsonl").read_text()
    again = LossLog(tmp_path, Progress(3, losses=[0.0, 1.0, 2.0]), Worker())
    for number in range(3, 55):
        step(again, float(number))
    again.flush()
    assert (tmp_path / "losses.jsonl").read_text() == whole


def test_a_broken_loss_is_named_and_what_went_before_is_kept(log, tmp_path):
    broken = math.inf
    step(log, 1.0)
    step(log, 1.0, broken)
    step(log, 1.0)
    with pytest.raises(ModelError, match=rf"^the loss is {broken} at step 2: "):
        log.flush()
    assert losses(tmp_path) == [1.0]
