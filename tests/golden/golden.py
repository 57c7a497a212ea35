"""Runs the scenarios, and gives what they left as plain JSON: numbers, names of files, shapes."""

import contextlib
import csv
import io
import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import golden_world
import numpy as np
import pytest
import yaml

from ablations import label_consistency
from pgra.cli import main

HERE = Path(__file__).parent
FINGERPRINTS = HERE / "fingerprints.json"
_SHORT_AND_GROUPS = yaml.safe_load((HERE / "scenarios.yaml").read_text())
SCENARIOS: dict[str, dict[str, str]] = _SHORT_AND_GROUPS["groups"]
_SHORT: dict[str, str] = _SHORT_AND_GROUPS["short"]

_HASH = re.compile(r"(?<![0-9a-zA-Z:])[0-9a-f]{12}(?:[0-9a-f]{4}|[0-9a-f]{20}|[0-9a-f]{52})?\b")
"""A fingerprint; not one of trained weights, "xxh3:...", whose last digits differ by processor."""
_DROPPED = {
    *("date", "digest", "files", "fields", "git_commit", "notes", "seconds", "sizes", "text"),
    *("time", "uses_seed", "versions", "when"),
}
"""What differs each time, also by its checksum; texts; and what a class or the data declares."""
_OBJECTS = {"grid.json", "metrics.json", "training.json"}
_DELIMITERS = {".csv": ",", ".trec": " "}


@dataclass
class Symbols:
    """Names fingerprints #step.number in the order in which they are met.

    So a record says which artifact is reused and which is made anew, whatever the hashes are.
    """

    names: dict[str, str] = field(default_factory=dict)
    step: int = 0

    def of(self, text: str) -> str:
        """Return the name of a fingerprint, which its first twelve digits tell apart."""
        key = text[:12]
        if key not in self.names:
            start = f"#{self.step}."
            count = sum(name.startswith(start) for name in self.names.values())
            self.names[key] = f"{start}{count + 1}"
        return self.names[key]

    def put_in(self, text: str) -> str:
        """Put names for the fingerprints in a text."""
        return _HASH.sub(lambda match: self.of(match[0]), text)


def record(group: str, root: Path) -> dict:
    """Run a group's commands one after the other in a new folder.

    Args:
        group: A key of `SCENARIOS`.
        root: An empty folder; the commands run in it, so that all paths are relative.

    Returns:
        What each left, by its name; under "fingerprints" the models and the names of artifacts.
    """
    golden_world.build(root)
    symbols = Symbols()
    steps = {}
    with _in_folder(root):
        for name, line in SCENARIOS[group].items():
            symbols.step += 1
            steps[name] = _run(expand(line), root, symbols)
        artifacts = sorted(map(str, Path("artifacts").glob("*/*")))
    found = {"models": golden_world.digest(root), "artifacts": artifacts}
    return {"steps": steps, "fingerprints": found}


def expand(line: str) -> str:
    """Write out the abbreviations of a scenario's line."""
    while (longer := re.sub(r"\$(\w+)", lambda m: _SHORT.get(m[1], m[0]), line)) != line:
        line = longer
    return line


def _run(line: str, root: Path, symbols: Symbols) -> object:
    """Run a command, or ask the Python API, and give what there is then."""
    if line.startswith("python:"):
        return _simplify(golden_world.API[line.removeprefix("python:")](), symbols)
    if "$built" in line:
        (built,) = Path("artifacts/indexes").glob("bert-*")
        line = line.replace("$built", str(built))
    before = _stamps(root)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        words = shlex.split(line)
        is_study = words[0] == "label_consistency"
        code = label_consistency.main(words[1:]) if is_study else main(words)
    after = _stamps(root)
    new = [path for path in after if after[path] != before.get(path)]
    # by time where only the hash differs, which has no order
    new.sort(key=lambda path: (_HASH.sub("#", str(path)), after[path]))
    answers = [json.loads(line) for line in out.getvalue().splitlines() if line.startswith("{")]
    contents = {symbols.put_in(str(path)): _content(root / path, symbols) for path in new}
    left = {
        "answers": _table(answers, symbols),
        "files": _names(root, new, symbols),
        "contents": {name: value for name, value in contents.items() if value},
    }
    return {"code": code, **{name: value for name, value in left.items() if value}}


@contextlib.contextmanager
def _in_folder(root: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("PGRA_HOME", str(root / "m" / "home"))
        yield


def _stamps(root: Path) -> dict[Path, tuple[int, int]]:
    """Say when each file was written; models, locks and what the Trainer keeps do not count."""
    found = {}
    for path in root.rglob("*"):
        parts = path.relative_to(root).parts
        is_ours = parts[0] != "m" and not path.name.endswith((".lock", "-shm", "-wal"))
        if is_ours and path.is_file() and not any(part.startswith("checkpoint-") for part in parts):
            stat = path.stat()
            found[path.relative_to(root)] = (stat.st_mtime_ns, stat.st_size)
    return found


def _names(root: Path, new: list[Path], symbols: Symbols) -> dict[str, list[str]]:
    """Give the folders that hold files of these names, and the shapes of their arrays."""
    folders: dict[Path, list[Path]] = {}
    for path in new:
        folders.setdefault(path.parent, []).append(path)
    by_names: dict[str, list[str]] = {}
    for folder, paths in folders.items():
        arrays = [np.load(root / path, mmap_mode="r") for path in paths if path.suffix == ".npy"]
        shapes = sorted({"x".join(map(str, array.shape)) for array in arrays})
        names = " ".join(sorted(_HASH.sub("*", path.name) for path in paths))
        by_names.setdefault(names, []).append(" ".join([symbols.put_in(str(folder)), *shapes]))
    return dict(sorted(by_names.items()))


def _content(path: Path, symbols: Symbols) -> object:
    """Give the numbers that a file holds; None of those that hold no results."""
    if "artifacts" in path.parts:
        return None
    if path.suffix == ".jsonl":
        return _table(map(json.loads, path.read_text().splitlines()), symbols)
    if path.suffix in _DELIMITERS:
        lines = csv.reader(path.read_text().splitlines(), delimiter=_DELIMITERS[path.suffix])
        return [[*map(_number, line)] for line in lines]
    if path.suffix == ".safetensors":
        return {"norm": _norm(path)}
    return _simplify(json.loads(path.read_text()), symbols) if path.name in _OBJECTS else None


def _table(rows: Iterable[Mapping], symbols: Symbols) -> list[list[object]]:
    """Give the names of the first row's values, then each row's values."""
    plain = [_simplify(row, symbols) for row in rows]
    return [[*row] for row in plain[:1]] + [[*_leaves(row)] for row in plain]


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value


def _simplify(value: object, symbols: Symbols) -> object:
    """Leave out what is dropped, and name the fingerprints."""
    if isinstance(value, Mapping):
        kept = {key: item for key, item in value.items() if key not in _DROPPED}
        if "fingerprints" in kept:
            named = {}
            for key, item in sorted(kept["fingerprints"].items()):
                named[key] = " ".join(map(symbols.of, _HASH.findall(str(item))))
            kept["fingerprints"] = named
        return {key: _simplify(item, symbols) for key, item in kept.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_simplify(item, symbols) for item in value]
    return symbols.put_in(value) if isinstance(value, str) else _rounded(value)


def _rounded(value: object) -> object:
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)


def _number(text: str) -> object:
    try:
        return _rounded(float(text))
    except ValueError:
        return text


def _norm(path: Path) -> object:
    from safetensors.numpy import load_file

    squares = (float((array.astype("f8") ** 2).sum()) for array in load_file(path).values())
    return _rounded(math.sqrt(sum(squares)))


def expected_path(group: str) -> Path:
    return HERE / f"{group}.json"


def read(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


def write(value: object, path: Path) -> None:
    """Write JSON of a line each item, and each list of plain values: small, and git merges it."""
    text = json.dumps(value, indent=0, ensure_ascii=False)
    text = re.sub(r"\[[^][{}]*\]", lambda match: match[0].replace("\n", " "), text)
    path.write_text(f"{text}\n")
