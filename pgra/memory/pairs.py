"""Questions with the feedback each got: what look-ups are trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pgra.data.textfile import Record, check_file, read_records
from pgra.errors import DataError
from pgra.memory.events import replay
from pgra.memory.exchange import read_events
from pgra.memory.families import Family
from pgra.memory.log import FeedbackLog
from pgra.memory.steps import read_stream

_MARK = "clarification:"  # what the released streams begin a feedback with


@dataclass(frozen=True)
class Pair:
    """A question and the feedback it got.

    Attributes:
        question: As it was asked.
        feedback: What a user said of it.
        kind: The type that was meant; "" where that is not known.
    """

    question: str
    feedback: str
    kind: str = ""


def read_pairs(path: Path, family: Family | None = None) -> list[Pair]:
    """Read pairs.

    Args:
        path: A memory (.sqlite), a log that `pgra memory export` wrote, or a jsonl file with
            `question` and `feedback`, and perhaps `type`; with a family a stream of it.
        family: Whose stream the file is.

    Raises:
        DataError: If there is no pair, or a line lacks one of both.
        ArtifactError: If a memory cannot be read.
    """
    pairs = _from_stream(path, family) if family is not None else _from_file(path)
    if not pairs:
        raise DataError(f"{path} holds no question with a feedback: there is nothing to learn")
    return pairs


def _from_stream(path: Path, family: Family) -> list[Pair]:
    return [Pair(one.question, one.feedback, one.kind) for one in read_stream(path, family)]


def _from_file(path: Path) -> list[Pair]:
    if check_file(path, ("jsonl", "sqlite")) == "sqlite":
        with FeedbackLog.open(path, is_writable=False) as log:
            return [Pair(entry.key, entry.feedback) for entry in log.entries()]
    records = list(read_records(path))
    if records and {"key", "kind"} <= set(records[0].fields):
        return [Pair(entry.key, entry.feedback) for entry in replay(read_events(path))]
    return [_pair(path, record) for record in records]


def _pair(path: Path, record: Record) -> Pair:
    told = record.fields
    for name in ("question", "feedback"):
        if not isinstance(told.get(name), str) or not str(told[name]).strip():
            raise DataError(
                f"{path}, line {record.line}: {name} is {told.get(name)!r}, and must be text: each "
                "line has a question and the feedback it got"
            )
    feedback = str(told["feedback"]).removeprefix(_MARK).strip()
    return Pair(str(told["question"]), feedback, str(told.get("type") or ""))


def kinds_of(pairs: Sequence[Pair]) -> list[str]:
    """Give the type of each pair.

    Raises:
        DataError: If one has none, or all have the same.
    """
    kinds = [pair.kind for pair in pairs]
    if "" in kinds:
        bare = pairs[kinds.index("")].question
        raise DataError(
            f"the question '{bare[:80]}' has no type: give each line one, or --target feedback"
        )
    if len(set(kinds)) < 2:
        raise DataError(f"all {len(kinds)} questions are of type '{kinds[0]}': give some of others")
    return kinds
