"""What label a text has, by heads on an LM's prompted states and by the LM's own opinion.

    z(h)   = (h - mean) / spread                     by column, over the training states
    head_l = argmin_W  mean_i -log softmax(W z(h_l(x_i)))[y_i] + penalty / 2 |W|^2
    p_lm   = mean_l softmax(head_l(x))               at several depths l, read in one pass
    p_word = softmax(o(x) - mean of o over texts)    o: logits of the label words, h(x) U[words]
    p(y|x) ~ exp(a log p_lm + b log p_word + c log p_encoder + bias[y])

Cho et al. 2023 ("Prompt-Augmented Linear Probing", arXiv 2212.10873, section 3) probe states after
the task's prompt like this. The opinion less its mean over unlabelled texts is Zhou et al. 2024
("Batch Calibration", arXiv 2309.17249, eq. 5). Cross-validation chooses the penalties; a, b, c and
the biases are fitted to what the heads say of examples that they have not seen.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pgra.arrays import Scores, Vectors, log_softmax
from pgra.data.text import copy_key
from pgra.lm.prefix import StateColumns
from pgra.types import Example

logger = logging.getLogger(__name__)

Doubles = npt.NDArray[np.float64]
Targets = npt.NDArray[np.intp]

_FOLDS = 5
_LEAST_TEXTS = 2  # of a label, for a head
_LEAST_JOINED = 4  # of each label: of fewer all views weigh the same
_LEAST_CHANCE = 1e-9
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


@dataclass(frozen=True)
class Head:
    """A fitted head, and those of the folds.

    Attributes:
        stats: Mean and spread of the training states by column, (2, H).
        weights: (F + 1, C, H + 1), the bias at the end: each fitted without one of F folds, then
            that of all examples.
    """

    stats: Vectors
    weights: Vectors


def fit_head(states: Vectors, targets: Targets, num_labels: int, folds: Targets) -> Head:
    """Fit a head to states (n, H) and label numbers (n,); cross-validation chooses the penalty."""
    stats = column_stats(states)
    # The fit lies in the space of the examples: as many columns as there are examples are enough.
    values = ((states - stats[0]) / stats[1]).astype(np.float64)
    _, _, basis = np.linalg.svd(values, full_matrices=False)
    reduced = values @ basis.T
    paths = [
        _fit_path(reduced[folds != fold], targets[folds != fold], num_labels)
        for fold in range(folds.max() + 1)
    ]  # by fold, then penalty
    losses = np.empty((len(_PENALTIES), len(targets)))
    for fold, path in enumerate(paths):
        mine = np.flatnonzero(folds == fold)
        for number, weights in enumerate(path):
            chances = log_softmax(reduced[mine] @ weights[:, :-1].T + weights[:, -1])
            losses[number, mine] = -chances[np.arange(len(mine)), targets[mine]]
    best = int(losses.mean(axis=1).argmin())
    chosen = [*(path[best] for path in paths), _fit_path(reduced, targets, num_labels)[best]]
    whole = [np.column_stack([fit[:, :-1] @ basis, fit[:, -1]]) for fit in chosen]
    return Head(stats, np.stack(whole).astype(np.float32))


@dataclass(frozen=True, kw_only=True)
class LabelModel:
    """Gives texts' labels by heads on blocks of their states, and by the LM's opinion.

    Attributes:
        widths: Columns of each block, (L,).
        has_encoder: Whether the last block is the encoder's, ().
        stats: Mean and spread of the training states by column, (2, W).
        weights: (F + 1, C, W), of the heads without one of F folds each, then of all examples.
        biases: (F + 1, L, C), of the same heads.
        words: As of `StateColumns`; (0, 0) where there is no opinion.
        prior: Mean logits of the label words, (C,).
        is_rare: Whether a label has too few examples for a head, (C,); the opinion gives its
            chance.
        join: Weights of the views, (V,): the LM's heads, the encoder's, the opinion.
        shift: Added to each label's score, (C,).
    """

    widths: Targets
    has_encoder: npt.NDArray[np.bool_]
    stats: Vectors
    weights: Vectors
    biases: Vectors
    words: Vectors
    prior: Vectors
    is_rare: npt.NDArray[np.bool_]
    join: Vectors
    shift: Vectors

    @property
    def num_folds(self) -> int:
        return len(self.weights) - 1

    def score(self, states: Vectors, folds: Targets | None = None) -> Scores:
        """Return the log-probability of each label, (n, C).

        `folds` (n,) name the fold whose heads have not seen a text; None: those of all examples.
        """
        views = self.views(states, folds)
        scores: Scores = log_softmax(np.tensordot(self.join, views, axes=1) + self.shift)
        return scores

    def views(self, states: Vectors, folds: Targets | None = None) -> Scores:
        """Return the log-probabilities of each view, (V, n, C)."""
        if folds is None:
            folds = np.full(len(states), self.num_folds)
        starts = np.cumsum([0, *self.widths])
        num_depths = len(self.widths) - int(self.has_encoder)
        opinion = self._opinion(states[:, : starts[num_depths]])
        chances = [self._head_chances(states, folds, block) for block in range(len(self.widths))]
        of_views = [chances[:num_depths], chances[num_depths:]]
        views = [self._with_rare(np.mean(view, axis=0), opinion) for view in of_views if view]
        if opinion is not None:
            views.append(opinion)
        logs: Scores = np.log(np.maximum(views, _LEAST_CHANCE)).astype(np.float32)
        return logs

    def _head_chances(self, states: Vectors, folds: Targets, block: int) -> Vectors:
        """Return the probabilities by one block's head, (n, C)."""
        start = int(self.widths[:block].sum())
        columns = slice(start, start + int(self.widths[block]))
        values = (states[:, columns] - self.stats[0, columns]) / self.stats[1, columns]
        logits = np.empty((len(states), len(self.prior)), np.float32)
        for fold in np.unique(folds):
            weights = np.column_stack([self.weights[fold][:, columns], self.biases[fold, block]])
            logits[folds == fold] = affine(values[folds == fold], weights)
        logits[:, self.is_rare] = -np.inf
        if self.is_rare.all():
            logits[:] = 0
        return softmax(logits)

    def _opinion(self, states: Vectors) -> Vectors | None:
        if not self.words.size:
            return None
        return softmax(word_logits(states, self.words) - self.prior)

    def _with_rare(self, chances: Vectors, opinion: Vectors | None) -> Vectors:
        """Give the labels without a head the opinion's share."""
        if opinion is None or not self.is_rare.any() or self.is_rare.all():
            return chances
        rare = np.where(self.is_rare, opinion, 0)
        return rare + chances * (1 - rare.sum(axis=1, keepdims=True))


def word_logits(states: Vectors, words: Vectors) -> Vectors:
    """Return the logits of label words, (n, C), of states whose last columns are the LM's last."""
    return affine(states[:, states.shape[1] + 1 - words.shape[1] :], words)


def softmax(logits: Vectors) -> Vectors:
    """Return the probabilities of each row, (n, C)."""
    chances: Vectors = np.exp(log_softmax(logits))
    return chances


@dataclass(frozen=True)
class Fit:
    """A fitted model, and what it says of the examples that it was fitted to.

    Attributes:
        folds: Each example's fold, (n,).
        scores: Log-probabilities by the heads that have not seen the example, (n, C).
        is_right: Whether these decide rightly, (n,).
    """

    model: LabelModel
    folds: Targets
    scores: Scores
    is_right: npt.NDArray[np.bool_]


def fit_labels(
    states: Vectors, columns: StateColumns, examples: Sequence[Example], labels: Sequence[str]
) -> Fit:
    """Fit heads, opinion and their weights to labelled examples and their states, (n, W)."""
    targets = np.array([labels.index(str(example.label)) for example in examples], np.intp)
    texts = [example.text for example in examples]
    counts = count_texts(labels, examples)
    is_rare = np.array([counts[label] < _LEAST_TEXTS for label in labels])
    known = np.flatnonzero(~is_rare)
    has_head = ~is_rare[targets]
    folds = np.zeros(len(texts), np.intp)
    if len(known):
        learned = [text for text, has in zip(texts, has_head, strict=True) if has]
        folds[has_head] = stratified_folds(targets[has_head], learned)
    num_folds = int(folds.max()) + 1
    weights = np.zeros((num_folds + 1, len(labels), states.shape[1]), np.float32)
    biases = np.zeros((num_folds + 1, len(columns.widths), len(labels)), np.float32)
    ends = np.cumsum(columns.widths)
    for block, end in enumerate(ends if len(known) else ()):
        here = slice(end - columns.widths[block], end)
        places = np.searchsorted(known, targets[has_head])
        head = fit_head(states[has_head, here], places, len(known), folds[has_head])
        weights[:, known, here] = head.weights[:, :, :-1]
        biases[:, block, known] = head.weights[:, :, -1]
    num_columns = ends[-1 - columns.has_encoder]
    words = np.empty((0, 0), np.float32)
    prior = np.zeros(len(labels), np.float32)
    if columns.words is not None:
        words = columns.words
        prior = word_logits(states[:, :num_columns], words).mean(axis=0, dtype=np.float64)
    num_views = 1 + columns.has_encoder + bool(words.size)
    model = LabelModel(
        widths=np.array(columns.widths, np.intp),
        has_encoder=np.array(columns.has_encoder),
        stats=column_stats(states),
        weights=weights,
        biases=biases,
        words=words,
        prior=prior.astype(np.float32),
        is_rare=is_rare,
        join=np.ones(num_views, np.float32),
        shift=np.zeros(len(labels), np.float32),
    )
    if min(counts[label] for label in labels) >= _LEAST_JOINED:
        join, shift = fit_join(model.views(states, folds), targets)
        model = replace(model, join=join, shift=shift)
    scores = model.score(states, folds)
    is_right = scores.argmax(axis=1) == targets
    accuracy = 100 * is_right.mean()
    logger.info("head: decides %.1f %% of %d held-out examples rightly", accuracy, len(targets))
    return Fit(model, folds, scores, is_right)


def fit_join(views: Scores, targets: Targets) -> tuple[Vectors, Vectors]:
    """Return the weights of views (V,) and a label bias (C,) that make the labels most likely.

    `views` are log-probabilities (V, n, C). The priors are normal with variance 1, of weights
    around 1, the product of all views, and of biases around 0.
    """
    from scipy.optimize import minimize  # a third of a second to import

    count = len(views)
    values = views.astype(np.float64)
    truth = np.eye(views.shape[2])[targets]

    def loss(fit: Doubles) -> tuple[float, Doubles]:
        chances = log_softmax(np.tensordot(fit[:count], values, axes=1) + fit[count:])
        errors = np.exp(chances) - truth
        away = fit - centre
        slope = np.concatenate([(values * errors).sum(axis=(1, 2)), errors.sum(axis=0)])
        return float(away @ away / 2 - (chances * truth).sum()), slope + away

    centre = np.concatenate([np.ones(count), np.zeros(views.shape[2])])
    bounds = [(0, None)] * count + [(None, None)] * views.shape[2]
    fit = minimize(loss, centre, jac=True, bounds=bounds).x.astype(np.float32)
    return fit[:count], fit[count:]


def count_texts(labels: Sequence[str], examples: Sequence[Example]) -> dict[str, int]:
    """Return how many different texts each label has."""
    texts: dict[str, set[str]] = {label: set() for label in labels}
    for example in examples:
        texts[str(example.label)].add(copy_key(example.text))
    return {label: len(different) for label, different in texts.items()}


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
