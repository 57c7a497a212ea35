"""`pgra.Index`: a corpus and its vectors by an encoder, built into a FAISS index and searched.

It is the first stage "dense". Building writes float16 shards first, then `index.faiss`, and the
manifest last. What `Index.build` writes has the layout of all artifacts:

    ROOT/indexes/index   the dense index, which `--index_dir` takes
    ROOT/corpora         the passages as they were read
    ROOT/passages        lists and data sets that were given, as files
    ROOT/encoder         the encoder, where it was a loaded model
"""

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Self, overload

import numpy as np
import numpy.typing as npt

from pgra.arrays import Array, Rows
from pgra.artifacts import (
    MANIFEST,
    Artifact,
    TemporaryFolder,
    at_home,
    digest,
    find_damage,
    find_fault,
    is_finished,
    load_manifest,
    lock_folder,
    read_array,
    read_sealed,
    record_files,
    set_aside,
    without_folders,
    write_array,
    write_aside,
    write_manifest,
    write_sealed,
)
from pgra.context import Context
from pgra.data.corpus import Corpus, CorpusArguments, open_corpus
from pgra.data.read import fetch_folder, push_folder
from pgra.encoders import as_encoder
from pgra.encoders.encoder import Encoder, TokenChunk
from pgra.errors import DamageError, PartDone
from pgra.lm.load import choose_device
from pgra.parallel import claim_path, run_overlapped
from pgra.progress import Bar
from pgra.retrieval.base import (
    INDEXES,
    IndexRequest,
    Recipe,
    Retriever,
    RetrieverArguments,
    index_folder,
    refuse_strangers,
    write_recipe,
)
from pgra.retrieval.faiss import (
    EXACT,
    RESCORED,
    FaissIndex,
    VectorSource,
    build_faiss,
    empty_index,
    is_lossy,
)
from pgra.types import MISSING_ROW, Candidates, Fields, Hit, check_count, is_query, read_queries

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
        folder: The dense index, which `--index_dir FOLDER` takes.
        keeper: Deletes a temporary folder with the index; None where it stays.
    """

    def __init__(self, request: IndexRequest, encoder: Encoder | None = None) -> None:
        """Find or build an index, and open it; for a pipeline. See `Index.build`, `Index.load`.

        Raises:
            PgraError: As `find_or_build`, or if the encoder cannot be used.
        """
        if not isinstance(request, IndexRequest):
            raise ValueError("Index.build(passages, ...) makes one, Index.load(folder) opens one")
        self.encoder = encoder or as_encoder(request.args, device=request.context.device)
        built = find_or_build(request, self.encoder)
        self.corpus = request.corpus
        self.folder = built.folder.absolute()
        self.args = replace(request.args, index_dir=str(self.folder))
        self.fingerprint = {**built.manifest.fingerprint, **self.encoder.query_fingerprint}
        if is_lossy(request.args.index_factory):
            self.fingerprint["rescore_factor"] = RESCORED
        self.inputs = [self.encoder.inputs]
        self.built = [built]
        self.keeper: TemporaryFolder | None = None
        self._index = _open_index(built, self.args.index_factory, request.context.device)
        if cut := built.manifest.counts["cut"]:
            advice = "--passage_words 100 would split them"
            logger.warning("of %d of %d passages only a part is read: %s", cut, len(self), advice)

    @classmethod
    def open(cls, request: IndexRequest) -> Self:
        return cls(request)

    @classmethod
    def build(
        cls,
        passages: str | Path | CorpusArguments | Iterable[str],
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
                with the index.
            factory: FAISS factory string. Flat is exact.
            field: Column or field that holds the text, for all but lists and .txt.
            device: Where the encoder runs; a `pgra.Encoder` stays where it is.

        Raises:
            PgraError: If an argument cannot be read or used, or `path` holds something else.
            ValueError: If `encoder` is of a wrong type.
        """
        keeper = None if path is not None else TemporaryFolder()
        root = (keeper.path if keeper else at_home(str(path))).absolute()
        folder = root / _PLACE
        opened = as_encoder(encoder, device=device)
        args = RetrieverArguments(**vars(opened.args), index_factory=factory)
        if opened.copied is not None:
            args = replace(args, encoder=str(root / "encoder"))
        context = Context(artifacts=root, device=str(opened.device))
        if not is_finished(folder):
            refuse_strangers(root, _PARTS)
            if opened.copied is not None:
                shutil.copytree(opened.copied.path, args.encoder, dirs_exist_ok=True)
        corpus = open_corpus(passages, root, corpus_field=field)
        request = IndexRequest(args=args, corpus=corpus, context=context, output_dir=folder)
        index = cls(request, opened)
        index.keeper = keeper
        return index

    @classmethod
    def load(cls, path: str | Path, *, encoder: Any = None, device: str = "auto") -> Self:
        """Open an index that was built here, or by `pgra index`; its files are checked.

        Args:
            path: Its folder; or on the hub OWNER/NAME, or OWNER/NAME@REVISION.
            encoder: Its encoder, if loaded already, or under another name on this machine.
            device: Where the encoder runs; a `pgra.Encoder` stays where it is.

        Raises:
            ArtifactError: If there is none, it is damaged or of another encoder, or the hub cannot
                be reached.
            PgraError: If its encoder or passages cannot be found.
        """
        root = fetch_folder("index", path)
        folder = root / _PLACE if is_finished(root / _PLACE) else root
        recipe = Recipe.read(folder, stage=STAGE)
        beside = root / "corpora" / recipe.corpus_folder.name  # also where `root` was moved
        if beside.is_dir():
            recipe = replace(recipe, corpus_folder=beside)
        args = recipe.retriever
        if encoder is None and (root / "encoder").is_dir():  # where it was a folder, or loaded
            encoder = root / "encoder"
        if encoder is None or isinstance(encoder, str | Path):
            encoder = args = replace(args, encoder=str(encoder or args.encoder))
        opened = as_encoder(encoder, device=device)
        context = Context(artifacts=recipe.corpus_folder.parents[1], device=str(opened.device))
        request = IndexRequest(args=args, corpus=recipe.open_corpus(), context=context)
        return cls(request, opened)

    def push_to_hub(self, repo_id: str, *, private: bool | None = None) -> str:
        """Upload the index, its passages and an encoder that is a folder; return its address.

        `Index.load(repo_id)` opens it, and checks its files. No folder of this machine is named.
        The token is HF_TOKEN, or the login's. Large files that are there are not sent again.

        Args:
            repo_id: OWNER/NAME; a name alone is your own.
            private: Of a new repository; None: as the hub does.

        Raises:
            ConfigError: If the hub refuses token, id or upload.
            ArtifactError: If the index does not say what it was made from.
        """
        recipe = Recipe.read(self.folder)
        copy = TemporaryFolder()
        encoder = Path(self.args.encoder)
        folders = {
            _PLACE: self.folder,
            Path("corpora", recipe.corpus_folder.name): self.corpus.folder,
        }
        if encoder.is_dir():
            folders[Path("encoder")] = encoder
        for name, folder in folders.items():
            shutil.copytree(
                folder.resolve(),
                copy.path / name,
                copy_function=os.symlink,
                ignore=shutil.ignore_patterns(".*"),
            )
        manifest = asdict(load_manifest(self.folder))
        manifest["counts"]["recipe"] = without_folders(manifest["counts"]["recipe"])
        (copy.path / _PLACE / MANIFEST).unlink()
        write_sealed(copy.path / _PLACE / MANIFEST, manifest)
        return push_folder(
            self.folder, copy.path, repo_id, f"{len(self):,} passages", private=private
        )

    @overload
    def search(self, query: str, k: int = ...) -> list[Hit]: ...
    @overload
    def search(self, query: list[str], k: int = ...) -> list[list[Hit]]: ...
    def search(self, query: str | list[str], k: int = 10) -> list[Hit] | list[list[Hit]]:
        """Return the k passages that are nearest to a query, or to each of a list.

        Args:
            query: A text, or a list of texts; none is blank.
            k: How many; fewer where there are not as many passages.

        Returns:
            Hits, best first, ties by place; their scores are inner products (cosines, of an
            encoder whose vectors have unit length). A list of them for each query of a list.

        Raises:
            DataError: If a query is blank, or is not a text.
            ValueError: If k is not a whole number from 1 on.
        """
        check_count("k", k)
        queries = [example.text for example in read_queries(query, ("text",))]
        best = self.retrieve(queries, min(int(k), len(self)))
        hits = []
        for rows, scores in zip(best.rows, best.scores, strict=True):
            is_there = rows != MISSING_ROW
            texts = self.corpus.texts(rows[is_there])
            hits.append(list(map(Hit, rows[is_there].tolist(), scores[is_there].tolist(), texts)))
        return hits[0] if is_query(query) else hits

    def retrieve(self, queries: Sequence[str], k: int) -> Candidates:
        """Return each query's best k passages, (B, k); scores are inner products.

        They are cosines with a normalizing encoder. Only an approximate index leaves entries
        missing.
        """
        best = Candidates.missing(len(queries), k)
        for start in range(0, len(queries), _QUERY_BATCH):
            batch = slice(start, start + _QUERY_BATCH)
            hits = self._index.search(self.encoder.encode(queries[batch], is_query=True), k)
            best.rows[batch] = hits.rows
            best.scores[batch] = hits.scores
        return best

    def __len__(self) -> int:
        return len(self.corpus)


def _open_index(built: Artifact, factory: str, device: str) -> FaissIndex | VectorSource:
    """Open an index for FAISS, or from shards: an exact one on a GPU or beyond the memory."""
    import faiss

    counts = built.manifest.counts
    source = vector_source(find_shards(built.folder), counts["dim"])
    where = choose_device(device)
    file = built.folder / _FAISS
    is_large = where.type == "cuda" or not source.fits_in_memory
    if not file.exists() or (counts["is_exact"] and is_large):
        return replace(source, device=str(where))
    # An exact one is mapped, so that processes share its pages.
    index = faiss.read_index(str(file), faiss.IO_FLAG_MMAP_IFC)
    return FaissIndex(index, factory, source.read)


def find_or_build(request: IndexRequest, encoder: Encoder) -> Artifact:
    """Find a finished index, or build it.

    A killed job run again computes only the shards that are missing, foreign or damaged, and its
    files are byte for byte those of an unbroken run (the manifest's times aside). For factories
    with a graph (HNSW) that holds with one thread only, as FAISS inserts in parallel. Of two jobs
    that build one index the second waits for the first.

    Raises:
        ArtifactError: If the folder is another index's, or damaged.
        ConfigError: If FAISS does not know the factory, or the corpus is too small for it.
        OSError: If the folder cannot be written, before anything is encoded, or the disk is full.
        PartDone: If this is a part of a job, and has encoded its share.
    """
    args = request.args
    corpus = request.corpus
    context = request.context
    made_of = {**corpus.fingerprint, **encoder.fingerprint}
    fields = {**made_of, "factory": args.index_factory, "metric": "ip"}
    name = Path(args.encoder.removeprefix("bundled:").partition("@")[0]).name
    folder = index_folder(request, name, STAGE, fields)
    if not is_finished(folder):
        empty_index(args.index_factory, encoder.width, len(corpus))
    fault = None if args.index_dir else find_fault(folder, STAGE, fields)
    is_sole = context.is_main and not context.worker.is_part
    with lock_folder(folder, wait=True) if fault and is_sole else nullcontext():
        context.barrier()  # the main process has the folder: what all see now is the same
        if fault and find_fault(folder, STAGE, fields):
            return _build(request, encoder, folder, fields)
        return Artifact(folder, load_manifest(folder), len(corpus))


def _build(request: IndexRequest, encoder: Encoder, folder: Path, fields: Fields) -> Artifact:
    """Encode what is missing, write the FAISS index, and the manifest last.

    Workers share the shards; the main one makes the FAISS index. This job holds the folder's lock,
    unless it is a part, which ends with its shards.
    """
    args = request.args
    corpus = request.corpus
    context = request.context
    began = time.monotonic()
    shards = plan_shards(folder, len(corpus), args.shard_rows)
    made_of = digest({**corpus.fingerprint, **encoder.fingerprint})
    is_part = context.worker.is_part
    if context.is_main:
        if is_finished(folder) and not is_part:  # but damaged: what is whole is reused
            set_aside(folder / MANIFEST, f"{folder} is not whole")
        refuse_strangers(folder, (*_FILES, "*.damaged"))
        planned = {shard.path.stem for shard in shards}
        for path in list(chain.from_iterable(map(folder.glob, _FILES))):
            if path.stem not in planned:  # of another plan, or of a job stopped before its manifest
                path.unlink(missing_ok=True)  # another part's doing
        take_over_shards(shards, made_of, context.artifacts / INDEXES)
        for shard in shards:  # parts leave it to the last command to compare all bytes
            is_there = shard.record_path.exists()
            if is_there and not shard.is_done(made_of, compare=not is_part):
                shard.record_path.unlink(missing_ok=True)
    context.barrier()  # tidied: a shard is done where its record is there
    missing = [shard for shard in shards if not shard.record_path.exists()]
    if context.is_main:
        logger.info("%s of %s shards already there", len(shards) - len(missing), len(shards))
    context.barrier()  # all have looked before one of them writes
    encode_shards(missing, corpus, encoder, made_of=made_of, context=context)
    if is_part:
        num_left = sum(not shard.record_path.exists() for shard in missing)
        raise PartDone(f"{folder}: {num_left} of {len(shards)} shards are still with other parts")
    context.barrier()  # all encoded
    if context.is_main:
        source = vector_source(shards, encoder.width)
        counts = build_faiss(source, args.index_factory, folder / _FAISS)
        paths = chain.from_iterable(map(folder.glob, _FILES))
        files = record_files(folder, sorted(path.name for path in paths))
        counts["shard_rows"] = args.shard_rows
        counts["cut"] = sum(shard.read_record()["cut"] for shard in shards)
        counts["bytes"] = sum(record["bytes"] for record in files.values())
        write_manifest(
            folder,
            stage=STAGE,
            fingerprint=fields,
            counts={**counts, **write_recipe(args, corpus)},
            seconds=time.monotonic() - began,
            files=files,
        )
    context.barrier()  # finished
    return Artifact(folder, load_manifest(folder), len(corpus) - sum(map(len, missing)))


# A corpus' vectors on disk: float16 shards, each with a record, made by all who share the work.
#
# A shard is done when its record, written last, is there. A job first deletes records that do not
# name the same vectors, or whose checksum does not match.


@dataclass(frozen=True)
class Shard:
    """Where the rows from `start` to before `stop` keep their vectors, in an index's folder."""

    folder: Path
    number: int
    start: int
    stop: int

    @property
    def path(self) -> Path:
        """The vectors, (stop - start, D) float16."""
        return self.folder / f"vectors-{self.number:05d}.npy"

    @property
    def record_path(self) -> Path:
        return self.path.with_suffix(".json")

    def __len__(self) -> int:
        return self.stop - self.start

    def read_record(self) -> dict[str, Any]:
        """Return the record; empty if it is missing or unreadable."""
        try:
            return read_sealed(self.record_path)
        except (OSError, DamageError):
            return {}

    def is_done(self, made_of: str, *, compare: bool = True) -> bool:
        """Return whether the vectors are there, those of this digest and, if compared, whole."""
        record = self.read_record()
        if record.get("rows") != [self.start, self.stop] or record.get("made_of") != made_of:
            return False
        return not compare or not any(find_damage(self.folder, record["files"]))


def plan_shards(folder: Path, num_rows: int, shard_rows: int) -> list[Shard]:
    """Cut all rows into shards of `shard_rows`, the last one shorter."""
    return [
        Shard(folder, number, start, min(start + shard_rows, num_rows))
        for number, start in enumerate(range(0, num_rows, shard_rows))
    ]


def take_over_shards(shards: Sequence[Shard], made_of: str, indexes: Path) -> None:
    """Reuse the same vectors (`made_of`) of other indexes in a folder, such as another factory's.

    Files are linked, or copied where the disk cannot: shards are replaced, never changed in place.
    """
    for record_path in sorted(indexes.glob(f"*/{shards[0].record_path.name}")):
        for ours in shards:
            theirs = replace(ours, folder=record_path.parent)
            if not ours.is_done(made_of) and theirs.is_done(made_of):
                _link_or_copy(theirs.path, ours.path)
                _link_or_copy(theirs.record_path, ours.record_path)  # last: the shard is whole


def _link_or_copy(source: Path, target: Path) -> None:
    with write_aside(target) as aside:
        try:
            os.link(source, aside)
        except OSError:
            shutil.copyfile(source, aside)


def encode_shards(
    shards: Sequence[Shard], corpus: Corpus, encoder: Encoder, *, made_of: str, context: Context
) -> None:
    """Encode the shards that this worker claims, and write each with its record.

    Reading, encoding and writing overlap. `made_of` is the digest of all that determines vectors,
    besides their rows.

    Raises:
        ModelError: If a vector is not finite, in float32 or in float16.
        ArtifactError: If the encoder's files changed meanwhile.
        OSError: If the disk is full; what was being written is removed, done shards stay.
    """
    num_cut: dict[Shard, int] = {}

    def prepare(shard: Shard) -> TokenChunk:
        texts = corpus.slice(shard.start, shard.stop)
        chunk = encoder.tokenize(texts, first=shard.start)
        num_cut[shard] = chunk.num_cut
        return chunk

    def keep(shard: Shard, finish: Callable[[], Array]) -> None:
        write_array(shard.path, finish())
        encoder.inputs.check()
        record = {
            "rows": [shard.start, shard.stop],
            "made_of": made_of,
            "cut": num_cut[shard],
            "files": record_files(shard.folder, [shard.path.name]),
        }
        write_sealed(shard.record_path, record)
        claim_path(shard.record_path).unlink(missing_ok=True)

    claimed = context.worker.claim(shards, lambda shard: shard.record_path)
    total = sum(map(len, context.worker.share(shards)))
    is_quiet = not (context.shows_progress and shards)
    with Bar(total=total, desc="encode", unit="text", disable=is_quiet) as bar:
        begin = partial(encoder.begin, in_half=True, advance=bar.update)
        run_overlapped(claimed, prepare, begin, keep=keep)


def read_rows(shards: Sequence[Shard], rows: Rows) -> npt.NDArray[np.float16]:
    """Return the vectors of rising rows, (n, D) float16; opens only the shards that hold one."""
    # Files are opened when they are needed, and closed: a large index has more than a process may.
    firsts = np.searchsorted(rows, [shard.start for shard in shards])
    lasts = np.searchsorted(rows, [shard.stop for shard in shards])
    if missing := len(rows) - int((lasts - firsts).sum()):
        raise DamageError(f"{shards[0].folder} lacks {missing} vectors")
    blocks = []
    for i in np.flatnonzero(lasts > firsts).tolist() or [0]:
        shard_rows = rows[firsts[i] : lasts[i]] - shards[i].start
        blocks.append(read_array(shards[i].path)[shard_rows])
    return np.concatenate(blocks)


def vector_source(shards: Sequence[Shard], width: int) -> VectorSource:
    """Return the vectors of all shards, in the order of rows, to build or search an index."""
    return VectorSource(
        num_rows=shards[-1].stop,
        width=width,
        read=lambda rows: read_rows(shards, rows).astype(np.float32),
        # torch warns of what cannot be written
        halves=lambda: (read_array(shard.path, is_private=True) for shard in shards),
    )


def find_shards(folder: Path) -> list[Shard]:
    """Return a finished index's shards, in the order of rows."""
    counts = load_manifest(folder).counts
    return plan_shards(folder, counts["rows"], counts["shard_rows"])
