"""Vectors of a memory's keys, memory-mapped and indexed. They follow the log.

    FOLDER/vectors.f16       a float16 vector for each event that made an entry, appended
    FOLDER/ids.i64           the ids of these events
    FOLDER/checksums.u64     of each id with its vector, compared when the vector is first read
    FOLDER/index-ROWS.faiss  an index of the first ROWS of them, once there are many
    FOLDER/state.json        rows, how far the log is followed; written last

An erased entry's vector is zeros, and an index that had it is removed.

What is behind `rows` in a file is of a job that was killed, and is written over. A folder that is
not what its state and its checksums say, or whose state is not of this log, is made again from the
log.
"""

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import xxhash

from pgra.artifacts import SEAL, file_checksum, is_sealed, write_sealed
from pgra.core import Json, Rows
from pgra.memory.log import FeedbackLog
from pgra.memory.lookup import in_form
from pgra.retrieval.faiss import Vectors, ask, empty_index, import_faiss, map_faiss, write_faiss

if TYPE_CHECKING:
    from pgra.encoders.encoder import Encoder

logger = logging.getLogger(__name__)

_STATE, _VECTORS, _IDS = "state.json", "vectors.f16", "ids.i64"
_CHECKSUMS = "checksums.u64"
_CHUNK = 8192  # keys encoded and written at once; a stop loses no more
INDEX_ROWS = 50_000
"""Vectors behind the index that are compared one by one, before the index is made anew."""
_RESCORED = 64  # hits of the index, at least, that are compared exactly
_SHARE_OF_LISTS = 16  # one list in so many is looked into
_MOST_LISTS = 4096
_POINTS_A_LIST = 64  # that train it
_TURNS = 10  # of k-means
_BLOCK = 65_536  # rows read at once


@dataclass(frozen=True)
class _State:
    """How far the files go.

    Attributes:
        fingerprint: What the vectors depend on, besides the texts.
        width: D.
        rows: Vectors.
        through: Events up to this id are followed.
        record: The checksum of that event's record as the log had it: another log has another.
        indexed: Rows in the index file; 0 for none.
        index_bytes: Its size.
        index_checksum: Of the index file.
    """

    fingerprint: dict[str, Json]
    width: int
    rows: int = 0
    through: int = 0
    record: str = ""
    indexed: int = 0
    index_bytes: int = 0
    index_checksum: str = ""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a folder's state.

        Raises:
            OSError: If there is none.
            ValueError: If it is not what was written.
            TypeError: If it is of another layout.
        """
        values = json.loads((folder / _STATE).read_text("utf-8"))
        if not isinstance(values, dict) or not is_sealed(values):
            raise ValueError("it is not what was written")
        del values[SEAL]
        return cls(**values)

    def write(self, folder: Path) -> None:
        """Write it in place of the one before."""
        write_sealed(folder / _STATE, asdict(self))

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes that each file has at least."""
        sizes = {_VECTORS: 2 * self.width * self.rows}
        sizes |= dict.fromkeys((_IDS, _CHECKSUMS), 8 * self.rows)
        return sizes | ({self.index_name: self.index_bytes} if self.indexed else {})

    @property
    def index_name(self) -> str:
        """The index file."""
        return f"index-{self.indexed}.faiss"


class _DamagedError(Exception):
    """A vector, its id or the index is not what was written."""


class KeyVectors:
    """The vectors of a log's keys, or of its feedback, and the search among them.

    Attributes:
        folder: Where they are.
        fingerprint: What they depend on, besides the texts.
    """

    def __init__(
        self, folder: Path, encoder: "Encoder", form: str = "whole", *, index_rows: int = INDEX_ROWS
    ) -> None:
        """Open a folder; nothing is read before `follow`.

        Args:
            folder: Of this log, this encoder and this form alone.
            encoder: Makes vectors of unit length.
            form: What is read: "slotless" (keys without what stands in <...>), "whole" keys, or
                "feedback".
            index_rows: Vectors compared one by one before an index is made.
        """
        self.folder = folder
        self.fingerprint = {**encoder.query_fingerprint, "key_form": form}
        self._encoder, self._form, self._index_rows = encoder, form, index_rows
        self._field = "feedback" if form == "feedback" else "key"
        self._fresh = self._state = _State(self.fingerprint, encoder.width)
        self._index: Any = None
        self._log: FeedbackLog | None = None
        self._ids: Rows = np.empty(0, np.int64)
        self._checksums = np.empty(0, np.uint64)
        self._inode, self._is_checked = 0, np.empty(0, np.bool_)
        self._vectors: npt.NDArray[np.float16] = np.empty((0, encoder.width), np.float16)
        self._tail: Vectors = np.empty((0, encoder.width), np.float32)

    def __len__(self) -> int:
        """Count the vectors, those of keys that were corrected or forgotten since included."""
        return self._state.rows

    def follow(self, log: FeedbackLog) -> int:
        """Encode what was written since, in the log's order, and map the files.

        Returns:
            Keys encoded now.
        """
        last, checksum = log.last_id, log.checksum_of(log.last_id)
        if (self._state.through, self._state.record) == (last, checksum) and len(self._ids):
            return 0
        return self._follow(log)

    def _follow(self, log: FeedbackLog, *, is_suspect: bool = False) -> int:
        """Follow the log; if anything read on the way is damaged, or was before, from its start."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._log = log
        with _alone(self.folder):
            try:
                state = self._read_state(log)
                before = state.rows
                state = self._catch_up(log, state)
                self._map(state)
                if is_suspect:
                    self._check(np.arange(state.rows))
            except _DamagedError as error:
                logger.warning("%s is damaged (%s): made again from its log", self.folder, error)
                before, state = 0, self._catch_up(log, self._fresh)
                self._index = None
                self._map(state)
        return state.rows - before

    def _catch_up(self, log: FeedbackLog, state: _State) -> _State:
        """Append what the log has behind a state."""
        last = log.last_id
        new = log.entries(after=state.through)
        while chunk := list(islice(new, _CHUNK)):
            vectors = self._encode([getattr(entry, self._field) for entry in chunk])
            halves, ids = vectors.astype(np.float16), np.array([e.id for e in chunk], np.int64)
            columns: dict[str, npt.NDArray[Any]] = {
                _VECTORS: halves,
                _IDS: ids,
                _CHECKSUMS: _checksums_of(ids, halves),
            }
            for name, array in columns.items():
                _append(self.folder / name, state.sizes[name], array)
            state = replace(state, rows=state.rows + len(chunk))
            state = self._save(log, state, through=chunk[-1].id)
        if last > state.through:  # events behind the last entry, which made none
            state = self._save(log, state, through=last)
        if state.rows - state.indexed > self._index_rows:
            state = self._build_index(state)
        return state

    def search(self, question: str, k: int) -> dict[int, float]:
        """Find the k keys whose vectors have the largest cosine with a question's.

        The newest vectors are compared one by one, the others through the index, whose best are
        compared again. With more than a quarter of all asked for, every vector is compared.

        Args:
            question: As it was asked.
            k: How many; fewer come back where there are fewer.

        Returns:
            Cosines by the events' ids, the nearest first, of equals the newest.
        """
        try:
            return self._search(question, k)
        except _DamagedError:
            assert self._log is not None
            self._follow(self._log, is_suspect=True)
            return self._search(question, k)

    def _search(self, question: str, k: int) -> dict[int, float]:
        query = self._encode([question], is_query=True)  # (1, D)
        indexed = self._state.indexed
        rows, scores = np.arange(indexed, self._state.rows), self._tail @ query[0]
        if indexed:
            first = np.arange(indexed)
            if 4 * k <= indexed:
                hits = ask(self._index, query, max(4 * k, _RESCORED)).rows[0]
                first = np.sort(hits[hits >= 0])
            self._check(first)
            blocks = [first[start : start + _BLOCK] for start in range(0, len(first), _BLOCK)]
            exact = [self._vectors[block].astype(np.float32) @ query[0] for block in blocks]
            rows, scores = np.concatenate([first, rows]), np.concatenate([*exact, scores])
        # All that tie with the k-th stay, so that the newest of them can win.
        bar = np.partition(scores, -k)[-k] if k < len(scores) else -np.inf
        ids, scores = self._ids[rows[scores >= bar]], scores[scores >= bar]
        best = np.lexsort((-ids, -scores))[:k]
        return dict(zip(ids[best].tolist(), scores[best].tolist(), strict=True))

    def _encode(self, texts: Sequence[str], *, is_query: bool = False) -> Vectors:
        texts = [in_form(text, self._form) for text in texts]
        return self._encoder.encode(texts, is_query=is_query)

    def _read_state(self, log: FeedbackLog) -> _State:
        path = self.folder / _STATE
        if not path.exists():
            return self._fresh
        try:
            state = _State.read(self.folder)
            sizes = state.sizes.items()
            is_whole = all((self.folder / name).stat().st_size >= size for name, size in sizes)
            is_same = log.checksum_of(state.through) == state.record
            if is_whole and is_same and state.fingerprint == self.fingerprint:
                return state
        except (OSError, ValueError, TypeError):
            pass  # it is not JSON, or not of this layout, or a file is missing
        logger.warning("%s is not what its log says: made again from it", self.folder)
        return self._fresh

    def _save(self, log: FeedbackLog, state: _State, *, through: int) -> _State:
        state = replace(state, through=through, record=log.checksum_of(through))
        state.write(self.folder)
        return state

    def _build_index(self, state: _State) -> _State:
        """Index all vectors: sqrt(n) lists, trained on every so manieth, a byte a dimension."""
        self._map(state)
        self._check(np.arange(state.rows))
        logger.info("memory: indexing the vectors of %s keys", f"{state.rows:,}")
        lists = min(_MOST_LISTS, 1 << round(np.log2(state.rows) / 2))
        index = empty_index(f"IVF{lists},SQ8", state.width, state.rows)
        clustering = import_faiss().extract_index_ivf(index).cp
        clustering.niter, clustering.max_points_per_centroid = _TURNS, _POINTS_A_LIST
        every = max(1, state.rows // (lists * _POINTS_A_LIST))
        index.train(self._vectors[::every].astype(np.float32))
        for start in range(0, state.rows, _BLOCK):
            index.add(self._vectors[start : start + _BLOCK].astype(np.float32))
        grown = replace(state, indexed=state.rows)
        path = self.folder / grown.index_name
        write_faiss(index, path)
        self._index = None
        grown = replace(grown, index_bytes=path.stat().st_size, index_checksum=file_checksum(path))
        grown.write(self.folder)
        if state.indexed:  # who has the old one mapped keeps it
            (self.folder / state.index_name).unlink(missing_ok=True)
        return grown

    def _map(self, state: _State) -> None:
        if state.indexed and (self._index is None or state.indexed != self._state.indexed):
            path = self.folder / state.index_name
            if file_checksum(path) != state.index_checksum:
                raise _DamagedError(f"{path.name} is not what was written")
            self._index = map_faiss(path)
            ivf = import_faiss().extract_index_ivf(self._index)
            ivf.nprobe = max(1, ivf.nlist // _SHARE_OF_LISTS)
        if state.rows:
            shape = (state.rows, state.width)
            self._vectors = np.memmap(self.folder / _VECTORS, np.float16, "r", shape=shape)
            self._ids = np.memmap(self.folder / _IDS, np.int64, "r", shape=(state.rows,))
            path = self.folder / _CHECKSUMS
            self._checksums = np.memmap(path, np.uint64, "r", shape=(state.rows,))
            was, inode = self._is_checked, path.stat().st_ino
            self._is_checked = np.zeros(state.rows, np.bool_)
            if inode == self._inode:  # else all was made again meanwhile
                self._is_checked[: len(was)] = was[: state.rows]
            self._inode = inode
        self._check(np.arange(state.indexed, state.rows))
        self._tail = np.asarray(self._vectors[state.indexed : state.rows], np.float32)
        self._state = state

    def _check(self, rows: Rows) -> None:
        """Compare ids and vectors with their checksums, each once in a process.

        Raises:
            _DamagedError: If one is not what was written.
        """
        new = rows[~self._is_checked[rows]]
        for start in range(0, len(new), _BLOCK):
            block = new[start : start + _BLOCK]
            found = _checksums_of(self._ids[block], self._vectors[block])
            wrong = np.flatnonzero(found != self._checksums[block])
            if len(wrong):
                raise _DamagedError(f"vector {block[wrong[0]]} is not what was written")
            self._is_checked[block] = True


def _checksums_of(
    ids: Rows, vectors: npt.NDArray[np.float16]
) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return a checksum of each id with its vector, (n,) uint64."""
    halves = np.ascontiguousarray(vectors).view(np.uint8)
    both = np.concatenate([np.ascontiguousarray(ids).view(np.uint8).reshape(-1, 8), halves], axis=1)
    return np.array([xxhash.xxh3_64_intdigest(row) for row in both], np.uint64)


def vectors_of(log_path: Path) -> Path:
    """Return where a log's vectors are: a folder for each encoder."""
    return log_path.with_name(f"{log_path.name}.vectors")


def erase_vectors(log: FeedbackLog) -> None:
    """Leave nothing of what was erased in the vectors beside a log, of any encoder."""
    erased = log.erased_ids()
    for folder in vectors_of(log.path).glob("*/"):
        with _alone(folder):
            try:
                _erase_rows(folder, erased, log)
            except (OSError, ValueError, TypeError):  # torn: all is made again from the log
                for path in folder.glob("[!.]*"):  # but the lock
                    path.unlink()


def _erase_rows(folder: Path, erased: Sequence[int], log: FeedbackLog) -> None:
    state = _State.read(folder)
    ids = np.fromfile(folder / _IDS, np.int64, state.rows)
    is_erased, size = np.isin(ids, erased), 2 * state.width
    rows = np.flatnonzero(is_erased)
    if state.rows:  # a damaged id could hide a vector
        shape = (state.rows, state.width)
        vectors = np.memmap(folder / _VECTORS, np.float16, "r", shape=shape)
        known = np.fromfile(folder / _CHECKSUMS, np.uint64, state.rows)
        for start in range(0, state.rows, _BLOCK):
            block = slice(start, start + _BLOCK)
            is_other = _checksums_of(ids[block], vectors[block]) != known[block]
            is_half_done = is_erased[block] & ~vectors[block].any(axis=1)  # by one that was killed
            if (is_other & ~is_half_done).any():
                raise ValueError("a vector is not what was written")
    zeros = np.zeros((1, state.width), np.float16)
    gone = _checksums_of(ids[rows], zeros.repeat(len(rows), axis=0)).tobytes()
    _overwrite(folder / _VECTORS, rows, bytes(size * len(rows)), size, size * state.rows)
    _overwrite(folder / _CHECKSUMS, rows, gone, 8, 8 * state.rows)
    if len(rows):
        for path in folder.glob("index-*.faiss"):
            path.unlink()
        state = replace(state, indexed=0, index_bytes=0, index_checksum="")
    if state.through in erased:  # whose record is another now
        state = replace(state, record=log.checksum_of(state.through))
    state.write(folder)


def _overwrite(path: Path, rows: Rows, data: bytes, width: int, size: int) -> None:
    """Put `width` bytes in the place of each of these rows, in a file of `size` bytes."""
    with path.open("r+b") as file:
        for number, row in enumerate(rows.tolist()):
            file.seek(width * row)
            file.write(data[width * number : width * (number + 1)])
        file.truncate(size)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a folder until no other process writes in it."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _append(path: Path, start: int, array: npt.NDArray[Any]) -> None:
    """Write an array at a byte, and what was behind it is gone; it is on the disk on return."""
    if not start:  # who has the old one mapped keeps it
        path.unlink(missing_ok=True)
    with path.open("r+b" if start else "wb") as file:
        file.truncate(start)
        file.seek(start)
        file.write(array.tobytes())
        file.flush()
        os.fsync(file.fileno())
