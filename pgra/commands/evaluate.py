"""Measures a trained run again: `evaluate.py`, `pgra evaluate`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pgra.commands.common import quiet_libraries, say, show_metrics
from pgra.config import KernelArguments, choose, parse_arguments
from pgra.errors import ConfigError

EXAMPLE = """examples:
  python evaluate.py --run runs/sst2-pgra-seed42
  python evaluate.py --run runs/sst2-pgra-seed42 --test_file other.jsonl --output_dir runs/other
"""


def _arg(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(kw_only=True)
class EvaluateArguments(KernelArguments):
    """Which run, and on what."""

    run: str | None = _arg(None, "Folder of a finished run of train.py.")
    split: str = _arg("test", "test, or dev (the part a checkpoint was chosen on).")
    test_file: str | None = _arg(None, "Another file to measure on; needs --output_dir.")
    output_dir: str | None = _arg(None, "Where results go; default: the run (of its own test set).")
    decode: str | None = _arg(
        None, "verbalizer or official; default: the run's. Needs --output_dir."
    )
    evidence_attention: bool = _arg(
        False, "Add each evidence's share of the reader's cross-attention to predictions.jsonl."
    )
    device: str | None = _arg(None, "auto, cpu, cuda, ...; default: the run's.")
    artifacts_dir: str | None = _arg(None, "Folder of indexes and banks; default: the run's.")

    def __post_init__(self) -> None:
        """Refuse contradictions."""
        if self.run is None:
            raise ConfigError("--run is missing: give the folder of a finished run of train.py")
        choose("split", self.split, ("dev", "test"))
        elsewhere = self.test_file or self.decode or self.split == "dev"
        if elsewhere and self.output_dir is None:
            raise ConfigError(
                "the run's folder keeps the results of its own test set: give --output_dir"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a run."""
    (args,) = parse_arguments(
        [EvaluateArguments],
        argv,
        prog="evaluate.py",
        description="Measure a trained run on its test set, or on another file.",
        epilog=EXAMPLE,
    )
    quiet_libraries()
    from pgra.core import join_context
    from pgra.runs import evaluate_run

    wanted = {
        "data": {"test_file": args.test_file},
        "reader": {
            "decode": args.decode,
            "evidence_attention": True if args.evidence_attention else None,
        },
        "runtime": {"device": args.device, "artifacts_dir": args.artifacts_dir},
    }
    changes = {
        section: {name: value for name, value in values.items() if value is not None}
        for section, values in wanted.items()
    }
    context = join_context(args.device or "auto")
    outcome = evaluate_run(
        Path(args.run),
        context,
        split=args.split,
        changes=changes,
        output_dir=None if args.output_dir is None else Path(args.output_dir),
    )
    if context.worker.is_main:
        say(show_metrics(outcome))
    return 0
