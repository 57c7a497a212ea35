"""Rerankers and retrievers with arguments of their own, as a user calls them in every command."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import SENTENCES
from scripted import Bench, call, contents

from pgra.cli import main
from pgra.commands.rerank import evidence as evidence_main
from pgra.config import Arguments, arg
from pgra.core import MISSING_ROW, Candidates
from pgra.rerank import Reranker
from pgra.retrieval import Retriever

_READERS = ("model_name_or_path", "max_steps", "per_device_train_batch_size", "seed")


@dataclass(kw_only=True)
class LengthArguments(Arguments):
    """Which length is best."""

    longest_first: bool = arg(True, "Whether the longest is best.")


class ByLength(Reranker):
    """What somebody wrote themselves; nothing of it is ours but what the contract says."""

    Arguments = LengthArguments

    def __init__(self, request):
        self.corpus, self.sign = request.corpus, 1 if request.options.longest_first else -1
        self.fingerprint = {"reranker": "by length", "sign": self.sign, **self.corpus.fingerprint}

    fingerprint = None

    @classmethod
    def open(cls, request):
        return cls(request)

    def rerank(self, examples, candidates):
        rows, present = candidates.rows, candidates.rows != MISSING_ROW
        scores = np.full(rows.shape, -np.inf, np.float32)
        scores[present] = [self.sign * len(text) for text in self.corpus.texts(rows[present])]
        return Candidates.best(rows, scores, rows.shape[1])


@dataclass(kw_only=True)
class FromArguments(Arguments):
    """Where it begins."""

    begin: int = arg(0, "The first row.", least=0)


class InOrder(Retriever):
    """The same passages for every query."""

    Arguments = FromArguments

    def __init__(self, begin):
        self.begin, self.fingerprint = begin, {"retriever": "in order", "begin": begin}

    @classmethod
    def open(cls, request):
        return cls(request.options.begin)

    def retrieve(self, queries, k):
        rows = np.tile(np.arange(self.begin, self.begin + k), (len(queries), 1))
        return Candidates(rows, -rows.astype(np.float32))


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    monkeypatch.setenv("PGRA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "500")  # nothing is folded


@pytest.fixture
def bench(tmp_path, lm_dirs, encoder_dirs, t5_dirs):
    return Bench(tmp_path, lm_dirs["opt"], encoder_dirs["bert"], t5_dirs["t5"])


@pytest.fixture(params=["cross-encoder", "own"])
def named(request, cross_encoder_dir):
    if request.param == "cross-encoder":
        return {"reranker": "cross-encoder", "cross_encoder": str(cross_encoder_dir)}
    return {
        **{"reranker": f"{__name__}:ByLength", "longest_first": False},
        **{"retriever": f"{__name__}:InOrder", "begin": 5},
    }


def flags(bench, *left_out, **changes):
    values = {**bench.flags, **changes}
    kept = {name: value for name, value in values.items() if name not in left_out}
    return [word for name, value in kept.items() for word in (f"--{name}", str(value))]


def pgra(*words):
    called = call(main, words)
    assert called.code == 0, called.err
    return called.out


def test_it_orders_the_candidates_of_a_text(bench, named):
    shown = pgra("rerank", SENTENCES[4], *flags(bench, *_READERS, **named))
    model = named.get("cross_encoder", named["reranker"])
    assert f"second stage: {model}" in shown
    other = pgra("rerank", SENTENCES[4], *flags(bench, *_READERS, reranker="none"))
    assert "second stage: none" in other
    if "begin" in named:  # the shortest of rows 5 to 10
        best = shown.splitlines()[2].split("  ")[-1]
        assert best == min(SENTENCES[5:11], key=len)
        again = pgra(
            "rerank", SENTENCES[4], *flags(bench, *_READERS, **{**named, "longest_first": True})
        )
        assert again.splitlines()[2].split("  ")[-1] == max(SENTENCES[5:11], key=len)


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
    assert ("0 LM forwards" in pgra(*plan)) == is_ours
    kept = json.loads((bench.run("run") / "arguments.json").read_text())
    options = {**kept["rerank_options"], **kept.get("retriever_options", {})}
    assert {name: options[name] for name in named if name in options}.items() <= named.items()
    asked = ["predict", "A warm film.", "--run", str(bench.run("run")), "--device", "cpu", "--json"]
    first = pgra(*asked)
    (line,) = [json.loads(row) for row in first.splitlines() if row.startswith("{")]
    rows = {SENTENCES.index(found["text"]) for found in line["evidence"]}
    assert len(rows) == 2
    assert is_ours or rows == set(sorted(range(5, 11), key=lambda i: len(SENTENCES[i]))[:2])
    before = contents(bench.artifacts)
    assert pgra(*asked) == first  # and nothing is scored twice
    assert contents(bench.artifacts) == before


def test_a_grids_dry_run_says_what_each_reranker_reads(bench, cross_encoder_dir, tmp_path):
    own, few = f"{__name__}:ByLength", {"max_train_samples": 8, "max_test_samples": 4}
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
            {**cross, "name": "short", "cross_encoder_tokens": 16},
            {"name": "own", "reranker": own, "longest_first": False},
            {"name": "chance", "method": "random"},
        ],
        "seeds": [0],
    }
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump(grid))
    told = pgra("ablate", str(path), "--dry-run", "--output_dir", str(tmp_path / "grid"))
    lines = {line.split()[1]: line for line in told.splitlines() if line.startswith("sst2")}
    # 8 to train on, 4 to choose on, 4 to test; one prompt for all has 2 of the 8.
    each = "each passage with each query, about "
    assert lines["neighbors"].split()[5] == str((8 + 4 + 4) * (6 + 1))
    for name in ("cross", "short"):
        assert lines[name].split()[5] == str((6 + 4 + 4) * 6)
    assert all(each in lines[name] for name in ("neighbors", "cross", "short"))
    assert f"what reranker {own} reads is not known" in lines["own"]
    assert "the LM reads nothing" in lines["chance"]
    # Shorter pairs are other scores, and fewer tokens.
    tokens = {
        n: int(lines[n].partition(each)[2].split()[0].replace(",", "")) for n in ("cross", "short")
    }
    assert tokens["short"] < tokens["cross"]
    assert not (tmp_path / "grid").exists()


def test_its_evidence_is_measured_beside_chance_and_the_first_stages(bench, named, tmp_path):
    assert bench.train("plain", num_evidence=0).code == 0
    words = ["--labeler", str(bench.run("plain")), "--output_dir", str(tmp_path / "evidence")]
    done = call(evidence_main, [*words, *flags(bench, *_READERS, **named)])
    assert done.code == 0, done.err
    rows = {line.split("  ")[0].strip() for line in done.out.splitlines()}
    assert {"random", "first stage", named["reranker"]} <= rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reranker": "crossencoder"}, "unknown reranker 'crossencoder'. Did you mean 'cross-enc"),
        ({"reranker": "nope:Reranker"}, "reranker 'nope:Reranker' cannot be imported: No module"),
        ({"reranker": "pgra.rerank.bank:Bank"}, "is no subclass of pgra.rerank.Reranker"),
        ({"cross_encoder": "x"}, "--cross_encoder is an argument of --reranker cross-encoder: add"),
        (
            {"reranker": "cross-encoder", "cross_encoder": "nope/nope"},
            "cannot find model 'nope/nope'",
        ),
        ({"reranker": f"{__name__}:ByLength", "begin": 1}, "unknown argument '--begin'"),
        ({"retriever": f"{__name__}:InOrder", "begin": -1}, "begin is -1: it must be at least 0"),
        (
            {"reranker": f"{__name__}:ByLength", "retriever": "exhaustive"},
            "searches by the LM's states: use --reranker prompted",
        ),
    ],
)
def test_a_mistake_is_one_line(bench, change, message):
    for command in ("rerank", "plan"):
        assert message in call(main, [command, *flags(bench, *_READERS, **change)]).error
    assert not (bench.artifacts / "indexes").exists()
