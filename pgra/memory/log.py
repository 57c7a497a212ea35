"""A memory that loses nothing: an append-only log of corrections in SQLite, in and out.

`event` is the log; nothing there is ever changed. `entry` says which events are in force: it is
what `replay` makes of the log, kept with each write in one transaction.
"""

import contextlib
import datetime
import json
import mmap
import os
import re
import sqlite3
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import xxhash

from pgra.artifacts import canonical_json, sync_folder, write_aside, write_lines
from pgra.data.read import Record, check_file, is_utf8, read_records
from pgra.errors import ArtifactError, DataError

# The SQLite file of a memory's log: its making, its opening, and its errors in words.
#
# Write-ahead log and `synchronous=FULL`: a write is on the disk when it returns, readers do not
# wait for writers, and writers wait for each other.


APPLICATION = 0x7067726D  # "pgrm"
FORMAT = 1
_WAIT_SECONDS = 30.0  # for another process that writes
# A page holds the longest record whole, so that what is left of a damaged file can be read.
_PAGE_BYTES = 65_536
_CHECKPOINT_PAGES = 64
_SCHEMA = """
CREATE TABLE event (id INTEGER PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE entry (event INTEGER PRIMARY KEY, slot BLOB NOT NULL UNIQUE);
"""


def connect(path: Path, *, is_writable: bool, may_make: bool) -> sqlite3.Connection:
    """Open a memory's database, or make it.

    Args:
        path: The file.
        is_writable: Whether it may be written.
        may_make: Whether one that is to be written is made where it is missing.

    Raises:
        ArtifactError: If it is missing, of another kind or format, damaged, or its
            folder cannot be written.
    """
    with explained(path):
        if is_writable and may_make and not path.exists():
            _create(path)
        if not path.is_file():
            raise ArtifactError(f"there is no memory {path}: pgra memory add makes one")
        connection = _open(path, is_writable=is_writable)
        _check_kind(path, connection)
        return connection


def _create(path: Path) -> None:
    """Make an empty memory aside and link it here, unless another process was first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{uuid.uuid4().hex[:8]}.partial{path.suffix}")
    try:
        with contextlib.closing(sqlite3.connect(aside, isolation_level=None)) as connection:
            connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            connection.execute(f"PRAGMA user_version = {FORMAT}")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.executescript(_SCHEMA)
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
        sync_folder(path.parent)
    finally:
        for name in (aside.name, f"{aside.name}-wal", f"{aside.name}-shm"):
            aside.with_name(name).unlink(missing_ok=True)


def _open(path: Path, *, is_writable: bool) -> sqlite3.Connection:
    if not is_writable:
        return _open_to_read(path)
    connection = _connect(path, "mode=rw")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
    return connection


def _open_to_read(path: Path) -> sqlite3.Connection:
    """Open for reading, also where nothing can be written and SQLite has no place for locks."""
    connection = _connect(path, "mode=ro")
    try:
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        wal = path.with_name(f"{path.name}-wal")
        if os.access(path.parent, os.W_OK) or (wal.is_file() and wal.stat().st_size):
            raise
        return _connect(path, "immutable=1")
    return connection


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?{mode}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_WAIT_SECONDS)


def _check_kind(path: Path, connection: sqlite3.Connection) -> None:
    (kind,) = connection.execute("PRAGMA application_id").fetchone()
    (made_as,) = connection.execute("PRAGMA user_version").fetchone()
    if kind != APPLICATION:
        raise ArtifactError(f"{path} is no memory of pgra: name another file")
    if made_as != FORMAT:
        raise ArtifactError(f"{path} has format {made_as}, this pgra reads {FORMAT}: update pgra")


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Word what SQLite refuses, with the way out.

    Raises:
        ArtifactError: For what a user can mend.
    """
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "") or ""
        told = next((told for start, told in _TOLD.items() if name.startswith(start)), None)
        if told is None:
            raise
        raise ArtifactError(f"{path} {told.format(error=error, path=path)}") from None


def damaged(path: Path, what: str) -> ArtifactError:
    """Word that a file is damaged, and the way out."""
    return ArtifactError(
        f"{path} is damaged ({what}): pgra memory salvage {path} --output NEW.sqlite reads what "
        "is left"
    )


_DAMAGED = "is damaged ({error}): pgra memory salvage {path} --output NEW.sqlite reads what is left"
_NOT_WRITABLE = "cannot be written ({error}): use a folder that you may write to"
_TOLD = {
    "SQLITE_READONLY": _NOT_WRITABLE,
    "SQLITE_CANTOPEN": "cannot be opened ({error}): it, and its folder, must be readable, and "
    "writable too unless all was written back; copy the folder to where you may write",
    "SQLITE_PERM": _NOT_WRITABLE,
    "SQLITE_FULL": "cannot grow: the disk is full; make room and do it again",
    "SQLITE_BUSY": "is being written by another process for half a minute: do it again later",
    "SQLITE_CORRUPT": _DAMAGED,
    "SQLITE_NOTADB": _DAMAGED,
    "SQLITE_IOERR": "cannot be read or written ({error}): look after the disk",
    "SQLITE_ERROR": _DAMAGED,  # a table is not there
}


# What a memory's log holds: who corrected what, when. One event, one record of text.
#
# A record is the checksum of its JSON, the JSON on one line, and a line break, so that a record can
# be found and checked in any bytes that hold it (`pgra.memory.log`).


KINDS = ("write", "correct", "forget")
MAX_KEY_CHARS = 10_000
MAX_FEEDBACK_CHARS = 2_000
MAX_NAME_CHARS = 200
"""Of a source and of a task. With these limits a record is shorter than a page of the database."""
_CHECKSUM_CHARS = 32
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # all but tab and line breaks
_LIMITS = {
    "key": MAX_KEY_CHARS,
    "feedback": MAX_FEEDBACK_CHARS,
    "source": MAX_NAME_CHARS,
    "task": MAX_NAME_CHARS,
    "time": MAX_NAME_CHARS,
}


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of the log. An event is of a slot: a task and a key.

    Attributes:
        kind: "write" puts a feedback in a slot, "correct" replaces the one there, "forget" empties
            the slot.
        key: The question that was misunderstood, as it was asked.
        feedback: What the user said of it; "" for a "forget".
        time: UTC, ISO 8601; "" where a file that was read does not tell.
        source: Who said it, or what: "user", "stream", a name.
        task: Which questions it is for; "" for all that share the memory.
        id: Its place in the log, from 1; 0 before it is in one.
    """

    kind: str
    key: str
    feedback: str
    time: str
    source: str = "user"
    task: str = ""
    id: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be kept or shown.

        Raises:
            DataError: If a text is empty, too long, or holds characters that are no text.
        """
        if self.kind not in KINDS:
            raise DataError(
                f"an event's kind is {self.kind!r}: it must be one of {', '.join(KINDS)}"
            )
        for name, most in _LIMITS.items():
            _check_text(name, getattr(self, name), most)
        if not self.key.strip():
            raise DataError("the key is empty: give the question that was misunderstood")
        if self.kind != "forget" and not self.feedback.strip():
            raise DataError("the feedback is empty: say what was meant, or use forget")


@dataclass(frozen=True)
class Entry:
    """A feedback that is in the memory now.

    Attributes:
        id: Of the event that put it there.
        key: The question that was misunderstood.
        feedback: What the user said of it.
        time: UTC, ISO 8601.
        source: Who said it.
        task: Which questions it is for.
    """

    id: int
    key: str
    feedback: str
    time: str
    source: str
    task: str


def _check_text(name: str, text: str, most: int) -> None:
    if len(text) > most:
        raise DataError(
            f"the {name} has {len(text):,} characters, and may have {most:,}: shorten it"
        )
    odd = _CONTROL.search(text)
    if odd is not None or not is_utf8(text):
        told = (
            "half of a surrogate pair" if odd is None else f"the control character {odd.group()!a}"
        )
        raise DataError(f"the {name} holds {told}: give plain text")


def now() -> str:
    """Give the time as events tell it: UTC, to the microsecond."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")


def pack(event: Event) -> bytes:
    """Give an event's record."""
    body = canonical_json(asdict(event)).encode()
    return _checksum(body) + body + b"\n"


def unpack(record: bytes) -> Event | None:
    """Read a record back; None if it is damaged."""
    body = record[_CHECKSUM_CHARS:].rstrip(b"\n")
    if _checksum(body) != record[:_CHECKSUM_CHARS]:
        return None
    return Event(**json.loads(body))


def _checksum(body: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(body).encode()


def entry_of(event: Event) -> Entry:
    """Give what a "write" or a "correct" puts into the memory."""
    return Entry(**{field.name: getattr(event, field.name) for field in fields(Entry)})


def replay(events: Iterable[Event]) -> list[Entry]:
    """Give what is in the memory after these events, the oldest first.

    Args:
        events: In the order of the log. The later event of a slot wins.
    """
    slots: dict[tuple[str, str], Entry] = {}
    for event in events:
        slots.pop((event.task, event.key), None)
        if event.kind != "forget":
            slots[event.task, event.key] = entry_of(event)
    return list(slots.values())


_FETCHED = 1024  # rows a read
_ASKED = 500  # ids in one SQL statement


class FeedbackLog:
    """The log and what is in the memory now.

    Several processes may have it open, and write.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection

    @classmethod
    def open(cls, path: Path, *, is_writable: bool = True, may_make: bool = True) -> Self:
        """Open a memory; one that is to be written is made where it is missing.

        Args:
            path: The file.
            is_writable: Whether it may be written.
            may_make: Whether it may be made.

        Raises:
            ArtifactError: As `pgra.memory.log.connect`.
        """
        return cls(path, connect(path, is_writable=is_writable, may_make=may_make))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        with explained(self.path):
            self._connection.close()

    def __len__(self) -> int:
        """Count the entries."""
        return self._number("SELECT count(*) FROM entry")

    @property
    def last_id(self) -> int:
        """The last event's id; 0 in an empty log."""
        return self._number("SELECT coalesce(max(id), 0) FROM event")

    def write(
        self, key: str, feedback: str, *, source: str = "user", task: str = "", time: str = ""
    ) -> Entry:
        """Put a feedback in the memory; one there for the same task and key gives way.

        Args:
            key: The question that was misunderstood.
            feedback: What the user says of it.
            source: Who.
            task: Which questions it is for.
            time: UTC, ISO 8601; "" for now.

        Returns:
            The entry, which is on the disk.

        Raises:
            DataError: If a text cannot be kept (see `Event`).
            ArtifactError: If the file cannot be written.
        """
        event = Event(
            kind="write",
            key=key,
            feedback=feedback,
            time=time or now(),
            source=source,
            task=task,
        )
        with self._transaction():
            return entry_of(self._insert(event))

    def correct(self, entry_id: int, feedback: str, *, source: str = "user") -> Entry:
        """Replace an entry's feedback.

        Raises:
            DataError: If there is no such entry any more, or as `write`.
            ArtifactError: If the file cannot be written.
        """
        with self._transaction():
            return entry_of(self._insert(self._change(entry_id, "correct", feedback, source)))

    def forget(self, *entry_ids: int, source: str = "user") -> None:
        """Take entries out of the memory, all or none; the log keeps what they were.

        Raises:
            DataError: If one is not there any more.
            ArtifactError: If the file cannot be written.
        """
        with self._transaction():
            for entry_id in entry_ids:
                self._insert(self._change(entry_id, "forget", "", source))

    def _change(self, entry_id: int, kind: str, feedback: str, source: str) -> Event:
        found = self.get([entry_id])
        if not found:
            raise DataError(
                f"{self.path} has no entry {entry_id} now: pgra memory list shows those there are"
            )
        entry = found[0]
        return Event(
            kind=kind,
            key=entry.key,
            feedback=feedback,
            time=now(),
            source=source,
            task=entry.task,
        )

    def extend(self, events: Iterable[Event]) -> int:
        """Append many events, all or none, in one transaction; their ids are given anew.

        Returns:
            How many.

        Raises:
            ArtifactError: If the file cannot be written.
        """
        count = 0
        with self._transaction():
            for event in events:
                self._insert(event)
                count += 1
        return count

    def events(self, *, after: int = 0) -> Iterator[Event]:
        """Give the log's events with larger ids than `after`, in order.

        Raises:
            ArtifactError: If one is damaged.
        """
        yield from self._read("SELECT id, record FROM event WHERE id > ? ORDER BY id", after)

    def entries(self, *, after: int = 0) -> Iterator[Entry]:
        """Give what is in the memory, the oldest first, from larger ids than `after`.

        Raises:
            ArtifactError: If one is damaged.
        """
        sql = (
            "SELECT id, record FROM entry JOIN event ON entry.event = event.id "
            "WHERE entry.event > ? ORDER BY entry.event"
        )
        yield from map(entry_of, self._read(sql, after))

    def get(self, ids: Sequence[int]) -> list[Entry]:
        """Give those of these entries that are still in the memory, in the order asked."""
        found: dict[int, Entry] = {}
        for start in range(0, len(ids), _ASKED):
            asked = ids[start : start + _ASKED]
            places = ",".join("?" * len(asked))
            sql = (
                "SELECT id, record FROM entry JOIN event ON entry.event = event.id "
                f"WHERE entry.event IN ({places})"
            )
            found |= {event.id: entry_of(event) for event in self._read(sql, *asked)}
        return [found[entry_id] for entry_id in ids if entry_id in found]

    def record_of(self, event_id: int) -> bytes:
        """Give an event's record as it is kept; b"" if there is no such event."""
        with explained(self.path):
            row = self._connection.execute(
                "SELECT record FROM event WHERE id = ?", (event_id,)
            ).fetchone()
        return bytes(row[0]) if row else b""

    def verify(self) -> None:
        """Read everything, and compare what is in force with the log.

        Raises:
            ArtifactError: If anything is damaged.
        """
        with explained(self.path):
            (told,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
        if told != "ok":
            raise damaged(self.path, told)
        if replay(self.events()) != list(self.entries()):
            raise damaged(self.path, "its entries are not what its log says")

    def _insert(self, event: Event) -> Event:
        told = replace(event, id=self.last_id + 1)
        run, slot = self._connection.execute, _slot(event)
        run("INSERT INTO event (id, record) VALUES (?, ?)", (told.id, pack(told)))
        run("DELETE FROM entry WHERE slot = ?", (slot,))
        if event.kind != "forget":
            run("INSERT INTO entry (event, slot) VALUES (?, ?)", (told.id, slot))
        return told

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Hold the file for one change: whole, or not at all."""
        with explained(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    def _number(self, sql: str) -> int:
        with explained(self.path):
            return int(self._connection.execute(sql).fetchone()[0])

    def _read(self, sql: str, *values: int) -> Iterator[Event]:
        with explained(self.path):
            cursor = self._connection.execute(sql, values)
            while rows := cursor.fetchmany(_FETCHED):
                for event_id, record in rows:
                    event = unpack(bytes(record))
                    if event is None or event.id != event_id:
                        raise damaged(self.path, f"event {event_id} is not what was written")
                    yield event


def _slot(event: Event) -> bytes:
    return xxhash.xxh3_128_digest(f"{event.task}\0{event.key}".encode())


# A memory's log as a jsonl file, there and back.


_FIELDS = {field.name for field in fields(Event)}
_DEFAULTS = {"kind": "write", "feedback": "", "time": ""}


def export_log(log: FeedbackLog, path: Path) -> int:
    """Write every event, one JSON object a line; replayed, they give the same memory.

    Returns:
        How many.
    """
    lines = [asdict(event) for event in log.events()]
    write_lines(path, lines)
    return len(lines)


def read_events(path: Path) -> list[Event]:
    """Read events from a file.

    Args:
        path: jsonl with `key` and `feedback`; `kind`, `time`, `source` and `task` as `Event` has
            them, where they are given.

    Raises:
        DataError: If a line is no event (file and line are named).
    """
    check_file(path, ("jsonl",))
    return [_event(path, record) for record in read_records(path)]


def import_events(log: FeedbackLog, events: Sequence[Event]) -> int:
    """Append events, all or none, in their order.

    An event that the log has already (all fields but its id) is passed over, so that a file may be
    imported twice. What comes later in the log wins, whatever its time says.

    Args:
        log: The memory.
        events: Of `read_events`.

    Returns:
        Events appended.
    """
    known = {_identity(event) for event in log.events()}
    return log.extend(event for event in events if _identity(event) not in known)


def _identity(event: Event) -> str:
    return canonical_json({**asdict(event), "id": 0})


def _event(path: Path, record: Record) -> Event:
    place = f"{path}, line {record.line}"
    values: dict[str, Any] = {**_DEFAULTS, **record.fields}
    unknown = sorted(set(values) - _FIELDS)
    if unknown or "key" not in values:
        what = f"'{unknown[0]}' is no field of an event" if unknown else "it has no key"
        raise DataError(f"{place}: {what}; fields are {', '.join(sorted(_FIELDS - {'id'}))}")
    values.pop("id", None)
    odd = next((name for name, value in values.items() if not isinstance(value, str)), None)
    if odd is not None:
        raise DataError(f"{place}: {odd} is {values[odd]!r}, and must be text")
    try:
        return Event(**values)
    except DataError as error:
        raise DataError(f"{place}: {error}") from None


# What is left of a damaged memory, read into a new one; and what is not.


_RECORD = re.compile(rb"[0-9a-f]{32}\{[^\n]{1,65536}\}\n")


@dataclass(frozen=True)
class Salvaged:
    """What was found in a damaged file.

    Attributes:
        kept: Events that were read whole.
        lost: Ids of those that were not, as far as the ids beside them tell: what was written after
            the last one found is not known of.
    """

    kept: int
    lost: list[int]


def salvage(damaged: Path, output: Path) -> Salvaged:
    """Read what is left of a damaged memory into a new one.

    The file's structure is not asked: whole records are looked for in all its bytes, and in those
    of the write-ahead log beside it; checksums tell what is whole. The damaged file stays as it is.

    Args:
        damaged: The file.
        output: The new memory, which must not be there.

    Raises:
        DataError: If there is no such file, or nothing in it can be read.
        ArtifactError: If the new one is there already, or cannot be written.
    """
    if not damaged.is_file():
        raise DataError(f"{damaged} does not exist: name the damaged memory")
    if output.exists():
        raise ArtifactError(f"{output} is there already: name a new file for what is salvaged")
    found: dict[int, Event] = {}
    for path in (damaged, damaged.with_name(f"{damaged.name}-wal")):
        if path.is_file() and path.stat().st_size:
            # What stands first wins: a write-ahead log may end in frames that never counted.
            found = _records_in(path) | found
    if not found:
        raise DataError(f"nothing can be read from {damaged}: no whole record is left in it")
    _write(output, [found[number] for number in sorted(found)])
    return Salvaged(len(found), [i for i in range(1, max(found)) if i not in found])


def _write(output: Path, events: list[Event]) -> None:
    with write_aside(output) as aside:
        try:
            with FeedbackLog.open(aside) as log:
                log.extend(events)
        finally:
            for ending in ("-wal", "-shm"):
                aside.with_name(aside.name + ending).unlink(missing_ok=True)


def _records_in(path: Path) -> dict[int, Event]:
    found: dict[int, Event] = {}
    handle = os.open(path, os.O_RDONLY)
    try:
        with mmap.mmap(handle, 0, access=mmap.ACCESS_READ) as data:
            for match in _RECORD.finditer(data):
                event = unpack(match.group())
                if event is not None:
                    found.setdefault(event.id, event)
    finally:
        os.close(handle)
    return found
