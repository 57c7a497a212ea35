"""Errors that a user can fix: each says what is wrong, with which value, and what to do.

`pgra.cli.run` turns a `PgraError` into one line and exit code 2. A caller's misuse is a
`ValueError`.
"""

import difflib
import errno
import os
import re
import reprlib
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

# Characters of an error about what a user gave: a file may hold a text of any length.
LONGEST_MESSAGE = 1000
_LONGEST_NAME = 80
_LONGEST_PART = 160
_values = reprlib.Repr()
_values.maxstring = _values.maxother = _values.maxlong = _LONGEST_NAME
_values.maxlevel = 3
_values.maxlist = 4
_values.maxdict = 4


_EXTRAS = {  # what brings a package that is imported when it is needed; all others: lm
    "reports": ("matplotlib", "sacrebleu"),
    "serve": ("starlette", "uvicorn"),
    "mcp": ("mcp",),
    "openai": ("openai",),
    "trec": ("ir_measures", "ir_datasets"),
    "demo": ("gensim", "gguf", "onnx"),
    "integrations": ("langchain_core", "llama_index", "pyterrier"),
}


def missing_package(error: ImportError) -> str:
    """Return the message for a package that is not installed, with the extra that brings it."""
    package = (error.name or "").partition(".")[0]
    extra = next((extra for extra, names in _EXTRAS.items() if package in names), "lm")
    return f"{package} is not installed: pip install '.[{extra}]' in a clone of pgra"


def show(value: object) -> str:
    """Return the repr of a value from outside, in one line, cut where it is long or deep."""
    return cut(_values.repr(value).replace("\n", " "), _LONGEST_PART)


def cut(text: str, most: int = _LONGEST_NAME) -> str:
    """Cut a text to at most so many characters by leaving out its middle."""
    if len(text) <= most:
        return text
    end = (most - 5) // 3
    return f"{text[: most - 5 - end]} ... {text[-end:]}"


def one_line(text: object) -> str:
    """Return a text with single spaces in place of line breaks and the like."""
    return " ".join(str(text).split())


_UNSEEN = {"Cc", "Cf", "Co", "Cs", "Zl", "Zp"}
_KEPT = "\n\t\u200c\u200d"  # Hindi and Punjabi are written with joiners


def visible(text: str) -> str:
    """Escape each character that cannot be seen; line breaks and tabs stay."""
    chars = []
    for char in text:
        is_unseen = unicodedata.category(char) in _UNSEEN and char not in _KEPT
        chars.append(char.encode("unicode_escape").decode() if is_unseen else char)
    return "".join(chars)


class PgraError(Exception):
    """Base of all errors that a user can fix; a message is cut to 1,000 characters."""

    def __init__(self, message: str) -> None:
        super().__init__(cut(message, LONGEST_MESSAGE))


class ConfigError(PgraError):
    """An argument, a YAML or a combination of them that cannot work."""


class PartDone(Exception):
    """What a part of a job had to do is done; the message says what is left."""


class DataError(PgraError):
    """A corpus, task file or label that is missing, unreadable or contradictory."""


class ArtifactError(PgraError):
    """A folder on disk that is stale, foreign, damaged or in use."""


class BusyError(ArtifactError):
    """A folder that another job holds."""


class DamageError(ArtifactError):
    """Files that are not what was written; `what` says which, and what is wrong."""

    def __init__(self, what: str, way_out: str = "make it again in another folder") -> None:
        super().__init__(f"{what}: {way_out}")
        self.what = what


class ModelError(PgraError):
    """A model that cannot be found, loaded or used for what is asked."""


def device_fault(error: Exception) -> str | None:
    """Describe a failed GPU or a lack of memory; None for other errors."""
    reason = str(error).strip().partition("\n")[0].rstrip(".")
    kinds = {kind.__name__ for kind in type(error).__mro__}  # torch may not be loaded here
    way = "use smaller batches, or a smaller model"
    if "OutOfMemoryError" in kinds:
        what = "the GPU's memory is full"
    elif "MemoryError" in kinds or ("RuntimeError" in kinds and _NO_MEMORY.search(reason)):
        what = "this machine's memory is full"
    elif "AcceleratorError" in kinds or (type(error) is RuntimeError and _OF_A_GPU.search(reason)):
        what = "the GPU failed"
        way = "look at nvidia-smi, or use --device cpu"
    else:
        return None
    return f"{what} ({reason}): {way}; what was finished is kept, and the same command continues"


_NO_MEMORY = re.compile(  # as PyTorch, oneDNN and Python say it
    "DefaultCPUAllocator: can't allocate memory|could not create a primitive|"
    "can't start new thread|Cannot allocate memory"
)
_OF_A_GPU = re.compile("CUDA|CUBLAS|cuDNN|CUSPARSE|CUSOLVER|CUFFT")  # and not of a tensor on cuda:0


def system_fault(error: Exception) -> str | None:
    """Describe an error of the system, such as a full disk; None for other errors."""
    text = str(error)
    numbered = _OS_ERROR.search(text)
    code = error.errno if isinstance(error, OSError) else None
    if code is None and numbered:
        code = int(numbered[1])
    elif code is None and _CUT_SHORT.fullmatch(text):
        code = errno.ENOSPC
    if code is None:
        return None
    return f"cannot use {getattr(error, 'filename', None) or 'a file'}: {os.strerror(code)}"


def name_file(error: OSError, path: object) -> None:
    """Name the file in an error of the system that names none, such as of a full disk."""
    if error.errno is not None and error.filename is None:
        error.filename = str(path)


_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # as safetensors and tokenizers say it
_CUT_SHORT = re.compile(r"\d+ requested and \d+ written")  # as numpy says it, for bm25s


@contextmanager
def reading(path: object, kind: type[PgraError] = DataError) -> Iterator[None]:
    """Turn a library's error about a file that it cannot read into a one-line error of `kind`.

    Errors of the system, a lack of memory or of a package, and our own errors pass.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError):
            name_file(error, path)
        is_ours = isinstance(error, PgraError | ImportError)
        if is_ours or device_fault(error) or system_fault(error):
            raise
        reason = one_line(error)
        what = f"{path} cannot be read ({type(error).__name__}: {cut(reason, _LONGEST_PART)})"
        raise kind(what) from error


class Stopped(Exception):
    """A training that was asked to stop, and can be resumed; `code` is the exit code."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown name of a kind ("retriever"), with the nearest known."""
    names = sorted(known)
    near = difflib.get_close_matches(name.lower()[:_LONGEST_NAME], names[:1000], n=1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    listed = cut(", ".join(names) or "none", _LONGEST_PART)
    return f"unknown {kind} '{cut(name)}'.{hint} Known: {listed}."


def check_alone(command: str) -> None:
    """Raise a ConfigError in one of several processes: each would do all of the work."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count > 1:
        raise ConfigError(f"{command} runs in one process, not {count}: start it alone")
