"""Which prompts begin alike: what they share is then read once (`pgra.models.reading`)."""

from collections.abc import Sequence
from dataclasses import dataclass

LEAST_SHARED = 32
"""Fewer tokens are not worth a call of their own."""
_LEAST_PART = 4  # of a prompt: less than a quarter does not pay for batches that are cut smaller


@dataclass(frozen=True)
class PrefixGroup:
    """Prompts that begin with the same tokens.

    Attributes:
        num_shared: How many tokens; each prompt has at least one more. 0 where nothing is shared.
        rows: Which prompts.
    """

    num_shared: int
    rows: list[int]


def group_by_prefix(
    prompts: Sequence[Sequence[int]], *, least: int = LEAST_SHARED
) -> list[PrefixGroup]:
    """Group prompts so that reading each group's beginning once saves much.

    In the order of their tokens, those that begin alike are neighbours. A prompt joins its
    neighbours unless what all then share shrinks by more than the prompt adds: one odd prompt
    takes nothing from the others.

    Args:
        prompts: Token ids, none empty.
        least: Fewest tokens that are shared.

    Returns:
        Each prompt in one group; those that share nothing with others in the last one.
    """
    order = sorted(range(len(prompts)), key=lambda row: list(prompts[row]))
    groups: list[PrefixGroup] = []
    for row in order:
        shared = _joint(prompts, groups[-1], row) if groups else 0
        is_long = shared >= max(least, len(prompts[row]) / _LEAST_PART)
        if is_long and _saves_more(groups[-1], shared):
            groups[-1] = PrefixGroup(shared, [*groups[-1].rows, row])
        else:
            groups.append(PrefixGroup(len(prompts[row]) - 1, [row]))
    alone = sorted(group.rows[0] for group in groups if len(group.rows) == 1)
    joined = [group for group in groups if len(group.rows) > 1]
    return [*joined, PrefixGroup(0, alone)] if alone else joined


def _joint(prompts: Sequence[Sequence[int]], group: PrefixGroup, row: int) -> int:
    """Count the tokens that a group would share with one more prompt."""
    one, other = prompts[group.rows[-1]], prompts[row]
    most = min(group.num_shared, len(other) - 1)
    return next((i for i in range(most) if one[i] != other[i]), most)


def _saves_more(group: PrefixGroup, shared: int) -> bool:
    """Say whether one more prompt saves more than the others lose."""
    count = len(group.rows)
    return count * shared > (count - 1) * group.num_shared
