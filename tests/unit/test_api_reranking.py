"""`pgra.Reranker`: the scores of a run's second stage, from Python, and what is refused."""

import numpy as np
import pytest
import torch
from conftest import LM_KINDS, SENTENCES, one_quick
from small_reranking import TRAIN, TWO, open_lm
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import pgra
from pgra.context import Context
from pgra.data.corpus import open_corpus
from pgra.data.tasks import Task
from pgra.errors import ArtifactError, ConfigError
from pgra.lm.prefix import PromptedEncoder
from pgra.rerank.arguments import FitData, RerankArguments
from pgra.rerank.base import RerankRequest
from pgra.rerank.reranker import make_ready
from pgra.rerank.similarity import SIMILARITIES
from pgra.types import Example, Hit

SHOTS = [(one.text, one.label) for one in TRAIN[:4]]
QUERIES = [one.text for one in TWO]


@pytest.fixture
def make(lm_dirs):
    """Make a reranker of an open tiny LM, for sst2 with four shots unless told otherwise."""

    def make(lm="gpt2", **how):
        lm = open_lm(str(lm_dirs[lm])) if isinstance(lm, str) else lm
        return pgra.Reranker(lm, **{"task": "sst2", "examples": SHOTS, **how})

    return make


def of_a_run(reranker, root, queries=TWO, documents=SENTENCES):
    """Scores of a run's second stage, which has its states on disk: (B, n)."""
    ready = make_ready(reranker).open(
        RerankRequest(
            args=RerankArguments(bank_shard_rows=5, similarity=reranker.similarity),
            prompt=reranker.prompt,
            corpus=open_corpus(documents, root),
            fit_data=FitData(TRAIN[4:], Task.load("sst2").prompt_words),
            context=Context(artifacts=root),
        )
    )
    rows = np.tile(np.arange(len(documents)), (len(queries), 1))
    ready.prepare(queries, rows)
    return ready.score_rows(queries, rows)


@pytest.mark.parametrize("similarity", sorted(SIMILARITIES))
def test_scores_are_those_of_a_runs_second_stage(make, similarity, tmp_path):
    reranker = make(similarity=similarity).fit(SENTENCES, TRAIN)
    scores = reranker.score(QUERIES, SENTENCES)
    truth = of_a_run(reranker, tmp_path)
    np.testing.assert_allclose(scores, truth, rtol=1e-4, atol=1e-4)
    other = "cosine" if similarity != "cosine" else "dot"
    assert np.abs(of_a_run(make(similarity=other), tmp_path) - truth).max() > 0.01


def test_ranking_is_the_scores_in_order_ties_by_place(make):
    reranker = make()
    texts = [*SENTENCES[:4], SENTENCES[1]]
    scores = reranker.score(QUERIES[0], texts)
    hits = reranker.rank(QUERIES[0], texts)
    assert [hit.index for hit in hits] == np.argsort(-scores, kind="stable").tolist()
    assert [hit.text for hit in hits] == [texts[hit.index] for hit in hits]
    assert [hit.score for hit in hits] == scores[[hit.index for hit in hits]].tolist()
    assert reranker.rank(QUERIES[0], texts, k=2) == hits[:2]
    assert reranker.rank(QUERIES[0], []) == []
    assert reranker.rank(QUERIES, texts)[0] == hits
    found = [Hit(40 + at, 0.5, text) for at, text in enumerate(texts)]  # of a search
    assert [hit.index - 40 for hit in reranker.rank(QUERIES[0], found)] == [h.index for h in hits]


@pytest.mark.slow
def test_drawn_exemplars_leave_the_others_for_the_fit(make):
    reranker = make(examples=TRAIN, num_exemplars=4, similarity="head")
    scores = reranker.fit(SENTENCES).score(QUERIES, SENTENCES)
    shown = reranker.prompt.exemplar_ids
    rest = [one for at, one in enumerate(TRAIN) if f"examples-{at}" not in shown]
    assert len(rest) == len(TRAIN) - 4
    again = make(examples=TRAIN, num_exemplars=4, similarity="head").fit(SENTENCES, rest)
    np.testing.assert_array_equal(again.score(QUERIES, SENTENCES), scores)


def test_a_task_of_two_inputs_takes_mappings(make):
    shots = [
        {"sentence1": text, "sentence2": "A film.", "label": name}
        for text, name in zip(SENTENCES[:2], Task.load("rte").labels, strict=True)
    ]
    reranker = make(task="rte", examples=shots, similarity="dot")
    query = {"sentence2": "The sea was calm.", "sentence1": "The boats came home."}
    prompt = reranker.prompt
    encoder = PromptedEncoder(reranker.encoder.lm, prompt)
    asked = encoder.encode_examples([Example("", {k: query[k] for k in prompt.template.inputs})])
    truth = asked @ encoder.encode(SENTENCES).numpy().T
    np.testing.assert_allclose(reranker.score(query, SENTENCES), truth[0], rtol=1e-4)
    swapped = dict(zip(query, reversed(query.values()), strict=True))
    assert np.abs(reranker.score(swapped, SENTENCES) - truth[0]).max() > 1e-3


@pytest.mark.parametrize("kind", one_quick(LM_KINDS, "opt"))
def test_a_loaded_lm_gives_the_scores_of_its_folder_and_stays_as_it_is(make, lm_dirs, kind):
    folder = lm_dirs[kind]
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    truth = make(kind).score(QUERIES, SENTENCES)
    for given in (model, AutoModel.from_pretrained(folder)):
        reranker = make(given, tokenizer=tokenizer)
        np.testing.assert_allclose(reranker.score(QUERIES, SENTENCES), truth, rtol=1e-5, atol=1e-5)
        first = next(reranker.encoder.lm.model.parameters())
        assert first.data_ptr() == next(given.base_model.parameters()).data_ptr()  # no copy
    assert all(weight.requires_grad for weight in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ConfigError):
        make(model, tokenizer=tokenizer, lm_layer=1)
    with pytest.raises(ConfigError):
        make(model.train(), tokenizer=tokenizer)


def test_auto_is_head_where_each_label_has_eight_examples(make):
    names = Task.load("sst2").labels
    many = [
        (f"{text} {at}", label)
        for at in range(8)
        for text, label in zip(SENTENCES, names, strict=False)
    ]
    ours = make(examples=many, num_exemplars=0, similarity="auto")
    texts = [text for text, _ in many]
    told = make(examples=many, num_exemplars=0, similarity="head").fit(texts)
    np.testing.assert_array_equal(ours.score(TWO, SENTENCES), told.score(TWO, SENTENCES))
    few = make(examples=many[:-1], num_exemplars=0)
    fewer = make(examples=many[:-1], num_exemplars=0, similarity="calibrated")
    np.testing.assert_array_equal(few.score(TWO, SENTENCES), fewer.score(TWO, SENTENCES))
    assert np.abs(few.score(TWO, SENTENCES) - ours.score(TWO, SENTENCES)).max() > 1e-3


def test_the_scores_of_hits_are_added_standardized(lm_dirs):
    lm = str(lm_dirs["opt"])
    likely = pgra.Reranker(lm, by="likelihood")
    scores = likely.score(QUERIES[0], SENTENCES[:5])
    first = np.array([5, 1, 4, 2, 3])
    hits = [Hit(9 - i, score, SENTENCES[i]) for i, score in enumerate(first.tolist())]
    mixed = sum((values - values.mean()) / values.std() for values in (scores, first))
    order = np.argsort(-mixed)
    ranked = likely.rank(QUERIES[0], hits)
    assert [hit.index for hit in ranked] == (9 - order).tolist()
    np.testing.assert_allclose([hit.score for hit in ranked], mixed[order], rtol=1e-4)
    alone = pgra.Reranker(lm, by="likelihood", topic_weight=0).rank(QUERIES[0], hits)
    texts = likely.rank(QUERIES[0], SENTENCES[:5])
    assert [hit.score for hit in alone] == [hit.score for hit in texts]


def test_an_argument_that_is_not_used_is_refused(lm_dirs):
    lm = str(lm_dirs["gpt2"])
    used = {"by", "template", "device", "dtype", "max_prompt_tokens"}
    for name in {*pgra.Reranker.__init__.__kwdefaults__} - used:
        with pytest.raises(ConfigError, match=name):
            pgra.Reranker(lm, by="likelihood", **{name: ["x"]})
    for by in ("cross-encoder", "states"):  # and a template without a slot
        with pytest.raises(ConfigError, match="template"):
            pgra.Reranker(lm, by=by, template="text")


def test_a_saved_one_scores_alike_and_refuses_another_lm(make, lm_dirs, tmp_path):
    reranker = make(similarity="whitened")
    with pytest.raises(ValueError, match="call fit"):
        reranker.save(tmp_path)
    scores = reranker.fit(SENTENCES, TRAIN).score(QUERIES, SENTENCES)
    reranker.save(tmp_path)
    again = pgra.Reranker.load(tmp_path, lm=reranker.encoder.lm)
    np.testing.assert_allclose(again.score(QUERIES, SENTENCES), scores, rtol=1e-4)
    with pytest.raises(ArtifactError, match="was made with"):
        pgra.Reranker.load(tmp_path, lm=str(lm_dirs["opt"]))
    with pytest.raises(ConfigError, match="by its name"):
        pgra.Reranker(str(lm_dirs["gpt2"]), by="likelihood").save(tmp_path)
