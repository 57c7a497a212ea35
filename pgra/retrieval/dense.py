"""First stage by meaning: an encoder's vectors, searched with FAISS by inner product."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import faiss
import numpy as np

from pgra.config import RetrieverArguments
from pgra.errors import ConfigError
from pgra.io import artifact_dir, read_manifest
from pgra.models.encoder import Encoder
from pgra.retrieval.base import BuiltIndex, IndexRequest, check_num_candidates
from pgra.retrieval.exact import BLAS_THRESHOLD
from pgra.retrieval.factory import INDEX_FILE
from pgra.retrieval.index import STAGE, build_dense_index, dense_fingerprint
from pgra.retrieval.ray_engine import RayEngine
from pgra.types import Candidates, Json

logger = logging.getLogger(__name__)

_QUERY_BATCH = 1024
GPU_MAX_K = 2048


class DenseRetriever:
    """Finds the passages whose vectors have the largest inner product with a query's."""

    def __init__(self, index: Any, encoder: Encoder, fingerprint: Mapping[str, Json]) -> None:
        self.fingerprint = fingerprint
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
        fields = {**built.manifest.fingerprint, **encoder.query_fields}
        return cls(load_faiss(built.folder, request.device), encoder, fields)

    def retrieve(self, queries: Sequence[str], k: int) -> Candidates:
        """Give each query its best k passages.

        Args:
            queries: Texts, encoded as the passages were, but for a prompt.
            k: Candidates a query.

        Returns:
            (B, k); scores are inner products (cosines, with a normalising encoder). Only an
            approximate index leaves entries missing.

        Raises:
            ConfigError: If k exceeds the corpus, or what FAISS can do on a GPU.
        """
        check_num_candidates(k, self._index.ntotal)
        if k > GPU_MAX_K and type(self._index).__name__.startswith("Gpu"):
            raise ConfigError(
                f"num_candidates ({k}) exceeds what FAISS finds on a GPU ({GPU_MAX_K}): "
                "lower it, or use --device cpu"
            )
        rows = np.empty((len(queries), k), dtype=np.int64)
        scores = np.empty((len(queries), k), dtype=np.float32)
        for start in range(0, len(queries), _QUERY_BATCH):
            batch = slice(start, start + _QUERY_BATCH)
            vectors = self._encoder.encode(queries[batch], is_query=True)
            scores[batch], rows[batch] = self._index.search(vectors, k)
        return Candidates.best(rows, scores, k)


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


def load_faiss(folder: Path, device: str) -> Any:
    """Load a finished index, onto the GPU where FAISS has one and the index fits.

    On a CPU an exact index is memory-mapped: processes on one machine share its pages.
    """
    faiss.cvar.distance_compute_blas_threshold = BLAS_THRESHOLD
    index = faiss.read_index(str(folder / INDEX_FILE), faiss.IO_FLAG_MMAP_IFC)
    if device != "cpu" and getattr(faiss, "get_num_gpus", int)() > 0:
        return _to_gpu(index, folder)
    return index


def _to_gpu(index: Any, folder: Path) -> Any:
    import torch

    needed = 1.2 * (folder / INDEX_FILE).stat().st_size
    free, _ = torch.cuda.mem_get_info()
    if needed > free:
        logger.warning("an index of %.1f GB does not fit on the GPU: using the CPU", needed / 1e9)
        return index
    resources = faiss.StandardGpuResources()
    try:
        return faiss.index_cpu_to_gpu(resources, torch.cuda.current_device(), index)
    except RuntimeError as error:  # HNSW and some others have no GPU kind
        logger.warning("FAISS cannot put this index on the GPU (%s): searching on the CPU", error)
        return index


def _find_or_build(request: IndexRequest, encoder: Encoder) -> BuiltIndex:
    args, corpus = request.args, request.corpus
    fields = dense_fingerprint(corpus, encoder, args.index_factory)
    if args.index_dir is not None:
        folder = Path(args.index_dir)
        manifest = read_manifest(folder, stage=STAGE, fingerprint=fields)
        return BuiltIndex(folder, manifest, len(corpus))
    name = Path(args.encoder.removeprefix("bundled:").partition("@")[0]).name
    folder = request.output_dir or artifact_dir(request.artifacts / "indexes", name, fields)
    engine = None
    if request.engine == "ray":
        engine = RayEngine.plan(
            args, corpus, encoder, device=request.device, num_workers=request.num_workers
        )
    return build_dense_index(
        corpus,
        encoder,
        folder,
        factory=args.index_factory,
        shard_rows=args.shard_rows,
        processes=request.processes,
        progress=request.progress,
        engine=engine,
    )
