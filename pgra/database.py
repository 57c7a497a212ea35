"""SQLite files of ours: marked as such, with a write-ahead log where the disk allows one.

`synchronous=FULL`: a write is on the disk when it returns. SQLite detects no flipped bit, so each
owner keeps checksums.
"""

import contextlib
import functools
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pgra.errors import ArtifactError

IN_MEMORY = Path(":memory:")  # SQLite's name of a database that is no file
_SERIALIZED = 3  # of `sqlite3.threadsafety`
# "Error" alone is that of a table that is not there.
_DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR")


@dataclass(frozen=True, kw_only=True)
class DatabaseKind:
    """A kind of SQLite file.

    Attributes:
        name: As messages call it, such as "memory".
        application_id: Marks our file among other SQLite files.
        schema: Statements that make the tables, separated by semicolons.
        version: Of the tables; another one is refused.
        timeout: Seconds to wait for another process that writes.
        if_damaged: What to do with a damaged file; {path} stands for it.
    """

    name: str
    application_id: int
    schema: str
    version: int = 1
    page_bytes: int = 4096
    timeout: float = 30.0
    if_damaged: str = "move it away"

    def damaged(self, path: Path, why: object) -> ArtifactError:
        return ArtifactError(f"{path} is damaged ({why}): {self.if_damaged.format(path=path)}")

    @contextlib.contextmanager
    def errors_of(self, path: Path) -> Iterator[None]:
        """Turn SQLite's errors in the block into an `ArtifactError`."""
        try:
            yield
        except UnicodeDecodeError as error:  # in a message of SQLite's, such as a table's name
            raise self.damaged(path, error) from None
        except (sqlite3.Error, OSError) as error:
            name = getattr(error, "sqlite_errorname", "")
            if isinstance(error, sqlite3.Error) and not name:
                raise  # a mistake of ours, such as the use of a closed connection
            if name.startswith(_DAMAGED):
                raise self.damaged(path, error) from None
            raise ArtifactError(
                f"{path} cannot be used ({error}): its folder must be writable, its disk needs "
                "room and file locks, and no other process may hold it for long"
            ) from None


def open_database(
    path: Path, kind: DatabaseKind, *, writable: bool = True, create: bool = True
) -> sqlite3.Connection:
    """Open a SQLite file of ours in autocommit mode: the caller begins and ends transactions.

    With `writable` and `create`, a missing file is made, with its folder. One that is not
    `writable` may lie in a read-only folder. `IN_MEMORY` is always made.

    Raises:
        ArtifactError: If it is missing, foreign, damaged, locked for too long or not writable.
    """
    is_file = path != IN_MEMORY
    if is_file and not (writable and create) and not path.is_file():
        raise ArtifactError(f"there is no {kind.name} {path}: name another file")
    wal = path.with_name(f"{path.name}-wal")
    is_fixed = not os.access(path.parent, os.W_OK) and not wal.exists()
    reads = "immutable=1" if is_fixed else "mode=ro"
    mode = ("mode=rwc" if create else "mode=rw") if writable else reads
    with kind.errors_of(path), contextlib.ExitStack() as stack:
        if writable and create:
            path.parent.mkdir(parents=True, exist_ok=True)
        db = sqlite3.connect(
            f"{path.absolute().as_uri()}?{mode}" if is_file else str(path),
            uri=True,
            isolation_level=None,
            timeout=kind.timeout,
            # SQLite takes calls of several threads in turn; who shares one keeps changes apart.
            check_same_thread=sqlite3.threadsafety < _SERIALIZED,
        )
        stack.callback(db.close)
        # What is no UTF-8 any more must be readable: checksums find the damage.
        db.text_factory = functools.partial(str, encoding="utf-8", errors="replace")
        if not is_file or (writable and create and not path.stat().st_size):
            _make_tables(db, kind)
        _check_kind(path, kind, db)
        if writable:
            with contextlib.suppress(sqlite3.OperationalError):  # held now: the next who opens it
                db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
        stack.pop_all()
        return db


def _make_tables(db: sqlite3.Connection, kind: DatabaseKind) -> None:
    """Make the tables in one transaction, unless another process was first."""
    db.execute(f"PRAGMA page_size = {kind.page_bytes}")
    with db:  # which commits, or rolls back
        db.execute("BEGIN EXCLUSIVE")
        if not db.execute("SELECT 1 FROM sqlite_schema").fetchone():
            for statement in kind.schema.split(";"):
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {kind.application_id}")
            db.execute(f"PRAGMA user_version = {kind.version}")


def _check_kind(path: Path, kind: DatabaseKind, db: sqlite3.Connection) -> None:
    (application_id,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if application_id != kind.application_id:
        raise ArtifactError(f"{path} is no {kind.name} of pgra: name another file")
    if version != kind.version:
        raise ArtifactError(
            f"{path} has format {version}, this pgra reads {kind.version}: use the pgra that made "
            "it, or name another file"
        )
    # SQLite reads a table with a flipped letter in its statement as an empty one.
    tables = {sql for (sql,) in db.execute("SELECT sql FROM sqlite_schema")}
    if missing := {sql.strip() for sql in kind.schema.split(";")} - {"", *tables}:
        raise kind.damaged(path, f"it lacks {missing.pop()}")
