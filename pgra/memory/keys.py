"""Keys as the paper's closest memory compares them, and keys that are near but mean otherwise."""

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from rapidfuzz.distance import Indel, Levenshtein

MAX_DISTANCE = 5
"""The release accepts a key at an edit distance of less than 6."""
MIN_LIKENESS = 0.85
"""Texts at least so alike are taken for the same; `docs/memory.md` tells what that lets through."""
_END_MARKS = " ?.!"
_SLOT = re.compile(r"<.*>", re.DOTALL)  # from the first < to the last >, as the release has it
_DROPPED = str.maketrans("", "", string.punctuation)


def strip_slot(question: str) -> str:
    """Take out what stands in <...>: the word that a question is about."""
    return " ".join(_SLOT.sub(" ", question).split())


def normalize_key(question: str, *, is_whole: bool = False) -> str:
    """Give a question as edit distance compares it (Madaan et al. 2022, the release's memory).

    What stands in <...> and punctuation are dropped, letters are lower-cased, spaces collapse.

    Args:
        question: As it was asked.
        is_whole: Whether what stands in <...> stays: a review's <br> opens no slot.
    """
    told = question if is_whole else _SLOT.sub(" ", question)
    return " ".join(told.lower().translate(_DROPPED).split())


def plain_key(question: str) -> str:
    """Give a question as people may ask it again: any case, other spaces, no mark at its end."""
    told = " ".join(question.casefold().split())
    return told.rstrip(_END_MARKS) or told


@dataclass(frozen=True)
class Collision:
    """Two near keys whose feedback is not the same: "what is like" and "what is unlike".

    Attributes:
        first: Place of one in what was given.
        second: Place of the other, which is larger.
        distance: Edit distance of the keys as they are compared.
    """

    first: int
    second: int
    distance: int


def find_collisions(
    keys: Sequence[str], meanings: Sequence[str], *, is_relative: bool = False
) -> list[Collision]:
    """Find pairs of keys that look-up by edit distance would take for each other, wrongly.

    Args:
        keys: Questions (n,).
        meanings: What each is meant as: its feedback, or its type.
        is_relative: Whether the edit distance is held against the keys' lengths, as among questions
            of any kind; else the release's rule decides.

    Returns:
        Pairs of different normalised keys with different meanings, and those of one normalised key
        with different meanings (distance 0), in the order of keys. A pair of normalised keys is
        told once, with the last place of each, for the newest is what a look-up would give.
    """
    compared = plain_key if is_relative else normalize_key
    latest = {(compared(key), meanings[i]): i for i, key in enumerate(keys)}
    distinct = sorted(latest.items(), key=lambda item: item[1])
    found = []
    for (mine, first), (theirs, second) in combinations(distinct, 2):
        if mine[1] == theirs[1]:
            continue
        pair = (mine[0], theirs[0])
        if _is_alike(*pair) if is_relative else _is_within(*pair):
            found.append(Collision(first, second, Levenshtein.distance(*pair)))
    return found


def _is_alike(one: str, other: str) -> bool:
    return Indel.normalized_similarity(one, other, score_cutoff=MIN_LIKENESS) >= MIN_LIKENESS


def _is_within(one: str, other: str) -> bool:
    return Levenshtein.distance(one, other, score_cutoff=MAX_DISTANCE) <= MAX_DISTANCE
