"""First stage by meaning: an encoder's vectors, searched with FAISS by inner product."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from pgra.config import RetrieverArguments
from pgra.errors import ConfigError
from pgra.io import artifact_dir, read_manifest
from pgra.models.encoder import Encoder
from pgra.models.loading import choose_device
from pgra.retrieval.base import BuiltIndex, IndexRequest, check_num_candidates
from pgra.retrieval.choice import AUTO, EXACT, choose_factory, import_faiss, memory_limit
from pgra.retrieval.exact import Vectors, ask, most_hits
from pgra.retrieval.factory import IndexPlan, find_faiss, map_faiss
from pgra.retrieval.flat import BlockSearch
from pgra.retrieval.index import build_dense_index, dense_fingerprint
from pgra.retrieval.ray_engine import RayEngine
from pgra.retrieval.recipe import write_recipe
from pgra.retrieval.rescore import Rescored
from pgra.retrieval.shards import find_shards, read_rows, read_shards
from pgra.retrieval.tombstones import STAGE, read_removed, search_kept, with_history
from pgra.types import Candidates, Json, Rows

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

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


def load_encoder(args: RetrieverArguments, device: str) -> Encoder:
    """Load the encoder that the arguments name."""
    return Encoder.from_name(
        args.encoder,
        pooling=args.pooling,
        normalize=args.normalize,
        max_tokens=args.max_encoder_tokens,
        dtype=args.encoder_dtype,
        device=device,
        batch_tokens=args.encoder_batch_tokens,
        query_prompt=args.query_prompt,
        passage_prompt=args.passage_prompt,
    )


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
        processes=request.processes,
        progress=request.progress,
        recipe=write_recipe(args, corpus),
        engine=engine,
        home=request.artifacts / "indexes",
    )
