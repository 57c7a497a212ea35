"""Likelihood and causal rerankers against transformers and sentence-transformers."""

import json

import numpy as np
import pytest
import torch
from conftest import SENTENCES
from small_reranking import QUERIES, ROWS, of_pairs
from transformers import AutoModelForCausalLM, AutoTokenizer

import pgra
from pgra.errors import ConfigError
from pgra.lm.generate import PromptReader
from pgra.rerank.arguments import CausalRerankerArguments, LikelihoodArguments
from pgra.rerank.causal import TEMPLATES


@pytest.fixture
def start(corpus, tmp_path):
    def start(options, **changes):
        name = "causal" if isinstance(options, CausalRerankerArguments) else "likelihood"
        return of_pairs(name, options, corpus, tmp_path / "artifacts", **changes)

    return start


def scores(reranker, rows=ROWS):
    reranker.prepare(QUERIES, rows)
    return reranker.score_rows(QUERIES, rows)


def test_it_is_the_mean_chance_of_the_querys_tokens_after_the_passage(start, lm_dir):
    options = LikelihoodArguments(likelihood_template="A: {passage}\nQ: {query}")
    found = scores(start(options, lm=str(lm_dir)))
    tokenizer = AutoTokenizer.from_pretrained(lm_dir)
    model = AutoModelForCausalLM.from_pretrained(lm_dir, dtype=torch.float32).eval()
    assert (found[ROWS < 0] == -np.inf).all()
    for i, j in zip(*np.nonzero(ROWS >= 0), strict=True):
        prompt = tokenizer(f"A: {SENTENCES[ROWS[i, j]]}\nQ:")["input_ids"]
        own = tokenizer(f" {QUERIES[i].text}", add_special_tokens=False)["input_ids"]
        chances = model(torch.tensor([[*prompt, *own]])).logits[0].log_softmax(1).detach()
        at = range(len(prompt) - 1, len(prompt) + len(own) - 1)
        expected = float(np.mean([chances[t, token] for t, token in zip(at, own, strict=True)]))
        assert found[i, j] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert np.ptp(found[np.isfinite(found)]) > 1e-3  # the control: passages differ


def test_a_long_passage_loses_its_end_for_its_own_query_alone(lm_dirs):
    lm, long = str(lm_dirs["opt"]), " ".join(SENTENCES)
    short = pgra.Reranker(lm, by="likelihood", max_prompt_tokens=40)
    scores = short.score(SENTENCES[:3], [long])
    alone = [short.score(query, [long]) for query in SENTENCES[:3]]
    np.testing.assert_allclose(scores, alone, rtol=1e-4)
    whole = pgra.Reranker(lm, by="likelihood").score(SENTENCES[:3], [long])
    assert np.abs(whole - scores).max() > 1e-3  # the control
    with pytest.raises(ConfigError):
        short.score(long, ["a"])


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_published_template_gives_sentence_transformers_scores(start, lm_dirs, name):
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    template, words = TEMPLATES[name]
    folder, words = str(lm_dirs["llama"]), ["1", "0"][: len(words)]  # tokens of the tiny LM
    shown = json.dumps(template)
    for role, place in (("query", "{query}"), ("document", "{passage}")):
        found = f"(messages | selectattr('role', 'eq', '{role}') | first).content"
        shown = shown.replace(place, f'" ~ {found} ~ "')
    how = {
        "transformer_task": "text-generation",
        "processor_kwargs": {"chat_template": "{{" + shown + "}}"},
    }
    module = Transformer(folder, **how)
    ids = module.tokenizer.convert_tokens_to_ids(words)
    stock = CrossEncoder(modules=[module, LogitScore(*ids)], device="cpu")
    options = CausalRerankerArguments(
        causal_reranker=folder, causal_template=template, causal_words=words
    )
    found = scores(start(options))
    pairs = [
        (QUERIES[i].text, SENTENCES[ROWS[i, j]])
        for i, j in zip(*np.nonzero(ROWS >= 0), strict=True)
    ]
    expected = stock.predict(pairs, activation_fn=torch.nn.Identity(), show_progress_bar=False)
    np.testing.assert_allclose(found[ROWS >= 0], expected, rtol=1e-4, atol=1e-5)
    assert np.ptp(expected) > 0.01  # the control: passages differ


def test_a_passage_is_read_once_for_all_queries_that_share_it(start, lm_dirs, monkeypatch):
    reranker, read = start(LikelihoodArguments(), lm=str(lm_dirs["opt"]), bank_shard_rows=99), []
    reranker.lm.reader.check()
    run = PromptReader._run
    monkeypatch.setattr(
        PromptReader, "_run", lambda *a, **how: read.append(a[1].numel()) or run(*a, **how)
    )
    reranker.prepare(QUERIES, np.tile(np.arange(3), (len(QUERIES), 1)))
    lm, texts = reranker.lm, [f"Passage: {text}\nQuestion:" for text in SENTENCES[:3]]
    passages = sum(map(len, lm.tokenize(texts)))
    queries = sum(len(ids) for ids in lm.tokenize([f" {query.text}" for query in QUERIES]))
    apart = len(QUERIES) * passages + 3 * queries  # what nine pairs have, read one by one
    assert passages < sum(read) < 0.65 * apart  # with padding
