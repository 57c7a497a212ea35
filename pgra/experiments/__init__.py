"""Experiments over runs: grids, streams with a memory, label consistency."""

from dataclasses import dataclass

from pgra.config import Arguments, Rule, arg
from pgra.errors import ConfigError


@dataclass(kw_only=True)
class SeriesArguments(Arguments):
    """Several runs in one command."""

    GROUP = "Training"

    seeds: list[int] | None = arg(
        None,
        "Run once with each of these seeds, such as 0 1 2: of the reader (example order, "
        "dropout), or of the exemplars, and show mean and spread; over --seed.",
        decides=False,
        is_common=True,
    )

    def check(self) -> None:
        values = self.seeds or []
        for value in values:
            Rule(least=0, most=(1 << 32) - 1).check("seeds", value)
        if len(set(values)) < len(values):
            raise ConfigError("seeds holds a number twice: leave one out")
