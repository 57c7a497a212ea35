"""A memory of corrections: an append-only log in SQLite.

`event` is the log; only `erase` deletes from it. `entry` lists the events in force, which are what
`replay` makes of the log. `vector` holds encoders' vectors of entries; missing ones are recomputed.

The file has a write-ahead log and `synchronous=FULL`: a write is on the disk when it returns,
readers do not wait for writers, and writers wait for each other. A record is the checksum of its
JSON, the JSON on one line, and a line break, so that `salvage` finds it in any bytes that hold it.

`erase` ends with VACUUM and an empty write-ahead log. Writing a new file and renaming it would not
do: other processes that have the memory open would still write to the old one.
"""

import contextlib
import datetime
import json
import logging
import mmap
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import xxhash

from pgra.artifacts import canonical_json, write_aside, write_lines
from pgra.config import from_values
from pgra.data.read import check_file, is_utf8, read_records
from pgra.database import DatabaseKind, open_database
from pgra.errors import ArtifactError, DataError, PgraError

MEMORY = DatabaseKind(
    name="memory",
    application_id=0x7067726D,  # "pgrm"
    schema="""
CREATE TABLE event (id INTEGER PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE entry (event INTEGER PRIMARY KEY, slot BLOB NOT NULL UNIQUE);
CREATE TABLE vector (event INTEGER, encoder TEXT, data BLOB NOT NULL, PRIMARY KEY (event, encoder));
""",
    version=2,
    # A page holds the longest record whole, so that what is left of a damaged file can be read.
    page_bytes=65_536,
    if_damaged="pgra memory salvage {path} --output NEW.sqlite reads what is left",
)
logger = logging.getLogger(__name__)

_CHECKPOINT_PAGES = 64
Kind = Literal["write", "correct", "forget", "erase"]
MAX_KEY_CHARS = 10_000
MAX_FEEDBACK_CHARS = 2_000
MAX_NAME_CHARS = 200  # of source, task and scope; with these limits a record fits into a page
_LIMITS = {
    "key": MAX_KEY_CHARS,
    "feedback": MAX_FEEDBACK_CHARS,
    **dict.fromkeys(("source", "task", "scope", "time"), MAX_NAME_CHARS),
}
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # all but tab and line breaks
_CHECKSUM_CHARS = 32
_VECTOR_CHECKSUM = 8  # bytes
Vector = npt.NDArray[np.float32]
_RECORD = re.compile(rb"[0-9a-f]{32}\{[^\n]{1,65536}\}\n")
_ROWS_A_READ = 1024
_ENTRIES = "SELECT event, record FROM entry LEFT JOIN event ON event.id = entry.event"


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of the log, in the slot of its task, scope and key; an entry is an event in force.

    Attributes:
        kind: "write" fills a slot, "correct" replaces its feedback, "forget" empties it; "erase"
            records that earlier events were deleted.
        key: The question that was misunderstood, as it was asked; "" for an "erase".
        feedback: What the user said of it; "" for a "forget" and an "erase".
        time: UTC, ISO 8601; "" if unknown.
        source: Who or what gave the feedback: "user", "stream", a name.
        scope: A user, a group or a project; "" for an entry that all share.
        id: Its number in the log, from 1; 0 outside one.

    Raises:
        DataError: If a text is empty, too long, not valid Unicode, or has control characters.
    """

    kind: Kind = "write"
    key: str = ""
    feedback: str = ""
    time: str = ""
    source: str = "user"
    task: str = ""
    scope: str = ""
    id: int = 0

    def __post_init__(self) -> None:
        for name, most in _LIMITS.items():
            text: str = getattr(self, name)
            if len(text) > most:
                raise DataError(
                    f"the {name} has {len(text):,} characters, and may have {most:,}: shorten it"
                )
            control = _CONTROL.search(text)
            if control is not None or not is_utf8(text):
                odd = f"the control character {control.group()!a}" if control else None
                raise DataError(
                    f"the {name} holds {odd or 'half a surrogate pair'}: give plain text"
                )
        if self.kind == "erase":
            return
        if not self.key.strip():
            raise DataError("the key is empty: give the question that was misunderstood")
        if self.kind != "forget" and not self.feedback.strip():
            raise DataError("the feedback is empty: say what was meant, or use forget")

    @property
    def slot(self) -> bytes:
        """A digest of task, scope and key."""
        names = [self.task, *([self.scope] if self.scope else []), self.key]
        return xxhash.xxh3_128_digest("\0".join(names).encode())

    def pack(self) -> bytes:
        body = canonical_json(asdict(self)).encode()
        return _checksum(body) + body + b"\n"


def unpack(record: bytes) -> Event | None:
    """Read a record; None if it is damaged."""
    body = record[_CHECKSUM_CHARS:].rstrip(b"\n")
    if _checksum(body) != record[:_CHECKSUM_CHARS]:
        return None
    return Event(**json.loads(body))


def _checksum(body: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(body).encode()


@dataclass(frozen=True)
class Part:
    """A task's entries of a scope and those that all share; of scope "" the latter alone."""

    task: str = ""
    scope: str = ""

    def holds(self, event: Event) -> bool:
        return event.task == self.task and event.scope in ("", self.scope)


SHARED = Part()  # entries of no task and no scope


def replay(events: Iterable[Event]) -> list[Event]:
    """Return the entries in force after these events (in the log's order), the oldest first."""
    slots: dict[bytes, Event] = {}
    for event in events:
        if event.kind == "erase":
            continue
        slots.pop(event.slot, None)
        if event.kind != "forget":
            slots[event.slot] = event
    return list(slots.values())


class FeedbackLog(contextlib.AbstractContextManager["FeedbackLog"]):
    """The log and its entries. Several processes may open and write one file.

    All methods raise an ArtifactError if the file is damaged or cannot be written.
    """

    def __init__(self, path: Path, db: sqlite3.Connection, *, is_writable: bool = True) -> None:
        self.path, self._db, self._is_writable = path, db, is_writable
        self._place = path.absolute()  # SQLite's, wherever the process goes
        self._inode = self._place.stat().st_ino

    @classmethod
    def open(cls, path: Path, *, is_writable: bool = True, may_make: bool = True) -> Self:
        """Open a memory; if `may_make`, a writable one is created where it is missing."""
        db = open_database(path, MEMORY, writable=is_writable, create=may_make)
        with contextlib.ExitStack() as stack:
            stack.callback(db.close)
            if is_writable:
                db.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
            log = cls(path, db, is_writable=is_writable)
            # SQLite reads on over much damage, and leaves out entries: 0.3 s for 100,000 of them.
            verdict = str(log._value("PRAGMA integrity_check(1)"))
            if verdict != "ok":
                why = " ".join(verdict.split()).removeprefix("*** in database main *** ")
                raise MEMORY.damaged(path, why)
            log.event(log.last_id)  # whose number is followed by the next one's
            stack.pop_all()
            return log

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with MEMORY.errors_of(self.path):
            self._db.close()

    def __len__(self) -> int:
        return int(self._value("SELECT count(*) FROM entry"))

    @property
    def last_id(self) -> int:
        """The last event's id; 0 in an empty log."""
        return int(self._value("SELECT max(id) FROM event") or 0)

    def write(
        self, key: str, feedback: str, *, source: str = "user", task: str = "", scope: str = ""
    ) -> Event:
        """Store a feedback on a question, the key; it replaces one of the same task, scope and key.

        Returns the entry, which is on the disk.

        Raises:
            DataError: If a text cannot be kept (see `Event`).
        """
        event = Event(
            key=key, feedback=feedback, time=_now(), source=source, task=task, scope=scope
        )
        with self._transaction():
            return self._insert(event)

    def correct(self, entry_id: int, feedback: str, *, source: str = "user") -> Event:
        """Replace an entry's feedback; a DataError if there is no such entry now, or as `write`."""
        with self._transaction():
            return self._change(entry_id, "correct", feedback, source)

    def forget(self, *entry_ids: int, source: str = "user") -> None:
        """Take entries out, all or none; the log keeps them. A DataError if one is not there."""
        with self._transaction():
            for entry_id in entry_ids:
                self._change(entry_id, "forget", "", source)

    def erase(self, *event_ids: int, source: str = "user") -> int:
        """Delete entries from the log too, all or none: no byte of their texts stays in a file.

        All events of an entry's slot are deleted, also of one that was corrected or forgotten
        since; returns how many. The log records when, and by which source.

        Raises:
            DataError: If one is not in the log.
            ArtifactError: If another process has the file open: bytes of the texts stay until it is
                closed.
        """
        with self._transaction():
            slots = set()
            for event_id in event_ids:
                event = self.event(event_id)
                if event is None or event.kind == "erase":
                    raise DataError(
                        f"{self.path}: entry {event_id} is not in the log: list --log shows what is"
                    )
                slots.add(event.slot)
            count = self._delete(lambda event: event.slot in slots, source)
        self._write_anew()
        return count

    def erase_scope(self, scope: str, *, source: str = "user") -> int:
        """Erase all events of a scope (see `erase`); a DataError if there are none."""
        with self._transaction():
            count = self._delete(lambda event: event.scope == scope, source)
            if not count:
                raise DataError(f"{self.path} has nothing of scope '{scope}'")
        self._write_anew()
        return count

    def _delete(self, is_meant: Callable[[Event], bool], source: str) -> int:
        """Delete events within a transaction, and log it; count them."""
        run = self._db.execute
        ids = [e.id for e in self.events() if e.kind != "erase" and is_meant(e)]
        self._insert(Event(kind="erase", time=_now(), source=source))  # no id is given twice
        run("PRAGMA secure_delete = ON")
        for event_id in ids:
            run("DELETE FROM event WHERE id = ?", (event_id,))
            self._take_out(event_id)
        return len(ids)

    def _write_anew(self) -> None:
        """Leave no byte of what was erased in the memory's files."""
        # A connection of its own, for VACUUM runs beside no reading of the same one.
        db = open_database(self.path, MEMORY, create=False)
        with MEMORY.errors_of(self.path), contextlib.closing(db):
            db.execute("PRAGMA temp_store = MEMORY")
            db.execute("VACUUM")
            (is_held, *_) = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if is_held:
            raise ArtifactError(
                f"{self.path}: erased, but another process reads it, and bytes of the texts stay "
                "in its files until that is closed"
            )

    def _change(self, entry_id: int, kind: Kind, feedback: str, source: str) -> Event:
        found = self.get([entry_id])
        if not found:
            raise DataError(
                f"{self.path} has no entry {entry_id} now: pgra memory list shows those there are"
            )
        changed = replace(found[0], kind=kind, feedback=feedback, source=source, time=_now())
        return self._insert(changed)

    def extend(self, events: Iterable[Event], *, skip_known: bool = False) -> int:
        """Append events in one transaction, all or none, with new ids; return how many.

        If `skip_known`, those that the log has already (all fields but the id) are left out.
        """
        with self._transaction():
            known = {replace(event, id=0) for event in self.events()} if skip_known else set()
            return len([self._insert(event) for event in events if event not in known])

    def events(self, *, after: int = 0) -> Iterator[Event]:
        """Read the log's events with ids above `after`, in order."""
        yield from self._read("SELECT id, record FROM event WHERE id > ? ORDER BY id", after)

    def entries(self) -> Iterator[Event]:
        """Read the entries, the oldest first."""
        yield from self._read(f"{_ENTRIES} WHERE event > ? ORDER BY event", 0)

    def get(self, ids: Sequence[int]) -> list[Event]:
        """Read the entries with these ids, in the order asked; those not in force are left out."""
        sql = f"{_ENTRIES} WHERE event IN (SELECT value FROM json_each(?))"
        found = {event.id: event for event in self._read(sql, json.dumps(list(ids)))}
        return [found[entry_id] for entry_id in ids if entry_id in found]

    def event(self, event_id: int) -> Event | None:
        """Read one event; None if there is none."""
        return next(self._read("SELECT id, record FROM event WHERE id = ?", event_id), None)

    def vectors(self, encoder: str, ids: Sequence[int]) -> dict[int, Vector]:
        """Read stored vectors by entry; missing and damaged ones are left out.

        `encoder` is a digest of all that they depend on, besides the texts.
        """
        sql = (
            "SELECT event, data FROM vector "
            "WHERE encoder = ? AND event IN (SELECT value FROM json_each(?))"
        )
        with MEMORY.errors_of(self.path):
            rows = self._db.execute(sql, (encoder, json.dumps(list(ids)))).fetchall()
        found = {event_id: _unpack_vector(encoder, event_id, data) for event_id, data in rows}
        whole = {event_id: vector for event_id, vector in found.items() if vector is not None}
        if num_damaged := len(found) - len(whole):
            logger.warning("%s: %d damaged vectors are made again", self.path, num_damaged)
        return whole

    def keep_vectors(self, encoder: str, vectors: Mapping[int, Vector]) -> None:
        """Store vectors of entries that are still in force; does nothing in a read-only memory."""
        if not self._is_writable:
            return
        sql = "INSERT OR REPLACE INTO vector SELECT event, ?, ? FROM entry WHERE event = ?"
        rows = [
            (encoder, _pack_vector(encoder, event_id, vector), event_id)
            for event_id, vector in vectors.items()
        ]
        with self._transaction():
            self._db.executemany(sql, rows)

    def verify(self) -> None:
        """Read everything, and compare the entries with the log."""
        if replay(self.events()) != list(self.entries()):
            raise MEMORY.damaged(self.path, "its entries are not what its log says")

    def _insert(self, event: Event) -> Event:
        event = replace(event, id=self.last_id + 1)
        run = self._db.execute
        run("INSERT INTO event (id, record) VALUES (?, ?)", (event.id, event.pack()))
        if event.kind != "erase":
            self._take_out(self._value("SELECT event FROM entry WHERE slot = ?", event.slot))
        if event.kind in ("write", "correct"):
            run("INSERT INTO entry (event, slot) VALUES (?, ?)", (event.id, event.slot))
        return event

    def _take_out(self, event_id: int | None) -> None:
        for table in ("entry", "vector"):
            self._db.execute(f"DELETE FROM {table} WHERE event = ?", (event_id,))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Make one change, whole or not at all; refuse a file that was moved or replaced."""
        if not self._place.exists() or self._place.stat().st_ino != self._inode:
            raise ArtifactError(
                f"{self.path} was moved, removed or replaced while it is open: nothing is written; "
                "put it back with the -wal beside it, or open it again"
            )
        with MEMORY.errors_of(self.path), self._db:  # which commits, or rolls back
            self._db.execute("BEGIN IMMEDIATE")
            yield

    def _value(self, sql: str, *values: int | bytes) -> Any:
        with MEMORY.errors_of(self.path):
            row = self._db.execute(sql, values).fetchone()
        return row[0] if row else None

    def _read(self, sql: str, value: int | str) -> Iterator[Event]:
        with MEMORY.errors_of(self.path):
            cursor = self._db.execute(sql, (value,))
            while rows := cursor.fetchmany(_ROWS_A_READ):
                for event_id, record in rows:
                    event = unpack(record) if isinstance(record, bytes) else None
                    if event is None or event.id != event_id:
                        raise MEMORY.damaged(self.path, f"event {event_id} is not what was written")
                    yield event


def _pack_vector(encoder: str, event_id: int, vector: Vector) -> bytes:
    """Return a vector's bytes after a checksum of them, the encoder and the id."""
    body = vector.astype(np.float32).tobytes()
    return xxhash.xxh3_64_digest(f"{encoder} {event_id} ".encode() + body) + body


def _unpack_vector(encoder: str, event_id: int, data: object) -> Vector | None:
    if not isinstance(data, bytes) or len(data) % 4:
        return None
    vector = np.frombuffer(data[_VECTOR_CHECKSUM:], np.float32)
    return vector if _pack_vector(encoder, event_id, vector) == data else None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")


# A memory's log as a jsonl file, there and back.


def export_log(log: FeedbackLog, path: Path, *, scope: str | None = None) -> int:
    """Write events, one JSON object a line, and return how many; `replay` gives the same memory.

    `scope` limits them to one scope ("": those that all share); None writes every event.

    Raises:
        DataError: If the file is the memory's own.
    """
    own = [Path(f"{log.path.resolve()}{end}") for end in ("", "-wal", "-shm")]
    if path.resolve() in own or (path.exists() and path.samefile(own[0])):
        raise DataError(f"{path} is the memory itself: name another file")
    lines = [asdict(event) for event in log.events() if scope in (None, event.scope)]
    write_lines(path, lines)
    return len(lines)


def read_events(path: Path) -> list[Event]:
    """Read events from jsonl with `key` and `feedback`, and optionally other fields of `Event`.

    Raises:
        DataError: If a line is no event (names file and line).
    """
    check_file(path, ("jsonl",))
    events = []
    for record in read_records(path):
        values = {k: v for k, v in record.fields.items() if k != "id" and v != ""}
        if type(values.get("feedback")) is int:  # a label of digits
            values["feedback"] = str(values["feedback"])
        try:
            event = from_values(Event, values, id=0)
            events.append(replace(event, source=str(record.fields.get("source", event.source))))
        except PgraError as error:
            raise DataError(f"{path}, line {record.line}: {error}") from None
    return events


def import_events(log: FeedbackLog, events: Sequence[Event], *, scope: str | None = None) -> int:
    """Append events of `read_events` in their order, all or none; return how many were appended.

    Skips events that the log already has (all fields but the id), so that a file may be imported
    twice, and erasures, which belong to another log. Later lines win, whatever their `time`. All
    get the `scope`; None leaves each in its own.
    """
    if scope is not None:
        events = [replace(event, scope=scope) for event in events]
    return log.extend((e for e in events if e.kind != "erase"), skip_known=True)


# What is left of a damaged memory, read into a new one; and what is not.


def salvage(damaged: Path, output: Path) -> tuple[int, list[int]]:
    """Read what is left of a damaged memory into a new one; the damaged file stays as it is.

    Ignores the file's structure: finds records with valid checksums anywhere in its bytes and in
    those of its write-ahead log.

    Returns:
        How many events were found, and the ids missing between them: lost, or erased before. Events
        lost after the last one found are not counted.

    Raises:
        DataError: If nothing can be read.
        ArtifactError: If the new one exists already, or cannot be written.
    """
    if output.exists():
        raise ArtifactError(f"{output} is there already: name a new file for what is salvaged")
    found: dict[int, Event] = {}
    # What stands first wins: a write-ahead log may end in frames that never counted.
    for path in (damaged, damaged.with_name(f"{damaged.name}-wal")):
        if not path.is_file() or not path.stat().st_size:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for match in _RECORD.finditer(data):
                event = unpack(match.group())
                if event is not None:
                    found.setdefault(event.id, event)
    if not found:
        raise DataError(f"nothing can be read from {damaged}: no whole record is left in it")
    with write_aside(output) as aside, FeedbackLog.open(aside) as log:
        log.extend(found[number] for number in sorted(found))
    return len(found), [number for number in range(1, max(found)) if number not in found]
