"""Trust: what is planted never runs, markup is never raw, and nothing of the user's is written."""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from world import JOBS, Fault, World

_MARK = "<script>alert(1)</script>"
KEY, HOST = "sk-very-secret-key-81f2", "host-secret-44c1"
_CODE = """
import pathlib
pathlib.Path({flag!r}).write_text("it ran")
from transformers import BertConfig, BertModel

class PlantedConfig(BertConfig):
    pass

class Planted(BertModel):
    pass
"""


class Planted:
    """What writes a file when it is unpickled."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> tuple[object, ...]:
        return Path.write_text, (self.flag, "it ran")


def plant_pickle(world: World) -> str:
    """Leave a model's weights as a pickle alone, which is refused and never run."""
    flag = world.root / "ran"
    folder = world.root / "models" / "encoder"
    return _plant(world, flag, folder, lambda: _only_pickle(folder, flag), must_refuse=True)


def _only_pickle(folder: Path, flag: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(Planted(flag), folder / "pytorch_model.bin")


def plant_code(world: World) -> str:
    """Have a model's config name code of its own, which is never run."""
    flag = world.root / "ran"
    folder = world.root / "models" / "encoder"
    return _plant(world, flag, folder, lambda: name_code(folder, flag), must_refuse=False)


def name_code(folder: Path, flag: Path) -> None:
    """Put code beside a model, and its name into the model's config."""
    (folder / "planted.py").write_text(_CODE.format(flag=str(flag)))
    path = folder / "config.json"
    names = {"AutoConfig": "planted.PlantedConfig", "AutoModel": "planted.Planted"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": names}))


def _plant(
    world: World, flag: Path, folder: Path, change: Callable[[], object], *, must_refuse: bool
) -> str:
    flag.unlink(missing_ok=True)
    kept = world.root / "kept-model"
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(folder, kept)
    world.after()
    try:
        change()
        ended = world.call(JOBS["index"].words)
    finally:
        shutil.rmtree(folder)
        shutil.move(kept, folder)
    if flag.exists():
        return "what was planted ran"
    if ended.is_refused or (ended.code == 0 and not must_refuse):
        return ""
    return f"exit code {ended.code}: {ended.err[-300:]}"


def plant_checkpoint(world: World, *, sealed: bool = True) -> str:
    """Put a pickle into a checkpoint that a killed training would go on from."""
    flag = world.root / "ran"
    flag.unlink(missing_ok=True)
    words = JOBS["train"].words
    for _ in range(5):
        world.after()
        running = world.start(words)
        seal = world.here / "runs" / "pgra" / "checkpoint-2" / "checksums.json"
        while running.process.is_alive() and not seal.exists():
            time.sleep(0.0005)
        running.process.kill()
        running.wait()
        if found := sorted(seal.parent.glob("*.pt*")):
            break
    else:
        return "no kill left a checkpoint: nothing was tried"
    if not sealed:  # as an earlier pgra left it, or a kill before it was written
        seal.unlink()
    for path in found:
        torch.save(Planted(flag), path)
    ended = world.call(words)
    if flag.exists():
        return "what was planted ran"
    return "" if ended.is_refused or ended.code == 0 else ended.err[-300:]


def escape(world: World, before: Sequence[str] = ("train", "plain")) -> str:
    """Put markup into every text that the page and the table show."""
    world.after()
    for name in ("train.jsonl", "test.jsonl", "corpus.txt"):
        path = world.here / name
        path.write_text(path.read_text().replace("film", _MARK).replace(" sea", f" {_MARK}"))
    for name in before:
        ended = world.call(JOBS[name].words)
        assert ended.code == 0, ended
    ended = world.call(JOBS["html"].words)
    assert ended.code == 0, ended
    page = (world.here / "page.html").read_text()
    if "alert(1)" not in page:
        return "the page does not show the texts: nothing was tried"
    return "the page has a tag of a text" if _MARK in page else ""


def keep_secrets(
    world: World,
    names: Sequence[str] = ("train", "plain", "add", "icl", "html", "memory", "export", "lookup"),
) -> str:
    """Look for key, home folder and host in every file that commands write, and what they say.

    They run below the home folder, with models that are there.
    """
    home = str(world.root)
    secret = {"OPENAI_API_KEY": KEY, "HF_TOKEN": KEY, "HOME": home, "USER": "somebody-secret"}
    secret["HOSTNAME"] = HOST
    told = []
    world.after()
    for name in names:
        ended = world.call(JOBS[name].words, Fault(environment=secret))
        assert ended.code == 0, ended
        told.append(ended.out + ended.err)
    files = {str(p): p.read_bytes() for p in world.here.rglob("*") if p.is_file()}
    for place, data in {**files, "output": "".join(told).encode()}.items():
        for word in (KEY, home, "somebody-secret", HOST):
            if word.encode() in data:
                return f"{place} holds {word}"
    return ""


PARTS: Mapping[str, Callable[[World], str]] = {
    "pickle of weights": plant_pickle,
    "code of a model's own": plant_code,
    "pickle in a checkpoint": plant_checkpoint,
    "pickle in one without checksums": partial(plant_checkpoint, sealed=False),
    "markup in texts": escape,
    "key, home and host": keep_secrets,
}
