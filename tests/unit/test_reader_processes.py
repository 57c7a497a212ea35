"""One process or two: the same losses, and all leave together."""

import pytest
from processes import launch
from small_training import losses, train_told

pytestmark = pytest.mark.slow


def test_processes_train_alike_though_not_all_share_a_step(t5_dir, tmp_path):
    told = {"per_device_train_batch_size": None, "total_train_batch_size": 4, "dropout": 0.0}
    for count in (1, 2, 3):  # of three two share four examples
        launch(train_told, t5_dir, tmp_path / str(count), told, processes=count)
        assert losses(tmp_path / str(count)) == pytest.approx(losses(tmp_path / "1"), rel=1e-5)


def test_a_broken_loss_of_one_process_is_named_by_all(t5_dir, tmp_path):
    told = {"per_device_train_batch_size": 1, "nan": True, "batch": 23, "rank": 1}
    errors = launch(train_told, t5_dir, tmp_path, told)
    assert errors[0] == errors[1]
    assert "the loss is nan at step 12: " in errors[0]
    assert len(losses(tmp_path)) == 11  # those before the broken step
