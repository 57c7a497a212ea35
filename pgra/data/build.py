"""Folders that are built once and then used by every process.

The first process to ask builds; others wait for it. A half-built folder is never seen: it is made
under a hidden name and renamed when its manifest is written.
"""

import contextlib
import fcntl
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pgra.errors import ArtifactError
from pgra.io import Manifest, is_finished, read_manifest, sync_folder, write_manifest
from pgra.types import Json

logger = logging.getLogger(__name__)

Build = Callable[[Path], Mapping[str, Json]]
"""Writes files into the folder it is given, and returns the counts for the manifest."""


def build_once(
    folder: Path,
    *,
    stage: str,
    fingerprint: Mapping[str, Json],
    build: Build,
    verify: bool = False,
) -> Manifest:
    """Give a finished folder's manifest, building the folder first if nobody has.

    Args:
        folder: Where it stands when finished; its name should hold a digest of the fingerprint.
        stage: The stage, as the manifest names it.
        fingerprint: The fields that determine the content.
        build: Makes the files.
        verify: Whether to compare the checksum of every file (sizes always are).

    Raises:
        ArtifactError: If the folder is damaged or foreign, or cannot be written.
        PgraError: Whatever `build` raises; nothing half-written stays then.
    """
    if not is_finished(folder):
        with _turn(folder):
            if not is_finished(folder):  # another process may have built it while this one waited
                _build_aside(folder, stage, fingerprint, build)
    return read_manifest(folder, stage=stage, fingerprint=fingerprint, verify=verify)


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Wait for the right to build a folder; the system takes it back if the process dies."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = (folder.parent / f".{folder.name}.lock").open("w")
    except OSError as error:
        raise ArtifactError(
            f"cannot write {folder} ({error.strerror}): choose another folder "
            "(PGRA_HOME sets the one for bundled models and data)"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that is making %s", folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


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
