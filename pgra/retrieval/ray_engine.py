"""Shards encoded by Ray, on one machine or on many that share a folder (extra `ray`).

A task is a shard: its worker reads the corpus' rows from the shared folder and writes the shard
there, as a process of `accelerate launch` does, so Ray itself moves a few numbers only. A worker
that is lost is replaced, and its shard given to another; what is finished is never done again.
"""

import importlib.util
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from pgra.config import RetrieverArguments
from pgra.data.corpus import load_corpus
from pgra.encoders.encoder import Encoder, load_encoder
from pgra.errors import ArtifactError, ConfigError, PgraError
from pgra.retrieval.base import IndexRequest, find_retriever, whole_path
from pgra.retrieval.shards import Shard, encode_shards, vectors_digest

if TYPE_CHECKING:
    from pgra.data.corpus import Corpus

_MAX_LOST = 5
"""Workers that one shard may cost before it is taken for the shard's own fault."""


@dataclass(frozen=True)
class RayEngine:
    """Encodes shards with Ray: a value that each worker can take apart.

    Attributes:
        corpus: Folder of the corpus, the same on all machines.
        encoder: The encoder's arguments, as JSON.
        device: What a worker encodes on, "cpu" or "cuda".
        num_workers: Shards at once; None: as many as there are GPUs, or else CPUs.
    """

    corpus: str
    encoder: str
    device: str
    num_workers: int | None

    @classmethod
    def plan(cls, request: IndexRequest, encoder: Encoder) -> "RayEngine":
        """Say what workers are to do, so that their vectors are this process's.

        Args:
            request: Which index.
            encoder: The encoder as it is loaded here.
        """
        args = replace(
            request.args,
            encoder=whole_path(request.args.encoder),
            encoder_dtype=str(encoder.fingerprint["dtype"]),  # auto may be another there
        )
        kind = "cpu" if request.context.device == "cpu" else "cuda"
        corpus = str(request.corpus.folder.resolve())
        return cls(corpus, json.dumps(asdict(args)), kind, request.num_workers)

    def encode(self, shards: Sequence[Shard], made_of: str, *, progress: bool) -> None:
        """Encode these shards; returns when all are written.

        Args:
            shards: Those that are missing.
            made_of: Digest of all that determines their vectors.
            progress: Whether to show a bar.

        Raises:
            PgraError: As `encode_shards`; or a worker's model is another one; or workers of one
                shard were lost again and again.
            OSError: If the shared folder cannot be written.
        """
        if not shards:
            return
        import ray

        waiting = [replace(shard, folder=shard.folder.resolve()) for shard in shards][::-1]
        total = sum(map(len, shards))
        with (
            _cluster(),
            tqdm(total=total, desc="encode", unit="text", disable=not progress) as bar,
        ):
            has_gpus = self.device == "cuda" and ray.cluster_resources().get("GPU", 0) > 0
            engine = self if has_gpus else replace(self, device="cpu")
            task = ray.remote(num_cpus=1, num_gpus=int(has_gpus), max_retries=_MAX_LOST)(encode_one)
            running: list[Any] = []
            while waiting or running:
                resources = ray.cluster_resources()  # a cluster may grow meanwhile
                slots = int(resources.get("GPU" if has_gpus else "CPU", 1))
                while waiting and len(running) < (self.num_workers or max(1, slots)):
                    running.append(task.remote(engine, waiting.pop(), made_of))
                done, running = ray.wait(running, num_returns=1)
                bar.update(sum(_result(reference) for reference in done))


def encode_one(engine: RayEngine, shard: Shard, made_of: str) -> int:
    """Encode a shard, in a worker; return the number of its passages.

    Raises:
        ArtifactError: If vectors made here would be others, as of another version of the model.
    """
    if not shard.is_done(made_of):  # a lost worker may have finished it
        corpus, encoder = _load(engine.corpus, engine.encoder, engine.device)
        if vectors_digest(corpus.fingerprint, encoder) != made_of:
            raise ArtifactError(
                f"a Ray worker on {os.uname().nodename} has another encoder or corpus than the "
                f"process that asks ({dict(encoder.fingerprint)}): give all machines the same"
            )
        encode_shards([shard], corpus, encoder, made_of=made_of, progress=False)
    return len(shard)


@lru_cache(maxsize=1)
def _load(folder: str, encoder: str, device: str) -> "tuple[Corpus, Encoder]":
    """Load what a worker needs, once in its life."""
    args = RetrieverArguments(**json.loads(encoder))
    return load_corpus(Path(folder)), load_encoder(args, device)


def _result(reference: Any) -> int:
    import ray

    try:
        return int(ray.get(reference))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, (PgraError, OSError)):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[0]
        raise ArtifactError(
            f"Ray lost the worker of one shard {_MAX_LOST + 1} times ({reason}): finished shards "
            "stay; give workers more memory, or lower shard_rows, and run again"
        ) from None


@contextmanager
def _cluster() -> Iterator[None]:
    """Join Ray's cluster, or start one on this machine; leave one that others started alone."""
    import ray

    if ray.is_initialized():
        yield
        return
    try:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"cannot join or start Ray: {reason} (RAY_ADDRESS names it)") from None
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
            "processes: start one, with python -m index_build"
        )
    if not find_retriever(retriever).encodes:
        raise ConfigError(f"retriever '{retriever}' encodes nothing: leave --engine ray out")
