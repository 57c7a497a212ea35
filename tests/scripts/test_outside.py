"""What the README says can be added: from outside the tree, by name, with no line of ours."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import SENTENCES
from scripted import call, read_json
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from pgra.cli import main
from pgra.context import Context
from pgra.prompts import FewShotPrompt, PromptTemplate
from pgra.rerank import RerankRequest, open_reranker
from pgra.rerank.base import RerankArguments
from pgra.types import Candidates, Example

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


def test_a_selector_chooses(bench):
    chosen = {"exemplars": "last-first", "num_exemplars": 2, "output_dir": bench.run("last")}
    pgra("icl", *words_of(bench, "lm", **chosen))
    for line in bench.predictions("last"):
        assert [e["id"] for e in line["exemplars"]] == ["train-39", "train-38"]


def test_each_is_a_point_of_a_grid(bench):
    """By the names of their entry points, or by their classes."""
    base = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in bench.flags.items()
    }
    points = {
        "halves": {"retriever": "toys:Stride", "stride": 2, "similarity": "toys:Halves"},
        "true": {"retriever": "stride", "stride": 2, "reranker": "monot5"},
    }
    points["true"] |= {"monot5": str(bench.t5), "same_train": True}  # for one table
    grid = {"base": base, "points": [{"name": n, **p} for n, p in points.items()], "seeds": [0]}
    path, runs = bench.root / "all.yaml", bench.root / "runs"
    path.write_text(yaml.safe_dump(grid))
    told = pgra("ablate", path, "--output_dir", runs, "--artifacts_dir", bench.artifacts).out
    assert all(name in told for name in points)
    for name, point in points.items():
        pgra("train", "--dry_run", *words_of(bench, *STAGES, **point))
        run = runs / name / "seed-0"
        metrics = read_json(run / "metrics.json")
        asked = json.loads(pgra("predict", "A warm film.", "--run", run, "--json").out)
        assert len(asked["evidence"]) == bench.flags["num_evidence"]
        assert metrics["metric"] == "toys:positives"
    arguments = read_json(runs / "true/seed-0/arguments.json")
    assert arguments["retriever_options"] == {"stride": 2}
    assert arguments["rerank_options"] == {"monot5": str(bench.t5)}


def test_monot5_gives_the_scores_of_transformers(bench, corpus):
    from toys import MonoT5Arguments

    request = RerankRequest(
        args=RerankArguments(reranker="toys:MonoT5"),
        prompt=FewShotPrompt(PromptTemplate("{text}")),
        corpus=corpus,
        context=Context(artifacts=bench.artifacts, device="cpu"),
        options=MonoT5Arguments(monot5=str(bench.t5)),
    )
    reranker = open_reranker(request)
    queries = [Example("x", {"text": "A warm film."})]
    first = Candidates(np.array([[3, 0, 7]]), np.zeros((1, 3), np.float32))
    reranker.prepare(queries, first.rows)
    found = reranker.rerank(queries, first)
    model = AutoModelForSeq2SeqLM.from_pretrained(bench.t5).eval()
    tokenizer = AutoTokenizer.from_pretrained(bench.t5)
    answers = [tokenizer(word).input_ids[0] for word in ("true", "false")]
    start = torch.tensor([[model.config.decoder_start_token_id]])
    for row, score in zip(found.rows[0], found.scores[0], strict=True):
        text = f"Query: A warm film. Document: {SENTENCES[row]} Relevant:"
        ids = tokenizer(text, return_tensors="pt").input_ids
        logits = model(input_ids=ids, decoder_input_ids=start).logits[0, 0, answers]
        assert score == pytest.approx(logits.log_softmax(0)[0].item(), rel=1e-4)
    assert np.ptp(found.scores) > 1e-3


def test_a_method_runs_is_measured_ablated_and_asked(bench):
    name = "one-label"
    train = ["train", "--method", name, *words_of(bench)]
    pgra(*train, "--output_dir", bench.run("yes"))
    pgra(*train, "--output_dir", bench.run("no"), "--one_label", "negative")
    assert {line["prediction"] for line in bench.predictions("yes")} == {"positive"}
    assert {line["prediction"] for line in bench.predictions("no")} == {"negative"}
    assert "finished (reused)" in pgra(*train, "--output_dir", bench.run("yes")).err
    told = pgra("predict", "anything", "--run", bench.run("no"), "--json").out
    assert json.loads(told)["prediction"] == "negative"
    base = {"method": name, **{key: str(bench.flags[key]) for key in ("task", "train_file")}}
    base |= {"test_file": str(bench.test_file), "device": "cpu"}
    points = [{"one_label": "positive"}, {"one_label": "negative"}]
    grid = bench.root / "grid.yaml"
    grid.write_text(yaml.safe_dump({"base": base, "points": points, "seeds": [0]}))
    assert "one_label=negative" in pgra("ablate", grid, "--output_dir", bench.run("grid")).out


def test_an_lm_gives_states_and_scores(bench):
    """By its name alone, in a process that has no model files of it."""
    lm = {"lm": "toys:Letters", "num_exemplars": 2}
    pgra("train", *bench.argv("pgra", task=bench.flags["task"], **lm))
    pgra("train", "--method", "head", *words_of(bench, output_dir=bench.run("head"), **lm))
    drawn = {"exemplars": "random", "output_dir": bench.run("icl")}
    pgra("icl", *words_of(bench, **drawn, **lm))
    for name in ("pgra", "head", "icl"):
        assert len(bench.predictions(name)) == 12
    scores = [line["scores"] for line in bench.predictions("icl")]
    assert len({tuple(values.values()) for values in scores}) > 1
    wrong = {"lm": "toys:Stride", "output_dir": bench.run("wrong")}
    words = ["train", "--method", "head", *words_of(bench, **wrong)]
    assert "'toys:Stride'" in call(main, words).error
