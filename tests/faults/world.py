"""A small world of files, and command lines that run in it, each in a fork of one warm process.

All commands run in one folder by relative paths, which is put back as it was between two cases.
"""

import io
import json
import os
import re
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from string import Template
from typing import Any

import yaml
from conftest import SENTENCES, review_rows, write_jsonl
from processes import FORKS, warm_up

CLOCK = (
    *("bytes_per_second", "created", "date", "digest", "files", "git_commit", "record", "seconds"),
    "versions",
)
LONGEST_SECONDS = 120  # of one command, which takes seconds


@dataclass(frozen=True)
class Fault:
    """What happens to a command while it runs.

    Attributes:
        at_write: It is killed before its so-manieth change of a file, counted from 1.
        after: It is killed after so many seconds.
        late: It starts so many seconds later.
        room: No file of it grows beyond so many bytes, as on a disk that fills up.
    """

    at_write: int | None = None
    after: float | None = None
    late: float = 0.0
    room: int = resource.RLIM_INFINITY


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: Its exit code; minus the signal that ended it.
        out: Its standard output.
        err: Its standard error.
        seconds: Wall-clock time.
        writes: Changes of files, where they were counted.
    """

    code: int
    out: str
    err: str
    seconds: float
    writes: int

    @property
    def is_refused(self) -> bool:
        """Whether it ended as a user's error must: one line, the last, exit code 2."""
        told = [line for line in self.err.splitlines() if line.startswith("pgra: error: ")]
        last = self.err.rstrip("\n").rpartition("\n")[2]
        return self.code == 2 and told == [last] and "Traceback" not in self.err

    @property
    def told(self) -> str:
        return self.err.rstrip("\n").rpartition("\n")[2].removeprefix("pgra: error: ")


def _is_write(event: str, args: tuple[Any, ...]) -> bool:
    if event == "open":
        path, _, flags = args
        changing = os.O_WRONLY | os.O_RDWR | os.O_CREAT
        return isinstance(path, str | bytes | Path) and bool(flags & changing)
    return event in (
        "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate",
        "sqlite3.connect",
    )  # fmt: skip


def _of_the_world(path: object, here: str) -> bool:
    name = os.fsdecode(path) if isinstance(path, str | bytes | Path) else ""
    return os.path.abspath(name.removeprefix("file://")).startswith(here)  # noqa: PTH100


def _run(words: Sequence[str], here: str, told: tuple[str, str, str], fault: Fault) -> None:
    """Be the command, in a fork of the warm process."""
    for name, handle in zip(told[:2], (1, 2), strict=True):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, handle)
        os.close(file)
    os.chdir(here)
    # What a killed command leaves there goes with the world.
    tempfile.tempdir = os.environ["TMPDIR"] = os.path.dirname(told[0])  # noqa: PTH120
    sys.stdin = io.StringIO()
    count = os.open(told[2], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    writes = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal writes
        if _is_write(event, args) and _of_the_world(args[0], here):
            writes += 1
            if writes == fault.at_write:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    resource.setrlimit(resource.RLIMIT_FSIZE, (fault.room, resource.RLIM_INFINITY))
    time.sleep(fault.late)
    code = import_module("pgra.cli").main(list(words))
    os.write(count, str(writes).encode())
    sys.exit(code)


class World:
    """A folder with files, tiny models and what commands made of them.

    Attributes:
        root: Everything: `models` stay, `here` is where commands run, `kept` are its states.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.here, self.kept = root, root / "here", root / "kept"
        self._told = 0
        warm_up()
        if not (root / "ready").exists():
            shutil.rmtree(root / "models", ignore_errors=True)
            shutil.rmtree(self.kept, ignore_errors=True)
            _make_models(root / "models")
            _clear(self.here)
            _write_files(self.here)
            self.keep("files")
            (root / "ready").touch()

    def start(self, words: Sequence[str], fault: Fault | None = None) -> "Running":
        """Start a command line, without waiting."""
        self._told += 1
        folder = self.root / "told"
        folder.mkdir(exist_ok=True)
        told = tuple(str(folder / f"{self._told % 8}.{end}") for end in ("out", "err", "writes"))
        for name in told:
            Path(name).unlink(missing_ok=True)
        fault = fault or Fault()
        words = [self.resolve(word) for word in words]
        process = FORKS.Process(target=_run, args=(words, str(self.here), told, fault))
        process.start()
        return Running(process, told, fault)

    def call(self, words: Sequence[str], fault: Fault | None = None) -> Ended:
        """Run a command line to its end, or to its kill."""
        return self.start(words, fault).wait()

    def resolve(self, word: str) -> str:
        """Give the one path below the folder that a word with a star names."""
        if "*" not in word:
            return word
        (found,) = self.here.glob(word)
        return str(found.relative_to(self.here))

    def keep(self, name: str) -> None:
        """Keep the folder as it is under a name."""
        _clear(self.kept / name)
        shutil.copytree(self.here, self.kept / name, dirs_exist_ok=True, symlinks=True)

    def back(self, name: str) -> None:
        """Put the folder back as it was."""
        _clear(self.here)
        shutil.copytree(self.kept / name, self.here, dirs_exist_ok=True, symlinks=True)

    def after(self, *jobs: str) -> str:
        """Put the folder into the state after some jobs; give the name of that state."""
        name = "+".join(("files", *jobs))
        if not (self.kept / name).exists():
            self.after(*jobs[:-1])
            ended = self.call({**JOBS, **BESIDE}[jobs[-1]].words)
            assert ended.code == (124 if jobs[-1] == "stopped" else 0), (jobs[-1], ended)
            self.keep(name)
        self.back(name)
        return name


@dataclass
class Running:
    """A command that runs."""

    process: Any
    told: tuple[str, ...]
    fault: Fault
    began: float = field(default_factory=time.monotonic)

    def wait(self, limit: float = LONGEST_SECONDS) -> Ended:
        """Wait for its end, or for its kill; after `limit` seconds it is killed in any case."""
        limit = limit if self.fault.after is None else self.fault.after
        self.process.join(max(0.0, limit - (time.monotonic() - self.began)))
        hangs = self.process.is_alive() and self.fault.after is None
        self.process.kill()
        self.process.join()
        seconds = time.monotonic() - self.began
        out, err, writes = (
            path.read_text(errors="replace") if path.exists() else ""
            for path in map(Path, self.told)
        )
        if hangs:
            err += f"\nit hangs: no end after {LONGEST_SECONDS} s"
        return Ended(self.process.exitcode, out, err, seconds, int(writes or 0))


def _clear(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _make_models(folder: Path) -> None:
    from tiny_models import build_encoder, build_lm, build_t5

    build_lm(folder / "lm", "gpt2")
    build_encoder(folder / "encoder")
    build_t5(folder / "t5")


def _write_files(here: Path) -> None:
    (here / "corpus.txt").write_text("\n".join(SENTENCES) + "\n")
    write_jsonl(here / "train.jsonl", review_rows(24))
    write_jsonl(here / "test.jsonl", review_rows(12, start=20))
    queries = [{"id": f"q{i}", "text": text} for i, text in enumerate(SENTENCES[:4])]
    write_jsonl(here / "queries.jsonl", queries)
    points = [{"name": "one", "num_evidence": 1}, {"name": "two", "num_evidence": 2}]
    grid = {"seeds": [1], "base": {}, "points": points}
    (here / "grid.yaml").write_text(yaml.safe_dump(grid))


@dataclass(frozen=True)
class Job:
    """A command that writes.

    Attributes:
        line: What is typed after `pgra`, with `SHORT` for what many have; a word with a star is a
            path that is there then.
        needs: Jobs before it, in order.
    """

    line: str
    needs: Sequence[str] = ()

    @property
    def words(self) -> list[str]:
        """Its words, written out."""
        return shlex.split(Template(self.line).substitute(SHORT))


QUESTION = "what is akin to < story > number 1 ?"
_INDEX = "--corpus corpus.txt --encoder ../models/encoder --device cpu --shard_rows 2"
_DATA = "--task sst2 --train_file train.jsonl --test_file test.jsonl --device cpu"
_STAGES = (
    f"{_DATA} --corpus corpus.txt --encoder ../models/encoder --lm ../models/lm --num_candidates 6 "
    "--num_exemplars 2 --shard_rows 2 --bank_shard_rows 2"
)
_STEPS = (
    "--model_name_or_path ../models/t5 --max_steps 4 --eval_steps 2 --per_device_train_batch_size 4"
)
SHORT = {
    "index": _INDEX,
    "data": _DATA,
    "stages": _STAGES,
    "steps": _STEPS,
    "train": f"{_STAGES} {_STEPS} --seed 1",
    "memory": "--lookup encoder --encoder ../models/encoder --device cpu",
    "ask": f"'{QUESTION}'",
}

JOBS: Mapping[str, Job] = {
    "index": Job("index $index"),
    "bm25": Job("index --corpus corpus.txt --retriever bm25"),
    "search": Job("search $index --queries queries.jsonl --num_candidates 3 --trec found.trec"),
    "train": Job("train $train --num_evidence 2 --output_dir runs/pgra"),
    "plain": Job("train $train --method plain --output_dir runs/plain"),
    "rag": Job("train $train --method ablations.rag:Rag --num_evidence 2 --output_dir runs/rag"),
    "icl": Job(
        "icl $data --lm ../models/lm --encoder ../models/encoder --num_exemplars 2 "
        "--corpus corpus.txt --output_dir runs/icl"
    ),
    "evaluate": Job("evaluate --run runs/pgra", ["train"]),
    "predict": Job("predict 'A funny town.' --run runs/pgra --json", ["train"]),
    "rerank": Job(
        "search $stages --num_evidence 2 --queries queries.jsonl --trec found.trec", ["index"]
    ),
    "report": Job("report runs/pgra runs/plain --output table.md", ["train", "plain"]),
    "ablate": Job(
        "ablate grid.yaml $data $steps --encoder ../models/encoder --corpus corpus.txt "
        "--lm ../models/lm --num_candidates 6 --seeds 1 --output_dir runs/grid"
    ),
    "memory": Job("memory add $ask 'I want a synonym'"),
    "import": Job("memory import log.jsonl --memory other.sqlite", ["memory", "export"]),
    "update": Job("memory update 1 'I want an antonym'", ["memory"]),
    "delete": Job("memory delete 1", ["memory"]),
    "erase": Job("memory erase 1", ["memory", "search memory"]),
    "search memory": Job("memory search $ask $memory", ["memory"]),
    "export": Job("memory export log.jsonl", ["memory"]),
}

# What is there to be damaged besides. It is not killed: a training whose time is up after its first
# step does one step more each time.
BESIDE: Mapping[str, Job] = {
    "stopped": Job(
        "train $train --method ablations.rag:Rag --num_evidence 2 --output_dir runs/stopped "
        "--max_train_minutes 1e-9"
    )
}


def seen(world: World, ended: Ended | None = None, *, store: bool = False) -> dict[str, object]:
    """Give files, and what a command said, without what the clock says.

    Args:
        world: Where.
        ended: The command, if what it said counts.
        store: Whether files below `artifacts` count too. Databases and locks never do.
    """
    found = {
        name: without_clock(path)
        for path in sorted(world.here.rglob("*"))
        if path.is_file()
        and (store or path.relative_to(world.here).parts[0] != "artifacts")
        and not re.search(r"\.lock$|\.sqlite(-\w+)?$", name := str(path.relative_to(world.here)))
    }
    return found if ended is None else {**found, "": _SECONDS.sub("", ended.out)}


_SECONDS = re.compile(
    r"\d+(\.\d+)? (s|seconds|ms|min)\b(, all of it reused)?|\d+:\d\d(:\d\d)?"
    r"|(?s:<table>\n<caption>[^<]*what was there already costs nothing.*?</table>)"
)


def without_clock(path: Path) -> object:
    """Give a file's bytes; of a record its fields but for those that the clock fills."""
    data = path.read_bytes()
    if path.suffix not in (".json", ".md", ".jsonl"):
        return data
    try:
        return _timeless(json.loads(data))
    except ValueError:
        return _SECONDS.sub("", data.decode(errors="replace"))


def differing(one: object, other: object, place: str = "") -> list[str]:
    """Name where two things that were seen differ.

    Args:
        one: What was seen, such as by `seen`.
        other: The same of another time.
        place: Where they are, in what is told.
    """
    if one == other:
        return []
    if isinstance(one, dict) and isinstance(other, dict):
        names = sorted({*one, *other})
        parts = ((one.get(n), other.get(n), f"{place}:{n}") for n in names)
        return [d for part in parts for d in differing(*part)]
    shown = [repr(value)[:80] for value in (one, other)]
    return [f"{place.lstrip(':') or 'output'} {shown[0]} / {shown[1]}"]


def _timeless(value: object) -> object:
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in value.items() if k not in CLOCK}
    return [_timeless(v) for v in value] if isinstance(value, list) else value
