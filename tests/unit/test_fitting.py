"""Similarities that are fitted: to which texts, how often, and what a later run takes up."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from conftest import SENTENCES
from small_reranking import TRAIN, TWO, WORDS, over_corpus, run

from pgra.arrays import log_softmax
from pgra.errors import ConfigError
from pgra.rerank import FitData
from pgra.rerank.base import RerankArguments, query_key
from pgra.rerank.head import fit_labels
from pgra.types import Example

FITTED = ["head", "whitened", "whitened_cosine"]
CANDIDATES = np.array([[3, 0, 7, 11, 1], [2, 5, 0, 1, 10]])
rerank = partial(run, queries=TWO, rows=CANDIDATES)


@pytest.fixture(autouse=True)
def small_draws(monkeypatch):
    """Draws that are smaller than corpus and training set, as they are in earnest."""
    monkeypatch.setattr("pgra.rerank.similarity.SAMPLE", 5)


@pytest.fixture
def start(lm_dirs, corpus, tmp_path):
    def start(similarity, where="banks", *, train=TRAIN[4:], words=WORDS, made=None, **kwargs):
        reference = FitData(train, words, made)
        how = {"similarity": similarity, "reference": reference, **kwargs}
        return over_corpus(lm_dirs["opt"], corpus, tmp_path / where, **how)

    return start


@pytest.mark.parametrize(("count", "name", "weight"), [(16, "head", 1), (15, "calibrated", 0)])
def test_auto_takes_head_where_each_label_has_eight(count, name, weight):
    labels = list(WORDS)
    many = [Example(f"train-{i}", {"text": f"{i}"}, labels[i % 2]) for i in range(count)]
    chosen = RerankArguments().chosen(FitData(many, WORDS))
    assert (chosen.similarity, chosen.topic_weight) == (name, weight)
    unlabelled = RerankArguments().chosen(FitData([Example(f"{i}", {}) for i in range(32)]))
    assert unlabelled.similarity == "whitened_cosine"


def by_row(found):
    """Give scores in the order of rows, which near ties cannot change."""
    return np.take_along_axis(found.scores, np.argsort(found.rows, axis=1), 1)


def test_scores_by_hand_from_the_states(start):
    def standard(values, sample):
        return (values - sample.mean(axis=0)) / sample.std(axis=0)

    reranker = start("whitened")
    found, _ = rerank(reranker)
    rows = sorted(np.random.default_rng(0).choice(12, 5, replace=False).tolist())
    drawn = [query.text for query in reranker.fitting._queries.values()]
    assert len(drawn) == 5
    passages, queries, train = (
        reranker.encoder.encode(texts).numpy()
        for texts in (SENTENCES, [query.text for query in TWO], drawn)
    )
    left, order = standard(passages, passages[rows]).T, np.sort(CANDIDATES, axis=1)
    truth = np.take_along_axis(standard(queries, train) @ left, order, 1)
    np.testing.assert_allclose(by_row(found), truth, rtol=1e-3, atol=1e-3)
    # the control: queries have their own mean
    others = np.take_along_axis(standard(queries, passages[rows]) @ left, order, 1)
    assert np.abs(by_row(found) - others).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("similarity", FITTED)
def test_candidates_and_a_draw_are_read_and_its_fingerprint_is_enough(start, similarity):
    reranker = start(similarity, "lazy")
    lazy, work = rerank(reranker)
    drawn = {*start("whitened", "other").fitting.rows()}
    num_read = len({*CANDIDATES.ravel().tolist()} | drawn)
    assert num_read < len(SENTENCES)
    assert work.num_new == num_read + len(TWO) + 5
    taken_up = start(similarity, "lazy", train=(), words={}, made=reranker.fingerprint)
    assert taken_up.fingerprint == reranker.fingerprint
    again, work = rerank(taken_up)
    assert work.num_new == 0
    np.testing.assert_array_equal(again.scores, lazy.scores)


def test_the_draw_is_of_the_training_queries_whatever_their_order(start):
    one, plain = start("whitened").fingerprint, start("dot").fingerprint
    assert start("whitened", train=[*TRAIN[:3:-1], TRAIN[5]]).fingerprint == one
    assert start("whitened", train=TRAIN[5:]).fingerprint != one
    assert start("dot", train=TRAIN[5:]).fingerprint == plain  # it depends on none of them
    with pytest.raises(ConfigError, match="'whitened'"):
        start("whitened", train=TRAIN[:1])


def test_a_head_judges_training_queries_by_the_folds_without_them(start):
    """The oracle: heads and opinion fitted to the states as they are, asked by hand."""
    reranker, queries = start("head"), [*TWO, *TRAIN[4:]]
    rows = reranker.fitting.rows().tolist()
    drawn = {example.id: example for example in reranker.fitting.queries()}
    found, _ = rerank(reranker, queries=queries, rows=np.zeros((len(queries), 1), np.int64))
    train, asked, passages = (
        reranker.encoder.encode(texts).numpy()
        for texts in ([e.text for e in drawn.values()], [q.text for q in queries], SENTENCES)
    )
    columns = reranker.encoder.columns([*WORDS.values()])
    fit = fit_labels(train, columns, [*drawn.values()], [*WORDS])
    folds = dict(zip(drawn, fit.folds.tolist(), strict=True))
    number = np.array([folds.get(query.id, fit.model.num_folds) for query in queries])
    truth = np.exp(fit.model.score(asked, number))
    keys = np.array([query_key(query) for query in queries])
    opinions = reranker.fitting.similarity.of_queries(reranker.query_bank.states(keys), keys)
    np.testing.assert_allclose(opinions, truth, atol=2e-4)
    seen = [query.id in folds for query in queries]
    assert sum(seen) == 5
    whole = np.exp(fit.model.score(asked))
    assert np.abs(opinions - whole)[seen].max() > 1e-3  # the control: another head than for others
    # the score: the chance of one label, whatever passages lean to
    lean = fit.model.score(passages[rows]).mean(axis=0)
    first = np.exp(log_softmax(fit.model.score(passages[:1]) - lean))
    np.testing.assert_allclose(found.scores, truth @ first.T, atol=2e-4)


def test_a_head_depends_on_labels(start):
    swapped = [
        replace(example, label=next(label for label in WORDS if label != example.label))
        for example in TRAIN[4:]
    ]
    for similarity, is_same in (("head", False), ("whitened", True)):
        ours, theirs = start(similarity), start(similarity, train=swapped)
        assert (ours.fingerprint == theirs.fingerprint) is is_same


def test_calibrated_takes_away_the_state_of_texts_without_content(start):
    reranker = start("calibrated", train=[])
    found, work = rerank(reranker)
    encoder = reranker.encoder
    free = encoder.encode(["N/A", "[MASK]", ""]).numpy().mean(axis=0)
    passages, queries = (
        encoder.encode(texts).numpy() - free for texts in (SENTENCES, [q.text for q in TWO])
    )
    passages, queries = (
        side / np.linalg.norm(side, axis=1, keepdims=True) for side in (passages, queries)
    )
    truth = np.take_along_axis(queries @ passages.T, np.sort(CANDIDATES, axis=1), 1)
    np.testing.assert_allclose(by_row(found), truth, rtol=1e-3, atol=1e-3)
    plain, _ = rerank(start("cosine", "plain"))
    assert np.abs(by_row(found) - by_row(plain)).max() > 0.01  # the control
    assert work.num_new == len(np.unique(CANDIDATES)) + len(TWO) + 3
