"""The first stage's contract: texts in, candidates out. One class a retriever, by name in a table.

Light: neither torch nor FAISS is imported here.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import xxhash

from pgra.arrays import Rows
from pgra.artifacts import (
    Artifact,
    Inputs,
    artifact_dir,
    at_home,
    digest,
    load_manifest,
    read_manifest,
    without_home,
)
from pgra.config import Arguments, find_class
from pgra.context import Context
from pgra.data.corpus import Corpus, CorpusArguments, open_corpus
from pgra.errors import ArtifactError, ConfigError
from pgra.retrieval.arguments import RETRIEVERS as RETRIEVERS
from pgra.retrieval.arguments import RetrieverArguments as RetrieverArguments
from pgra.types import Candidates, Example, Fields, Json

INDEXES = "indexes"  # their folder among the artifacts


@dataclass(frozen=True, kw_only=True)
class IndexRequest:
    """Which index is wanted, and how a missing one is built.

    Attributes:
        context: Processes and folders; indexes are under its artifacts.
        options: The retriever's own arguments, of its `options_class`.
        output_dir: Where to build instead of under the artifacts; of a union its last stage.
    """

    args: RetrieverArguments
    corpus: Corpus
    context: Context
    options: Arguments | None = None
    output_dir: Path | None = None


class Retriever(ABC):
    """Finds passages for texts; independent of tasks, prompts and labels.

    A custom one is a subclass with `open`, `fingerprint` and `retrieve`, named `module:Class`.

    Attributes:
        options_class: The class of its own flags, if it has any.
        fingerprint: All that determines the candidates of a text.
        inputs: Files that it reads; if one changes, no candidates are kept.
        built: Its indexes on disk, if it has any.
    """

    options_class: ClassVar[type[Arguments] | None] = None
    fingerprint: Fields
    inputs: Sequence[Inputs] = ()
    built: Sequence[Artifact] = ()

    @classmethod
    @abstractmethod
    def open(cls, request: IndexRequest) -> Self:
        """Load it; what it searches is found, or built first."""

    @abstractmethod
    def retrieve(self, queries: Sequence[str], k: int) -> Candidates:
        """Return each query's k candidates: (B, k), best first, ties by row, missing = -1.

        k is at most the number of passages: who opens a retriever has checked that.
        """


def find_retriever(name: str) -> type[Retriever]:
    """Import a retriever.

    Raises:
        ConfigError: If the name is unknown, or its class is not a `Retriever`.
    """
    is_run = name.startswith("run:")  # and its file
    cls: type[Retriever] = find_class("retriever", "run" if is_run else name, RETRIEVERS, Retriever)
    return cls


def open_retriever(
    args: RetrieverArguments,
    corpus: Corpus,
    context: Context,
    *,
    options: Arguments | None = None,
) -> Retriever:
    """Open the first stage: find its finished index, or build it.

    With `args.index_dir` that index is used or refused, never built. `options` are the retriever's
    own arguments; None: their defaults.

    Raises:
        ConfigError: If more candidates are asked for than there are passages, or the index's
            settings cannot work.
        ArtifactError: If the index was made from something else (the field and both values are
            named), is damaged, or unfinished.
        ModelError: If the encoder cannot be used.
    """
    cls = find_retriever(args.retriever)
    check_num_candidates(args.num_candidates, len(corpus))
    if options is None and cls.options_class is not None:
        options = cls.options_class()
    request = IndexRequest(args=args, corpus=corpus, context=context, options=options)
    return cls.open(request)


def index_folder(request: IndexRequest, kind: str, stage: str, fields: Fields) -> Path:
    """Return the folder of an index that `fields` decide; errors if the named one is another."""
    args = request.args
    if args.index_dir is not None:
        read_manifest(Path(args.index_dir), stage=stage, fingerprint=fields)
    default = artifact_dir(request.context.artifacts / INDEXES, kind, fields)
    return Path(args.index_dir or request.output_dir or default)


def check_num_candidates(k: int, num_passages: int) -> None:
    """Raise ConfigError if k exceeds the corpus, with both numbers."""
    if k > num_passages:
        raise ConfigError(f"num_candidates ({k}) exceeds the corpus ({num_passages}): lower it")


_SEED = 0
_BLOCK = 256  # rows drawn at a time: a fixed number, so that a larger k begins with a smaller one's
_SMALL = 1 << 15  # a corpus of at most so many rows is shuffled whole: it may be drawn to its end


class RandomRetriever(Retriever):
    """The control: draws passages uniformly without repeats, seeded by the query's text alone.

    Guo et al. 2023 have no such row; without it a gain of Fusion-in-Decoder over the plain reader
    may come from the extra text alone.
    """

    def __init__(self, num_passages: int, fingerprint: Fields) -> None:
        self.fingerprint = fingerprint
        self._num_passages = num_passages

    @classmethod
    def open(cls, request: IndexRequest) -> Self:
        drawn: dict[str, Json] = {"drawn": "uniformly, by the query's text", "seed": _SEED}
        return cls(len(request.corpus), {**request.corpus.fingerprint, **drawn})

    def retrieve(self, queries: Sequence[str], k: int) -> Candidates:
        """Draw k passages for each query, (B, k); equal texts get equal ones.

        Scores are 0, -1, -2, ..., in the order drawn. A larger k begins with a smaller one's
        passages.
        """
        rows = np.empty((len(queries), k), dtype=np.int64)
        for line, query in enumerate(queries):
            rows[line] = self._draw(query, k)
        places = np.arange(0, -k, -1, dtype=np.float32)
        return Candidates(rows, np.tile(places, (len(queries), 1)))

    def _draw(self, query: str, k: int) -> Rows:
        rng = np.random.default_rng([_SEED, xxhash.xxh3_64_intdigest(query.encode())])
        if self._num_passages <= _SMALL:
            return rng.permutation(self._num_passages)[:k]
        drawn: dict[int, None] = {}  # keeps the order
        while len(drawn) < k:
            drawn.update(dict.fromkeys(rng.integers(self._num_passages, size=_BLOCK).tolist()))
        return np.array(list(drawn)[:k], dtype=np.int64)


def refuse_strangers(folder: Path, ours: Sequence[str]) -> None:
    """Raise ArtifactError if a folder to build in holds more than an unfinished build's files.

    `ours` are the latter's patterns. Hidden files may stay.
    """
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    for path in paths:
        if not path.name.startswith(".") and not any(path.match(pattern) for pattern in ours):
            raise ArtifactError(f"{folder} holds {path.name}, no index's: choose an empty folder")


# What an index was asked for, kept in its manifest, so that its folder alone is enough to use it.
# The fingerprint says what an index is, by checksums; the recipe says where that came from, by
# names. Local paths are absolute, so that another working directory finds them too, but the home
# folder is written ~, so that an index does not reveal its author's name.


_NOT_MADE_OF = ("index_dir", "num_candidates", "num_neighbors", "neighbor_encoder")


@dataclass(frozen=True)
class Recipe:
    """What an index was asked for; "auto" is replaced by the dtype it gave."""

    corpus: CorpusArguments
    retriever: RetrieverArguments
    corpus_folder: Path

    @classmethod
    def read(cls, folder: Path, *, stage: str | None = None) -> Self:
        """Read a finished index's recipe; ArtifactError if its corpus was not opened by name."""
        manifest = load_manifest(folder, stage=stage)
        recipe = manifest.counts.get("recipe")
        if recipe is None:
            raise ArtifactError(f"{folder} does not say what it was made from: build it again")
        corpus = recipe["corpus"]
        retriever = {
            **recipe["retriever"],
            "retriever": manifest.stage.removesuffix("_index"),
            "index_dir": str(folder),
            "encoder": str(at_home(recipe["retriever"]["encoder"])),
        }
        if "dtype" in manifest.fingerprint:
            retriever["encoder_dtype"] = manifest.fingerprint["dtype"]
        return cls(
            CorpusArguments(**{**corpus, "corpus": [str(at_home(n)) for n in corpus["corpus"]]}),
            RetrieverArguments(**retriever),
            at_home(recipe["corpus_folder"]),
        )

    def open_corpus(self, artifacts: Path | None = None) -> Corpus:
        """Open the passages; where their artifact is gone, read the sources again."""
        if self.corpus_folder.is_dir():
            return Corpus(self.corpus_folder, self.corpus)
        return open_corpus(self.corpus, artifacts)


def write_recipe(args: RetrieverArguments, corpus: Corpus) -> dict[str, Json]:
    """Return a manifest's fields of a recipe; none where the corpus was not opened by name."""
    if corpus.made_by is None:
        return {}
    sources = [without_home(whole_path(name)) for name in corpus.made_by.sources]
    values = {name: value for name, value in asdict(args).items() if name not in _NOT_MADE_OF}
    return {
        "recipe": {
            "corpus": {**asdict(corpus.made_by), "corpus": sources},
            "corpus_folder": without_home(str(corpus.folder.resolve())),
            "retriever": {**values, "encoder": without_home(whole_path(args.encoder))},
        }
    }


def whole_path(name: str) -> str:
    """Return a local path resolved; a name on the hub or a bundled one stays as it is."""
    path = at_home(name)
    return str(path.resolve()) if path.exists() else name


def examples_digest(examples: Sequence[Example]) -> str:
    return digest([dict(example.fields) for example in examples])
