"""Pseudo-labels of evidence: what a plain reader of the task says of each text alone.

    FOLDER/TASK-CHECKSUM.jsonl   a text and its labels' probabilities a line

No text is read twice: not where several queries, runs or calls share it. A labeler is known by its
folder's checksums, so that another one's labels are never mixed in.
"""

import json
import logging
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pgra.data.corpus import Corpus
from pgra.errors import ArtifactError, ConfigError
from pgra.evaluation.results import METRICS_FILE
from pgra.evaluation.run_files import read_object
from pgra.io import file_checksum, write_lines
from pgra.reader.record import RECORD_FILE, ReaderRecord, find_reader, read_record
from pgra.reader.trained import Reader
from pgra.types import Json

logger = logging.getLogger(__name__)

SAMPLE = 1000  # passages of a corpus: a share then has a standard error of 1.6 points at most
_SEED = 0
_KEPT_EVERY = 10_000
_LEAST = sys.float_info.min  # a probability may be 0 in float32


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
        scores: Probability by label, by text; of texts that were not asked for this time, too.
        num_read: Texts that were read now.
        sample: Passages of the corpus that the labeler is centred at; none: the paper's labels,
            those of the highest probability.
    """

    scores: Mapping[str, Mapping[str, float]]
    num_read: int
    sample: Sequence[str] = ()

    @cached_property
    def medians(self) -> Mapping[str, float]:
        """Give the median of each label's log-probability over the sample; empty without one."""
        if not self.sample:
            return {}
        logs = [_logs(self.scores[text]) for text in self.sample]
        return {label: float(np.median([one[label] for one in logs])) for label in logs[0]}

    @cached_property
    def labels(self) -> Mapping[str, str]:
        """Give each text's label: of the highest log-probability above its median, if centred.

        With two labels half of the sample then has each: the threshold is the median odds. Ties go
        to the task's first label.
        """
        return {text: self._label(scores, self.medians) for text, scores in self.scores.items()}

    def _label(self, scores: Mapping[str, float], medians: Mapping[str, float]) -> str:
        logs = _logs(scores)
        return max(logs, key=lambda label: logs[label] - medians.get(label, 0.0))

    def shares(self, texts: Sequence[str], *, is_centred: bool = True) -> dict[str, Json]:
        """Give the share of texts by label, in the labeler's order of labels.

        Args:
            texts: Labelled ones.
            is_centred: Whether as centred; else by the highest probability.
        """
        medians = self.medians if is_centred else {}
        said = Counter(self._label(self.scores[text], medians) for text in texts)
        return {label: said[label] / len(texts) for label in self.scores[texts[0]]}

    def describe(self, texts: Sequence[str]) -> dict[str, Json]:
        """Tell how labels were made, and the labels' shares before and after centring.

        Args:
            texts: The distinct evidence.
        """
        told: dict[str, Json] = {"is_centred": bool(self.sample)}
        sets = {"evidence": texts, **({"corpus": self.sample} if self.sample else {})}
        for name, own in sets.items():
            told[f"{name}_texts"] = len(own)
            told[f"{name}_labels_uncentred"] = self.shares(own, is_centred=False)
            if self.sample:
                told[f"{name}_labels"] = self.shares(own)
        return {**told, **({"medians": dict(self.medians)} if self.sample else {})}

    def note(self, task: str, texts: Sequence[str]) -> str:
        """Word the same for a reader of the scores."""
        before = _percents(self.shares(texts, is_centred=False))
        if not self.sample:
            return (
                f"{task}: the labeler is not centred (the paper's way); of the evidence {before}."
            )
        return (
            f"{task}: the labeler is centred at its medians over {len(self.sample)} passages of "
            f"the corpus: there {_percents(self.shares(self.sample, is_centred=False))} before, "
            f"{_percents(self.shares(self.sample))} after; of the evidence {before} before, "
            f"{_percents(self.shares(texts))} after."
        )


def _logs(scores: Mapping[str, float]) -> dict[str, float]:
    return {label: math.log(max(value, _LEAST)) for label, value in scores.items()}


def _percents(shares: Mapping[str, Json]) -> str:
    return ", ".join(f"{label} {100 * float(str(value)):.1f} %" for label, value in shares.items())


def sample_corpora(corpora: Sequence[Corpus], size: int = SAMPLE) -> list[str]:
    """Draw the passages that a labeler is centred at; the same ones each time.

    Args:
        corpora: As many of each.
        size: How many of each; all, if it has fewer.
    """
    drawn = []
    for corpus in corpora:
        rows = np.random.default_rng(_SEED).permutation(len(corpus))[:size]
        drawn += corpus.texts(np.sort(rows))
    return list(dict.fromkeys(drawn))


def label_texts(
    labeler: Labeler,
    texts: Sequence[str],
    folder: Path,
    *,
    sample: Sequence[str] = (),
    device: str = "auto",
) -> PseudoLabels:
    """Give texts the label that a plain reader decides for; a text fills the task's first input.

    Args:
        labeler: The reader.
        texts: Distinct ones.
        folder: Keeps what it said, for other calls.
        sample: Distinct passages that it is centred at; none: it is not.
        device: What it reads on.

    Raises:
        ArtifactError: If what it said before is damaged.
        ModelError: As `Reader.load`.
    """
    name = labeler.checksum.rpartition(":")[2][:12]
    path = folder / f"{labeler.record.task}-{name}.jsonl"
    known = _read_scores(path)
    missing = [text for text in dict.fromkeys([*texts, *sample]) if text not in known]
    logger.info(
        "labeler %s: %d distinct evidence texts of %s and %d passages to centre it, %d to read",
        labeler.folder,
        len(texts),
        labeler.record.task,
        len(sample),
        len(missing),
    )
    if missing:
        reader = Reader.load(labeler.home, device=device)
    for start in range(0, len(missing), _KEPT_EVERY):  # what is read stays when it is stopped
        part = missing[start : start + _KEPT_EVERY]
        decided = reader.predict(part, [], progress=True)
        known |= {text: dict(one.scores) for text, one in zip(part, decided, strict=True)}
        write_lines(path, [{"text": text, "scores": scores} for text, scores in known.items()])
    return PseudoLabels(known, len(missing), sample)


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


def _read_scores(path: Path) -> dict[str, dict[str, float]]:
    if not path.is_file():
        return {}
    try:
        with path.open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        # An older version kept labels alone, which cannot be centred: such texts are read again.
        scored = [row for row in rows if "scores" in row]
        return {row["text"]: {k: float(v) for k, v in row["scores"].items()} for row in scored}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{path} is damaged ({error}): delete it and run again") from None
