"""Five ways to scramble a word (Brown et al. 2020, section 3.9.2; Madaan et al. 2022, 3.3.2)."""

import random
import re
from collections.abc import Callable, Mapping

_SYMBOLS = "!./- "
_FIT = re.compile(r"[a-z]{6,14}")


def can_scramble(word: str) -> bool:
    """Say whether every way changes a word: 6 to 14 letters, of the inner ones two that differ."""
    return bool(_FIT.fullmatch(word)) and len(set(word[2:-2])) > 1 and word != word[::-1]


def scramble(word: str, kind: str, draw: random.Random) -> str:
    """Scramble a word.

    Args:
        word: One that `can_scramble`.
        kind: One of `SCRAMBLES`.
        draw: Gives the randomness.

    Returns:
        A text that is not the word.
    """
    while (changed := SCRAMBLES[kind](word, draw)) == word:
        pass
    return changed


def _cycle(word: str, draw: random.Random) -> str:
    place = draw.randrange(1, len(word))
    return word[place:] + word[:place]


def _shuffle_inside(word: str, draw: random.Random, kept: int) -> str:
    inner = list(word[kept:-kept])
    draw.shuffle(inner)
    return word[:kept] + "".join(inner) + word[-kept:]


def _insert_symbols(word: str, draw: random.Random) -> str:
    return "".join(letter + draw.choice(_SYMBOLS) for letter in word[:-1]) + word[-1]


SCRAMBLES: Mapping[str, Callable[[str, random.Random], str]] = {
    "cyc": _cycle,
    "anag1": lambda word, draw: _shuffle_inside(word, draw, 1),
    "anag2": lambda word, draw: _shuffle_inside(word, draw, 2),
    "randsym": _insert_symbols,
    "rev": lambda word, _: word[::-1],
}
