"""Kills, damages and feeds rubbish to pgra as long as you like; `tests/faults` is the short form.

    inputs   every reader of outside data reads spoilt files, in processes of its own: it may read
             one or refuse it in a short line of ours, and nothing else
    damage   one file of a finished world is spoilt, and the commands that read it are run: each
             must refuse it by name, or say and write what it does with whole files
    kills    a command is killed before a change of a file, or at a random moment; given again it
             must leave what an unbroken one leaves, and nothing half-written
    pairs    one of two processes of a job is killed; given again to two, the same
    twins    a command runs twice at once: the second waits or is refused; the same

A stopped call goes on where it was, if --json names the same file. Exit code 1 where a case failed;
the figures name it, and `--only KIND --part PART --first N --cases 1` runs it again.

python benchmarks/faults.py --only inputs --cases 500 --json faults.json
python benchmarks/faults.py --only damage kills pairs twins --minutes 20 --json faults.json
"""

import atexit
import functools
import json
import math
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

from measuring import FlagParser, parse_flags, positive

_TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(_TESTS), str(_TESTS / "faults")]

import damage  # noqa: E402
import kills  # noqa: E402
from readers import READERS, cases, check  # noqa: E402
from world import JOBS, World  # noqa: E402

from pgra.artifacts import write_json  # noqa: E402
from pgra.cli import run  # noqa: E402
from pgra.commands.common import say  # noqa: E402
from pgra.config import choose  # noqa: E402

BLOCK = 500
"""Cases that one process takes: one that crashes loses no more."""


@dataclass
class Tally:
    """What came of the cases of one part, such as one reader.

    Attributes:
        done: Cases that were run.
        read: Of these, files that were read all the same.
        failed: What else happened, by case.
        peak_mb: Most memory of a process that ran some of them.
        void: Of those done, such as the change of a field of a file without any: nothing was tried.
    """

    done: int = 0
    read: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    peak_mb: int = 0
    void: int = 0


def spoil_inputs(name: str, seed: int, start: int, stop: int) -> Tally:
    """Give spoilt files to one reader."""
    reader, tally = READERS[name], Tally()
    with tempfile.TemporaryDirectory(dir=_near_memory()) as folder:
        found = islice(cases(reader, seed=seed, start=start), stop - start)
        for number, data in enumerate(found, start):
            try:
                tally.read += check(reader, data, Path(folder)) == ""
            except Exception as error:  # noqa: BLE001 (what may leave it is what is asked)
                tally.failed[str(number)] = f"{type(error).__name__}: {error}"[:300]
            tally.done += 1
    tally.peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return tally


def _warm(name: str) -> None:
    """Have this process import what a reader needs, so that its forks need not."""
    with tempfile.TemporaryDirectory() as folder:
        check(READERS[name], READERS[name].valid, Path(folder))


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        parts: What it is done to.
        run: Runs the cases of a part from a number to another, by a seed.
        block: Cases that one process takes; 0: each is run from here, by processes of its own.
        most: Cases that differ.
        warm: Makes this process ready for the cases of a part, which its forks run.
    """

    parts: Iterable[str]
    run: Callable[[str, int, int, int], Tally]
    block: int = 0
    most: int | None = None
    warm: Callable[[str], object] | None = None


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


def _one(case: Callable[[str, int], str | None]) -> Callable[[str, int, int, int], Tally]:
    """Make a run of cases from one that says what is wrong with a case; None where it is none."""

    def run_cases(part: str, seed: int, start: int, stop: int) -> Tally:
        tally = Tally()
        for number in range(start, stop):
            wrong = case(part, seed * 1_000_003 + number)
            tally.done += 1
            tally.void += wrong is None
            if wrong:
                tally.failed[str(number)] = wrong[:600]
        return tally

    return run_cases


def _damage(part: str, seed: int) -> str | None:
    world, _, whole = _world()
    case = damage.draw(world, part, seed)
    wrong = damage.run(world, case, whole)
    return wrong and f"{case.path}: {wrong}"


def _break(how: kills.Broken) -> Callable[[str, int, int, int], Tally]:
    return _one(lambda part, seed: how(_world()[0], part, seed, _world()[1]))


KINDS = {
    "inputs": Kind(READERS, spoil_inputs, block=BLOCK, warm=_warm),
    "damage": Kind(damage.KINDS, _one(_damage)),
    "kills": Kind(JOBS, _break(kills.kill)),
    "pairs": Kind(kills.SHARED, _break(kills.kill_one_of_two)),
    "twins": Kind(JOBS, _break(kills.two_at_once)),
}


def main(argv: list[str] | None = None) -> int:
    """Run the cases that are left, and show what came of all."""
    parser = FlagParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(KINDS), help="kinds of faults")
    parser.add_argument("--part", nargs="+", help="such as some readers; default: all")
    parser.add_argument("--cases", type=positive, default=1000, help="of each part")
    parser.add_argument("--minutes", type=float, help="time for each kind, the same for each part")
    parser.add_argument("--quick", action="store_true", help="two cases of each part")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the figures, and go on from")
    args = parse_flags(parser, argv)
    args.cases = 2 if args.quick else args.cases
    about = {"seed": args.seed, "first": args.first}
    before = json.loads(args.json.read_text()) if args.json and args.json.is_file() else {}
    tallies: dict[str, dict[str, Tally]] = {}
    if before.get("about") == about:
        tallies = {k: {p: Tally(**t) for p, t in v.items()} for k, v in before["kinds"].items()}
    for name in args.only:
        choose("kind", name, KINDS)
        kind = KINDS[name]
        parts = list(args.part or kind.parts)
        for part in parts:
            choose(name, part, kind.parts)
            tally = tallies.setdefault(name, {}).setdefault(part, Tally())
            end = time.monotonic() + 60 * (args.minutes or math.inf) / len(parts)
            most = min(args.cases, kind.most or args.cases)
            if kind.warm and tally.done < most:
                kind.warm(part)
            while tally.done < most and time.monotonic() < end:
                start = args.first + tally.done
                stop = min(start + (kind.block or 1), args.first + most)
                how = _run_apart if kind.block else _run_here
                _add(tally, how(kind, part, args.seed, start, stop))
                if args.json:
                    kept = {k: {p: asdict(t) for p, t in v.items()} for k, v in tallies.items()}
                    write_json(args.json, {"about": about, "kinds": kept})
            shown = f", {tally.read:,} read" if kind.block else ""
            say(
                f"{name}, {part}: {tally.done - tally.void:,} cases{shown}, {len(tally.failed)} "
                f"failed" + (f", {tally.peak_mb:,} MB" if tally.peak_mb else "")
            )
            for number, what in islice(tally.failed.items(), 3):
                say(f"  case {number}: {what}")
    return int(any(tally.failed for kind in tallies.values() for tally in kind.values()))


def _run_here(kind: Kind, part: str, seed: int, start: int, stop: int) -> Tally:
    return kind.run(part, seed, start, stop)


def _run_apart(kind: Kind, part: str, seed: int, start: int, stop: int) -> Tally:
    """Run cases in a fork; where that crashes, halve them until the case is known."""
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(source)
        with os.fdopen(sink, "w") as file:
            json.dump(asdict(kind.run(part, seed, start, stop)), file)
        os._exit(0)
    os.close(sink)
    with os.fdopen(source) as file:
        text = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 0:
        return Tally(**json.loads(text))
    if stop - start == 1:
        return Tally(1, failed={str(start): f"the process ended with {code}"})
    middle = (start + stop) // 2
    tally = _run_apart(kind, part, seed, start, middle)
    _add(tally, _run_apart(kind, part, seed, middle, stop))
    return tally


def _add(tally: Tally, more: Tally) -> None:
    tally.done += more.done
    tally.read += more.read
    tally.failed |= more.failed
    tally.peak_mb = max(tally.peak_mb, more.peak_mb)
    tally.void += more.void


if __name__ == "__main__":
    sys.exit(run(main))
