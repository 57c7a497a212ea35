"""A search over learning rate and batch size, decided on the dev set alone.

    NAME/lr5e-05-batch8-seed0/   a run each: trained, and measured on the dev set
    NAME/search.json             what was tried, and the winner

Only the winner is measured on the test set. An interrupted search resumes: finished points are
reused, the interrupted one continues from its last checkpoint.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from pgra.artifacts import write_json
from pgra.core import ALONE, Context
from pgra.errors import ConfigError
from pgra.experiments import PAPER_BATCH_SIZES, PAPER_LEARNING_RATES, SeriesArguments
from pgra.methods.arguments import RunArguments
from pgra.run_folder import remove_checkpoints
from pgra.runs import (
    Outcome,
    Prepared,
    Summary,
    check_series,
    lock_run,
    series_folder,
    sum_up,
    variant,
)

logger = logging.getLogger(__name__)

SEARCH_FILE = "search.json"


@dataclass(frozen=True)
class SearchResult:
    """A finished search.

    Attributes:
        record: Content of `search.json`: what was tried, and the winner's run.
        outcome: The winner on the test set, with the first seed.
        seeds: With all seeds; None if there is one only.
    """

    record: Mapping[str, Any]
    outcome: Outcome
    seeds: Summary | None


def search_runs(
    args: RunArguments, series: SeriesArguments, context: Context = ALONE
) -> SearchResult:
    """Try points with the first seed, and measure the winner on the test set, with every seed.

    Each run gets a folder inside that of the arguments.

    Raises:
        ArtifactError: If a point's folder holds another run.
        ConfigError: If nothing would be measured on the dev set.
    """
    seeds = series.seeds or [args.seed]
    root = series_folder(str(args.folder), seeds)
    check_series(root)
    _check_search(args, series)
    with lock_run(root, context):
        return _search(args, series, seeds, root, context)


def _search(
    args: RunArguments, series: SeriesArguments, seeds: Sequence[int], root: Path, context: Context
) -> SearchResult:

    def arguments(rate: float, size: int, seed: int = seeds[0]) -> RunArguments:
        name = f"lr{rate:g}-batch{size}-seed{seed}"
        batch = {"total_train_batch_size": size, "per_device_train_batch_size": None}
        return variant(args, root / name, learning_rate=rate, **batch, seed=seed)

    rates = series.search_learning_rates or PAPER_LEARNING_RATES
    sizes = series.search_batch_sizes or PAPER_BATCH_SIZES
    points = sorted(product(rates, sizes))
    known = [arguments(*point) for point in points]
    prepared = Prepared(known[0], context, known)
    tried = [_attempt(prepared, own, *point) for own, point in zip(known, points, strict=True)]
    winner = max(tried, key=lambda one: float(one["dev_value"]))  # the first of equals
    best = winner["learning_rate"], winner["total_train_batch_size"]
    # The first look at the test set.
    outcomes = {seed: prepared.run(arguments(*best, seed)) for seed in seeds}
    outcome = outcomes[seeds[0]]
    names = ("metric", "value", "interval_95", "n")
    record = {
        "search": series.search,
        "metric": f"dev {outcome.training.get('metric')}",
        "tried": tried,
        "winner": winner["folder"],
        "test": {name: outcome.metrics[name] for name in names},
    }
    if context.is_main:
        write_json(root / SEARCH_FILE, record)
    context.barrier()
    summary = None if len(seeds) == 1 else sum_up(outcomes, root, args, context)
    return SearchResult(record, outcome, summary)


def _check_search(args: RunArguments, series: SeriesArguments) -> None:
    if not args["training"].load_best_model_at_end:
        raise ConfigError(
            f"search '{series.search}' decides on the dev set, which --eval_steps 0 does not "
            "measure, or --no_load_best_model_at_end leaves aside: leave both out"
        )


def _attempt(prepared: Prepared, args: RunArguments, rate: float, size: int) -> dict[str, Any]:
    """Train with a point; return the point, and the best measurement on the dev set."""
    outcome = prepared.run(args, is_measured=False)
    metric, value = outcome.training["metric"], float(outcome.training["value"])
    if prepared.context.worker.is_main:
        remove_checkpoints(outcome.folder)
    prepared.context.barrier()
    logger.info("search: %s gives dev %s %.4f", outcome.folder.name, metric, value)
    return {
        "learning_rate": rate,
        "total_train_batch_size": size,
        "dev_value": value,
        "step": int(outcome.training["step"]),
        "folder": outcome.folder.name,
    }
