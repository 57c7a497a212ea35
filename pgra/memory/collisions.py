"""Entries that a look-up may take for a new one, though they mean something else."""

from dataclasses import dataclass

from pgra.memory.events import Entry
from pgra.memory.keys import find_collisions
from pgra.memory.log import FeedbackLog

_COMPARED = 10_000  # entries; of larger memories `pgra memory list --collisions` tells


@dataclass(frozen=True)
class Near:
    """An entry of a near key and another feedback.

    Attributes:
        distance: Edit distance of the keys as they are compared.
        entry: The entry.
    """

    distance: int
    entry: Entry


def find_near(log: FeedbackLog, entry: Entry, *, is_relative: bool, most: int = 3) -> list[Near]:
    """Give the entries of the same task that an entry collides with, the nearest first.

    Args:
        log: The memory, which the entry is in.
        entry: The new one.
        is_relative: As `find_collisions` has it.
        most: How many are told.

    Returns:
        None of a memory of more than 10,000 entries.
    """
    if len(log) > _COMPARED:
        return []
    near = []
    for one in log.entries():
        if one.id == entry.id or one.task != entry.task:
            continue
        meanings = [one.feedback, entry.feedback]
        found = find_collisions([one.key, entry.key], meanings, is_relative=is_relative)
        near += [Near(pair.distance, one) for pair in found]
    return sorted(near, key=lambda told: (told.distance, -told.entry.id))[:most]
