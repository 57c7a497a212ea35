"""The reranker against equations 1 to 3 of the paper, written down plainly."""

import numpy as np
import pytest
import torch
from conftest import SENTENCES
from transformers import AutoModel, AutoTokenizer

from pgra.config import CorpusArguments
from pgra.data.corpus import open_corpus
from pgra.models.causal_lm import CausalLM
from pgra.models.prefix import PromptedEncoder
from pgra.prompts.fewshot import build_prompt
from pgra.prompts.template import PromptTemplate
from pgra.rerank.prompted import PromptedReranker, query_key
from pgra.types import Candidates, Example

TEMPLATE = PromptTemplate("Does the following sentence have a sentiment?\n{text}")
WORDS = {"negative": "negative", "positive": "positive"}
TRAIN = [
    Example(f"train-{i}", {"text": f"A {'great' if i % 2 else 'dull'} film number {i}."}, label)
    for i, label in enumerate(["negative", "positive"] * 6)
]
QUERIES = [Example(f"test-{i}", {"text": text}) for i, text in enumerate(["A warm film.", "Dull!"])]


@pytest.fixture
def corpus(corpus_file, tmp_path):
    return open_corpus(CorpusArguments(corpus=str(corpus_file)), tmp_path / "artifacts")


def rerank(lm_dir, corpus, artifacts, candidates, **kwargs):
    prompt = build_prompt(TEMPLATE, TRAIN, WORDS, num_exemplars=4)
    encoder = PromptedEncoder(CausalLM.from_name(str(lm_dir)), prompt)
    reranker = PromptedReranker(encoder, corpus, artifacts, shard_rows=5, **kwargs)
    work = reranker.prepare(QUERIES, candidates.rows)
    return reranker.rerank(QUERIES, candidates), work, prompt


def candidates_of(rows):
    rows = np.array(rows, dtype=np.int64)
    return Candidates(rows, np.zeros(rows.shape, np.float32))


CANDIDATES = [[3, 0, 7, 11, 1], [2, 5, 0, 1, 10]]


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_scores_are_those_of_the_papers_equations(lm_dir, corpus, tmp_path, similarity):
    ours, _, prompt = rerank(
        lm_dir, corpus, tmp_path, candidates_of(CANDIDATES), similarity=similarity
    )
    tokenizer = AutoTokenizer.from_pretrained(lm_dir)
    model = AutoModel.from_pretrained(lm_dir).eval()

    def state(text):
        body = f"Does the following sentence have a sentiment?\n{text}\nThe answer is"
        ids = tokenizer(f"{prompt.prefix}\n\n{body}", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            last = model(input_ids=ids).last_hidden_state[0, -1]
        return last / last.norm() if similarity == "cosine" else last

    for line, query in enumerate(QUERIES):
        truth = {row: float(state(query.text) @ state(SENTENCES[row])) for row in CANDIDATES[line]}
        order = sorted(truth, key=lambda row: (-truth[row], row))
        assert ours.rows[line].tolist() == order
        np.testing.assert_allclose(ours.scores[line], [truth[row] for row in order], rtol=1e-4)


def test_missing_candidates_stay_last(lm_dirs, corpus, tmp_path):
    ours, _, _ = rerank(lm_dirs["opt"], corpus, tmp_path, candidates_of([[4, -1, -1], [0, 1, 2]]))
    assert ours.rows[0].tolist() == [4, -1, -1]
    assert np.isneginf(ours.scores[0, 1:]).all()


def test_a_second_run_reads_nothing_and_never_loads_the_lm(lm_dirs, corpus, tmp_path, monkeypatch):
    first, work, _ = rerank(lm_dirs["opt"], corpus, tmp_path, candidates_of(CANDIDATES))
    assert (work.num_passages, work.num_new) == (8, 8 + 2)
    assert work.num_tokens > 0

    def refuse(*_args, **_kwargs):
        raise AssertionError("the LM was loaded")

    monkeypatch.setattr(AutoModel, "from_pretrained", refuse)
    second, work, _ = rerank(lm_dirs["opt"], corpus, tmp_path, candidates_of(CANDIDATES))
    assert (work.num_new, work.num_tokens) == (0, 0)
    np.testing.assert_array_equal(second.scores, first.scores)


def test_order_of_candidates_and_queries_does_not_matter(lm_dirs, corpus, tmp_path):
    one, _, _ = rerank(lm_dirs["gpt2"], corpus, tmp_path / "a", candidates_of(CANDIDATES))
    mixed = candidates_of([row[::-1] for row in CANDIDATES])
    other, _, _ = rerank(lm_dirs["gpt2"], corpus, tmp_path / "b", mixed)
    np.testing.assert_array_equal(one.rows, other.rows)


def test_other_exemplars_give_other_scores(lm_dirs, corpus, tmp_path):
    candidates = candidates_of(CANDIDATES)
    scores = []
    for seed in (0, 1):
        prompt = build_prompt(TEMPLATE, TRAIN, WORDS, num_exemplars=4, seed=seed)
        encoder = PromptedEncoder(CausalLM.from_name(str(lm_dirs["opt"])), prompt)
        reranker = PromptedReranker(encoder, corpus, tmp_path)
        reranker.prepare(QUERIES, candidates.rows)
        scores.append(reranker.rerank(QUERIES, candidates).scores)
    assert np.abs(scores[0] - scores[1]).max() > 1e-3


def test_equal_queries_have_equal_keys_and_others_do_not():
    keys = [
        query_key(Example(i, {"text": text})) for i, text in (("a", "x"), ("b", "x"), ("c", "y"))
    ]
    assert keys[0] == keys[1] != keys[2]
