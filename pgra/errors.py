"""Errors that a user can mend: each says what is wrong, with which value, and the way out.

Scripts turn a `PgraError` into one line and exit code 2 (`pgra.cli.run`). Misuse by a caller is a
`ValueError`; `assert` is only for what our own code guarantees.
"""

import difflib
import os
import re
import reprlib
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

LONGEST_MESSAGE = 300
"""Characters of an error of what a user gave: what stands in a file may be of any length."""
_LONGEST_NAME = 80
LONGEST_REASON = 160
_MOST_COMPARED = 1000
_LONGEST_LIST = 160
_values = reprlib.Repr()
_values.maxstring = _values.maxother = _values.maxlong = _LONGEST_NAME
_values.maxlevel, _values.maxlist, _values.maxdict = 3, 4, 4


def show(value: object) -> str:
    """Return the repr of a value from outside for a message, cut where it is long or deep."""
    return cut(_values.repr(value), 2 * _LONGEST_NAME)


def cut(text: str, most: int = _LONGEST_NAME) -> str:
    """Return a text of at most so many characters: the middle of a longer one is left out."""
    if len(text) <= most:
        return text
    end = (most - 5) // 3
    return f"{text[: most - 5 - end]} ... {text[-end:]}"


_UNSEEN = {"Cc", "Cf", "Co", "Cs", "Zl", "Zp"}
_JOINERS = "\u200c\u200d"  # Hindi and Punjabi are written with them


def visible(text: str) -> str:
    """Return a text with a number for each character that is not seen; line breaks, tabs stay."""

    def show(char: str) -> str:
        if char in "\n\t" or char in _JOINERS or unicodedata.category(char) not in _UNSEEN:
            return char
        code = ord(char)
        return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"

    return "".join(map(show, text))


def nearest(name: str, known: Iterable[str], count: int = 1, cutoff: float = 0.5) -> list[str]:
    """Return the names that are most like one; none for a long one, which would take long."""
    if len(name) > _LONGEST_NAME:
        return []
    names = [other for other in known if len(other) <= 2 * _LONGEST_NAME]
    return difflib.get_close_matches(name, names[:_MOST_COMPARED], n=count, cutoff=cutoff)


class PgraError(Exception):
    """Base of all errors a user can mend.

    Attributes:
        longest: Characters of its message; the middle of a longer one is left out.
    """

    longest: ClassVar[int] = 1000  # several paths, and a command to copy

    def __init__(self, message: str) -> None:
        super().__init__(cut(message, self.longest))


class ConfigError(PgraError):
    """An argument, a YAML or a combination of them that cannot work."""

    longest = LONGEST_MESSAGE


class DataError(PgraError):
    """A corpus, task file or label that is missing, unreadable or contradictory."""

    longest = LONGEST_MESSAGE


class ArtifactError(PgraError):
    """A folder on disk that is stale, foreign, damaged or in use."""


class DamageError(ArtifactError):
    """Files that are not what was written.

    Attributes:
        what: Which file, and what is wrong with it.
    """

    def __init__(self, what: str, way_out: str = "make it again in another folder") -> None:
        super().__init__(f"{what}: {way_out}")
        self.what = what


class ModelError(PgraError):
    """A model that cannot be found, loaded or used for what is asked."""


def device_fault(error: Exception) -> str | None:
    """Word what ends the work of a GPU, or what the memory does not hold; None for other errors."""
    said = str(error).strip().partition("\n")[0].rstrip(".")
    kinds = {kind.__name__ for kind in type(error).__mro__}  # torch may not be loaded here
    kept = "what was finished is kept, and the same command goes on"
    if "OutOfMemoryError" in kinds:
        return f"the GPU's memory is full ({said}): use smaller batches, or a smaller model; {kept}"
    if "MemoryError" in kinds or ("RuntimeError" in kinds and _NO_MEMORY.search(said)):
        said = said.rpartition("DefaultCPUAllocator: ")[2] or "nothing more was said"
        return (
            f"this machine's memory is full ({said}): end other programs, or use smaller batches, "
            f"or a smaller model; {kept}"
        )
    is_told = type(error) is RuntimeError and _OF_A_GPU.search(said)
    if "AcceleratorError" in kinds or is_told:
        return (
            f"the GPU failed ({said}): {kept}; if it fails again look at nvidia-smi, or use "
            "--device cpu"
        )
    return None


_NO_MEMORY = re.compile(  # as PyTorch, oneDNN and Python say it
    "DefaultCPUAllocator: can't allocate memory|could not create a primitive|"
    "can't start new thread|Cannot allocate memory"
)
_OF_A_GPU = re.compile("CUDA|CUBLAS|cuDNN|CUSPARSE|CUSOLVER|CUFFT")  # and not of a tensor on cuda:0


@contextmanager
def reading(path: object, kind: type[PgraError] = DataError) -> Iterator[None]:
    """Turn whatever a library raises at a file that it cannot read into one line.

    What is not the file's fault passes: an error of the system, a lack of memory, one of ours.

    Raises:
        PgraError: Of the given kind.
    """
    try:
        yield
    except Exception as error:
        is_ours = isinstance(error, PgraError) or getattr(error, "errno", None) is not None
        if is_ours or device_fault(error):
            raise
        reason = " ".join(str(error).split())
        what = f"{path} cannot be read ({type(error).__name__}: {cut(reason, LONGEST_REASON)})"
        raise kind(what) from error


@contextmanager
def device_failures(what: str) -> Iterator[None]:
    """Name what ran where a GPU failed: lost, out of memory, or without a kernel for it.

    Raises:
        ModelError: In place of torch's error.
    """
    try:
        yield
    except Exception as error:
        if fault := device_fault(error):
            raise ModelError(f"{what}: {fault}") from error
        raise


class Stopped(Exception):
    """A training that was asked to stop, did so with a whole checkpoint, and can go on.

    Attributes:
        code: The exit code that tells why.
    """

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


def near_files(path: Path) -> str:
    """Word what is near a file that is not there; "" if nothing is."""
    if not path.parent.is_dir():
        return f" Neither does the folder {path.parent}."
    names = [p.name for p in path.parent.iterdir() if p.is_file()]
    near = nearest(path.name, names, count=3)
    return f" Near it: {', '.join(near)}." if near else ""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Word the message for a name that is not in a table, with the nearest one that is.

    Args:
        kind: What the name stands for, such as "retriever".
        name: What was asked for.
        known: The names there are.
    """
    names = sorted(known)
    bare = {each.lstrip("-"): each for each in names}  # dashes are alike in all flags
    near = nearest(name.lower().lstrip("-"), bare, cutoff=0.6)
    hint = f" Did you mean '{bare[near[0]]}'?" if near else ""
    listed = cut(", ".join(names) or "none", _LONGEST_LIST)
    return f"unknown {kind} '{cut(name)}'.{hint} Known: {listed}."


def check_alone(command: str) -> None:
    """Refuse to be one of several processes: each would do all of the command's work.

    Raises:
        ConfigError: If there are several.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count > 1:
        raise ConfigError(
            f"{command} runs in one process, and WORLD_SIZE says that there are {count}: start it "
            "without accelerate launch or torchrun"
        )
