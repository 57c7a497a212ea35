"""Texts on a command line: what `pgra search` and `pgra rerank` look up."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from pgra.data.textfile import is_utf8
from pgra.errors import ConfigError


@dataclass(kw_only=True)
class TextArguments:
    """What is looked up."""

    text: list[str] = field(
        default_factory=list,
        metadata={"help": "One text or several, each in quotes; they may also stand first, bare."},
    )

    def __post_init__(self) -> None:
        """Refuse a text with nothing in it, or that is no text."""
        if not all(text.strip() for text in self.text):
            raise ConfigError("--text holds an empty text: give words to search with")
        for text in self.text:
            if not is_utf8(text):
                raise ConfigError(f"--text {text!a} holds a NUL or bytes that are not UTF-8")


def name_leading_texts(argv: Sequence[str] | None) -> list[str]:
    """Put --text before texts that stand first, so that `pgra search "a sentence"` works."""
    words = list(sys.argv[1:] if argv is None else argv)
    return ["--text", *words] if words and not words[0].startswith("-") else words
