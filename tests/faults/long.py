"""One process that does all commands again and again: its memory and open files stay bounded."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import psutil
from world import JOBS, MEMORY, QUESTION, World, fork_main

STATE = ("index", "train", "memory")
LARGEST_GROWTH = 0.25  # of memory, from the end of the first fourth to the end


def measure(world: World, minutes: float, rounds: int | None = None) -> list[dict[str, Any]]:
    """Run rounds of commands in one fork; give memory, open files and seconds of each round."""
    world.after(*STATE)
    path = world.root / "rounds.json"
    path.unlink(missing_ok=True)
    fork_main(_rounds, str(world.here), str(path), minutes, rounds)
    return json.loads(path.read_text())


def verdict(found: list[dict[str, Any]]) -> str:
    """Say what grew; "" if nothing did."""
    early, last = found[max(1, len(found) // 4)], found[-1]
    if last["mib"] > early["mib"] * (1 + LARGEST_GROWTH):
        return f"memory grew from {early['mib']} to {last['mib']} MiB"
    if last["files"] > early["files"]:
        return f"open files grew from {early['files']} to {last['files']}"
    return ""


def _rounds(here: str, path: str, minutes: float, rounds: int | None) -> None:
    from pgra.cli import main

    os.chdir(here)
    told = os.open(f"{path}.told", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(told, 1)
    os.dup2(told, 2)
    process, found, end = psutil.Process(), [], time.monotonic() + 60 * minutes
    while time.monotonic() < end and (rounds is None or len(found) < rounds):
        number, began = len(found), time.monotonic()
        corpus = Path(f"next-{number}.txt")
        corpus.write_text(f"Passage {number} of a long day by the sea.\n")
        shutil.rmtree("grown", ignore_errors=True)
        (index,) = Path("artifacts/indexes").glob("*")
        shutil.copytree(index, "grown")
        for words in (
            ["index", "add", "grown", "--corpus", str(corpus)],
            ["index", "remove", "grown", "--rows", "12"],
            ["index", "search", "grown", "film town"],
            ["memory", "add", f"what is akin to < {number} > ?", "I want a synonym"],
            ["memory", "lookup", QUESTION, *MEMORY],
            [*JOBS["predict"].words],
        ):
            if code := main(list(words)):
                raise RuntimeError(f"round {number}: {words} ended with {code}")
        mib = process.memory_info().rss >> 20
        seconds = round(time.monotonic() - began, 2)
        found.append({"mib": mib, "files": process.num_fds(), "seconds": seconds})
        Path(path).write_text(json.dumps(found))
