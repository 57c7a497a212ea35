"""Contextual calibration: what an LM would answer to nothing is taken off its answers.

Zhao et al. 2021, "Calibrate Before Use", section 4: exemplars make an LM lean to some labels,
whatever is asked. Its chances for an input without content show how far; dividing by them makes all
labels equally likely there.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pgra.types import Scores

CONTENT_FREE = ("N/A", "", "[MASK]")
"""The inputs without content of Zhao et al. 2021, section 5.2; their chances are averaged."""


def content_free_fields(inputs: Sequence[str]) -> list[dict[str, str]]:
    """Give the fields of queries without content, one for each of `CONTENT_FREE`.

    Args:
        inputs: The task's inputs.
    """
    return [dict.fromkeys(inputs, text) for text in CONTENT_FREE]


def calibrate(scores: Scores, free: Scores) -> Scores:
    """Divide each label's chance by its chance without content.

    W = diag(p_cf)^-1 and b = 0, section 4 there; both chances are of the labels alone.

    Args:
        scores: Log-probabilities of the labels' words, (B, C).
        free: The same after the inputs without content, (B, 3, C).

    Returns:
        (B, C): logarithms of the chances, which sum to 1.
    """
    chances, bias = _shares(scores), _shares(free).mean(axis=1)
    ratio = np.log(chances) - np.log(np.maximum(bias, np.finfo(np.float64).tiny))
    return np.asarray(ratio - _log_sum(ratio), np.float32)


def _shares(logs: Scores) -> npt.NDArray[np.float64]:
    values = logs.astype(np.float64)
    shares = np.exp(values - _log_sum(values))
    return np.maximum(np.asarray(shares, np.float64), np.finfo(np.float64).tiny)


def _log_sum(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    top = values.max(axis=-1, keepdims=True)
    return np.asarray(top + np.log(np.exp(values - top).sum(axis=-1, keepdims=True)))
