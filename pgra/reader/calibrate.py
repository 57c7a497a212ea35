"""Labels and probabilities out of scores, and one temperature fitted on the dev examples.

Guo et al. 2017, "On Calibration of Modern Neural Networks", section 4.2: of the ways they compare,
the one with a single parameter is the best or nearly so, and it changes no decision. No torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pgra.core import Prediction, Scores, log_softmax
from pgra.errors import ModelError

LEAST_EXAMPLES = 50  # with 50, accuracy itself is unsure by 0.07 (one sigma)
# Temperatures lie between 1 / LARGEST and LARGEST. A fit at the upper border counts: the reader
# is sure and wrong. One at the lower does not: all dev examples are right, and too few.
LARGEST = 10.0


def decide(
    example_ids: Sequence[str],
    scores: Scores,
    labels: Sequence[str],
    *,
    temperature: float = 1.0,
) -> list[Prediction]:
    """Take each example's best label, ties by the task's order; scores are (B, C) float32.

    A NaN is a ModelError. Probabilities are the softmax of scores divided by the temperature.
    """
    if np.isnan(scores).any():
        name = example_ids[int(np.isnan(scores).any(axis=1).argmax())]
        raise ModelError(f"the reader's scores of example '{name}' are NaN: its weights are broken")
    best, chances = scores.argmax(axis=1), label_chances(scores, temperature)
    return [
        Prediction(name, labels[best[i]], dict(zip(labels, map(float, row), strict=True)))
        for i, (name, row) in enumerate(zip(example_ids, chances, strict=True))
    ]


def label_chances(scores: Scores, temperature: float = 1.0) -> npt.NDArray[np.float64]:
    """Return the softmax over labels of scores divided by a temperature, (B, C)."""
    logits = (scores - scores.max(axis=1, keepdims=True)).astype(np.float64) / temperature
    weights = np.exp(logits)
    chances: npt.NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
    return chances


def negative_log_likelihood(
    scores: Scores, truth: Sequence[int], *, temperature: float = 1.0
) -> float:
    """Return the mean of -log p of the true labels, columns of the finite scores (B, C)."""
    chances = log_softmax(scores.astype(np.float64) / temperature)
    return float(-chances[np.arange(len(chances)), list(truth)].mean())


@dataclass(frozen=True)
class Calibration:
    """A reader's temperature, by which scores are divided before the softmax over labels.

    Attributes:
        num_examples: Dev examples that it was fitted on, 0 if it was not.
        note: Why it is 1, or that it is the largest; None if it is neither.
    """

    temperature: float = 1.0
    num_examples: int = 0
    note: str | None = None


def fit_temperature(scores: Scores, truth: Sequence[int]) -> Calibration:
    """Fit the temperature that makes the true labels most likely (Guo et al. 2017, eq. 9).

    `truth` has the true labels' columns of scores (B, C). With too few examples, or if no other
    temperature is better, it is 1, with a note.
    """
    from scipy.optimize import minimize_scalar  # a third of a second to import

    count, border = len(truth), math.log(LARGEST)
    if count < LEAST_EXAMPLES:
        return _uncalibrated(
            f"{count} dev examples are too few to fit it (at least {LEAST_EXAMPLES})"
        )

    def loss(log_temperature: float) -> float:
        return negative_log_likelihood(scores, truth, temperature=math.exp(log_temperature))

    # In 1/T the loss is convex, so in log T it has one valley.
    best = float(minimize_scalar(loss, bounds=(-border, border), method="bounded").x)
    if not loss(best) < loss(0.0):
        return _uncalibrated(f"no other is better on the {count} dev examples")
    if best < 0.01 - border:
        return _uncalibrated(f"the {count} dev examples are too easy to name another")
    if best > border - 0.01:
        note = f"temperature is {LARGEST:g}, the largest: probabilities mean little"
        return Calibration(LARGEST, count, note)
    return Calibration(math.exp(best), count)


def _uncalibrated(why: str) -> Calibration:
    return Calibration(note=f"probabilities are not calibrated, temperature is 1: {why}")
