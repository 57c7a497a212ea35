"""The store: what is computed once lies in a folder that is named by what it was made from.

`KIND-<12 digits>`, a digest of the store's format, the kind and the fields that decide the content.
So what other inputs or another version gave lies beside it, and damages nothing. One job builds,
under a lock, into `.NAME.partial`; then the inputs are looked at once more; `manifest.json` is
written last, with the size and checksum of each file; then the folder gets its name. A folder with
a manifest is finished. What is damaged and can be made again is moved to `NAME.damaged`, with a
warning, and made again. An error of the system (`OSError`) is never taken for damage.
"""

import contextlib
import datetime
import errno
import functools
import glob
import hashlib
import io
import json
import logging
import os
import platform
import shutil
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import xxhash

from pgra.core import ALONE, Context, Json, is_alive
from pgra.errors import ArtifactError, DamageError, cut, reading

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
CHECKSUMS_FILE = "checksums.json"
FORMAT = 2
_COMPARED = 1 << 30  # bytes of an artifact that each opening compares; `pgra verify` compares all
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_PACKAGES = ("pgra", "torch", "transformers", "accelerate", "faiss-cpu", "bm25s", "numpy")

FileRecords = Mapping[str, Mapping[str, Any]]
"""By name, relative to the record's folder: {"bytes": int, "xxh3": str}."""


@dataclass(frozen=True)
class Manifest:
    """What a finished artifact says of itself.

    Attributes:
        stage: Which stage made it, such as "index".
        fingerprint: The fields that determine the content.
        counts: Sizes worth knowing, such as {"rows": 10000}.
        files: The files that were written.
        versions: Package versions it was made with (for people; not checked).
        created: UTC time, ISO 8601.
        seconds: Wall-clock time the stage took.
        format: Version of this layout.
    """

    stage: str
    fingerprint: Mapping[str, Json]
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


def artifact_dir(root: Path, kind: str, fields: Mapping[str, Json]) -> Path:
    """Return the folder of an artifact: `root/KIND-` and 12 digits of format, kind and fields."""
    kind = "".join(c if c.isalnum() or c in "-._" else "-" for c in kind).strip("-")
    return root / f"{kind}-{digest({'format': FORMAT, 'kind': kind, 'fields': fields})[:12]}"


def file_checksum(path: Path) -> str:
    """Return a file's xxh3-128: as fast as the disk, against damage only."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


@dataclass(frozen=True)
class Inputs:
    """Files that something is made from, as they were before they were read.

    Attributes:
        stamps: Path, bytes, time of the last change and inode of each.
    """

    stamps: tuple[tuple[str, int, int, int], ...] = ()

    @classmethod
    def of(cls, paths: Iterable[Path]) -> Self:
        """Note how files are now, before their content or checksum is read."""
        found = ((str(path), path.stat()) for path in paths)
        return cls(tuple((path, s.st_size, s.st_mtime_ns, s.st_ino) for path, s in found))

    def check(self) -> None:
        """Refuse files that changed since, so that nothing made of them is kept.

        Raises:
            ArtifactError: If one did; it is named.
        """
        for stamp in self.stamps:
            path = Path(stamp[0])
            if not path.exists() or self.of([path]).stamps != (stamp,):
                raise ArtifactError(
                    f"{path} changed while it was in use, so what was being made of it is not "
                    "kept: leave it as it is, and give the command again"
                )


NO_INPUTS = Inputs()


# Paths and temporary folders.


def user_cache() -> Path:
    """Return where artifacts are kept of a user who names no folder."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else at_home("~/.cache")) / "pgra"


def at_home(path: str | Path) -> Path:
    """Return a path with the home folder for a leading ~; without one of that user as it is."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 (Path's own raises where there is no such user)


def without_home(path: str) -> str:
    """Return a path with ~ for the home folder; anything else, such as a hub's name, as it is."""
    with contextlib.suppress(RuntimeError, ValueError):  # a user without a home; not below it
        return f"~/{Path(path).relative_to(Path.home().resolve())}"
    return path


class TemporaryFolder:
    """A temporary folder, deleted with this object or at exit.

    Attributes:
        path: Where it is.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="pgra-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


# Files, written aside and renamed.


def check_replaceable(path: Path, flag: str = "") -> None:
    """Refuse to write a file where a folder, link, pipe or device is.

    Args:
        path: Where a file would be written.
        flag: The option that named it, for the message.

    Raises:
        ArtifactError: If something is there that is no plain file.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        what = "a link" if path.is_symlink() else "a folder" if path.is_dir() else "no plain file"
        raise ArtifactError(f"{flag} {path} is {what}: name a plain file or a new one".lstrip())


@contextlib.contextmanager
def write_aside(path: Path, *, sync: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success rename it there, else remove it.

    Args:
        path: The file.
        sync: Whether it must outlast a power cut: for what cannot be made again.

    Raises:
        ArtifactError: If something is there that is no plain file.
    """
    check_replaceable(path)
    aside = name_aside(path)
    try:
        yield aside
        if sync:
            with aside.open("rb+") as file:
                os.fsync(file.fileno())
        aside.replace(path)
        if sync:
            sync_folder(path.parent)
    except OSError as error:
        if error.filename in (None, str(aside)):  # a failed write does not say of which file
            error.filename = str(path)
        raise
    finally:
        with contextlib.suppress(OSError):  # on a read-only disk it would hide the cause
            aside.unlink(missing_ok=True)


def name_aside(path: Path) -> Path:
    """Return a hidden name beside `path` for what will replace it; its folder is made.

    What a killed process left there for the same file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.partial*"):
        if not is_alive(int(left.name[len(path.name) + 2 :].partition(".")[0])):
            _remove(left)
    # numpy and others append a suffix they miss, so the real one stays at the end.
    own = f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.partial{path.suffix}"
    return path.with_name(own)


def replace_folder(folder: Path, save: Callable[[Path], None]) -> None:
    """Write a folder aside and rename it; an older one is replaced."""
    aside = name_aside(folder)
    try:
        save(aside)
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames inside a folder outlast a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str, *, sync: bool = False) -> None:
    """Write a text as UTF-8, aside and renamed."""
    with write_aside(path, sync=sync) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Json, *, sync: bool = False) -> None:
    """Write a value as indented JSON, aside and renamed."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    write_text(path, f"{text}\n", sync=sync)


def write_lines(path: Path, values: Sequence[Json], *, sync: bool = False) -> None:
    """Write one JSON value a line, aside and renamed."""
    with write_aside(path, sync=sync) as aside, aside.open("w", encoding="utf-8") as file:
        file.writelines(
            json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n" for value in values
        )


def write_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Write an array as `.npy`, aside and renamed."""
    # numpy writes to a real file past Python, and a full disk then goes unseen.
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    with write_aside(path) as aside:
        aside.write_bytes(buffer.getbuffer())


def read_array(path: Path, *, is_private: bool = False) -> npt.NDArray[Any]:
    """Memory-map an `.npy` file, read-only.

    Args:
        path: The file.
        is_private: Whether what is written into the array stays in memory, instead of being
            refused: torch warns of arrays that cannot be written.

    Raises:
        DamageError: If it is not a whole `.npy` file.
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
    """Return the records of a folder's files, by name.

    Args:
        folder: Where they are.
        names: Which; None: all but hidden ones and the two files that hold such records.
    """
    if names is None:
        paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
        own = (path.relative_to(folder) for path in paths if not path.name.startswith("."))
        names = [str(path) for path in own if path.name not in (MANIFEST, CHECKSUMS_FILE)]
    paths_of = {name: folder / name for name in names}
    return {
        name: {"bytes": path.stat().st_size, "xxh3": file_checksum(path)}
        for name, path in paths_of.items()
    }


def find_damage(
    folder: Path, files: FileRecords, *, most_bytes: float = float("inf")
) -> Iterator[tuple[str, str]]:
    """Compare files with their records.

    Args:
        folder: Where they are.
        files: Their records.
        most_bytes: Where they are larger together, only sizes are compared.

    Yields:
        The name of a file that is not what was written, and what is wrong with it.
    """
    is_compared = sum(int(record["bytes"]) for record in files.values()) <= most_bytes
    for name, record in files.items():
        path, size = folder / name, record["bytes"]
        if not path.is_file():
            yield name, "is missing"
        elif path.stat().st_size != size:
            yield name, f"is damaged ({path.stat().st_size} bytes, {size} were written)"
        elif is_compared and file_checksum(path) != record["xxh3"]:
            yield name, "is damaged (other content than was written)"


def write_checksums(folder: Path) -> None:
    """Finish a folder that others read too, such as a model's: its checksums are written last."""
    write_json(folder / CHECKSUMS_FILE, {"files": record_files(folder)})


def find_changes(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield what is not as a folder's checksums say, as `find_damage` does; nothing without any."""
    path = folder / CHECKSUMS_FILE
    if path.is_file():
        try:
            with reading(path, DamageError):
                yield from list(find_damage(folder, json.loads(path.read_text())["files"]))
        except DamageError:
            yield CHECKSUMS_FILE, "is damaged"


# Artifacts.


def write_manifest(
    folder: Path,
    *,
    stage: str,
    fingerprint: Mapping[str, Json],
    counts: Mapping[str, Json],
    seconds: float,
    files: FileRecords | None = None,
) -> Manifest:
    """Finish an artifact: record its files, then write the manifest.

    Args:
        folder: The artifact.
        stage: The stage that made it.
        fingerprint: The fields that determine the content.
        counts: Sizes worth knowing.
        seconds: Wall-clock time it took.
        files: Records of its files; None records every file in the folder.
    """
    files = record_files(folder) if files is None else files
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    manifest = Manifest(
        stage, fingerprint, counts, files, dict(package_versions()), now, round(seconds, 3)
    )
    write_json(folder / MANIFEST, asdict(manifest))
    return manifest


def is_finished(folder: Path) -> bool:
    """Return whether a folder holds a finished artifact."""
    return (folder / MANIFEST).is_file()


def load_manifest(folder: Path, *, stage: str | None = None) -> Manifest:
    """Read a finished artifact's manifest, and leave its files unchecked.

    Args:
        folder: The artifact.
        stage: The stage that must have made it; None accepts any.

    Raises:
        ArtifactError: If it is missing, unfinished, or of another stage or version.
        DamageError: If it cannot be read.
    """
    if not is_finished(folder):
        why = "is not finished" if folder.is_dir() else "does not exist"
        way = "" if stage is None else f": run the '{stage}' stage"
        raise ArtifactError(f"{folder} {why}: it has no {MANIFEST}{way}")
    with reading(folder / MANIFEST, DamageError):
        values = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise ArtifactError(
                f"{folder} was made by another version of pgra (format {values['format']}, this "
                f"one reads {FORMAT}): use that version, or build it again in another folder"
            )
        manifest = Manifest(**values)
    if stage not in (None, manifest.stage):
        raise ArtifactError(f"{folder} was made by stage '{manifest.stage}', not by '{stage}'")
    return manifest


def read_manifest(
    folder: Path, *, stage: str, fingerprint: Mapping[str, Json] | None = None
) -> Manifest:
    """Read a finished artifact's manifest and compare the folder with it.

    Sizes are always compared; of an artifact of up to 1 GB also the files' content.

    Args:
        folder: The artifact.
        stage: The stage that must have made it.
        fingerprint: Fields it must have been made with; None accepts any.

    Raises:
        ArtifactError: If it is missing, unfinished, of another stage or version, or made from
            something else (the field and both values are named).
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
    made: Mapping[str, Json],
    asked: Mapping[str, Json],
    now: str = "this run asks for",
    way_out: str = "use another folder or build it again",
) -> None:
    """Refuse an artifact made from something else, naming the first field that differs.

    Raises:
        ArtifactError: If any field differs or is missing on one side.
    """
    for name in sorted({*made, *asked}):
        one, other = (canonical_json(fields.get(name)) for fields in (made, asked))
        if one != other:
            raise ArtifactError(
                f"{folder} was made with {name} {cut(one)}, {now} {cut(other)}: {way_out}"
            )


def set_aside(path: Path, why: object) -> None:
    """Move what is damaged to NAME.damaged, with a warning: the caller makes it again."""
    place = path.with_name(f"{path.name}.damaged")
    _remove(place)
    path.rename(place)
    logger.warning("%s; it is kept as %s, and made again", why, place)


@contextlib.contextmanager
def lock_folder(folder: Path, *, wait: bool = False, is_new: bool = False) -> Iterator[None]:
    """Hold a folder for one job; the system lets go of it when the process ends, however it ends.

    Of a job of several processes the main one holds it. Where a disk has no locks, there is a
    warning, and the job goes on alone.

    Args:
        folder: Made if it is not there, unless `is_new`.
        wait: Whether to wait for another job that holds it, instead of refusing.
        is_new: Whether it comes whole or not at all; what is held lies beside it then.

    Raises:
        ArtifactError: If another job holds it.
        OSError: If it cannot be written.
    """
    path = folder.with_name(f".{folder.name}.lock") if is_new else folder / ".lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = _lock(path, folder, wait=wait)
    try:
        for left in () if is_new else folder.glob(".*.partial*"):
            _remove(left)
        yield
    finally:
        path.unlink(missing_ok=True)  # who waits for it sees that it has gone, and begins again
        if lock is not None:
            lock.release()
        with contextlib.suppress(OSError):
            if not is_new:
                folder.rmdir()  # nothing was written


def _lock(path: Path, folder: Path, *, wait: bool) -> Any:
    from filelock import FileLock, Timeout

    lock = FileLock(path, fallback_to_soft=False)
    try:
        return lock.acquire(timeout=0).lock
    except Timeout:
        if not wait:
            raise ArtifactError(
                f"{folder} is in use by another pgra job: wait for it, or choose another folder"
            ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _warn_of_no_locks(str(error.strerror))
        return None
    logger.info("waiting for another job that is making %s", folder)
    return lock.acquire().lock


@functools.cache
def _warn_of_no_locks(why: str) -> None:
    logger.warning("this disk has no locks (%s): run one job at a time there", why)


Build = Callable[[Path], Mapping[str, Json]]
"""Writes files into the folder it is given, and returns the counts for the manifest."""


@dataclass(frozen=True)
class Artifact:
    """A finished artifact.

    Attributes:
        folder: Where it is.
        manifest: What it says of itself.
        reused: Whether it was there already.
    """

    folder: Path
    manifest: Manifest
    reused: bool


def build_once(
    folder: Path,
    *,
    stage: str,
    fingerprint: Mapping[str, Json],
    build: Build,
    context: Context = ALONE,
    inputs: Sequence[Inputs] = (),
) -> Artifact:
    """Return a finished artifact, building it first if nobody has, or if it is damaged.

    The first job to ask builds, others wait for it.

    Args:
        folder: Where it is when finished: see `artifact_dir`.
        stage: The stage, as the manifest names it.
        fingerprint: The fields that determine the content.
        build: Makes the files; called in the context's main process only.
        context: Who waits while the main process builds.
        inputs: The files it is made from; if one changes meanwhile, nothing is kept.

    Raises:
        ArtifactError: If the folder is foreign, or an input changed.
        PgraError: Whatever `build` raises; nothing half-written stays then.
    """
    is_there = is_finished(folder)
    context.barrier()  # all have looked before the main process writes
    if context.is_main and find_fault(folder, stage=stage, fingerprint=fingerprint) is not None:
        with lock_folder(folder, wait=True, is_new=True):
            fault = find_fault(folder, stage=stage, fingerprint=fingerprint)
            if fault is not None:  # no other job built it meanwhile
                is_there = False
                if is_finished(folder):
                    set_aside(folder, fault)
                _build_aside(folder, stage, fingerprint, build, inputs)
    context.barrier()
    return Artifact(folder, load_manifest(folder, stage=stage), is_there)


def find_fault(folder: Path, *, stage: str, fingerprint: Mapping[str, Json]) -> str | None:
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


def _build_aside(
    folder: Path,
    stage: str,
    fingerprint: Mapping[str, Json],
    build: Build,
    inputs: Sequence[Inputs],
) -> None:
    aside = folder.parent / f".{folder.name}.partial"
    started = time.monotonic()
    try:
        shutil.rmtree(aside, ignore_errors=True)  # of a killed process: the lock is ours now
        aside.mkdir()
        counts = build(aside)
        for one in inputs:
            one.check()
        seconds = time.monotonic() - started
        write_manifest(aside, stage=stage, fingerprint=fingerprint, counts=counts, seconds=seconds)
        shutil.rmtree(folder, ignore_errors=True)  # it has no manifest, so nobody uses it
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
