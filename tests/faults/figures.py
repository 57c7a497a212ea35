"""Numbers: weights that are no numbers are refused, and the same command gives the same bytes."""

import random
from collections.abc import Mapping

import torch
from kills import everything
from safetensors.torch import load_file, save_file
from world import JOBS, MODELS, World, differing

# Commands that read a model, by the model.
READ_BY: Mapping[str, tuple[str, ...]] = {
    "lm": ("train", "icl", "rerank", "worth"),
    "encoder": ("index", "train", "icl", "knn", "lookup", "similar"),
    "t5": ("train", "plain", "gud-ir"),
}


def spoil_weights(world: World, name: str, seed: int) -> str:
    """Put NaN or infinity into one matrix of a model; its commands must refuse."""
    draw = random.Random(seed)
    bad = draw.choice((float("nan"), float("inf"), float("-inf")))
    folder = world.root / "models" / name
    path = folder / "model.safetensors"
    good = path.read_bytes()
    weights = load_file(path)
    unread = ("wpe", "pooler")  # most places, and what no pooling of ours takes
    names = [k for k, v in weights.items() if v.dim() > 1 and not any(u in k for u in unread)]
    key = draw.choice(sorted(names))
    weights[key][:] = torch.tensor(bad)
    job = draw.choice(READ_BY[name])
    world.after(*JOBS[job].needs)
    try:
        save_file(weights, path, metadata={"format": "pt"})
        ended = world.call(JOBS[job].words)
    finally:
        path.write_bytes(good)
    if ended.is_refused:
        return ""
    return f"{job} with {key} of {MODELS}{name} {bad}: exit code {ended.code}: {ended.err[-300:]}"


def twice(world: World, name: str) -> str:
    """Run a command in two fresh folders; all files must be equal."""
    found = []
    for _ in range(2):
        world.after(*JOBS[name].needs)
        ended = world.call(JOBS[name].words)
        assert ended.code == 0, (name, ended)
        found.append(everything(world))
    return "; ".join(differing(*found)[:4])
