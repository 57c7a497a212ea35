"""Arguments of several trainings in one command: seeds, and a search over the Trainer's values."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pgra.config import at_least, choose
from pgra.errors import ConfigError

PAPER_LEARNING_RATES = (1e-5, 2e-5, 5e-5, 8e-5, 1e-4)
PAPER_BATCH_SIZES = (4, 8)
SEARCHES = ("grid", "none", "optuna")
_MOST_SEED = (1 << 32) - 1
_Number = TypeVar("_Number", int, float)


def _arg(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(kw_only=True)
class SeriesArguments:
    """Several trainings in one command."""

    seeds: list[str] | None = field(
        default=None,
        metadata={
            "help": "Train once with each of these seeds of the reader (example order, dropout), "
            "such as 0 1 2 or 0,1,2. Mean and spread go to summary.json; over --seed."
        },
    )
    search: str = _arg(
        "none",
        "Try learning rates and batch sizes, keep the best on the dev set, and measure only that "
        "one on the test set: none, grid (all pairs), or optuna (needs pip install 'pgra[search]'; "
        "the learning rate is any between the smallest and the largest).",
    )
    search_learning_rates: list[str] | None = field(
        default=None,
        metadata={"help": "Learning rates to try; default: the paper's 1e-5 2e-5 5e-5 8e-5 1e-4."},
    )
    search_batch_sizes: list[str] | None = field(
        default=None,
        metadata={
            "help": "Values of per_device_train_batch_size to try; default: the paper's 4 8."
        },
    )
    num_trials: int | None = _arg(
        None, "Trainings of the search by optuna, those before a resume included; default: 20."
    )

    def __post_init__(self) -> None:
        """Refuse what is no list of numbers, and what nothing asks for."""
        choose("search", self.search, SEARCHES)
        at_least("num_trials", self.num_trials, 1)
        self.seed_list()
        self.learning_rates()
        self.batch_sizes()
        if self.search == "none":
            for name in ("search_learning_rates", "search_batch_sizes"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name} needs a search: add --search grid, or leave it out")
        if self.search != "optuna" and self.num_trials is not None:
            raise ConfigError("num_trials needs --search optuna: the grid tries all pairs")

    @property
    def is_single(self) -> bool:
        """Say whether one training is all that is asked for."""
        return self.seeds is None and self.search == "none"

    def seed_list(self) -> list[int]:
        """Give the seeds; none if one training is asked for.

        Raises:
            ConfigError: If one is no seed, or stands twice.
        """
        seeds = _numbers("seeds", self.seeds or (), int)
        for seed in seeds:
            if not 0 <= seed <= _MOST_SEED:
                raise ConfigError(f"seeds holds {seed}: each must lie between 0 and {_MOST_SEED}")
        return seeds

    def learning_rates(self) -> list[float]:
        """Give the learning rates to try.

        Raises:
            ConfigError: If one is not above 0, or stands twice.
        """
        given = self.search_learning_rates or PAPER_LEARNING_RATES
        rates = _numbers("search_learning_rates", given, float)
        for rate in rates:
            if not 0 < rate < math.inf:
                raise ConfigError(f"search_learning_rates holds {rate}: each must be above 0")
        return rates

    def batch_sizes(self) -> list[int]:
        """Give the batch sizes to try.

        Raises:
            ConfigError: If one is below 1, or stands twice.
        """
        sizes = _numbers("search_batch_sizes", self.search_batch_sizes or PAPER_BATCH_SIZES, int)
        for size in sizes:
            at_least("search_batch_sizes", size, 1)
        return sizes


def _numbers(name: str, given: Sequence[object], kind: Callable[[str], _Number]) -> list[_Number]:
    """Read "0 1 2", "0,1,2" and a YAML's list alike."""
    found: list[_Number] = []
    for word in ",".join(str(item) for item in given).split(",") if given else ():
        try:
            value = kind(word)
        except ValueError:
            raise ConfigError(
                f"{name} holds '{word}': give numbers, such as {name} 1 2 or {name} 1,2"
            ) from None
        if value in found:
            raise ConfigError(f"{name} holds {word} twice: leave one out")
        found.append(value)
    return found
