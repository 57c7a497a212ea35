"""Sentence pairs from training to label consistency, as a user would."""

import pytest
from conftest import SENTENCES, write_jsonl
from scripted import ROOT, Bench, call, finish, read_json

from pgra.commands.consistency import main


def pairs(count, start=0):
    return [
        {
            "sentence1": SENTENCES[i % 12],
            "sentence2": f"{SENTENCES[(i * 5 + 1) % 12]} Number {i}.",
            "label": "entailment" if i % 2 else "not_entailment",
        }
        for i in range(start, start + count)
    ]


@pytest.fixture
def bench(tmp_path, lm_dirs, encoder_dir, t5_dir):
    bench = Bench(tmp_path, lm_dirs["gpt2"], encoder_dir, t5_dir)
    task = (ROOT / "configs/tasks/rte.yaml").read_text()
    task = task.replace('"Yes"', '"great"').replace('"No"', '"terrible"')  # the tiny T5's letters
    (tmp_path / "rte.yaml").write_text(task)
    bench.flags |= {
        "task": tmp_path / "rte.yaml",
        "train_file": write_jsonl(tmp_path / "rte.jsonl", pairs(30)),
        "test_file": write_jsonl(tmp_path / "rte-test.jsonl", pairs(10, start=30)),
    }
    return bench


@pytest.mark.slow
def test_the_evidence_of_pairs_is_labelled_by_their_own_plain_reader(bench):
    assert bench.train("plain", num_evidence=0).code == 0
    assert bench.train("fid", reranker="none").code == 0
    assert bench.train("pgra").code == 0
    for name in ("fid", "pgra"):
        lines = bench.predictions(name)
        assert all(set(line["fields"]) == {"sentence1", "sentence2"} for line in lines)
        assert all(len(line["evidence"]) == 2 for line in lines)
    out = bench.root / "out"
    words = ["--runs", str(bench.root / "runs"), "--output_dir", str(out), "--device", "cpu"]
    called = call(main, [*words, "--no_plots"])
    assert called.code == 0, called.err
    told = read_json(out / "consistency.json")
    assert [(run["name"], run["depth"], run["queries"]) for run in told["runs"]] == [
        ("fid", 2, 10),
        ("pgra", 2, 10),
    ]
    for run in told["runs"]:
        assert sum(one["queries"] for one in run["by_count"]) == 10
        right = sum(one["right"] for one in run["by_count"])
        assert right == bench.metrics(run["name"])["value"] * 10
    assert "trained on other examples" not in called.out
    again = call(main, [*words, "--no_plots"])
    assert "0 texts were read" in again.out


def test_the_script_is_the_command():
    assert "pseudo-label" in finish(["ablations/label_consistency.py", "--help"])
