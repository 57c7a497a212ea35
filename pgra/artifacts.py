"""The store: what is computed once lies in a folder that is named after what it was made from.

`KIND-<12 digits>` is a digest of the store's format, the kind and the fields that decide the
content. One job builds, under a lock, in `.NAME.partial`; `manifest.json` is written last, with the
size and checksum of each file; then the folder gets its name. A folder with a manifest is finished.
A damaged one is moved to `NAME.damaged` and made again; an `OSError` never counts as damage.
"""

import contextlib
import datetime
import errno
import functools
import hashlib
import io
import json
import logging
import os
import platform
import re
import shutil
import sqlite3
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import xxhash

from pgra.arrays import Array
from pgra.context import ALONE, Context
from pgra.errors import ArtifactError, BusyError, DamageError, cut, name_file, reading
from pgra.types import Fields, Json

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
CHECKSUMS_FILE = "checksums.json"
FORMAT = 4
_SEAL = "digest"
# The names of records, of shards too, that no other record has a checksum of.
RECORDS = re.compile(r"(checksums|grid|manifest|metrics|pgra|run|vectors-\d+|[0-9a-f]{16})\.json")
_COMPARED = 1 << 30  # bytes of an artifact that each opening compares; `pgra verify` compares all
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_PACKAGES = ("pgra", "torch", "transformers", "accelerate", "faiss-cpu", "bm25s", "numpy")

IN_MEMORY = Path(":memory:")  # SQLite's name of a database that is no file
# "Error" alone is that of a table that is not there.
_DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR")
_SECONDS_LOCKED = 30.0  # to wait for another process that writes

FileRecords = Mapping[str, Mapping[str, Any]]  # relative path: {"bytes": int, "xxh3": str}


@dataclass(frozen=True)
class Manifest:
    """What a finished artifact records of itself.

    Attributes:
        stage: What made it, such as "index".
        fingerprint: The fields that decide the content.
        counts: Sizes worth knowing, such as {"rows": 10000}.
        versions: Of packages; for people, not compared.
        created: UTC, ISO 8601.
        seconds: Wall-clock time it took.
    """

    stage: str
    fingerprint: Fields
    counts: Mapping[str, Any]
    files: FileRecords
    versions: Mapping[str, str]
    created: str
    seconds: float
    format: int = FORMAT


def canonical_json(value: Json) -> str:
    """Write a value so that equal values give equal text: sorted keys, no spaces, no NaN."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def digest(fields: Json) -> str:
    """Return the sha256, in hex, of a fingerprint's fields (or of any JSON value)."""
    return hashlib.sha256(canonical_json(fields).encode()).hexdigest()


def artifact_dir(root: Path, kind: str, fields: Fields) -> Path:
    """Return the folder of an artifact: `root/KIND-` and 12 digits of format, kind and fields."""
    kind = "".join(c if c.isalnum() or c in "-._" else "-" for c in kind).strip("-")
    return root / f"{kind}-{digest({'format': FORMAT, 'kind': kind, 'fields': fields})[:12]}"


def file_checksum(path: Path) -> str:
    """Return a file's xxh3-128, which detects damage, not tampering."""
    with reading(path, DamageError), path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


@dataclass(frozen=True)
class Inputs:
    """Files that something is made from: path, bytes, mtime in ns and inode of each."""

    stamps: tuple[tuple[str, int, int, int], ...] = ()

    @classmethod
    def of(cls, paths: Iterable[Path]) -> Self:
        """Note how files are now, before their content is read."""
        stamps = []
        for path in paths:
            stat = path.stat()
            stamps.append((str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino))
        return cls(tuple(stamps))

    def check(self) -> None:
        """Raise an ArtifactError that names a file that has changed since."""
        for stamp in self.stamps:
            path = Path(stamp[0])
            if not path.exists() or self.of([path]).stamps != (stamp,):
                raise ArtifactError(
                    f"{path} changed while it was in use, so nothing of it is kept: run it again"
                )


NO_INPUTS = Inputs()


# Paths and temporary folders.


def user_cache() -> Path:
    """Return the folder of artifacts where the user names none."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else at_home("~/.cache")) / "pgra"


def at_home(path: str | Path) -> Path:
    """Expand a leading ~; the path of an unknown user stays as it is."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 (Path's own raises where there is no such user)


def without_home(path: str) -> str:
    """Return a path with ~ for the home folder; anything else, such as a hub id, as it is."""
    with contextlib.suppress(RuntimeError, ValueError):  # a user without a home; not below it
        return f"~/{Path(path).relative_to(Path.home().resolve())}"
    return path


def without_folders(value: Any) -> Any:
    """Drop the folders of absolute paths, wherever they are in a record; a hub id stays."""
    if isinstance(value, Mapping):
        return {name: without_folders(item) for name, item in value.items()}
    if isinstance(value, list):
        return list(map(without_folders, value))
    is_path = isinstance(value, str) and value.startswith(("/", "~"))
    return Path(value).name if is_path else value


class TemporaryFolder:
    """A temporary folder at `path`, deleted with this object or at exit."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="pgra-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


# Files and folders, written aside and renamed.


@contextlib.contextmanager
def write_aside(path: Path) -> Iterator[Path]:
    """Yield a hidden path beside `path`; the file or folder made there then takes its place.

    On an error it is removed; what a killed process left goes when the folder is locked again.
    An ArtifactError if `path` is a link, a device or the like.
    """
    if path.is_symlink() or (path.exists() and not (path.is_file() or path.is_dir())):
        raise ArtifactError(f"{path} is not a plain file: name one, or a new one")
    path.parent.mkdir(parents=True, exist_ok=True)
    # numpy and others append a suffix they miss, so the real one stays at the end.
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial{path.suffix}")
    try:
        yield aside
        if aside.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        aside.replace(path)
    except OSError as error:
        name_file(error, path)
        raise
    finally:
        with contextlib.suppress(OSError):  # on a read-only disk it would hide the cause
            _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with write_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Json) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    write_text(path, f"{text}\n")


def write_sealed(path: Path, values: Mapping[str, Any]) -> None:
    """Write a record, and with it the digest of its fields, which `read_sealed` compares."""
    write_json(path, {**values, _SEAL: _seal(values)})


def read_sealed(path: Path) -> dict[str, Any]:
    """Read a record of `write_sealed`; a DamageError if it is not what was written."""
    with reading(path, DamageError):
        values = dict(json.loads(path.read_text(encoding="utf-8")))
    if values.pop(_SEAL, None) != _seal(values):
        raise DamageError(f"{path} is damaged (other content than was written)")
    return values


def _seal(values: Mapping[str, Any]) -> str:
    # As they are written: numbers as keys become text, and their order is that of the file.
    return xxhash.xxh3_128_hexdigest(json.dumps(values).encode())


def write_lines(path: Path, values: Sequence[Json]) -> None:
    """Write one JSON value a line."""
    lines = [json.dumps(value, ensure_ascii=False, allow_nan=False) for value in values]
    write_text(path, "".join(f"{line}\n" for line in lines))


def write_array(path: Path, array: Array) -> None:
    # numpy writes to a real file past Python, and a full disk then goes unseen.
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    with write_aside(path) as aside:
        aside.write_bytes(buffer.getbuffer())


def read_array(path: Path, *, is_private: bool = False) -> Array:
    """Memory-map an `.npy` file; a DamageError if it is not whole.

    It is read-only or, with `is_private`, copy-on-write: torch warns of read-only arrays.
    """
    mode: Literal["c", "r"] = "c" if is_private else "r"
    with reading(path, DamageError):
        return np.load(path, mmap_mode=mode, allow_pickle=False)  # type: ignore[no-any-return]


@functools.cache  # reading the packages' metadata takes longer than writing a small artifact
def package_versions() -> Mapping[str, str]:
    """Return the versions of Python and of the packages that results depend on."""
    from importlib import metadata

    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


# Records of files: size and checksum of each, compared when they are read.


def record_files(folder: Path, names: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
    """Return records of files; `names` None: all but hidden files, the manifest and checksums."""
    if names is None:
        paths = [path for path in sorted(folder.rglob("[!.]*")) if path.is_file()]
        names = [
            str(path.relative_to(folder))
            for path in paths
            if path.name not in (MANIFEST, CHECKSUMS_FILE)
        ]
    records: dict[str, dict[str, Any]] = {}
    for name in names:
        path = folder / name
        records[name] = {"bytes": path.stat().st_size, "xxh3": file_checksum(path)}
    return records


def find_damage(
    folder: Path, files: FileRecords, *, most_bytes: float = float("inf")
) -> Iterator[tuple[str, str]]:
    """Yield the name of each file that differs from its record, and what is wrong with it.

    If the files together are larger than `most_bytes`, only their sizes are compared.
    """
    is_compared = sum(int(record["bytes"]) for record in files.values()) <= most_bytes
    for name, record in files.items():
        path = folder / name
        size = record["bytes"]
        if not path.is_file():
            yield name, "is missing"
        elif path.stat().st_size != size:
            yield name, f"is damaged ({path.stat().st_size} bytes, {size} were written)"
        elif is_compared and file_checksum(path) != record["xxh3"]:
            yield name, "is damaged (other content than was written)"


def write_checksums(folder: Path) -> None:
    """Write the checksums of a folder that others read too, such as a model's."""
    write_sealed(folder / CHECKSUMS_FILE, {"files": record_files(folder)})


def find_changes(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield what differs from a folder's checksums, as `find_damage`; nothing if it has none."""
    path = folder / CHECKSUMS_FILE
    if path.is_file():
        try:
            yield from list(find_damage(folder, read_sealed(path)["files"]))
        except DamageError:
            yield CHECKSUMS_FILE, "is damaged"


# Artifacts.


def write_manifest(
    folder: Path,
    *,
    stage: str,
    fingerprint: Fields,
    counts: Fields,
    seconds: float,
    files: FileRecords | None = None,
) -> None:
    """Finish an artifact: write its manifest, with records of all its files if `files` is None."""
    if files is None:
        files = record_files(folder)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    manifest = Manifest(
        stage, fingerprint, counts, files, dict(package_versions()), now, round(seconds, 3)
    )
    write_sealed(folder / MANIFEST, asdict(manifest))


def is_finished(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def load_manifest(folder: Path, *, stage: str | None = None) -> Manifest:
    """Read a finished artifact's manifest without checking its files; `stage` None accepts any.

    Raises:
        ArtifactError: If it is missing, unfinished, or of another stage or version.
        DamageError: If it cannot be read.
    """
    if not is_finished(folder):
        raise ArtifactError(f"{folder} is not finished, or not there: it has no {MANIFEST}")
    with reading(folder / MANIFEST, DamageError):
        values = read_sealed(folder / MANIFEST)
        if values["format"] != FORMAT:
            raise ArtifactError(
                f"{folder} has format {values['format']}, this pgra reads {FORMAT}: build another"
            )
        manifest = Manifest(**values)
    if stage not in (None, manifest.stage):
        raise ArtifactError(f"{folder} is of stage '{manifest.stage}', not '{stage}': give another")
    return manifest


def read_manifest(folder: Path, *, stage: str, fingerprint: Fields | None = None) -> Manifest:
    """Read a manifest, and compare the folder with it: sizes and, up to 1 GB, the content.

    Raises:
        ArtifactError: As `load_manifest`, or if it has another fingerprint.
        DamageError: If a file is not what was written; it is named.
    """
    manifest = load_manifest(folder, stage=stage)
    if fingerprint is not None:
        check_fingerprint(folder, made=manifest.fingerprint, asked=fingerprint)
    with reading(folder / MANIFEST, DamageError):
        for name, what in find_damage(folder, manifest.files, most_bytes=_COMPARED):
            raise DamageError(f"{folder / name} {what}")
    return manifest


def check_fingerprint(
    folder: Path,
    *,
    made: Fields,
    asked: Fields,
    now: str = "this run asks for",
    way_out: str = "use another folder or build it again",
) -> None:
    """Raise an ArtifactError that names the first field in which two fingerprints differ.

    Fields with a "/" are digests of what follows from others, which are compared first.
    """
    for name in sorted({*made, *asked}, key=lambda name: ("/" in name, name)):
        old = canonical_json(made.get(name))
        new = canonical_json(asked.get(name))
        if old != new:
            raise ArtifactError(
                f"{folder} was made with {name} {cut(old)}, {now} {cut(new)}: {way_out}"
            )


def set_aside(path: Path, why: object) -> None:
    """Move what is damaged to NAME.damaged, with a warning; the caller makes it again."""
    target = path.with_name(f"{path.name}.damaged")
    _remove(target)
    path.rename(target)
    logger.warning("%s; it is kept as %s, and made again", why, target)


@contextlib.contextmanager
def lock_folder(folder: Path, *, wait: bool = False, is_new: bool = False) -> Iterator[None]:
    """Hold a folder for one job, in its main process, until it ends, however it ends.

    With `wait`, another job's end is waited for. With `is_new` the folder must not exist before it
    is whole, so the lock lies beside it. On a disk without locks there is a warning, and no lock.

    Raises:
        BusyError: If another job holds it.
    """
    from filelock import FileLock, Timeout

    path = folder.with_name(f".{folder.name}.lock") if is_new else folder / ".lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, fallback_to_soft=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if not wait:
            raise BusyError(
                f"{folder} is in use by another pgra job: wait for it, or choose another folder"
            ) from None
        logger.info("waiting for another job that is making %s", folder)
        lock.acquire()
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _warn_of_no_locks(str(error.strerror))
    try:
        beside = folder.parent.glob(f".{folder.name}.????????.partial*")  # as `write_aside` names
        for left in list(beside if is_new else folder.rglob(".*.partial*")):
            _remove(left)
        yield
    finally:
        path.unlink(missing_ok=True)  # who waits for it sees that it has gone, and begins again
        lock.release()
        with contextlib.suppress(OSError):
            if not is_new:
                folder.rmdir()  # nothing was written


@functools.cache
def _warn_of_no_locks(why: str) -> None:
    logger.warning("this disk has no locks (%s): run one job at a time there", why)


# Writes files into the folder that it is given, and returns the manifest's counts.
Build = Callable[[Path], Fields]


@dataclass(frozen=True)
class Artifact:
    """A finished artifact; `reused` if it was there already, of an index so many passages."""

    folder: Path
    manifest: Manifest
    reused: int


def build_once(
    folder: Path,
    *,
    stage: str,
    fingerprint: Fields,
    build: Build,
    context: Context = ALONE,
    inputs: Sequence[Inputs] = (),
) -> Artifact:
    """Return a finished artifact; build it first if it is missing or damaged.

    The first job to ask builds, others wait for it. `build` is called in the main process. If it
    fails, or one of `inputs` changes meanwhile, nothing is kept.

    Raises:
        ArtifactError: If the folder is foreign, or an input changed.
    """
    is_there = is_finished(folder)
    context.barrier()  # all have looked before the main process writes
    if context.is_main and find_fault(folder, stage, fingerprint) is not None:
        with lock_folder(folder, wait=True, is_new=True):
            fault = find_fault(folder, stage, fingerprint)
            if fault is not None:  # no other job built it meanwhile
                is_there = False
                if is_finished(folder):
                    set_aside(folder, fault)
                started = time.monotonic()
                with write_aside(folder) as aside:
                    aside.mkdir()
                    counts = build(aside)
                    for files in inputs:
                        files.check()
                    write_manifest(
                        aside,
                        stage=stage,
                        fingerprint=fingerprint,
                        counts=counts,
                        seconds=time.monotonic() - started,
                    )
    context.barrier()
    return Artifact(folder, load_manifest(folder, stage=stage), is_there)


def find_fault(folder: Path, stage: str, fingerprint: Fields) -> str | None:
    """Return why an artifact must be built, or built again; None if it is finished and whole.

    Raises:
        ArtifactError: If the folder is foreign.
    """
    if not is_finished(folder):
        return "it is not finished"
    try:
        read_manifest(folder, stage=stage, fingerprint=fingerprint)
    except DamageError as error:
        return error.what
    return None


# SQLite files of ours, in autocommit mode, with a write-ahead log where the disk allows one.
#
# `synchronous=FULL`: a write is on the disk when it returns. SQLite detects no flipped bit, so each
# owner keeps checksums.


@dataclass(frozen=True, kw_only=True)
class DatabaseKind:
    """A kind of SQLite file.

    Attributes:
        name: As messages call it, such as "memory".
        application_id: Marks our file among other SQLite files.
        schema: Statements that make the tables, separated by semicolons.
        version: Of the tables; another one is refused.
        if_damaged: What to do with a damaged file; {path} stands for it.
        mode: Who may use a file that is made, less the umask.
    """

    name: str
    application_id: int
    schema: str
    version: int = 1
    page_bytes: int = 4096
    if_damaged: str = "move it away"
    mode: int = 0o666

    def damaged(self, path: Path, why: object) -> ArtifactError:
        return ArtifactError(f"{path} is damaged ({why}): {self.if_damaged.format(path=path)}")

    @contextlib.contextmanager
    def errors_of(self, path: Path) -> Iterator[None]:
        """Turn SQLite's and the system's errors in the block into an `ArtifactError`."""
        try:
            yield
        except UnicodeDecodeError as error:  # in a message of SQLite's, such as a table's name
            raise self.damaged(path, error) from None
        except (sqlite3.Error, OSError) as error:
            name = getattr(error, "sqlite_errorname", "")
            if name.startswith(_DAMAGED):
                raise self.damaged(path, error) from None
            raise ArtifactError(
                f"{path} cannot be used ({error}): see its folder's rights, room and locks"
            ) from None


def open_database(path: Path, kind: DatabaseKind, *, create: bool = True) -> sqlite3.Connection:
    """Open a SQLite file of ours in autocommit mode: the caller begins and ends transactions.

    With `create`, a missing file is made, with its folder. `IN_MEMORY` is always made. A file that
    may only be read is read as it is now.

    Raises:
        ArtifactError: If it is missing, foreign, damaged, locked for too long or not writable.
    """
    is_file = path != IN_MEMORY
    if is_file and not create and not path.is_file():
        raise ArtifactError(f"there is no {kind.name} {path}: name another file")
    mode = "mode=rw"
    target = path.resolve()  # beside which SQLite writes
    if may_only_be_read(target) and not target.with_name(f"{target.name}-wal").exists():
        mode = "mode=ro&immutable=1"  # SQLite would make a write-ahead log beside it
    with kind.errors_of(path), contextlib.ExitStack() as stack:
        if create and is_file and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(kind.mode)
        db = sqlite3.connect(
            f"{path.absolute().as_uri()}?{mode}" if is_file else str(path),
            uri=True,
            isolation_level=None,
            timeout=_SECONDS_LOCKED,
            check_same_thread=False,  # SQLite takes calls of several threads in turn
        )
        stack.callback(db.close)
        # What is no UTF-8 any more must be readable: checksums find the damage.
        db.text_factory = functools.partial(str, encoding="utf-8", errors="replace")
        if not is_file or (create and not path.stat().st_size):
            _make_tables(db, kind)
        _check_kind(path, kind, db)
        with contextlib.suppress(sqlite3.OperationalError):  # held now: the next who opens it
            db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        stack.pop_all()
        return db


def may_only_be_read(path: Path) -> bool:
    """Whether a file, or its folder, cannot be written by this process."""
    return path.is_file() and not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK))


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
            f"{path} has format {version}, this pgra reads {kind.version}: name another file"
        )
