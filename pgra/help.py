"""What `--help` shows: a command's flags in argparse's groups, the usual ones or all."""

import argparse
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from pgra.errors import ConfigError

# Groups in the help's order; "Options" are flags that only one command has.
GROUPS = (
    *("Options", "Task", "Method", "Corpus", "Retriever", "Reranker", "LM", "Exemplars", "Reader"),
    *("Memory", "Training", "Output", "General"),
)
HELP = ("-h", "--help", "--help-all", "--help_all")
_FEW = 12  # a command of so many flags shows them all
_MOST_COLUMNS = 100
LEVELS = ("debug", "info", "warning", "error")


def same_spelling(words: Sequence[str]) -> list[str]:
    """Write the names of flags with underscores, as arguments have them: `--dry-run`."""
    parts = [word.partition("=") if word.startswith("--") else (word, "", "") for word in words]
    return [
        f"--{name[2:].replace('-', '_')}{sign}{value}" if name.startswith("--") else name
        for name, sign, value in parts
    ]


def wants_help(words: Sequence[str]) -> bool:
    return any(word in HELP for word in words)


def wants_all(words: Sequence[str]) -> bool:
    return any(word in HELP[2:] for word in words)


def add_general(parser: "argparse._ActionsContainer") -> None:
    """Add the flags of every command, which are taken off before it reads its own."""
    level: Any = {"dest": "log_level", "action": "store_const"}
    parser.add_argument(
        "-q", "--quiet", **level, const="error", help="Say errors and results only."
    )
    about = "Say more: also what the libraries beneath say."
    parser.add_argument("-v", "--verbose", **level, const="debug", help=about)
    about = f"{', '.join(LEVELS)}; default: info."
    parser.add_argument("--log_level", metavar="NAME", choices=LEVELS, help=about)


def with_default(text: str, value: object) -> str:
    """Return a flag's help with its default, unless it has none or the help mentions it."""
    value = getattr(value, "value", value)
    if value in (None, "", (), []) or re.search(r"\bdefault\b", text):
        return text
    shown = " ".join(map(str, value)) if isinstance(value, list | tuple) else value
    return (
        f"{text} (default: {shown:g})" if isinstance(shown, float) else f"{text} (default: {shown})"
    )


def _formatter(prog: str) -> argparse.HelpFormatter:
    columns = min(shutil.get_terminal_size((80, 24)).columns, _MOST_COLUMNS)
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=26, width=columns)


class HelpParser(argparse.ArgumentParser):
    """A parser with flags in `GROUPS`, whose help shows the usual ones first."""

    def __init__(
        self,
        prog: str = "pgra",
        description: str = "",
        epilog: str = "",
        words: Mapping[str, str] | None = None,
    ) -> None:
        """Make a parser; `words` are subcommands, each with what it does."""
        super().__init__(
            prog,
            f"{prog}{' COMMAND' if words else ''} [FLAGS]",
            description,
            epilog,
            formatter_class=_formatter,
            add_help=False,
            allow_abbrev=False,
        )
        if words:
            below = self.add_subparsers(title="Commands", metavar="COMMAND")
            for word, about in words.items():
                below.add_parser(word, help=about)
        self._groups = {title: self.add_argument_group(title) for title in GROUPS}
        self._unusual: list[argparse.Action] = []
        self._count = 0

    def error(self, message: str) -> NoReturn:
        """Raise a one-line error, without the usage of two hundred arguments."""
        raise ConfigError(f"{message}. See --help.")

    def flag_adder(self, title: str, *, is_shown: bool) -> Callable[..., None]:
        """Return a function that adds flags to a group; one without a help text is never shown."""

        def add(flag: str, text: str, **how: Any) -> None:
            about = text.replace("%", "%%") or argparse.SUPPRESS
            action = self._groups[title].add_argument(
                flag, default=argparse.SUPPRESS, help=about, **how
            )
            self._count += bool(text)
            self._unusual += [action] if text and not is_shown else []

        return add

    def show(self) -> None:
        """Write the help."""
        general = self._groups["General"]
        add_general(general)
        general.add_argument("-h", "--help", action="store_true", help="Show the usual flags.")
        general.add_argument("--help-all", action="store_true", help="Show all flags.")
        if self._unusual and self._count > _FEW:
            for action in self._unusual:
                action.help = argparse.SUPPRESS
            more = f"{len(self._unusual)} more: {self.prog.partition(' [')[0]} --help-all"
            self.epilog = "\n\n".join(filter(None, [more, self.epilog]))
        sys.stdout.write(self.format_help())
