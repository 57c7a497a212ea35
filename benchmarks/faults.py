"""Kills, damages and doubles pgra as long as you like; `tests/faults` is the short form.

    damage   one file of a finished world is spoilt, and the commands that read it are run: each
             must refuse it by name, or say and write what it does with whole files
    kills    a command is killed before a change of a file, or at a random moment; given again it
             must leave what an unbroken one leaves, and nothing half-written
    twins    a command runs twice at once: the second waits or is refused; the same

A stopped call continues where it was, if --json names the same file. Exit code 1 where one failed;
the figures name it, and `--only KIND --part PART --first N --cases 1` runs it again.

python benchmarks/faults.py --only damage kills twins --minutes 20 --json faults.json
"""

import atexit
import functools
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path

from measuring import FlagParser, parse_flags, positive

_TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(_TESTS), str(_TESTS / "faults")]

import damage  # noqa: E402
import kills  # noqa: E402
from world import JOBS, World  # noqa: E402

from pgra.artifacts import write_json  # noqa: E402
from pgra.cli import run  # noqa: E402
from pgra.commands.common import say  # noqa: E402
from pgra.config import choose  # noqa: E402


@dataclass
class Tally:
    """What came of the cases of one part, such as one reader.

    Attributes:
        done: Cases that were run.
        failed: What else happened, by case.
        void: Of those done, such as the change of a field of a file without any: nothing was tried.
    """

    done: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    void: int = 0


@dataclass(frozen=True)
class Kind:
    """A kind of fault: what it is done to, and what says what is wrong with a case (None: void)."""

    parts: Collection[str]
    case: Callable[[str, int], str | None]


def _near_memory() -> Path | None:
    """Give a folder whose files lie in memory, where there is one."""
    folder = Path("/dev/shm")
    return folder if os.access(folder, os.W_OK) else None


@functools.cache
def _world() -> tuple[World, kills.Unbroken, dict[str, object]]:
    """Give the one world of this process, and what was learned of it undamaged."""
    folder = tempfile.mkdtemp(prefix="pgra-faults-", dir=_near_memory())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    world = World(Path(folder))
    return world, kills.Unbroken(world), {}


def _damage(part: str, seed: int) -> str | None:
    world, _, whole = _world()
    case = damage.draw(world, part, seed)
    wrong = damage.run(world, case, whole)
    return f"{case.path}: {wrong}" if wrong else wrong


def _break(fault: kills.Broken) -> Callable[[str, int], str | None]:
    return lambda part, seed: fault(_world()[0], part, seed, _world()[1])


FAULTS = {
    "damage": Kind(damage.KINDS, _damage),
    "kills": Kind(JOBS, _break(kills.kill)),
    "twins": Kind(JOBS, _break(kills.two_at_once)),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases that are left, and show what came of all."""
    parser = FlagParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(FAULTS), help="kinds of faults")
    parser.add_argument("--part", nargs="+", help="default: all")
    parser.add_argument("--cases", type=positive, default=1000, help="of each part")
    parser.add_argument("--minutes", type=float, help="time for each kind, the same for each part")
    parser.add_argument("--quick", action="store_true", help="two cases of each part")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the figures, and continue from")
    args = parse_flags(parser, argv)
    args.cases = 2 if args.quick else args.cases
    about = {"seed": args.seed, "first": args.first}
    before = json.loads(args.json.read_text()) if args.json and args.json.is_file() else {}
    tallies: dict[str, dict[str, Tally]] = {}
    if before.get("about") == about:
        for name, counts in before["kinds"].items():
            tallies[name] = {job: Tally(**count) for job, count in counts.items()}
    for name in args.only:
        choose("kind", name, FAULTS)
        kind = FAULTS[name]
        chosen = list(args.part or kind.parts)
        for job in chosen:
            choose(name, job, kind.parts)
            tally = tallies.setdefault(name, {}).setdefault(job, Tally())
            end = time.monotonic() + 60 * (args.minutes or math.inf) / len(chosen)
            while tally.done < args.cases and time.monotonic() < end:
                number = args.first + tally.done
                wrong = kind.case(job, args.seed * 1_000_003 + number)
                tally.done += 1
                tally.void += wrong is None
                if wrong:
                    tally.failed[str(number)] = wrong[:600]
                if args.json:
                    counts = {
                        name: {job: asdict(tally) for job, tally in jobs.items()}
                        for name, jobs in tallies.items()
                    }
                    write_json(args.json, {"about": about, "kinds": counts})
            say(f"{name}, {job}: {tally.done - tally.void:,} cases, {len(tally.failed)} failed")
            for number, what in islice(tally.failed.items(), 3):
                say(f"  case {number}: {what}")
    every = chain.from_iterable(jobs.values() for jobs in tallies.values())
    return int(any(tally.failed for tally in every))


if __name__ == "__main__":
    sys.exit(run(main))
