"""First stage by meaning: an encoder's vectors, built into a FAISS index and searched."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from pgra.artifacts import (
    Manifest,
    artifact_dir,
    is_finished,
    lock_folder,
    read_manifest,
    write_manifest,
)
from pgra.config import CorpusArguments, RetrieverArguments
from pgra.core import ALONE, Candidates, Context, Json, Rows
from pgra.encoders.encoder import Encoder, load_encoder
from pgra.errors import ArtifactError, ConfigError
from pgra.lm.load import choose_device
from pgra.retrieval.base import (
    AUTO,
    EXACT,
    BuiltIndex,
    IndexRequest,
    check_num_candidates,
    choose_factory,
    import_faiss,
    memory_limit,
    refuse_strangers,
)
from pgra.retrieval.faiss import (
    INDEX_FILE,
    BlockSearch,
    IndexPlan,
    Rescored,
    Vectors,
    VectorSource,
    ask,
    build_faiss,
    empty_index,
    find_faiss,
    map_faiss,
    most_hits,
)
from pgra.retrieval.ray_engine import RayEngine
from pgra.retrieval.shards import (
    GROWN_FILES,
    STAGE,
    Shard,
    count_cut,
    encode_shards,
    find_shards,
    plan_shards,
    read_removed,
    read_rows,
    read_shards,
    refuse_cut,
    remove_strays,
    search_kept,
    take_over_shards,
    vectors_digest,
    with_history,
)

if TYPE_CHECKING:
    import torch

    from pgra.data.corpus import Corpus


# Builds a FAISS index of a corpus: float16 shards first, then `index.faiss`, manifest last.


logger = logging.getLogger(__name__)

_OURS = ("vectors-*.npy", "vectors-*.json", INDEX_FILE, *GROWN_FILES)


@dataclass(frozen=True)
class _Job:
    corpus: "Corpus"
    encoder: Encoder
    plan: IndexPlan
    queries: Sequence[str] | None
    shards: Sequence[Shard]
    made_of: str
    recipe: Mapping[str, Json] | None
    engine: RayEngine | None
    home: Path | None


def dense_fingerprint(corpus: "Corpus", encoder: Encoder, factory: str) -> dict[str, Json]:
    """Give all that determines a dense index."""
    return {**corpus.fingerprint, **encoder.fingerprint, "factory": factory, "metric": "ip"}


def build_dense_index(
    corpus: "Corpus",
    encoder: Encoder,
    folder: Path,
    *,
    plan: IndexPlan = IndexPlan(factory="Flat"),  # noqa: B008 (frozen)
    queries: Sequence[str] | None = None,
    shard_rows: int = 8192,
    context: Context = ALONE,
    progress: bool = True,
    recipe: Mapping[str, Json] | None = None,
    engine: RayEngine | None = None,
    home: Path | None = None,
) -> BuiltIndex:
    """Build an index, or find that it is finished.

    A killed job run again computes only the shards that are missing, foreign or damaged, and its
    files are byte for byte those of an unbroken run (the manifest's times aside). For factories
    with a graph (HNSW) that holds with one thread only, as FAISS inserts in parallel.

    Args:
        corpus: What is searched.
        encoder: What encodes it.
        folder: The artefact.
        plan: What index is made of the vectors; its own `queries` are not looked at.
        queries: Texts to measure the recall with; None: passages.
        shard_rows: Rows a shard, the unit of work.
        context: Who shares the shards; the main one locks the folder and makes `index.faiss`.
        progress: Whether to show a bar.
        recipe: What was asked for, as `write_recipe` gives it; kept in the manifest.
        engine: Who encodes; None: these processes themselves.
        home: Where other indexes are, whose vectors are taken over if they are the same.

    Raises:
        ArtifactError: If the folder is another index's, damaged, or in use by another job.
        ConfigError: If FAISS does not know the factory, or the corpus is too small for it.
        DataError: If the corpus is strict, and a passage is longer than the encoder reads.
        OSError: If the folder cannot be written, before anything is encoded, or the disk is full.
    """
    worker, barrier = context.worker, context.barrier
    fields = dense_fingerprint(corpus, encoder, plan.factory)
    is_there = is_finished(folder)
    barrier()  # all have looked before anyone writes
    if is_there:
        manifest = read_manifest(folder, stage=STAGE, fingerprint=with_history(folder, fields))
        refuse_cut(corpus, int(str(manifest.counts["cut"])))
        return BuiltIndex(folder, manifest, len(corpus))
    empty_index(plan.factory, encoder.width, len(corpus))
    shards = plan_shards(folder, len(corpus), shard_rows)
    made_of = vectors_digest(corpus.fingerprint, encoder)
    job = _Job(corpus, encoder, plan, queries, shards, made_of, recipe, engine, home)
    if worker.is_main:
        with lock_folder(folder):
            manifest, num_reused = _build(job, folder, fields, context, progress)
        barrier()  # finished
        return BuiltIndex(folder, manifest, num_reused)
    barrier()  # locked and tidied by the main process
    _encode_missing(job, worker.share(shards), progress=False)
    barrier()  # all encoded
    barrier()  # finished
    return BuiltIndex(folder, read_manifest(folder, stage=STAGE, verify=False), 0)


def _build(
    job: _Job,
    folder: Path,
    fields: Mapping[str, Json],
    context: Context,
    progress: bool,  # noqa: FBT001 (private)
) -> tuple[Manifest, int]:
    began = time.monotonic()
    refuse_strangers(folder, _OURS)
    remove_strays(folder, job.shards)
    if job.home is not None:
        take_over_shards(job.shards, job.made_of, job.home)
    missing = [shard for shard in job.shards if not shard.is_done(job.made_of)]
    num_missing = sum(shard.stop - shard.start for shard in missing)
    num_done = len(job.shards) - len(missing)
    if num_done:
        logger.info("%s of %s shards already there", num_done, len(job.shards))
    context.barrier()  # counted, before others write
    _encode_missing(job, context.worker.share(job.shards), progress=progress)
    context.barrier()  # all encoded
    seconds = time.monotonic() - began
    speed = round(num_missing / max(seconds, 1e-6), 1) if num_missing else None
    counts = {**_make_faiss(job, folder / INDEX_FILE), "texts_per_second": speed}
    counts |= {} if job.recipe is None else {"recipe": job.recipe}
    counts["bytes"] = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    manifest = write_manifest(
        folder,
        stage=STAGE,
        fingerprint=fields,
        counts=counts,
        seconds=time.monotonic() - began,
    )
    return manifest, len(job.corpus) - num_missing


def _encode_missing(job: _Job, shards: Sequence[Shard], *, progress: bool) -> None:
    missing = [shard for shard in shards if not shard.is_done(job.made_of)]
    if job.engine is not None:
        job.engine.encode(missing, job.made_of, progress=progress)
        for folder in {shard.folder for shard in missing}:
            remove_strays(folder, job.shards)  # what lost workers left
    else:
        encode_shards(missing, job.corpus, job.encoder, made_of=job.made_of, progress=progress)


def _make_faiss(job: _Job, path: Path) -> dict[str, Json]:
    """Write `index.faiss` from the shards; give the counts for the manifest."""
    cut = count_cut(job.shards)
    refuse_cut(job.corpus, cut)
    source = VectorSource(
        len(job.corpus),
        job.encoder.width,
        partial(read_rows, job.shards),
        partial(read_shards, job.shards),
    )
    queries = None if job.queries is None else job.encoder.encode(job.queries)
    return {**build_faiss(source, replace(job.plan, queries=queries), path), "cut": cut}


# What an index was asked for, kept in its manifest, so that its folder alone is enough to go on.
#
# The fingerprint tells what an index is, by checksums; the recipe tells where that came from, by
# names. Local paths are kept whole, so that another working directory finds them too.


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


_QUERY_BATCH = 4096  # all vectors are read once for each, where they are searched on disk


class DenseRetriever:
    """Finds the passages whose vectors have the largest inner product with a query's."""

    def __init__(
        self,
        index: Any,
        encoder: Encoder,
        fingerprint: Mapping[str, Json],
        *,
        removed: Rows | None = None,
    ) -> None:
        self.fingerprint = fingerprint
        self.removed = np.empty(0, dtype=np.int64) if removed is None else removed
        self._index = index
        self._encoder = encoder

    @classmethod
    def prepare(cls, request: IndexRequest) -> list[BuiltIndex]:
        """Find the finished index, or build it.

        Raises:
            ArtifactError: If the one there is foreign, damaged or in use.
        """
        return [_find_or_build(request, load_encoder(request.args, request.device))]

    @classmethod
    def open(cls, request: IndexRequest) -> Self:
        """Find or build the index, and load it."""
        encoder = load_encoder(request.args, request.device)
        built = _find_or_build(request, encoder)
        made = built.manifest.fingerprint
        search = search_fields(request.args, str(made["factory"]))
        return cls(
            open_index(built, request.args, request.device),
            encoder,
            {**made, **encoder.query_fields, **search},
            removed=read_removed(built.folder, built.manifest),
        )

    def retrieve(self, queries: Sequence[str], k: int) -> Candidates:
        """Give each query its best k passages.

        Args:
            queries: Texts, encoded as the passages were, but for a prompt.
            k: Candidates a query.

        Returns:
            (B, k); scores are inner products (cosines, with a normalising encoder). Only an
            approximate index leaves entries missing. Removed rows are never among them.

        Raises:
            ConfigError: If k exceeds the rows that are left, or what FAISS can do on a GPU.
        """
        check_num_candidates(k, self._index.ntotal - len(self.removed))
        if k > (most := most_hits(self._index)):
            raise ConfigError(
                f"num_candidates ({k}) exceeds what FAISS finds on a GPU ({most}): "
                "lower it, or use --device cpu"
            )
        rows = np.empty((len(queries), k), dtype=np.int64)
        scores = np.empty((len(queries), k), dtype=np.float32)
        for start in range(0, len(queries), _QUERY_BATCH):
            batch = slice(start, start + _QUERY_BATCH)
            found = self.search(self._encoder.encode(queries[batch], is_query=True), k)
            rows[batch], scores[batch] = found.rows, found.scores
        return Candidates(rows, scores)

    def search(self, vectors: Vectors, k: int) -> Candidates:
        """Give each vector its best k passages; see `retrieve`.

        Args:
            vectors: (B, D).
            k: Candidates a vector.
        """
        search, most = partial(ask, self._index), most_hits(self._index)
        return search_kept(search, vectors, k, removed=self.removed, most=most)


def settle_factory(args: RetrieverArguments, num_rows: int, width: int) -> str:
    """Give the factory of the index that the arguments mean, and log why it suits the corpus.

    With `auto` and an index of its own to use, that index's.

    Args:
        args: The first stage's arguments.
        num_rows: P.
        width: D.

    Raises:
        ArtifactError: If `index_dir` is no finished index.
    """
    if args.index_factory == AUTO and args.index_dir is not None:
        manifest = read_manifest(Path(args.index_dir), stage=STAGE, verify=False)
        return str(manifest.fingerprint["factory"])
    memory = memory_limit(args.index_memory_gb)
    choice = choose_factory(args.index_factory, num_rows, width, memory=memory)
    if choice.reason:
        logger.info("index_factory auto is %s: %s", choice.factory, choice.reason)
    return choice.factory


def search_fields(args: RetrieverArguments, factory: str) -> dict[str, Json]:
    """Give what determines candidates besides the index: how hits are scored again, if they are."""
    plan = IndexPlan(factory=factory, rescore_factor=args.rescore_factor)
    return {"rescore_factor": args.rescore_factor} if plan.is_rescored else {}


def open_index(built: BuiltIndex, args: RetrieverArguments, device: str) -> Any:
    """Open a finished index for search: by FAISS in memory, or from the shards where it is too big.

    Args:
        built: The index.
        args: The first stage's arguments.
        device: Where.
    """
    counts, factory = built.manifest.counts, str(built.manifest.fingerprint["factory"])
    rows, width = int(str(counts["rows"])), int(str(counts["dim"]))
    if factory == EXACT:
        fits = 4 * rows * width <= memory_limit(args.index_memory_gb)
        if not fits or find_faiss(built.folder) is None:
            blocks = partial(read_shards, find_shards(built.folder))
            return BlockSearch(blocks, rows, device=str(choose_device(device)))
    index = load_faiss(built.folder, device)
    if not search_fields(args, factory):
        return index
    return Rescored(
        index, partial(read_rows, find_shards(built.folder)), factor=args.rescore_factor
    )


def load_faiss(folder: Path, device: str) -> Any:
    """Load a finished index, onto the GPU where FAISS has one and the index fits.

    On a CPU an exact index is memory-mapped: processes on one machine share its pages.
    """
    path = find_faiss(folder)
    assert path is not None, "an index without a FAISS file is searched from its shards"
    index = map_faiss(path)
    place = choose_device(device)
    if place.type == "cuda" and getattr(import_faiss(), "get_num_gpus", int)() > 0:
        return _to_gpu(index, path, place)
    return index


def _to_gpu(index: Any, path: Path, place: "torch.device") -> Any:
    import torch

    faiss = import_faiss()
    number = torch.cuda.current_device() if place.index is None else place.index
    needed = 1.2 * path.stat().st_size
    free, _ = torch.cuda.mem_get_info(number)
    if needed > free:
        logger.warning("an index of %.1f GB does not fit on the GPU: using the CPU", needed / 1e9)
        return index
    resources = faiss.StandardGpuResources()
    try:
        return faiss.index_cpu_to_gpu(resources, number, index)
    except RuntimeError as error:  # HNSW and some others have no GPU kind
        logger.warning("FAISS cannot put this index on the GPU (%s): searching on the CPU", error)
        return index


def dense_folder(request: IndexRequest, encoder: Encoder) -> Path:
    """Give the folder where this index stands, or will."""
    factory = settle_factory(request.args, len(request.corpus), encoder.width)
    return _folder_of(request, encoder, factory)


def _folder_of(request: IndexRequest, encoder: Encoder, factory: str) -> Path:
    args = request.args
    if args.index_dir is not None:
        return Path(args.index_dir)
    name = Path(args.encoder.removeprefix("bundled:").partition("@")[0]).name
    fields = dense_fingerprint(request.corpus, encoder, factory)
    return request.output_dir or artifact_dir(request.artifacts / "indexes", name, fields)


def _find_or_build(request: IndexRequest, encoder: Encoder) -> BuiltIndex:
    args, corpus = request.args, request.corpus
    factory = settle_factory(args, len(corpus), encoder.width)
    folder = _folder_of(request, encoder, factory)
    if args.index_dir is not None:
        fields = with_history(folder, dense_fingerprint(corpus, encoder, factory))
        manifest = read_manifest(folder, stage=STAGE, fingerprint=fields)
        return BuiltIndex(folder, manifest, len(corpus))
    engine = None
    if request.engine == "ray":
        engine = RayEngine.plan(
            args, corpus, encoder, device=request.device, num_workers=request.num_workers
        )
    return build_dense_index(
        corpus,
        encoder,
        folder,
        plan=IndexPlan(
            factory=factory,
            memory=memory_limit(args.index_memory_gb),
            rescore_factor=args.rescore_factor,
        ),
        queries=request.queries,
        shard_rows=args.shard_rows,
        context=request.context,
        progress=request.progress,
        recipe=write_recipe(args, corpus),
        engine=engine,
        home=request.artifacts / "indexes",
    )
