"""A run's folder: the names of its files, and reading them with checks.

run.json              what decides the run; the same command continues, another is refused
arguments.json        all arguments
prompt.txt            a prompt as the LM sees it
losses.jsonl          the loss of every step
checkpoint-N/         to resume from, until the run is finished
training.json         what was decided on the dev set
reader/               the best reader: a plain model folder with pgra.json and its model card
predictions.jsonl     a line for each test example
metrics.json          written last, with the checksums of the other files
"""

import json
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pgra.artifacts import (
    check_fingerprint,
    digest,
    find_damage,
    read_sealed,
    record_files,
    write_sealed,
)
from pgra.errors import ArtifactError, DamageError, reading
from pgra.types import Fields

IDENTITY_FILE = "run.json"
ARGUMENTS_FILE = "arguments.json"
PROMPT_FILE = "prompt.txt"
LOSSES_FILE = "losses.jsonl"
TRAINING_FILE = "training.json"
PREDICTIONS_FILE = "predictions.jsonl"
METRICS_FILE = "metrics.json"
READER_FOLDER = "reader"
RECORD_FILE = "pgra.json"  # in it, written last: what the reader is, and its files' checksums
WEIGHTS_FILE = "model.safetensors"
CARD_FILE = "README.md"
_CHECKPOINTS = "checkpoint-*"
# what was decided before the predictions
DECIDING_FILES = (
    IDENTITY_FILE,
    ARGUMENTS_FILE,
    TRAINING_FILE,
    LOSSES_FILE,
    f"{READER_FOLDER}/{RECORD_FILE}",
)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read an object a line; a DamageError if a line is not an object."""
    with path.open(encoding="utf-8") as file, reading(path, DamageError):
        for text in file:
            yield dict(json.loads(text))


def read_object(path: Path) -> dict[str, Any]:
    """Read a record.

    Raises:
        ArtifactError: If it is missing.
        DamageError: If it is not what was written.
    """
    if not path.is_file():
        raise ArtifactError(f"{path} is missing: give its run's command again, or another folder")
    return read_sealed(path)


def read_metrics(folder: Path, names: Collection[str] | None = None) -> dict[str, Any]:
    """Read `metrics.json`, and compare it and the files beside it (`names`; None: all).

    Raises:
        ArtifactError: If one is damaged, missing, or of another run; it is named.
    """
    metrics = read_object(folder / METRICS_FILE)
    files = metrics["files"]
    compared = {name: files[name] for name in files if names is None or name in names}
    for name, what in find_damage(folder, compared):
        raise DamageError(f"{folder / name} {what}, by {METRICS_FILE}")
    return metrics


def write_metrics(folder: Path, metrics: Fields, names: Sequence[str]) -> None:
    """Write `metrics.json`, always last, with the checksums of these files, if they exist."""
    files = record_files(folder, [name for name in names if (folder / name).is_file()])
    write_sealed(folder / METRICS_FILE, {**metrics, "files": files})


@dataclass(frozen=True)
class RunFolder:
    """A run's folder, whatever is there yet.

    `pgra.runs.Run`, which decides queries, `FinishedRun`, a row of a table, and `GridRun`, which
    may not have begun, are each one.
    """

    folder: Path

    @property
    def reader_folder(self) -> Path:
        """The folder of the trained reader."""
        return self.folder / READER_FOLDER

    @property
    def is_begun(self) -> bool:
        """Whether it holds what another run must not replace; without a checkpoint nothing is."""
        begun = [self.reader_folder, self.folder / METRICS_FILE, *self.folder.glob(_CHECKPOINTS)]
        return any(path.exists() for path in begun)

    @property
    def has_reader(self) -> bool:
        """Whether its reader is trained; the weights may have been deleted since."""
        return (self.reader_folder / RECORD_FILE).is_file()

    @property
    def is_finished(self) -> bool:
        """Whether it was measured."""
        return (self.folder / METRICS_FILE).is_file()

    def read(self, name: str) -> dict[str, Any]:
        """Read a record by its file's name; errors are those of `read_object`."""
        return read_object(self.folder / name)

    def read_if_there(self, name: str) -> dict[str, Any]:
        """Read a record; nothing if there is none."""
        return self.read(name) if (self.folder / name).is_file() else {}

    @property
    def training(self) -> dict[str, Any]:
        """Content of `training.json`: the dev set's value and its step; empty without training."""
        return self.read_if_there(TRAINING_FILE)

    @cached_property
    def predictions(self) -> list[dict[str, Any]]:
        """Content of `predictions.jsonl`, a dict for each test example, read on first use."""
        return list(read_lines(self.folder / PREDICTIONS_FILE))

    @property
    def reader_checksum(self) -> str:
        """A digest of the reader's weights, by the checksums in its record."""
        files = self.read(f"{READER_FOLDER}/{RECORD_FILE}")["files"]
        return digest({n: files[n]["xxh3"] for n in files if n.endswith(".safetensors")})

    def check_identity(
        self,
        asked: Fields,
        way_out: str,
        free: Collection[str] = (),
    ) -> None:
        """Raise an ArtifactError that names the first field in which another run is asked for.

        Args:
            asked: What decides that run, as far as it is known yet: what both have is compared.
            way_out: What the message says to do.
            free: Fields that may differ.
        """
        recorded = self.read(IDENTITY_FILE)
        names = recorded.keys() & asked.keys() - {*free}
        check_fingerprint(
            self.folder,
            made={name: recorded[name] for name in names},
            asked={name: asked[name] for name in names},
            way_out=way_out,
        )

    def remove_checkpoints(self) -> None:
        """Delete the checkpoints, which only serve to resume: many runs' would fill a disk."""
        for checkpoint in self.folder.glob(_CHECKPOINTS):
            shutil.rmtree(checkpoint)
