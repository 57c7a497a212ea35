"""Inputs whose segments the reader reads each alone; an example's score is made of all of theirs.

Where Fusion-in-Decoder reads an example's segments together, LM-BFF asks about each and averages
(Gao et al. 2021, section 6.1), and RAG sums over them (Lewis et al. 2020, section 2.1).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pgra.reader.tokens import TokenizedInputs
from pgra.types import Scores


@dataclass(frozen=True)
class SeparateInputs(TokenizedInputs):
    """A split's examples, each of whose segments is read alone.

    Attributes:
        log_weights: log p(segment | example), (S,) float64, for a sum of chances; None for the mean
            of log-probabilities.
    """

    log_weights: npt.NDArray[np.float64] | None = None

    @classmethod
    def over(
        cls, inputs: TokenizedInputs, log_weights: npt.NDArray[np.float64] | None = None
    ) -> "SeparateInputs":
        """Take inputs that would be read together.

        Raises:
            ValueError: If there are not as many weights as segments.
        """
        if log_weights is not None and len(log_weights) != len(inputs.segment_ends):
            raise ValueError(f"{len(log_weights)} weights, {len(inputs.segment_ends)} segments")
        return cls(**vars(inputs), log_weights=log_weights)

    def alone(self) -> TokenizedInputs:
        """Give each segment as an example of its own, under its example's name."""
        counts = np.diff(self.example_ends, prepend=0)
        owners = np.repeat(np.arange(len(self)), counts).tolist()
        return TokenizedInputs(
            [self.example_ids[owner] for owner in owners],
            [self.labels[owner] for owner in owners],
            self.targets,
            self.tokens,
            self.segment_ends,
            np.arange(1, len(self.segment_ends) + 1),
        )

    def combine(self, scores: Scores) -> Scores:
        """Make each example's scores of its segments'.

        Args:
            scores: Log-probability of each label given each segment alone, (S, C).

        Returns:
            (B, C): their mean, the log of their geometric mean up to what all labels share; or with
            weights the log of the sum of weight times probability.
        """
        starts = self.example_ends - np.diff(self.example_ends, prepend=0)
        values = scores.astype(np.float64)
        if self.log_weights is None:
            counts = np.diff(self.example_ends, prepend=0)[:, None]
            return (np.add.reduceat(values, starts) / counts).astype(np.float32)
        summed = np.logaddexp.reduceat(values + self.log_weights[:, None], starts)
        return summed.astype(np.float32)
