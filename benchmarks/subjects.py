"""What the benchmarks work on: real reviews with their prompt, and LMs by name or by shape."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from pgra.config import DataArguments, choose
from pgra.data.splits import Splits, load_splits
from pgra.data.tasks import load_task
from pgra.models.causal_lm import CausalLM
from pgra.pipelines.pgra import prompt_template
from pgra.prompts.fewshot import FewShotPrompt, build_prompt

RANDOM = "random:"
TOKENIZER = "bundled:smollm2-135m"
# Layers, width, heads of Zhang et al. 2022 (OPT), table 1.
OPT_SHAPES = {
    "opt-125m": (12, 768, 12),
    "opt-350m": (24, 1024, 16),
    "opt-1.3b": (24, 2048, 32),
    "opt-2.7b": (32, 2560, 32),
    "opt-6.7b": (32, 4096, 32),
    "opt-13b": (40, 5120, 40),
}


def read_reviews(
    *, exemplar_seed: int = 0, max_train_samples: int | None = None
) -> tuple[Splits, FewShotPrompt]:
    """Give the splits of a task with bundled data, and its prompt of 8 exemplars."""
    task = load_task("rotten-tomatoes")
    data = DataArguments(
        task=task.name,
        dataset_name="bundled:rotten-tomatoes",
        max_train_samples=max_train_samples,
    )
    splits = load_splits(task, data)
    prompt = build_prompt(
        prompt_template(task),
        splits.train,
        task.prompt_words,
        num_exemplars=8,
        seed=exemplar_seed,
    )
    return splits, prompt


@dataclass(frozen=True)
class RandomLM(CausalLM):
    """An LM of a given shape whose weights are random: as fast as the real one."""

    @cached_property
    def model(self) -> Any:
        """Make the weights where they are used."""
        from transformers import AutoModel

        torch.manual_seed(0)
        with self.device:
            model = AutoModel.from_config(self.config, dtype=self.dtype)
        return model.eval().requires_grad_(False)


def open_lm(name: str, *, dtype: str = "auto", device: str = "auto") -> CausalLM:
    """Open an LM by name, or lay out a random one (`random:opt-13b`)."""
    if not name.startswith(RANDOM):
        return CausalLM.from_name(name, dtype=dtype, device=device)
    from transformers import OPTConfig

    kind = name.removeprefix(RANDOM)
    choose("shape", kind, sorted(OPT_SHAPES))
    layers, width, heads = OPT_SHAPES[kind]
    config = OPTConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        ffn_dim=4 * width,
        do_layer_norm_before=kind != "opt-350m",
        word_embed_proj_dim=512 if kind == "opt-350m" else width,
    )
    real = CausalLM.from_name(TOKENIZER, dtype=dtype, device=device)
    # Another LM than the one that lends its tokens: what is remembered of either is its own.
    source = replace(real.source, name=name, identity=f"{name} on {real.source.identity}")
    return RandomLM(source, config, real.tokenizer, real.device, real.dtype)
