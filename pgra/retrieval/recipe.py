"""What an index was asked for, kept in its manifest, so that its folder alone is enough to go on.

The fingerprint tells what an index is, by checksums; the recipe tells where that came from, by
names. Local paths are kept whole, so that another working directory finds them too.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pgra.config import CorpusArguments, RetrieverArguments
from pgra.errors import ArtifactError
from pgra.io import Manifest
from pgra.types import Json

if TYPE_CHECKING:
    from pgra.data.corpus import Corpus

_Section = TypeVar("_Section")
_NOT_MADE_OF = ("index_dir", "num_candidates", "num_neighbors", "neighbor_encoder")
_RETRIEVERS = {"dense_index": "dense", "bm25_index": "bm25"}


@dataclass(frozen=True)
class Recipe:
    """What an index was asked for.

    Attributes:
        corpus: The corpus.
        retriever: The first stage, with the dtype and the factory that "auto" came to: the
            same index on any device.
        corpus_folder: Where the corpus had been read into.
    """

    corpus: CorpusArguments
    retriever: RetrieverArguments
    corpus_folder: Path

    @classmethod
    def read(cls, folder: Path, manifest: Manifest) -> Self:
        """Read the recipe of a finished index.

        Args:
            folder: The index.
            manifest: Its manifest.

        Raises:
            ArtifactError: If it has none: it was made before they were kept, or from arrays.
        """
        told: Any = manifest.counts.get("recipe")
        if not isinstance(told, dict):
            raise ArtifactError(
                f"{folder} does not say what it was made from, as one of an earlier pgra: build it "
                "again (python -m index_build)"
            )
        asked = {"encoder_dtype": "dtype", "index_factory": "factory"}
        settled: dict[str, Any] = {
            name: manifest.fingerprint[key]
            for name, key in asked.items()
            if key in manifest.fingerprint
        }
        retriever = replace(
            _known(RetrieverArguments, told["retriever"]),
            retriever=_RETRIEVERS[manifest.stage],
            index_dir=str(folder),
            **settled,
        )
        folder_of_corpus = Path(told["corpus_folder"])
        return cls(_known(CorpusArguments, told["corpus"]), retriever, folder_of_corpus)


def write_recipe(args: RetrieverArguments, corpus: "Corpus") -> dict[str, Json] | None:
    """Give what to keep of a recipe; None where the corpus was not opened by name."""
    if corpus.made_by is None:
        return None
    sources = [settle_name(name) for name in corpus.made_by.sources]
    asked = {k: v for k, v in asdict(args).items() if k not in _NOT_MADE_OF}
    return {
        "corpus": asdict(replace(corpus.made_by, corpus=sources)),
        "corpus_folder": str(corpus.folder.resolve()),
        "retriever": {**asked, "encoder": settle_name(args.encoder)},
    }


def settle_name(name: str) -> str:
    """Give a local path whole; a name on the hub or a bundled one stays as it is."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


def _known(section: type[_Section], values: Mapping[str, Any]) -> _Section:
    """Make a section of the values that this version knows."""
    names = {field.name for field in fields(section)}  # type: ignore[arg-type]
    return section(**{name: value for name, value in values.items() if name in names})
