"""The store of what is computed once: fingerprint, folder, built once, checked when read.

An artifact is a folder named by the digest of its fingerprint: the fields that determine its
content. `manifest.json` is written last, so a folder that has one is finished. Whoever reads it
says which fields it needs; the first that differs is named in the error. Index shards and the LM's
bank fill their folders bit by bit: with the rest they share only the manifest and the lock.
"""

import contextlib
import datetime
import fcntl
import functools
import hashlib
import io
import json
import logging
import mmap
import os
import platform
import re
import shutil
import stat
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from pgra.core import ALONE, Context, Json
from pgra.errors import ArtifactError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 1
_EXCERPT = 100  # characters of a value in a message
_PACKAGES = (
    "pgra",
    "torch",
    "transformers",
    "accelerate",
    "faiss-cpu",
    "faiss-gpu",
    "bm25s",
    "numpy",
)


@dataclass(frozen=True)
class Manifest:
    """What a finished artifact says of itself.

    Attributes:
        stage: Which stage made it, such as "index".
        fingerprint: The fields that determine the content.
        counts: Sizes worth knowing, such as {"rows": 10000}.
        files: By name: {"bytes": int, "checksum": str}.
        versions: Package versions it was made with (for people; not checked).
        created: UTC time, ISO 8601.
        seconds: Wall-clock time the stage took.
        format: Version of this layout.
        digest: Of all other fields, see `sealed`; "" until it is written.
    """

    stage: str
    fingerprint: Mapping[str, Json]
    counts: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]
    versions: Mapping[str, str]
    created: str
    seconds: float
    format: int = FORMAT
    digest: str = ""


def canonical_json(value: Json) -> str:
    """Write a value so that equal values give equal text: sorted keys, no spaces, no NaN."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def digest(fields: Json) -> str:
    """Return the sha256, in hex, of a fingerprint's fields (or of any JSON value)."""
    return hashlib.sha256(canonical_json(fields).encode()).hexdigest()


SEAL = "digest"


def sealed(fields: Mapping[str, Json]) -> dict[str, Json]:
    """Return a record with the digest of its fields at its end, so that no byte of it can change.

    It tells damage, and a field that was edited by hand; who writes a new digest is believed.
    """
    own = {name: value for name, value in fields.items() if name != SEAL}
    return {**own, SEAL: digest(json.loads(json.dumps(own)))}  # as a reader finds it


def is_sealed(record: Mapping[str, Json]) -> bool:
    """Whether a record that was read is what was written: see `sealed`."""
    try:
        return record == sealed(record)
    except ValueError:  # NaN, which is never written
        return False


def unsealed(record: Mapping[str, Json]) -> str:
    """Say what is wrong with a record that is not as it was sealed."""
    if SEAL in record:
        return "it is not what was written"
    return f"it has no {SEAL}: an early version of pgra made it, or it was changed"


def artifact_dir(root: Path, name: str, fields: Mapping[str, Json]) -> Path:
    """Return the folder of an artifact: `root/NAME-` and the first 12 digits of its fingerprint."""
    clean = "".join(c if c.isalnum() or c in "-._" else "-" for c in name).strip("-")
    return root / f"{clean}-{digest(fields)[:12]}"


def file_checksum(*paths: Path) -> str:
    """Return the xxh3-128 of the files in this order: as fast as the disk, against damage only."""
    hasher = xxhash.xxh3_128()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 18):
                hasher.update(block)
    return f"xxh3:{hasher.hexdigest()}"


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
    """A folder that goes with the object, or with the process.

    Attributes:
        path: Where it is.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="pgra-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


_KINDS: Mapping[int, str] = {
    stat.S_IFLNK: "a link, and what it points at would stay as it is",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_replaceable(path: Path, flag: str = "") -> None:
    """Refuse a file's place where something stands that is no plain file.

    Args:
        path: Where a file would be written.
        flag: The option that named it, for the message.

    Raises:
        ArtifactError: If a folder, a link, a pipe, a socket or a device is there.
    """
    try:
        kind = stat.S_IFMT(path.lstat().st_mode)
    except OSError:  # nothing is there, or writing says why not
        return
    if kind == stat.S_IFDIR:
        raise ArtifactError(f"{flag} {path} is a folder: name a file in it".lstrip())
    if kind != stat.S_IFREG:
        what = _KINDS.get(kind, "no file")
        told = f"{flag} {path} is {what}: only a plain file is replaced, name another"
        raise ArtifactError(told.lstrip())


@contextlib.contextmanager
def write_aside(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success sync and rename it there, else remove it.

    Raises:
        ArtifactError: If something stands there that is no plain file.
    """
    check_replaceable(path)
    with name_beside(path) as aside:
        try:
            yield aside
            with aside.open("rb+") as file:
                os.fsync(file.fileno())
            aside.replace(path)
            sync_folder(path.parent)
        except OSError as error:
            if error.filename in (None, str(aside)):  # a failed write does not say of which file
                error.filename = str(path)
            raise
        finally:
            with contextlib.suppress(OSError):  # on a read-only disk it would be told of instead
                aside.unlink(missing_ok=True)


_PARTIAL = re.compile(r"\.[0-9a-f]{8}\.partial")


@contextlib.contextmanager
def name_beside(path: Path) -> Iterator[Path]:
    """Yield a hidden name beside `path` for what will take its place; its folder is made.

    What killed processes left under such names in that folder is removed: who writes there holds
    the folder, shared, so that who finds it free knows that nothing there is of a live process.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _writing_in(path.parent):
        # numpy and others append a suffix they miss, so the real one stays at the end.
        yield path.with_name(f".{uuid.uuid4().hex[:8]}.partial{path.suffix}")


@contextlib.contextmanager
def _writing_in(folder: Path) -> Iterator[None]:
    """Hold a folder as one of those who write in it; who finds it free tidies it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # others write there, or the disk has no locks
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in folder.iterdir():
                if _PARTIAL.match(path.name):
                    _remove(path)
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames inside a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8, aside and renamed."""
    with write_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Json) -> None:
    """Write a value as indented JSON, aside and renamed."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_sealed(path: Path, fields: Mapping[str, Json]) -> None:
    """Write a record as indented JSON, sealed."""
    write_json(path, sealed(fields))


def write_lines(path: Path, values: Sequence[Json]) -> None:
    """Write one JSON value a line, aside and renamed."""
    with write_aside(path) as aside, aside.open("w", encoding="utf-8") as file:
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
        ArtifactError: If the file is missing or is not a whole `.npy` file.
    """
    try:
        mode: Literal["c", "r"] = "c" if is_private else "r"
        return np.load(path, mmap_mode=mode, allow_pickle=False)  # type: ignore[no-any-return]
    except (OSError, ValueError, EOFError) as error:
        raise ArtifactError(
            f"{path} cannot be read ({error}): delete its folder and run the stage again"
        ) from None


@functools.cache  # reading the packages' metadata takes longer than writing a small artifact
def package_versions() -> Mapping[str, str]:
    """Return the versions of Python and of the packages that results depend on."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def write_manifest(
    folder: Path,
    *,
    stage: str,
    fingerprint: Mapping[str, Json],
    counts: Mapping[str, Json],
    seconds: float,
    files: Mapping[str, Mapping[str, Any]] | None = None,
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
    if files is None:
        paths = sorted(
            p
            for p in folder.rglob("*")
            if p.is_file() and not p.name.startswith(".") and p.name != MANIFEST
        )
        files = {str(p.relative_to(folder)): record_file(p) for p in paths}
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    manifest = Manifest(
        stage, fingerprint, counts, files, dict(package_versions()), now, round(seconds, 3)
    )
    write_sealed(folder / MANIFEST, asdict(manifest))
    return manifest


def record_file(path: Path) -> dict[str, Any]:
    """Return a file's record in a manifest."""
    return {"bytes": path.stat().st_size, "checksum": file_checksum(path)}


def is_finished(folder: Path) -> bool:
    """Return whether a folder holds a finished artifact."""
    return (folder / MANIFEST).is_file()


def load_manifest(folder: Path, *, stage: str | None = None) -> Manifest:
    """Read a finished artifact's manifest, and leave its files unchecked.

    Args:
        folder: The artifact.
        stage: The stage that must have made it; None accepts any.

    Raises:
        ArtifactError: If it is missing, unfinished, damaged, or of another stage or format.
    """
    if not is_finished(folder):
        why = "is not finished" if folder.is_dir() else "does not exist"
        way = "" if stage is None else f": run the '{stage}' stage"
        raise ArtifactError(f"{folder} {why}: it has no {MANIFEST}{way}")
    try:
        values = json.loads((folder / MANIFEST).read_text("utf-8"))
        made_as = values["format"]  # before the fields: another format may have others
        if made_as != FORMAT:
            raise ArtifactError(
                f"{folder} has format {made_as}, this pgra reads {FORMAT}: "
                "build it again or update pgra"
            )
        manifest = Manifest(**values)
        if not is_sealed(values):
            raise ValueError(unsealed(values))
    except (ValueError, TypeError, KeyError) as error:
        raise ArtifactError(
            f"{folder / MANIFEST} is damaged ({error}): delete the folder and run the stage again"
        ) from None
    if stage not in (None, manifest.stage):
        raise ArtifactError(f"{folder} was made by stage '{manifest.stage}', not by '{stage}'")
    return manifest


def read_manifest(
    folder: Path, *, stage: str, fingerprint: Mapping[str, Json] | None = None, verify: bool = True
) -> Manifest:
    """Read a finished artifact's manifest and check the folder against it.

    Args:
        folder: The artifact.
        stage: The stage that must have made it.
        fingerprint: Fields it must have been made with; None accepts any.
        verify: Whether to read every file and compare its checksum (sizes are always compared).

    Raises:
        ArtifactError: If it is missing, unfinished, of another stage or format, made from something
            else (the field and both values are named), or damaged (the file is named).
    """
    manifest = load_manifest(folder, stage=stage)
    if fingerprint is not None:
        check_fingerprint(folder, made=manifest.fingerprint, asked=fingerprint)
    check_files(folder, manifest.files, verify=verify)
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
                f"{folder} was made with {name} {_excerpt(one, other)}, {now} "
                f"{_excerpt(other, one)}: {way_out}"
            )


def _excerpt(value: str, other: str) -> str:
    """Shorten a long value, such as a prefix of exemplars, to where it differs from another."""
    if len(value) <= _EXCERPT:
        return value
    pairs = enumerate(zip(value, other, strict=False))
    differs = next((i for i, (mine, theirs) in pairs if mine != theirs), len(other))
    start = min(max(0, differs - _EXCERPT // 2), len(value) - _EXCERPT)
    end = start + _EXCERPT
    return "…" * (start > 0) + value[start:end] + "…" * (end < len(value))


def find_damage(
    folder: Path, files: Mapping[str, Mapping[str, Any]], *, verify: bool = True
) -> Iterator[tuple[str, str]]:
    """Compare files with their recorded sizes and, if `verify`, checksums.

    Yields:
        The name of a file that is not what was written, and what is wrong with it.
    """
    for name, record in files.items():
        path, size = folder / name, record.get("bytes")
        if not path.is_file():
            yield name, "is missing"
        elif path.stat().st_size != size:
            yield name, f"is damaged ({path.stat().st_size} bytes, {size} were written)"
        elif verify and file_checksum(path) != record.get("checksum"):
            yield name, "is damaged (other content than was written)"


def check_files(
    folder: Path, files: Mapping[str, Mapping[str, Any]], *, verify: bool = True
) -> None:
    """Refuse files that are not what was written: see `find_damage`.

    Raises:
        ArtifactError: If one is missing or damaged; it is named.
    """
    for name, what in find_damage(folder, files, verify=verify):
        raise ArtifactError(f"{folder / name} {what}: delete {folder} and run the stage again")


# Folders that others read too, such as a model's: their checksums stand in a file of their own.

CHECKSUMS_FILE = "checksums.json"


def seal_folder(folder: Path) -> None:
    """Write the checksums of a folder's files, last: what changes afterwards is seen."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    files = {str(path.relative_to(folder)): record_file(path) for path in paths}
    files.pop(CHECKSUMS_FILE, None)
    write_sealed(folder / CHECKSUMS_FILE, {"files": files})


def find_changes(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield what is not as a folder's checksums say, as `find_damage` does; nothing without any."""
    path = folder / CHECKSUMS_FILE
    if not path.is_file():
        return
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        files = record["files"] if is_sealed(record) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        files = None
    if files is None:
        yield CHECKSUMS_FILE, "is damaged"
    yield from find_damage(folder, files or {})


# Large files: a checksum for each block, compared when the block is first read.


def record_blocks(path: Path, ends: Sequence[int]) -> dict[str, Json]:
    """Return what `BlockFile` needs to know of a file.

    Args:
        path: The file.
        ends: Where all blocks but the last end, in bytes, rising.
    """
    stops = [*ends, path.stat().st_size]
    with path.open("rb") as file:
        lengths = np.diff([0, *stops]).tolist()
        checksums: list[Json] = [xxhash.xxh3_128_hexdigest(file.read(n)) for n in lengths]
    return {"ends": list(stops), "checksums": checksums}


class BlockFile:
    """A mapped file that is checked block by block, each when it is first asked for.

    Opening it reads nothing, whatever its size.

    Attributes:
        path: The file.
        data: All of its bytes, mapped: only those of checked blocks may be read.
        num_bytes: How many were read to be checked, so far.
    """

    def __init__(self, path: Path, blocks: Mapping[str, Any]) -> None:
        """Map a file.

        Args:
            path: The file, whose size was looked at.
            blocks: What `record_blocks` gave, itself checked.
        """
        self.path, self.num_bytes = path, 0
        with path.open("rb") as file:
            self.data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self._ends, self._checksums = [0, *blocks["ends"]], blocks["checksums"]
        self._is_checked = bytearray(len(self))

    def __len__(self) -> int:
        """Count the blocks."""
        return len(self._checksums)

    def check(self, number: int) -> None:
        """Compare a block with its checksum, unless this process did before.

        Raises:
            ArtifactError: If it is not what was written.
        """
        number %= len(self)
        if self._is_checked[number]:
            return
        start, stop = self._ends[number : number + 2]
        if xxhash.xxh3_128_hexdigest(self.data[start:stop]) != self._checksums[number]:
            raise ArtifactError(
                f"{self.path} is damaged (other content than was written, between bytes {start:,} "
                f"and {stop:,}): delete {self.path.parent} and run the stage again"
            )
        self.num_bytes += stop - start
        self._is_checked[number] = True


@contextlib.contextmanager
def lock_folder(folder: Path, *, wait: bool = False, is_new: bool = False) -> Iterator[None]:
    """Hold a folder for one job; the system lets go of it when the process ends, however it ends.

    Of a job of several processes the main one holds it.

    Args:
        folder: Made if it is not there, unless `is_new`.
        wait: Whether to wait for another job that holds it, instead of refusing.
        is_new: Whether it comes whole or not at all; what is held lies beside it then.

    Raises:
        ArtifactError: If another job holds it; its process is named, and since when.
        OSError: If it cannot be written.
    """
    path = folder.with_name(f".{folder.name}.lock") if is_new else folder / ".lock"
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+") as file:  # not emptied: it says who holds it
            _lock(file, folder, wait=wait)
            # The job that held it may have taken the file away: then this one holds nothing.
            if not path.is_file() or path.stat().st_ino != os.fstat(file.fileno()).st_ino:
                continue
            now = datetime.datetime.now(datetime.UTC).isoformat(" ", timespec="seconds")
            with contextlib.suppress(OSError):  # a full disk; it is held all the same
                os.truncate(path, 0)
                os.write(file.fileno(), f"process {os.getpid()}, since {now}".encode())
            with _writing_in(path.parent):
                pass
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    if not is_new:
                        folder.rmdir()  # nothing was written
            return


def _lock(file: IO[str], folder: Path, *, wait: bool) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        told = file.read(_EXCERPT)
        who = f" ({told})" if told else ""
        if not wait:
            raise ArtifactError(
                f"{folder} is in use by another pgra job{who}: wait for it, or choose another "
                "folder"
            ) from None
        logger.info("waiting for another job%s that is making %s", who, folder)
        fcntl.flock(file, fcntl.LOCK_EX)


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
    verify: bool = True,
) -> Artifact:
    """Return a finished artifact, building it first if nobody has.

    The first job to ask builds, others wait for it. A half-built folder is never seen: it is made
    under a hidden name beside it, and renamed when its manifest is written.

    Args:
        folder: Where it stands when finished: see `artifact_dir`.
        stage: The stage, as the manifest names it.
        fingerprint: The fields that determine the content.
        build: Makes the files; called in the context's main process only.
        context: Who waits while the main process builds.
        verify: Whether to compare the checksum of every file (sizes always are).

    Raises:
        ArtifactError: If the folder is damaged or foreign, or cannot be written.
        PgraError: Whatever `build` raises; nothing half-written stays then.
    """
    reused = is_finished(folder)
    context.barrier()  # all have looked before the main process writes
    if context.is_main and not reused:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(lock_folder(folder, wait=True, is_new=True))
            except OSError as error:
                raise ArtifactError(
                    f"cannot write {folder} ({error.strerror}): choose another folder "
                    "(PGRA_HOME sets the one for bundled models and data)"
                ) from None
            if not is_finished(folder):  # another job may have built it meanwhile
                _build_aside(folder, stage, fingerprint, build)
    context.barrier()
    manifest = read_manifest(folder, stage=stage, fingerprint=fingerprint, verify=verify)
    return Artifact(folder, manifest, reused)


def _build_aside(folder: Path, stage: str, fingerprint: Mapping[str, Json], build: Build) -> None:
    aside = folder.parent / f".{folder.name}.partial"
    started = time.monotonic()
    try:
        shutil.rmtree(aside, ignore_errors=True)  # of a killed process: the lock is ours now
        aside.mkdir()
        counts = build(aside)
        seconds = time.monotonic() - started
        write_manifest(aside, stage=stage, fingerprint=fingerprint, counts=counts, seconds=seconds)
        shutil.rmtree(folder, ignore_errors=True)  # it has no manifest, so nobody uses it
        aside.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise ArtifactError(
            f"cannot write {folder} ({error}): free some space or choose another folder"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
