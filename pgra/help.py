"""What `--help` shows: a command's flags in groups, the usual ones or all.

Knows nothing of dataclasses: `pgra.config` says which flags there are.
"""

import os
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TextIO

GROUPS = (
    *("Options", "Task", "Method", "Corpus", "Retriever", "Reranker", "LM", "Exemplars", "Reader"),
    *("Memory", "Training", "Output", "General"),
)
"""Groups of flags in the order of the help; "Options" are those that only one command has."""
HELP = ("-h", "--help", "--help-all", "--help_all")
_FEW = 12
"""A command of so many flags shows them all."""
_MOST_COLUMNS = 100
_INDENT = 26
_COLOURS = {"bold": "1", "cyan": "36", "red": "1;31"}


@dataclass(frozen=True)
class Flag:
    """A flag as the help shows it.

    Attributes:
        name: Without dashes.
        help: What it does.
        group: One of `GROUPS`.
        value: What follows it, such as "N"; nothing follows a switch.
        default: Its value when nobody gives one; None and "" are not told.
        is_common: Whether the short help shows it.
        short: Its one-letter form, with its dash.
        choices: The names it may have, where these are known.
    """

    name: str
    help: str
    group: str
    value: str = ""
    default: object = None
    is_common: bool = False
    short: str = ""
    choices: Sequence[str] = ()

    @property
    def usage(self) -> str:
        """The flag and what follows it."""
        words = f"{self.short}, --{self.name}" if self.short else f"--{self.name}"
        return f"{words} {self.value}".rstrip()

    @property
    def text(self) -> str:
        """Its help, and its default unless the help tells that itself."""
        is_told = self.default in (None, "", (), []) or re.search(r"\bdefault\b", self.help)
        return self.help if is_told else f"{self.help} (default: {_word(self.default)})"


GENERAL = (
    Flag("quiet", "Say errors and results only.", "General", short="-q", is_common=True),
    Flag(
        "verbose",
        "Say more: also what the libraries beneath say.",
        "General",
        short="-v",
        is_common=True,
    ),
    Flag("log_level", "debug, info, warning or error.", "General", "NAME", default="info"),
    Flag(
        "max_line_mb",
        "The longest line of a file or pipe, or answer of an endpoint, that is read.",
        "General",
        "N",
        default=16,
    ),
    Flag("help", "Show the usual flags.", "General", short="-h", is_common=True),
    Flag("help-all", "Show all flags.", "General", is_common=True),
)
"""Flags of every command; `pgra.cli` takes the first four off the command line."""


@dataclass(frozen=True)
class Page:
    """A help that was asked for.

    Attributes:
        description: What the command does.
        flags: Its own flags, all of them.
        words: What may follow it, each with what that does.
    """

    description: str
    flags: Sequence[Flag]
    words: Mapping[str, str]


_PAGES: ContextVar[list[Page] | None] = ContextVar("_PAGES", default=None)


@contextmanager
def collect_pages() -> Iterator[list[Page]]:
    """Keep the helps that are asked for meanwhile, instead of writing them."""
    pages: list[Page] = []
    token = _PAGES.set(pages)
    try:
        yield pages
    finally:
        _PAGES.reset(token)


def wants_help(words: Sequence[str]) -> bool:
    """Whether a command line asks for help."""
    return any(word in HELP for word in words)


def wants_all(words: Sequence[str]) -> bool:
    """Whether it asks for all flags."""
    return any(word in HELP[2:] for word in words)


def write_help(
    prog: str,
    description: str,
    epilog: str = "",
    flags: Sequence[Flag] = (),
    *,
    stream: TextIO,
    commands: Mapping[str, Mapping[str, str]] | None = None,
    is_whole: bool = True,
) -> None:
    """Write the help of a command.

    Args:
        prog: The command.
        description: What it does.
        epilog: Examples, shown as they are.
        flags: Its own; those of every command are added.
        stream: Where to; in colour where that is a terminal.
        commands: What each word that may follow does, by title.
        is_whole: Whether all flags are shown, or the usual ones and how many more there are.
    """
    if (pages := _PAGES.get()) is not None:
        words = {name: about for part in (commands or {}).values() for name, about in part.items()}
        pages.append(Page(description, flags, words))
        return
    shown = [f for f in flags if is_whole or f.is_common or len(flags) <= _FEW]
    general = [f for f in GENERAL if f.is_common or is_whole]
    columns = min(shutil.get_terminal_size((80, 24)).columns, _MOST_COLUMNS)
    follows = " COMMAND" * bool(commands) + " [FLAGS]"
    lines = [f"usage: {prog}{follows}", "", *textwrap.wrap(description, columns)]
    width = max((len(name) for part in (commands or {}).values() for name in part), default=0)
    for title, part in (commands or {}).items():
        lines += ["", paint(f"{title}:", "bold", stream)]
        for name, about in part.items():
            lines += _hang(f"  {name}", about, width + 4, columns, stream)
    for group in GROUPS:
        members = [flag for flag in (*shown, *general) if flag.group == group]
        if members:
            lines += ["", paint(f"{group}:", "bold", stream)]
        for flag in members:
            lines += _hang(f"  {flag.usage}", flag.text, _INDENT, columns, stream)
    if len(shown) < len(flags):
        command = prog.partition(" [")[0]
        lines += ["", f"{len(flags) - len(shown)} more: {command} --help-all"]
    lines += ["", *epilog.splitlines()] if epilog else []
    stream.write("\n".join(lines) + "\n")


def paint(text: str, colour: str, stream: TextIO) -> str:
    """Colour a text where it goes to a terminal; NO_COLOR, of any value, forbids it."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty():
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def _hang(head: str, text: str, indent: int, columns: int, stream: TextIO) -> Iterable[str]:
    """Lay a text out to the right of a word, or below where the word is long."""
    folded = textwrap.wrap(text, max(30, columns - indent), break_on_hyphens=False) or [""]
    first = paint(head, "cyan", stream)
    if len(head) < indent:
        first += " " * (indent - len(head)) + folded.pop(0)
    yield first.rstrip()
    yield from (" " * indent + line for line in folded)


def _word(default: object) -> str:
    if isinstance(default, list | tuple):
        return " ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)
