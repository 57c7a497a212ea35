"""How often the look-up for questions of any kind takes a question for another.

    python benchmarks/near_questions.py train.jsonl test.jsonl

Files are jsonl with `question` or `text`. A thousand of the questions are asked again with small
changes, and 2,000 others are looked up among 100 and among 1,000 (`--quick`: a tenth of each).
"""

import argparse
import random
import re
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from measuring import parse_flags, write_figures
from rapidfuzz import process
from rapidfuzz.distance import Indel, Levenshtein

from pgra.cli import run
from pgra.commands.common import say
from pgra.data.read import read_records
from pgra.errors import DataError
from pgra.memory.lookup import MAX_DISTANCE, MIN_LIKENESS, normalize_key, plain_key

_THRESHOLDS = (0.8, MIN_LIKENESS, 0.9)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--quick", action="store_true", help="a tenth of the questions")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parse_flags(parser, argv)
    num_asked, others, sizes = (100, 200, (10, 100)) if args.quick else (1_000, 2_000, (100, 1_000))
    rows = [record.fields for path in args.files for record in read_records(path)]
    texts = [str(row.get("question", row.get("text", ""))) for row in rows]
    questions = list(dict.fromkeys(text for text in texts if text.split()))
    if len(questions) < max(sizes) + others:
        raise DataError(
            f"there are {len(questions):,} questions: give {max(sizes) + others:,} or more"
        )
    draw = random.Random(0)
    say(f"{len(questions):,} questions; likeness of at least {_THRESHOLDS} | edit distance")
    figures: dict[str, float] = {}
    for name, change in _changes(draw).items():
        pairs = [
            (text, again)
            for text in draw.sample(questions, num_asked)
            if (again := change(text)) != text
        ]
        likeness = [Indel.normalized_similarity(*map(plain_key, pair)) for pair in pairs]
        distance = [Levenshtein.distance(*map(normalize_key, pair)) for pair in pairs]
        figures |= _show(name, np.array(likeness), np.array(distance))
    for size in sizes:
        mixed = draw.sample(questions, size + others)
        near = [
            process.cdist([*map(key, mixed[size:])], [*map(key, mixed[:size])], scorer=scorer)
            for key, scorer in (
                (plain_key, Indel.normalized_similarity),
                (normalize_key, Levenshtein.distance),
            )
        ]
        name = f"another, of {size:,} in the memory"
        figures |= _show(name, near[0].max(axis=1), near[1].min(axis=1))
    write_figures(args.json, figures)
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


def _show(name: str, likeness: np.ndarray, distance: np.ndarray) -> dict[str, float]:
    """Print the shares that pass; the ones at the look-ups' own gates are the figures."""
    shares = [float((likeness >= threshold).mean()) for threshold in _THRESHOLDS]
    released = float((distance <= MAX_DISTANCE).mean())
    say(f"{name:<32} {' '.join(f'{share:.3f}' for share in shares)} | {released:.3f}")
    return {name: shares[_THRESHOLDS.index(MIN_LIKENESS)], f"{name}, released rule": released}


if __name__ == "__main__":
    sys.exit(run(main))
