"""Corpus vectors and candidates on disk: float16 shards with records, removed rows.

A shard counts as done when its record is there, names the same vectors, and its bytes match the
record's checksum. The record is written after the shard. Anything else is computed again.
"""

import io
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from pgra.artifacts import (
    Manifest,
    artifact_dir,
    build_once,
    digest,
    file_checksum,
    load_manifest,
    lock_folder,
    read_array,
    record_file,
    write_array,
    write_aside,
    write_json,
    write_manifest,
)
from pgra.core import ALONE, MISSING_ROW, Candidates, Context, Example, Json, Rows
from pgra.encoders.encoder import Encoder
from pgra.errors import ArtifactError, ConfigError, DataError, ModelError

if TYPE_CHECKING:
    from pgra.data.corpus import Corpus


# Rows removed from a dense index, and what else of its past decides what it finds.
#
# A removed row stays in the shards and in the FAISS file: the manifest names a list of removed
# rows, and a search passes over them. Rows keep their numbers. The list's digest is a field of
# the index's fingerprint beside those that a build has, so that candidates made before are not
# taken for its own.


STAGE = "dense_index"
HISTORY = ("removed", "trained_rows")
"""Fields of a fingerprint that an index has from its past; nobody asks for them."""
GROWN_FILES = ("index-*.faiss", "removed-*.npy")
"""Files that `pgra index add` and `remove` leave in the folder of an index."""
_NONE: Rows = np.empty(0, dtype=np.int64)

Vectors = npt.NDArray[np.float32]
FaissSearch = Callable[[Vectors, int], tuple[Any, Any]]
"""Takes queries (B, D) and a depth; gives scores and rows, both (B, depth)."""


def with_history(folder: Path, fields: Mapping[str, Json]) -> dict[str, Json]:
    """Add to the fields asked for what an index in this folder has from its past."""
    try:
        made = load_manifest(folder, stage=STAGE).fingerprint
    except ArtifactError:  # told when it is read
        return dict(fields)
    return {**fields, **{name: made[name] for name in HISTORY if name in made}}


def read_removed(folder: Path, manifest: Manifest) -> Rows:
    """Give an index's removed rows, rising.

    Raises:
        ArtifactError: If their list cannot be read.
    """
    name = _find_list(manifest)
    return _NONE if name is None else np.asarray(read_array(folder / name))


def _find_list(manifest: Manifest) -> str | None:
    return next((name for name in manifest.files if name.startswith("removed-")), None)


def remove_rows(folder: Path, rows: Sequence[int]) -> Manifest:
    """Remove rows from a finished index: no search will give them. Its vectors stay as they are.

    The list is written under a name of its own and the manifest is replaced last, so that a killed
    job leaves the index as it was.

    Args:
        folder: The index.
        rows: Which rows; those removed before may be among them.

    Returns:
        The new manifest.

    Raises:
        ArtifactError: If the folder is no finished dense index, or in use by another job.
        ConfigError: If there is no such row, or none would be left.
        OSError: If the disk is full.
    """
    load_manifest(folder, stage=STAGE)  # before a lock is left where there is no index
    with lock_folder(folder):
        manifest = load_manifest(folder, stage=STAGE)
        num_rows = int(str(manifest.counts["rows"]))
        wrong = [row for row in rows if not 0 <= row < num_rows]
        if wrong:
            raise ConfigError(f"row {wrong[0]} is not in {folder}: it has rows 0 to {num_rows - 1}")
        before = read_removed(folder, manifest)
        removed = np.union1d(before, np.asarray(rows, dtype=np.int64))
        if len(removed) == num_rows:
            raise ConfigError(f"these are all {num_rows} rows of {folder}: one must stay")
        return manifest if len(removed) == len(before) else _write(folder, manifest, removed)


def _write(folder: Path, manifest: Manifest, removed: Rows) -> Manifest:
    made_of, old = digest(removed.tolist()), _find_list(manifest)
    path = folder / f"removed-{made_of[:12]}.npy"
    write_array(path, removed)
    kept = {name: record for name, record in manifest.files.items() if name != old}
    written = write_manifest(
        folder,
        stage=STAGE,
        fingerprint={**manifest.fingerprint, "removed": made_of},
        counts={**manifest.counts, "removed": len(removed)},
        seconds=manifest.seconds,
        files={**kept, path.name: record_file(path)},
    )
    if old is not None:
        (folder / old).unlink(missing_ok=True)
    return written


def search_kept(
    search: FaissSearch, queries: Vectors, k: int, *, removed: Rows, most: int
) -> Candidates:
    """Search an index that has removed rows, deeper until each query has its k others.

    Works with every kind of index and on every device, as a selector of FAISS does not.

    Args:
        search: Searches the index.
        queries: (B, D).
        k: Candidates a query; at most the rows that are left.
        removed: Rows to pass over, rising.
        most: Deepest search that is possible: the index's rows, or a GPU's limit.

    Returns:
        (B, k), best first, ties by row.

    Raises:
        ConfigError: If the deepest search is not deep enough, which only a GPU's may be.
    """
    if not len(removed):
        found_scores, found = search(queries, k)
        return Candidates.best(found, found_scores, k)
    rows = np.full((len(queries), k), MISSING_ROW, dtype=np.int64)
    scores = np.full((len(queries), k), -np.inf, dtype=np.float32)
    left = np.arange(len(queries))
    depth = min(most, k + math.ceil(1.5 * k * len(removed) / most))
    while len(left):
        found_scores, found = search(queries[left], depth)
        is_kept = ~np.isin(found, removed) & (found != MISSING_ROW)
        is_over = (found == MISSING_ROW).any(axis=1)  # an approximate index has no more to give
        is_done = (is_kept.sum(axis=1) >= k) | is_over
        best = Candidates.best(np.where(is_kept, found, MISSING_ROW), found_scores, k)
        rows[left[is_done]], scores[left[is_done]] = best.rows[is_done], best.scores[is_done]
        left = left[~is_done]
        if len(left) and depth == most:
            raise ConfigError(
                f"the {most} nearest passages of a query are nearly all removed, and a GPU finds "
                "no more: use --device cpu, or build the index without them"
            )
        depth = min(2 * depth, most)
    return Candidates(rows, scores)


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


# Candidates on disk: what a stage found for a split, made once.


@dataclass(frozen=True)
class Stored:
    """Candidates and where they lie.

    Attributes:
        candidates: (B, K).
        folder: Where they lie.
        fingerprint: What they were made from.
        reused: Whether they were there already.
    """

    candidates: Candidates
    folder: Path
    fingerprint: Mapping[str, Json]
    reused: bool


def examples_digest(examples: Sequence[Example]) -> str:
    """Give a digest of the texts of a split, in order."""
    return digest([dict(example.fields) for example in examples])


def candidates_fields(
    made_of: Mapping[str, Json], retriever: str, num_candidates: int, *, examples: Sequence[Example]
) -> Mapping[str, Json]:
    """Give all that determines the first stage's candidates of a split.

    Args:
        made_of: The retriever's fingerprint.
        retriever: Its name.
        num_candidates: The paper's k.
        examples: The split's queries.
    """
    return {
        **made_of,
        "retriever": retriever,
        "num_candidates": num_candidates,
        "queries": examples_digest(examples),
    }


def no_measure(found: Candidates) -> Mapping[str, Json]:  # noqa: ARG001
    """Count nothing more."""
    return {}


def store_candidates(
    root: Path,
    split: str,
    fingerprint: Mapping[str, Json],
    make: Callable[[], Candidates],
    *,
    stage: str,
    context: Context = ALONE,
    measure: Callable[[Candidates], Mapping[str, Json]] = no_measure,
) -> Stored:
    """Read a split's candidates, or make and write them.

    Args:
        root: Folder of the stage's products for a task.
        split: Name of the split.
        fingerprint: All that determines the candidates.
        make: Finds them; called in the main process only.
        stage: "candidates" or "evidence".
        context: Who waits.
        measure: Gives further counts for the manifest, where they are made.

    Raises:
        ArtifactError: If what is there is damaged.
    """

    def build(folder: Path) -> Mapping[str, Json]:
        found = make()
        write_array(folder / "rows.npy", found.rows)
        write_array(folder / "scores.npy", found.scores)
        return {"queries": len(found), "candidates": found.rows.shape[1], **measure(found)}

    folder = artifact_dir(root, split, fingerprint)
    built = build_once(folder, stage=stage, fingerprint=fingerprint, build=build, context=context)
    rows, scores = (np.asarray(read_array(folder / f"{name}.npy")) for name in ("rows", "scores"))
    return Stored(Candidates(rows, scores), folder, dict(fingerprint), built.reused)
