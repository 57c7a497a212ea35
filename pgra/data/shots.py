"""Few-shot splits: so many examples of each label to train on, as many to choose a checkpoint.

Gao et al. 2021, "Making Pre-trained Language Models Better Few-shot Learners", section 3: K
examples a class to train on, and a development set of the same size. Their released draw is made
again: in the files' order the same seed gives the same examples (seen for SST-2, CR and TREC; of
CoLA only for seed 100, their first, since they go on shuffling what the seed before left).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pgra.config import at_least
from pgra.errors import DataError
from pgra.types import Example


@dataclass(frozen=True)
class Shots:
    """A few-shot split.

    Attributes:
        train: K examples of each label, label after label.
        dev: Other K of each label.
    """

    train: list[Example]
    dev: list[Example]


def draw_shots(
    examples: Sequence[Example], labels: Sequence[str], num_shots: int, seed: int
) -> Shots:
    """Shuffle the examples, and take each label's first K and next K.

    Args:
        examples: Labelled; their order matters to the draw.
        labels: The task's.
        num_shots: K.
        seed: Of numpy's old generator, which the original used.

    Raises:
        ConfigError: If K is less than 2: an example's own label needs another one to show.
        DataError: If a label has fewer than 2 K examples.
    """
    at_least("num_shots", num_shots, 2)
    order = list(range(len(examples)))
    np.random.RandomState(seed).shuffle(order)
    groups: dict[str, list[Example]] = {label: [] for label in labels}
    for row in order:
        groups[str(examples[row].label)].append(examples[row])
    for label, group in groups.items():
        if len(group) < 2 * num_shots:
            raise DataError(
                f"label '{label}' has {len(group)} training examples, and num_shots ({num_shots}) "
                f"asks for {2 * num_shots}, half of them to choose a checkpoint on: lower it"
            )
    return Shots(
        [example for group in groups.values() for example in group[:num_shots]],
        [example for group in groups.values() for example in group[num_shots : 2 * num_shots]],
    )


def whole_train(train: Sequence[Example], dev: Sequence[Example]) -> list[Example]:
    """Give a training file's examples in its order, those that were held out of it included.

    Args:
        train: As `load_splits` gives them, with ids "train-ROW".
        dev: The same; one with a file of its own has other ids and is left out.
    """
    rows = {
        int(example.id.rpartition("-")[2]): example
        for example in [*dev, *train]
        if example.id.startswith("train-")
    }
    return [rows[row] for row in sorted(rows)]
