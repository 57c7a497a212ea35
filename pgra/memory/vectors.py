"""Vectors of a memory's keys, memory-mapped and indexed. They follow the log.

    FOLDER/vectors.f16       a float16 vector for each event that made an entry, appended
    FOLDER/ids.i64           the ids of these events
    FOLDER/index-ROWS.faiss  an index of the first ROWS of them, once there are many
    FOLDER/state.json        rows, how far the log is followed; written last

What is behind `rows` in a file is of a job that was killed, and is written over. A folder that is
not what its state says, or whose state is not of this log, is made again from the log.
"""

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pgra.artifacts import write_json
from pgra.core import Json, Rows
from pgra.memory.log import Event, FeedbackLog
from pgra.retrieval.base import import_faiss
from pgra.retrieval.faiss import Vectors, ask, empty_index, map_faiss, write_faiss

# The FAISS index of a memory's many vectors: lists, a byte a dimension, memory-mapped.


_SHARE_OF_LISTS = 16  # one list in so many is looked into
_MOST_LISTS = 4096
_POINTS_A_LIST = 64  # that train it
_TURNS = 10  # of k-means
_BLOCK = 65_536  # rows read at once


def train_index(vectors: npt.NDArray[np.float16]) -> Any:
    """Make an index of vectors (n, D): about sqrt(n) lists, trained on a fixed sample."""
    rows, width = vectors.shape
    lists = min(_MOST_LISTS, 1 << round(np.log2(rows) / 2))
    index = empty_index(f"IVF{lists},SQ8", width, rows)
    clustering = import_faiss().extract_index_ivf(index).cp
    clustering.niter, clustering.max_points_per_centroid = _TURNS, _POINTS_A_LIST
    clustering.min_points_per_centroid = 1  # small ones are for tests: no warning
    draw = np.random.default_rng(0)
    sample = draw.choice(rows, min(rows, lists * _POINTS_A_LIST), replace=False)
    index.train(vectors[np.sort(sample)].astype(np.float32))
    for start in range(0, rows, _BLOCK):
        index.add(vectors[start : start + _BLOCK].astype(np.float32))
    return index


def map_index(path: Path) -> Any:
    """Open an index on disk, to look into one list in sixteen."""
    index = map_faiss(path)
    ivf = import_faiss().extract_index_ivf(index)
    ivf.nprobe = max(1, ivf.nlist // _SHARE_OF_LISTS)
    return index


logger = logging.getLogger(__name__)

_STATE, _VECTORS, _IDS = "state.json", "vectors.f16", "ids.i64"
_CHUNK = 8192  # keys encoded and written at once; a stop loses no more
INDEX_ROWS = 50_000
"""Vectors behind the index that are compared one by one, before the index is made anew."""
_RESCORED = 64  # hits of the index, at least, that are compared exactly


class TextEncoder(Protocol):
    """What turns keys and questions into vectors of unit length.

    Attributes:
        width: D.
    """

    width: int

    @property
    def query_fingerprint(self) -> Mapping[str, Json]:
        """Give all that the vectors depend on, besides the text."""
        ...

    def encode(self, texts: Sequence[str], *, is_query: bool = False) -> Vectors:
        """Give the vectors (n, D) float32."""
        ...


@dataclass(frozen=True)
class Near:
    """Keys near a question, the nearest first, of equals the newest.

    Attributes:
        ids: Of the events, (k,).
        scores: Cosines, (k,).
    """

    ids: list[int]
    scores: list[float]


@dataclass(frozen=True)
class _State:
    """How far the files go.

    Attributes:
        fingerprint: Of the encoder.
        width: D.
        rows: Vectors.
        through: Events up to this id are followed.
        record: That event's record as the log had it: another log has another.
        indexed: Rows in the index file; 0 for none.
        index_bytes: Its size.
    """

    fingerprint: dict[str, Json]
    width: int
    rows: int = 0
    through: int = 0
    record: str = ""
    indexed: int = 0
    index_bytes: int = 0


class KeyVectors:
    """The vectors of a log's keys, or of its feedback, and the search among them.

    Attributes:
        folder: Where they are.
        num_encoded: Keys that were encoded by this object.
    """

    def __init__(
        self,
        folder: Path,
        encoder: TextEncoder,
        *,
        index_rows: int = INDEX_ROWS,
        of_feedback: bool = False,
    ) -> None:
        """Open a folder; nothing is read before `follow`.

        Args:
            folder: Of this log, this encoder and this field alone.
            encoder: Makes the vectors; its fingerprint tells keys from feedback.
            index_rows: Vectors compared one by one before an index is made.
            of_feedback: Whether the vectors are those of the feedback.
        """
        self._of_feedback = of_feedback
        self.folder = folder
        self.num_encoded = 0
        self._encoder = encoder
        self._index_rows = index_rows
        self._state = self._fresh()
        self._index: Any = None
        self._ids: Rows = np.empty(0, np.int64)
        self._vectors: npt.NDArray[np.float16] = np.empty((0, encoder.width), np.float16)
        self._tail: Vectors = np.empty((0, encoder.width), np.float32)

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give what the vectors depend on, besides the keys."""
        return self._encoder.query_fingerprint

    def __len__(self) -> int:
        """Count the vectors, those of keys that were corrected or forgotten since included."""
        return self._state.rows

    def follow(self, log: FeedbackLog) -> int:
        """Encode what was written since, in the log's order, and map the files.

        Returns:
            Keys encoded now.
        """
        last = log.last_id
        if self._state.through == last and self._is_of(log, self._state) and len(self._ids):
            return 0
        self.folder.mkdir(parents=True, exist_ok=True)
        with _held(self.folder / ".lock"):
            state = self._read_state(log)
            before = self.num_encoded
            state = self._append_new(log, state, last)
            if state.rows - state.indexed > self._index_rows:
                state = self._build_index(state)
        self._map(state)
        return self.num_encoded - before

    def search(self, question: str, k: int) -> Near:
        """Give the k keys whose vectors have the largest cosine with a question's.

        The newest vectors are compared one by one, the others through the index, whose best are
        compared again. With more than a quarter of all asked for, every vector is compared.

        Args:
            question: As it was asked.
            k: How many; fewer come back where there are fewer.
        """
        query = self._encoder.encode([question], is_query=True)  # (1, D)
        rows, scores = self._search_tail(query[0], k)
        indexed = self._state.indexed
        if indexed:
            is_deep = 4 * k > indexed
            first = np.arange(indexed) if is_deep else self._ask_index(query, k)
            rows = np.concatenate([first, rows])
            scores = np.concatenate([self._score(first, query[0]), scores])
        ids = self._ids[rows]
        best = np.lexsort((-ids, -scores))[:k]
        return Near(ids[best].tolist(), scores[best].tolist())

    def _search_tail(self, query: Vectors, k: int) -> tuple[Rows, Vectors]:
        scores = self._tail @ query
        # All that tie with the k-th stay, so that the newest of them can win.
        bar = np.partition(scores, -k)[-k] if k < len(scores) else -np.inf
        rows = np.flatnonzero(scores >= bar)
        return rows + self._state.indexed, scores[rows]

    def _ask_index(self, query: Vectors, k: int) -> Rows:
        found = ask(self._index, query, max(4 * k, _RESCORED)).rows[0]
        return np.sort(found[found >= 0])

    def _score(self, rows: Rows, query: Vectors) -> Vectors:
        blocks = [rows[start : start + _BLOCK] for start in range(0, len(rows), _BLOCK)]
        scores = [self._vectors[block].astype(np.float32) @ query for block in blocks]
        return np.concatenate([np.empty(0, np.float32), *scores])

    def _fresh(self) -> _State:
        return _State(dict(self._encoder.query_fingerprint), self._encoder.width)

    def _read_state(self, log: FeedbackLog) -> _State:
        path = self.folder / _STATE
        fresh = self._fresh()
        if not path.exists():
            return fresh
        try:
            state = _State(**json.loads(path.read_text()))
            if self._is_whole(state) and self._is_of(log, state):
                return state
        except (ValueError, TypeError):
            pass  # it is not JSON, or not of this layout
        logger.warning("%s is not what its log says: made again from it", self.folder)
        return fresh

    def _is_whole(self, state: _State) -> bool:
        names = {_VECTORS: 2 * state.width * state.rows, _IDS: 8 * state.rows}
        if state.indexed:
            names[_index_name(state.indexed)] = state.index_bytes
        sizes = {name: self.folder / name for name in names}
        return (
            state.fingerprint == self._fresh().fingerprint
            and state.width == self._encoder.width
            and all(p.is_file() and p.stat().st_size >= names[n] for n, p in sizes.items())
        )

    def _is_of(self, log: FeedbackLog, state: _State) -> bool:
        return log.record_of(state.through)[:32].decode() == state.record

    def _append_new(self, log: FeedbackLog, state: _State, last: int) -> _State:
        new = log.entries(after=state.through)
        while chunk := list(islice(new, _CHUNK)):
            vectors = self._encoder.encode([self._text(entry) for entry in chunk])
            self._write(state.rows, chunk, vectors)
            through = chunk[-1].id
            state = self._record(log, state, rows=state.rows + len(chunk), through=through)
            self.num_encoded += len(chunk)
        # Behind the last entry there may be events that made none.
        return self._record(log, state, rows=state.rows, through=max(last, state.through))

    def _text(self, entry: Event) -> str:
        return entry.feedback if self._of_feedback else entry.key

    def _write(self, rows: int, chunk: Sequence[Event], vectors: Vectors) -> None:
        ids = np.array([entry.id for entry in chunk], np.int64)
        _append(self.folder / _VECTORS, 2 * self._encoder.width * rows, vectors.astype(np.float16))
        _append(self.folder / _IDS, 8 * rows, ids)

    def _record(self, log: FeedbackLog, state: _State, *, rows: int, through: int) -> _State:
        if (rows, through) == (state.rows, state.through):
            return state
        record = log.record_of(through)[:32].decode()
        told = {**asdict(state), "rows": rows, "through": through, "record": record}
        return self._save(_State(**told))

    def _save(self, state: _State) -> _State:
        write_json(self.folder / _STATE, asdict(state))
        return state

    def _build_index(self, state: _State) -> _State:
        self._map(state)
        logger.info("memory: indexing the vectors of %s keys", f"{state.rows:,}")
        index = train_index(self._vectors)
        path = self.folder / _index_name(state.rows)
        write_faiss(index, path)
        self._index = None
        told = {"indexed": state.rows, "index_bytes": path.stat().st_size}
        grown = self._save(_State(**{**asdict(state), **told}))
        if state.indexed:  # who has the old one mapped keeps it
            (self.folder / _index_name(state.indexed)).unlink(missing_ok=True)
        return grown

    def _map(self, state: _State) -> None:
        if state.indexed and (self._index is None or state.indexed != self._state.indexed):
            self._index = map_index(self.folder / _index_name(state.indexed))
        if state.rows:
            shape = (state.rows, state.width)
            self._vectors = np.memmap(self.folder / _VECTORS, np.float16, "r", shape=shape)
            self._ids = np.memmap(self.folder / _IDS, np.int64, "r", shape=(state.rows,))
        self._tail = np.asarray(self._vectors[state.indexed : state.rows], np.float32)
        self._state = state


def _index_name(rows: int) -> str:
    return f"index-{rows}.faiss"


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


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """Wait until no other process writes here."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
