"""Pseudo-labels of evidence: what a plain reader of the task says of each text alone.

    FOLDER/TASK-CHECKSUM.jsonl   a text and its label a line

No text is read twice: not where several queries, runs or calls share it. A labeler is known by its
folder's checksums, so that another one's labels are never mixed in.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pgra.errors import ArtifactError, ConfigError
from pgra.evaluation.results import METRICS_FILE
from pgra.evaluation.run_files import read_object
from pgra.io import file_checksum, write_lines
from pgra.reader.record import RECORD_FILE, ReaderRecord, find_reader, read_record
from pgra.reader.trained import Reader
from pgra.types import Json

logger = logging.getLogger(__name__)

_KEPT_EVERY = 10_000


@dataclass(frozen=True)
class Labeler:
    """A plain reader that gives evidence its pseudo-labels.

    Attributes:
        folder: As it was named.
        home: Its reader's folder.
        record: What it was trained for.
        measured: The content of its run's `metrics.json`; empty where there is none.
    """

    folder: Path
    home: Path
    record: ReaderRecord
    measured: Mapping[str, Any]

    @property
    def checksum(self) -> str:
        """Give the checksum of its record, which holds those of its weights."""
        return file_checksum(self.home / RECORD_FILE)

    @property
    def note(self) -> str:
        """Word how good it is, as far as that is known."""
        told = f"{self.record.task}: pseudo-labels are those of {self.folder}"
        if not self.measured:
            return f"{told}."
        metric, value = self.measured["metric"], float(self.measured["value"])
        return f"{told}, whose {metric} on test queries is {value:.3f}; on evidence it is unknown."

    def describe(self) -> dict[str, Json]:
        """Say which it is, and how good."""
        return {
            "folder": str(self.folder),
            "checksum": self.checksum,
            "metric": self.measured.get("metric"),
            "value": self.measured.get("value"),
        }


def open_labeler(folder: Path) -> Labeler:
    """Read which reader it is.

    Args:
        folder: A finished run of `--num_evidence 0`, or its reader's folder.

    Raises:
        ArtifactError: If there is no whole reader.
        ConfigError: If it reads evidence.
    """
    record = read_record(folder, verify=False)  # its weights are checked when they are loaded
    if record.num_evidence:
        raise ConfigError(
            f"{folder} reads {record.num_evidence} evidence texts a query: pseudo-labels come from "
            "a plain reader, so give a run of train.py --num_evidence 0"
        )
    home = find_reader(folder)
    path = (home.parent if home == folder else folder) / METRICS_FILE
    measured = read_object(path) if path.is_file() else {}
    return Labeler(folder, home, record, measured)


@dataclass(frozen=True)
class PseudoLabels:
    """Labels of texts.

    Attributes:
        labels: By text; of texts that were not asked for this time, too.
        num_read: Texts that were read now.
    """

    labels: Mapping[str, str]
    num_read: int


def label_texts(
    labeler: Labeler, texts: Sequence[str], folder: Path, *, device: str = "auto"
) -> PseudoLabels:
    """Give texts the label that a plain reader decides for; a text fills the task's first input.

    Args:
        labeler: The reader.
        texts: Distinct ones.
        folder: Keeps what it said, for other calls.
        device: What it reads on.

    Raises:
        ArtifactError: If what it said before is damaged.
        ModelError: As `Reader.load`.
    """
    name = labeler.checksum.rpartition(":")[2][:12]
    path = folder / f"{labeler.record.task}-{name}.jsonl"
    known = _read_labels(path)
    missing = [text for text in texts if text not in known]
    logger.info(
        "labeler %s: %d distinct evidence texts of %s, %d to read",
        labeler.folder,
        len(texts),
        labeler.record.task,
        len(missing),
    )
    if missing:
        reader = Reader.load(labeler.home, device=device)
    for start in range(0, len(missing), _KEPT_EVERY):  # what is read stays when it is stopped
        part = missing[start : start + _KEPT_EVERY]
        decided = reader.predict(part, [], progress=True)
        known |= {text: one.label for text, one in zip(part, decided, strict=True)}
        write_lines(path, [{"text": text, "label": label} for text, label in known.items()])
    return PseudoLabels(known, len(missing))


def distinct_evidence(
    runs: Sequence[Sequence[Mapping[str, Any]]], depth: int | None = None
) -> list[str]:
    """Give the texts of all evidence (or of each query's best), each once, in the order met.

    Args:
        runs: The lines of each one's `predictions.jsonl`.
        depth: How many of a query's best; None is all.
    """
    seen = (text for lines in runs for line in lines for text in line["evidence"][:depth])
    return list(dict.fromkeys(str(text["text"]) for text in seen))


def _read_labels(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    try:
        with path.open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        return {row["text"]: row["label"] for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path} is damaged ({error}): delete it and run again") from None
