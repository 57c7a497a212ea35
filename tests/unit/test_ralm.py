"""The decoder-only reader: what it reads, what it scores, what training it changes."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import with_rerank, with_retriever
from method_runs import having, lines_of, run_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from pgra import Reader
from pgra.commands.common import parse_run
from pgra.commands.train import main as train
from pgra.core import ALONE, Example
from pgra.errors import ArtifactError, ConfigError, DataError, PgraError
from pgra.lm.causal_lm import CausalLM
from pgra.methods.ralm import (
    LMClassifier,
    PromptReader,
    RalmArguments,
)
from pgra.prompts.template import PromptTemplate
from pgra.reader.causal import CausalModule
from pgra.reader.train import read_losses
from pgra.report.results import check_comparable, load_collection, row_names
from pgra.runs import Predictor, evaluate_run, run

WORDS = {"negative": "bad", "positive": "very good"}  # of one token and of several
TEMPLATE = PromptTemplate("{text}\nThe answer is", "")
QUERIES = [
    Example("a", {"text": "A warm and funny film."}, "positive"),
    Example("b", {"text": "A dull story that wastes its actors and the sea."}, "negative"),
    Example("c", {"text": "Red"}, "positive"),
]
EVIDENCE = [["The sea is blue.", "Critics praised it."], [], ["A dull, lifeless story. " * 4]]


@pytest.fixture(params=["gpt2", "llama", "opt"])
def lm_dir(request, lm_dirs):
    return lm_dirs[request.param]


def reader_of(lm_dir, **changes):
    lm = CausalLM.from_name(str(lm_dir), dtype="float32", device="cpu", with_head=True)
    args = RalmArguments(reader_lm=str(lm_dir), **{"max_reader_tokens": 200, **changes})
    return PromptReader(lm, TEMPLATE, WORDS, args)


def stock_scores(lm_dir, texts):
    """Score each word by a call of its own of a stock model, without padding."""
    model = AutoModelForCausalLM.from_pretrained(lm_dir, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(lm_dir)
    scores = []
    for text in texts:
        start = len(tokenizer(text).input_ids)
        for word in WORDS.values():
            ids = torch.tensor([tokenizer(f"{text} {word}").input_ids])
            with torch.inference_mode():
                logs = model(input_ids=ids).logits[0].log_softmax(-1)
            chosen = logs[start - 1 : -1].gather(1, ids[0, start:, None])
            scores.append(float(chosen.sum()))
    return np.array(scores, np.float32).reshape(len(texts), -1)


# What is read.


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("best_last", "Critics praised it.\n\nThe sea is blue.\n\nA warm and funny film."),
        ("best_first", "The sea is blue.\n\nCritics praised it.\n\nA warm and funny film."),
    ],
)
def test_evidence_stands_before_the_query_in_the_order_asked_for(lm_dirs, order, expected):
    prompts = reader_of(lm_dirs["gpt2"], evidence_order=order).prompts(QUERIES, EVIDENCE)
    assert prompts.texts[0] == f"{expected}\nThe answer is"
    assert prompts.texts[1] == f"{QUERIES[1].text}\nThe answer is"  # without evidence the plain LM
    assert prompts.example_ids == ["a", "b", "c"]


def test_the_worst_evidence_is_cut_first_and_the_query_never(lm_dirs):
    whole = reader_of(lm_dirs["gpt2"])
    count = whole.lm.count_tokens
    query, best, worst = QUERIES[0], "The sea is blue.", "Critics praised the acting of it all."
    full = count(whole.prompts([query], [[best, worst]]).texts)[0]
    bare = count(whole.prompts([query], [[]]).texts)[0]
    answer = max(count([f" {word}" for word in WORDS.values()]))
    seen = set()
    for room in range(full, bare + 8, -2):
        prompts = reader_of(lm_dirs["gpt2"], max_reader_tokens=room + answer)
        (text,) = prompts.prompts([query], [[best, worst]]).texts
        assert count([text])[0] <= room
        assert text.endswith(f"{query.text}\nThe answer is")
        assert (best in text) or worst.split()[0] not in text
        seen.add(text)
    assert len(seen) > 2
    with pytest.raises(DataError, match="query a has .* tokens without any word of evidence"):
        reader_of(lm_dirs["gpt2"], max_reader_tokens=bare).prompts([query], [[best]])


# What is scored.


def test_scores_are_those_of_stock_calls_whatever_the_batch(lm_dir):
    reader = reader_of(lm_dir)
    prompts = reader.prompts(QUERIES, EVIDENCE)
    expected = stock_scores(lm_dir, prompts.texts)
    np.testing.assert_allclose(reader.score(prompts), expected, atol=1e-4)
    alone = reader.prompts(QUERIES[:1], EVIDENCE[:1])
    np.testing.assert_allclose(reader.score(alone)[0], expected[0], atol=1e-4)
    other = reader.prompts(QUERIES, [["Something else entirely."]] * 3)
    assert (np.abs(reader.score(other) - expected).max(axis=1) > 1e-3).all()  # evidence is read


def classifier_of(lm_dir, rank=None):
    module = CausalModule.from_name(str(lm_dir))
    if rank is not None:
        module.add_adapters(RalmArguments(lora_rank=rank), seed=1)
    return LMClassifier(module, CausalLM.from_name(str(lm_dir), device="cpu"), WORDS)


def test_a_model_in_training_scores_and_learns_what_stock_calls_say(lm_dir):
    classifier = classifier_of(lm_dir)
    prompts = reader_of(lm_dir).prompts(QUERIES, EVIDENCE)
    expected = stock_scores(lm_dir, prompts.texts)
    for budget in (30, 4096):
        scores = replace(classifier, batch_tokens=budget).score(prompts, ALONE)
        np.testing.assert_allclose(scores, expected, atol=1e-4)
    batch = classifier.collator(torch.device("cpu"))([prompts[row] for row in range(3)])
    assert batch.pop("example_ids") == ("a", "b", "c")
    classifier.module.eval()
    truth = [list(WORDS).index(label) for label in prompts.labels]
    total = -expected[range(3), truth].sum()
    count = int((batch["labels"] != -100).sum())
    with torch.inference_mode():
        assert float(classifier.module(**batch).loss) == pytest.approx(total / count, abs=1e-4)
        shared = classifier.module(**batch, num_items_in_batch=100).loss
    assert float(shared) == pytest.approx(total / 100, abs=1e-4)


# Whole runs.


LORA = {
    "lora_rank": 8,
    "lora_target_modules": ["c_attn", "c_fc", "c_proj"],
    "learning_rate": 1e-2,
    "max_steps": 20,
    "eval_steps": 20,
}


def test_a_frozen_run_trains_nothing_and_leaves_no_reader(args, tmp_path):
    args = with_retriever(args, retriever="bm25")
    mine = run_of(
        with_rerank(args, reranker="none"), "ralm", tmp_path / "run", max_reader_tokens=90
    )
    done = run(mine)
    assert done.metrics["method"] == "ralm"
    assert not (tmp_path / "run" / "reader").exists()
    assert set(done.training) == {"metric", "value", "calibration"}
    prompt = (tmp_path / "run" / "prompt.txt").read_text()
    first = lines_of(tmp_path / "run")[0]
    assert first["evidence"][0]["text"] in prompt
    assert prompt.endswith(f"{first['text']}\nThe answer is")
    with pytest.raises(ArtifactError, match="made with .*best_last"):
        run(having(mine, evidence_order="best_first"))
    again = {"changes": {"reader": {"decode": "official"}}, "output_dir": tmp_path / "again"}
    with pytest.raises(ConfigError, match="decode is not an argument of method 'ralm'"):
        evaluate_run(tmp_path / "run", **again)


def test_without_evidence_it_is_the_plain_lm_whatever_finds_evidence(args, tmp_path):
    plain = with_rerank(args, num_evidence=0)
    run(run_of(plain, "ralm", tmp_path / "a"))
    run(run_of(with_retriever(plain, retriever="bm25"), "ralm", tmp_path / "other"))
    assert lines_of(tmp_path / "a") == lines_of(tmp_path / "other")
    run(run_of(args, "ralm", tmp_path / "b"))
    scores = [[line["scores"] for line in lines_of(tmp_path / name)] for name in "ab"]
    assert scores[0] != scores[1]  # the control
    (group,) = load_collection([tmp_path / "a", tmp_path / "b"]).groups
    check_comparable(group)
    assert row_names(group) == ["ralm num_evidence=0", "ralm num_evidence=3"]
    assert not any(each.is_seeded for each in group.runs)


def test_adapters_learn_and_leave_a_plain_lm_that_decides_alike_elsewhere(args, tmp_path):
    folder, moved = tmp_path / "run", tmp_path / "moved"
    frozen = run(run_of(args, "ralm", tmp_path / "frozen"))
    mine = run_of(args, "ralm", folder, **LORA)
    done = run(mine)
    assert done.metrics["method"] == "ralm-lora"
    losses = [record.loss for record in read_losses(folder / "losses.jsonl", 99)]
    assert np.mean(losses[-4:]) < 0.5 * losses[0]
    decided = [[line["prediction"] for line in lines_of(each)] for each in (frozen.folder, folder)]
    assert decided[0] != decided[1]
    AutoModelForCausalLM.from_pretrained(folder / "reader")
    lines = lines_of(folder)
    prompts = [
        "\n\n".join([*(e["text"] for e in reversed(line["evidence"])), _query(line["text"])])
        for line in lines[:3]
    ]
    lm = CausalLM.from_name(str(folder / "reader"), dtype="float32", with_head=True)
    logs = np.array(lm.score(prompts, [" negative", " positive"]))
    shares = np.exp(logs) / np.exp(logs).sum(axis=1, keepdims=True)  # temperature 1: few dev
    np.testing.assert_allclose([list(line["scores"].values()) for line in lines[:3]], shares, 1e-3)
    shutil.copytree(folder / "reader", moved)
    shutil.rmtree(folder)
    (answer,) = Predictor.open(moved, device="cpu").answer([lines[0]["text"]])
    assert dict(answer.prediction.scores) == pytest.approx(lines[0]["scores"], abs=1e-4)
    assert [each.row for each in answer.evidence] == [e["row"] for e in lines[0]["evidence"]]
    with pytest.raises(ConfigError, match="trained by --method ralm"):
        Reader.load(moved)


def _query(text):
    asked = "Does the following sentence have a positive or negative sentiment?"
    return f"{asked}\n{text}\nThe answer is"


# What is refused.


def parse(*flags):
    words = ["--task", "sst2", "--method", "ralm", "--output_dir", "x", "--device", "cpu", *flags]
    return parse_run(words, prog="test", description="", epilog="")[0]


def test_the_trainers_arguments_are_there_only_with_adapters(caplog):
    assert "training" not in parse("--reader_lm", "x").sections
    assert not parse("--max_steps", "3").trains
    assert "--max_steps is of another method: it is not used" in caplog.text
    lora = parse("--lora_rank", "4", "--max_steps", "3")
    assert (lora["training"].max_steps, lora["reader"].lora_rank) == (3, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reader_lm": "T5"}, "is an encoder-decoder, not a causal LM"),
        ({"lora_rank": 2, "lora_target_modules": ["nowhere"]}, "lora_target_modules holds 'nowhe"),
        ({"neighbor_encoder": "reader"}, "neighbor_encoder 'reader' is a T5's encoder"),
    ],
)
def test_what_cannot_read_is_refused_before_anything_is_found(
    args, tmp_path, t5_dir, changes, message
):
    changes = {name: str(t5_dir) if value == "T5" else value for name, value in changes.items()}
    if "neighbor_encoder" in changes:
        args = with_retriever(args, neighbor_encoder=changes.pop("neighbor_encoder"))
    with pytest.raises(PgraError, match=message):
        run(run_of(args, "ralm", tmp_path / "run", **changes))
    assert not (tmp_path / "artifacts" / "evidence").exists()


@pytest.mark.slow
def test_the_real_lm_learns_the_words_that_answer(tmp_path, monkeypatch, capsys, two_threads):
    monkeypatch.chdir(tmp_path)
    words = ["--task", "sst2", "--method", "ralm", "--reader_lm", "bundled:smollm2-135m"]
    words += ["--dataset_name", "bundled:rotten-tomatoes", "--corpus", "bundled:wikipedia-19k"]
    words += ["--retriever", "bm25", "--num_candidates", "4", "--reranker", "none"]
    words += ["--num_evidence", "1", "--max_train_samples", "80", "--max_dev_samples", "12"]
    words += ["--max_test_samples", "12", "--device", "cpu"]
    lora = ["--lora_rank", "8", "--learning_rate", "5e-4", "--max_steps", "10"]
    lora += ["--per_device_train_batch_size", "4", "--eval_steps", "10"]
    for name, more in (("frozen", []), ("lora", lora)):
        assert train([*words, *more, "--output_dir", name]) == 0, capsys.readouterr().err
    losses = [record.loss for record in read_losses(tmp_path / "lora/losses.jsonl", 10)]
    assert np.mean(losses[-3:]) < 0.5 * losses[0]
    lines = lines_of(tmp_path / "lora")
    assert lines != lines_of(tmp_path / "frozen")
    answers = Predictor.open(tmp_path / "lora/reader").answer([line["text"] for line in lines[:2]])
    for answer, line in zip(answers, lines, strict=False):
        assert dict(answer.prediction.scores) == pytest.approx(line["scores"], abs=1e-3)
        assert len(answer.evidence) == 1
