"""How alike two states are: each way changes both, and the score is their inner product.

    dot              the states as they are (Guo et al. 2023, eq. 3)
    cosine           states of length 1 (their code)
    whitened         each column less its mean, over its standard deviation
    whitened_cosine  the same, then of length 1 (as Timkey and van Schijndel 2021)
    label_words      the LM's own log-chances of the label words, each less its mean, over its
                     standard deviation

Hidden states have a large part in common, and a few columns far larger than the rest, so that
products tell little of the texts; mean and standard deviation take both away. And an LM under a few
shots may answer one label for nearly all texts: of the log-chances, only how they differ from what
is usual tells them apart (akin to Zhao et al. 2021, "Calibrate before use").

Passages have the means of passages, and queries those of queries: the two are of different kinds
of text, and what all queries have in common says nothing of which passage is like one of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from pgra.rerank.storage import Floats

_ROUNDING = 1e-6  # of a column's largest value: less spread than this is float32's own


@dataclass(frozen=True)
class Way:
    """What a similarity does to states, in this order.

    Attributes:
        reads_words: Whether states become log-chances of label words.
        is_fitted: Whether mean and standard deviation are taken away.
        is_unit: Whether the length is.
    """

    reads_words: bool = False
    is_fitted: bool = False
    is_unit: bool = False


WAYS: Mapping[str, Way] = {
    "cosine": Way(is_unit=True),
    "dot": Way(),
    "label_words": Way(reads_words=True, is_fitted=True),
    "whitened": Way(is_fitted=True),
    "whitened_cosine": Way(is_fitted=True, is_unit=True),
}


@dataclass(frozen=True)
class Usual:
    """What values are like: mean and standard deviation, by column.

    Attributes:
        mean: (D,) float32.
        spread: (D,) float32; 1 where a column does not vary.
    """

    mean: Floats
    spread: Floats

    @classmethod
    def of(cls, values: Floats) -> Self:
        """Measure values (n, D)."""
        mean = values.mean(axis=0, dtype=np.float64)
        spread = values.std(axis=0, dtype=np.float64)
        varies = spread > _ROUNDING * np.abs(values).max(axis=0)
        return cls(mean.astype(np.float32), np.where(varies, spread, 1).astype(np.float32))

    def standardise(self, values: Floats) -> Floats:
        """Give values (n, D) less the mean, over the spread."""
        standard: Floats = (values - self.mean) / self.spread
        return standard


@dataclass(frozen=True)
class WordRows:
    """What an LM's head has of the label words.

    Attributes:
        weight: (C, H) float32, a row for the token that each word begins with.
        bias: (C,) float32.
    """

    weight: Floats
    bias: Floats

    def log_chances(self, states: Floats) -> Floats:
        """Give the log-probability of each word among these words, (n, C), behind states (n, H)."""
        # A matrix product's last digits depend on how many states there are; these do not.
        logits: Floats = np.stack([np.vecdot(states, row) for row in self.weight], 1) + self.bias
        logits -= logits.max(axis=1, keepdims=True)
        chances: Floats = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return chances


@dataclass(frozen=True, kw_only=True)
class Similarity:
    """One way, ready to use.

    Attributes:
        words: The head's rows of the label words; None: states stay states.
        passages: What passages are like; None where nothing is taken away.
        queries: What queries are like.
        is_unit: Whether each is divided by its length.
    """

    words: WordRows | None = None
    passages: Usual | None = None
    queries: Usual | None = None
    is_unit: bool = False

    def of_passages(self, states: Floats, norms: Floats) -> Floats:
        """Give what is compared with a query.

        Args:
            states: (n, H).
            norms: (n,), of these states.

        Returns:
            (n, D): H columns, or one a label word.
        """
        return self._change(states, norms, self.passages)

    def of_queries(self, states: Floats, norms: Floats) -> Floats:
        """Give what is compared with passages; see `of_passages`."""
        return self._change(states, norms, self.queries)

    def values(self, states: Floats) -> Floats:
        """Give what mean and spread are taken of: the states, or log-chances of words."""
        return states if self.words is None else self.words.log_chances(states)

    def _change(self, states: Floats, norms: Floats, usual: Usual | None) -> Floats:
        values = self.values(states)
        if usual is not None:
            values = usual.standardise(values)
        if not self.is_unit:
            return values
        lengths = norms if values is states else np.linalg.norm(values, axis=1)
        unit: Floats = values / np.where(lengths == 0, 1, lengths).astype(np.float32)[:, None]
        return unit


PLAIN: Mapping[str, Similarity] = {
    name: Similarity(is_unit=way.is_unit) for name, way in WAYS.items() if not way.is_fitted
}
"""Those that need nothing but the states."""
