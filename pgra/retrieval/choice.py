"""FAISS itself; and which index of it suits a corpus (`--index_factory auto`) and the memory."""

from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from pgra.errors import ConfigError
from pgra.processes import machine_memory

AUTO = "auto"
EXACT = "Flat"
MOST_EXACT_ROWS = 2_000_000
"""Up to so many passages `auto` compares a query with all of them: nothing is lost, and CPUs are
quick enough (docs/performance.md, "The index")."""
_LISTS = ((16_000_000, 4096), (1 << 62, 16_384))
_LARGEST_CODE = 64  # bytes of a product quantizer's code
_ROW_BYTES = 8  # its number, in a list
_SHARE = 0.5  # of the machine's memory
_GB = 1e9
_PACKAGES = ("faiss-cpu", "faiss-gpu")  # both are the module `faiss`


@cache
def import_faiss() -> Any:
    """Give the module `faiss`, which comes with the extra `cpu` or the extra `gpu`.

    Raises:
        ConfigError: If neither is installed, or both: the one has then overwritten files of the
            other, and which of them works is chance.
    """
    if all(map(_is_installed, _PACKAGES)):
        raise ConfigError(
            f"{' and '.join(_PACKAGES)} are both installed and overwrite each other: "
            f"pip uninstall -y {' '.join(_PACKAGES)}, then pip install 'pgra[gpu]' for a GPU or "
            "'pgra[cpu]' for none"
        )
    try:
        import faiss
    except ImportError as error:
        raise ConfigError(
            f"to search vectors, FAISS is needed ({error}): pip install 'pgra[cpu]', or "
            "'pgra[gpu]' for a GPU"
        ) from None
    return faiss


def _is_installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


@dataclass(frozen=True)
class Choice:
    """A factory and why.

    Attributes:
        factory: FAISS factory string.
        reason: One line; empty where the user named the factory.
    """

    factory: str
    reason: str = ""


def choose_factory(factory: str, num_rows: int, width: int, *, memory: int) -> Choice:
    """Give the factory, or for `auto` the one that suits the corpus, and say why.

    Few passages are compared exactly, whatever memory there is: vectors beyond it are searched from
    the disk. Many are put in lists, each vector kept as exactly as memory allows: in float32, in
    float16, in 8 bits a dimension, by a product quantizer.

    Args:
        factory: FAISS factory string, or `auto`.
        num_rows: P.
        width: D.
        memory: Bytes that the index may take.
    """
    if factory != AUTO:
        return Choice(factory)
    size = f"{num_rows:,} passages x {width}"
    choice = _exact(size, num_rows * width * 4, memory)
    if num_rows > MOST_EXACT_ROWS:
        choice = _lists(size, num_rows, width, memory=memory)
    return choice


def memory_limit(gigabytes: float | None) -> int:
    """Give the bytes that an index may take: those asked for, or half of what the machine has."""
    return int(_SHARE * machine_memory() if gigabytes is None else gigabytes * _GB)


def _exact(size: str, needed: int, memory: int) -> Choice:
    reason = f"{size} are few enough to compare with all of them"
    if needed <= memory:
        return Choice(EXACT, f"{reason}, and their {_gb(needed)} fit in {_gb(memory)}")
    return Choice(EXACT, f"{reason}, from the disk, as {_gb(needed)} exceed {_gb(memory)}")


def _lists(size: str, num_rows: int, width: int, *, memory: int) -> Choice:
    num_lists = next(lists for most, lists in _LISTS if num_rows <= most)
    code = max(n for n in range(1, min(_LARGEST_CODE, width) + 1) if width % n == 0)
    kinds = {"Flat": 4 * width, "SQfp16": 2 * width, "SQ8": width, f"PQ{code}": code}
    needed = {kind: num_rows * (length + _ROW_BYTES) for kind, length in kinds.items()}
    kind = next((kind for kind in kinds if needed[kind] <= memory), f"PQ{code}")
    fits = f"fit in {_gb(memory)}" if needed[kind] <= memory else f"exceed {_gb(memory)}, the least"
    reason = f"{size} are too many to compare with all; in {kind} their {_gb(needed[kind])} {fits}"
    return Choice(f"IVF{num_lists},{kind}", reason)


def _gb(count: int) -> str:
    return f"{count / _GB:.3g} GB"
