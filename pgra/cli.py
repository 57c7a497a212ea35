"""The `pgra` command, and what all scripts share: one line and exit code 2 for a user's error."""

import errno
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from pgra import __version__
from pgra.errors import ConfigError, PgraError, unknown_name

Main = Callable[[Sequence[str] | None], int]

_DISK_ERRORS = {
    errno.ENOSPC: "the disk is full: make room, or choose another folder, and run it again",
    errno.EDQUOT: "your disk quota is used up: make room and run it again",
    errno.EACCES: "no permission: choose a folder you may write to",
    errno.EPERM: "no permission: choose a folder you may write to",
    errno.EROFS: "the disk is read-only: choose a folder you may write to",
}


@dataclass(frozen=True)
class Command:
    """One word after `pgra`.

    Attributes:
        module: Where its `main` is; imported only when it is called.
        about: What it does, in a line.
    """

    module: str
    about: str


COMMANDS: Mapping[str, Command] = {
    "demo": Command("pgra.commands.demo", "see it at work: three readers on real models and data"),
    "index": Command("index_build.__main__", "build the first stage's index of a corpus"),
    "search": Command("pgra.commands.search", "look up passages near a text"),
    "rerank": Command("pgra.commands.rerank", "run both retrieval stages for a task"),
    "train": Command("pgra.commands.train", "train a reader on a task, and measure it"),
    "evaluate": Command("pgra.commands.evaluate", "measure a trained run again"),
    "models": Command("pgra.commands.models", "list the models that come inside packages"),
    "data": Command("pgra.commands.data", "list the tasks, and the data that come inside packages"),
}


def run(main: Main, argv: Sequence[str] | None = None) -> int:
    """Call a script's main; word a user's error in one line.

    Returns:
        What `main` returns; 2 for an error that the user can mend, 130 when interrupted.
    """
    _configure_logging()
    try:
        return main(argv)
    except PgraError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted; the same command goes on where it stopped", code=130)
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        place = f" ({error.filename})" if error.filename else ""
        return _fail(f"cannot write{place}: {_DISK_ERRORS[error.errno]}")


def _fail(message: str, *, code: int = 2) -> int:
    sys.stdout.flush()
    sys.stderr.write(f"\npgra: error: {message}\n" if code == 2 else f"\npgra: {message}\n")
    return code


def _configure_logging() -> None:
    logging.basicConfig(format="%(message)s", stream=sys.stderr, force=True)
    logging.getLogger("pgra").setLevel(logging.INFO)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(_help())
        return 0
    if words[0] in ("-V", "--version"):
        sys.stdout.write(f"pgra {__version__}\n")
        return 0
    return run(_dispatch, words)


def _dispatch(words: Sequence[str] | None) -> int:
    assert words
    if words[0] not in COMMANDS:
        raise ConfigError(unknown_name("command", words[0], COMMANDS))
    module = import_module(COMMANDS[words[0]].module)
    code: int = module.main(words[1:])
    return code


def _help() -> str:
    lines = [f"  {name:<10} {command.about}" for name, command in COMMANDS.items()]
    return (
        "usage: pgra COMMAND [--help]\n\n"
        "Prompt-guided retrieval augmentation: a frozen language model picks the sentences that a "
        "reader should see first.\n\ncommands:\n" + "\n".join(lines) + "\n\n"
        "example:\n  pgra index --corpus bundled:wikipedia-19k --encoder bundled:minilm-l6\n"
    )
