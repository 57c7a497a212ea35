"""The paper's own run, from its YAML: what it says, and every stage built from it, small."""

import json

import pytest
import yaml
from conftest import SENTENCES

from index_build.__main__ import main as index_main
from pgra.commands.common import SECTIONS
from pgra.commands.train import main as train_main
from pgra.config import PgraArguments, config_root, parse_arguments
from pgra.reader.arguments import ReaderTrainingArguments

PAPER = config_root() / "experiments" / "paper.yaml"
METHODS = {"pgra": [], "fid": ["--reranker", "none"], "plain": ["--num_evidence", "0"]}


def paper_arguments(*flags):
    *sections, training = parse_arguments(
        [*SECTIONS.values(), ReaderTrainingArguments],
        ["--config", str(PAPER), *flags],
        prog="train.py",
        description="",
    )
    return PgraArguments(**dict(zip(SECTIONS, sections, strict=True))), training


@pytest.fixture
def small(encoder_dirs, lm_dirs, t5_dirs, review_files, tmp_path):
    """Models of the same architectures, a dozen sentences, and only sizes and places besides."""
    corpus = tmp_path / "wiki.txt"
    corpus.write_text("\n".join([*SENTENCES, SENTENCES[0]]) + "\n")
    stages = [
        *("--config", str(PAPER), "--corpus", str(corpus), "--device", "cpu"),
        *("--artifacts_dir", str(tmp_path / "artifacts"), "--encoder", str(encoder_dirs["bert"])),
    ]
    training = [
        *("--task", "sst2", "--lm", str(lm_dirs["opt"]), "--model_name_or_path"),
        *(str(t5_dirs["t5"]), "--num_candidates", "6", "--num_evidence", "3"),
        *("--train_file", str(review_files["train"]), "--test_file", str(review_files["test"])),
        *("--max_steps", "2", "--num_exemplars", "4", "--use_cpu", "--report_to", "none"),
    ]
    return stages, training


def test_the_yaml_gives_the_papers_constants():
    args, training = paper_arguments()
    assert args.corpus.corpus.endswith("datasets-for-simcse/wiki1m_for_simcse.txt")
    constants = {
        "method": "pgra",
        "retriever": "dense",
        "encoder": "google-bert/bert-base-uncased",
        "num_candidates": 150,
        "normalize": False,
        "reranker": "prompted",
        "lm": "facebook/opt-13b",
        "lm_dtype": "bfloat16",
        "similarity": "dot",
        "exemplars": "random",
        "num_exemplars": 8,
        "num_evidence": 16,
        "model_name_or_path": "google-t5/t5-base",
        "learning_rate": 8e-5,
        "per_device_train_batch_size": 8,
        "max_steps": 5000,
    }
    parts = (args.retriever, args.rerank, args.reader, training)
    given = {name: value for part in parts for name, value in vars(part).items()}
    assert {**given, "method": args.method}.items() >= constants.items()


def test_it_names_every_value_once_and_nothing_unknown():
    text = PAPER.read_text()
    keys = [line.split(":")[0] for line in text.splitlines() if line and line[0] not in "# "]
    assert sorted(keys) == sorted(set(keys)) == sorted(yaml.safe_load(text))


def test_every_stage_is_built_from_it(small, tmp_path, capsys):
    stages, training = small
    run = tmp_path / "run"
    assert index_main(stages) == 0
    assert "13 passages" in capsys.readouterr().out  # drop_duplicates: false
    assert train_main([*stages, *training, "--output_dir", str(run)]) == 0

    assert json.loads((run / "metrics.json").read_text())["n"] == 12
    lines = [json.loads(line) for line in (run / "predictions.jsonl").read_text().splitlines()]
    assert [len(line["evidence"]) for line in lines] == [3] * 12
    # One index served both programs, and the states are a bfloat16 LM's.
    assert len(list((tmp_path / "artifacts" / "indexes").iterdir())) == 1
    for folder in (tmp_path / "artifacts" / "banks").iterdir():
        assert "bfloat16" in (folder / "manifest.json").read_text()


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_baselines_are_the_same_file_and_one_flag(method):
    args, _ = paper_arguments(*METHODS[method])
    assert args.method == method
