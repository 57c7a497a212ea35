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

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pgra.arrays import Indices, Masks, Scores, Values, Vectors, log_softmax
from pgra.data.text import copy_key
from pgra.errors import ConfigError
from pgra.lm.prefix import StateColumns
from pgra.types import Example

_FOLDS = 5
_LEAST_TEXTS = 2  # of a label, for a head
_LEAST_JOINED = 4  # examples of each label: of fewer all views weigh the same
_WEIGHT = 0.5  # of a view, where nothing else is known
_LEAST_CHANCE = 1e-9
_NO_WORDS: Vectors = np.empty((0, 0), np.float32)
_SEED = 0
_PENALTIES = 10.0 ** np.arange(2, -4.5, -0.5)  # the strongest first: each start is the last fit
_ROUNDING = 1e-6  # of a column's largest value: less spread than this is float32's own


def column_stats(values: Vectors) -> Vectors:
    """Return mean and standard deviation by column, (2, D); 1 where a column does not vary."""
    mean = values.mean(axis=0, dtype=np.float64)
    spread = values.std(axis=0, dtype=np.float64)
    varies = spread > _ROUNDING * np.abs(values).max(axis=0)
    return np.stack([mean, np.where(varies, spread, 1)]).astype(np.float32)


def standardize(values: Vectors, stats: Vectors) -> Vectors:
    """Return values (n, D) less the mean of each column, over its spread; see `column_stats`."""
    standard: Vectors = (values - stats[0]) / stats[1]
    return standard


def affine(values: Vectors, weights: Vectors) -> Vectors:
    """Return W v + b for each value, (n, C), with weights (C, D + 1) whose last column is b.

    The last digits do not depend on the number of values, as a matrix product's do.
    """
    products = [np.vecdot(values, row) for row in weights[:, :-1]]
    return np.stack(products, axis=1) + weights[:, -1]


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
    penalty: float


def fit_head(
    states: Vectors, targets: Indices, num_labels: int, folds: Indices, num_folds: int
) -> Head:
    """Fit a head to states (n, H) and label numbers (n,); cross-validation chooses the penalty."""
    stats = column_stats(states)
    # The fit lies in the space of the examples: as many columns as there are examples are enough.
    values = standardize(states, stats).astype(np.float64)
    _, _, basis = np.linalg.svd(values, full_matrices=False)
    reduced = values @ basis.T
    paths = [
        _fit_path(reduced[folds != fold], targets[folds != fold], num_labels)
        for fold in range(num_folds)
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
    return Head(stats, np.stack(whole).astype(np.float32), float(_PENALTIES[best]))


@dataclass(frozen=True, kw_only=True)
class LabelModel:
    """Gives texts' labels by heads on blocks of their states, and by the LM's opinion.

    Attributes:
        widths: Columns of each block, (L,).
        has_encoder: Whether the last block is the encoder's, ().
        stats: Mean and spread of the training states by column, (2, W).
        weights: (F + 1, C, W), of the heads without one of F folds each, then of all examples.
        biases: (F + 1, L, C), of the same heads.
        has_head: Whether a block's head knows a label, (L, C); the opinion gives the others'
            chance.
        words: As of `StateColumns`; (0, 0) where there is no opinion.
        prior: Mean logits of the label words, (C,).
        join: Weights of the views, (V,): the LM's heads, the encoder's, the opinion.
        shift: Added to each label's score, (C,).
    """

    widths: Indices
    has_encoder: Masks
    stats: Vectors
    weights: Vectors
    biases: Vectors
    has_head: Masks
    words: Vectors
    prior: Vectors
    join: Vectors
    shift: Vectors

    @property
    def num_folds(self) -> int:
        return len(self.weights) - 1

    @property
    def has_opinion(self) -> bool:
        return self.words.size > 0

    @property
    def num_depths(self) -> int:
        return len(self.widths) - int(self.has_encoder)

    def score(self, states: Vectors, folds: Indices | None = None) -> Scores:
        """Return the log-probability of each label, (n, C).

        `folds` (n,) name the fold whose heads have not seen a text; None: those of all examples.
        """
        views = self.views(states, folds)
        return log_softmax(np.tensordot(self.join, views, axes=1) + self.shift)

    def views(self, states: Vectors, folds: Indices | None = None) -> Scores:
        """Return the log-probabilities of each view, (V, n, C)."""
        if folds is None:
            folds = np.full(len(states), self.num_folds)
        opinion = None
        if self.has_opinion:
            opinion = softmax(self.opinion(states) - self.prior)
        heads = [
            self._head_chances(states, folds, block, opinion) for block in range(len(self.widths))
        ]
        views = []
        if self.num_depths:
            views.append(np.mean(heads[: self.num_depths], axis=0))
        views += heads[self.num_depths :]
        if opinion is not None:
            views.append(opinion)
        return np.log(np.maximum(views, _LEAST_CHANCE)).astype(np.float32)

    def opinion(self, states: Vectors) -> Vectors:
        """Return the LM's logits of the label words, (n, C)."""
        end = int(self.widths[: self.num_depths].sum())
        return affine(states[:, end + 1 - self.words.shape[1] : end], self.words)

    def _head_chances(
        self, states: Vectors, folds: Indices, block: int, opinion: Vectors | None
    ) -> Vectors:
        """Return the probabilities by one block's head, (n, C)."""
        has_head = self.has_head[block]
        if not has_head.any():
            return np.full((len(states), len(has_head)), 1 / len(has_head), np.float32)
        columns = block_columns(self.widths, block)
        values = standardize(states[:, columns], self.stats[:, columns])
        logits = np.empty((len(states), len(has_head)), np.float32)
        for fold in np.unique(folds):
            weights = np.column_stack([self.weights[fold][:, columns], self.biases[fold, block]])
            logits[folds == fold] = affine(values[folds == fold], weights)
        logits[:, ~has_head] = -np.inf
        chances = softmax(logits)
        if opinion is None or has_head.all():
            return chances
        others = np.where(has_head, 0, opinion)
        with_others: Vectors = others + chances * (1 - others.sum(axis=1, keepdims=True))
        return with_others


def block_columns(widths: Sequence[int] | Indices, block: int) -> slice:
    """Return the columns of a block."""
    start = int(sum(widths[:block]))
    return slice(start, start + int(widths[block]))


def softmax(logits: Vectors) -> Vectors:
    """Return the probabilities of each row, (n, C)."""
    chances: Vectors = np.exp(log_softmax(logits))
    return chances


@dataclass(frozen=True)
class Fit:
    """A fitted model, and what it says of the examples that it was fitted to.

    Attributes:
        folds: Each example's fold, (n,).
        targets: Each example's label, (n,).
        scores: Log-probabilities by the heads that have not seen the example, (n, C).
    """

    model: LabelModel
    folds: Indices
    targets: Indices
    scores: Scores

    @property
    def is_right(self) -> Masks:
        """Whether the scores decide rightly, (n,)."""
        is_right: Masks = self.scores.argmax(axis=1) == self.targets
        return is_right


def fit_labels(
    states: Vectors,
    columns: StateColumns,
    examples: Sequence[Example],
    labels: Sequence[str],
    num_shown: int = 0,
) -> Fit:
    """Fit heads, opinion and their weights to labelled examples and their states, (n, W).

    The last `num_shown` examples stand in the LM's prompt: the encoder's head alone learns from
    them.

    Raises:
        ConfigError: If a label has no example, and the LM no opinion.
    """
    count = len(examples) - num_shown
    targets = np.array([labels.index(str(example.label)) for example in examples], np.intp)
    texts = [copy_key(example.text) for example in examples]
    folds = stratified_folds(targets, texts)
    num_folds = int(folds.max(initial=0)) + 1
    has_opinion = columns.words is not None
    num_blocks = len(columns.widths)
    width = sum(columns.widths)
    nothing = np.zeros(len(labels), np.float32)
    weights = np.zeros((num_folds + 1, len(labels), width), np.float32)
    stats = np.repeat(np.array([[0], [1]], np.float32), width, axis=1)
    biases = np.zeros((num_folds + 1, num_blocks, len(labels)), np.float32)
    has_head = np.zeros((num_blocks, len(labels)), bool)
    words = _NO_WORDS if columns.words is None else columns.words
    model = LabelModel(
        widths=np.array(columns.widths, np.intp),
        has_encoder=np.array(columns.has_encoder),
        stats=stats,
        weights=weights,
        biases=biases,
        has_head=has_head,
        words=words,
        prior=nothing,
        join=nothing,
        shift=nothing,
    )
    for block in range(num_blocks):
        is_of_encoder = block == model.num_depths
        rows = np.arange(len(examples) if is_of_encoder else count)
        least = _LEAST_TEXTS if has_opinion else 1
        known = [
            label
            for label in range(len(labels))
            if len({texts[row] for row in rows if targets[row] == label}) >= least
        ]
        if not has_opinion and len(known) < len(labels):
            rare = next(name for label, name in enumerate(labels) if label not in known)
            raise ConfigError(f"label {rare!r} has no example, and this model no opinion: give one")
        rows = rows[np.isin(targets[rows], known)]
        if not len(rows):
            continue
        here = block_columns(columns.widths, block)
        places = np.searchsorted(known, targets[rows])
        head = fit_head(states[rows, here], places, len(known), folds[rows], num_folds)
        model.stats[:, here] = head.stats
        model.weights[:, known, here] = head.weights[:, :, :-1]
        model.biases[:, block, known] = head.weights[:, :, -1]
        model.has_head[block, known] = True
    learned = states[:count]
    if has_opinion and count:
        prior = model.opinion(learned).mean(axis=0, dtype=np.float64)
        model = replace(model, prior=prior.astype(np.float32))
    views = model.views(learned, folds[:count])
    fewest = np.bincount(targets[:count], minlength=len(labels)).min()
    if fewest < _LEAST_JOINED:
        model = replace(model, join=np.full(len(views), _WEIGHT, np.float32))
    else:
        join, shift = fit_join(views, targets[:count])
        model = replace(model, join=join, shift=shift)
    return Fit(model, folds[:count], targets[:count], model.score(learned, folds[:count]))


def fit_join(views: Scores, targets: Indices) -> tuple[Vectors, Vectors]:
    """Return the weights of views (V,) and a label bias (C,) that make the labels most likely.

    `views` are log-probabilities (V, n, C). The priors are normal: of weights with mean 1/2 and
    variance 1/4, of biases with mean 0 and variance 1.
    """
    from scipy.optimize import minimize  # a third of a second to import

    count = len(views)
    num_labels = views.shape[2]
    values = views.astype(np.float64)
    truth = np.eye(num_labels)[targets]
    centre = np.concatenate([np.full(count, _WEIGHT), np.zeros(num_labels)])
    strength = np.concatenate([np.full(count, 1 / _WEIGHT**2), np.ones(num_labels)])

    def loss(fit: Values) -> tuple[float, Values]:
        chances = log_softmax(np.tensordot(fit[:count], values, axes=1) + fit[count:])
        errors = np.exp(chances) - truth
        away = strength * (fit - centre)
        slope = np.concatenate([(values * errors).sum(axis=(1, 2)), errors.sum(axis=0)])
        return float(away @ (fit - centre) / 2 - (chances * truth).sum()), slope + away

    bounds = [(0, None)] * count + [(None, None)] * num_labels
    fit = minimize(loss, centre, jac=True, bounds=bounds).x.astype(np.float32)
    return fit[:count], fit[count:]


def stratified_folds(targets: Indices, texts: Sequence[str]) -> Indices:
    """Deal texts out to five folds by chance, each label evenly: the fold of each, (n,).

    Equal texts, of `copy_key`, are in one fold: a head that has seen one of them knows the others.
    """
    numbers: dict[str, int] = {}
    copies = [numbers.setdefault(text, len(numbers)) for text in texts]
    _, firsts = np.unique(copies, return_index=True)
    order = np.random.default_rng(_SEED).permutation(len(firsts))
    order = order[np.argsort(targets[firsts][order], kind="stable")]
    folds = np.empty(len(firsts), np.intp)
    folds[order] = np.arange(len(firsts)) % _FOLDS
    return folds[copies]


def _fit_path(values: Values, targets: Indices, num_labels: int) -> list[Values]:
    """Fit with each penalty: (C, D + 1) each."""
    from scipy.optimize import minimize  # a third of a second to import

    truth = np.eye(num_labels)[targets]
    shape = (num_labels, values.shape[1] + 1)

    def loss(flat: Values, penalty: float) -> tuple[float, Values]:
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
