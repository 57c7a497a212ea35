"""What the README says can be added: from outside the tree, by name, with no line of ours."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from scripted import call, contents, read_json

from pgra.cli import main

pytestmark = pytest.mark.slow

OUTSIDE = Path(__file__).parents[1] / "outside"
TASK = """
inputs: [text]
labels: [negative, positive]
prompt: "{text}"
reader_template: "{text} It was <extra_id_0> ."
verbalizer: {negative: terrible, positive: great}
metric: toys:positives
"""
STAGES = ("corpus", "encoder", "lm", "num_candidates", "num_evidence", "num_exemplars")


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    """Make the toys importable; no file of ours knows of them."""
    monkeypatch.syspath_prepend(str(OUTSIDE))
    yield
    sys.modules.pop("toys", None)


@pytest.fixture
def bench(new_bench):
    new_bench.flags["task"] = new_bench.root / "reviews.yaml"
    new_bench.flags["task"].write_text(TASK)
    return new_bench


def pgra(*words):
    called = call(main, [str(word) for word in words])
    assert called.code == 0, called.err
    return called


def words_of(bench, *names, **more):
    flags = {name: bench.flags[name] for name in ("task", "train_file", "test_file", *names)}
    flags |= {"artifacts_dir": bench.artifacts, "device": "cpu", **more}
    return [str(word) for name, value in flags.items() for word in (f"--{name}", value)]


def test_a_retriever_and_a_reranker_have_flags_of_their_own(bench):
    """By the names of their entry points; by their classes they are called below."""
    toys = {"retriever": "stride", "stride": 2, "reranker": "length"}
    for name, is_shortest in (("longest", False), ("shortest", True)):
        bench.make(name, **toys, shortest=is_shortest)
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
    bench.make("halves", similarity="toys:Halves")
    bench.make("dot")
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


def test_each_is_a_point_of_a_grid_whose_runs_are_planned_measured_and_asked(bench):
    base = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in bench.flags.items()
    }
    points = {
        "halves": {"retriever": "toys:Stride", "stride": 2, "similarity": "toys:Halves"},
        "length": {"reranker": "toys:ByLength", "shortest": True},
        "last": {"exemplars": "toys:LastFirst"},
    }
    grid = {"base": base, "points": [{"name": n, **p} for n, p in points.items()], "seeds": [0]}
    path, runs = bench.root / "all.yaml", bench.root / "all"
    path.write_text(yaml.safe_dump(grid))
    told = pgra("ablate", path, "--output_dir", runs, "--artifacts_dir", bench.artifacts).out
    assert all(name in told for name in points)
    for name, point in points.items():
        pgra("plan", *words_of(bench, *STAGES, **point))
        run = runs / name / "seed-0"
        metrics = read_json(run / "metrics.json")["metrics"]
        pgra("evaluate", "--run", run)
        assert read_json(run / "metrics.json")["metrics"] == metrics
        asked = json.loads(pgra("predict", "A warm film.", "--run", run, "--json").out)
        assert len(asked["evidence"]) == bench.flags["num_evidence"]
    assert all(name in pgra("report", runs).out for name in points)


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
    assert "2 runs, 0 of them finished" in listed.out
    assert "one_label=negative" in pgra("ablate", grid, "--output_dir", bench.run("grid")).out
    assert "--one_label" in pgra("train", "--method", name, "--help").out


def test_a_method_that_is_not_there_is_refused(bench):
    error = bench.train("never", method="toys:OneLable").error
    assert "method 'toys:OneLable' cannot be imported" in error
    assert not bench.run("never").exists()


# Rerankers with arguments of their own, in every command.


@pytest.fixture(params=["cross-encoder", "own"])
def named(request, cross_encoder_dir):
    if request.param == "cross-encoder":
        return {"reranker": "cross-encoder", "cross_encoder": str(cross_encoder_dir)}
    return {"reranker": "toys:ByLength", "retriever": "toys:Stride", "stride": 5, "shortest": True}


def test_it_is_planned_and_finds_the_evidence_of_a_reader_that_predicts(bench, named, tmp_path):
    """Its arguments may stand in a YAML; a finished run knows them."""
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(named))
    plan = ["plan", *words_of(bench, *STAGES, config=config)]
    told = pgra(*plan).out
    is_ours = "cross_encoder" in named
    assert ("texts/s" if is_ours else "is not known") in told
    bench.make("run", config=config)
    kept = read_json(bench.run("run") / "arguments.json")
    options = {**kept["rerank_options"], **kept.get("retriever_options", {})}
    assert {name: options[name] for name in named if name in options}.items() <= named.items()
    asked = ["predict", "A warm film.", "--run", str(bench.run("run")), "--device", "cpu", "--json"]
    first = pgra(*asked).out
    (line,) = [json.loads(row) for row in first.splitlines() if row.startswith("{")]
    assert len({found["text"] for found in line["evidence"]}) == 2
    before = contents(bench.artifacts)
    assert pgra(*asked).out == first  # and nothing is scored twice
    assert contents(bench.artifacts) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reranker": "crossencoder"}, "unknown reranker 'crossencoder'. Did you mean 'cross-enc"),
        ({"reranker": "nope:Reranker"}, "reranker 'nope:Reranker' cannot be imported: No module"),
        ({"reranker": "pgra.rerank.bank:Bank"}, "is no subclass of pgra.rerank.BaseReranker"),
        ({"cross_encoder": "x"}, "--cross_encoder is an argument of --reranker cross-encoder: add"),
        ({"reranker": "toys:ByLength", "stride": 1}, "unknown argument '--stride'"),
        ({"reranker": "toys:ByLength", "retriever": "exhaustive"}, "searches by the LM's states"),
    ],
)
def test_a_mistake_is_one_line(bench, change, message):
    for command in ("rerank", "plan"):
        assert message in call(main, [command, *words_of(bench, *STAGES, **change)]).error
    assert not (bench.artifacts / "indexes").exists()
