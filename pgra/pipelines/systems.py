"""Every system by name, behind one call: `train.py --system NAME`.

Readers (pgra, exhaustive, fid, random, plain) are one pipeline: `PgraArguments` lets the system
decide what tells them apart. Each other system is a file with a
`run(args, training, processes) -> Outcome` of its own, imported when it is asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from pgra.config import READER_SYSTEMS, SYSTEMS, PgraArguments
from pgra.errors import ConfigError
from pgra.pipelines.run import Outcome, train_run
from pgra.processes import Processes
from pgra.reader.arguments import ReaderTrainingArguments

READER_SEEDS = (
    "seeds of the reader (order of examples, dropout); data, prompt and evidence are alike"
)


@dataclass(frozen=True)
class OwnSystem:
    """A system with a pipeline of its own.

    Attributes:
        module: Where its `run` is; a run's folder has what `write_results` writes.
        seeds: What a seed changes, as `summary.json` tells it.
    """

    module: str
    seeds: str


OWN_SYSTEMS: Mapping[str, OwnSystem] = {
    "icl": OwnSystem(
        "pgra.pipelines.icl_scoring",
        "of no effect here: nothing is drawn but the exemplars (exemplar_seed), alike for all",
    ),
    "knn": OwnSystem(
        "pgra.pipelines.knn_vote", "of no effect here: nothing is drawn, nothing is trained"
    ),
    "lm-bff": OwnSystem(
        "pgra.pipelines.lm_bff",
        "seeds of the few-shot split, its demonstrations, and the reader (order, dropout)",
    ),
    "rag": OwnSystem("pgra.pipelines.rag", READER_SEEDS),
}
assert {*OWN_SYSTEMS, *READER_SYSTEMS} == set(SYSTEMS)


def run_system(
    args: PgraArguments,
    training: ReaderTrainingArguments,
    processes: Processes = Processes(),  # noqa: B008 (frozen)
) -> Outcome:
    """Run the system that the arguments name, or take up its finished run.

    Args:
        args: Everything but the training; `args.runtime.system` is the system.
        training: The Trainer's arguments; `output_dir` is the run, and `seed` its seed.
        processes: Who shares the work.

    Raises:
        ArtifactError: If the folder holds another run.
        PgraError: As each stage says.
    """
    own = OWN_SYSTEMS.get(args.runtime.system)
    if own is None:
        return train_run(args, training, processes)
    outcome: Outcome = import_module(own.module).run(args, training, processes)
    return outcome


def seeds_meaning(args: PgraArguments) -> str:
    """Say what a seed of a run changes."""
    own = OWN_SYSTEMS.get(args.runtime.system)
    return READER_SEEDS if own is None else own.seeds


def refuse_own(args: PgraArguments, what: str) -> None:
    """Refuse what only the trained reader's pipeline can do.

    Args:
        args: Which system.
        what: What is asked for, as the user writes it.

    Raises:
        ConfigError: If the system has a pipeline of its own.
    """
    if args.runtime.system in OWN_SYSTEMS:
        raise ConfigError(
            f"{what} is for readers ({', '.join(READER_SYSTEMS)}), not for system "
            f"'{args.runtime.system}': leave it out, or choose another --system"
        )
