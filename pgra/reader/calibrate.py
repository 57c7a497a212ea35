"""Labels and probabilities out of scores, and one temperature fitted on the dev examples.

Guo et al. 2017, "On Calibration of Modern Neural Networks", section 4.2: of all ways they compare,
the one with a single parameter is the best or nearly so, and it changes no decision. Light: no
torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pgra.core import Prediction, Scores
from pgra.errors import ModelError

LEAST_EXAMPLES = 50
"""Fewer tell too little: the share of right answers of 50 is itself unsure by 0.07 (one sigma)."""
LARGEST = 10.0
"""Temperatures lie between 1 / LARGEST and LARGEST. The upper border is taken: of a reader that is
sure and wrong nothing better can be said. The lower is not: if all dev examples are right, a
smaller one is better without end, and says only that there were few."""


def decide(
    example_ids: Sequence[str],
    scores: Scores,
    labels: Sequence[str],
    *,
    temperature: float = 1.0,
) -> list[Prediction]:
    """Take each example's best label, ties by the task's order.

    Args:
        example_ids: Names of the B examples.
        scores: Log-probability of each of C labels, (B, C) float32.
        labels: Their names.
        temperature: What scores are divided by before the softmax.

    Raises:
        ModelError: If a score is NaN.
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
    """Return the mean of -log p of the true labels.

    Args:
        scores: Log-probability of each of C labels, (B, C), all finite.
        truth: The true label's column, of each example.
        temperature: What scores are divided by.
    """
    logits = scores.astype(np.float64) / temperature
    logits -= logits.max(axis=1, keepdims=True)
    chosen = logits[np.arange(len(logits)), list(truth)]
    return float((np.log(np.exp(logits).sum(axis=1)) - chosen).mean())


@dataclass(frozen=True)
class Calibration:
    """How sure a reader may be.

    Attributes:
        temperature: What scores are divided by before the softmax over labels; 1 changes nothing.
        num_examples: Dev examples that it was fitted on, 0 if it was not.
        note: Why it is 1, where it was not fitted or did not help; or that it is the largest.
    """

    temperature: float = 1.0
    num_examples: int = 0
    note: str | None = None


def fit_temperature(scores: Scores, truth: Sequence[int]) -> Calibration:
    """Fit the temperature that makes the true labels most likely (Guo et al. 2017, eq. 9).

    Args:
        scores: Log-probability of each of C labels, (B, C).
        truth: The true label's column, of each example.

    Returns:
        A temperature of 1 with a note, where there are too few examples or no other is better.
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
        note = f"temperature is {LARGEST:g}, the largest: probabilities tell little"
        return Calibration(LARGEST, count, note)
    return Calibration(math.exp(best), count)


def _uncalibrated(why: str) -> Calibration:
    return Calibration(note=f"probabilities are not calibrated, temperature is 1: {why}")
