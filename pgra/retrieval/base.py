"""The first stage's contract: texts in, candidates out, whatever finds them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from pgra.config import RetrieverArguments
from pgra.errors import ArtifactError, ConfigError
from pgra.io import Manifest
from pgra.processes import Processes
from pgra.types import Candidates, Json

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
        processes: Who shares the shards.
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
    processes: Processes = Processes()  # noqa: RUF009 (frozen)
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
