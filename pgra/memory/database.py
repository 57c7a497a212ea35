"""The SQLite file of a memory's log: its making, its opening, and its errors in words.

Write-ahead log and `synchronous=FULL`: a write is on the disk when it returns, readers do not wait
for writers, and writers wait for each other.
"""

import contextlib
import os
import sqlite3
import uuid
from collections.abc import Iterator
from pathlib import Path

from pgra.errors import ArtifactError
from pgra.io import sync_folder

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
