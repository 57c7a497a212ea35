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
        distance: Edit distance of the normalised keys.
        entry: The entry.
    """

    distance: int
    entry: Entry


def find_near(log: FeedbackLog, entry: Entry, *, most: int = 3) -> list[Near]:
    """Give the entries of the same task that an entry collides with, the nearest first.

    Args:
        log: The memory, which the entry is in.
        entry: The new one.
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
        found = find_collisions([one.key, entry.key], [one.feedback, entry.feedback])
        near += [Near(pair.distance, one) for pair in found]
    return sorted(near, key=lambda told: (told.distance, -told.entry.id))[:most]
