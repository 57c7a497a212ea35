"""The `pgra` command, and what all scripts share: one line and exit code 2 for a user's error."""

import ctypes
import errno
import io
import logging
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from pgra import __version__
from pgra.errors import (
    ConfigError,
    PgraError,
    Stopped,
    check_alone,
    device_fault,
    is_lost_connection,
    unknown_name,
    visible,
)
from pgra.help import paint, wants_help, write_help

Main = Callable[[Sequence[str] | None], int]

_MOST_LOOKS, _BETWEEN_LOOKS = 20, 0.05  # for a process that is ending; seconds
_NUM_KERNELS = "128"  # an LM's forward has a handful of shapes, the same in all layers
_MALLOC_NAMES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them


@dataclass(frozen=True)
class Command:
    """One word after `pgra`.

    Attributes:
        target: Its function, `main` unless another is named; imported only when it is called.
        about: What it does, in a line.
        group: Where the help lists it.
    """

    target: str
    about: str
    group: str


_FIND, _DECIDE, _COMPARE, _LOOK = "Find evidence", "Train and decide", "Plan and compare", "Look"
COMMANDS: Mapping[str, Command] = {
    name: Command(f"pgra.{target}", about, group)
    for group, commands in {
        _FIND: {
            "index": ("commands.index", "build, grow or look into an index"),
            "search": ("commands.index:search", "look up passages near a text"),
            "rerank": ("commands.rerank", "run both retrieval stages for a task"),
        },
        _DECIDE: {
            "train": ("commands.train", "train a reader on a task, and measure it"),
            "icl": ("commands.train:icl", "decide by a frozen LM behind labelled examples (KATE)"),
            "evaluate": ("commands.train:evaluate", "measure a trained run again"),
            "predict": ("commands.predict", "decide new texts with a trained run"),
            "push": ("commands.push", "put a trained reader on the hub, with its model card"),
            "memory": (
                "commands.memory",
                "keep what users corrected, and use it on the next like question",
            ),
        },
        _COMPARE: {
            "plan": ("commands.plan", "count what the LM has yet to read, and time it"),
            "consistency": (
                "commands.consistency",
                "measure how often evidence has the label of its query",
            ),
            "ablate": ("commands.ablate", "run a grid of runs: k, d, retrievers, prompts, ..."),
            "report": ("commands.report", "put runs into one table or figure, with tests"),
        },
        _LOOK: {
            "demo": (
                "commands.demo",
                "see it at work on real models and real text, in three minutes",
            ),
            "models": ("commands.lists:models", "list the models that come inside packages"),
            "task": ("commands.task", "check a task's YAML, and see rows as models see them"),
            "verify": ("commands.verify", "compare artifacts and runs with their checksums"),
            "data": (
                "commands.lists:data",
                "list tasks and bundled data; make claims of a corpus",
            ),
        },
    }.items()
    for name, (target, about) in commands.items()
}
_SHARED = ("ablate", "demo", "evaluate", "icl", "index", "rerank", "train")
"""Commands whose work several processes share; of `index`, building alone."""
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_LOUDNESS = {"-q": "error", "--quiet": "error", "-v": "debug", "--verbose": "debug"}


def run(main: Main, argv: Sequence[str] | None = None) -> int:
    """Call a script's main; word a user's error in one line.

    Returns:
        What `main` returns; 2 for an error that the user can mend, 130 when interrupted, 141 when
        the reader of a pipe left; for a training that was stopped 128 + the signal's number, or 124
        when its time was up.
    """
    _open_streams()
    _bound_kernels()
    _keep_freed_memory()
    try:
        code = _call(main, sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()  # here, where a reader that left (`| head`) can be told from a mistake
    except BrokenPipeError:
        if not _drop_unread_output():
            raise
        return 128 + signal.SIGPIPE
    return code


def _open_streams() -> None:
    """Have all three streams, and a sign for each character that standard output has not.

    One that is closed is nowhere: else the next file that is opened would take its number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115
    stream = sys.stdout  # its errors are surrogateescape in the C locale
    if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        stream.reconfigure(errors="backslashreplace")


def _call(main: Main, argv: Sequence[str]) -> int:
    try:
        _configure_logging("info")
        if not _is_somewhere():
            return _fail("the folder that this runs in was removed: go into another one")
        words, level = take_general(argv)
        _configure_logging(level)
        return main(words)
    except BrokenPipeError:
        raise
    except PgraError as error:
        return _fail(str(error))
    except Stopped as stop:
        return _fail(str(stop), code=stop.code) if _is_main() else stop.code
    except KeyboardInterrupt:
        return _fail("interrupted; the same command goes on where it stopped", code=130)
    except SystemExit as leave:  # argparse, after --help
        return leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except Exception as error:
        if fault := device_fault(error):
            return _fail(fault)
        if lost := _lost_process(error):
            return _fail(
                f"{lost} of {_num_processes()} was lost (killed, out of memory or ended by an "
                "error), so this one ends too: the same command goes on where it stopped",
                code=1,
            )
        if (code := _os_error_code(error)) is None:
            raise
        place = getattr(error, "filename", None) or "a file"
        said = f"{os.strerror(code)} ({errno.errorcode.get(code, code)})"
        return _fail(f"cannot use {place}: {said}")


def _is_somewhere() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:  # libraries would not find their files
        return False
    return True


def take_general(argv: Sequence[str]) -> tuple[list[str], str]:
    """Take -q, -v, --log_level and --max_line_mb off a command line, where they stand.

    The longest line goes into the environment, where worker processes see it too.

    Returns:
        The other words, and the level that was named last, "info" if none was.

    Raises:
        ConfigError: If the level is none, or the longest line no number.
    """
    words, given, flag = [], {"log_level": "info", "max_line_mb": ""}, ""
    for word in argv:
        name, has_value, value = word.replace("-", "_").lstrip("_").partition("=")
        if flag:
            given[flag], flag = word, ""
        elif word.startswith("--") and name in given:
            flag = "" if has_value else name
            given[name] = value if has_value else given[name]
        elif word in _LOUDNESS:
            given["log_level"] = _LOUDNESS[word]
        else:
            words.append(word)
    if flag:
        known = "a number of megabytes" if flag == "max_line_mb" else ", ".join(_LEVELS)
        raise ConfigError(f"--{flag} is empty: give {known}")
    if given["log_level"] not in _LEVELS:
        raise ConfigError(unknown_name("log_level", given["log_level"], _LEVELS))
    if given["max_line_mb"]:
        from pgra.data.read import LINE_LIMIT, longest_line

        os.environ[LINE_LIMIT] = given["max_line_mb"]
        longest_line()
    return words, given["log_level"]


def _drop_unread_output() -> bool:
    """Turn streams whose reader left to nowhere, or Python ends with a traceback of its own.

    Returns:
        Whether there was one.
    """
    watch = select.poll()
    streams = [sys.stdout.fileno(), sys.stderr.fileno()]
    for stream in streams:
        watch.register(stream, 0)
    unread = [stream for stream, event in watch.poll(0) if event & select.POLLERR]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in unread:
        os.dup2(nowhere, stream)
    os.close(nowhere)
    return bool(unread)


def _os_error_code(error: Exception) -> int | None:
    """Find what the system said: safetensors, tokenizers and torch raise errors of their own."""
    if isinstance(error, OSError):
        return error.errno
    told = re.search(r"\(os error (\d+)\)", str(error))
    if told:
        return int(told.group(1))
    # torch.save only sees that its file is shorter than it should be.
    is_short = "inline_container" in str(error) and "unexpected pos" in str(error)
    return errno.ENOSPC if is_short else None


def _fail(message: str, *, code: int = 2) -> int:
    message = " ".join(message.split())  # of a YAML parser, say, in several lines
    message = visible(message)  # of a path that is no UTF-8, or what another program said
    sys.stdout.flush()
    _close_bars()
    head = paint("error:", "red", sys.stderr) + " " if code == 2 else ""
    sys.stderr.write(f"\npgra: {head}{message}\n")
    return code


def _close_bars() -> None:
    """End the bars that an error left open: they would write themselves once more at the exit."""
    if "tqdm" in sys.modules:
        from tqdm import tqdm

        for bar in list(getattr(tqdm, "_instances", ())):
            bar.close()


def _bound_kernels() -> None:
    """Let oneDNN keep fewer kernels, and torch fewer of oneDNN's; read when torch is loaded.

    Each keeps 1,024, one for every number of tokens that a layer was given, near a megabyte each:
    after half an hour of texts of all lengths a small LM in bfloat16 took 8 GB.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, _NUM_KERNELS)


def _keep_freed_memory() -> None:
    """Have glibc keep up to a gigabyte that was freed, unless the user tells it what to do.

    As it comes, it gives back what two tensors leave, and the next layer's are new pages again,
    which the system must clear.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's alone
    if mallopt is not None and not any(name in os.environ for name in _MALLOC_NAMES):
        mallopt(_TRIM_THRESHOLD, 1 << 30)
        mallopt(_MMAP_THRESHOLD, 32 << 20)  # the most it takes; it no longer finds its own


def _configure_logging(level: str) -> None:
    logging.basicConfig(format="%(message)s", stream=sys.stderr, force=True)
    wanted = _LEVELS[level]
    logging.getLogger("pgra").setLevel(wanted if _is_main() else max(wanted, logging.WARNING))


def _lost_process(error: Exception) -> str:
    """Name the process whose end an error tells of; "" where none has gone."""
    if _num_processes() == 1:
        return ""
    from pgra.core import lost_ranks

    is_told = is_lost_connection(error)
    for _ in range(_MOST_LOOKS if is_told else 1):
        if ranks := lost_ranks():
            return f"process {', '.join(map(str, ranks))}"
        time.sleep(_BETWEEN_LOOKS)  # its connections end before it does
    return "another process" if is_told else ""


def _num_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"  # of the processes of accelerate launch


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    return run(dispatch, list(sys.argv[1:] if argv is None else argv))


def dispatch(words: Sequence[str] | None) -> int:
    """Call the command that the first word names."""
    if not words or wants_help(words[:1]):
        _show_help()
        return 0
    if words[0] in ("-V", "--version"):
        sys.stdout.write(f"pgra {__version__}\n")
        return 0
    if words[0] == "--print-completion":
        return _print_completion(words)
    if words[0] not in COMMANDS:
        raise ConfigError(unknown_name("command", words[0], COMMANDS))
    if words[0] not in _SHARED:
        check_alone(f"pgra {words[0]}")
    module, _, name = COMMANDS[words[0]].target.partition(":")
    code: int = getattr(import_module(module), name or "main")(words[1:])
    return code


def _print_completion(words: Sequence[str]) -> int:
    """Write the script that completes commands, by shtab's own flag."""
    import argparse

    import shtab

    parser = argparse.ArgumentParser("pgra")
    below = parser.add_subparsers()
    for name, command in COMMANDS.items():
        below.add_parser(name, help=command.about)
    shtab.add_argument_to(parser, "--print-completion")
    parser.parse_args(words)
    return 0


def _show_help() -> None:
    groups: dict[str, dict[str, str]] = {}
    for name, command in COMMANDS.items():
        groups.setdefault(command.group, {})[name] = command.about
    write_help(
        "pgra",
        "Prompt-guided retrieval augmentation: a frozen language model picks the sentences that a "
        "reader should see first.",
        "Example:\n  pgra index --corpus bundled:wikipedia-19k --encoder bundled:minilm-l6",
        stream=sys.stdout,
        commands=groups,
    )
