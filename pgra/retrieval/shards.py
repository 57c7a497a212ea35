"""A corpus' vectors on disk: float16 shards, each with a record, made by all who share the work.

A shard is done when its record, written last, is there, names the same vectors, and its checksum
matches. Anything else is computed again.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pgra.artifacts import (
    digest,
    find_damage,
    load_manifest,
    read_array,
    record_files,
    write_array,
    write_aside,
    write_json,
)
from pgra.core import Json, Rows, run_overlapped
from pgra.data.corpus import Corpus
from pgra.encoders.encoder import Encoder, TokenChunk
from pgra.errors import ArtifactError, DamageError, PgraError
from pgra.progress import Bar
from pgra.retrieval.base import IndexRequest, RetrieverArguments, whole_path
from pgra.retrieval.faiss import VectorSource

logger = logging.getLogger(__name__)


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
            record = json.loads(self.record_path.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    def is_done(self, made_of: str) -> bool:
        """Return whether the vectors are there, whole, and those of this digest."""
        record = self.read_record()
        same = (record.get("rows"), record.get("made_of")) == ([self.start, self.stop], made_of)
        files = record.get("files", {})
        return same and self.path.name in files and not any(find_damage(self.folder, files))


def plan_shards(folder: Path, num_rows: int, shard_rows: int) -> list[Shard]:
    """Cut all rows into shards of `shard_rows`, the last one shorter."""
    return [
        Shard(folder, number, start, min(start + shard_rows, num_rows))
        for number, start in enumerate(range(0, num_rows, shard_rows))
    ]


def vectors_digest(corpus_fields: Mapping[str, Json], encoder: Encoder) -> str:
    """Return the digest of all that determines a shard's vectors, besides its rows."""
    return digest({**corpus_fields, **encoder.fingerprint})


def take_over_shards(shards: Sequence[Shard], made_of: str, home: Path) -> None:
    """Reuse the same vectors (`made_of`) of other indexes in `home`, such as another factory's.

    Files are linked, or copied where the disk cannot: shards are replaced, never changed in place.
    """
    for record_path in sorted(home.glob(f"*/{shards[0].record_path.name}")):
        lender = record_path.parent
        same = [(replace(shard, folder=lender), shard) for shard in shards]
        if same[0][0].read_record().get("made_of") != made_of:
            continue
        taken = [pair for pair in same if not pair[1].is_done(made_of) and pair[0].is_done(made_of)]
        for theirs, ours in taken:
            _link_or_copy(theirs.path, ours.path)
            _link_or_copy(theirs.record_path, ours.record_path)  # last: it says the shard is whole
        if taken:
            logger.info("%d of %d shards are those of %s", len(taken), len(shards), lender)


def _link_or_copy(source: Path, target: Path) -> None:
    with write_aside(target) as aside:
        try:
            os.link(source, aside)
        except OSError:
            shutil.copyfile(source, aside)


def encode_shards(
    shards: Sequence[Shard], corpus: Corpus, encoder: Encoder, *, made_of: str, progress: bool
) -> None:
    """Encode these shards and write each with its record; reading, encoding and writing overlap.

    Raises:
        ModelError: If a vector is not finite, in float32 or in float16.
        ArtifactError: If the encoder's files changed meanwhile.
        OSError: If the disk is full; what was being written is removed, done shards stay.
    """
    total = sum(map(len, shards))

    def prepare(shard: Shard) -> list[TokenChunk]:
        return encoder.tokenize(corpus.slice(shard.start, shard.stop), first=shard.start)

    def keep(shard: Shard, done: tuple[int, Callable[[], npt.NDArray[np.float16]]]) -> None:
        num_cut, finish = done
        write_array(shard.path, finish())
        encoder.inputs.check()
        record = {
            "rows": [shard.start, shard.stop],
            "made_of": made_of,
            "cut": num_cut,
            "files": record_files(shard.folder, [shard.path.name]),
        }
        write_json(shard.record_path, record)

    with Bar(total=total, desc="encode", unit="text", disable=not (progress and shards)) as bar:

        def compute(
            chunks: list[TokenChunk],
        ) -> tuple[int, Callable[[], npt.NDArray[np.float16]]]:
            num_cut = sum(chunk.num_cut for chunk in chunks)
            return num_cut, encoder.begin(chunks, in_half=True, advance=bar.update)

        run_overlapped(shards, prepare, compute, keep=keep)


def read_shards(shards: Sequence[Shard]) -> Iterator[npt.NDArray[np.float32]]:
    """Yield each shard's vectors as float32, in one buffer that the next one overwrites."""
    import torch

    # 8,192 x 768 took torch 1.3 ms into memory it had before, numpy 10 ms.
    buffer = torch.empty(0)
    for array in read_halves(shards):
        halves = torch.from_numpy(array)
        if buffer.shape[0] < len(halves) or buffer.shape[1:] != halves.shape[1:]:
            buffer = torch.empty(halves.shape, dtype=torch.float32)
        yield buffer[: len(halves)].copy_(halves).numpy()


def read_halves(shards: Sequence[Shard]) -> Iterator[npt.NDArray[np.float16]]:
    """Yield each shard's vectors as they are on disk, mapped."""
    for shard in shards:
        yield read_array(shard.path, is_private=True)  # torch warns of what cannot be written


def read_rows(shards: Sequence[Shard], rows: Rows) -> npt.NDArray[np.float16]:
    """Return the vectors of rising rows, (n, D) float16; opens only the shards that hold one."""
    # Files are opened when they are needed, and closed: a large index has more than a process may.
    firsts = np.searchsorted(rows, [shard.start for shard in shards])
    lasts = np.searchsorted(rows, [shard.stop for shard in shards])
    found = int((lasts - firsts).sum())
    if found != len(rows):
        where = shards[0].folder if shards else "the index"
        raise DamageError(f"{where} lacks {len(rows) - found} vectors")
    parts = [
        read_array(shards[i].path)[rows[firsts[i] : lasts[i]] - shards[i].start]
        for i in np.flatnonzero(lasts > firsts).tolist() or [0]
    ]
    return np.concatenate(parts)


def vector_source(shards: Sequence[Shard], width: int) -> VectorSource:
    """Return the vectors of all shards, in the order of rows, to build or search an index."""
    return VectorSource(
        num_rows=shards[-1].stop,
        width=width,
        read=lambda rows: read_rows(shards, rows).astype(np.float32),
        blocks=lambda: read_shards(shards),
        halves=lambda: read_halves(shards),
    )


def find_shards(folder: Path) -> list[Shard]:
    """Return a finished index's shards by their records, in the order of rows."""
    files = load_manifest(folder).files
    shards = []
    for number in range(sum(name.startswith("vectors-") for name in files) // 2):
        rows = Shard(folder, number, 0, 0).read_record().get("rows", (0, 0))
        shards.append(Shard(folder, number, *rows))
    return shards


# Shards encoded by Ray, on one machine or on many that share a folder (extra `ray`).
#
# A task is a shard: its worker reads the corpus and writes the shard in the shared folder, so Ray
# itself moves only a few numbers. A lost worker's shard is given to another; finished shards are
# never repeated.


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
    if not ray.is_initialized():  # joins the cluster of RAY_ADDRESS, or starts one
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
    with Bar(total=total, desc="encode", unit="text", disable=is_quiet) as bar:
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
def _load(folder: str, encoder: str, device: str) -> tuple[Corpus, Encoder]:
    """Load a worker's corpus and encoder, once in its life."""
    args = RetrieverArguments(**json.loads(encoder))
    return Corpus(Path(folder)), Encoder.load(args, device=device)


def _result(reference: Any) -> int:
    import ray

    try:
        return int(ray.get(reference))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, (PgraError, OSError)):
            raise error.cause from None
        raise
