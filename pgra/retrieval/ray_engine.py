"""Shards encoded by Ray, on one machine or on many that share a folder (extra `ray`).

A task is a shard: its worker reads the corpus and writes the shard in the shared folder, so Ray
itself moves only a few numbers. A lost worker's shard is given to another; finished shards are
never repeated.
"""

import importlib.util
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgra.data.corpus import load_corpus
from pgra.encoders.encoder import Encoder
from pgra.errors import ArtifactError, ConfigError, PgraError
from pgra.progress import Bar
from pgra.retrieval.base import IndexRequest, RetrieverArguments, find_retriever, whole_path
from pgra.retrieval.shards import Shard, encode_shards, vectors_digest

if TYPE_CHECKING:
    from pgra.data.corpus import Corpus

_MAX_LOST = 5  # workers that one shard may cost before it fails


def encode_by_ray(
    shards: Sequence[Shard], request: IndexRequest, encoder: Encoder, made_of: str
) -> None:
    """Encode the missing shards; return when all are written.

    `num_workers` shards run at once, or as many as there are GPUs, or else CPUs. `made_of` is the
    digest of all that determines the vectors, which must be this process's. Raises as
    `encode_shards`.
    """
    if not shards:
        return
    import ray

    args = replace(
        request.args,
        encoder=whole_path(request.args.encoder),
        encoder_dtype=str(encoder.fingerprint["dtype"]),  # auto may be another there
    )
    what = (str(request.corpus.folder.resolve()), json.dumps(asdict(args)))
    waiting = [replace(shard, folder=shard.folder.resolve()) for shard in shards][::-1]
    total, is_quiet = sum(map(len, shards)), not request.context.shows_progress
    with _cluster(), Bar(total=total, desc="encode", unit="text", disable=is_quiet) as bar:
        has_gpus = request.context.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
        kind, device = ("GPU", "cuda") if has_gpus else ("CPU", "cpu")
        task = ray.remote(num_cpus=1, num_gpus=int(has_gpus), max_retries=_MAX_LOST)(encode_one)
        running: list[Any] = []
        while waiting or running:
            slots = int(ray.cluster_resources().get(kind, 1))  # a cluster may grow meanwhile
            while waiting and len(running) < (request.num_workers or max(1, slots)):
                running.append(task.remote(waiting.pop(), made_of, *what, device))
            done, running = ray.wait(running, num_returns=1)
            bar.update(sum(_result(reference) for reference in done))


def encode_one(shard: Shard, made_of: str, corpus_folder: str, args: str, device: str) -> int:
    """Encode a shard in a worker, if it is missing; return the number of its passages.

    `corpus_folder` is at the same place on all machines; `args` are the encoder's, as JSON.
    ArtifactError if vectors made here would differ, as of another version of the model.
    """
    if not shard.is_done(made_of):  # a lost worker may have finished it
        corpus, encoder = _load(corpus_folder, args, device)
        if vectors_digest(corpus.fingerprint, encoder) != made_of:
            raise ArtifactError(
                f"a Ray worker on {os.uname().nodename} has another encoder or corpus than the "
                f"process that asks ({dict(encoder.fingerprint)}): give all machines the same"
            )
        encode_shards([shard], corpus, encoder, made_of=made_of, progress=False)
    return len(shard)


@lru_cache(maxsize=1)
def _load(folder: str, encoder: str, device: str) -> "tuple[Corpus, Encoder]":
    """Load a worker's corpus and encoder, once in its life."""
    args = RetrieverArguments(**json.loads(encoder))
    return load_corpus(Path(folder)), Encoder(args, device=device)


def _result(reference: Any) -> int:
    import ray

    try:
        return int(ray.get(reference))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, (PgraError, OSError)):
            raise error.cause from None
        raise


@contextmanager
def _cluster() -> Iterator[None]:
    """Join Ray's cluster, or start one; shut down only what was started here."""
    import ray

    if ray.is_initialized():
        yield
        return
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
    try:
        yield
    finally:
        ray.shutdown()


def check_engine(retriever: str, *, num_processes: int) -> None:
    """Refuse to encode by Ray where that cannot work, before anything is read.

    Raises:
        ConfigError: If Ray is not installed, a launcher started several processes, or there is
            nothing to encode.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("engine 'ray' needs Ray, which is not installed: pip install 'pgra[ray]'")
    if num_processes > 1:
        raise ConfigError(
            f"engine 'ray' shares the work itself, and a launcher started {num_processes} "
            "processes: start one, with pgra index build"
        )
    if not find_retriever(retriever).encodes:
        raise ConfigError(f"retriever '{retriever}' encodes nothing: leave --engine ray out")
