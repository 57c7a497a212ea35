"""`pgra evaluate`: a finished run, measured again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pgra.commands.common import parse, quiet_libraries, say, show_metrics
from pgra.config import Arguments, arg


@dataclass(kw_only=True)
class EvaluateArguments(Arguments):
    """Which run, and on what."""

    run: str = arg("", "Folder of a finished run.", must_be_given=True)
    test_file: str | None = arg(
        None, "Another file to measure on; needs --output_dir.", needs={"output_dir": True}
    )
    output_dir: str | None = arg(None, "Where results go; default: the run (of its own test set).")
    device: str | None = arg(None, "auto, cpu, cuda, ...; default: the run's.")
    artifacts_dir: str | None = arg(None, "Folder of indexes and banks; default: the run's.")


def main(argv: Sequence[str]) -> int:
    """Measure a finished run on its test set, or on another file.

    Examples:
      pgra evaluate --run runs/sst2-pgra-seed42
      pgra evaluate --run runs/sst2-pgra-seed42 --test_file other.jsonl --output_dir runs/other
    """
    (args,) = parse(main, [EvaluateArguments], argv)
    quiet_libraries()
    from pgra.context import join_context
    from pgra.runs import evaluate_run

    changes: dict[str, Any] = {"allow_test_in_train": True}  # to measure on it is noted
    for name in ("test_file", "device", "artifacts_dir"):
        if getattr(args, name) is not None:
            changes[name] = getattr(args, name)
    context = join_context(args.device or "auto")
    run = evaluate_run(args.run, context, changes=changes, output_dir=args.output_dir)
    if context.is_main:
        say(show_metrics(run))
    return 0
