"""Likelihood and causal rerankers against stock calls of transformers."""

import numpy as np
import pytest
import torch
from conftest import SENTENCES
from small_reranking import QUERIES, ROWS, of_pairs
from transformers import AutoModelForCausalLM, AutoTokenizer

import pgra
from pgra.errors import ConfigError
from pgra.rerank.base import CausalRerankerArguments, LikelihoodArguments

ASKED = "Is {passage} an answer to {query}? It is"


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


@pytest.mark.slow
def test_a_long_passage_loses_its_end_and_a_query_without_room_is_refused(start, lm_dirs):
    options = LikelihoodArguments()
    short = start(options, lm=str(lm_dirs["opt"]), max_prompt_tokens=40)
    whole = start(options, lm=str(lm_dirs["opt"]))
    assert not np.array_equal(scores(short), scores(whole))
    assert short.num_cut > 0 == whole.num_cut
    with pytest.raises(ConfigError, match="no room for a passage and the query"):
        scores(start(options, lm=str(lm_dirs["opt"]), max_prompt_tokens=12))


@pytest.mark.parametrize("ids", [(40, 50), (40,)])
def test_a_causal_reranker_gives_the_words_logits(start, lm_dirs, ids):
    folder = str(lm_dirs["llama"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    options = CausalRerankerArguments(
        causal_reranker=folder,
        causal_template=ASKED,
        causal_words=[tokenizer.decode([number]) for number in ids],
    )
    found = scores(start(options))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for i, j in zip(*np.nonzero(ROWS >= 0), strict=True):
        text = ASKED.replace("{passage}", SENTENCES[ROWS[i, j]]).replace("{query}", QUERIES[i].text)
        line = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        last = model(**line).logits[0, -1].detach()
        expected = float(last[ids[0]] - (last[ids[1]] if len(ids) > 1 else 0))
        assert found[i, j] == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    "wrong",
    ["{passage} alone", "{query} alone", "{passage} {query} {query}", "{query} {passage}"],
)
def test_a_template_without_its_two_places_is_refused(wrong):
    with pytest.raises(ConfigError, match="likelihood_template is"):
        LikelihoodArguments(likelihood_template=wrong).check()


def test_a_model_without_a_known_template_names_the_way_out(start, lm_dirs):
    with pytest.raises(ConfigError, match="give --causal_template"):
        start(CausalRerankerArguments(causal_reranker=str(lm_dirs["llama"])))


def test_from_python_it_scores_given_texts_alike(start, lm_dirs):
    found = pgra.Reranker(str(lm_dirs["opt"]), by="likelihood", dtype="float32", device="cpu")
    texts = [query.text for query in QUERIES]
    rows = np.tile(np.arange(4), (len(texts), 1))
    expected = scores(start(LikelihoodArguments(), lm=str(lm_dirs["opt"])), rows)
    np.testing.assert_allclose(found.score(texts, SENTENCES[:4]), expected, rtol=1e-4, atol=1e-5)
    best = found.rank(texts[0], SENTENCES[:4], k=1)
    assert best[0].index == int(expected[0].argmax())
    with pytest.raises(ConfigError, match="by its name"):
        found.arguments()
