"""`pgra.Index`: passages and their vectors, searched from Python.

    ROOT/index      the dense index, as `pgra index` builds and opens it
    ROOT/corpora    the passages as they were read
    ROOT/passages   lists and data sets that were given, as files
    ROOT/encoder    the encoder, where it was a loaded model

The command line's artifacts have the same layout, but for the index's name.
"""

import logging
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Self, overload

import torch

from pgra.artifacts import (
    TemporaryFolder,
    at_home,
    check_fingerprint,
    is_finished,
    load_manifest,
    sync_folder,
)
from pgra.core import MISSING_ROW, Context, Hit, check_device
from pgra.core import as_list as as_list
from pgra.core import as_texts as as_texts
from pgra.core import check_count as check_count
from pgra.core import check_kinds as check_kinds
from pgra.data.corpus import Corpus, CorpusArguments, load_corpus, open_corpus, write_passages
from pgra.encoders.encoder import Encoder
from pgra.errors import ArtifactError, ConfigError
from pgra.retrieval.base import (
    BuiltIndex,
    IndexRequest,
    Recipe,
    RetrieverArguments,
    refuse_strangers,
)
from pgra.retrieval.dense import (
    STAGE,
    TRAINED,
    DenseRetriever,
    add_passages,
    dense_fingerprint,
    find_or_build,
)

logger = logging.getLogger(__name__)

_INDEX, _CORPORA, _PASSAGES, _ENCODER = _PARTS = ("index", "corpora", "passages", "encoder")
_BATCH = 1024  # passages read at once


class Index:
    """Passages that are searched by meaning: `Index.build` makes one, `Index.load` opens one.

    Attributes:
        corpus: The passages; `corpus.made_by` names the files they were read from.
        encoder: Makes the vectors.
        args: The first stage's arguments for this very index: `index_dir` is its folder.
        folder: The dense index, which `pgra index info FOLDER` and `--index_dir FOLDER` take.
        retriever: Finds candidates in it, as the first stage of a run does.
    """

    def __init__(
        self, folder: Path, recipe: Recipe, encoder: Encoder, *, keeper: object = None
    ) -> None:
        """Open a finished index; see `Index.build` and `Index.load`.

        Raises:
            ArtifactError: If it is damaged, or was made from something else.
        """
        if recipe.corpus_folder.is_dir():
            corpus = replace(load_corpus(recipe.corpus_folder), made_by=recipe.corpus)
        else:
            corpus = open_corpus(recipe.corpus)  # reads the sources again
        self.corpus, self.encoder, self.folder = corpus, encoder, folder.absolute()
        self.args = replace(recipe.retriever, index_dir=str(self.folder))
        self._recipe, self._keeper = recipe, keeper
        device = str(encoder.device)
        self._context = Context(artifacts=_root_of(recipe), device=device)
        request = IndexRequest(args=self.args, corpus=corpus, context=self._context)
        built = find_or_build(request, encoder)
        self.retriever = DenseRetriever.load(request, encoder, built)

    @classmethod
    def build(
        cls,
        passages: str | Path | Corpus | CorpusArguments | Iterable[str],
        *,
        encoder: Any,
        path: str | Path | None = None,
        factory: str = "Flat",
        field: str = "text",
        device: str = "auto",
    ) -> Self:
        """Encode passages and build their index; a finished one at `path` is reused.

        Args:
            passages: A list of texts, or a `datasets.Dataset`: a hit's place is the place there.
                Or a file as `--corpus` takes it, such as a .txt, .jsonl, .parquet, or
                bundled:NAME: blank lines and duplicates are dropped, and places count the
                remaining passages.
            encoder: Hub id, folder or bundled:NAME; a `SentenceTransformer`; or a `pgra.Encoder`.
            path: Its folder, where an interrupted build resumes. None: a temporary folder, deleted
                with the index; `save` keeps it.
            factory: FAISS factory string. Flat is exact.
            field: Column or field that holds the text, for all but lists and .txt.
            device: Where the encoder runs; a `pgra.Encoder` stays where it is.

        Raises:
            PgraError: If an argument cannot be read or used, or `path` holds something else.
            ValueError: If `passages` or `encoder` is of a wrong type.
        """
        check_device(device, is_used=False)
        check_kinds("text", str, factory=factory, field=field)
        check_kinds("a folder", str | Path | None, path=path)
        keeper = None if path is not None else TemporaryFolder()
        root = keeper.path if keeper else at_home(str(path))
        if isinstance(passages, Corpus):
            if passages.made_by is None:
                raise ValueError("this corpus was opened by its folder: give its file or passages")
            passages = passages.made_by
        own = _open_encoder(encoder, device)
        asked = {"retriever": "dense", "index_factory": factory, "index_dir": None}
        args = RetrieverArguments(**{**vars(own.args), **asked})
        if is_finished(root / _INDEX):
            corpus = open_corpus(passages, corpus_field=field, is_quiet=True)
            made = load_manifest(root / _INDEX, stage=STAGE).fingerprint
            check_fingerprint(
                root,
                made={name: value for name, value in made.items() if name != TRAINED},
                asked=dense_fingerprint(corpus, own, factory),
                now="these passages and this encoder give",
                way_out="open it with Index.load, or choose another path",
            )
            return cls.load(root, encoder=own)
        refuse_strangers(root, _PARTS)
        is_new = not root.exists()
        try:
            corpus = open_corpus(passages, root, corpus_field=field, is_quiet=True)
            if own.copied is not None:
                kept = (root / _ENCODER).resolve()
                shutil.copytree(own.copied.path, kept, dirs_exist_ok=True)
                args = replace(args, encoder=str(kept))
            context = Context(artifacts=root, device=str(own.device))
            built = find_or_build(
                IndexRequest(args=args, corpus=corpus, context=context, output_dir=root / _INDEX),
                own,
            )
        except BaseException:
            if is_new and not (root / _INDEX).exists():  # refused before there was any work
                shutil.rmtree(root, ignore_errors=True)
            raise
        if cut := built.manifest.counts["cut"]:
            logger.warning(
                "%d of %d passages are longer than the %s tokens that the encoder reads: their "
                "ends are not searched",
                cut,
                len(corpus),
                own.fingerprint["max_tokens"],
            )
        return cls(built.folder, Recipe.read(built.folder, built.manifest), own, keeper=keeper)

    @classmethod
    def load(cls, folder: str | Path, *, encoder: Any = None, device: str = "auto") -> Self:
        """Open an index that was built here, or by `pgra index build`; its files are checked.

        Args:
            folder: Where it is.
            encoder: Its encoder, if loaded already, or under another name on this machine.
            device: Where the encoder runs; a `pgra.Encoder` stays where it is.

        Raises:
            ArtifactError: If there is none, or it is damaged, or of another encoder.
            PgraError: If its encoder or passages cannot be found.
        """
        check_device(device, is_used=False)
        check_kinds("a folder", str | Path, folder=folder)
        root = at_home(folder)
        at = root / _INDEX if is_finished(root / _INDEX) else root
        if not is_finished(at):
            raise ArtifactError(f"{root} holds no finished index: build one with Index.build")
        recipe = Recipe.read(at, load_manifest(at, stage=STAGE))
        if at != root:
            recipe = _moved(recipe, root.resolve())
        if encoder is None or isinstance(encoder, str | Path):
            name = str(encoder or recipe.retriever.encoder)
            encoder = Encoder(replace(recipe.retriever, encoder=name), device=device)
        return cls(at, recipe, _open_encoder(encoder, device))

    @overload
    def search(self, query: str, k: int = ...) -> list[Hit]: ...
    @overload
    def search(self, query: list[str], k: int = ...) -> list[list[Hit]]: ...
    def search(self, query: str | list[str], k: int = 10) -> list[Hit] | list[list[Hit]]:
        """Return the k passages that are nearest to a query, or to each of a list.

        Args:
            query: A text, or a list of texts.
            k: How many; fewer where there are not as many passages.

        Returns:
            Hits, best first, ties by place; their scores are inner products (cosines, of an
            encoder whose vectors have unit length). A list of them for each query of a list.

        Raises:
            ValueError: If a query is no text, or k is not a whole number from 1 on.
        """
        check_count("k", k)
        if isinstance(query, str):
            return self._search([query], k)[0]
        return self._search(as_texts("query", query), k)

    def _search(self, queries: list[str], k: int) -> list[list[Hit]]:
        found = self.retriever.retrieve(queries, min(int(k), len(self.corpus)))
        texts = iter(self.corpus.texts(found.rows[found.rows != MISSING_ROW]))
        return [
            [
                Hit(int(row), float(score), next(texts))
                for row, score in zip(rows, scores, strict=True)
                if row != MISSING_ROW
            ]
            for rows, scores in zip(found.rows, found.scores, strict=True)
        ]

    def add(self, passages: str | Path | Iterable[str]) -> Self:
        """Append passages, as of `build`, in place; existing ones keep their places.

        Only the new ones are encoded. A trained factory (IVF, PQ) is not trained again. Duplicates
        are dropped if the index is of a file.

        Raises:
            PgraError: If they cannot be read, or the index's own sources have changed or gone.
        """
        was, home = self._recipe.corpus, self._context.artifacts / _PASSAGES
        if not isinstance(passages, str | Path):
            # A folder for each time: the same list may be added again.
            passages = write_passages(passages, home / f"{len(was.sources)}", was.corpus_field)
        built: BuiltIndex = add_passages(
            self.folder,
            [str(passages)],
            self._context,
            recipe=self._recipe,
            encoder=self.encoder,
        )
        recipe, old = Recipe.read(built.folder, built.manifest), self.corpus.folder
        Index.__init__(self, built.folder, recipe, self.encoder, keeper=self._keeper)
        is_ours = self.folder.parent.resolve() == _root_of(recipe)  # the corpus is nobody else's
        if is_ours and self.corpus.folder != old:
            shutil.rmtree(old, ignore_errors=True)
        return self

    def save(self, folder: str | Path) -> Path:
        """Write a copy that `Index.load` opens, also after its folder is moved; return the folder.

        Raises:
            ArtifactError: If the folder exists and is not empty, or cannot be written.
        """
        check_kinds("a folder", str | Path, folder=folder)
        home, root = at_home(folder), self._context.artifacts
        if home.is_file() or (home.is_dir() and any(home.iterdir())):
            raise ArtifactError(f"{home} is not empty: save the index in a folder of its own")
        parts = {self.folder: _INDEX, self.corpus.folder: f"{_CORPORA}/{self.corpus.folder.name}"}
        for name in [*self._recipe.corpus.sources, self.args.encoder]:
            inside = _below(name, root)
            if inside is not None:
                parts[root / inside] = str(inside)
        aside = home.with_name(f".{home.name}.partial")
        try:
            shutil.rmtree(aside, ignore_errors=True)
            for source, part in parts.items():
                target = aside / part
                target.parent.mkdir(parents=True, exist_ok=True)
                if source.is_dir():
                    shutil.copytree(source, target, ignore=shutil.ignore_patterns(".*"))
                else:
                    shutil.copy2(source, target)
            if home.is_dir():
                home.rmdir()
            aside.rename(home)
            sync_folder(home.parent)
        except OSError as error:
            raise ArtifactError(f"cannot write {home} ({error}): choose another folder") from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return home

    @property
    def is_temporary(self) -> bool:
        """Whether its folder is deleted with it."""
        return self._keeper is not None

    def __len__(self) -> int:
        return len(self.corpus)

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self.corpus.batched(_BATCH))

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        """Return one passage, or those of a slice, as from a list."""
        rows = range(len(self))[index]
        return self.corpus.texts(rows) if isinstance(rows, range) else self.corpus[rows]

    def __repr__(self) -> str:
        factory = self.args.index_factory
        return f"Index({len(self)} passages, encoder={self.args.encoder!r}, factory={factory!r})"


def _open_encoder(encoder: Any, device: str) -> Encoder:
    """Return an encoder; an open one is refused for another device than its own."""
    if not isinstance(encoder, Encoder):
        return Encoder(encoder, device=device)
    place = encoder.device
    asked = torch.device(place if device == "auto" else device)
    numbers = {asked.index, place.index} - {None}  # "cuda" is whichever is the current one
    if asked.type != place.type or len(numbers) > 1:
        raise ConfigError(
            f"device is '{device}', and the encoder given is on {place} and stays there: "
            "leave device out, or open the encoder with it"
        )
    return encoder


def _root_of(recipe: Recipe) -> Path:
    """Return the folder that the corpora of an index lie under."""
    return recipe.corpus_folder.parents[1]


def _below(name: str, root: Path) -> Path | None:
    """Return the path of an absolute name within our folder; None if it is elsewhere."""
    path = Path(name)
    if not path.is_absolute() or not path.is_relative_to(root):
        return None
    inside = path.relative_to(root)
    return inside if inside.parts[:1] in ((_PASSAGES,), (_ENCODER,)) else None


def _moved(recipe: Recipe, root: Path) -> Recipe:
    """Return a recipe whose index and neighbours have moved to `root`."""
    old = _root_of(recipe)

    def here(name: str) -> str:
        inside = _below(name, old)
        return name if inside is None else str(root / inside)

    return Recipe(
        replace(recipe.corpus, corpus=[here(name) for name in recipe.corpus.sources]),
        replace(recipe.retriever, encoder=here(recipe.retriever.encoder)),
        root / _CORPORA / recipe.corpus_folder.name,
    )
