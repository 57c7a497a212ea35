"""Errors that a user can fix: each says what is wrong, with which value, and what to do.

`pgra.cli.run` turns a `PgraError` into one line and exit code 2. A caller's misuse is a
`ValueError`.
"""

import difflib
import os
import re
import reprlib
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Characters of an error about what a user gave: a file may hold a text of any length.
LONGEST_MESSAGE = 1000
_LONGEST_NAME = 80
LONGEST_REASON = 160
_LONGEST_LIST = 160
_values = reprlib.Repr()
_values.maxstring = _values.maxother = _values.maxlong = _LONGEST_NAME
_values.maxlevel, _values.maxlist, _values.maxdict = 3, 4, 4


def show(value: object) -> str:
    """Return the repr of a value from outside for a message, cut where it is long or deep."""
    return cut(_values.repr(value), 2 * _LONGEST_NAME)


def cut(text: str, most: int = _LONGEST_NAME) -> str:
    """Cut a text to at most so many characters by leaving out its middle."""
    if len(text) <= most:
        return text
    end = (most - 5) // 3
    return f"{text[: most - 5 - end]} ... {text[-end:]}"


_UNSEEN = {"Cc", "Cf", "Co", "Cs", "Zl", "Zp"}
_JOINERS = "\u200c\u200d"  # Hindi and Punjabi are written with them


def visible(text: str) -> str:
    """Replace each character that cannot be seen by its number; line breaks and tabs stay."""

    def show(char: str) -> str:
        if char in "\n\t" or char in _JOINERS or unicodedata.category(char) not in _UNSEEN:
            return char
        code = ord(char)
        return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"

    return "".join(map(show, text))


def like_names(name: str, known: Iterable[str], count: int = 1, cutoff: float = 0.5) -> list[str]:
    """Return the most similar names of the first 1,000; none for a long one: it would take long."""
    if len(name) > _LONGEST_NAME:
        return []
    return difflib.get_close_matches(name, [*known][:1000], n=count, cutoff=cutoff)


class PgraError(Exception):
    """Base of all errors that a user can fix; a message is cut to 1,000 characters."""

    def __init__(self, message: str) -> None:
        super().__init__(cut(message, LONGEST_MESSAGE))


class ConfigError(PgraError):
    """An argument, a YAML or a combination of them that cannot work."""


class DataError(PgraError):
    """A corpus, task file or label that is missing, unreadable or contradictory."""


class ArtifactError(PgraError):
    """A folder on disk that is stale, foreign, damaged or in use."""


class DamageError(ArtifactError):
    """Files that are not what was written; `what` says which, and what is wrong."""

    def __init__(self, what: str, way_out: str = "make it again in another folder") -> None:
        super().__init__(f"{what}: {way_out}")
        self.what = what


class ModelError(PgraError):
    """A model that cannot be found, loaded or used for what is asked."""


def device_fault(error: Exception) -> str | None:
    """Describe a failed GPU or a lack of memory; None for other errors."""
    said = str(error).strip().partition("\n")[0].rstrip(".")
    kinds = {kind.__name__ for kind in type(error).__mro__}  # torch may not be loaded here
    kept = "what was finished is kept, and the same command continues"
    if "OutOfMemoryError" in kinds:
        return f"the GPU's memory is full ({said}): use smaller batches, or a smaller model; {kept}"
    if "MemoryError" in kinds or ("RuntimeError" in kinds and _NO_MEMORY.search(said)):
        said = said.rpartition("DefaultCPUAllocator: ")[2]
        return (
            f"this machine's memory is full ({said}): end other programs, or use smaller batches, "
            f"or a smaller model; {kept}"
        )
    is_gpus = type(error) is RuntimeError and _OF_A_GPU.search(said)
    if "AcceleratorError" in kinds or is_gpus:
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
    """Turn a library's error about a file that it cannot read into a one-line error of `kind`.

    Errors of the system, a lack of memory and our own errors pass.
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


class Stopped(Exception):
    """A training that was asked to stop, and can be resumed; `code` is the exit code."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


def near_files(path: Path) -> str:
    """Describe what is near a missing file; "" if nothing is."""
    if not path.parent.is_dir():
        return f" Neither does the folder {path.parent}."
    names = [p.name for p in path.parent.iterdir() if p.is_file()]
    near = like_names(path.name, names, count=3)
    return f" Near it: {', '.join(near)}." if near else ""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown name of a kind ("retriever"), with the nearest known."""
    names = sorted(known)
    bare = {each.lstrip("-"): each for each in names}  # dashes are alike in all flags
    near = like_names(name.lower().lstrip("-"), bare, cutoff=0.6)
    hint = f" Did you mean '{bare[near[0]]}'?" if near else ""
    listed = cut(", ".join(names) or "none", _LONGEST_LIST)
    return f"unknown {kind} '{cut(name)}'.{hint} Known: {listed}."


def check_alone(command: str) -> None:
    """Raise a ConfigError in one of several processes: each would do all of the work."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count > 1:
        raise ConfigError(
            f"{command} runs in one process, and WORLD_SIZE says that there are {count}: start it "
            "without accelerate launch or torchrun"
        )
