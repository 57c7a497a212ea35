"""How often the look-up for questions of any kind takes a question for another.

    python benchmarks/near_questions.py train.jsonl test.jsonl

Files are jsonl with `question` or `text`. A thousand of the questions are asked again with small
changes, and 2,000 others are looked up among 100 and among 1,000.
"""

import argparse
import random
import re
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from rapidfuzz import process
from rapidfuzz.distance import Indel, Levenshtein

from pgra.cli import run
from pgra.commands.common import say
from pgra.data.textfile import read_records
from pgra.errors import DataError
from pgra.memory.keys import MAX_DISTANCE, MIN_LIKENESS, normalize_key, plain_key

_THRESHOLDS = (0.8, MIN_LIKENESS, 0.9)
_ASKED, _OTHERS, _SIZES = 1_000, 2_000, (100, 1_000)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    files = parser.parse_args(argv).files
    lines = [record.fields for path in files for record in read_records(path)]
    told = [str(one.get("question", one.get("text", ""))) for one in lines]
    questions = list(dict.fromkeys(text for text in told if text.split()))
    if len(questions) < max(_SIZES) + _OTHERS:
        raise DataError(
            f"there are {len(questions):,} questions: give {max(_SIZES) + _OTHERS:,} or more"
        )
    draw = random.Random(0)
    say(f"{len(questions):,} questions; likeness of at least {_THRESHOLDS} | edit distance")
    for name, change in _changes(draw).items():
        asked = draw.sample(questions, _ASKED)
        pairs = [(one, again) for one in asked if (again := change(one)) != one]
        likeness = [Indel.normalized_similarity(*map(plain_key, pair)) for pair in pairs]
        distance = [Levenshtein.distance(*map(normalize_key, pair)) for pair in pairs]
        _show(name, np.array(likeness), np.array(distance))
    for size in _SIZES:
        mixed = draw.sample(questions, size + _OTHERS)
        near = [
            process.cdist([*map(key, mixed[size:])], [*map(key, mixed[:size])], scorer=scorer)
            for key, scorer in (
                (plain_key, Indel.normalized_similarity),
                (normalize_key, Levenshtein.distance),
            )
        ]
        _show(f"another, of {size:,} in the memory", near[0].max(axis=1), near[1].min(axis=1))
    return 0


def _changes(draw: random.Random) -> Mapping[str, Callable[[str], str]]:
    def typo(text: str) -> str:
        place, letter = draw.randrange(len(text)), draw.choice(string.ascii_lowercase)
        return text[:place] + draw.choice(("", letter, letter + text[place])) + text[place + 1 :]

    def leave_out(text: str) -> str:
        words = text.split()
        del words[draw.randrange(len(words))]
        return " ".join(words)

    return {
        "other case and end": lambda text: f"{text.upper().rstrip(' ?.')} ?",
        "a typo": typo,
        "three typos": lambda text: typo(typo(typo(text))),
        "please": lambda text: f"Please, {text}",
        "what's": lambda text: re.sub(r"^(\w+) is\b", r"\1's", text),
        "a word left out": leave_out,
    }


def _show(name: str, likeness: np.ndarray, distance: np.ndarray) -> None:
    shares = [f"{(likeness >= threshold).mean():.3f}" for threshold in _THRESHOLDS]
    say(f"{name:<32} {' '.join(shares)} | {(distance <= MAX_DISTANCE).mean():.3f}")


if __name__ == "__main__":
    sys.exit(run(main))
