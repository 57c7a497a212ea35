"""Running a grid: what points share, what is taken up, what a failing one leaves."""

import json

import pytest
import yaml
from transformers import GPT2Model

from pgra.cli import main
from pgra.errors import ConfigError
from pgra.pipelines.ablate import foresee, in_order, make_runs, run_grid, write_grid
from pgra.pipelines.grid import read_grid
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.rerank import PromptedReranker

K = {"num_candidates": [2, 4, 8, 6]}
D = {"num_evidence": [1, 2, 4, 3]}


@pytest.fixture(autouse=True)
def no_budget_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("PGRA_HOME", str(tmp_path / "home"))


@pytest.fixture
def small(tmp_path, args):
    """The base of a grid on tiny models: everything but what is varied."""
    return {
        "task": "sst2",
        "train_file": args.data.train_file,
        "test_file": args.data.test_file,
        "corpus": args.corpus.corpus,
        "retriever": "bm25",
        "num_candidates": 8,
        "lm": args.rerank.lm,
        "num_evidence": 2,
        "num_exemplars": 4,
        "model_name_or_path": args.reader.model_name_or_path,
        "artifacts_dir": str(tmp_path / "artifacts"),
        "device": "cpu",
        "max_steps": 1,
        "eval_strategy": "no",
        "save_strategy": "no",
        "load_best_model_at_end": False,
        "per_device_train_batch_size": 4,
    }


@pytest.fixture
def write(tmp_path, small):
    def write(name="mine", base=None, **values):
        path = tmp_path / f"{name}.yaml"
        values = {"base": {**small, **(base or {})}, "seeds": [0], **values}
        path.write_text(yaml.safe_dump(values, sort_keys=False))
        return str(path)

    return write


@pytest.fixture
def ablate(tmp_path, capsys):
    """Call the command; give its exit code, and what it said."""

    def ablate(path, *words, name="grid"):
        flags = ["--output_dir", str(tmp_path / name), "--device", "cpu", *words]
        code = main(["ablate", path, *flags])
        told = capsys.readouterr()
        return code, told.out, told.err

    return ablate


@pytest.fixture
def reads(monkeypatch):
    """Count the LM's forwards: batches by the model itself, texts by the reranker's own count."""
    counts = {"forwards": 0, "texts": []}
    forward, prepare = GPT2Model.forward, PromptedReranker.prepare

    def count_forward(self, *args, **kwargs):
        counts["forwards"] += 1
        return forward(self, *args, **kwargs)

    def count_texts(self, *args, **kwargs):
        work = prepare(self, *args, **kwargs)
        counts["texts"].append(work.num_new)
        return work

    monkeypatch.setattr(GPT2Model, "forward", count_forward)
    monkeypatch.setattr(PromptedReranker, "prepare", count_texts)
    return counts


def read_json(path):
    return json.loads(path.read_text())


def test_sweeps_of_k_and_d_read_what_the_first_run_reads_and_no_more(write, ablate, reads):
    code, _, err = ablate(write("first", grid={"num_candidates": [8]}), name="first")
    assert code == 0, err
    first = dict(reads, texts=list(reads["texts"]))
    assert first["forwards"] > 0
    assert first["texts"][0] > 8
    assert ablate(write("k", grid=K), name="k")[0] == 0
    assert ablate(write("d", grid=D), name="d")[0] == 0
    assert reads["forwards"] == first["forwards"]  # not one batch more
    assert reads["texts"] == [*first["texts"], *[0] * 8]
    # The control: another prompt is another bank.
    assert ablate(write("other", grid={"exemplar_seed": [1]}), name="other")[0] == 0
    assert reads["forwards"] > first["forwards"]


def test_the_largest_k_runs_first_so_one_sweep_is_one_reading(write, ablate, reads):
    assert ablate(write("k", grid=K))[0] == 0
    assert len(reads["texts"]) == 4
    assert reads["texts"][0] > 8
    assert reads["texts"][1:] == [0, 0, 0]
