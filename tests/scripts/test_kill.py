"""`kill -9`, then the same command: it goes on, and leaves what an unbroken run leaves."""

import json
import random

import pytest
from conftest import SENTENCES
from scripted import Bench, contents, finish, half_written, kill_when

pytestmark = pytest.mark.slow
NUM_PASSAGES = 1000


@pytest.fixture
def bench(tmp_path, lm_dirs, encoder_dir, t5_dir):
    """A corpus so large, and shards so small, that there is time to kill."""
    bench = Bench(tmp_path, lm_dirs["gpt2"], encoder_dir, t5_dir)
    words = " ".join(SENTENCES).split()
    draw = random.Random(0)
    lines = [f"{number} {' '.join(draw.sample(words, 12))}" for number in range(NUM_PASSAGES)]
    bench.corpus.write_text("\n".join(lines) + "\n")
    return bench


def done_shards(folder, pattern):
    return {path: path.stat().st_mtime_ns for path in folder.glob(pattern)}


def products(folder):
    """Give files whose bytes must not depend on how often a job was killed."""
    return {
        name: data
        for name, data in contents(folder).items()
        if not name.endswith((".lock", "manifest.json"))
    }


def test_train_goes_on_from_the_shards_of_a_killed_rerank(bench):
    small = {"num_candidates": 100, "bank_shard_rows": 2, "max_steps": 2}
    finish(["train.py", *bench.argv("one", **small, artifacts_dir=bench.root / "one")])
    words = ["train.py", *bench.argv("two", **small, artifacts_dir=bench.root / "two")]
    records = "banks/gpt2-[!q]*/[0-9a-f]*.json"
    kill_when(words, lambda: len(done_shards(bench.root / "two", records)) >= 10)
    before = done_shards(bench.root / "two", records)
    assert not bench.run("two").exists()
    finish(words)
    after = done_shards(bench.root / "two", records)
    assert {path: after[path] for path in before} == before
    assert len(after) > len(before)
    one, two = products(bench.root / "one" / "banks"), products(bench.root / "two" / "banks")
    assert half_written(bench.root / "two") == []
    assert two == one
    assert bench.predictions("two") == bench.predictions("one")
    one, two = (contents(bench.run(name) / "reader") for name in ("one", "two"))
    # It names the folder of artifacts, and here there are two.
    records = [json.loads(found.pop("pgra.json")) for found in (one, two)]
    for record in records:
        del record["arguments"]["runtime"]["artifacts_dir"]
    assert records[1] == records[0]
    assert two == one


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
