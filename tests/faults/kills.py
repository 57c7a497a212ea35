"""Kills, full disks, two at once: a command is broken off, and the same command is given again.

A case is survived where the second leaves, byte for byte, what an unbroken one leaves, and nothing
half-written; and where nothing but a kill ended the first one silently.
"""

import random
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from world import JOBS, Ended, Fault, World, differing, seen

ALREADY = "is there already"  # of a command whose product is whole and must be new
_FOR_MESSAGES = 1500  # bytes that what a command says takes, for its files have that limit too
_REST = 3.0  # seconds in which what is left of two processes must end; torchrun kills it then


def everything(world: World, ended: Ended | None = None) -> dict[str, object]:
    """Give every file, without what the clock says; of a database its rows."""
    found = seen(world, ended, store=True)
    for path in world.here.rglob("*.sqlite"):
        found[str(path.relative_to(world.here))] = _rows(path)
    return found


def _rows(path: Path) -> object:
    with closing(sqlite3.connect(path)) as db:
        tables = [
            name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type='table'")
        ]
        return {t: db.execute(f'SELECT count(*) FROM "{t}"').fetchall() for t in sorted(tables)}


class Unbroken:
    """What unbroken commands leave, what they change and how long they take."""

    def __init__(self, world: World) -> None:
        self._world, self._known = world, dict[str, tuple[dict[str, object], Ended]]()

    def __getitem__(self, name: str) -> tuple[dict[str, object], Ended]:
        if name not in self._known:
            self._world.after(*JOBS[name].needs)
            ended = self._world.call(JOBS[name].words)
            assert ended.code == 0, (name, ended)
            self._known[name] = everything(self._world), ended
        return self._known[name]


def again(world: World, name: str, whole: Mapping[str, object]) -> str:
    """Give a command again and say what is wrong with what is there then; "" if nothing is."""
    ended = world.call(JOBS[name].words)
    if ended.code and not (ended.is_refused and ALREADY in ended.told):
        return f"again: exit code {ended.code}: {ended.err[-300:]!r}"
    now = everything(world)
    if left := [file for file in now if "partial" in file]:
        return f"left behind: {left}"
    return "; ".join(differing(now, whole)[:4])


def kill(world: World, name: str, seed: int, unbroken: Unbroken) -> str:
    """Kill a command before a change of a file, or at a random moment, once or twice."""
    whole, once = unbroken[name]
    draw = random.Random(seed)
    world.after(*JOBS[name].needs)
    for _ in range(draw.choice((1, 1, 2))):
        if draw.random() < 0.6:
            fault = Fault(at_write=draw.randint(1, once.writes))
        else:
            fault = Fault(after=draw.uniform(0.05, once.seconds))
        world.call(JOBS[name].words, fault)
    return again(world, name, whole)


def kill_one_of_two(world: World, name: str, seed: int, unbroken: Unbroken) -> str:
    """Kill one of two processes; then give the command again, in one."""
    whole, once = unbroken[name]
    draw = random.Random(seed)
    world.after(*JOBS[name].needs)
    victim, port = draw.randrange(2), 20000 + draw.randrange(20000)
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    running = []
    for rank in range(2):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
        after = draw.uniform(0.1, 1.5 * once.seconds)
        dies = after if rank == victim else None
        running.append(world.start(JOBS[name].words, Fault(after=dies, environment=shared | own)))
    running[victim].wait()
    running[1 - victim].wait(_REST)
    return again(world, name, whole)


def fill(world: World, name: str, seed: int, unbroken: Unbroken) -> str:
    """Let no file get longer than a random length; then give the command again, with room."""
    whole, _ = unbroken[name]
    draw = random.Random(seed)
    world.after(*JOBS[name].needs)
    before = everything(world)
    sizes = [len(v) for n, v in whole.items() if isinstance(v, bytes) and v != before.get(n)]
    longest = max(sizes, default=4096)
    ended = world.call(
        JOBS[name].words, Fault(longest_file=max(_FOR_MESSAGES, int(longest * draw.random() ** 2)))
    )
    if ended.code and not ended.is_refused:
        return f"full: exit code {ended.code}: {ended.err[-300:]!r}"
    return again(world, name, whole)


def forbid(world: World, name: str, seed: int, unbroken: Unbroken) -> str:
    """Run where nothing may be written; then where it may."""
    whole, _ = unbroken[name]
    world.after(*JOBS[name].needs)
    before = everything(world)
    world.allow_writing(False)
    try:
        ended = world.call(JOBS[name].words, Fault(nobody=True))
    finally:
        world.allow_writing(True)
    if ended.code and not ended.is_refused:
        return f"read-only: exit code {ended.code}: {ended.err[-300:]!r}"
    if changed := differing(everything(world), before):
        return f"read-only, and it changed {changed[:3]}"
    return again(world, name, whole)


def two_at_once(world: World, name: str, seed: int, unbroken: Unbroken) -> str:
    """Start a command twice, a random time apart: the second waits, or is refused."""
    whole, once = unbroken[name]
    draw = random.Random(seed)
    world.after(*JOBS[name].needs)
    first = world.start(JOBS[name].words)
    second = world.start(
        JOBS[name].words, Fault(late=draw.choice((0.0, draw.uniform(0, once.seconds))))
    )
    for ended in (first.wait(), second.wait()):
        if ended.code and not ended.is_refused:
            return f"two at once: exit code {ended.code}: {ended.err[-300:]!r}"
    return again(world, name, whole)


Broken = Callable[[World, str, int, Unbroken], str]
TRAINED = ("train", "plain", "rag", "ablate", "gud-ir", "similar")
APPENDS = ("memory", "correct", "import")
"""Given twice they write twice, as they are asked to."""
