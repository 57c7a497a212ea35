"""Damage: one file of a finished world is spoilt, and the commands that read it are run.

A case is survived where each command refuses, naming the file or its folder, or where what it says
and writes is the same as from whole files: what can be made again is, and is kept as NAME.damaged.
"""

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from world import BESIDE, JOBS, Ended, Job, World, differing, seen

KINDS = ("flip", "cut", "empty", "swap", "delete")
STATE = (
    *("index", "bm25", "train", "plain", "rag", "icl", "predict", "memory", "search memory"),
    *("ablate", *BESIDE),
)
READERS: Mapping[str, Job] = {
    "search": Job("search 'film town' $index"),
    "verify": Job("verify artifacts"),
    "train anew": Job("train $train --num_evidence 2 --output_dir runs/new"),
    "train otherwise": Job(
        "train $train --num_evidence 2 --output_dir runs/new --similarity cosine"
    ),
    "train again": JOBS["train"],
    "go on": Job(
        "train $train --method ablations.rag:Rag --num_evidence 2 --output_dir runs/stopped"
    ),
    "evaluate": JOBS["evaluate"],
    "evaluate plain": Job("evaluate --run runs/plain"),
    "predict": Job("predict 'A town so funny.' --run runs/pgra --json"),
    "evaluate rag": Job("evaluate --run runs/rag"),
    "icl anew": Job(f"{JOBS['icl'].line} --output_dir runs/new"),
    "icl again": JOBS["icl"],
    "report": Job("report runs/pgra runs/plain runs/icl --baseline plain"),
    "ablate": JOBS["ablate"],
    "grid report": Job("report runs/grid"),
    "search memory": JOBS["search memory"],
    "list": Job("memory list"),
    "search bm25": Job("search 'film town' --corpus corpus.txt --retriever bm25"),
}
# Which of them read a file, by the first pattern that fits.
READ_BY: Mapping[str, tuple[str, ...]] = {
    "artifacts/corpora/*": ("search", "verify", "train anew"),
    "artifacts/indexes/bm25-*": ("search bm25",),
    "artifacts/indexes/*": ("search", "verify", "train anew"),
    "artifacts/answers/*": (),  # asked again, last digits differ: tests/unit/test_cache.py
    "artifacts/neighbors/*": ("icl anew",),
    "artifacts/banks/*": ("train otherwise", "predict", "verify"),
    "artifacts/*": ("train anew", "predict"),
    "runs/pgra/reader/*": ("predict", "evaluate", "train again"),
    "runs/pgra/*": ("evaluate", "report", "train again"),
    "runs/plain/reader/*": ("evaluate plain",),
    "runs/plain/*": ("evaluate plain", "report"),
    "runs/rag/*": ("evaluate rag",),
    "runs/stopped/*": ("go on",),
    "runs/icl/*": ("report", "icl again"),
    "runs/grid/*": ("ablate", "grid report"),
    "memory.sqlite*": ("search memory", "list"),
}
MAY_END_WITH_1 = ("verify", "ablate")
MARKS = ("metrics.json", "pgra.json", "grid.json", "manifest.json")
REPORTS = ("report", "grid report")


@dataclass(frozen=True)
class Case:
    """One spoilt file.

    Attributes:
        path: Below the world's folder.
        kind: One of `KINDS`.
        seed: Of what is drawn.
    """

    path: str
    kind: str
    seed: int


def files(world: World) -> list[str]:
    """Name the files that pgra made, and that some command reads."""
    found = (p for p in sorted(world.here.rglob("*")) if p.is_file())
    names = [str(p.relative_to(world.here)) for p in found]
    return [n for n in names if not n.endswith(".lock") and readers_of(n)]


def readers_of(name: str) -> tuple[str, ...]:
    return next((names for pattern, names in READ_BY.items() if fnmatch(name, pattern)), ())


def draw(world: World, kind: str, seed: int) -> Case:
    """Draw a file for a kind of damage; as many seeds in a row as there are sorts reach each."""
    world.after(*STATE)
    sorts: dict[str, list[str]] = {}
    for name in files(world):
        sorts.setdefault(_NUMBER.sub("*", name), []).append(name)
    order = random.Random(kind).sample(sorted(sorts), len(sorts))
    own = random.Random(f"{kind} {seed}")
    return Case(own.choice(sorts[order[seed % len(order)]]), kind, own.randrange(1 << 30))


_NUMBER = re.compile(r"[0-9a-f]{12,16}|(?<=-)\d{5}")  # of a fingerprint or of a shard


def run(world: World, case: Case, whole: dict[str, object]) -> str | None:
    """Run a case.

    Args:
        world: Where.
        case: The file and its damage.
        whole: What whole files give, by reader; filled here.

    Returns:
        What was wrong; "" where the case is survived, None where there is no such damage.
    """
    for reader in readers_of(case.path):
        if reader not in whole:
            world.after(*STATE)
            ended = world.call(READERS[reader].words)
            assert ended.code == 0, (reader, ended)
            whole[reader] = seen(world, ended)
    for reader in readers_of(case.path):
        world.after(*STATE)
        path = world.here / case.path
        good = path.read_bytes()
        if not spoil(path, case.kind, random.Random(case.seed)):
            return None
        spoilt = path.read_bytes() if path.exists() else None
        assert spoilt != good
        ended = world.call(READERS[reader].words)
        wrong = judge(world, case, reader, ended, spoilt, whole[reader])
        if wrong:
            return f"{reader}: {wrong}"
    return ""


def judge(
    world: World, case: Case, reader: str, ended: Ended, spoilt: bytes | None, whole: object
) -> str:
    """Say what is wrong with how a command took a spoilt file; "" if nothing is."""
    if ended.code < 0:
        return f"signal {-ended.code} {ended.err[-200:]}"
    if "Traceback" in ended.err:
        return f"traceback: {ended.told}"
    if ended.code:
        if not (ended.is_refused or (ended.code == 1 and reader in MAY_END_WITH_1)):
            return f"exit code {ended.code}: {ended.err[-300:]}"
        path = Path(case.path)
        names = [str(path), *(str(p) for p in path.parents if len(p.parts) > 1)]
        said = ended.out + ended.err
        return "" if any(name in said for name in names) else f"not named: {ended.told}"
    is_mark = case.kind == "delete" and Path(case.path).name in MARKS  # it is not finished then
    named = ("missing", str(Path(case.path).parent))  # a grid's point, or a folder
    if is_mark and reader in REPORTS and any(name in ended.out + ended.err for name in named):
        return ""
    parts = [seen(world, ended), whole]
    if is_mark and reader not in REPORTS:  # it was made again, which is said
        parts = [{**part, "": None} for part in parts]
    parts = [_comparable(world, case, part, spoilt) for part in parts]
    differ = differing(*parts)
    return f"silently other: {'; '.join(differ[:4])}" if differ else ""


def _comparable(world: World, case: Case, found: object, spoilt: bytes | None) -> object:
    """Leave out of what was seen the spoilt file itself, and what may differ beside it."""
    path = world.here / case.path
    found = {name: value for name, value in found.items() if ".damaged" not in name}
    if not path.exists():
        found.pop(case.path, None)
    elif path.read_bytes() == spoilt:  # it is as the damage left it
        found[case.path] = None
    if fnmatch(case.path, "labels/pseudo_labels/*"):  # how many were read again is said
        found[""] = None
    return found


def spoil(path: Path, kind: str, draw: random.Random) -> bool:
    """Damage a file; return whether that kind of damage changes it."""
    good = path.read_bytes()
    bad = _SPOIL[kind](path, good, draw)
    if bad == good:
        return False
    if bad is None:
        path.unlink()
    else:
        path.write_bytes(bad)
    return True


def _flip(path: Path, good: bytes, draw: random.Random) -> bytes:
    if not good:
        return good
    bad = bytearray(good)
    used = [at for at, byte in enumerate(good) if byte]  # a database's pages are empty for the most
    bad[draw.choice(used)] ^= 1 << draw.randrange(8)
    return bytes(bad)


def _cut(path: Path, good: bytes, draw: random.Random) -> bytes:
    return good[: draw.randrange(len(good))] if good else good


def _swap(path: Path, good: bytes, draw: random.Random) -> bytes:
    """Take the bytes of another file of its kind, or else exchange its halves."""
    near = sorted(p for p in path.parent.iterdir() if p.suffix == path.suffix and p != path)
    far = sorted(p for p in path.parent.parent.rglob(path.name) if p != path)
    others = [p for p in [*near, *far] if p.is_file() and p.read_bytes() != good]
    if path.suffix == ".sqlite":  # a whole one of another memory is as good: its user's to choose
        others = []
    middle = len(good) // 2
    return draw.choice(others).read_bytes() if others else good[middle:] + good[:middle]


_SPOIL: Mapping[str, Callable[[Path, bytes, random.Random], bytes | None]] = {
    "flip": _flip,
    "cut": _cut,
    "empty": lambda path, good, draw: b"",
    "swap": _swap,
    "delete": lambda path, good, draw: None,
}
