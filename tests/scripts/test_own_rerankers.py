"""Rerankers and retrievers with arguments of their own, as a user calls them in every command."""

import json
from pathlib import Path

import pytest
import yaml
from scripted import Bench, call, contents

from pgra.cli import main
from pgra.commands.rerank import evidence as evidence_main

_READERS = ("model_name_or_path", "max_steps", "per_device_train_batch_size", "seed")


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "outside"))


@pytest.fixture
def bench(tmp_path, lm_dirs, encoder_dirs, t5_dirs):
    return Bench(tmp_path, lm_dirs["opt"], encoder_dirs["bert"], t5_dirs["t5"])


@pytest.fixture(params=["cross-encoder", "own"])
def named(request, cross_encoder_dir):
    if request.param == "cross-encoder":
        return {"reranker": "cross-encoder", "cross_encoder": str(cross_encoder_dir)}
    return {"reranker": "toys:ByLength", "retriever": "toys:Stride", "stride": 5, "shortest": True}


def flags(bench, *left_out, **changes):
    values = {**bench.flags, **changes}
    kept = {name: value for name, value in values.items() if name not in left_out}
    return [word for name, value in kept.items() for word in (f"--{name}", str(value))]


def pgra(*words):
    called = call(main, words)
    assert called.code == 0, called.err
    return called.out


def test_it_is_planned_and_finds_the_evidence_of_a_reader_that_predicts(bench, named, tmp_path):
    """Its arguments may stand in a YAML; a finished run knows them."""
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(named))
    plan = ["plan", *flags(bench, *_READERS), "--config", str(config)]
    told = pgra(*plan, "--calibration_seconds", "0.2")
    is_ours = "cross_encoder" in named
    assert (f"with {named['cross_encoder']} on cpu" if is_ours else "is not known") in told
    assert ("tokens/s" in told) == is_ours
    done = bench.train("run", config=config)
    assert done.code == 0, done.err
    kept = json.loads((bench.run("run") / "arguments.json").read_text())
    options = {**kept["rerank_options"], **kept.get("retriever_options", {})}
    assert {name: options[name] for name in named if name in options}.items() <= named.items()
    asked = ["predict", "A warm film.", "--run", str(bench.run("run")), "--device", "cpu", "--json"]
    first = pgra(*asked)
    (line,) = [json.loads(row) for row in first.splitlines() if row.startswith("{")]
    assert len({found["text"] for found in line["evidence"]}) == 2
    before = contents(bench.artifacts)
    assert pgra(*asked) == first  # and nothing is scored twice
    assert contents(bench.artifacts) == before


def test_a_grids_dry_run_says_what_each_reranker_reads(bench, cross_encoder_dir, tmp_path):
    own, few = "toys:ByLength", {"max_train_samples": 8, "max_test_samples": 4}
    cross = {"reranker": "cross-encoder", "cross_encoder": str(cross_encoder_dir)}
    grid = {
        "base": {
            **{name: str(value) for name, value in bench.flags.items() if isinstance(value, Path)},
            **{name: value for name, value in bench.flags.items() if isinstance(value, int)},
            **{"task": "sst2", "device": "cpu", "retriever": "random", **few},
        },
        "points": [
            {"name": "neighbors", "exemplars": "knn"},
            {**cross, "name": "cross"},
            {"name": "own", "reranker": own, "shortest": True},
            {"name": "chance", "method": "random"},
        ],
        "seeds": [0],
    }
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump(grid))
    told = pgra("ablate", str(path), "--dry-run", "--output_dir", str(tmp_path / "grid"))
    lines = {line.split()[0]: line for line in told.splitlines() if " sst2 " in line}
    # 8 to train on, 4 to choose on, 4 to test; one prompt for all has 2 of the 8.
    each = "each passage with each query, about "
    assert lines["neighbors"].split()[5] == str((8 + 4 + 4) * (6 + 1))
    assert lines["cross"].split()[5] == str((6 + 4 + 4) * 6)
    assert all(each in lines[name] for name in ("neighbors", "cross"))
    assert f"what reranker {own} reads is not known" in lines["own"]
    assert "the LM reads nothing" in lines["chance"]
    assert not (tmp_path / "grid").exists()


@pytest.mark.slow
def test_its_evidence_is_measured_beside_chance_and_the_first_stages(bench, tmp_path):
    assert bench.train("plain", num_evidence=0).code == 0
    words = ["--labeler", str(bench.run("plain")), "--output_dir", str(tmp_path / "evidence")]
    done = call(evidence_main, [*words, *flags(bench, *_READERS, reranker="toys:ByLength")])
    assert done.code == 0, done.err
    rows = {line.split("  ")[0].strip() for line in done.out.splitlines()}
    assert {"random", "first stage", "toys:ByLength"} <= rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reranker": "crossencoder"}, "unknown reranker 'crossencoder'. Did you mean 'cross-enc"),
        ({"reranker": "nope:Reranker"}, "reranker 'nope:Reranker' cannot be imported: No module"),
        ({"reranker": "pgra.rerank.bank:Bank"}, "is no subclass of pgra.rerank.Reranker"),
        ({"cross_encoder": "x"}, "--cross_encoder is an argument of --reranker cross-encoder: add"),
        ({"reranker": "toys:ByLength", "stride": 1}, "unknown argument '--stride'"),
        ({"reranker": "toys:ByLength", "retriever": "exhaustive"}, "searches by the LM's states"),
    ],
)
def test_a_mistake_is_one_line(bench, change, message):
    for command in ("rerank", "plan"):
        assert message in call(main, [command, *flags(bench, *_READERS, **change)]).error
    assert not (bench.artifacts / "indexes").exists()
