"""What the README says can be added: from outside the tree, by name, with no line of ours."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from scripted import Bench, call, read_json

from pgra.cli import main

OUTSIDE = Path(__file__).parents[1] / "outside"
TASK = """
inputs: [text]
labels: [negative, positive]
prompt: "{text}"
reader_template: "{text} It was <extra_id_0> ."
verbalizer: {negative: terrible, positive: great}
metric: toys:positives
"""


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    """Make the toys importable; no file of ours knows of them."""
    monkeypatch.syspath_prepend(str(OUTSIDE))
    yield
    sys.modules.pop("toys", None)


@pytest.fixture
def bench(tmp_path, lm_dirs, encoder_dir, t5_dir):
    bench = Bench(tmp_path, lm_dirs["gpt2"], encoder_dir, t5_dir)
    task = tmp_path / "reviews.yaml"
    task.write_text(TASK)
    bench.flags["task"] = task
    return bench


def pgra(*words):
    called = call(main, [str(word) for word in words])
    assert called.code == 0, called.err
    return called


def words_of(bench, *names, **more):
    flags = {name: bench.flags[name] for name in ("task", "train_file", "test_file", *names)}
    flags |= {"artifacts_dir": bench.artifacts, "device": "cpu", **more}
    return [str(word) for name, value in flags.items() for word in (f"--{name}", value)]


def test_a_retriever_and_a_reranker_have_flags_of_their_own(bench):
    """By the names of their entry points; by their classes test_own_rerankers has them."""
    toys = {"retriever": "stride", "stride": 2, "reranker": "length"}
    for name, is_shortest in (("longest", False), ("shortest", True)):
        called = bench.train(name, **toys, shortest=is_shortest)
        assert called.code == 0, called.err
        for line in bench.predictions(name):
            lengths = [len(one["text"]) for one in line["evidence"]]
            assert lengths == sorted(lengths, reverse=not is_shortest)
    arguments = read_json(bench.run("shortest") / "arguments.json")
    assert arguments["retriever_options"] == {"stride": 2}
    assert arguments["rerank_options"] == {"shortest": True}
    metrics = bench.metrics("shortest")["metrics"]
    assert bench.evaluate("shortest").code == 0
    assert bench.metrics("shortest")["metrics"] == metrics
    words = words_of(bench, "corpus", "num_candidates", "num_evidence", **toys)
    assert "second stage" in pgra("rerank", line["text"], *words).out
    assert "shortest=True" in pgra("report", bench.root / "runs").out
    unknown = bench.train("never", **toys, strid=2).error
    assert "unknown argument '--strid'. Did you mean '--stride'?" in unknown


def test_a_similarity_and_a_selector_and_a_metric(bench):
    called = bench.train("halves", similarity="toys:Halves")
    assert called.code == 0, called.err
    assert bench.train("dot").code == 0
    scores = [
        [[e["score"] for e in line["evidence"]] for line in bench.predictions(name)]
        for name in ("halves", "dot")
    ]
    assert scores[0] != scores[1]
    metrics = bench.metrics("halves")
    assert metrics["metric"] == "toys:positives"
    right = [line for line in bench.predictions("halves") if line["prediction"] == "positive"]
    share = sum(line["label"] == "positive" for line in right) / max(1, len(right))
    assert metrics["value"] == pytest.approx(share)
    chosen = {"exemplars": "last-first", "num_exemplars": 2, "output_dir": bench.run("last")}
    pgra("icl", *words_of(bench, "lm", **chosen))
    for line in bench.predictions("last"):
        assert [e["id"] for e in line["exemplars"]] == ["train-39", "train-38"]


@pytest.mark.parametrize("name", ["toys:OneLabel", "one-label"])
def test_a_method_runs_is_measured_reported_ablated_and_asked(bench, name):
    train = ["train", "--method", name, *words_of(bench)]
    pgra(*train, "--output_dir", bench.run("yes"))
    pgra(*train, "--output_dir", bench.run("no"), "--one_label", "negative")
    assert {line["prediction"] for line in bench.predictions("yes")} == {"positive"}
    assert {line["prediction"] for line in bench.predictions("no")} == {"negative"}
    assert "finished (reused)" in pgra(*train, "--output_dir", bench.run("yes")).err
    metrics = bench.metrics("no")["metrics"]
    pgra("evaluate", "--run", bench.run("no"))
    assert bench.metrics("no")["metrics"] == metrics
    told = pgra("predict", "anything", "--run", bench.run("no"), "--json").out
    assert json.loads(told)["prediction"] == "negative"
    assert "one_label" in pgra("report", bench.root / "runs").out
    seeds = pgra(*train, "--output_dir", bench.run("many"), "--seeds", "0", "1")
    assert "mean ± sample sd of 2 seeds: 0 1" in seeds.out
    base = {"method": name, **{key: str(bench.flags[key]) for key in ("task", "train_file")}}
    base |= {"test_file": str(bench.test_file), "device": "cpu"}
    points = [{"one_label": "positive"}, {"one_label": "negative"}]
    grid = bench.root / "grid.yaml"
    grid.write_text(yaml.safe_dump({"base": base, "points": points, "seeds": [0]}))
    listed = pgra("ablate", grid, "--dry-run", "--output_dir", bench.run("grid"))
    assert "is not foreseen" in listed.out
    assert "one_label=negative" in pgra("ablate", grid, "--output_dir", bench.run("grid")).out
    assert "--one_label" in pgra("train", "--method", name, "--help").out


def test_a_method_that_is_not_there_is_refused(bench):
    error = bench.train("never", method="toys:OneLable").error
    assert "method 'toys:OneLable' cannot be imported" in error
    assert not bench.run("never").exists()
