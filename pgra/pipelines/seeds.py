"""Several seeds in one command: a run each, and how much they differ.

    NAME/seed-N/            a run each, where the output folder's name holds no {seed}
    NAME/summary.json       mean and spread

The seeds are those of the reader: the order of examples, dropout, and what LoRA starts from. Data,
prompt and evidence are the same for all. What they are of another system, `summary.json` tells.
"""

import copy
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pgra.config import PgraArguments
from pgra.errors import ArtifactError, ConfigError
from pgra.io import write_json
from pgra.pipelines.prepare import Prepared, prepare_runs
from pgra.pipelines.run import Outcome, run_reader
from pgra.pipelines.run_folder import IDENTITY_FILE
from pgra.pipelines.systems import OWN_SYSTEMS, run_system, seeds_meaning
from pgra.processes import Processes
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.types import Json

logger = logging.getLogger(__name__)

SUMMARY_FILE = "summary.json"
SEED_PLACE = "{seed}"


@dataclass(frozen=True)
class Summary:
    """Runs that differ in their seed only.

    Attributes:
        folder: Where `summary.json` is.
        outcomes: By seed, in the order asked for.
        values: The content of `summary.json`.
    """

    folder: Path
    outcomes: Mapping[int, Outcome]
    values: Mapping[str, Any]


def variant(
    training: ReaderTrainingArguments, folder: Path, **changes: float
) -> ReaderTrainingArguments:
    """Give one of several runs' arguments.

    Args:
        training: What they share; not changed.
        folder: The run's.
        changes: Values by name, such as its seed.
    """
    mine = copy.copy(training)
    mine.output_dir = str(folder)
    mine.run_name = training.run_name and f"{training.run_name}-{folder.name}"
    mine.resume_from_checkpoint = None  # each goes on from its own last one
    for name, value in changes.items():
        setattr(mine, name, value)
    return mine


def check_series(training: ReaderTrainingArguments, root: Path) -> None:
    """Refuse what is for one run only, and a folder that is one.

    Raises:
        ArtifactError: If the folder of several runs is a run itself.
        ConfigError: If one checkpoint is named for all.
    """
    if str(training.resume_from_checkpoint or "").lower() not in ("", "false", "true"):
        raise ConfigError(
            f"resume_from_checkpoint ({training.resume_from_checkpoint}) is of one run, and "
            "several are asked for: leave it out, each goes on from its own last checkpoint"
        )
    if (root / IDENTITY_FILE).is_file():
        raise ArtifactError(
            f"{root} is a run itself, and several runs are asked for: choose another --output_dir"
        )


def series_folder(pattern: str, seeds: Sequence[int]) -> Path:
    """Give the folder of what several seeds share: their pattern with all of them, 0+1+2."""
    return Path(pattern.replace(SEED_PLACE, "+".join(str(seed) for seed in seeds)))


def seed_folder(pattern: str, seed: int) -> Path:
    """Give one seed's run: the pattern with the seed, or a folder inside it."""
    if SEED_PLACE in pattern:
        return Path(pattern.replace(SEED_PLACE, str(seed)))
    return Path(pattern) / f"seed-{seed}"


def train_seeds(
    args: PgraArguments,
    training: ReaderTrainingArguments,
    seeds: Sequence[int],
    processes: Processes = Processes(),  # noqa: B008 (frozen)
) -> Summary:
    """Train and measure once with each seed; what is finished is taken up.

    Args:
        args: Everything before the reader's training; it is done once.
        training: The Trainer's arguments; `output_dir` may hold `{seed}`.
        seeds: Different ones.
        processes: Who shares the work.

    Raises:
        ArtifactError: If a folder holds another run.
        PgraError: As `train_run`.
    """
    pattern = str(training.output_dir)
    root = series_folder(pattern, seeds)
    check_series(training, root)
    runs = {s: variant(training, seed_folder(pattern, s), seed=s) for s in seeds}
    if args.runtime.system in OWN_SYSTEMS:
        outcomes = _run_each(runs, lambda mine: run_system(args, mine, processes))
        return sum_up(outcomes, root, seeds_meaning(args), processes)
    prepared = prepare_runs(args, list(runs.values()), processes)
    return run_seeds(prepared, runs, root)


def run_seeds(
    prepared: Prepared,
    runs: Mapping[int, ReaderTrainingArguments],
    root: Path,
    done: Mapping[int, Outcome] | None = None,
) -> Summary:
    """Train and measure runs by seed, and write what they have in common.

    Args:
        prepared: What they share.
        runs: Arguments by seed.
        root: Where `summary.json` goes.
        done: What this command has run already.
    """
    known = done or {}
    outcomes = _run_each(runs, lambda mine: known.get(mine.seed) or run_reader(prepared, mine))
    return sum_up(outcomes, root, seeds_meaning(prepared.args), prepared.processes)


def _run_each(
    runs: Mapping[int, ReaderTrainingArguments],
    run: Callable[[ReaderTrainingArguments], Outcome],
) -> dict[int, Outcome]:
    outcomes: dict[int, Outcome] = {}
    for seed, mine in runs.items():
        logger.info("seeds: seed %d (%d of %d)", seed, len(outcomes) + 1, len(runs))
        outcomes[seed] = run(mine)
    return outcomes


def sum_up(
    outcomes: Mapping[int, Outcome],
    root: Path,
    meaning: str,
    processes: Processes = Processes(),  # noqa: B008 (frozen)
) -> Summary:
    """Write what runs by seed have in common.

    Args:
        outcomes: By seed, in the order asked for.
        root: Where `summary.json` goes.
        meaning: What the seeds are of.
        processes: The main one writes.
    """
    values = _summarise(outcomes, meaning)
    if processes.worker.is_main:
        root.mkdir(parents=True, exist_ok=True)
        write_json(root / SUMMARY_FILE, values)
    processes.barrier()
    return Summary(root, outcomes, values)


def _summarise(outcomes: Mapping[int, Outcome], meaning: str) -> dict[str, Json]:
    first = next(iter(outcomes.values())).metrics
    test = [float(outcome.metrics["value"]) for outcome in outcomes.values()]
    dev = [
        float(o.training["value"]) for o in outcomes.values() if o.training.get("value") is not None
    ]
    return {
        **{name: first[name] for name in ("task", "split", "metric")},
        "num_examples": first["n"],
        "seeds_are": meaning,
        "runs": [
            {
                "seed": seed,
                "folder": outcome.folder.name,
                "value": float(outcome.metrics["value"]),
                "dev_value": outcome.training.get("value"),
            }
            for seed, outcome in outcomes.items()
        ],
        **spread(test),
        "dev": spread(dev) if len(dev) == len(test) else None,
    }


def spread(values: Sequence[float]) -> dict[str, Json]:
    """Give mean, sample standard deviation (None for one value), count and ends."""
    return {
        "mean": statistics.fmean(values),
        "sd": statistics.stdev(values) if len(values) > 1 else None,
        "n": len(values),
        "min": min(values),
        "max": max(values),
    }
