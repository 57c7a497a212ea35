"""Ways to compare states, by hand; and label words against the LM's own logits."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pgra.core import MISSING_ROW, Candidates
from pgra.lm.prefix import PromptedEncoder
from pgra.prompts import FewShotPrompt, PromptTemplate
from pgra.rerank.base import RerankArguments, add_topic
from pgra.rerank.head import column_stats
from pgra.rerank.similarity import find_similarity, log_chances

PASSAGES = np.array([[0, 0], [2, 20]], np.float32)
QUERIES = np.array([[1, 7], [3, 7]], np.float32)


def scores(similarity, passages=PASSAGES, queries=QUERIES):
    """Give (queries, passages) inner products."""
    left = similarity.of_passages(passages)
    return similarity.of_queries(queries, np.arange(len(queries))) @ left.T


PLAIN = {name: find_similarity(name)() for name in ("dot", "cosine")}


def whitened(passages=PASSAGES, queries=QUERIES, *, is_unit=False):
    kind = find_similarity("whitened_cosine" if is_unit else "whitened")
    return kind(passages=column_stats(passages), queries=column_stats(queries))


def test_dot_and_cosine_by_hand():
    assert scores(PLAIN["dot"]).tolist() == [[0, 142], [0, 146]]
    lengths = np.sqrt([[50 * 404], [58 * 404]])
    found = scores(PLAIN["cosine"])
    np.testing.assert_allclose(found[:, 1:], np.array([[142], [146]]) / lengths, rtol=1e-6)
    assert found[:, 0].tolist() == [0, 0]  # a state of length 0 is like nothing
    assert found.dtype == np.float32


def test_whitened_by_hand():
    """Passages become (-1, -1) and (1, 1), queries (-1, 0) and (1, 0): 7 is all they have there."""
    assert scores(whitened()).tolist() == [[1, -1], [-1, 1]]
    half, unit = 0.5**0.5, whitened(is_unit=True)
    np.testing.assert_allclose(scores(unit), [[half, -half], [-half, half]], rtol=1e-6)
    mean = PASSAGES.mean(axis=0, keepdims=True)
    assert scores(unit, passages=mean).tolist() == [[0], [0]]  # it is like nothing


def test_a_column_that_does_not_vary_counts_for_nothing_whatever_it_is():
    assert column_stats(np.full((7, 1), 0.1, np.float32)) == pytest.approx(np.array([[0.1], [1]]))
    found = column_stats(np.array([[0.1], [0.2]], np.float32))
    assert found == pytest.approx(np.array([[0.15], [0.05]]))


WORDS = {"bad": "negative", "good": "positive", "sea": "sea"}
PROMPT = FewShotPrompt(
    PromptTemplate("Does the following sentence have a sentiment?\n{text}"),
    "Follow the demonstrations:\nDoes the following sentence have a sentiment?\n"
    "A dull, lifeless story.\nThe answer is negative",
)
TEXTS = ["The film is warm and funny.", "A dull plot", "He was born in 1925."]


def test_log_chances_are_those_of_the_lms_own_logits(lm_dir):
    args = RerankArguments(lm=str(lm_dir))
    encoder = PromptedEncoder.open(args, PROMPT, "cpu", with_head=True)
    tokens = encoder.first_tokens(WORDS.values())
    head = encoder.lm.head
    bias = torch.zeros(len(tokens)) if head.bias is None else head.bias[tokens]
    words = torch.column_stack([head.weight[tokens], bias]).numpy()
    found = log_chances(encoder.encode(TEXTS).numpy(), words)
    lm, tokenizer = (kind.from_pretrained(lm_dir) for kind in (AutoModelForCausalLM, AutoTokenizer))
    for text, line in zip(TEXTS, found, strict=True):
        prompt = PROMPT.prefix + PROMPT.suffix({"text": text})
        asked = tokenizer(prompt, return_tensors="pt")["input_ids"]
        firsts = [
            int(tokenizer(f"{prompt} {word}")["input_ids"][asked.shape[1]])
            for word in WORDS.values()
        ]
        assert list(dict.fromkeys(firsts)) == tokens
        with torch.no_grad():
            logits = lm.eval()(asked).logits[0, -1]
        expected = logits[tokens].log_softmax(-1).numpy()
        np.testing.assert_allclose(line, expected, rtol=2e-4, atol=2e-4)
        whole = logits.log_softmax(-1)[tokens].numpy()
        assert np.abs(line - whole).max() > 0.1  # the control: not among all words


def test_the_topic_is_added_by_hand():
    """Two of three are there: standardized they are -1 and 1, whatever their offset and scale."""
    rows = np.array([[4, 2, MISSING_ROW], [0, 1, 2], [5, 6, 7]])
    first = Candidates(rows, np.array([[9, 7, -np.inf], [0, 0, 0], [2, 1, 0]], np.float32))
    scores = np.array([[1, 3, -np.inf], [5, 3, 1], [0.1, 0.1, 0.1]], np.float32)
    assert add_topic(scores, first, 0) is scores
    root = 1.5**0.5
    expected = [[-1 + 0.5, 1 - 0.5, -np.inf], [root, 0, -root], [root / 2, 0, -root / 2]]
    np.testing.assert_allclose(add_topic(scores, first, 0.5), expected, atol=1e-6)
    moved = Candidates(rows, first.scores * 7 - 3)
    np.testing.assert_allclose(add_topic(scores * 100 + 1, moved, 0.5), expected, atol=1e-5)
