"""A memory's log as a jsonl file, there and back."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from pgra.data.textfile import Record, check_file, read_records
from pgra.errors import DataError
from pgra.io import canonical_json, write_lines
from pgra.memory.events import Event
from pgra.memory.log import FeedbackLog

_FIELDS = {field.name for field in fields(Event)}
_DEFAULTS = {"kind": "write", "feedback": "", "time": ""}


def export_log(log: FeedbackLog, path: Path) -> int:
    """Write every event, one JSON object a line; replayed, they give the same memory.

    Returns:
        How many.
    """
    lines = [asdict(event) for event in log.events()]
    write_lines(path, lines)
    return len(lines)


def read_events(path: Path) -> list[Event]:
    """Read events from a file.

    Args:
        path: jsonl with `key` and `feedback`; `kind`, `time`, `source` and `task` as `Event` has
            them, where they are given.

    Raises:
        DataError: If a line is no event (file and line are named).
    """
    check_file(path, ("jsonl",))
    return [_event(path, record) for record in read_records(path)]


def import_events(log: FeedbackLog, events: Sequence[Event]) -> int:
    """Append events, all or none, in their order.

    An event that the log has already (all fields but its id) is passed over, so that a file may be
    imported twice. What comes later in the log wins, whatever its time says.

    Args:
        log: The memory.
        events: Of `read_events`.

    Returns:
        Events appended.
    """
    known = {_identity(event) for event in log.events()}
    return log.extend(event for event in events if _identity(event) not in known)


def _identity(event: Event) -> str:
    return canonical_json({**asdict(event), "id": 0})


def _event(path: Path, record: Record) -> Event:
    place = f"{path}, line {record.line}"
    values: dict[str, Any] = {**_DEFAULTS, **record.fields}
    unknown = sorted(set(values) - _FIELDS)
    if unknown or "key" not in values:
        what = f"'{unknown[0]}' is no field of an event" if unknown else "it has no key"
        raise DataError(f"{place}: {what}; fields are {', '.join(sorted(_FIELDS - {'id'}))}")
    values.pop("id", None)
    odd = next((name for name, value in values.items() if not isinstance(value, str)), None)
    if odd is not None:
        raise DataError(f"{place}: {odd} is {values[odd]!r}, and must be text")
    try:
        return Event(**values)
    except DataError as error:
        raise DataError(f"{place}: {error}") from None
