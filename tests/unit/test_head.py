"""A head on states: scikit-learn's optimum, and of its own examples what it says unseen."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from pgra.arrays import log_softmax
from pgra.rerank.head import affine, fit_head

RNG = np.random.default_rng(5)


def ids(targets):
    return [f"text {number}" for number in range(len(targets))]


def clusters(n=90, width=12, labels=3, spread=1.5):
    targets = np.arange(n) % labels
    centres = RNG.normal(size=(labels, width))
    states = centres[targets] + RNG.normal(size=(n, width)) * spread
    return (10 + states * np.linspace(0.1, 50, width)).astype(np.float32), targets


@pytest.mark.parametrize(("n", "width"), [(90, 12), (40, 120)])  # more columns than examples, too
def test_it_is_the_optimum_of_scikit_learn(n, width):
    states, targets = clusters(n, width)
    head = fit_head(states, targets, 3, ids(targets))
    values = (states - head.stats[0]) / head.stats[1]
    theirs = LogisticRegression(C=1 / (head.penalty * n), max_iter=5000, tol=1e-8)
    theirs.fit(values.astype(np.float64), targets)
    ours = np.exp(log_softmax(affine(values, head.weights)))
    np.testing.assert_allclose(ours, theirs.predict_proba(values), atol=5e-3)


def test_labels_by_chance_are_not_known_of_unseen_texts():
    states, targets = clusters(60, 200)
    RNG.shuffle(targets)
    texts = ids(targets)
    states, targets = np.tile(states, (2, 1)), np.tile(targets, 2)  # twice each: copies
    head = fit_head(states, targets, 3, [*texts, *map(str.upper, texts)])
    assert head.is_right.mean() < 0.5
    assert fit_head(states, targets, 3, ids(targets)).is_right.mean() > 0.7  # control: by rows
    known, labels = clusters(120, 20, spread=0.3)
    assert fit_head(known, labels, 3, ids(labels)).is_right.mean() > 0.95  # control
    values = (states - head.stats[0]) / head.stats[1]
    said = [
        affine(values[i : i + 1], head.fold_weights[f]).argmax() for i, f in enumerate(head.folds)
    ]
    np.testing.assert_array_equal(np.array(said) == targets, head.is_right)
