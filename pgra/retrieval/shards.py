"""Corpus vectors on disk: float16 shards, each with a record, so that a stopped job goes on.

A shard counts as done when its record is there, names the same vectors, and its bytes match the
record's checksum. The record is written after the shard. Anything else is computed again.
"""

import io
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from pgra.errors import ArtifactError, DataError, ModelError
from pgra.io import digest, file_checksum, load_manifest, read_array, write_aside, write_json
from pgra.models.encoder import Encoder
from pgra.retrieval.tombstones import GROWN_FILES, STAGE
from pgra.types import Json

if TYPE_CHECKING:
    from pgra.data.corpus import Corpus

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shard:
    """Where one run of the corpus's rows keeps its vectors.

    Attributes:
        folder: The index.
        number: From 0.
        start: First row.
        stop: Row after the last.
    """

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
        """What the vectors are, and their checksum."""
        return self.path.with_suffix(".json")

    def read_record(self) -> dict[str, Any] | None:
        """Give the record, or None where there is none that can be read."""
        try:
            record = json.loads(self.record_path.read_text())
        except (OSError, ValueError):
            return None
        return record if isinstance(record, dict) else None

    def is_done(self, made_of: str) -> bool:
        """Say whether the vectors are there, whole, and of this kind.

        Args:
            made_of: Digest of all that determines the vectors.
        """
        record = self.read_record()
        if record is None or not self.path.is_file():
            return False
        same = (record.get("rows"), record.get("made_of")) == ([self.start, self.stop], made_of)
        return same and file_checksum(self.path) == record.get("checksum")


def plan_shards(folder: Path, num_rows: int, shard_rows: int) -> list[Shard]:
    """Cut the corpus into shards of `shard_rows` rows, the last one shorter."""
    starts = range(0, num_rows, shard_rows)
    return [
        Shard(folder, number, start, min(start + shard_rows, num_rows))
        for number, start in enumerate(starts)
    ]


def vectors_digest(corpus_fields: Mapping[str, Json], encoder: Encoder) -> str:
    """Give the digest of all that determines a shard's vectors, besides its rows."""
    return digest({**corpus_fields, **encoder.fingerprint})


def take_over_shards(shards: Sequence[Shard], made_of: str, home: Path) -> None:
    """Take the same vectors from other indexes: another factory's need no new encoding.

    Files are linked where the disk can, and copied where it cannot: whoever changes a shard writes
    a new file in its place.

    Args:
        shards: All of an index that is not finished; those that are done stay.
        made_of: Digest of all that determines the vectors.
        home: Where indexes are.
    """
    records = sorted(home.glob(f"*/{shards[0].record_path.name}"))
    for lender in (path.parent for path in records):
        same = [(replace(shard, folder=lender), shard) for shard in shards]
        record = same[0][0].read_record()
        if record is None or record.get("made_of") != made_of:
            continue
        taken = [pair for pair in same if not pair[1].is_done(made_of) and pair[0].is_done(made_of)]
        for theirs, ours in taken:
            for source, path in (
                (theirs.path, ours.path),
                (theirs.record_path, ours.record_path),  # last: it says that the shard is whole
            ):
                with write_aside(path) as aside:
                    _link_or_copy(source, aside)
        if taken:
            logger.info("%d of %d shards are those of %s", len(taken), len(shards), lender)


def _link_or_copy(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def encode_shards(
    shards: Sequence[Shard], corpus: "Corpus", encoder: Encoder, *, made_of: str, progress: bool
) -> None:
    """Encode these shards and write each with its record.

    Raises:
        DataError: If the corpus is strict, and a passage is longer than the encoder reads.
        ModelError: If a vector is not finite, in float32 or in float16.
        OSError: If the disk is full; what was being written is removed, done shards stay.
    """
    total = sum(shard.stop - shard.start for shard in shards)
    with tqdm(total=total, desc="encode", unit="text", disable=not (progress and shards)) as bar:
        for shard in shards:
            cut_before = encoder.num_cut
            texts = corpus.slice(shard.start, shard.stop)
            vectors = encoder.encode(texts, advance=bar.update)
            refuse_cut(corpus, encoder.num_cut - cut_before)
            _write_vectors(shard.path, _to_float16(vectors, shard))
            record = {
                "rows": [shard.start, shard.stop],
                "made_of": made_of,
                "cut": encoder.num_cut - cut_before,
                "checksum": file_checksum(shard.path),
            }
            write_json(shard.record_path, record)


def refuse_cut(corpus: "Corpus", num_cut: int) -> None:
    """Refuse passages longer than the encoder reads, where the corpus is strict.

    Args:
        corpus: Whose passages.
        num_cut: How many were found to be longer.

    Raises:
        DataError: If there are any, and `strict` refuses them.
    """
    if num_cut and corpus.made_by is not None and corpus.made_by.strict:
        raise DataError(
            f"{num_cut:,} passages are longer than the encoder reads (or more: it stopped there), "
            "and --strict refuses them: raise --max_encoder_tokens, cut them (--passage_words), or "
            "leave --strict out to read their beginning"
        )


def _write_vectors(path: Path, vectors: npt.NDArray[np.float16]) -> None:
    # numpy writes an array to a file through C's buffer, and a disk that fills up when that is
    # flushed goes unnoticed: the file is short, and nothing is raised. Python's own write raises.
    buffer = io.BytesIO()
    np.save(buffer, vectors, allow_pickle=False)
    with write_aside(path) as aside:
        aside.write_bytes(buffer.getbuffer())


def _to_float16(vectors: npt.NDArray[np.float32], shard: Shard) -> npt.NDArray[np.float16]:
    largest = np.finfo(np.float16).max
    too_large = np.flatnonzero(np.abs(vectors).max(axis=1) > largest)
    if len(too_large):
        raise ModelError(
            f"the vector of passage {shard.start + int(too_large[0])} exceeds {largest}, the most "
            "that float16 holds: use normalize"
        )
    return vectors.astype(np.float16)


def read_shards(shards: Sequence[Shard]) -> Iterator[npt.NDArray[np.float32]]:
    """Give each shard's vectors as float32, one shard in memory at a time.

    All come in the same memory: what is given is good until the next one is asked for.
    """
    import torch

    # 8,192 x 768 took torch 1.3 ms into memory it had before, numpy 10 ms.
    buffer = torch.empty(0)
    for shard in shards:
        halves = torch.from_numpy(read_array(shard.path, is_private=True))
        if buffer.shape[0] < len(halves) or buffer.shape[1:] != halves.shape[1:]:
            buffer = torch.empty(halves.shape, dtype=torch.float32)
        yield buffer[: len(halves)].copy_(halves).numpy()


def read_rows(shards: Sequence[Shard], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Give the vectors of these rows, which must rise, as (n, D) float32.

    Args:
        shards: In the order of rows; only those that hold one of them are opened.
        rows: (n,), of these shards.

    Raises:
        ArtifactError: If a passage's vector is not there.
    """
    return _gather(shards, rows).astype(np.float32)


def read_vectors(folder: Path, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float16]:
    """Read the vectors of a finished index's passages, as they lie on disk.

    Args:
        folder: The index, however its shards were cut.
        rows: Which passages, rising.

    Returns:
        (n, D) float16.

    Raises:
        ArtifactError: If a passage's vector is not there.
    """
    return _gather(find_shards(folder), rows)


def find_shards(folder: Path) -> list[Shard]:
    """Give a finished index's shards by their records, in the order of rows.

    Raises:
        ArtifactError: If the folder is no finished index.
    """
    files = load_manifest(folder, stage=STAGE).files  # a stopped `add` may have left others
    shards = []
    for number in range(sum(name.startswith("vectors-") for name in files) // 2):
        record = Shard(folder, number, 0, 0).read_record() or {}
        shards.append(Shard(folder, number, *record.get("rows", (0, 0))))
    return shards


def _gather(shards: Sequence[Shard], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float16]:
    # Files are opened when they are needed, and closed: a large index has more than a process may.
    firsts = np.searchsorted(rows, [shard.start for shard in shards])
    lasts = np.searchsorted(rows, [shard.stop for shard in shards])
    found = int((lasts - firsts).sum())
    if found != len(rows):
        where = shards[0].folder if shards else "the index"
        raise ArtifactError(f"{where} lacks {len(rows) - found} vectors: delete it, run again")
    parts = [
        read_array(shards[i].path)[rows[firsts[i] : lasts[i]] - shards[i].start]
        for i in np.flatnonzero(lasts > firsts).tolist() or [0]
    ]
    return np.concatenate(parts)


def count_cut(shards: Sequence[Shard]) -> int:
    """Count the passages longer than the encoder reads, from the shards' records.

    Raises:
        ArtifactError: If a shard's record has gone since it was written.
    """
    total = 0
    for shard in shards:
        record = shard.read_record()
        if record is None:
            raise ArtifactError(f"{shard.record_path} has gone: run the job again")
        total += int(record["cut"])
    return total


def remove_strays(folder: Path, shards: Sequence[Shard]) -> None:
    """Remove what a killed job left half-written, shards of another plan, and what grew on them."""
    expected = {path for shard in shards for path in (shard.path, shard.record_path)}
    grown = [path for pattern in GROWN_FILES for path in folder.glob(pattern)]
    for path in [*folder.glob(".*.partial*"), *folder.glob("vectors-*"), *grown]:
        if path not in expected:
            path.unlink(missing_ok=True)
