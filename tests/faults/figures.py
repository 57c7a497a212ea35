"""Numbers: weights that are no numbers are refused, and the same command gives the same bytes."""

import random
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from kills import everything
from safetensors.torch import load_file, save_file
from world import JOBS, MODELS, World, differing

# Commands that read a model, by the model.
READ_BY: Mapping[str, tuple[str, ...]] = {
    "lm": ("train", "icl", "rerank"),
    "encoder": ("index", "train", "icl", "knn", "lookup", "similar"),
    "t5": ("train", "plain", "gud-ir"),
}


def spoil_weights(world: World, name: str, seed: int) -> str:
    """Put NaN or infinity into one matrix of a model, which its commands must refuse.

    Or as large numbers as there are, whose states or losses overflow: these must be refused too,
    or leave nothing that is no number.
    """
    draw = random.Random(seed)
    bad = draw.choice(("nan", "inf", "-inf", "huge", "huge"))
    folder = world.root / "models" / name
    path = folder / "model.safetensors"
    good = path.read_bytes()
    weights = load_file(path)
    unread = ("wpe", "pooler")  # most places, and what no pooling of ours takes
    names = [k for k, v in weights.items() if v.dim() > 1 and not any(u in k for u in unread)]
    key = draw.choice(sorted(names))
    weights[key] = (
        weights[key] * (torch.finfo(torch.float32).max / weights[key].abs().max())
        if bad == "huge"
        else torch.full_like(weights[key], float(bad))
    )
    job = draw.choice(READ_BY[name])
    world.after(*JOBS[job].needs)
    try:
        save_file(weights, path, metadata={"format": "pt"})
        ended = world.call(JOBS[job].words)
    finally:
        path.write_bytes(good)
    if ended.is_refused:
        return ""
    told = f"{job} with {key} of {MODELS}{name} {bad}: exit code {ended.code}"
    if bad != "huge" or ended.code:
        return f"{told}: {ended.err[-300:]}"
    bad_files = [file for file in world.here.rglob("*") if not is_finite(file)]
    return f"{told}, and no numbers in {bad_files[:3]}" if bad_files else ""


def is_finite(path: Path) -> bool:
    """Whether all numbers of a file are."""
    if path.suffix == ".npy":
        return bool(np.isfinite(np.load(path)).all())
    if path.suffix == ".safetensors":
        return all(bool(tensor.isfinite().all()) for tensor in load_file(path).values())
    named = path.suffix in (".json", ".jsonl") and path.read_text()
    return not (named and re.search(r"\b(NaN|Infinity)\b", named))


def twice(world: World, name: str) -> str:
    """Run a command in two fresh folders; all files must be equal."""
    found = []
    for _ in range(2):
        world.after(*JOBS[name].needs)
        ended = world.call(JOBS[name].words)
        assert ended.code == 0, (name, ended)
        found.append(everything(world))
    return "; ".join(differing(*found)[:4])
