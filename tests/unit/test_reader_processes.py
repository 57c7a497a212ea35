"""One process or four: the same losses, each example measured once, and all leave together."""

import json

import pytest
from small_training import log_lines, make_inputs, result_of, script, train_long

from pgra.reader.train import read_losses

pytestmark = pytest.mark.slow

STEPS = {"max_steps": 10, "gradient_accumulation_steps": 1, "dropout": 0.0, "rows": 43}
# 43 examples are ten batches of four, and three are left over.


def losses(folder):
    return [record.loss for record in read_losses(folder / "losses.jsonl", 10**6)]


@pytest.fixture(scope="module")
def alone(t5_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    changes = {k: v for k, v in STEPS.items() if k not in ("dropout", "rows")}
    _, result = train_long(
        t5_dir, folder, make_inputs(43), 0.0, **changes, per_device_train_batch_size=4
    )
    return folder, result


def test_four_processes_train_and_measure_alike(alone, t5_dir, tmp_path):
    # The same words as for one process: a step has four examples, whoever reads them.
    told = {**STEPS, "per_device_train_batch_size": None, "total_train_batch_size": 4}
    results = result_of(script(t5_dir, tmp_path, json.dumps(told), processes=4))
    assert len(results) == 4
    assert losses(tmp_path) == pytest.approx(losses(alone[0]), rel=1e-5)
    measured = [entry for entry in log_lines(alone[1]) if "eval_accuracy" in entry]
    for history, alike in results:
        assert [entry for entry in history if "eval_accuracy" in entry] == measured
        assert alike == [True] * 6


def test_a_mean_of_means_would_have_shown(alone, t5_dir, tmp_path):
    told = {**STEPS, "per_device_train_batch_size": 2, "average_tokens_across_devices": False}
    result_of(script(t5_dir, tmp_path, json.dumps(told), processes=2))
    assert losses(tmp_path) != pytest.approx(losses(alone[0]), rel=1e-3)


def test_a_broken_loss_of_one_process_is_named_by_all(t5_dir, tmp_path):
    told = {"per_device_train_batch_size": 1, "nan": True, "batch": 23, "rank": 1}
    done = script(t5_dir, tmp_path, json.dumps(told), processes=2)
    errors = [line for line in done.stdout.splitlines() if line.startswith("ERROR")]
    assert len(errors) == 2, done.stderr[-2000:]
    assert errors[0] == errors[1]
    assert "the loss is nan at step 12: " in errors[0]
    assert "checkpoint-10" in errors[0]
    assert "exitcode  : 2" in done.stderr
    assert len(losses(tmp_path)) == 11  # those before the broken step
