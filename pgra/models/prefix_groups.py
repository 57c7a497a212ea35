"""Which prompts begin alike: what they share is then read once (`pgra.models.reading`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Self

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
    """Group prompts so that reading each group's beginning once saves most.

    In the order of their tokens, prompts that begin alike are neighbours. The most alike are put
    together first; then groups, where all of them together save more than each for itself. So one
    odd prompt takes nothing from the others.

    Args:
        prompts: Token ids, none empty.
        least: Fewest tokens that are shared.

    Returns:
        Each prompt in one group; those that share nothing with others in the last one.
    """
    order = sorted(range(len(prompts)), key=lambda row: list(prompts[row]))
    # By their first and by their last place.
    spans = {place: _Span.of(place, len(prompts[row])) for place, row in enumerate(order)}
    shared = [_joint(prompts[a], prompts[b]) for a, b in pairwise(order)]
    for place in sorted(range(len(shared)), key=lambda i: (-shared[i], i)):
        left, right = spans[place], spans[place + 1]
        longest = max(left.longest, right.longest)
        is_long = shared[place] >= max(least, longest / _LEAST_PART)
        joined = left.join(right, shared[place] if is_long else 0)
        spans[joined.first] = spans[joined.last] = joined
    parts = spans[0].parts if order else []
    found = [(shared, order[first : last + 1]) for first, last, shared in parts]
    alone = sorted(rows[0] for _, rows in found if len(rows) == 1)
    groups = [PrefixGroup(shared, rows) for shared, rows in found if len(rows) > 1]
    return [*groups, PrefixGroup(0, alone)] if alone else groups


class _Part(NamedTuple):
    first: int
    last: int
    num_shared: int


@dataclass(frozen=True)
class _Span:
    """Neighbours, and the best groups of them that were found.

    Attributes:
        first: The first's place in the order.
        last: The last's.
        parts: Groups.
        saved: Tokens that need not be read.
        longest: Tokens of the longest prompt.
    """

    first: int
    last: int
    parts: list[_Part]
    saved: int
    longest: int

    @classmethod
    def of(cls, place: int, length: int) -> Self:
        return cls(place, place, [_Part(place, place, 0)], 0, length)

    def join(self, right: "_Span", shared: int) -> "_Span":
        """Put neighbours together, who all begin with so many tokens; 0 if that is too few."""
        parts, saved = [*self.parts, *right.parts], self.saved + right.saved
        together = (right.last - self.first) * shared
        if shared and together >= saved:
            parts, saved = [_Part(self.first, right.last, shared)], together
        return _Span(self.first, right.last, parts, saved, max(self.longest, right.longest))


def _joint(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens that two prompts begin with alike, but for each one's last."""
    most = min(len(one), len(other)) - 1
    return next((i for i in range(most) if one[i] != other[i]), most)
