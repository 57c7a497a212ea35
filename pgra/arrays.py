"""Types of arrays, and what is computed on them.

Axes: B queries, K candidates a query, P corpus passages, D width.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]  # of a corpus, (B, K)
Scores = npt.NDArray[np.float32]  # (B, K), higher is better
Vectors = npt.NDArray[np.float32]  # (P, D)
Counts = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
Masks = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]  # of any type and shape


def log_softmax(logits: Array) -> Array:
    """Return the logarithm of the softmax of each row, (B, C), in the dtype of the logits."""
    logits = logits - logits.max(axis=1, keepdims=True)
    chances: Array = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return chances


def unit(values: Vectors) -> Vectors:
    """Return values (n, D) over their lengths; those of length 0 stay."""
    lengths: Vectors = np.linalg.norm(values, axis=1, keepdims=True).astype(np.float32)
    lengths[lengths == 0] = 1
    return values / lengths
