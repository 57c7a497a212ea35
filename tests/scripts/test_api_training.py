"""`pgra.train`: the command's run from Python, of rows in memory, and what is done with it."""

import json
import re
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from conftest import SENTENCES, contents, review_rows
from huggingface_hub import ModelCard
from loopback import TOKEN, LoopbackHub, point_client
from scripted import call, read_json

import pgra
from pgra.commands.predict import main as predict_main
from pgra.commands.push import main as push
from pgra.data.read import fetch_folder
from pgra.errors import PgraError

pytestmark = pytest.mark.slow

TRAIN, TEST = review_rows(40), review_rows(12, start=20)
TEXTS = ["A warm film by the sea.", "A dull story."]
_ROWS = {"train": TRAIN, "test": TEST}
_FILES = ("task", "train_file", "test_file", "corpus", "seed")


def flags(bench, **changes):
    """The bench's flags as Python has them, without those that name data."""
    own = {name: value for name, value in bench.flags.items() if name not in _FILES}
    return {**own, "seed": 1, **changes}


def make(bench, name, **changes):
    data = {"task": "sst2", **_ROWS, "corpus": SENTENCES}
    return pgra.train(**{**data, **flags(bench), "output_dir": bench.run(name), **changes})


@pytest.fixture(scope="module")
def ours(bench):
    return make(bench, "ours")


@pytest.fixture(scope="module")
def theirs(bench):
    bench.make("commands")
    return bench.run("commands")


def test_it_is_the_run_that_the_command_makes(bench, ours, theirs):
    folder = ours.folder
    assert read_json(folder / "run.json") == read_json(theirs / "run.json")
    assert contents(folder)["predictions.jsonl"] == contents(theirs)["predictions.jsonl"]
    assert ours.metrics["value"] == bench.metrics("commands")["value"]
    other = make(bench, "seed", seed=2)  # the control
    assert other.predictions != ours.predictions


def test_an_index_gives_corpus_encoder_and_its_own_folder(bench, ours, tmp_path):
    without = {**flags(bench), "encoder": None}
    del without["encoder"]
    index = pgra.Index.build(SENTENCES, encoder=bench.encoder, path=tmp_path / "index")
    run = pgra.train("sst2", **_ROWS, corpus=index, output_dir=bench.run("indexed"), **without)
    assert run.predictions == ours.predictions
    folder = read_json(run.folder / "arguments.json")["retriever"]["index_dir"]
    assert folder.startswith(str(tmp_path / "index"))
    assert run.predict(TEXTS[0]).scores == ours.predict(TEXTS[0]).scores
    with pytest.raises(PgraError, match="path"):
        make(bench, "temporary", corpus=pgra.Index.build(SENTENCES, encoder=bench.encoder))


class Longest(pgra.BaseReranker):
    """The candidates by their lengths, each of them times a weight."""

    fingerprint: ClassVar = {"reranker": "longest"}

    def __init__(self, weight):
        self.weight = weight

    def rerank(self, examples, candidates):
        texts = [self.corpus.texts(line) for line in candidates.rows]
        scores = self.weight * np.array([list(map(len, line)) for line in texts], np.float32)
        return pgra.Candidates.best(candidates.rows, scores, scores.shape[1])


def test_a_ready_reranker_is_a_runs_second_stage(bench):
    how = flags(bench)
    lm = str(how.pop("lm"))
    del how["num_exemplars"]
    shown = TRAIN[:4]
    ready = pgra.Reranker(lm, task="sst2", examples=shown, similarity="cosine", device="cpu")
    data = {"task": "sst2", **_ROWS, "corpus": SENTENCES, **how}
    run = pgra.train(**data, reranker=ready, output_dir=bench.run("ready"))
    for row, line in zip(TEST, run.predictions, strict=True):
        texts = [one["text"] for one in line["evidence"]]
        scores = [one["score"] for one in line["evidence"]]
        np.testing.assert_allclose(scores, ready.score(row["text"], texts), rtol=1e-4)
    assert read_json(run.folder / "arguments.json")["rerank"]["similarity"] == "cosine"
    assert run.predict(TEXTS[0]).scores  # its LM is found by its name
    with pytest.raises(PgraError, match="'plain'"):
        pgra.train(**{**data, "num_evidence": 0}, reranker=ready, output_dir=bench.run("plain"))
    own = pgra.train(**data, reranker=Longest(2), output_dir=bench.run("own"))
    assert all(one["score"] == 2 * len(one["text"]) for one in own.predictions[0]["evidence"])


def test_a_method_without_training_and_a_task_without_a_file(bench, tmp_path):
    task = pgra.Task(
        name="mine",
        labels=["negative", "positive"],
        prompt="How is it?\n{text}",
        reader_template="{text} <extra_id_0>",
        verbalizer={"negative": "bad", "positive": "good"},
    )
    how = {"method": "icl", "num_exemplars": 2, "lm": bench.lm, "device": "cpu"}
    how |= {"artifacts_dir": tmp_path / "made", "output_dir": tmp_path / "{task}-{method}"}
    run = pgra.train(task, TRAIN, **how)
    assert run.folder == tmp_path / "mine-icl"
    assert run.metrics["n"] == 8  # a fifth of train
    assert run.predict(TEXTS[0]).label in ("negative", "positive")
    assert pgra.Task.load(run.args.data.task) == task
    for what in (lambda: run.reader, lambda: run.push_to_hub("me/x")):
        with pytest.raises(PgraError, match=r"pgra.json"):
            what()


# To the hub and back.


@pytest.fixture
def hub(monkeypatch, tmp_path):
    hub = LoopbackHub()
    with hub.serve() as endpoint:
        point_client(monkeypatch, endpoint, tmp_path / "hub")
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", endpoint)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def test_a_pushed_reader_comes_back_by_its_id(ours, hub, tmp_path, monkeypatch):
    assert "me/name" in ours.push_to_hub("me/name")
    local = ours.reader
    reader = pgra.Reader.load("me/name", device="cpu")
    evidence = ["A warm and funny portrait."]
    assert reader(TEXTS[0], evidence) == local(TEXTS[0], evidence)
    assert reader(TEXTS[0], []) != reader(TEXTS[0], evidence)  # the control
    there, here = contents(fetch_folder("reader", "me/name")), contents(ours.folder / "reader")
    there.pop(".gitattributes", None)
    records = [json.loads(files.pop("pgra.json")) for files in (there, here)]
    assert there == here
    differing = {name for name in records[0] if records[0][name] != records[1][name]}
    assert "arguments" in differing <= {"arguments", "base_model", "digest", "fingerprints"}
    assert str(tmp_path.parent) not in json.dumps(records[0])  # no folder of this machine
    assert str(tmp_path.parent) in json.dumps(records[1])  # the control
    asked = [TEXTS[0], "--run", "me/name", "--device", "cpu", "--json"]
    assert re.search("corpus.txt|passages", call(predict_main, asked).error)
    here = tmp_path / "here"  # what it was made with, under the same names
    here.mkdir()
    for name in set(re.findall(r'"(/[^"]+)"', json.dumps(records[1]["arguments"]))):
        if Path(name).exists() and Path(name) != ours.folder:
            (here / Path(name).name).symlink_to(name)
    monkeypatch.chdir(here)
    told = call(predict_main, asked)
    assert told.code == 0, told.err
    assert json.loads(told.out)["scores"] == ours.predict(TEXTS[0]).scores
    assert (tmp_path / "cache/pgra/banks").is_dir()  # made again, in the user's cache


def test_a_card_tells_the_metric_and_no_folder_of_this_machine(bench, theirs):
    text, metrics = (theirs / "reader" / "README.md").read_text(), bench.metrics("commands")
    card = ModelCard(text).data
    result = card.eval_results[0]
    assert (result.metric_type, result.metric_value) == ("accuracy", round(metrics["value"], 6))
    assert card.base_model is None  # a folder of this machine is no hub id
    assert "corpus: `corpus.txt`" in text
    assert str(bench.root) not in text


def test_a_push_is_private_where_asked_and_one_that_fails_says_why(theirs, hub):
    words = ["--run", str(theirs), "--hub_model_id", "me/first", "--hub_private_repo"]
    assert call(push, words).code == 0
    assert hub.made[0]["visibility"] == "private"
    hub.is_broken = True
    called = call(push, words)
    assert "'me/first'" in called.error
    assert TOKEN not in called.out + called.err
