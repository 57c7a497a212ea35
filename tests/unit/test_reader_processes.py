"""One process or two: the same losses, each example measured once, and all leave together."""

import pytest
from processes import launch
from small_training import losses, make_inputs, train_long, train_told

pytestmark = pytest.mark.slow

STEPS = {"max_steps": 10, "total_train_batch_size": None, "dropout": 0.0, "rows": 43}
# 43 examples are ten batches of four, and three are left over.


@pytest.fixture(scope="module")
def alone(t5_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    changes = {k: v for k, v in STEPS.items() if k not in ("dropout", "rows")}
    _, result = train_long(
        t5_dir, folder, make_inputs(43), 0.0, **changes, per_device_train_batch_size=4
    )
    return folder, result


def test_two_processes_train_and_measure_alike(alone, t5_dir, tmp_path):
    # The same words as for one process: a step has four examples, whoever reads them.
    told = {**STEPS, "per_device_train_batch_size": None, "total_train_batch_size": 4}
    both = launch(train_told, t5_dir, tmp_path, told)
    assert losses(tmp_path) == pytest.approx(losses(alone[0]), rel=1e-5)
    measured = [entry for entry in alone[1].history if "dev_accuracy" in entry]
    for each in both:
        assert [entry for entry in each.log if "dev_accuracy" in entry] == measured


def test_a_broken_loss_of_one_process_is_named_by_all(t5_dir, tmp_path):
    told = {"per_device_train_batch_size": 1, "nan": True, "batch": 23, "rank": 1}
    errors = [each.error for each in launch(train_told, t5_dir, tmp_path, told)]
    assert errors[0] == errors[1]
    assert "the loss is nan at step 12: " in errors[0]
    assert len(losses(tmp_path)) == 11  # those before the broken step
