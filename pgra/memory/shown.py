"""Kept texts as people see them: in full, with nothing in them that could hide or move a part.

What a user typed, or an LM wrote, may hold characters that are not seen: those that turn the
direction of text around, have no width, or steer a terminal. They are told by their numbers.
"""

import json
import unicodedata

from pgra.memory.collisions import Near
from pgra.memory.events import Entry, Event

_UNSEEN = {"Cc", "Cf", "Co", "Cs", "Zl", "Zp"}
_JOINERS = "\u200c\u200d"  # Hindi and Punjabi are written with them


def visible(text: str) -> str:
    """Give a text with a number for each character that is not seen; line breaks and tabs stay."""
    return "".join(_number(char) if _is_unseen(char) else char for char in text)


def _is_unseen(char: str) -> bool:
    return char not in "\n\t" and char not in _JOINERS and unicodedata.category(char) in _UNSEEN


def _number(char: str) -> str:
    code = ord(char)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def quoted(text: str) -> str:
    """Give a text in quotes on one line, so that it is seen where it ends."""
    return visible(json.dumps(text, ensure_ascii=False))


def show_entry(entry: Entry | Event) -> str:
    """Give a key and its feedback in full, each in quotes."""
    return f"{quoted(entry.key)} -> {quoted(entry.feedback)}"


def show_near(near: Near) -> str:
    """Word that an entry has a near key and another feedback."""
    return (
        f"note: entry {near.entry.id} has a key at edit distance {near.distance} and another "
        f"feedback, so that one may be found for the other: {show_entry(near.entry)}"
    )
