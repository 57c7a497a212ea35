"""How long a memory takes to open and to look up, with up to a hundred thousand entries.

    python benchmarks/memory.py --quick
    python benchmarks/memory.py --sizes 10000 100000 --json memory.json

Vectors are random directions, each question near one of the keys; they stand for an encoder, whose
own time is not in the figures. A durable write is one that is on the disk when it returns; BM25
is asked after each write, so that it has something to take in.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from measuring import parse_flags, positive, shared_parser, show_figures, write_figures

from pgra.arrays import Vectors
from pgra.cli import run
from pgra.errors import ConfigError
from pgra.memory.log import MemoryEntry
from pgra.memory.lookup import EditLookup, EncoderLookup, Lookup
from pgra.memory.memory import Memory
from pgra.types import Json

QUICK_SIZES = (2_000,)
SIZES = (10_000, 100_000)
_QUESTION_NOISE = 0.1  # its length; a key's vector has 1
_WRITES = 50


class RandomEncoder:
    """Gives each key a direction by the number that it ends in, and a question one near its key's.

    Attributes:
        width: D.
    """

    def __init__(self, width: int) -> None:
        self.width = width

    @property
    def query_fingerprint(self) -> Mapping[str, Json]:
        """What the vectors depend on, besides the text."""
        return {"encoder": "random", "width": self.width}

    def encode(self, texts: Sequence[str], *, is_query: bool = False) -> Vectors:
        """Return vectors (n, D) of texts that end in a number."""
        draws = [np.random.default_rng(int(text.split()[-1])) for text in texts]
        vectors = np.array([draw.normal(size=self.width) for draw in draws], np.float32)
        if is_query:
            noise = np.array([draw.normal(size=self.width) for draw in draws], np.float32)
            vectors += _QUESTION_NOISE * noise
        unit: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return unit


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = shared_parser(__doc__ or "", quick=f"{QUICK_SIZES[0]:,} entries")
    parser.add_argument("--sizes", type=positive, nargs="+", help="entries")
    parser.add_argument("--width", type=positive, default=384, help="of a vector")
    parser.add_argument("--num_queries", type=positive, default=50)
    args = parse_flags(parser, argv)
    args.sizes = args.sizes or (QUICK_SIZES if args.quick else SIZES)
    if max(args.sizes) < args.num_queries:
        raise ConfigError(f"num_queries is {args.num_queries}, more than the entries: lower it")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each size."""
    args = parse(argv)
    figures: dict[str, float] = {}
    for size in args.sizes:
        measured = measure_size(size, args.width, args.num_queries)
        figures |= {f"{size}/{name}": value for name, value in measured.items()}
    show_figures("by entries", figures)
    write_figures(args.json, figures)
    return 0


def measure_size(size: int, width: int, num_queries: int) -> dict[str, float]:
    """Measure a memory of one size, in a folder that is thrown away."""
    encoder = RandomEncoder(width)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "memory.sqlite"
        start = time.perf_counter()
        with Memory(path) as memory:
            memory.log.append(event(number) for number in range(size))
            filled = time.perf_counter()
            EncoderLookup(memory.log, encoder).find("question 0")
            followed = time.perf_counter()
        seconds = {"fill_s": filled - start, "follow_s": followed - filled}
        return {**seconds, **_measure_use(path, encoder, size, num_queries)}


def event(number: int) -> MemoryEntry:
    """Return an entry; all questions differ also once they are normalised: the worst case."""
    letters = "".join(chr(97 + (number * step) % 26) for step in (1, 3, 5, 7, 11))
    question = f"what {letters} would one say of < x > number {number}"
    return MemoryEntry(question=question, feedback=f"I mean {number}")


def _measure_use(
    path: Path, encoder: RandomEncoder, size: int, num_queries: int
) -> dict[str, float]:
    start = time.perf_counter()
    with Memory(path) as memory:
        lookup = EncoderLookup(memory.log, encoder)
        lookup.find("question 0")  # reads all vectors
        opened = time.perf_counter() - start
        rows = np.random.default_rng(1).choice(size, num_queries, replace=False)
        seconds = _time_each(lookup, [f"question {row}" for row in rows])
        edit = EditLookup(memory.log)
        edit.find("what would one say of < x >")  # reads all keys
        questions = [event(int(row)).question for row in rows[:10]]
        edits = _time_each(edit, [question.replace("say", "tell") for question in questions])
        start = time.perf_counter()
        for number in range(_WRITES):
            memory.add(f"another {number}", "said")
        durable = (time.perf_counter() - start) / _WRITES
    return {
        "open_s": opened,
        "encoder_ms": 1000 * float(np.median(seconds)),
        "edit_ms": 1000 * float(np.median(edits)),
        "durable_ms": 1000 * durable,
    }


def _time_each(lookup: Lookup, questions: Sequence[str]) -> list[float]:
    seconds = []
    for question in questions:
        start = time.perf_counter()
        lookup.find(question)
        seconds.append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    sys.exit(run(main))
