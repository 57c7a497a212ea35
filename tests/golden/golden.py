"""Runs the scenarios, keeps what they left as plain JSON, and tells where two records differ."""

import contextlib
import io
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import golden_world
import numpy as np
import pytest
import yaml
from golden_compare import leaves

from pgra.cli import main

HERE = Path(__file__).parent
FINGERPRINTS = HERE / "fingerprints.json"
_TOLD = yaml.safe_load((HERE / "scenarios.yaml").read_text())
SCENARIOS: dict[str, dict[str, str]] = _TOLD["groups"]
_SHORT: dict[str, str] = _TOLD["short"]

_HASH = re.compile(
    "(?<![0-9a-zA-Z])(?:"
    + "|".join(f"[0-9a-f]{{{n}}}" for n in (64, 32, 16, 12))
    + ")(?![0-9a-zA-Z])"
)
_WEIGHTS = re.compile("xxh3:[0-9a-f]+")
"""Of trained weights: their last digits differ between processors."""
_UNITS = {
    "<time>": "s|ms|min|h|minutes|seconds",
    "<speed>": r"\w*FLOP/s|\w+/s( in one call)?",
    "<size>": "bytes|B|kB|MB|GB|KiB|MiB|GiB",
}
_VOLATILE = [  # what a clock, a disk, a processor or an installation says
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?( ?UTC|Z|[+-]\d\d:\d\d)?"), "<when>"),
    *((re.compile(rf"\b\d[\d.,]* ({units})(?!\w)"), name) for name, units in _UNITS.items()),
    (re.compile(r"\b\d+\.\d+\.\d+(\+cpu)?(?![\d.])"), "<version>"),
    (re.compile(r"(?<=  bytes) +[\d,]+|(?<=  index) +[\d.]+ KB(?=  on disk)"), " <size>"),
]
_DROPPED = {
    *("git_commit", "versions", "notes", "seconds", "time", "when"),
    *("uses_seed", "date", "sizes", "digest", "files"),
}
"""Of metrics: what differs each time, also by its checksum, notes, which are shown too, and what a
class or the data declares."""
_NAME_ONLY = (
    "run.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
_KEYS = {"arguments.json": 2, "pgra.json": 1}
"""Of these the keys alone, down to so many levels: their values are in the command line."""
_TEXTS = (".txt", ".csv", ".md")
_SHARED = (*_KEYS, "prompt.txt")
"""Of these, one that is as an earlier one only says so."""


@dataclass
class Symbols:
    """Names fingerprints in the order in which they are met, so that a record says which recur.

    Which artifact is reused and which is made anew then shows whatever the hashes are; what they
    are stands in a file of its own.
    """

    names: dict[str, str] = field(default_factory=dict)
    lasting: set[str] = field(default_factory=set)

    step: int = 0
    met: int = 0

    def of(self, text: str) -> str:
        """Give #step.number, so that more or fewer in one step change no name of the next."""
        key = text[:12]
        if key not in self.names:
            self.met += 1
            self.names[key] = f"#{self.step}.{self.met}"
        return self.names[key]

    def next_step(self) -> None:
        self.step, self.met = self.step + 1, 0

    def put_in(self, text: str, *, lasts: bool = False) -> str:
        """Put symbols for fingerprints; those that last hold no time and no commit."""
        if lasts:
            self.lasting |= {match[0][:12] for match in _HASH.finditer(_WEIGHTS.sub("", text))}
        return _HASH.sub(lambda match: self.of(match.group()), text)

    def values(self) -> dict[str, str]:
        return {name: text for text, name in self.names.items() if text in self.lasting}


def record(group: str, root: Path) -> dict:
    """Run a group's commands one after the other in a new folder.

    Args:
        group: A key of `SCENARIOS`.
        root: An empty folder; the commands run in it, so that all paths are relative.

    Returns:
        What each left, by its name; under "fingerprints" what the symbols stand for.
    """
    golden_world.build(root)
    symbols, texts, steps = Symbols(), {}, {}
    with _in_folder(root):
        for name, told in SCENARIOS[group].items():
            symbols.next_step()
            line = expand(told)
            if "$built" in line:
                (built,) = Path("artifacts/indexes").glob("bert-*")
                line = line.replace("$built", str(built))
            before = _stamps(root)
            if line.startswith("python:"):
                steps[name] = _simplify(golden_world.API[line.removeprefix("python:")](), symbols)
                continue
            code, out, err = _call(shlex.split(line))
            shown = _lines(out, symbols)
            if len(shown) > 9:
                shown = _once(shown, name, texts)
            step = {"code": code, "out": shown}
            if code:
                step["error"] = _first_words(err)
            step |= _left(root, before, symbols, texts)
            steps[name] = {key: value for key, value in step.items() if value not in ([], {})}
    found = {"models": golden_world.digest(root), **symbols.values()}
    return {"steps": steps, "fingerprints": found}


def expand(told: str) -> str:
    """Write out the abbreviations of a scenario's line."""
    while (line := re.sub(r"\$(\w+)", lambda match: _SHORT.get(match[1], match[0]), told)) != told:
        told = line
    return line


def _call(argv: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    return code, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def _in_folder(root: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("PGRA_HOME", str(root / "m" / "home"))
        patch.setenv("COLUMNS", "180")  # tables are as wide as the terminal
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


def _left(root: Path, before: Mapping, symbols: Symbols, texts: dict[str, str]) -> dict:
    """Give names of the files that a command wrote or removed, and what those for people hold."""
    after = _stamps(root)
    new = [path for path in after if after[path] != before.get(path)]
    # by time where only the hash differs: the order of hashes is none
    new.sort(key=lambda path: (_HASH.sub("#", str(path)), after[path]))
    for path in (path for path in new if path.name == "metrics.json"):
        for key, value in _fingerprints(json.loads((root / path).read_text())):
            symbols.put_in(f"{key} {value}", lasts=key != "reader")
    contents = {}
    for path in new:
        value = _content(root / path, symbols)
        shown = symbols.put_in(str(path), lasts=path.parts[0] == "artifacts")
        if value is not None:
            is_long = isinstance(value, list) and len(value) > 9
            is_shared = path.name in _SHARED or (is_long and path.suffix in _TEXTS)
            contents[shown] = _once(value, shown, texts) if is_shared else value
    gone = sorted({symbols.put_in(str(path.parent)) for path in before if path not in after})
    return {"files": _names(root, new, symbols), "left of": gone, "contents": contents}


def _once(value: object, name: str, texts: dict[str, str]) -> object:
    """Give a text, or the name of the place where it has been told already."""
    written = json.dumps(value)
    if written in texts:
        return f"as {texts[written]}"
    texts[written] = name
    return value


def _names(root: Path, new: list[Path], symbols: Symbols) -> dict[str, list[str]]:
    """Give the folders that hold files of these names, and how many rows their arrays have."""
    folders: dict[Path, list[Path]] = {}
    for path in new:
        folders.setdefault(path.parent, []).append(path)
    told: dict[str, list[str]] = {}
    for folder, paths in folders.items():
        arrays = [np.load(root / path, mmap_mode="r") for path in paths if path.suffix == ".npy"]
        sizes = sorted({"x".join(map(str, array.shape)) for array in arrays})
        names = " ".join(sorted(_HASH.sub("*", path.name) for path in paths))
        told.setdefault(names, []).append(" ".join([symbols.put_in(str(folder)), *sizes]))
    return dict(sorted(told.items()))


def _fingerprints(metrics: Mapping) -> Iterator[tuple[str, str]]:
    for key, value in sorted(metrics.get("fingerprints", {}).items()):
        yield key, json.dumps(value, sort_keys=True)


def _content(path: Path, symbols: Symbols) -> object:
    """Give what a file for people holds; None of all others."""
    if "artifacts" in path.parts or path.name in _NAME_ONLY or path.name == "README.md":
        return None
    if path.name in _KEYS:
        return _key_names(json.loads(path.read_text()), _KEYS[path.name])
    if path.suffix == ".jsonl":
        return [_row(json.loads(line), symbols) for line in path.read_text().splitlines()]
    if path.suffix == ".json":
        return dict(
            leaves(_simplify(_with_symbols(json.loads(path.read_text()), symbols), symbols))
        )
    if path.suffix in _TEXTS:
        return _lines(path.read_text(), symbols)
    if path.suffix == ".safetensors":
        return {"norm": _rounded(_norm(path))}
    return None


def _key_names(value: Mapping, levels: int) -> str:
    """Name keys; those of the Trainer differ between versions of its library."""
    names = []
    for key, item in sorted(value.items()):
        if key == "digest":
            continue
        goes_on = levels > 1 and isinstance(item, Mapping) and key != "training"
        names.append(f"{key}({_key_names(item, levels - 1)})" if goes_on else key)
    return " ".join(names)


def _with_symbols(value: object, symbols: Symbols) -> object:
    """Shorten the fingerprints of a metrics.json to their symbols."""
    if not isinstance(value, Mapping) or "fingerprints" not in value:
        return value
    told = {key: _HASH.findall(text) for key, text in _fingerprints(value)}
    short = ", ".join(f"{k} {' '.join(map(symbols.of, found))}" for k, found in told.items())
    return {**value, "fingerprints": short}


def _norm(path: Path) -> float:
    from safetensors.numpy import load_file

    return math.sqrt(
        sum(float((array.astype("f8") ** 2).sum()) for array in load_file(path).values())
    )


def _row(row: Mapping, symbols: Symbols) -> object:
    """Write a line of a jsonl file in one string."""
    if list(row) == ["step", "loss", "learning_rate"]:
        return _rounded(row["loss"])
    row = dict(row)
    parts = []
    if "prediction" in row:
        parts = [str(row.pop("id", "")), f"{row.pop('label', None)}>{row.pop('prediction')}"]
        parts += [f"{name}={value:.4f}" for name, value in row.pop("scores", {}).items()]
        parts += [_evidence(dict(item), symbols) for item in row.pop("evidence", None) or []]
        for item in row.pop("exemplars", None) or []:
            near = item.get("similarity")
            parts.append(f"{item['id']}" + ("" if near is None else f":{near:.4f}"))
    if parts and parts[0]:  # an example of a file, where its text is
        for name in ("text", "fields"):
            row.pop(name, None)
    rest = {key: value for key, value in row.items() if value not in (0, "", None, [], {})}
    if rest:
        parts.append(json.dumps(_simplify(rest, symbols), ensure_ascii=False))
    return " ".join(parts)


def _evidence(item: dict[str, object], symbols: Symbols) -> str:
    told = [f"{item.pop('row', None)}@{item.pop('stage1_rank', None)}"]
    scores = (item.pop("stage1_score", None), item.pop("score", None))
    told += [f"{score:.4f}" for score in scores if score is not None]
    item.pop("text", None)
    return "/".join([*told, *([json.dumps(_simplify(item, symbols))] if item else [])])


def _simplify(value: object, symbols: Symbols) -> object:
    if isinstance(value, Mapping):
        kept = ((key, item) for key, item in value.items() if key not in _DROPPED)
        return {key: _simplify(item, symbols) for key, item in kept if item is not None}
    if isinstance(value, list | tuple):
        return [_simplify(item, symbols) for item in value]
    if isinstance(value, str):
        return _masked(symbols.put_in(value))
    return _rounded(value)


def _rounded(value: object) -> object:
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)


def _masked(text: str) -> str:
    text = re.sub(" {4,}", "   ", text.replace(f"{Path.cwd()}/", ""))
    for pattern, name in _VOLATILE:
        text = pattern.sub(name, text)
    return text


def _lines(text: str, symbols: Symbols) -> list[object]:
    rows = []
    for line in text.rstrip("\n").splitlines():
        is_json = line.startswith("{") and line.endswith("}")
        rows.append(
            _row(json.loads(line), symbols) if is_json else _masked(symbols.put_in(line.rstrip()))
        )
    return rows


def _first_words(err: str) -> str:
    last = err.strip().splitlines()[-1]
    return _masked(" ".join(last.removeprefix("pgra: ").split()[:7]))


def expected_path(group: str) -> Path:
    return HERE / f"{group}.json"


def read(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


def write(value: object, path: Path) -> None:
    text = json.dumps(value, indent=0, ensure_ascii=False)  # a line each: small, and git merges it
    path.write_text(f"{text}\n")
