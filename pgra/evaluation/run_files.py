"""The files of a finished run, read with checks: damage is told by file, with the way out."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pgra.errors import ArtifactError
from pgra.evaluation.metrics import RIGHT, WRONG
from pgra.io import digest

_SIDES = (RIGHT, WRONG)
_TEXT = "text"


@dataclass(frozen=True)
class Decisions:
    """What a run decided, without evidence and probabilities.

    What was written freely is right or wrong: its labels are these two, and all should be right.
    Where it is neither (BLEU), all labels are "text", and nothing is decided.

    Attributes:
        labels: The true label of each example.
        predicted: The decided one, in the same order.
        names: The task's labels.
        examples: Digest of ids, texts and true labels, in order: equal for one test set only.
    """

    labels: Sequence[str]
    predicted: Sequence[str]
    names: Sequence[str]
    examples: str

    @property
    def correct(self) -> list[bool]:
        """Say of each example whether it was decided rightly."""
        return [a == b for a, b in zip(self.labels, self.predicted, strict=True)]


def read_decisions(path: Path) -> Decisions:
    """Read what `predictions.jsonl` says was decided.

    Raises:
        ArtifactError: If it is missing or damaged.
    """
    labels, predicted, examples = [], [], []
    names: dict[str, None] = {}
    for number, line in enumerate(read_lines(path), 1):
        try:
            label, decided, own = _decided(line)
            labels.append(label)
            predicted.append(decided)
            examples.append([line["id"], line.get("text"), line["label"]])
            names.update(dict.fromkeys(own))
        except KeyError as error:
            raise damaged(path, f"line {number} has no {error}") from None
    names.update(dict.fromkeys(sorted({*labels, *predicted})))
    return Decisions(labels, predicted, list(names), digest(examples))


def _decided(line: dict[str, Any]) -> tuple[str, str, Sequence[str]]:
    """Give a line's true label, its decided one, and labels that it names."""
    is_right = line.get("is_right")
    if is_right is not None:
        return RIGHT, RIGHT if is_right else WRONG, _SIDES
    if "answers" in line:
        return _TEXT, _TEXT, (_TEXT,)
    return str(line["label"]), str(line["prediction"]), tuple(line.get("scores") or ())


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read an object a line.

    Raises:
        ArtifactError: If the file is missing, or a line is no object.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                line = json.loads(text)
                if not isinstance(line, dict):
                    raise damaged(path, f"line {number} is no object")
                yield line
    except (OSError, ValueError) as error:
        raise damaged(path, error) from None


def read_optional(path: Path) -> dict[str, Any]:
    """Read a file of one object; an empty one if there is no file.

    Raises:
        ArtifactError: If it is damaged.
    """
    return read_object(path) if path.is_file() else {}


def read_object(path: Path) -> dict[str, Any]:
    """Read a file of one object.

    Raises:
        ArtifactError: If it is missing or damaged.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged(path, error) from None
    if not isinstance(values, dict):
        raise damaged(path, f"a {type(values).__name__}, not an object")
    return values


def damaged(path: Path, why: object) -> ArtifactError:
    """Word that a run's file is not what it should be."""
    said = f"no {why}" if isinstance(why, KeyError) else why
    return ArtifactError(
        f"{path} is damaged ({said}): delete {path.parent} and run its command again, "
        "or give another folder"
    )
