"""A memory that loses nothing: an append-only log of corrections in SQLite, and its state.

`event` is the log; nothing there is ever changed. `entry` says which events are in force: it is
what `replay` makes of the log, kept with each write in one transaction.
"""

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash

from pgra.errors import DataError
from pgra.memory.database import connect, damaged, explained
from pgra.memory.events import Entry, Event, entry_of, now, pack, replay, unpack

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
            ArtifactError: As `pgra.memory.database.connect`.
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
