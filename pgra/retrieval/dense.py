"""`pgra.Index`: a corpus and its vectors by an encoder, built into a FAISS index and searched.

It is the first stage "dense". Building writes float16 shards first, then `index.faiss`, and the
manifest last. What `Index.build` and `save` write has the layout of all artifacts:

    ROOT/indexes/index   the dense index, which `--index_dir` takes
    ROOT/corpora         the passages as they were read
    ROOT/passages        lists and data sets that were given, as files
    ROOT/encoder         the encoder, where it was a loaded model
"""

import logging
import shutil
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, overload

from pgra.artifacts import (
    MANIFEST,
    Manifest,
    TemporaryFolder,
    artifact_dir,
    at_home,
    is_finished,
    load_manifest,
    lock_folder,
    read_manifest,
    record_files,
    set_aside,
    write_aside,
    write_manifest,
)
from pgra.core import MISSING_ROW, Candidates, Context, Hit, Json, as_texts, check_count
from pgra.data.corpus import Corpus, CorpusArguments, open_corpus
from pgra.encoders.encoder import Encoder
from pgra.errors import ArtifactError, DamageError
from pgra.lm.load import choose_device
from pgra.retrieval.base import (
    INDEXES,
    BuiltIndex,
    IndexRequest,
    Recipe,
    Retriever,
    RetrieverArguments,
    check_num_candidates,
    refuse_strangers,
    write_recipe,
)
from pgra.retrieval.faiss import EXACT, Rescored, build_faiss, empty_index, is_lossy, nearest
from pgra.retrieval.shards import (
    encode_by_ray,
    encode_shards,
    find_shards,
    plan_shards,
    take_over_shards,
    vector_source,
    vectors_digest,
)

logger = logging.getLogger(__name__)

STAGE = "dense_index"
_FAISS = "index.faiss"
_FILES = ("vectors-*.npy", "vectors-*.json", _FAISS)
_QUERY_BATCH = 4096  # all vectors are read once for each, where they are searched on disk
_PARTS = (INDEXES, "corpora", "passages", "encoder")
_PLACE = Path(INDEXES, "index")


class Index(Retriever):
    """Passages that are searched by meaning: `Index.build` makes one, `Index.load` opens one.

    Attributes:
        corpus: The passages; `corpus.made_by` names the files they were read from.
        encoder: Makes the vectors.
        args: The first stage's arguments for this very index: `index_dir` is its folder.
        folder: The dense index, which `pgra index info FOLDER` and `--index_dir FOLDER` take.
        is_temporary: Whether its folder is deleted with it.
    """

    encodes = True

    def __init__(self, request: IndexRequest, encoder: Encoder | None = None) -> None:
        """Find or build an index, and open it; for a pipeline. See `Index.build`, `Index.load`.

        Raises:
            PgraError: As `find_or_build`, or if the encoder cannot be used.
        """
        if not isinstance(request, IndexRequest):
            raise ValueError(
                "Index.build(passages, encoder=...) makes an index, Index.load(folder) opens one"
            )
        encoder = encoder or Encoder.load(request.args, device=request.context.device)
        built = find_or_build(request, encoder)
        made = built.manifest.fingerprint
        factor = _rescore_factor(request.args, made)
        self.corpus, self.encoder, self.folder = request.corpus, encoder, built.folder.absolute()
        self.args = replace(request.args, index_dir=str(self.folder))
        self.fingerprint = {
            **made,
            **encoder.query_fields,
            **({"rescore_factor": factor} if factor else {}),
        }
        self.inputs, self.built, self.is_temporary = [encoder.inputs], [built], False
        self._index = _open_index(built, factor, request.context.device)
        self._root = request.context.artifacts
        self._keeper: object = None

    @classmethod
    def open(cls, request: IndexRequest) -> Self:
        return cls(request)

    @classmethod
    def build(
        cls,
        passages: str | Path | Corpus | CorpusArguments | Iterable[str],
        *,
        encoder: Any,
        path: str | Path | None = None,
        factory: str = EXACT,
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
        keeper = None if path is not None else TemporaryFolder()
        root = (keeper.path if keeper else at_home(str(path))).absolute()
        if isinstance(passages, Corpus):
            if passages.made_by is None:
                raise ValueError("this corpus was opened by its folder: give its file or passages")
            passages = passages.made_by
        own = Encoder.load(encoder, device=device)
        args = RetrieverArguments(
            **{**vars(own.args), "retriever": "dense", "index_factory": factory, "index_dir": None}
        )
        is_there = is_finished(root / _PLACE)
        if not is_there:
            refuse_strangers(root, _PARTS)
            if own.copied is not None:
                args = replace(args, encoder=str(root / "encoder"))
                shutil.copytree(own.copied.path, args.encoder, dirs_exist_ok=True)
        place = None if is_there else root
        corpus = open_corpus(passages, place, corpus_field=field)
        context = Context(artifacts=root, device=str(own.device))
        request = IndexRequest(args=args, corpus=corpus, context=context, output_dir=root / _PLACE)
        if is_there:
            find_or_build(request, own)  # refuses another one
            return cls.load(root, encoder=own)
        index = cls(request, own)
        index.is_temporary, index._keeper = keeper is not None, keeper
        if cut := index.built[0].manifest.counts["cut"]:
            logger.warning(
                "%d of %d passages are longer than the %s tokens that the encoder reads: their "
                "ends are not searched",
                cut,
                len(index),
                own.fingerprint["max_tokens"],
            )
        return index

    @classmethod
    def load(cls, path: str | Path, *, encoder: Any = None, device: str = "auto") -> Self:
        """Open an index that was built here, or by `pgra index build`; its files are checked.

        Args:
            path: Its folder.
            encoder: Its encoder, if loaded already, or under another name on this machine.
            device: Where the encoder runs; a `pgra.Encoder` stays where it is.

        Raises:
            ArtifactError: If there is none, or it is damaged, or of another encoder.
            PgraError: If its encoder or passages cannot be found.
        """
        root = at_home(path)
        folder = root / _PLACE if is_finished(root / _PLACE) else root
        recipe = Recipe.read(folder, stage=STAGE)
        if encoder is None or isinstance(encoder, str | Path):
            name = str(encoder or recipe.retriever.encoder)
            encoder = replace(recipe.retriever, encoder=name)
        own = Encoder.load(encoder, device=device)
        context = Context(artifacts=recipe.artifacts, device=str(own.device))
        request = IndexRequest(args=recipe.retriever, corpus=recipe.open_corpus(), context=context)
        return cls(request, own)

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
        queries = [query] if isinstance(query, str) else as_texts("query", query)
        found = self.retrieve(queries, min(int(k), len(self)))
        texts = iter(self.corpus.texts(found.rows[found.rows != MISSING_ROW]))
        hits = [
            [
                Hit(int(row), float(score), next(texts))
                for row, score in zip(rows, scores, strict=True)
                if row != MISSING_ROW
            ]
            for rows, scores in zip(found.rows, found.scores, strict=True)
        ]
        return hits[0] if isinstance(query, str) else hits

    def retrieve(self, queries: Sequence[str], k: int) -> Candidates:
        """Return each query's best k passages, (B, k); scores are inner products.

        They are cosines with a normalizing encoder. Only an approximate index leaves entries
        missing.
        """
        check_num_candidates(k, len(self))
        found = Candidates.missing(len(queries), k)
        for start in range(0, len(queries), _QUERY_BATCH):
            batch = slice(start, start + _QUERY_BATCH)
            vectors = self.encoder.encode(queries[batch], is_query=True)
            best = nearest(vectors, self._index, k)
            found.rows[batch], found.scores[batch] = best.rows, best.scores
        return found

    def save(self, path: str | Path) -> Path:
        """Write a copy that `Index.load` opens, also after its folder is moved; return the folder.

        Raises:
            ArtifactError: If the folder exists and is not empty.
        """
        home, root = at_home(path), self._root
        if home.is_file() or (home.is_dir() and any(home.iterdir())):
            raise ArtifactError(f"{home} is not empty: save the index in a folder of its own")
        named = [*(self.corpus.made_by.sources if self.corpus.made_by else []), self.args.encoder]
        own = [
            Path(name)
            for name in named
            if any(Path(name).is_relative_to(root / part) for part in ("passages", "encoder"))
        ]

        hidden = shutil.ignore_patterns(".*")
        with write_aside(home) as aside:
            shutil.copytree(self.folder, aside / _PLACE, ignore=hidden)
            corpus = self.corpus.folder
            shutil.copytree(corpus, aside / "corpora" / corpus.name, ignore=hidden)
            for source in own:
                target = aside / source.relative_to(root)
                if source.is_dir():
                    shutil.copytree(source, target)
                else:
                    target.parent.mkdir(exist_ok=True)
                    shutil.copy2(source, target)

        return home

    def __len__(self) -> int:
        return len(self.corpus)

    def __repr__(self) -> str:
        factory = self.args.index_factory
        return f"Index({len(self)} passages, encoder={self.args.encoder!r}, factory={factory!r})"


def _rescore_factor(args: RetrieverArguments, fields: Mapping[str, Json]) -> int:
    return args.rescore_factor if is_lossy(str(fields["factory"])) else 0


def _open_index(built: BuiltIndex, factor: int, device: str) -> Any:
    """Open an index for FAISS, or from shards: an exact one on a GPU or beyond the memory."""
    import faiss

    source = vector_source(find_shards(built.folder), built.manifest.counts["dim"])
    where, file = choose_device(device), built.folder / _FAISS
    is_exact = built.manifest.fingerprint["factory"] == EXACT
    if _FAISS not in built.manifest.files or (
        is_exact and (where.type == "cuda" or not source.fits_in_memory)
    ):
        return replace(source, device=str(where))
    # An exact one is mapped, so that processes share its pages.
    index = faiss.read_index(str(file), faiss.IO_FLAG_MMAP_IFC)
    return Rescored(index, source.read, factor=factor) if factor else index


def _locate(request: IndexRequest, encoder: Encoder) -> tuple[dict[str, Json], Path]:
    """Return an index's fields and folder; refuse a factory that cannot work, before building."""
    args, corpus = request.args, request.corpus
    fields: dict[str, Json] = {
        **corpus.fingerprint,
        **encoder.fingerprint,
        "factory": args.index_factory,
        "metric": "ip",
    }
    name = Path(args.encoder.removeprefix("bundled:").partition("@")[0]).name
    folder = request.output_dir or artifact_dir(request.home, name, fields)
    if args.index_dir is not None:
        folder = Path(args.index_dir)
    elif not is_finished(folder):
        empty_index(args.index_factory, encoder.width, len(corpus))
    return fields, folder


def find_or_build(request: IndexRequest, encoder: Encoder) -> BuiltIndex:
    """Find a finished index, or build it.

    A killed job run again computes only the shards that are missing, foreign or damaged, and its
    files are byte for byte those of an unbroken run (the manifest's times aside). For factories
    with a graph (HNSW) that holds with one thread only, as FAISS inserts in parallel. Of two jobs
    that build one index the second waits for the first.

    Raises:
        ArtifactError: If the folder is another index's, or damaged.
        ConfigError: If FAISS does not know the factory, or the corpus is too small for it.
        OSError: If the folder cannot be written, before anything is encoded, or the disk is full.
    """
    fields, folder = _locate(request, encoder)
    manifest = _find_whole(folder, fields, is_given=request.args.index_dir is not None)
    is_waiting = manifest is None and request.context.is_main
    with lock_folder(folder, wait=True) if is_waiting else nullcontext():
        request.context.barrier()  # the main process has the folder: what all see now is the same
        manifest = manifest or _find_whole(folder, fields)
        if manifest is None:
            return _build(request, encoder, folder, fields)
        return BuiltIndex(folder, manifest, len(request.corpus))


def _find_whole(
    folder: Path, fields: Mapping[str, Json], *, is_given: bool = False
) -> Manifest | None:
    """Return a finished index's manifest; None where it must be built, at least in part."""
    if not is_given and not is_finished(folder):
        return None
    try:
        return read_manifest(folder, stage=STAGE, fingerprint=fields)
    except DamageError:
        if is_given:
            raise
        return None


def _build(
    request: IndexRequest, encoder: Encoder, folder: Path, fields: Mapping[str, Json]
) -> BuiltIndex:
    """Encode what is missing, write the FAISS index, and the manifest last.

    Processes share the shards; the main one makes the FAISS index. This job holds the folder's
    lock.
    """
    args, corpus, context, began = request.args, request.corpus, request.context, time.monotonic()
    shards = plan_shards(folder, len(corpus), args.shard_rows)
    parts = [part for shard in shards for part in (shard.path, shard.record_path)]
    made_of = vectors_digest(corpus.fingerprint, encoder)
    own = context.worker.share(shards)
    if context.is_main:
        if is_finished(folder):  # but damaged: what is whole is reused
            set_aside(folder / MANIFEST, f"{folder} is not whole")
        refuse_strangers(folder, (*_FILES, "*.damaged"))
        _remove_strays(folder, parts)
        take_over_shards(shards, made_of, request.home)
        missing = {shard for shard in shards if not shard.is_done(made_of)}
        if len(missing) < len(shards):
            logger.info("%s of %s shards already there", len(shards) - len(missing), len(shards))
        context.barrier()  # tidied, and counted before others write
    else:
        context.barrier()
        missing = {shard for shard in own if not shard.is_done(made_of)}
    mine = [shard for shard in own if shard in missing]
    if request.engine == "ray":
        encode_by_ray(mine, request, encoder, made_of)
        _remove_strays(folder, parts)  # what lost workers left
    else:
        encode_shards(mine, corpus, encoder, made_of=made_of, progress=context.shows_progress)
    context.barrier()  # all encoded
    num_missing, seconds = sum(map(len, missing)), time.monotonic() - began
    if context.is_main:
        cut = sum(shard.read_record()["cut"] for shard in shards)
        path = folder / _FAISS
        path.unlink(missing_ok=True)  # of a job stopped before its manifest
        about = build_faiss(
            vector_source(shards, encoder.width),
            str(fields["factory"]),
            path,
            rescore_factor=_rescore_factor(args, fields),
        )
        speed = round(num_missing / max(seconds, 1e-6), 1) if num_missing else None
        files = record_files(folder, sorted(part.name for part in [*parts, path] if part.exists()))
        about |= {"cut": cut, "texts_per_second": speed, **write_recipe(args, corpus)}
        about["bytes"] = sum(int(record["bytes"]) for record in files.values())
        write_manifest(
            folder,
            stage=STAGE,
            fingerprint=fields,
            counts=about,
            seconds=time.monotonic() - began,
            files=files,
        )
    context.barrier()  # finished
    return BuiltIndex(folder, load_manifest(folder, stage=STAGE), len(corpus) - num_missing)


def _remove_strays(folder: Path, kept: Collection[Path]) -> None:
    """Remove what killed jobs left: half-written files, and shards of another plan."""
    for pattern in (".*.partial*", *_FILES):
        for path in folder.glob(pattern):
            if path not in kept:
                path.unlink(missing_ok=True)
