"""The tiny models and files that the scenarios name, and what is asked of the public Python API."""

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from conftest import ENCODER_KINDS, LM_KINDS, SENTENCES


@cache
def _models() -> Path:
    """Build each model once a process."""
    from tiny_models import build_encoder, build_lm, build_t5

    root = Path(tempfile.mkdtemp(prefix="golden-models-"))
    for kind in LM_KINDS:
        build_lm(root / kind, kind)
    build_lm(root / "long", "llama", window=4096)
    for kind in ENCODER_KINDS:
        build_encoder(root / kind, kind)
    for kind in ("t5", "flan-t5"):
        _listening(build_t5(root / kind, kind))
    return root


def _listening(folder: Path) -> Path:
    """Give a T5 weights so large that its label depends on what it reads, after few steps too."""
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(5)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in sorted(weights.items()):
        if tensor.dim() > 1:
            weights[name] = torch.randn(tensor.shape, generator=generator) * 0.35
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def digest(root: Path) -> str:
    """Say which models these are: fingerprints can be compared only where they are alike."""
    found = hashlib.sha256()
    for path in sorted((root / "m").glob("*/*")):
        if path.parent.name != "home":
            found.update(f"{path.relative_to(root)} ".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def build(root: Path) -> None:
    """Write models and files into an empty folder."""
    shutil.copytree(_models(), root / "m")
    shutil.copytree(Path(__file__).parent / "files", root, dirs_exist_ok=True)


def _states(kind: str) -> dict[str, object]:
    """Give the states h(x) of a few texts under a prompt, and under two prefixes."""
    import pgra
    from pgra.data.examples import DataArguments, load_splits
    from pgra.exemplars.selector import build_prompt
    from pgra.lm.prefix import PromptedEncoder
    from pgra.prompts import prompt_template

    task = pgra.Task.load("reviews.yaml")
    files = DataArguments(task="reviews.yaml", train_file="train.jsonl", test_file="test.jsonl")
    train = load_splits(task, files).train
    template = prompt_template(task)
    lm = pgra.CausalLM(f"m/{kind}", device="cpu")
    told: dict[str, object] = {}
    for number in (0, 2, 4):
        prompt = build_prompt(template, train, task.prompt_words, num_exemplars=number)
        states = PromptedEncoder(lm, prompt).encode(SENTENCES[:3])
        told[f"{number} exemplars"] = [[*row[:6].tolist(), row.norm().item()] for row in states]
    return told


API: dict[str, Callable[[], dict[str, object]]] = {
    **{f"states {kind}": (lambda kind=kind: _states(kind)) for kind in LM_KINDS},
}
"""What is asked of `pgra/__init__.py`'s names, by the name that a scenario gives it."""
