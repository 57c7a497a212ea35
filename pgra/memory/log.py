"""The file of a memory of corrections: an append-only log in SQLite.

`event` is the log; only `erase` deletes from it. `entry` lists the events in force, which are what
`replay` makes of the log. `vector` holds encoders' vectors of entries; missing ones are recomputed.

The file has a write-ahead log and `synchronous=FULL`: a write is on the disk when it returns,
readers do not wait for writers, and writers wait for each other. A record is the checksum of its
JSON, the JSON on one line, and a line break, so that `read_events` finds it in any bytes
that hold it.

`erase` ends with VACUUM and an empty write-ahead log. Writing a new file and renaming it would not
do: other processes that have the memory open would still write to the old one.
"""

import contextlib
import datetime
import json
import logging
import mmap
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from pgra.arrays import Vectors
from pgra.artifacts import (
    IN_MEMORY,
    DatabaseKind,
    canonical_json,
    may_only_be_read,
    open_database,
)
from pgra.config import from_values
from pgra.data.read import check_file, read_table
from pgra.errors import ArtifactError, DataError, PgraError, cut, one_line
from pgra.memory.families import plain
from pgra.types import is_utf8

MEMORY = DatabaseKind(
    name="memory",
    application_id=0x7067726D,  # "pgrm"
    schema="""
CREATE TABLE event (id INTEGER PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE entry (event INTEGER PRIMARY KEY, slot BLOB NOT NULL UNIQUE);
CREATE TABLE vector (event INTEGER, encoder TEXT, data BLOB NOT NULL, PRIMARY KEY (event, encoder));
""",
    version=5,
    # A page holds the longest record whole, so that what is left of a damaged file can be read.
    page_bytes=65_536,
    mode=0o600,  # it holds what users said
    if_damaged="pgra memory import {path} --memory NEW.sqlite reads what is left",
)

logger = logging.getLogger(__name__)

_CHECKPOINT_PAGES = 64
Kind = Literal["add", "update", "delete", "erase"]
# Most characters of an entry's texts; with these a record fits into a page.
_LIMITS = {"question": 10_000, "feedback": 2_000, "source": 200, "user": 200, "time": 200}
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # all but tab and line breaks
_CHECKSUM_CHARS = 32
_VECTOR_CHECKSUM = 8  # bytes
_RECORD = re.compile(rb"[0-9a-f]{32}\{[^\n]{1,65536}\}\n")
_ENTRIES = "SELECT event, record FROM entry LEFT JOIN event ON event.id = entry.event"


@dataclass(frozen=True, kw_only=True)
class MemoryEntry:
    """What a user said of a question: one event of the log, in the slot of user and question.

    An entry is an event in force: the last one of its slot, unless that is a "delete".

    Attributes:
        question: What was misunderstood, as it was asked; "" for an "erase".
        feedback: What was meant; "" for a "delete" and an "erase".
        kind: "add" fills a slot, "update" replaces its feedback, "delete" empties it; "erase"
            records that earlier events were erased.
        time: UTC, ISO 8601; "" if unknown.
        source: Who or what gave the feedback: "user", "stream", a name.
        user: A user, a group or a project; "" for an entry that all share.
        id: Its number in the log, from 1; 0 outside one. An update has a new one.

    Raises:
        DataError: If a text is empty, too long, not valid Unicode, or has control characters.
    """

    question: str = ""
    feedback: str = ""
    kind: Kind = "add"
    time: str = ""
    source: str = "user"
    user: str = ""
    id: int = 0

    def __post_init__(self) -> None:
        for name in _LIMITS:
            text: str = getattr(self, name)
            check_length(name, text)
            if _CONTROL.search(text) or not is_utf8(text):
                raise DataError(f"the {name} has a control character: give plain text")
        if self.kind != "erase" and not self.question.strip():
            raise DataError("the question is empty")
        if self.kind in ("add", "update") and not self.feedback.strip():
            raise DataError("the feedback is empty: say what was meant, or use delete")

    @property
    def slot(self) -> bytes:
        """A digest of user and question, in whatever case, spaces and outer marks it was asked."""
        return xxhash.xxh3_128_digest(f"{self.user}\0{plain(self.question)}".encode())

    def pack(self) -> bytes:
        body = canonical_json(asdict(self)).encode()
        return _checksum(body) + body + b"\n"


def check_length(name: str, text: str) -> None:
    """Raise a DataError if an entry's text, or what is looked up in them, is too long."""
    most = _LIMITS[name]
    if len(text) > most:
        raise DataError(f"the {name} has {len(text):,} characters, at most {most:,} fit")


def unpack(record: bytes) -> MemoryEntry | None:
    """Read a record; None if it is damaged."""
    body = record[_CHECKSUM_CHARS:].rstrip(b"\n")
    if _checksum(body) != record[:_CHECKSUM_CHARS]:
        return None
    return MemoryEntry(**json.loads(body))


def _checksum(body: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(body).encode()


def replay(events: Iterable[MemoryEntry]) -> list[MemoryEntry]:
    """Return the entries in force after these events (in the log's order), the oldest first."""
    slots: dict[bytes, MemoryEntry] = {}
    for event in events:
        if event.kind == "erase":
            continue
        slots.pop(event.slot, None)
        if event.kind != "delete":
            slots[event.slot] = event
    return list(slots.values())


class FeedbackLog:
    """The log and its entries in a file. Several processes may open and write one file.

    All methods raise an ArtifactError if the file is damaged or cannot be written.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        """Open a memory's file; a missing one is made, or an error without `create`.

        `IN_MEMORY` is not a file.
        """
        self.path = path
        self._file = path.absolute()  # SQLite's, wherever the process goes
        self._db = open_database(path, MEMORY, create=create)
        with contextlib.ExitStack() as stack:
            stack.callback(self._db.close)
            self._inode = self._find_inode()
            self._db.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
            # SQLite reads on over much damage, and leaves out entries: 0.3 s for 100,000 of them.
            verdict = str(self._value("PRAGMA integrity_check(1)"))
            if verdict != "ok":
                raise MEMORY.damaged(path, one_line(verdict))
            # The last one's number is followed by the next one's.
            next(self.events(after=self.last_id - 1), None)
            stack.pop_all()

    def close(self) -> None:
        with MEMORY.errors_of(self.path):
            self._db.close()

    @property
    def last_id(self) -> int:
        """The number of the last event; 0 in an empty log."""
        return int(self._value("SELECT max(id) FROM event") or 0)

    def append(self, entries: Iterable[MemoryEntry]) -> list[MemoryEntry]:
        """Append in one transaction, all or none; return them with their ids."""
        with self.transaction():
            return [self.insert(entry) for entry in entries]

    def insert(self, event: MemoryEntry) -> MemoryEntry:
        """Append within a transaction; an entry replaces the one in its slot."""
        event = replace(event, id=self.last_id + 1)
        execute = self._db.execute
        execute("INSERT INTO event (id, record) VALUES (?, ?)", (event.id, event.pack()))
        if event.kind != "erase":
            self._take_out(self._value("SELECT event FROM entry WHERE slot = ?", event.slot))
        if event.kind in ("add", "update"):
            execute("INSERT INTO entry (event, slot) VALUES (?, ?)", (event.id, event.slot))
        return event

    def erase(self, ids: Sequence[int], source: str) -> None:
        """Delete events within a transaction, and log that; `write_anew` must follow it."""
        self.insert(MemoryEntry(kind="erase", time=now(), source=source))  # no id is used twice
        self._db.execute("PRAGMA secure_delete = ON")
        for event_id in ids:
            self._db.execute("DELETE FROM event WHERE id = ?", (event_id,))
            self._take_out(event_id)

    def write_anew(self) -> None:
        """Leave no byte of what was erased in the memory's files.

        Raises:
            ArtifactError: If another process has the file open: bytes stay until it is closed.
        """
        if self.path == IN_MEMORY:
            return
        # A connection of its own, for VACUUM runs beside no reading of the same one.
        db = open_database(self.path, MEMORY, create=False)
        with MEMORY.errors_of(self.path), contextlib.closing(db):
            db.execute("PRAGMA temp_store = MEMORY")
            db.execute("VACUUM")
            is_open_elsewhere, *_ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if is_open_elsewhere:
            raise ArtifactError(f"{self.path}: erased, but bytes of it stay until others close it")

    def events(self, *, after: int = 0) -> Iterator[MemoryEntry]:
        """Read the log's events with ids above `after`, in order."""
        yield from self._read("SELECT id, record FROM event WHERE id > ? ORDER BY id", after)

    def entries(self) -> Iterator[MemoryEntry]:
        """Read the entries, the oldest first."""
        yield from self._read(f"{_ENTRIES} WHERE event > ? ORDER BY event", 0)

    def entry_ids(self) -> list[int]:
        """Return the ids of the entries, the oldest first."""
        with MEMORY.errors_of(self.path):
            return [row[0] for row in self._db.execute("SELECT event FROM entry ORDER BY event")]

    def get(self, ids: Sequence[int]) -> list[MemoryEntry]:
        """Read the entries with these ids, in the order asked; those not in force are left out."""
        sql = f"{_ENTRIES} WHERE event IN (SELECT value FROM json_each(?))"
        entries = {entry.id: entry for entry in self._read(sql, json.dumps(list(ids)))}
        return [entries[entry_id] for entry_id in ids if entry_id in entries]

    def vectors(self, encoder: str, ids: Sequence[int]) -> dict[int, Vectors]:
        """Read stored vectors by entry; missing and damaged ones are left out.

        `encoder` is a digest of all that they depend on, besides the texts.
        """
        sql = (
            "SELECT event, data FROM vector "
            "WHERE encoder = ? AND event IN (SELECT value FROM json_each(?))"
        )
        with MEMORY.errors_of(self.path):
            rows = self._db.execute(sql, (encoder, json.dumps(list(ids)))).fetchall()
        return {
            event_id: np.frombuffer(data[_VECTOR_CHECKSUM:], np.float32)
            for event_id, data in rows
            if isinstance(data, bytes) and data == _seal(encoder, event_id, data[_VECTOR_CHECKSUM:])
        }

    def keep_vectors(self, encoder: str, vectors: Mapping[int, Vectors]) -> None:
        """Store vectors of entries that are still in force, where the file may be written."""
        if may_only_be_read(self._file.resolve()):
            return
        sql = "INSERT OR REPLACE INTO vector SELECT event, ?, ? FROM entry WHERE event = ?"
        rows = [
            (encoder, _seal(encoder, event_id, vector.astype(np.float32).tobytes()), event_id)
            for event_id, vector in vectors.items()
        ]
        with self.transaction():
            self._db.executemany(sql, rows)

    def verify(self) -> None:
        """Read everything, and compare the entries with the log."""
        if replay(self.events()) != list(self.entries()):
            raise MEMORY.damaged(self.path, "its entries are not what its log says")

    def _take_out(self, event_id: int | None) -> None:
        for table in ("entry", "vector"):
            self._db.execute(f"DELETE FROM {table} WHERE event = ?", (event_id,))

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Make one change, whole or not at all; refuse a file that was moved or replaced."""
        if self._find_inode() != self._inode:
            raise ArtifactError(f"{self.path} was moved or replaced meanwhile: open it again")
        with MEMORY.errors_of(self.path), self._db:  # which commits, or rolls back
            self._db.execute("BEGIN IMMEDIATE")
            yield

    def _find_inode(self) -> int | None:
        return self._file.stat().st_ino if self._file.exists() else None

    def _value(self, sql: str, *values: int | bytes) -> Any:
        with MEMORY.errors_of(self.path):
            row = self._db.execute(sql, values).fetchone()
        return row[0] if row else None

    def _read(self, sql: str, value: int | str) -> Iterator[MemoryEntry]:
        with MEMORY.errors_of(self.path):
            for event_id, record in self._db.execute(sql, (value,)):
                event = unpack(record) if isinstance(record, bytes) else None
                if event is None or event.id != event_id:
                    raise MEMORY.damaged(self.path, f"event {event_id} is not what was written")
                yield event


def _seal(encoder: str, event_id: int, body: bytes) -> bytes:
    """Return a vector's bytes after a checksum of them, the encoder and the id."""
    return xxhash.xxh3_64_digest(f"{encoder} {event_id} ".encode() + body) + body


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")


def read_events(path: Path) -> list[MemoryEntry]:
    """Read events from jsonl or from a memory's file, be it damaged.

    A line of jsonl has `question`, `feedback`, and optionally other fields of `MemoryEntry`. Of a
    memory the structure is ignored: events are the records with valid checksums, anywhere in its
    bytes and in those of its write-ahead log. Ids missing between them are reported: those events
    were lost, or erased before.

    Raises:
        DataError: If a line is not an event (names file and line), or no whole record is left.
    """
    if check_file(path, ("jsonl", "sqlite")) == "sqlite":
        return _find_records(path)
    events = []
    for record in read_table(path, ("jsonl",)):
        values = {k: v for k, v in record.fields.items() if k != "id" and v != ""}
        try:
            events.append(from_values(MemoryEntry, values, id=0))
        except PgraError as error:
            raise DataError(f"{record.where}: {error}") from None
    return events


def _find_records(memory: Path) -> list[MemoryEntry]:
    events: dict[int, MemoryEntry] = {}
    # What stands first wins: a write-ahead log may end in frames that never counted.
    for path in (memory, memory.with_name(f"{memory.name}-wal")):
        if not path.is_file() or not path.stat().st_size:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for match in _RECORD.finditer(data):
                if (event := unpack(match.group())) is not None:
                    events.setdefault(event.id, event)
    if not events:
        raise DataError(f"nothing can be read from {memory}: no whole record is left in it")
    if lost := sorted({*range(1, max(events))} - {*events}):
        numbers = cut(", ".join(map(str, lost)))
        logger.warning("%s: %d events are lost, or were erased: %s", memory, len(lost), numbers)
    return [events[number] for number in sorted(events)]
