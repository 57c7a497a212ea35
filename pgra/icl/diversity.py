"""Exemplars that are near a query, and unlike each other."""

import numpy as np
import numpy.typing as npt

from pgra.types import Scores


def marginal_relevance(
    relevance: Scores, among: npt.NDArray[np.float32], count: int, *, diversity: float
) -> list[int]:
    """Choose by maximal marginal relevance (Carbonell and Goldstein 1998, section 2).

    One after the other: the most relevant, then what maximises
    lambda * relevance - (1 - lambda) * the largest likeness to what is chosen.

    Args:
        relevance: Likeness to the query, (n,).
        among: Likeness to each other, (n, n).
        count: How many to choose.
        diversity: Lambda; 1 chooses by relevance alone.

    Returns:
        Their places in the order of choice; of equals the first.
    """
    chosen: list[int] = []
    closest = np.full(len(relevance), -np.inf, dtype=np.float32)
    gain = np.asarray(relevance, np.float64)
    for _ in range(min(count, len(relevance))):
        gain[chosen] = -np.inf
        best = int(gain.argmax())
        chosen.append(best)
        closest = np.maximum(closest, among[best])
        gain = diversity * np.asarray(relevance, np.float64) - (1 - diversity) * closest
    return chosen
