"""How well heads decide examples that they have not seen, beside simpler ways."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from pgra.arrays import Vectors
from pgra.report.metrics import compare_means
from pgra.rerank.head import Fit
from pgra.types import Example

ERROR = 0.05  # of what is decided without a person
_NOISE = 0.05  # p of a difference


@dataclass(frozen=True)
class HeldOut:
    """What is known of heads by cross-validation.

    Attributes:
        accuracy: Share decided rightly.
        interval: Of 95 % for it (Clopper and Pearson 1934).
        count: Examples.
        decidable: Largest share, the surest first, of which surely (95 %, one side) at most 5 %
            are decided wrongly.
        threshold: Least probability of a decision among these; 1 where there are none.
        rivals: Accuracy of simpler ways, and p of their difference, by name.
    """

    accuracy: float
    interval: tuple[float, float]
    count: int
    decidable: float
    threshold: float
    rivals: dict[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, fit: Fit) -> Self:
        """Measure a fit to one example or more."""
        from scipy.stats import beta, binomtest  # a third of a second to import

        count = len(fit.is_right)
        ours = binomtest(int(fit.is_right.sum()), count).proportion_ci()
        chances = np.exp(fit.scores.max(axis=1))
        order = np.argsort(-chances, kind="stable")
        wrong = np.cumsum(~fit.is_right[order])
        sizes = np.arange(1, count + 1)
        most_wrong = beta.ppf(0.95, wrong + 1, np.maximum(sizes - wrong, 1e-9))
        fine = np.flatnonzero(most_wrong <= ERROR)
        decidable = int(fine[-1]) + 1 if len(fine) else 0
        threshold = float(chances[order[decidable - 1]]) if decidable else 1.0
        interval = (float(ours.low), float(ours.high))
        accuracy = float(fit.is_right.mean())
        return cls(accuracy, interval, count, decidable / count, threshold)

    def beside(self, fit: Fit, states: Vectors, examples: Sequence[Example], name: str) -> Self:
        """Add what nearest neighbours and the head alone decide rightly on an encoder's vectors.

        These are the last columns of the states (n, W) that were fitted; `name` is the encoder's.
        Without vectors nothing is added.
        """
        model = fit.model
        if not model.has_encoder:
            return self
        vectors = states[:, -int(model.widths[-1]) :]
        names = np.array([str(example.label) for example in examples])
        products = vectors @ vectors.T
        products[fit.folds[:, None] == fit.folds] = -np.inf
        ways = {
            f"nearest neighbour on {name} (--method knn)": names[products.argmax(axis=1)] == names
        }
        if model.num_depths:
            head = model.views(states, fit.folds)[1]
            ways[f"head on {name} alone (--lm {name})"] = head.argmax(axis=1) == fit.targets
        ours = fit.is_right.astype(np.float64)
        for way, is_right in ways.items():
            difference = compare_means(is_right.astype(np.float64), ours, seed=0)
            self.rivals[way] = (float(is_right.mean()), difference.p)
        return self

    def __str__(self) -> str:
        """Describe it in a few lines."""
        low, high = self.interval
        errors = f"with at most {ERROR:.0%} errors"
        decidable = f"none can surely be decided {errors}"
        if self.decidable:
            decidable = (
                f"{self.decidable:.0%} can be decided {errors}: those of probability "
                f"{self.threshold:.2f} or more"
            )
        lines = [
            f"{self.accuracy:.1%} of {self.count} held-out examples are decided rightly "
            f"(95 %: {low:.1%} to {high:.1%})",
            decidable,
        ]
        for name, (accuracy, p) in self.rivals.items():
            line = f"{name}: {accuracy:.1%}"
            if accuracy > self.accuracy and p < _NOISE:
                line += f", better (p {p:.3f}): use that"
            lines.append(line)
        return "\n".join(lines)
