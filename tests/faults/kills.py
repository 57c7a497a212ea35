"""Kills, and two at once: a command is broken off, and the same command is given again.

A case is survived where the second leaves, byte for byte, what an unbroken one leaves, and nothing
half-written; and where nothing but a kill ended the first one silently. What writes once more when
it is given once more, such as an entry of a memory, may have done so each time it ran.
"""

import json
import random
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from world import JOBS, QUESTION, Ended, Fault, World, differing, seen

DONE = (
    "is there already",  # of a command whose product is whole and must be new
    "has no entry 1:",  # what another updated, deleted or erased before
)


def everything(world: World) -> dict[str, object]:
    """Give every file, without what the clock says; of a database its rows."""
    found = seen(world, store=True)
    for path in world.here.rglob("*.sqlite"):
        found[str(path.relative_to(world.here))] = _rows(path)
    return found


def _rows(path: Path) -> dict[str, list[object]]:
    with closing(sqlite3.connect(path)) as db:
        tables = [
            name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type='table'")
        ]
        rows = {t: db.execute(f'SELECT count(*) FROM "{t}"').fetchall() for t in sorted(tables)}
        if "event" in rows:
            rows["event"] = [
                _event(r) for (r,) in db.execute("SELECT record FROM event ORDER BY id")
            ]
    return rows


def _event(record: bytes) -> object:
    fields = json.loads(record[record.index(b"{") :])
    return {name: value for name, value in fields.items() if name not in ("id", "time")}


@dataclass(frozen=True)
class Whole:
    """What an unbroken command does.

    Attributes:
        files: What is there then.
        once: How it ended.
    """

    files: Mapping[str, object]
    once: Ended


class Unbroken:
    """What unbroken commands leave, what they change and how long they take."""

    def __init__(self, world: World) -> None:
        self._world, self._known = world, dict[str, Whole]()

    def __getitem__(self, name: str) -> Whole:
        """Give what a command leaves."""
        if name not in self._known:
            self._world.after(*JOBS[name].needs)
            ended = self._world.call(JOBS[name].words)
            assert ended.code == 0, (name, ended)
            self._known[name] = Whole(everything(self._world), ended)
        return self._known[name]


def again(world: World, name: str, whole: Mapping[str, object], tries: int = 1) -> str:
    """Give a command again and say what is wrong with what is there then; "" if nothing is.

    Args:
        world: Where.
        name: The command.
        whole: What an unbroken one leaves.
        tries: How often it ran before.
    """
    has_checkpoint = (
        name == "train"
        and not (world.here / "runs/pgra/reader").exists()
        and any(world.here.glob("runs/pgra/checkpoint-*/checksums.json"))
    )
    ended = world.call(JOBS[name].words)
    if has_checkpoint and "resuming from" not in ended.err:
        return f"again: it begins anew: {ended.err[-300:]!r}"
    is_done = ended.is_refused and any(said in ended.told for said in DONE)
    if ended.code and not is_done:
        return f"again: exit code {ended.code}: {ended.err[-300:]!r}"
    now = everything(world)
    if left := [file for file in now if "partial" in file]:
        return f"left behind: {left}"
    if name == "erase" and (held := holders(world, QUESTION)):
        return f"not erased from {held}"
    if name in APPENDS:
        memory = "memory.sqlite"
        ended = world.call(["memory", "list", "--verify", "--memory", memory])
        if ended.code:
            return f"not whole: {ended.err[-300:]!r}"
        now[memory] = _written_once(now[memory], whole[memory], tries)
    return "; ".join(differing(now, whole)[:4])


def holders(world: World, text: str) -> list[str]:
    """Name what of a memory holds the bytes of a text."""
    files = (p for p in world.here.rglob("*") if p.is_file() and "memory.sqlite" in str(p))
    return [str(path) for path in files if text.encode() in path.read_bytes()]


def _written_once(now: object, whole: object, tries: int) -> object:
    """Leave out what a log has twice or more at its end, at most once for each time."""
    log, last = list(now["event"]), whole["event"][-1]
    for _ in range(tries):
        if log[-2:] == [last, last]:
            log.pop()
    return {**now, "event": log}


def kill(
    world: World, name: str, seed: int, unbroken: Unbroken, *, at_write: int | None = None
) -> str:
    """Kill a command before a change of a file, or at a random moment, once or twice."""
    whole = unbroken[name]
    draw = random.Random(seed)
    world.after(*JOBS[name].needs)
    tries = 1 if at_write else draw.choice((1, 1, 2))
    for _ in range(tries):
        if at_write:
            fault = Fault(at_write=at_write)
        elif draw.random() < 0.6:
            fault = Fault(at_write=draw.randint(1, whole.once.writes))
        else:
            fault = Fault(after=draw.uniform(0.05, whole.once.seconds))
        world.call(JOBS[name].words, fault)
    done = shards(world)
    if wrong := again(world, name, whole.files, tries):
        return wrong
    now = shards(world)
    made_again = [path for path in done if path in now and done[path] != now[path]]
    return f"made again: {made_again}" if made_again else ""


def shards(world: World) -> dict[str, tuple[int, int]]:
    """Give when each finished shard was written, and which file it is; a record ends a shard."""
    found = {}
    for pattern in ("indexes/*/vectors-*.json", "banks/*/[0-9a-f]*.json"):
        for path in (world.here / "artifacts").glob(pattern):
            found[str(path.relative_to(world.here))] = (path.stat().st_mtime_ns, path.stat().st_ino)
    return found


def two_at_once(world: World, name: str, seed: int, unbroken: Unbroken) -> str:
    """Start a command twice, a random time apart: the second waits, or is refused."""
    whole = unbroken[name]
    draw = random.Random(seed)
    world.after(*JOBS[name].needs)
    first = world.start(JOBS[name].words)
    second = world.start(
        JOBS[name].words, Fault(late=draw.choice((0.0, draw.uniform(0, whole.once.seconds))))
    )
    for ended in (first.wait(), second.wait()):
        if ended.code and not ended.is_refused:
            return f"two at once: exit code {ended.code}: {ended.err[-300:]!r}"
    return again(world, name, whole.files, tries=2)


Broken = Callable[[World, str, int, Unbroken], str]
APPENDS = ("memory", "update")
"""Given twice they may write twice."""
