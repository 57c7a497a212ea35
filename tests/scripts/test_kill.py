"""`kill -9`, then the same command: it goes on, and leaves what an unbroken run leaves."""

import pytest
from scripted import (
    Bench,
    finish,
    half_written,
    kill_when,
    products,
    write_passages,
    written_at,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def bench(tmp_path, lm_dirs, encoder_dir, t5_dir):
    """A corpus so large, and shards so small, that there is time to kill."""
    bench = Bench(tmp_path, lm_dirs["gpt2"], encoder_dir, t5_dir)
    write_passages(bench.corpus, 1000)
    return bench


def test_train_goes_on_from_the_shards_of_a_killed_rerank(bench):
    small = {"num_candidates": 100, "bank_shard_rows": 2, "max_steps": 2}
    finish(["train.py", *bench.argv("one", **small, artifacts_dir=bench.root / "one")])
    words = ["train.py", *bench.argv("two", **small, artifacts_dir=bench.root / "two")]
    records = "banks/gpt2-[!q]*/[0-9a-f]*.json"
    kill_when(words, lambda: len(written_at(bench.root / "two", records)) >= 10)
    before = written_at(bench.root / "two", records)
    assert not bench.run("two").exists()
    finish(words)
    after = written_at(bench.root / "two", records)
    assert {path: after[path] for path in before} == before
    assert len(after) > len(before)
    assert half_written(bench.root / "two") == []
    one, two = (products(bench.root / name / "banks") for name in ("one", "two"))
    assert two == one
    assert bench.predictions("two") == bench.predictions("one")
    one, two = (bench.run(name) / "reader" / "model.safetensors" for name in ("one", "two"))
    assert two.read_bytes() == one.read_bytes()


def test_train_goes_on_from_the_checkpoint_of_a_killed_training(bench):
    flags = {"num_evidence": 0, "max_steps": 400, "eval_steps": 20, "max_segment_tokens": 64}
    finish(["train.py", *bench.argv("one", **flags)])
    words = ["train.py", *bench.argv("two", **flags)]
    folder = bench.run("two")
    kill_when(words, lambda: (folder / "checkpoint-60" / "trainer_state.json").exists())
    assert not (folder / "metrics.json").exists()
    told = finish(words)
    assert "run: going on from" in told
    assert bench.predictions("two") == bench.predictions("one")
    weights = "reader/model.safetensors"
    assert (folder / weights).read_bytes() == (bench.run("one") / weights).read_bytes()
