"""The `pgra` command, and what all scripts share: one line and exit code 2 for a user's error."""

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from pgra import __version__
from pgra.config import HelpParser, add_general, choose, same_spelling, wants_help
from pgra.errors import (
    PgraError,
    Stopped,
    check_alone,
    device_fault,
    missing_package,
    one_line,
    system_fault,
    visible,
)

Main = Callable[[Sequence[str]], int]

_NUM_KERNELS = "128"  # an LM's forward has a handful of shapes, the same in all layers
_MALLOC_NAMES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
# as malloc.h numbers them
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3


# By command: its module in `pgra.commands`, and its function if that is not `main`, imported when
# it is called; and its help.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "index": ("index", "build an index"),
    "search": ("search", "find passages for a text, or a task; with --lm, as an LM orders them"),
    "train": ("train", "train a reader on a task, and measure it"),
    "icl": ("icl", "decide by a frozen LM after labelled examples (KATE)"),
    "evaluate": ("evaluate", "measure a trained run again"),
    "predict": ("predict", "decide new texts with a trained run"),
    "push": ("push", "put a trained reader on the hub, with its model card"),
    "memory": ("memory", "keep what users corrected, and use it on the next like question"),
    "serve": ("serve", "serve decisions, reranking, search and a memory's page over HTTP"),
    "mcp": ("serve:agents", "give agents a memory, a reranker and decisions, over stdio"),
    "worth": ("worth", "measure what evidence is worth to a reader, before or after training"),
    "ablate": ("ablate", "run a grid of runs: k, d, retrievers, prompts, ..."),
    "report": ("report", "put runs into one table or figure, with tests"),
    "demo": ("demo", "see it at work on real models and real text, in three minutes"),
    "task": ("task", "check a task's YAML, and see rows as models see them"),
    "verify": ("verify", "compare artifacts and runs with their checksums"),
    "lm": ("lm", "cut the later layers off an LM, for an engine"),
    "list": ("list", "list the tasks, and the models and data that come inside packages"),
}
# Commands that several processes share.
_SHARED = ("ablate", "demo", "evaluate", "icl", "index", "search", "train")


def run(main: Main, argv: Sequence[str] | None = None) -> int:
    """Call a script's main; report a user's error in one line.

    Returns:
        What `main` returns; 2 for a user's error, 130 when interrupted, 141 for a broken pipe; for
        a stopped training 128 + the signal's number, or 124 when its time was up.
    """
    _bound_kernels()
    _keep_freed_memory()
    try:
        code = _call(main, sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()  # here, where it is seen that a reader left (`| head`)
    except BrokenPipeError:  # Python would end with a traceback of its own
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code


def _call(main: Main, argv: Sequence[str]) -> int:
    try:
        _configure_logging("info")
        words, level = take_general(argv)
        _configure_logging(level)
        return main(words)
    except BrokenPipeError:
        raise
    except PgraError as error:
        return _fail(str(error))
    except ModuleNotFoundError as error:
        return _fail(missing_package(error))
    except Stopped as stop:
        return _fail(str(stop), code=stop.code) if _is_main() else stop.code
    except KeyboardInterrupt:
        return _fail("interrupted; the same command continues where it stopped", code=130)
    except SystemExit as leave:  # argparse, after --help
        return leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except Exception as error:
        fault = device_fault(error) or system_fault(error)
        if fault is None:
            raise
        return _fail(fault)


def take_general(argv: Sequence[str]) -> tuple[list[str], str]:
    """Take -q and -v off; return the other words, and the level of the last, or "info"."""
    parser = HelpParser()
    add_general(parser)
    flags, words = parser.parse_known_args(same_spelling(argv))
    return words, str(flags.log_level)


def _fail(message: str, *, code: int = 2) -> int:
    message = one_line(message)  # such as a YAML parser's, in several lines
    head = "error: " if code == 2 else ""
    sys.stdout.flush()
    # Of a path that is not UTF-8, or from another program.
    sys.stderr.write(f"\npgra: {head}{visible(message)}\n")
    return code


def _bound_kernels() -> None:
    """Let oneDNN and torch keep fewer kernels, one a shape: by default these may take 8 GB."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, _NUM_KERNELS)


def _keep_freed_memory() -> None:
    """Let glibc keep up to 1 GB of freed memory, unless the user configured it: reuse is faster."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's alone
    if mallopt is not None and not any(name in os.environ for name in _MALLOC_NAMES):
        mallopt(_TRIM_THRESHOLD, 1 << 30)
        mallopt(_MMAP_THRESHOLD, 32 << 20)  # the most it takes; it no longer finds its own


def _configure_logging(level: str) -> None:
    logging.basicConfig(format="%(message)s", stream=sys.stderr, force=True)
    logging.getLogger("huggingface_hub").propagate = False  # its own handler writes to stderr
    wanted = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger("pgra").setLevel(wanted if _is_main() else max(wanted, logging.WARNING))


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"  # of the processes of accelerate launch


def main(argv: Sequence[str] | None = None) -> int:
    return run(dispatch, argv)


def dispatch(words: Sequence[str]) -> int:
    """Call the command that the first word names."""
    if not words or wants_help(words[:1]):
        HelpParser(
            description="Prompt-guided retrieval augmentation: a frozen language model picks the "
            "sentences that a\nreader should see first.",
            epilog="Example:\n"
            "  pgra index --corpus bundled:wikipedia-19k --encoder bundled:minilm-l6",
            words={name: about for name, (_, about) in COMMANDS.items()},
        ).show()
        return 0
    if words[0] in ("-V", "--version"):
        sys.stdout.write(f"pgra {__version__}\n")
        return 0
    choose("command", words[0], COMMANDS)
    if words[0] not in _SHARED:
        check_alone(f"pgra {words[0]}")
    module, _, name = COMMANDS[words[0]][0].partition(":")
    command = getattr(import_module(f"pgra.commands.{module}"), name or "main")
    return int(command(words[1:]))
