"""Feeds pgra rubbish for as long as you like; `tests/faults` is the short form of it.

    inputs   every reader of outside data reads spoilt files, in processes of its own: it may read
             one or refuse it in a short line of ours, and nothing else

A stopped call goes on where it was, if --json names the same file. Exit code 1 where a case failed;
the figures name it, and `--only KIND --part PART --first N --cases 1` runs it again.

python benchmarks/faults.py --only inputs --cases 100000 --json faults.json
"""

import json
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

from measuring import FlagParser, parse_flags, positive

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "faults")]

from readers import READERS, cases, check  # noqa: E402

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
    """

    done: int = 0
    read: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    peak_mb: int = 0


def spoil_inputs(name: str, seed: int, start: int, stop: int) -> Tally:
    """Give spoilt files to one reader."""
    reader, tally = READERS[name], Tally()
    with tempfile.TemporaryDirectory() as folder:
        found = islice(cases(reader, seed=seed, start=start), stop - start)
        for number, data in enumerate(found, start):
            try:
                tally.read += check(reader, data, Path(folder)) == ""
            except Exception as error:  # noqa: BLE001 (what may leave it is what is asked)
                tally.failed[str(number)] = f"{type(error).__name__}: {error}"[:300]
            tally.done += 1
    tally.peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return tally


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        parts: What it is done to.
        run: Runs the cases of a part from a number to another, by a seed.
    """

    parts: Mapping[str, object]
    run: Callable[[str, int, int, int], Tally]


KINDS = {"inputs": Kind(READERS, spoil_inputs)}


def main(argv: list[str] | None = None) -> int:
    """Run the cases that are left, and show what came of all."""
    parser = FlagParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(KINDS), help="kinds of faults")
    parser.add_argument("--part", nargs="+", help="such as some readers; default: all")
    parser.add_argument("--cases", type=positive, default=1000, help="of each part")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the figures, and go on from")
    args = parse_flags(parser, argv)
    about = {"seed": args.seed, "first": args.first}
    before = json.loads(args.json.read_text()) if args.json and args.json.is_file() else {}
    tallies: dict[str, dict[str, Tally]] = {}
    if before.get("about") == about:
        tallies = {k: {p: Tally(**t) for p, t in v.items()} for k, v in before["kinds"].items()}
    for name in args.only:
        choose("kind", name, KINDS)
        for part in args.part or KINDS[name].parts:
            choose(name, part, KINDS[name].parts)
            tally = tallies.setdefault(name, {}).setdefault(part, Tally())
            while tally.done < args.cases:
                start = args.first + tally.done
                stop = min(start + BLOCK, args.first + args.cases)
                _add(tally, _run_apart(KINDS[name], part, args.seed, start, stop))
                if args.json:
                    kept = {k: {p: asdict(t) for p, t in v.items()} for k, v in tallies.items()}
                    write_json(args.json, {"about": about, "kinds": kept})
            say(
                f"{name}, {part}: {tally.done:,} cases, {tally.read:,} read, {len(tally.failed)} "
                f"failed, {tally.peak_mb:,} MB"
            )
            for number, what in islice(tally.failed.items(), 3):
                say(f"  case {number}: {what}")
    return int(any(tally.failed for kind in tallies.values() for tally in kind.values()))


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


if __name__ == "__main__":
    sys.exit(run(main))
