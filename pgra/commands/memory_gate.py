"""How well a look-up's gate tells right from wrong feedback: `pgra memory gate`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pgra.commands.common import quiet_libraries, say
from pgra.config import argument as _arg
from pgra.config import at_least, parse_arguments
from pgra.errors import ConfigError
from pgra.memory.families import check_has_types, load_family
from pgra.memory.lookup import (
    LookupArguments,
    Trial,
    choose_threshold,
    judge_threshold,
    lookup_opener,
)
from pgra.memory.stream import read_stream

EXAMPLE = """example:
  pgra memory gate --family lexical --stream linguistic_300.jsonl \\
      --lookup encoder --encoder bundled:minilm-l6
"""


@dataclass(kw_only=True)
class GateArguments:
    """Which questions."""

    family: str = _arg("lexical", "Name of a YAML in configs/memory, or the path of one.")
    stream: str | None = _arg(
        None, "Questions whose types are known: a threshold is chosen on half, and tried on half."
    )
    skip: int = _arg(0, "The first so many are left out: those on which what looks up was trained.")
    device: str = _arg("auto", "Where the encoder runs.")

    def __post_init__(self) -> None:
        """Refuse to leave out fewer than none."""
        at_least("skip", self.skip, 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Show precision and recall of the threshold that is used, and of one that is chosen."""
    args, lookup = parse_arguments(
        [GateArguments, LookupArguments],
        argv,
        prog="pgra memory gate",
        description="Say how often a look-up's gate lets right and wrong feedback through.",
        epilog=EXAMPLE,
    )
    if args.stream is None:
        raise ConfigError("give questions whose types are known: --stream FILE.jsonl")
    from pgra.experiments.memory import try_gate

    family = load_family(args.family)
    check_has_types("gate", family)
    lookup = lookup.settle(family)
    steps = read_stream(Path(args.stream), family)
    half = len(steps) // 2
    if args.skip >= half:
        raise ConfigError(
            f"skip is {args.skip}, and the threshold is chosen on the first half of {args.stream}, "
            f"{half} questions: leave out fewer"
        )
    quiet_libraries()
    open_lookup = lookup_opener(lookup, device=args.device)
    chosen = choose_threshold(try_gate(steps[args.skip : half], open_lookup))
    trials = try_gate(steps[half:], open_lookup)
    say(
        _describe(
            "given" if lookup.threshold is not None else "default", lookup.gate, trials=trials
        )
    )
    say(_describe(f"chosen on {half - args.skip} others", chosen.threshold, trials=trials))
    return 0


def _describe(name: str, threshold: float, *, trials: Sequence[Trial]) -> str:
    report = judge_threshold(trials, threshold)
    shares = (report.precision, report.recall)
    told = ["-" if share is None else f"{share:.3f}" for share in shares]
    return (
        f"threshold {threshold:.4g} ({name}): precision {told[0]}, recall {told[1]}, "
        f"{report.num_passed} of {report.num_trials} questions get a feedback"
    )
