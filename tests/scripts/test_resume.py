"""train.py stopped and given again, and checkpoints that are not its own."""

import pytest
from conftest import write_jsonl
from scripted import contents, review_rows

pytestmark = pytest.mark.slow

PLAIN = {"num_evidence": 0, "max_segment_tokens": 64}


@pytest.fixture(scope="module")
def made(bench):
    """A plain run of four steps, and its bench."""
    bench.make("one", **PLAIN, max_steps=4, save_total_limit=2)  # which keeps checkpoints
    return bench


def test_out_of_time_is_124_and_the_same_command_goes_on(made):
    told = made.train("late", **PLAIN, max_steps=4, max_train_minutes=1e-9)
    assert told.code == 124, told.err
    assert told.err.endswith(
        "\npgra: stopped (time is up) after step 1 of 4; the same command goes on from there\n"
    )
    assert "metrics.json" not in contents(made.run("late"))
    assert made.train("late", **PLAIN, max_steps=4).code == 0
    assert made.predictions("late") == made.predictions("one")
    assert list(made.run("one").glob("checkpoint-*"))
    assert not list(made.run("late").glob("checkpoint-*"))  # by default a finished run has none
    for name in ("losses.jsonl", "reader/model.safetensors"):
        assert (made.run("late") / name).read_bytes() == (made.run("one") / name).read_bytes()


def test_a_label_that_no_training_example_shows(made):
    rows = [row for row in review_rows(40) if row["label"] == "positive"]
    some = write_jsonl(made.root / "some.jsonl", rows)
    flags = {**PLAIN, "train_file": some, "validation_file": made.train_file}
    assert "no training example has label 'negative'" in made.train("one-sided", **flags).error
    assert not made.run("one-sided").exists()
