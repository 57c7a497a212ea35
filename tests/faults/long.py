"""One process that does all commands again and again takes no more memory, files or time."""

import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from safetensors import safe_open
from world import JOBS, MEMORY, QUESTION, World, fork_main

STATE = ("index", "train", "memory")
# Python makes its table of interned strings anew now and then, 15 MiB beside the old one.
SLACK_MIB = 16  # by which memory may differ between two parts of a run
GROWTH_MIB = 1 / 1024  # a round, beyond that
SLACK_MAPPED = 8  # files of models that nothing holds, and that are not collected yet
SLOWING = 1.3  # CPU time of a round at the end, by that after the first fourth
ENTRIES = 100  # rounds after which the memory begins anew, so that no data grows with a run
FEWEST = 8  # rounds: fewer tell nothing
FEWEST_TIMED = 100  # rounds: CPU time of fewer is a matter of what else runs


def measure(world: World, minutes: float, rounds: int | None = None) -> list[dict[str, Any]]:
    """Run rounds of commands in one fork; give memory, open files and CPU time of each round."""
    kept = world.kept / world.after(*STATE)
    path = world.root / "rounds.jsonl"
    path.unlink(missing_ok=True)
    fork_main(_rounds, str(world.here), str(kept), str(path), minutes, rounds)
    return [json.loads(line) for line in path.read_text().splitlines()]


def verdict(found: list[dict[str, Any]]) -> str:
    """Say what grew; "" if nothing did.

    Medians of parts of a run are compared, so that single rounds do not matter: of memory the third
    fourth and the last, as it grows at first by what is made once; of CPU time and open files the
    second and the last.
    """
    if len(found) < FEWEST:
        return ""
    fourth = len(found) // 4
    second, third, last = (found[i * fourth : (i + 1) * fourth] for i in (1, 2, 3))
    growth = _median("mib", last) - _median("mib", third)
    if growth > SLACK_MIB + GROWTH_MIB * fourth:
        return f"memory grew by {1024 * growth / fourth:.1f} KiB a round in the second half"
    for name, kind, slack in (("files", "open", 0), ("mapped", "mapped", SLACK_MAPPED)):
        before, after = _median(name, second), _median(name, last)
        if after > before + slack:
            return f"{kind} files grew from {before:g} to {after:g}"
    before, after = _median("cpu", second), _median("cpu", last)
    if len(found) >= FEWEST_TIMED and after > before * SLOWING:
        return f"a round took {before:.2f} s of CPU time, then {after:.2f} s"
    return ""


def _median(name: str, found: list[dict[str, Any]]) -> float:
    return float(median(one[name] for one in found))


def _rounds(here: str, kept: str, path: str, minutes: float, rounds: int | None) -> None:
    from transformers import modeling_utils

    from pgra.cli import main

    modeling_utils.safe_open = lambda path, **_: _ByNumpy(safe_open(path, framework="numpy"))
    os.chdir(here)
    told = os.open(f"{path}.told", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(told, 1)
    os.dup2(told, 2)
    process, found, end = psutil.Process(), [], time.monotonic() + 60 * minutes
    (index,) = Path("artifacts/indexes").glob("*")
    corpus = Path("next.txt")

    def run(number: int) -> None:
        corpus.write_text(f"Passage {number} of a long day by the sea.\n")
        shutil.rmtree("grown", ignore_errors=True)
        shutil.copytree(index, "grown")
        if number % ENTRIES == 0:
            for name in Path().glob("memory.sqlite*"):
                shutil.rmtree(name) if name.is_dir() else name.unlink()
            for name in Path(kept).glob("memory.sqlite*"):
                (shutil.copytree if name.is_dir() else shutil.copy)(name, name.name)
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

    while time.monotonic() < end and (rounds is None or len(found) < rounds):
        began = time.process_time()
        # tokenizers (0.23) keeps what a BPE tokenizer has found as long as the thread that asked
        # lives, though the tokenizer is gone: 11 KiB a round, in which other growth would be lost.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(run, len(found)).result()
        found.append(
            {
                "mib": round(process.memory_info().rss / (1 << 20), 2),
                "files": process.num_fds(),
                "mapped": _num_mapped(here),
                "cpu": round(time.process_time() - began, 3),
            }
        )
        with Path(path).open("a") as file:
            file.write(f"{json.dumps(found[-1])}\n")


class _ByNumpy:
    """What safetensors opened, a file or a tensor of it, read as numpy's and given as torch's.

    Of each tensor that safetensors (0.8 and 0.9.0rc1) reads as torch's, it never frees the numbers
    of its first and last byte: 13 KiB a round, in which all else that grows would be lost.
    """

    def __init__(self, opened: Any) -> None:
        self.opened = opened

    def __getattr__(self, name: str) -> Any:
        return getattr(self.opened, name)

    def __enter__(self) -> "_ByNumpy":
        self.opened.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.opened.__exit__(*error)

    def get_slice(self, name: str) -> "_ByNumpy":
        return _ByNumpy(self.opened.get_slice(name))

    def __getitem__(self, place: Any) -> Any:
        return torch.tensor(self.opened[place])


def _num_mapped(here: str) -> int:
    """Count files of the world that are mapped, as a model's weights are while it lives."""
    with Path("/proc/self/maps").open() as file:
        return sum(here in line for line in file)
