"""KATE's kNN baseline: the target that most of a query's neighbors have, without an LM.

Liu et al. 2022, section 3.2: "majority voting among the k examples' targets"; of a tie "the target
of the example most similar to the test sentence".
"""

from collections import Counter
from collections.abc import Sequence


def majority(targets: Sequence[str]) -> str:
    """Give the most frequent target; of a tie the one that stands first, being the nearest's.

    Args:
        targets: Of a query's neighbors, nearest first; at least one.
    """
    votes = Counter(targets)
    most = max(votes.values())
    return next(target for target in targets if votes[target] == most)


def vote_shares(targets: Sequence[str], names: Sequence[str]) -> list[float]:
    """Give the share of the votes that each name has, in the order of names."""
    votes = Counter(targets)
    return [votes[name] / len(targets) for name in names]
