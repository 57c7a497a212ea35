"""Scores outputs that stand in a file: `pgra memory score`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pgra.commands.common import say
from pgra.config import argument as _arg
from pgra.config import parse_arguments
from pgra.errors import ConfigError
from pgra.memory.families import load_family
from pgra.memory.stream import Scored, score_file

EXAMPLE = """example:
  pgra memory score results.csv --family lexical --released_check
  pgra memory score runs/memory-lexical/mem-p0.5-seed0/steps.jsonl
"""


@dataclass(kw_only=True)
class ScoreArguments:
    """Which outputs."""

    outputs: str | None = _arg(
        None,
        "csv or jsonl with the right output (gold, expected or expected_answer) and outputs, in "
        "columns whose names end in 'generated'; it may also stand first, bare.",
    )
    family: str = _arg("lexical", "Name of a YAML in configs/memory, or the path of one.")
    released_check: bool = _arg(
        False, "Tell the understanding as the paper's release does (a sentence needs a '[')."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Show the accuracy of understanding by type, and of the answer, of each column."""
    words = list(argv or ())
    if words and not words[0].startswith("--"):
        words.insert(0, "--outputs")
    (args,) = parse_arguments(
        [ScoreArguments],
        words,
        prog="pgra memory score",
        description="Say how many outputs in a file understood their question, by type.",
        epilog=EXAMPLE,
    )
    if args.outputs is None:
        raise ConfigError("no file of outputs is named: pgra memory score FILE")
    family = load_family(args.family)
    scored = score_file(Path(args.outputs), family, as_released=args.released_check)
    say(render_scores(scored).rstrip())
    return 0


def render_scores(scored: Sequence[Scored]) -> str:
    """Write the table as Markdown, with the outputs counted."""
    kinds = list(scored[0].counts)
    lines = [
        _row("understood", *kinds, "answered"),
        "|:--|" + "--:|" * (len(kinds) + 1),
        _row("outputs", *(str(scored[0].counts[kind]) for kind in kinds), ""),
    ]
    for one in scored:
        cells = [f"{one.understood[kind]:.3f}" for kind in kinds]
        lines.append(_row(one.column, *cells, f"{one.answered:.3f}"))
    return "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"
