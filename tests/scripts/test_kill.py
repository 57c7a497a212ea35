"""`kill -9`, then the same command: it goes on, and leaves what an unbroken run leaves."""

import pytest
from scripted import finish, half_written, kill_when, products, write_passages, written_at

pytestmark = pytest.mark.slow


def test_train_goes_on_from_the_shards_and_from_the_checkpoint_of_killed_jobs(bench):
    """With a corpus so large, and shards so small, that there is time to kill."""
    write_passages(bench.corpus, 1000)
    flags = {"num_candidates": 100, "bank_shard_rows": 2, "max_segment_tokens": 64}
    flags |= {"max_steps": 100, "eval_steps": 10}
    one, two = bench.root / "one", bench.root / "two"
    finish(["train.py", *bench.argv("one", **flags, artifacts_dir=one)])
    words = ["train.py", *bench.argv("two", **flags, artifacts_dir=two)]
    records = "banks/gpt2-[!q]*/[0-9a-f]*.json"
    kill_when(words, lambda: len(written_at(two, records)) >= 10)
    before = written_at(two, records)
    assert not bench.run("two").exists()
    state = bench.run("two") / "checkpoint-30" / "trainer_state.json"
    kill_when(words, state.exists)
    assert not (bench.run("two") / "metrics.json").exists()
    assert "run: going on from" in finish(words)
    after = written_at(two, records)
    assert {path: after[path] for path in before} == before
    assert len(after) > len(before)
    assert half_written(two) == []
    assert products(two / "banks") == products(one / "banks")
    assert bench.predictions("two") == bench.predictions("one")
    one, two = (bench.run(name) / "reader" / "model.safetensors" for name in ("one", "two"))
    assert two.read_bytes() == one.read_bytes()
