"""Experiments over runs: grids, searches, streams with a memory, label consistency."""

import math
from dataclasses import dataclass

from pgra.config import Arguments, Rule, arg
from pgra.errors import ConfigError

PAPER_LEARNING_RATES = (1e-5, 2e-5, 5e-5, 8e-5, 1e-4)
PAPER_BATCH_SIZES = (4, 8)
SEARCHES = ("grid", "none")


@dataclass(kw_only=True)
class SeriesArguments(Arguments):
    """Several runs in one command."""

    GROUP = "Training"

    seeds: list[int] | None = arg(
        None,
        "Run once with each of these seeds, such as 0 1 2: of the reader (example order, "
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
    search_learning_rates: list[float] | None = arg(
        None,
        "Learning rates to try; default: the paper's 1e-5 2e-5 5e-5 8e-5 1e-4.",
        needs={"search": "grid"},
        decides=False,
    )
    search_batch_sizes: list[int] | None = arg(
        None,
        "Values of total_train_batch_size to try; default: the paper's 4 8.",
        needs={"search": "grid"},
        decides=False,
    )

    def check(self) -> None:
        for name, rule in (
            ("seeds", Rule(least=0, most=(1 << 32) - 1)),
            ("search_learning_rates", Rule(above=0, below=math.inf)),
            ("search_batch_sizes", Rule(least=1)),
        ):
            values = getattr(self, name) or []
            for value in values:
                rule.check(name, value)
            if len(set(values)) < len(values):
                raise ConfigError(f"{name} holds a number twice: leave one out")
