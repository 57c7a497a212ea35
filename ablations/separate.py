"""Inputs of several segments an example, which a T5 reads one by one, and their scores combined."""

from dataclasses import dataclass
from itertools import chain

import numpy as np

from pgra.arrays import Scores, Values
from pgra.context import ALONE, Context
from pgra.reader.inputs import TokenizedInputs
from pgra.reader.predict import T5Classifier


@dataclass(frozen=True)
class SeparateInputs(TokenizedInputs):
    """A split's examples whose segments are read one by one, and their scores combined.

    LM-BFF averages them (Gao et al. 2021, section 6.1), RAG sums (Lewis et al. 2020, section 2.1).
    `log_weights` are log p(segment | example), (S,) float64, for a sum of probabilities; None for
    the mean of log-probabilities.
    """

    log_weights: Values | None = None

    def alone(self) -> TokenizedInputs:
        """Return each segment as an example of its own, under its example's name."""
        owners = np.repeat(np.arange(len(self)), self._counts()).tolist()
        return TokenizedInputs(
            [self.example_ids[owner] for owner in owners],
            [self.labels[owner] for owner in owners],
            self.targets,
            [(segment,) for segment in chain.from_iterable(self.segments)],
        )

    def _counts(self) -> list[int]:
        return [len(segments) for segments in self.segments]

    def combine(self, scores: Scores) -> Scores:
        """Combine segments' log-probabilities of each label, (S, C), to their examples', (B, C).

        Either their mean, the log of their geometric mean up to what all labels share; or with
        weights the log of the sum of weight times probability.
        """
        counts = np.array(self._counts())
        starts = np.cumsum(counts) - counts
        values = scores.astype(np.float64)
        if self.log_weights is None:
            combined = np.add.reduceat(values, starts) / counts[:, None]
        else:
            combined = np.logaddexp.reduceat(values + self.log_weights[:, None], starts)
        return np.asarray(combined, np.float32)


class SeparateClassifier(T5Classifier):
    """A T5 that decides an example by the scores of its segments, each read alone."""

    def score(self, inputs: TokenizedInputs, context: Context = ALONE) -> Scores:
        if isinstance(inputs, SeparateInputs):
            return inputs.combine(super().score(inputs.alone(), context))
        return super().score(inputs, context)
