"""The first stage's contract: texts in, candidates out; and FAISS, where it is installed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from pgra.artifacts import Manifest
from pgra.config import RetrieverArguments
from pgra.core import ALONE, Candidates, Context, Json, machine_memory
from pgra.errors import ArtifactError, ConfigError

if TYPE_CHECKING:
    from pgra.data.corpus import Corpus


@dataclass(frozen=True, kw_only=True)
class IndexRequest:
    """Which index is wanted, and who builds it if it is not there.

    Attributes:
        args: The first stage's arguments.
        corpus: What is searched.
        artifacts: Root of all products.
        output_dir: Where to build instead of under `artifacts`; hybrid's BM25 stays there.
        device: What encodes.
        context: Who shares the shards.
        progress: Whether to show bars.
        queries: Texts to measure a dense index's recall with; None: passages.
        engine: "local", or "ray" (`pgra.retrieval.ray_engine`).
        num_workers: Shards that Ray encodes at once; None: as many as its cluster can.
    """

    args: RetrieverArguments
    corpus: "Corpus"
    artifacts: Path
    output_dir: Path | None = None
    device: str = "auto"
    context: Context = ALONE
    progress: bool = True
    queries: Sequence[str] | None = None
    engine: str = "local"
    num_workers: int | None = None


@dataclass(frozen=True)
class BuiltIndex:
    """An index on disk.

    Attributes:
        folder: Where it is.
        manifest: What it says of itself.
        num_reused: Passages whose work was found done, all of them if the index was finished.
    """

    folder: Path
    manifest: Manifest
    num_reused: int


class Retriever(Protocol):
    """Finds passages for texts; knows nothing of tasks, labels or prompts."""

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """All that determines the candidates of a text."""
        ...

    @classmethod
    def prepare(cls, request: IndexRequest) -> list[BuiltIndex]:
        """Find the finished index, or build it."""
        ...

    @classmethod
    def open(cls, request: IndexRequest) -> Self:
        """Find or build the index, and load it."""
        ...

    def retrieve(self, queries: Sequence[str], k: int) -> Candidates:
        """Give each query its k candidates: (B, k), best first, ties by row, missing = -1.

        Raises:
            ConfigError: If k exceeds the corpus.
        """
        ...


def check_num_candidates(k: int, num_passages: int) -> None:
    """Refuse to look for more candidates than there are passages.

    Raises:
        ConfigError: If k exceeds the corpus, with both numbers.
    """
    if k > num_passages:
        raise ConfigError(
            f"num_candidates ({k}) exceeds the corpus ({num_passages} passages): "
            "lower it, or search a larger corpus"
        )


def refuse_strangers(folder: Path, ours: Sequence[str]) -> None:
    """Refuse to build in a folder that holds anything else: an artefact owns its folder.

    Args:
        folder: Where to build; it need not exist.
        ours: Patterns of the file names an unfinished build may have left.

    Raises:
        ArtifactError: If it holds another file or folder, naming the first. Hidden ones may stay.
    """
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    for path in paths:
        if not path.name.startswith(".") and not any(path.match(pattern) for pattern in ours):
            raise ArtifactError(
                f"{folder} holds {path.name}, which is not an index's: choose an empty folder"
            )


# FAISS itself; and which index of it suits a corpus (`--index_factory auto`) and the memory.


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
