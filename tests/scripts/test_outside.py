"""What the README says can be added: from outside the tree, by name, with no line of ours."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from conftest import write_jsonl
from scripted import Bench, call, read_json, review_rows

from pgra.cli import main
from pgra.commands.train import icl

OUTSIDE = Path(__file__).parents[1] / "outside"
BY_PATH = {
    "retriever": "toys:Stride",
    "reranker": "toys:ByLength",
    "selector": "toys:LastFirst",
    "similarity": "toys:Halves",
    "method": "toys:OneLabel",
}
BY_NAME = {
    "retriever": "stride",
    "reranker": "length",
    "selector": "last-first",
    "similarity": "halves",
    "method": "one-label",
}
TASK = """
inputs: [text]
labels: [negative, positive]
prompt: "{text}"
reader_template: "{text} It was <extra_id_0> ."
verbalizer: {negative: terrible, positive: great}
metric: toys:positives
"""


@pytest.fixture(params=[BY_PATH, BY_NAME], ids=["module:Class", "entry point"])
def added(request, monkeypatch):
    """The names under which the toys are found; they are importable, and no file of ours knows."""
    monkeypatch.syspath_prepend(str(OUTSIDE))
    yield request.param
    sys.modules.pop("toys", None)


@pytest.fixture
def bench(tmp_path, lm_dirs, encoder_dir, t5_dir):
    bench = Bench(tmp_path, lm_dirs["gpt2"], encoder_dir, t5_dir)
    task = tmp_path / "reviews.yaml"
    task.write_text(TASK)
    write_jsonl(bench.train_file, review_rows(40))
    bench.flags["task"] = task
    return bench


def pgra(*words):
    called = call(main, [str(word) for word in words])
    assert called.code == 0, called.err
    return called


def test_a_retriever_and_a_reranker_with_flags_of_their_own_go_through_everything(bench, added):
    toys = {"retriever": added["retriever"], "stride": 2, "reranker": added["reranker"]}
    assert bench.train("longest", **toys).code == 0
    called = bench.train("shortest", **toys, shortest=True)
    assert called.code == 0, called.err
    longest, shortest = (
        [[len(e["text"]) for e in line["evidence"]] for line in bench.predictions(name)]
        for name in ("longest", "shortest")
    )
    assert all(line == sorted(line, reverse=True) for line in longest)
    assert all(line == sorted(line) for line in shortest)
    arguments = read_json(bench.run("shortest") / "arguments.json")
    assert arguments["retriever_options"] == {"stride": 2}
    assert arguments["rerank_options"] == {"shortest": True}
    metrics = bench.metrics("shortest")
    assert bench.evaluate("shortest").code == 0
    assert bench.metrics("shortest")["metrics"] == metrics["metrics"]
    line = bench.predictions("shortest")[0]
    said = pgra("predict", line["text"], "--run", bench.run("shortest"), "--json", "--device=cpu")
    answer = json.loads(said.out)
    assert answer["prediction"] == line["prediction"]
    assert [e["row"] for e in answer["evidence"]] == [e["row"] for e in line["evidence"]]
    flags = bench.argv("x", **toys, output_dir=None)
    keep = ("task", "train_file", "test_file", "corpus", "artifacts_dir", "device")
    keep += ("num_candidates", "num_evidence", "retriever", "reranker", "stride")
    pairs = zip(flags[::2], flags[1::2], strict=True)
    words = [word for flag, value in pairs if flag[2:] in keep for word in (flag, value)]
    assert "reranker" in pgra("plan", *words).out
    assert "second stage" in pgra("rerank", line["text"], *words).out
    report = pgra("report", bench.root / "runs")
    assert "shortest=True" in report.out
    unknown = bench.train("never", **{**toys, "strid": 2}).error
    assert "unknown argument '--strid'. Did you mean '--stride'?" in unknown


def test_a_similarity_and_a_selector_and_a_metric(bench, added):
    called = bench.train("halves", similarity=added["similarity"])
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
    folder = bench.run("last")
    flags = {name: bench.flags[name] for name in ("task", "train_file", "test_file", "lm")}
    flags |= {"artifacts_dir": bench.artifacts, "output_dir": folder, "device": "cpu"}
    flags |= {"exemplars": added["selector"], "num_exemplars": 2}
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    called = call(icl, words)
    assert called.code == 0, called.err
    for line in bench.predictions("last"):
        assert [e["id"] for e in line["exemplars"]] == ["train-39", "train-38"]


def test_a_method_runs_is_measured_reported_ablated_and_asked(bench, added):
    flags = {name: bench.flags[name] for name in ("task", "train_file", "test_file")}
    flags |= {"artifacts_dir": bench.artifacts, "device": "cpu"}
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    train = ["train", "--method", added["method"], *words]
    pgra(*train, "--output_dir", bench.run("yes"))
    pgra(*train, "--output_dir", bench.run("no"), "--one_label", "negative")
    assert {line["prediction"] for line in bench.predictions("yes")} == {"positive"}
    assert {line["prediction"] for line in bench.predictions("no")} == {"negative"}
    assert "finished (reused)" in pgra(*train, "--output_dir", bench.run("yes")).err
    metrics = bench.metrics("no")
    pgra("evaluate", "--run", bench.run("no"))
    assert bench.metrics("no")["metrics"] == metrics["metrics"]
    told = pgra("predict", "anything", "--run", bench.run("no"), "--json").out
    assert json.loads(told)["prediction"] == "negative"
    assert "one_label" in pgra("report", bench.root / "runs").out
    seeds = pgra(*train, "--output_dir", bench.run("many"), "--seeds", "0", "1")
    assert "mean ± sample sd of 2 seeds: 0 1" in seeds.out
    grid = bench.root / "grid.yaml"
    base = {"method": added["method"], **{name: str(value) for name, value in flags.items()}}
    points = [{"one_label": "positive"}, {"one_label": "negative"}]
    grid.write_text(yaml.safe_dump({"base": base, "points": points, "seeds": [0]}))
    listed = pgra("ablate", grid, "--dry-run", "--output_dir", bench.run("grid"))
    assert "is not foreseen" in listed.out
    assert "one_label=negative" in pgra("ablate", grid, "--output_dir", bench.run("grid")).out
    assert "--one_label" in pgra("train", "--method", added["method"], "--help").out


@pytest.mark.parametrize(
    ("flag", "name", "told"),
    [
        ("retriever", "toys:Nothing", "retriever 'toys:Nothing' cannot be imported"),
        ("reranker", "nowhere:Class", "reranker 'nowhere:Class' cannot be imported"),
        ("method", "toys:OneLable", "method 'toys:OneLable' cannot be imported"),
        ("method", "pgar", "unknown method 'pgar'. Did you mean 'pgra'"),
        ("reranker", "promted", "unknown reranker 'promted'. Did you mean 'prompted'"),
    ],
)
def test_a_name_that_stands_for_nothing_is_refused(bench, monkeypatch, flag, name, told):
    monkeypatch.syspath_prepend(str(OUTSIDE))
    assert told in bench.train("never", **{flag: name}).error
    assert not bench.run("never").exists()
