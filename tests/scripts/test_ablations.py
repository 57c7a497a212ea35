"""Every grid of the paper's tables at demo size, on tiny models in its bundled ones' place."""

import gc
import json

import pytest
from conftest import SENTENCES, write_jsonl
from scripted import Bench, call, read_json, review_rows

from pgra.commands.ablate import main as ablate_main
from pgra.config import config_root
from pgra.pipelines.grid_files import grid_names

SOURCE = config_root() / "ablations"


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Leave what is imported out of the collections that accelerate makes after a training."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def bench(tmp_path_factory, lm_dirs, encoder_dir, t5_dir):
    made = Bench(tmp_path_factory.mktemp("ablations"), lm_dirs["gpt2"], encoder_dir, t5_dir)
    lines = [f"{SENTENCES[i % 12]} It was number {i} of them." for i in range(40)]
    (made.root / "sentences.txt").write_text("\n".join(lines) + "\n")
    documents = [" ".join([lines[i % 40]] * 9) for i in range(40)]
    (made.root / "documents.txt").write_text("\n".join(documents) + "\n")
    return made


@pytest.fixture(scope="module")
def shipped(bench):
    """Copies of the YAMLs that name tiny models and files where ours name bundled ones."""
    names = {
        "bundled:rotten-tomatoes": "null",
        '"bundled:smollm2-135m"': str(bench.lm),
        "bundled:smollm2-135m": str(bench.lm),
        "bundled:minilm-l6": str(bench.encoder),
        "bundled:t5-small-titles": str(bench.t5),
        '"bundled:wikipedia-19k"': str(bench.root / "sentences.txt"),
        "bundled:wikipedia-19k": str(bench.root / "sentences.txt"),
        '"bundled:wikipedia-articles"': str(bench.root / "documents.txt"),
    }
    folder = bench.root / "grids"
    folder.mkdir()
    for path in SOURCE.glob("*.yaml"):
        text = path.read_text()
        for name, tiny in names.items():
            text = text.replace(name, tiny)
        assert "bundled:" not in text
        (folder / path.name).write_text(text)
    return folder


def task_rows(name, count, start=0):
    """Give rows of the grid's task."""
    rows = review_rows(count, start=start)
    if name == "fever":
        labels = {"positive": "SUPPORTS", "negative": "REFUTES"}
        return [{"claim": row["text"], "label": labels[row["label"]]} for row in rows]
    return rows


def run(bench, name, path, *words):
    train = write_jsonl(bench.root / f"{name}-train.jsonl", task_rows(name, 40))
    test = write_jsonl(bench.root / f"{name}-test.jsonl", task_rows(name, 12, start=20))
    flags = ["--train_file", str(train), "--test_file", str(test), "--device", "cpu"]
    flags += ["--artifacts_dir", str(bench.artifacts), "--output_dir", str(bench.run(name))]
    return call(ablate_main, [str(path), "--demo", *flags, *map(str, words)])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*grid_names()} - {"exemplars", "pairs", "prompts"}))
def test_every_shipped_grid_runs_at_demo_size(bench, shipped, t5_dirs, name):
    small = ["--seeds", 0, "--max_steps", 1, "--num_exemplars", 2, "--max_encoder_tokens", 64]
    small += ["--max_segment_tokens", 224]  # the tiny tokenizer cuts words into many
    if name == "fever":  # the tiny T5 has no capital letters, which Yes and No need
        small += ["--model_name_or_path", t5_dirs["byt5"]]
    if name == "profiles":  # it decides by one token, as its words for this task are
        small += ["--tasks", "sst2"]
    called = run(bench, name, shipped / f"{name}.yaml", *small, "--drop_readers")
    assert called.code == 0, called.out + called.err
    told = read_json(bench.run(name) / "grid.json")
    runs = [bench.run(name) / place for p in told["points"] for place in p["seeds"].values()]
    assert len(runs) == len(told["points"]) >= 1
    for folder in runs:
        assert 0 <= abs(json.loads((folder / "metrics.json").read_text())["value"]) <= 1
    assert told["title"] in called.out
    assert "missing" not in called.out
    if name == "training_cost":
        assert "seconds" in called.out
