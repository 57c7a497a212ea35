"""How far a reader's probabilities can be believed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pgra.reader.predict import label_chances
from pgra.reader.temperature import negative_log_likelihood
from pgra.types import Scores

BINS = 15


@dataclass(frozen=True)
class Reliability:
    """How well probabilities fit what happened.

    Attributes:
        nll: Mean of -log p of the true labels.
        ece: Expected calibration error, in 0..1.
    """

    nll: float
    ece: float


def measure_reliability(
    scores: Scores, truth: Sequence[int], *, temperature: float = 1.0
) -> Reliability:
    """Measure scores divided by a temperature.

    Args:
        scores: Log-probability of each of C labels, (B, C), all finite.
        truth: The true label's column, of each example.
        temperature: What scores are divided by before the softmax.
    """
    return Reliability(
        negative_log_likelihood(scores, truth, temperature=temperature),
        expected_calibration_error(label_chances(scores, temperature), truth),
    )


def expected_calibration_error(
    chances: npt.NDArray[np.float64], truth: Sequence[int], *, bins: int = BINS
) -> float:
    """Give the mean gap between how sure a reader is and how often it is right.

    Guo et al. 2017, eq. 3: examples are put into bins by the probability of the label decided for,
    which is the confidence. The bins are of equal width, bin m of M from (m - 1) / M, which it does
    not hold, to m / M, which it holds. Each bin's gap between its mean confidence and its share of
    right decisions counts by its share of the examples.

    Args:
        chances: Probability of each of C labels, (B, C).
        truth: The true label's column, of each example.
        bins: How many bins.
    """
    decided = chances.argmax(axis=1)
    confidence = chances.max(axis=1)
    places = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    # n / B times |mean confidence - share right| is |sum of both's differences| / B.
    gaps = np.bincount(places, weights=confidence - (decided == np.asarray(truth)), minlength=bins)
    return float(np.abs(gaps).sum() / len(chances))
