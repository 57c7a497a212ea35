"""Experiments over runs: grids, searches, streams with a memory, label consistency."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pgra.config import Arguments, Rule, arg, list_yamls
from pgra.errors import ConfigError

PAPER_LEARNING_RATES = (1e-5, 2e-5, 5e-5, 8e-5, 1e-4)
PAPER_BATCH_SIZES = (4, 8)
SEARCHES = ("grid", "none")
_Number = TypeVar("_Number", int, float)


def list_grids() -> list[str]:
    """Return the names of the shipped grids."""
    return [name for name in list_yamls("ablations") if not name.startswith("_")]


@dataclass(kw_only=True)
class SeriesArguments(Arguments):
    """Several runs in one command."""

    GROUP = "Training"

    seeds: list[str] | None = arg(
        None,
        "Run once with each of these seeds, such as 0 1 2 or 0,1,2: of the reader (example order, "
        "dropout), or of the exemplars. Mean and spread go to summary.json; over --seed.",
        decides=False,
        is_common=True,
    )
    search: str = arg(
        "none",
        "Try learning rates and batch sizes, keep the best on the dev set, and measure only that "
        "one on the test set: none, or grid (all pairs).",
        choices=SEARCHES,
        decides=False,
    )
    search_learning_rates: list[str] | None = arg(
        None,
        "Learning rates to try; default: the paper's 1e-5 2e-5 5e-5 8e-5 1e-4.",
        needs={"search": "grid"},
        decides=False,
    )
    search_batch_sizes: list[str] | None = arg(
        None,
        "Values of total_train_batch_size to try; default: the paper's 4 8.",
        needs={"search": "grid"},
        decides=False,
    )

    def check(self) -> None:
        """Refuse what is no list of numbers."""
        self.seed_list()
        self.learning_rates()
        self.batch_sizes()

    def seed_list(self) -> list[int]:
        """Return the seeds; none if one training is asked for.

        Raises:
            ConfigError: If one is no seed, or stands twice.
        """
        return _numbers("seeds", self.seeds, int, Rule(least=0, most=(1 << 32) - 1))

    def learning_rates(self) -> list[float]:
        """Return the learning rates to try.

        Raises:
            ConfigError: If one is not above 0, or stands twice.
        """
        given = self.search_learning_rates or PAPER_LEARNING_RATES
        return _numbers("search_learning_rates", given, float, Rule(above=0, below=math.inf))

    def batch_sizes(self) -> list[int]:
        """Return the batch sizes to try.

        Raises:
            ConfigError: If one is below 1, or stands twice.
        """
        given = self.search_batch_sizes or PAPER_BATCH_SIZES
        return _numbers("search_batch_sizes", given, int, Rule(least=1))


def _numbers(
    name: str, given: Sequence[object] | None, kind: Callable[[str], _Number], rule: Rule
) -> list[_Number]:
    """Read "0 1 2", "0,1,2" and a YAML's list alike."""
    found: list[_Number] = []
    for word in ",".join(map(str, given)).split(",") if given else ():
        try:
            value = kind(word)
        except ValueError:
            raise ConfigError(
                f"{name} holds '{word}': give numbers, such as {name} 1 2 or {name} 1,2"
            ) from None
        if value in found:
            raise ConfigError(f"{name} holds {word} twice: leave one out")
        rule.check(name, value)
        found.append(value)
    return found
