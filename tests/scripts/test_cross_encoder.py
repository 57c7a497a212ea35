"""`--reranker cross-encoder` as a user calls it: rerank, plan, train, predict."""

import json

import pytest
from conftest import SENTENCES
from scripted import Bench, call, contents

from pgra.commands.plan import main as plan_main
from pgra.commands.predict import main as predict_main
from pgra.commands.rerank import main as rerank_main

_READERS = ("model_name_or_path", "max_steps", "per_device_train_batch_size", "seed")


@pytest.fixture
def bench(tmp_path, lm_dirs, encoder_dirs, t5_dirs):
    return Bench(tmp_path, lm_dirs["opt"], encoder_dirs["bert"], t5_dirs["t5"])


@pytest.fixture
def named(cross_encoder_dir):
    return {"reranker": "cross-encoder", "cross_encoder": cross_encoder_dir}


def flags(bench, **changes):
    values = {name: value for name, value in bench.flags.items() if name not in _READERS}
    return [w for name, value in {**values, **changes}.items() for w in (f"--{name}", str(value))]


def test_it_trains_a_reader_that_predicts_with_its_evidence(bench, named):
    plan = call(plan_main, [*flags(bench, **named), "--calibration_seconds", "0.2"])
    assert plan.code == 0, plan.err
    assert f"with {named['cross_encoder']} on cpu" in plan.out
    assert "tokens/s" in plan.out
    done = bench.train("cross", **named)
    assert done.code == 0, done.err
    again = call(plan_main, flags(bench, **named))
    assert "0 LM forwards" in again.out
    run = str(bench.run("cross"))
    asked = ["A warm film by the sea.", "--run", run, "--device", "cpu", "--json"]
    first = call(predict_main, asked)
    assert first.code == 0, first.err
    (line,) = [json.loads(row) for row in first.out.splitlines() if row.startswith("{")]
    assert {found["text"] for found in line["evidence"]} <= set(SENTENCES)
    before = contents(bench.artifacts)
    assert call(predict_main, asked).out == first.out  # and nothing is scored twice
    assert contents(bench.artifacts) == before


def test_it_orders_candidates_of_a_text(bench, named, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")  # nothing is folded
    shown = call(rerank_main, [SENTENCES[4], *flags(bench, **named)])
    assert shown.code == 0, shown.err
    assert f"second stage: {named['cross_encoder']}" in shown.out
    other = call(rerank_main, [SENTENCES[4], *flags(bench, reranker="none")])
    assert "second stage: none" in other.out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reranker": "crossencoder"}, "unknown reranker 'crossencoder'. Did you mean 'cross-enc"),
        ({"reranker": "nope:Reranker"}, "reranker 'nope:Reranker' cannot be imported: No module"),
        ({"reranker": "pgra.rerank.bank:Bank"}, "is no subclass of pgra.rerank.Reranker"),
        (
            {"reranker": "cross-encoder", "cross_encoder": "nope/nope"},
            "cannot find model 'nope/nope'",
        ),
    ],
)
def test_a_mistake_is_one_line(bench, change, message):
    assert message in call(rerank_main, flags(bench, **change)).error
    assert not (bench.artifacts / "indexes").exists()


def test_it_has_no_states_to_search_the_whole_corpus_by(bench, named):
    said = call(rerank_main, flags(bench, retriever="exhaustive", **named)).error
    assert "searches by the LM's states: use --reranker prompted" in said
