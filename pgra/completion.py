"""Writes what completes commands and flags in a shell: `pgra completion bash|zsh|tcsh`."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress

from pgra.cli import dispatch
from pgra.commands.common import about
from pgra.config import choose
from pgra.errors import ConfigError
from pgra.help import GENERAL, Flag, Page, collect_pages, wants_help, write_help

_SHELLS = ("bash", "tcsh", "zsh")


def main(argv: Sequence[str] | None = None) -> int:
    """Write a script that completes commands and flags.

    Examples:
      pgra completion bash > ~/.local/share/bash-completion/completions/pgra
      pgra completion zsh > ~/.zfunc/_pgra     # with fpath+=(~/.zfunc) before compinit

    The script is static: completing starts no Python. Write it anew after an update.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or wants_help(words):
        prog = f"pgra completion {'|'.join(_SHELLS)}"
        write_help(prog, **about(main), stream=sys.stdout)
        return 0
    choose("shell", words[0], _SHELLS)
    if words[1:]:
        raise ConfigError(f"unknown argument '{words[1]}'. See --help.")
    import shtab

    parser = argparse.ArgumentParser("pgra", add_help=False)
    _fill(parser, [])
    sys.stdout.write(shtab.complete(parser, shell=words[0]) + "\n")
    return 0


def _fill(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Give a parser the flags of a command, and parsers of the words that may follow it."""
    page = _ask(words)
    for flag in (*page.flags, *GENERAL):
        _add(parser, flag)
    if page.words:
        below = parser.add_subparsers()
        for word, does in page.words.items():
            child = below.add_parser(word, help=_plain(does), add_help=False)
            _fill(child, [*words, word])


def _ask(words: Sequence[str]) -> Page:
    with collect_pages() as pages, suppress(SystemExit):
        dispatch([*words, "--help-all"])
    return pages[-1]


def _plain(text: str) -> str:
    return text.replace("%", "%%")  # which argparse would fill in


def _add(parser: argparse.ArgumentParser, flag: Flag) -> None:
    import shtab

    names = [*filter(None, [flag.short]), f"--{flag.name}"]
    if not flag.value:
        parser.add_argument(*names, action="store_true", help=_plain(flag.help))
        return
    made = parser.add_argument(*names, help=_plain(flag.help), choices=flag.choices or None)
    kind = {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY}.get(flag.value)
    if kind is not None:
        made.complete = kind  # type: ignore[attr-defined]
