"""What corrected labels are worth to a finished run: `pgra memory labels`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pgra.commands.common import quiet_libraries, say
from pgra.config import KernelArguments, at_least, parse_arguments
from pgra.config import argument as _arg
from pgra.errors import ConfigError
from pgra.memory.labels import MEMORY_WEIGHT, PromptMemoryArguments

EXAMPLE = """examples:
  pgra memory labels --run runs/sst2-pgra-seed42 --correction_probabilities 0.5 1 --seeds 0 1 2
  pgra memory labels --run runs/sst2-icl-knn --memory_lookup encoder --memory_threshold 0.8 \\
      --memory_encoder bundled:minilm-l6

A simulated user corrects what the run decided wrongly in the first half of its test set. Then the
first half is decided again, as it is and with words left out, and the second half.
"""


@dataclass(kw_only=True)
class StudyArguments(KernelArguments):
    """Which run, and what the user does."""

    run: str | None = _arg(None, "Folder of a finished run of train.py or pgra icl.")
    correction_probabilities: list[float] = field(
        default_factory=lambda: [0.5, 1.0],
        metadata={"help": "That a wrong decision is corrected."},
    )
    seeds: list[int] = field(
        default_factory=lambda: [0, 1, 2], metadata={"help": "Of the simulated user."}
    )
    memory_weights: list[float] = field(
        default_factory=lambda: [MEMORY_WEIGHT],
        metadata={"help": "Of a trained reader: weights of the memory's labels."},
    )
    max_texts: int | None = _arg(None, "Texts of the test set, the first; default: all.")
    output: str | None = _arg(None, "A jsonl file for all rows, one a seed.")
    device: str = _arg("auto", "auto (a GPU if there is one), cpu, cuda, cuda:1, ...")

    def __post_init__(self) -> None:
        """Refuse what is no probability, no weight or no user."""
        if self.run is None:
            raise ConfigError("--run is missing: give the folder of a finished run")
        at_least("max_texts", self.max_texts, 4)
        for name in ("correction_probabilities", "memory_weights"):
            for value in getattr(self, name):
                if not 0 <= value <= 1:
                    raise ConfigError(f"{name} holds {value:g}: each must be from 0 to 1")
        for name in ("correction_probabilities", "memory_weights", "seeds"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty: give at least one")


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, measure and show."""
    args, memory = parse_arguments(
        [StudyArguments, PromptMemoryArguments],
        argv,
        prog="pgra memory labels",
        description="Say what corrected labels are worth to a finished run.",
        epilog=EXAMPLE,
    )
    if memory.memory is not None:
        raise ConfigError(
            f"memory names {memory.memory}, and the simulated user fills one of its own: leave it "
            "out"
        )
    quiet_libraries()
    from pgra.artifacts import write_lines
    from pgra.experiments.label_study import as_records, study_corrections, write_table

    rows = study_corrections(
        Path(args.run),
        memory,
        probabilities=args.correction_probabilities,
        seeds=args.seeds,
        weights=args.memory_weights,
        most=args.max_texts,
        device=args.device,
    )
    if args.output is not None:
        write_lines(Path(args.output), as_records(rows))
    say(write_table(rows))
    return 0
