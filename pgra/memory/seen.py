"""What a fine-tuned LM learned with, kept beside its weights: a stream with any is refused."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from pgra.errors import ArtifactError, DataError
from pgra.io import write_json
from pgra.memory.families import Family
from pgra.memory.keys import normalize_key
from pgra.memory.lessons import word_of
from pgra.memory.steps import Step

SEEN_FILE = "memory_training.json"


@dataclass(frozen=True)
class Seen:
    """What was learned with.

    Attributes:
        words: In lower case, unscrambled.
        forms: Questions without their words, as keys are compared.
    """

    words: Collection[str]
    forms: Collection[str]

    def write(self, folder: Path) -> None:
        """Write it beside an LM's weights."""
        write_json(
            folder / SEEN_FILE, {"words": sorted(self.words), "questions": sorted(self.forms)}
        )


def read_seen(lm: str) -> Seen | None:
    """Read what an LM was fine-tuned with; None for one that is no folder with such a record.

    Raises:
        ArtifactError: If the record is damaged.
    """
    path = Path(lm) / SEEN_FILE
    if not path.is_file():
        return None
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return Seen(frozenset(told["words"]), frozenset(told["questions"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{path} is damaged ({error}): run pgra memory finetune again, into another folder"
        ) from None


def check_unseen(seen: Seen, steps: Sequence[Step], family: Family) -> None:
    """Refuse a stream that asks what the LM learned with.

    Raises:
        DataError: If a word or a question of it is among that.
    """
    for step in steps:
        word, form = word_of(step, family), normalize_key(step.question)
        if word in seen.words or form in seen.forms:
            what = f"word '{word}'" if word in seen.words else f"question '{form}'"
            raise DataError(
                f"step {step.id} asks '{step.question}', and the LM was fine-tuned with the "
                f"{what}: fine-tune it with --held_out naming this stream, or ask other questions"
            )
