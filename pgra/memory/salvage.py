"""What is left of a damaged memory, read into a new one; and what is not."""

import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path

from pgra.errors import ArtifactError, DataError
from pgra.io import write_aside
from pgra.memory.events import Event, unpack
from pgra.memory.log import FeedbackLog

_RECORD = re.compile(rb"[0-9a-f]{32}\{[^\n]{1,65536}\}\n")


@dataclass(frozen=True)
class Salvaged:
    """What was found in a damaged file.

    Attributes:
        kept: Events that were read whole.
        lost: Ids of those that were not, as far as the ids beside them tell: what was written after
            the last one found is not known of.
    """

    kept: int
    lost: list[int]


def salvage(damaged: Path, output: Path) -> Salvaged:
    """Read what is left of a damaged memory into a new one.

    The file's structure is not asked: whole records are looked for in all its bytes, and in those
    of the write-ahead log beside it; checksums tell what is whole. The damaged file stays as it is.

    Args:
        damaged: The file.
        output: The new memory, which must not be there.

    Raises:
        DataError: If there is no such file, or nothing in it can be read.
        ArtifactError: If the new one is there already, or cannot be written.
    """
    if not damaged.is_file():
        raise DataError(f"{damaged} does not exist: name the damaged memory")
    if output.exists():
        raise ArtifactError(f"{output} is there already: name a new file for what is salvaged")
    found: dict[int, Event] = {}
    for path in (damaged, damaged.with_name(f"{damaged.name}-wal")):
        if path.is_file() and path.stat().st_size:
            # What stands first wins: a write-ahead log may end in frames that never counted.
            found = _records_in(path) | found
    if not found:
        raise DataError(f"nothing can be read from {damaged}: no whole record is left in it")
    _write(output, [found[number] for number in sorted(found)])
    return Salvaged(len(found), [i for i in range(1, max(found)) if i not in found])


def _write(output: Path, events: list[Event]) -> None:
    with write_aside(output) as aside:
        try:
            with FeedbackLog.open(aside) as log:
                log.extend(events)
        finally:
            for ending in ("-wal", "-shm"):
                aside.with_name(aside.name + ending).unlink(missing_ok=True)


def _records_in(path: Path) -> dict[int, Event]:
    found: dict[int, Event] = {}
    handle = os.open(path, os.O_RDONLY)
    try:
        with mmap.mmap(handle, 0, access=mmap.ACCESS_READ) as data:
            for match in _RECORD.finditer(data):
                event = unpack(match.group())
                if event is not None:
                    found.setdefault(event.id, event)
    finally:
        os.close(handle)
    return found
