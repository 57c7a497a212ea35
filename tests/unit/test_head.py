"""Heads, opinion and their join: optima of scikit-learn, and what is said of unseen texts."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from pgra.arrays import log_softmax
from pgra.errors import ConfigError
from pgra.lm.prefix import StateColumns
from pgra.methods.held_out import HeldOut
from pgra.rerank.head import Fit, affine, fit_head, fit_join, fit_labels, stratified_folds
from pgra.types import Example

RNG = np.random.default_rng(5)
LABELS = ["a", "b", "c"]


def ids(targets):
    return [f"text {number}" for number in range(len(targets))]


def examples(targets, texts=None):
    named = zip(texts or ids(targets), targets, strict=True)
    return [Example("", {"text": text}, LABELS[target]) for text, target in named]


def clusters(n=90, width=12, labels=3, spread=1.5):
    targets = np.arange(n) % labels
    centres = RNG.normal(size=(labels, width))
    states = centres[targets] + RNG.normal(size=(n, width)) * spread
    return (10 + states * np.linspace(0.1, 50, width)).astype(np.float32), targets


def learned(states, targets, texts=None, **columns):
    columns = StateColumns(columns.pop("widths", [states.shape[1]]), **columns)
    return fit_labels(states, columns, examples(targets, texts), LABELS)


@pytest.mark.parametrize(("n", "width"), [(90, 12), (40, 120)])  # more columns than examples, too
def test_a_head_is_the_optimum_of_scikit_learn(n, width):
    states, targets = clusters(n, width)
    head = fit_head(states, targets, 3, stratified_folds(targets, ids(targets)), 5)
    values = (states - head.stats[0]) / head.stats[1]
    theirs = LogisticRegression(C=1 / (head.penalty * n), max_iter=5000, tol=1e-8)
    theirs.fit(values.astype(np.float64), targets)
    ours = np.exp(log_softmax(affine(values, head.weights[-1])))
    np.testing.assert_allclose(ours, theirs.predict_proba(values), atol=5e-3)


def test_labels_by_chance_are_not_known_of_unseen_texts():
    states, targets = clusters(60, 200)
    RNG.shuffle(targets)
    texts = ids(targets)
    states, targets = np.tile(states, (2, 1)), np.tile(targets, 2)  # twice each: copies
    assert learned(states, targets, [*texts, *map(str.upper, texts)]).is_right.mean() < 0.5
    assert learned(states, targets).is_right.mean() > 0.7  # the control: by rows
    assert learned(*clusters(120, 20, spread=0.3)).is_right.mean() > 0.95  # the control


def test_depths_are_averaged_and_the_opinion_has_no_mean():
    states, targets = clusters(60, 8)
    words = RNG.normal(size=(3, 5)).astype(np.float32)
    fit = learned(states, targets, widths=[4, 4], words=words)
    heads, opinion = np.exp(fit.model.views(states))
    alone = [
        np.exp(log_softmax(affine((part - part.mean(0)) / part.std(0), weights)))
        for part, weights in (
            (
                states[:, :4],
                np.column_stack([fit.model.weights[-1][:, :4], fit.model.biases[-1, 0]]),
            ),
            (
                states[:, 4:],
                np.column_stack([fit.model.weights[-1][:, 4:], fit.model.biases[-1, 1]]),
            ),
        )
    ]
    np.testing.assert_allclose(heads, np.mean(alone, axis=0), atol=1e-4)
    logits = states[:, 4:] @ words[:, :-1].T + words[:, -1]
    expected = np.exp(log_softmax(logits - logits.mean(axis=0)))
    np.testing.assert_allclose(opinion, expected, atol=1e-4)
    shifted = learned(states, targets, widths=[4, 4], words=words + np.eye(5)[4] * 7)
    np.testing.assert_allclose(shifted.scores, fit.scores, atol=1e-3)  # a constant bias is none


def test_the_join_trusts_the_view_that_knows():
    targets = np.arange(200) % 2
    knows = np.where(np.eye(2)[targets] == 1, 0.8, 0.2)
    views = np.log(np.stack([knows, RNG.permutation(knows)])).astype(np.float32)
    (sure, noise), shift = fit_join(views, targets)
    assert sure > 0.9 > 0.2 > noise
    assert fit_join(views[::-1], targets)[0].tolist() == pytest.approx([noise, sure], abs=1e-3)
    assert abs(shift).max() < 0.1
    biased = views + np.log([0.9, 0.1])
    assert np.diff(fit_join(biased, targets)[1]) > 0.5  # the control: a bias is taken out


def test_a_label_of_one_example_is_the_opinions():
    states, _ = clusters(21, 6)
    targets = np.array([0, 1] * 10 + [2])
    words = RNG.normal(size=(3, 7)).astype(np.float32)
    fit = learned(states, targets, words=words)
    heads, opinion = np.exp(fit.model.views(states))
    np.testing.assert_allclose(heads[:, 2], opinion[:, 2], rtol=1e-3)
    np.testing.assert_allclose(heads.sum(axis=1), 1, atol=1e-4)
    assert learned(states, targets).model.has_head.all()  # the control: no opinion, so a head
    with pytest.raises(ConfigError, match="'c' has no example"):
        learned(states[:20], targets[:20])


def test_what_can_be_decided_is_by_hand():
    """Of 100 texts the surest 93 are right but for one: 92 : 1 is surely at most 5 % wrong."""
    chances = np.linspace(0.99, 0.6, 100)
    right = np.ones(100, bool)
    right[[40, 93, 94, 96, 97, 98, 99]] = False
    folds = np.zeros(100, int)
    scores = np.log(np.column_stack([chances, 1 - chances])).astype(np.float32)
    found = HeldOut.of(Fit(None, folds, np.where(right, 0, 1), scores))
    assert (found.accuracy, found.count, found.decidable) == (0.93, 100, 0.93)
    assert found.threshold == pytest.approx(chances[92], abs=1e-6)
    assert found.interval == pytest.approx((0.861, 0.971), abs=1e-3)  # R's binom.test(93, 100)
    few = HeldOut.of(Fit(None, folds[:50], folds[:50], scores[:50]))
    assert few.decidable == 0  # the control: 50 of 50 may be 5.8 % wrong
