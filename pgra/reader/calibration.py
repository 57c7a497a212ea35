"""Takes a reader's label bias out, and makes probabilities of its scores.

    p(label | text) = softmax((s + bias) / temperature)      s: the reader's log-probabilities

A reader of few training steps, and a frozen LM, lean to some labels whatever the text says. The
bias is fitted in one of two ways:

- dev: to labelled texts that were not learned from, together with a scale (vector scaling of Guo et
  al. 2017, "On Calibration of Modern Neural Networks", section 4.2, with one scale for all labels);
- batch: to texts whose labels are not looked at, so that the mean prediction over them is the
  training set's shares of labels. Zhou et al. 2024 ("Batch Calibration", arXiv 2309.17249, eq. 5)
  take one step towards equal shares.

The temperature is fitted to the dev examples (Guo et al. 2017, eq. 9); it changes no decision.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pgra.arrays import Indices, Scores, Values, log_softmax
from pgra.errors import ConfigError, ModelError
from pgra.types import Prediction

LEAST_A_LABEL = 16  # dev examples of each label that a bias is fitted to
LEAST_TEXTS = 50  # whose mean prediction says something
MOST_TEXTS = 512  # training texts that are scored for it
LEAST_EXAMPLES = 50  # with 50, accuracy itself is unsure by 0.07 (one sigma)
# Temperatures lie between 1 / LARGEST and LARGEST. A fit at the upper border counts: the reader
# is sure and wrong. One at the lower does not: all dev examples are right, and too easy.
LARGEST = 10.0
_LEAST_SEEN = 20  # texts: of fewer a share says little
_LEANS = 0.9  # share of one label among decisions from which a reader leans to it
_USUAL = 0.75  # share of a label that makes such a share no surprise


@dataclass(frozen=True)
class Calibration:
    """What is done to a reader's scores before the softmax over labels.

    Attributes:
        temperature: Divides scores.
        num_examples: Dev examples that it was fitted on, 0 if it was not.
        note: Why it is 1; None where it was fitted.
        bias: Added to the scores of each label, in the task's order; empty: not fitted.
        bias_from: "dev", "batch", or why it was not fitted.
        is_bias_out: Whether the bias is added; else it is only reported.
    """

    temperature: float = 1.0
    num_examples: int = 0
    note: str | None = None
    bias: tuple[float, ...] = ()
    bias_from: str = ""
    is_bias_out: bool = True

    def __post_init__(self) -> None:
        is_finite = all(map(math.isfinite, (self.temperature, *self.bias)))
        if not is_finite or self.temperature <= 0:
            raise ValueError(
                f"temperature {self.temperature} and bias {list(self.bias)} calibrate nothing: all "
                "must be finite, and the temperature above 0"
            )

    def apply(self, scores: Scores) -> Scores:
        """Return the logits that decide for scores, both (B, C) float32."""
        if self.bias and self.is_bias_out:
            scores = scores + np.array(self.bias, np.float32)
        return scores / np.float32(self.temperature)

    def rematched(self, texts: Scores, shares: Values) -> "Calibration":
        """Return the same with the bias of these texts, if they are enough."""
        if len(texts) < LEAST_TEXTS:
            return self
        return replace(self, bias=tuple(match_shares(texts, shares)), bias_from="batch")


def fit_calibration(
    label_bias: str,
    dev: Scores,
    truth: Sequence[int],
    shares: Values,
    score_texts: Callable[[], Scores],
) -> Calibration:
    """Fit bias and temperature.

    Args:
        label_bias: "dev"; "batch"; "auto", which is "dev" where each label has enough dev
            examples, else "batch"; or "none", which fits the same, and decides without it.
        dev: Scores of the dev examples, (B, C).
        truth: Their labels' columns.
        shares: The labels' shares among the training examples, (C,).
        score_texts: Returns the scores of texts whose labels are not looked at.

    Raises:
        ConfigError: If "dev" is asked for and a label has too few dev examples.
        ModelError: If a score is not finite.
    """
    columns = np.asarray(truth, np.intp)
    least = int(np.bincount(columns, minlength=len(shares)).min())
    if label_bias == "dev" and least < LEAST_A_LABEL:
        raise ConfigError(
            f"label_bias dev takes {LEAST_A_LABEL} dev examples of each label, and one label has "
            f"{least}: give more, or --label_bias batch"
        )
    bias = None
    bias_from = "dev"
    if label_bias != "batch" and least >= LEAST_A_LABEL:
        scale, added = fit_scale_and_bias(dev, columns)
        bias = added / scale if scale > 0 else None  # else the scores say nothing
    if bias is None:
        texts = score_texts()
        if len(texts) < LEAST_TEXTS:
            why = f"{len(texts)} texts are too few to see a label bias ({LEAST_TEXTS})"
            return replace(fit_temperature(dev, truth), bias_from=why)
        bias_from = "batch"
        bias = match_shares(texts, shares)
    is_bias_out = label_bias != "none"
    return replace(
        fit_temperature(dev + bias if is_bias_out else dev, truth),
        bias=tuple((bias - bias.mean()).tolist()),
        bias_from=bias_from,
        is_bias_out=is_bias_out,
    )


def match_shares(scores: Scores, shares: Values) -> Values:
    """Return the bias with which the mean prediction over texts is `shares`, (C,).

    It is the minimum of a convex function, whose slope is the mean prediction less the shares. A
    ModelError if a score, (B, C), is not finite.
    """
    from scipy.optimize import minimize  # a third of a second to import

    values = centred(scores)

    def loss(bias: Values) -> tuple[float, Values]:
        logits = values + bias
        chances = log_softmax(logits)
        total = (logits - chances)[:, 0].mean()  # the mean log of the sum over labels
        return float(total - shares @ bias), np.exp(chances).mean(axis=0) - shares

    bias = minimize(loss, -values.mean(axis=0), jac=True, method="BFGS").x
    return np.asarray(bias - bias.mean(), np.float64)


def find_lean(scores: Scores, shares: Values) -> int | None:
    """Return the label that nearly all texts are decided for, and that is rarer in training.

    `scores` are (B, C), `shares` the labels' shares among the training examples, (C,).
    """
    counts = np.bincount(scores.argmax(axis=1))
    label = int(counts.argmax())
    is_lean = counts[label] >= max(_LEAST_SEEN, _LEANS * len(scores)) and shares[label] < _USUAL
    return label if is_lean else None


def fit_scale_and_bias(
    scores: Scores, targets: Indices, prior: float = 1.0
) -> tuple[float, Values]:
    """Return a and b of softmax(a s + b) that make the labels `targets` (n,) most likely.

    The priors of a times the scores' spread, at least 0, and of each b are normal with variance
    1 / `prior`, where scores (n, C) have their labels' means taken off. A ModelError if one is not
    finite.
    """
    from scipy.optimize import minimize  # a third of a second to import

    values = centred(scores)
    means = values.mean(axis=0)
    values = values - means
    spread = float(values.std()) or 1.0
    values /= spread
    bounds = [(0, None), *[(None, None)] * values.shape[1]]

    def loss(fit: Values) -> float:
        chances = log_softmax(fit[0] * values + fit[1:])
        return float(prior * fit @ fit / 2 - chances[np.arange(len(values)), targets].sum())

    fit = minimize(loss, np.zeros(len(bounds)), bounds=bounds).x
    scale = float(fit[0]) / spread
    return scale, np.asarray(fit[1:] - scale * means, np.float64)


def centred(scores: Scores) -> Values:
    """Return scores less each text's mean, in double precision; a ModelError if not all are finite.

    What decides stays the same.
    """
    if not np.isfinite(scores).all():
        raise ModelError("the reader's scores are not finite: its weights are broken")
    values = scores.astype(np.float64)
    values -= values.mean(axis=1, keepdims=True)
    return values


def negative_log_likelihood(
    scores: Scores | Values, truth: Sequence[int], *, temperature: float = 1.0
) -> float:
    """Return the mean of -log p of the true labels, columns of the finite scores (B, C)."""
    chances = log_softmax(scores.astype(np.float64) / temperature)
    return float(-chances[np.arange(len(chances)), list(truth)].mean())


def fit_temperature(scores: Scores | Values, truth: Sequence[int]) -> Calibration:
    """Fit the temperature that makes the true labels most likely (Guo et al. 2017, eq. 9).

    `truth` has the true labels' columns of scores (B, C). With too few examples, or if no other
    temperature is better, it is 1, with a note.
    """
    from scipy.optimize import minimize_scalar  # a third of a second to import

    count = len(truth)
    border = math.log(LARGEST)

    def loss(log_temperature: float) -> float:
        return negative_log_likelihood(scores, truth, temperature=math.exp(log_temperature))

    why = f"{count} dev examples are too few to fit it (at least {LEAST_EXAMPLES})"
    if count >= LEAST_EXAMPLES:
        # In 1/T the loss is convex, so in log T it has one valley.
        best = float(minimize_scalar(loss, bounds=(-border, border), method="bounded").x)
        if best >= 0.01 - border and loss(best) < loss(0.0):
            return Calibration(LARGEST if best > border - 0.01 else math.exp(best), count)
        why = f"no other is better on the {count} dev examples"
    return Calibration(note=f"probabilities are not calibrated, temperature is 1: {why}")


def decide(example_ids: Sequence[str], scores: Scores, labels: Sequence[str]) -> list[Prediction]:
    """Take each example's best label, ties by the task's order; scores are (B, C) float32.

    A NaN is a ModelError. Probabilities are the softmax of scores.
    """
    is_broken = np.isnan(scores).any(axis=1)
    if is_broken.any():
        name = example_ids[int(is_broken.argmax())]
        raise ModelError(f"the reader's scores of example '{name}' are NaN: its weights are broken")
    chances = np.exp(log_softmax(scores.astype(np.float64))).tolist()
    lines = zip(example_ids, scores.argmax(axis=1), chances, strict=True)
    return [
        Prediction(name, labels[best], dict(zip(labels, row, strict=True)))
        for name, best, row in lines
    ]
