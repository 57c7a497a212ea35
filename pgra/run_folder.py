"""What a run's folder holds, and whose it is; `pgra.runs` says what each file is."""

import errno
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pgra.artifacts import check_fingerprint, digest, find_damage
from pgra.core import Json
from pgra.errors import DamageError, reading
from pgra.reader import READER_FOLDER, RECORD_FILE
from pgra.report.results import METRICS_FILE, read_metrics, read_object

IDENTITY_FILE = "run.json"
ARGUMENTS_FILE = "arguments.json"
TRAINING_FILE = "training.json"
PROMPT_FILE = "prompt.txt"
CARD_FILE = "README.md"
WEIGHTS_FILE = "model.safetensors"
# Others follow from these, so a difference in these is reported first.
_LEADING = ("task", "method", "num_evidence", "max_steps")


def check_writable(folder: Path) -> None:
    """Raise an OSError if a folder could not be made or written, without making it."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))


def check_same_run(folder: Path, asked: Mapping[str, Json], *, is_whole: bool = True) -> None:
    """Raise an ArtifactError if a folder holds another run, or one that lost its record.

    A run without a checkpoint may be replaced. Unless `is_whole`, only known fields are compared.
    """
    path = folder / IDENTITY_FILE
    begun = [folder / READER_FOLDER, folder / METRICS_FILE, *folder.glob("checkpoint-*")]
    if not any(item.exists() for item in begun):
        return
    made = read_object(path)
    if not is_whole:
        made = {name: value for name, value in made.items() if name in asked}
    _compare(folder, made, asked, "choose another --output_dir")


def check_same_inputs(
    folder: Path, asked: Mapping[str, Json], *, free: Collection[str] = ()
) -> None:
    """Raise an ArtifactError if a run's inputs changed.

    Fields in `free` may differ, and how many processes trained it.
    """
    made = read_object(folder / IDENTITY_FILE)
    free = {*free, "num_processes"}
    both = [name for name in asked if name in made and name not in free]
    _compare(
        folder,
        {name: made[name] for name in both},
        {name: asked[name] for name in both},
        "its data, task or models changed since; restore them, or run it again",
    )


def _compare(
    folder: Path, made: Mapping[str, Json], asked: Mapping[str, Json], way_out: str
) -> None:
    """Compare two identities: what a person chose first, then digests of what follows from it."""

    def rank(name: str) -> int:
        return 0 if name in _LEADING else 2 if "/" in name else 1

    for kind in range(3):
        parts = [
            {name: value for name, value in values.items() if rank(name) == kind}
            for values in (made, asked)
        ]
        check_fingerprint(folder, made=parts[0], asked=parts[1], way_out=way_out)


def remove_checkpoints(folder: Path) -> None:
    """Delete a run's checkpoints: they only serve to resume, and many runs' would fill a disk."""
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)


def reader_checksum(folder: Path) -> str:
    """Return a digest of a run's weights, by the checksums in its reader's record."""
    path = folder / READER_FOLDER / RECORD_FILE
    with reading(path, DamageError):
        files = read_object(path)["files"]
        weights = {name: files[name]["xxh3"] for name in files if name.endswith(".safetensors")}
    return digest(weights)


def read_training(folder: Path) -> dict[str, Any] | None:
    """Return the record of a finished training; None if it is not finished."""
    names = (TRAINING_FILE, f"{READER_FOLDER}/{RECORD_FILE}")
    is_whole = all((folder / name).is_file() for name in names)
    return read_object(folder / TRAINING_FILE) if is_whole else None


def check_reader(folder: Path) -> None:
    """Compare a run's reader with its records; a DamageError names a file that differs."""
    home = folder / READER_FOLDER
    path = home / RECORD_FILE
    with reading(path, DamageError):
        for name, what in find_damage(home, read_object(path)["files"]):
            raise DamageError(f"{home / name} {what}", "train again in another folder")
    if (folder / METRICS_FILE).is_file():
        read_metrics(folder, [f"{READER_FOLDER}/{RECORD_FILE}"])
