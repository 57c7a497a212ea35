"""The decoder-only reader: what it reads, what it scores, what training it changes."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pgra.core import Example
from pgra.errors import DataError
from pgra.lm.generate import LocalLM
from pgra.methods.kate import count_word_tokens
from pgra.methods.ralm import write_prompts
from pgra.prompts import PromptTemplate, answer_words

WORDS = {"negative": "bad", "positive": "very good"}  # of one token and of several
TEMPLATE = PromptTemplate("{text}\nThe answer is", "")
QUERIES = [
    Example("a", {"text": "A warm and funny film."}, "positive"),
    Example("b", {"text": "A dull story that wastes its actors and the sea."}, "negative"),
    Example("c", {"text": "Red"}, "positive"),
]
EVIDENCE = [["The sea is blue.", "Critics praised it."], [], ["A dull, lifeless story. " * 4]]


def prompts_of(lm_dir, queries, evidence, max_tokens=200):
    """Write prompts; also return the LM."""
    lm = LocalLM(str(lm_dir), dtype="float32", device="cpu")
    asked = [TEMPLATE.render_query(query.fields, after_prefix=False) for query in queries]
    names = [query.id for query in queries]
    room = {"max_tokens": max_tokens, "num_new_tokens": count_word_tokens(lm, WORDS)}
    return write_prompts(lm, names, asked, evidence, **room), lm


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


def test_evidence_stands_before_the_query_the_best_next_to_it(lm_dirs):
    prompts, _ = prompts_of(lm_dirs["gpt2"], QUERIES, EVIDENCE)
    expected = "Critics praised it.\n\nThe sea is blue.\n\nA warm and funny film."
    assert prompts[0] == f"{expected}\nThe answer is"
    assert prompts[1] == f"{QUERIES[1].text}\nThe answer is"  # without evidence the plain LM


def test_the_worst_evidence_is_cut_first_and_the_query_never(lm_dirs):
    query, best, worst = QUERIES[0], "The sea is blue.", "Critics praised the acting of it all."
    whole, lm = prompts_of(lm_dirs["gpt2"], [query], [[best, worst]])
    count = lm.count_tokens
    full, bare = count(whole)[0], count(prompts_of(lm_dirs["gpt2"], [query], [[]])[0])[0]
    answer = max(count([f" {word}" for word in WORDS.values()]))
    seen = set()
    for room in range(full, bare + 8, -2):
        (text,), _ = prompts_of(lm_dirs["gpt2"], [query], [[best, worst]], room + answer)
        assert count([text])[0] <= room
        assert text.endswith(f"{query.text}\nThe answer is")
        assert (best in text) or worst.split()[0] not in text
        seen.add(text)
    assert len(seen) > 2
    with pytest.raises(DataError, match="query a has .* tokens without any word of evidence"):
        prompts_of(lm_dirs["gpt2"], [query], [[best]], bare)


def test_scores_are_those_of_stock_calls_whatever_the_batch(lm_dir):
    prompts, lm = prompts_of(lm_dir, QUERIES, EVIDENCE)
    expected = stock_scores(lm_dir, prompts)
    scores = np.array(lm.score(prompts, answer_words(WORDS))).reshape(expected.shape)
    np.testing.assert_allclose(scores, expected, atol=1e-4)
