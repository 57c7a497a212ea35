"""What log-odds add to a reader's, in bits (V-information, Xu et al. 2020, arXiv 2002.10689).

    adds = H(label given reader) - H(label given reader and vote)

    H        mean log-loss of the test queries under softmax(a reader + b vote + c), weights and
             one number a label fitted to the queries of other folds

No weight is negative, and a normal prior draws them to a = 1, b = 0 (of a standardised vote) and
c = 0, so that a vote which says nothing is left out. The reader alone gets its a and c too: no gain
is mere calibration, or the test queries' other shares of labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pgra.core import Json
from pgra.errors import ConfigError
from pgra.report.metrics import Difference, compare_means
from pgra.rerank.head import Doubles, Targets, column_stats, log_softmax, stratified_folds

_FOLDS, _FOLD_QUERIES = 10, 5
_SEED = 0


@dataclass(frozen=True, eq=False)
class Added:
    """What log-odds add to a reader's.

    Attributes:
        bits: The mean log-loss that they take away, in bits, with its bootstrap over queries.
        alone: Mean log-loss of the reader alone, in bits.
        accuracy: Share of the queries that reader and they decide rightly together.
        accuracy_alone: The same of the reader alone, with its own weights.
    """

    bits: Difference
    alone: float
    accuracy: float
    accuracy_alone: float

    @property
    def is_sure(self) -> bool:
        """Whether the 95 % interval lies above 0."""
        return self.bits.low > 0

    def as_json(self) -> dict[str, Json]:
        """Return its numbers."""
        gap = self.bits
        return {
            "bits": gap.difference,
            "bits_interval_95": [gap.low, gap.high],
            "bits_p": gap.p,
            "accuracy_with_reader": self.accuracy,
        }


def measure_added(reader: Doubles, vote: Doubles, targets: Targets) -> Added:
    """Measure what a vote adds to a reader (see the module's beginning).

    Args:
        reader: Log-odds of each of C labels, of n queries, (n, C).
        vote: The same of what may be added.
        targets: The number of each query's label, (n,).

    Raises:
        ConfigError: If there are too few queries for two folds.
    """
    alone, both = cross_fit([reader], targets), cross_fit([reader, vote], targets)
    at = np.arange(len(targets))
    losses = [-chances[at, targets] / np.log(2) for chances in (alone, both)]
    return Added(
        compare_means(losses[0], losses[1], seed=_SEED),
        float(losses[0].mean()),
        *(float((chances.argmax(axis=1) == targets).mean()) for chances in (both, alone)),
    )


def num_folds(count: int) -> int:
    """Return how many folds so many queries make.

    Raises:
        ConfigError: If there are too few for two.
    """
    if count < 2 * _FOLD_QUERIES:
        raise ConfigError(
            f"what evidence adds is measured across at least two folds of {_FOLD_QUERIES} test "
            f"queries, and there are {count} in all: give at least {2 * _FOLD_QUERIES}"
        )
    return min(_FOLDS, count // _FOLD_QUERIES)


def cross_fit(parts: Sequence[Doubles], targets: Targets) -> Doubles:
    """Return each query's log-chances by weights fitted to the other folds, (n, C).

    Args:
        parts: Log-odds (n, C) of the reader, and of what is added to it.
        targets: The number of each query's label, (n,).

    Raises:
        ConfigError: If there are too few queries for two folds.
    """
    folds = stratified_folds(targets, num_folds(len(targets)))
    chances = np.empty_like(parts[0])
    for fold in range(folds.max() + 1):
        mine, rest = folds == fold, folds != fold
        told = [parts[0]]
        for part in parts[1:]:
            mean, spread = column_stats(part[rest].astype(np.float32))
            told.append((part - mean) / spread)
        values = np.stack(told, axis=-1)  # (n, C, 1 or 2)
        weights, shifts = _fit(values[rest], targets[rest])
        chances[mine] = log_softmax(values[mine] @ weights + shifts)
    return chances


def _fit(values: Doubles, targets: Targets) -> tuple[Doubles, Doubles]:
    """Return the weights of log-odds (n, C, K), (K,), and what is added to them, (C,)."""
    from scipy.optimize import minimize  # a third of a second to import

    count, num_labels, size = values.shape
    truth = np.eye(num_labels)[targets]
    start = np.eye(size + num_labels)[0]  # the reader as it is, and nothing else

    def loss(found: Doubles) -> tuple[float, Doubles]:
        chances, away = log_softmax(values @ found[:size] + found[size:]), found - start
        errors = np.exp(chances) - truth
        slope = np.append(np.einsum("nc,nck->k", errors, values), errors.sum(axis=0))
        return (away @ away / 2 - (chances * truth).sum()) / count, (slope + away) / count

    # A vote for a label is not taken to speak against it.
    bounds = [(0, None)] * size + [(None, None)] * num_labels
    found: Doubles = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds).x
    return found[:size], found[size:]
