"""What the benchmarks work on: real reviews with their prompt, and LMs by name or by shape."""

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from transformers import T5Config, T5ForConditionalGeneration

from pgra.config import DataArguments, choose
from pgra.data.examples import Splits, load_splits
from pgra.data.tasks import Task
from pgra.exemplars.prompt import build_prompt
from pgra.lm.causal_lm import CausalLM
from pgra.lm.load import cut_layers, find_model, load_config, load_pretrained, load_tokenizer
from pgra.methods.stages import prompt_template
from pgra.prompts.fewshot import FewShotPrompt
from pgra.reader.fid import FusionReader

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
    task = Task.load("rotten-tomatoes")
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


# Layers, width, heads and inner width of the sizes of Raffel et al. 2020.
T5_SHAPES = {
    "t5-small": (6, 512, 8, 2048),
    "t5-base": (12, 768, 12, 3072),
    "t5-large": (24, 1024, 16, 4096),
}
T5_TOKENIZER = "bundled:t5-small-titles"


def open_reader(name: str, *, device: torch.device) -> tuple[FusionReader, Any]:
    """Open a reader with its tokenizer, by name or at random in a shape (`random:t5-base`)."""
    if name.startswith(RANDOM):
        tokenizer = load_tokenizer(find_model(T5_TOKENIZER))
        return FusionReader(open_plain(name, device=device)), tokenizer
    return FusionReader.from_name(name).to(device), load_tokenizer(find_model(name))


def open_plain(name: str, *, device: torch.device) -> Any:
    """Open a T5 as transformers gives it, also one that pgra trained."""
    if not name.startswith(RANDOM):
        source = find_model(name)
        config = load_config(source)
        if config.feed_forward_proj == "gated-gelu":  # a reader's folder names our faster kernel
            config.dense_act_fn = "gelu_new"
        model = load_pretrained(T5ForConditionalGeneration.from_pretrained, source, config=config)
        return model.to(device).eval()
    kind = name.removeprefix(RANDOM)
    choose("shape", kind, sorted(T5_SHAPES))
    layers, width, heads, inner = T5_SHAPES[kind]
    config = T5Config(
        num_layers=layers,
        d_model=width,
        num_heads=heads,
        d_ff=inner,
        d_kv=64,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    torch.manual_seed(0)
    with device:
        return T5ForConditionalGeneration(config).eval()


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


def open_lm(
    name: str, *, dtype: str = "auto", device: str = "auto", layer: str = "last"
) -> CausalLM:
    """Open an LM by name, or lay out a random one (`random:opt-13b`); it may end with a layer."""
    if not name.startswith(RANDOM):
        return CausalLM.from_name(name, dtype=dtype, device=device, layer=layer)
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
    number = cut_layers(config, layer, name)
    lm = RandomLM(TOKENIZER, dtype=dtype, device=device)
    # Another LM than the one that lends its tokens: what is remembered of either is its own.
    lm.source = replace(lm.source, name=name, identity=f"{name} on {lm.source.identity}")
    lm.config, lm.layer, lm.window = config, number, config.max_position_embeddings
    return lm
