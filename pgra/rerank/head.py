"""A logistic head on an LM's prompted states: the LM's knowledge of the label, from examples.

    z(h) = (h - mean) / spread                       by column, over the training states
    head = argmin_W  mean_i -log softmax(W z(h_i))[y_i] + penalty / 2 |W|^2

Cho et al. 2023 ("Prompt-Augmented Linear Probing", arXiv 2212.10873, section 3) probe states after
the task's prompt like this. Cross-validation chooses the penalty; an example that it was fitted to
is decided by the head of the other folds.
"""

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pgra.arrays import Vectors, log_softmax
from pgra.data.text import copy_key
from pgra.errors import ConfigError
from pgra.types import Example

logger = logging.getLogger(__name__)

Doubles = npt.NDArray[np.float64]
Targets = npt.NDArray[np.intp]

_FOLDS = 5
_LEAST_TEXTS = 2  # of each label
_SEED = 0
_PENALTIES = 10.0 ** np.arange(2, -4.5, -0.5)  # the strongest first: each start is the last fit
_ROUNDING = 1e-6  # of a column's largest value: less spread than this is float32's own


def column_stats(values: Vectors) -> Vectors:
    """Return mean and standard deviation by column, (2, D); 1 where a column does not vary."""
    mean = values.mean(axis=0, dtype=np.float64)
    spread = values.std(axis=0, dtype=np.float64)
    varies = spread > _ROUNDING * np.abs(values).max(axis=0)
    return np.stack([mean, np.where(varies, spread, 1)]).astype(np.float32)


def affine(values: Vectors, weights: Vectors) -> Vectors:
    """Return W v + b for each value, (n, C), with weights (C, D + 1) whose last column is b.

    The last digits do not depend on the number of values, as a matrix product's do.
    """
    products = [np.vecdot(values, row) for row in weights[:, :-1]]
    logits: Vectors = np.stack(products, axis=1) + weights[:, -1]
    return logits


def head_logits(states: Vectors, stats: Vectors, weights: Vectors) -> Vectors:
    """Return a head's logits of states (n, H), (n, C), standardized by its stats (2, H)."""
    return affine((states - stats[0]) / stats[1], weights)


@dataclass(frozen=True)
class Head:
    """A fitted head, and those of the folds.

    Attributes:
        stats: Mean and spread of the training states by column, (2, H).
        weights: (C, H + 1), the bias at the end.
        fold_weights: The same, each fitted without one fold, (F, C, H + 1).
        folds: Each training example's fold, (n,).
        is_right: Whether the head that has not seen a training example decides it rightly, (n,).
    """

    stats: Vectors
    weights: Vectors
    fold_weights: Vectors
    folds: Targets
    penalty: float
    is_right: npt.NDArray[np.bool_]


def check_labels(labels: Sequence[str], examples: Sequence[Example]) -> None:
    """Raise a ConfigError that names the labels with fewer than two different texts.

    A head without that single text would have none of its label.
    """
    texts = defaultdict[str, set[str]](set)
    for example in examples:
        texts[str(example.label)].add(copy_key(example.text))
    if rare := [label for label in labels if len(texts[label]) < _LEAST_TEXTS]:
        raise ConfigError(
            "a head learns each label from two different texts or more beside the prompt's, and of "
            f"{len(examples)} examples fewer have the label {', '.join(map(repr, rare))}: "
            "give more, or lower num_exemplars"
        )


def fit_head(states: Vectors, targets: Targets, num_labels: int, texts: Sequence[str]) -> Head:
    """Fit a head to states (n, H) and label numbers (n,); cross-validation chooses the penalty.

    For the `texts` and labels see `stratified_folds` and `check_labels`.
    """
    stats = column_stats(states)
    # The fit lies in the space of the examples: as many columns as there are examples are enough.
    values = ((states - stats[0]) / stats[1]).astype(np.float64)
    _, _, basis = np.linalg.svd(values, full_matrices=False)
    reduced = values @ basis.T
    folds = stratified_folds(targets, texts)
    paths = [
        _fit_path(reduced[folds != fold], targets[folds != fold], num_labels)
        for fold in range(folds.max() + 1)
    ]  # by fold, then penalty
    losses = np.empty((len(_PENALTIES), len(targets)))
    right = np.empty(losses.shape, bool)
    for fold, path in enumerate(paths):
        mine = np.flatnonzero(folds == fold)
        for number, weights in enumerate(path):
            chances = log_softmax(reduced[mine] @ weights[:, :-1].T + weights[:, -1])
            losses[number, mine] = -chances[np.arange(len(mine)), targets[mine]]
            right[number, mine] = chances.argmax(axis=1) == targets[mine]
    best = int(losses.mean(axis=1).argmin())
    fitted = _fit_path(reduced, targets, num_labels)[best]

    def whole(weights: Doubles) -> Vectors:
        return np.column_stack([weights[:, :-1] @ basis, weights[:, -1]]).astype(np.float32)

    return Head(
        stats,
        whole(fitted),
        np.stack([whole(path[best]) for path in paths]),
        folds,
        float(_PENALTIES[best]),
        right[best],
    )


def fit_labels(states: Vectors, examples: Sequence[Example], labels: Sequence[str]) -> Head:
    """Fit a head to the states of labelled examples, (n, H)."""
    targets = np.array([labels.index(str(example.label)) for example in examples])
    head = fit_head(states, targets, len(labels), [example.text for example in examples])
    accuracy = 100 * head.is_right.mean()
    logger.info("head: decides %.1f %% of %d held-out examples rightly", accuracy, len(targets))
    return head


def stratified_folds(targets: Targets, texts: Sequence[str]) -> Targets:
    """Deal texts out to five folds by chance, each label evenly: the fold of each, (n,).

    Copies of a text are in one fold: a head that has seen one of them knows the others.
    """
    numbers: dict[str, int] = {}
    copies = [numbers.setdefault(copy_key(text), len(numbers)) for text in texts]
    _, firsts = np.unique(copies, return_index=True)
    order = np.random.default_rng(_SEED).permutation(len(firsts))
    order = order[np.argsort(targets[firsts][order], kind="stable")]
    folds = np.empty(len(firsts), np.intp)
    folds[order] = np.arange(len(firsts)) % _FOLDS
    return folds[copies]


def _fit_path(values: Doubles, targets: Targets, num_labels: int) -> list[Doubles]:
    """Fit with each penalty: (C, D + 1) each."""
    from scipy.optimize import minimize  # a third of a second to import

    truth = np.eye(num_labels)[targets]
    shape = (num_labels, values.shape[1] + 1)

    def loss(flat: Doubles, penalty: float) -> tuple[float, Doubles]:
        weights = flat.reshape(shape)
        chances = log_softmax(values @ weights[:, :-1].T + weights[:, -1])
        errors = (np.exp(chances) - truth) / len(values)
        slope = np.column_stack([errors.T @ values + penalty * weights[:, :-1], errors.sum(axis=0)])
        size = penalty / 2 * float((weights[:, :-1] ** 2).sum())
        return -float((chances * truth).sum()) / len(values) + size, slope.ravel()

    path = []
    start = np.zeros(shape[0] * shape[1])
    for penalty in _PENALTIES:
        fit = minimize(loss, start, (penalty,), "L-BFGS-B", jac=True, options={"maxiter": 200})
        start = fit.x
        path.append(start.reshape(shape))
    return path
