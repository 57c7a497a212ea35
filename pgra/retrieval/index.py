"""Builds a FAISS index of a corpus: float16 shards first, then `index.faiss`, manifest last."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pgra.io import Manifest, is_finished, lock_folder, read_manifest, write_manifest
from pgra.models.encoder import Encoder
from pgra.processes import Processes
from pgra.retrieval.base import BuiltIndex, refuse_strangers
from pgra.retrieval.factory import (
    INDEX_FILE,
    IndexPlan,
    VectorSource,
    build_faiss,
    empty_index,
)
from pgra.retrieval.ray_engine import RayEngine
from pgra.retrieval.shards import (
    Shard,
    count_cut,
    encode_shards,
    plan_shards,
    read_rows,
    read_shards,
    refuse_cut,
    remove_strays,
    take_over_shards,
    vectors_digest,
)
from pgra.retrieval.tombstones import GROWN_FILES, STAGE, with_history
from pgra.types import Json

if TYPE_CHECKING:
    from pgra.data.corpus import Corpus

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
    processes: Processes = Processes(),  # noqa: B008 (frozen)
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
        processes: Who shares the shards; the main one locks the folder and makes `index.faiss`.
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
    worker, barrier = processes.worker, processes.barrier
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
            manifest, num_reused = _build(job, folder, fields, processes, progress)
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
    processes: Processes,
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
    processes.barrier()  # counted, before others write
    _encode_missing(job, processes.worker.share(job.shards), progress=progress)
    processes.barrier()  # all encoded
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
