"""What a memory's log holds: who corrected what, when. One event, one record of text.

A record is the checksum of its JSON, the JSON on one line, and a line break, so that a record can
be found and checked in any bytes that hold it (`pgra.memory.salvage`).
"""

import datetime
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

import xxhash

from pgra.data.textfile import is_utf8
from pgra.errors import DataError
from pgra.io import canonical_json

KINDS = ("write", "correct", "forget")
MAX_KEY_CHARS = 10_000
MAX_FEEDBACK_CHARS = 2_000
MAX_NAME_CHARS = 200
"""Of a source and of a task. With these limits a record is shorter than a page of the database."""
_CHECKSUM_CHARS = 32
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # all but tab and line breaks
_LIMITS = {
    "key": MAX_KEY_CHARS,
    "feedback": MAX_FEEDBACK_CHARS,
    "source": MAX_NAME_CHARS,
    "task": MAX_NAME_CHARS,
    "time": MAX_NAME_CHARS,
}


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of the log. An event is of a slot: a task and a key.

    Attributes:
        kind: "write" puts a feedback in a slot, "correct" replaces the one there, "forget" empties
            the slot.
        key: The question that was misunderstood, as it was asked.
        feedback: What the user said of it; "" for a "forget".
        time: UTC, ISO 8601; "" where a file that was read does not tell.
        source: Who said it, or what: "user", "stream", a name.
        task: Which questions it is for; "" for all that share the memory.
        id: Its place in the log, from 1; 0 before it is in one.
    """

    kind: str
    key: str
    feedback: str
    time: str
    source: str = "user"
    task: str = ""
    id: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be kept or shown.

        Raises:
            DataError: If a text is empty, too long, or holds characters that are no text.
        """
        if self.kind not in KINDS:
            raise DataError(
                f"an event's kind is {self.kind!r}: it must be one of {', '.join(KINDS)}"
            )
        for name, most in _LIMITS.items():
            _check_text(name, getattr(self, name), most)
        if not self.key.strip():
            raise DataError("the key is empty: give the question that was misunderstood")
        if self.kind != "forget" and not self.feedback.strip():
            raise DataError("the feedback is empty: say what was meant, or use forget")


@dataclass(frozen=True)
class Entry:
    """A feedback that is in the memory now.

    Attributes:
        id: Of the event that put it there.
        key: The question that was misunderstood.
        feedback: What the user said of it.
        time: UTC, ISO 8601.
        source: Who said it.
        task: Which questions it is for.
    """

    id: int
    key: str
    feedback: str
    time: str
    source: str
    task: str


def _check_text(name: str, text: str, most: int) -> None:
    if len(text) > most:
        raise DataError(
            f"the {name} has {len(text):,} characters, and may have {most:,}: shorten it"
        )
    odd = _CONTROL.search(text)
    if odd is not None or not is_utf8(text):
        told = (
            "half of a surrogate pair" if odd is None else f"the control character {odd.group()!a}"
        )
        raise DataError(f"the {name} holds {told}: give plain text")


def now() -> str:
    """Give the time as events tell it: UTC, to the microsecond."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")


def pack(event: Event) -> bytes:
    """Give an event's record."""
    body = canonical_json(asdict(event)).encode()
    return _checksum(body) + body + b"\n"


def unpack(record: bytes) -> Event | None:
    """Read a record back; None if it is damaged."""
    body = record[_CHECKSUM_CHARS:].rstrip(b"\n")
    if _checksum(body) != record[:_CHECKSUM_CHARS]:
        return None
    return Event(**json.loads(body))


def _checksum(body: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(body).encode()


def entry_of(event: Event) -> Entry:
    """Give what a "write" or a "correct" puts into the memory."""
    return Entry(**{field.name: getattr(event, field.name) for field in fields(Entry)})


def replay(events: Iterable[Event]) -> list[Entry]:
    """Give what is in the memory after these events, the oldest first.

    Args:
        events: In the order of the log. The later event of a slot wins.
    """
    slots: dict[tuple[str, str], Entry] = {}
    for event in events:
        slots.pop((event.task, event.key), None)
        if event.kind != "forget":
            slots[event.task, event.key] = entry_of(event)
    return list(slots.values())
