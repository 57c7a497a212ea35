"""The decoder-only reader: what it reads, what it scores, what training it changes."""

import shutil
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import with_rerank, with_retriever
from method_runs import having, lines_of, run_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from pgra import Reader
from pgra.core import ALONE, Example
from pgra.errors import ArtifactError, ConfigError, DataError
from pgra.lm.causal_lm import CausalLM
from pgra.methods.ralm import LMClassifier, PromptReader, RalmArguments
from pgra.prompts.template import PromptTemplate
from pgra.reader.causal import CausalModule
from pgra.reader.train import read_losses
from pgra.runs import Predictor, evaluate_run, run

WORDS = {"negative": "bad", "positive": "very good"}  # of one token and of several
TEMPLATE = PromptTemplate("{text}\nThe answer is", "")
QUERIES = [
    Example("a", {"text": "A warm and funny film."}, "positive"),
    Example("b", {"text": "A dull story that wastes its actors and the sea."}, "negative"),
    Example("c", {"text": "Red"}, "positive"),
]
EVIDENCE = [["The sea is blue.", "Critics praised it."], [], ["A dull, lifeless story. " * 4]]


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


def classifier_of(lm_dir, rank=None):
    module = CausalModule.from_name(str(lm_dir))
    if rank is not None:
        module.add_adapters(RalmArguments(lora_rank=rank), seed=1)
    lm = CausalLM.from_name(str(lm_dir), device="cpu")
    return LMClassifier(module, lm.tokenizer, lm, WORDS)


@contextmanager
def full_beyond(num_rows, model):
    """Have memory for so many rows of ids."""
    failed = []

    def look(_module, _args, given):
        if len(given["input_ids"]) > num_rows:
            failed.append(len(given["input_ids"]))
            raise torch.OutOfMemoryError

    hook = model.register_forward_pre_hook(look, with_kwargs=True)
    yield failed
    hook.remove()


def test_a_model_in_training_scores_and_learns_what_stock_calls_say(lm_dir):
    classifier = classifier_of(lm_dir)
    prompts = reader_of(lm_dir).prompts(QUERIES, EVIDENCE)
    expected = stock_scores(lm_dir, prompts.texts)
    for budget in (30, 4096):
        scores = replace(classifier, batch_tokens=budget).score(prompts, ALONE)
        np.testing.assert_allclose(scores, expected, atol=1e-4)
    with full_beyond(1, classifier.module.model) as failed:
        scores = classifier.score(prompts, ALONE)
    assert failed
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


@pytest.mark.slow
def test_a_frozen_run_trains_nothing_and_leaves_no_reader(args, tmp_path):
    args = with_retriever(args, retriever="bm25")
    mine = run_of(
        with_rerank(args, reranker="none"), "ralm", tmp_path / "run", max_reader_tokens=90
    )
    done = run(mine)
    assert done.metrics["method"] == "ralm"
    assert not (tmp_path / "run" / "reader").exists()
    prompt = (tmp_path / "run" / "prompt.txt").read_text()
    first = lines_of(tmp_path / "run")[0]
    assert first["evidence"][0]["text"] in prompt
    assert prompt.endswith(f"{first['text']}\nThe answer is")
    with pytest.raises(ArtifactError, match="made with .*best_last"):
        run(having(mine, evidence_order="best_first"))
    again = {"changes": {"reader": {"decode": "official"}}, "output_dir": tmp_path / "again"}
    with pytest.raises(ConfigError, match="decode is not an argument of method 'ralm'"):
        evaluate_run(tmp_path / "run", **again)


@pytest.mark.slow
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
    shutil.copytree(folder / "reader", moved)
    shutil.rmtree(folder)
    (answer,) = Predictor.open(moved, device="cpu").answer([lines[0]["text"]])
    assert dict(answer.prediction.scores) == pytest.approx(lines[0]["scores"], abs=1e-4)
    assert [each.row for each in answer.evidence] == [e["row"] for e in lines[0]["evidence"]]
    with pytest.raises(ConfigError, match="trained by --method ralm"):
        Reader.load(moved)


# What is refused.
