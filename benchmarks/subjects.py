"""What the benchmarks work on: real reviews with their prompt, and models by name or by shape.

A model of a shape has random weights, made where it runs: as fast as the real one, and of no
meaning. `random:opt-13b` has the tokens of a bundled model, `random:opt-13b@FOLDER` those of a
folder that need hold nothing but a tokenizer.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
import transformers

from pgra.config import choose
from pgra.data.examples import DataArguments, Splits, load_splits
from pgra.data.tasks import Task
from pgra.exemplars.selector import build_prompt
from pgra.lm.causal_lm import CausalLM
from pgra.lm.load import (
    choose_device,
    choose_dtype,
    find_model,
    load_config,
    load_pretrained,
    load_tokenizer,
)
from pgra.prompts import FewShotPrompt, prompt_template
from pgra.reader.fid import FusionReader

RANDOM = "random:"
TOKENIZER = "bundled:smollm2-135m"
# Layers, width, heads of Zhang et al. 2022 (OPT), table 1.
OPT_SHAPES = {
    "opt-tiny": (2, 64, 4),
    "opt-125m": (12, 768, 12),
    "opt-2.7b": (32, 2560, 32),
    "opt-13b": (40, 5120, 40),
}
# Layers, width, heads and inner width of the sizes of Raffel et al. 2020.
T5_SHAPES = {
    "t5-tiny": (2, 64, 1, 128),
    "t5-base": (12, 768, 12, 3072),
}
T5_TOKENIZER = "bundled:t5-small-titles"


def shape_of(name: str, shapes: Collection[str], lender: str) -> tuple[str, Any]:
    """Read `random:SHAPE` or `random:SHAPE@TOKENIZER`; give the shape and the tokenizer."""
    shape, _, folder = name.removeprefix(RANDOM).partition("@")
    choose("shape", shape, sorted(shapes))
    return shape, transformers.AutoTokenizer.from_pretrained(folder or find_model(lender).path)


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


def open_reader(name: str, *, device: torch.device) -> tuple[FusionReader, Any]:
    """Open a reader with its tokenizer, by name or at random in a shape (`random:t5-base`)."""
    if name.startswith(RANDOM):
        _, tokenizer = shape_of(name, T5_SHAPES, T5_TOKENIZER)
        return FusionReader(open_plain(name, device=device)), tokenizer
    source = find_model(name)
    return FusionReader.from_source(source).to(device), load_tokenizer(source)


def open_plain(name: str, *, device: torch.device) -> Any:
    """Open a T5 as transformers gives it, also one that pgra trained."""
    if not name.startswith(RANDOM):
        source = find_model(name)
        config = load_config(source)
        if config.feed_forward_proj == "gated-gelu":  # a reader's folder names our faster kernel
            config.dense_act_fn = "gelu_new"
        model = load_pretrained(
            transformers.T5ForConditionalGeneration.from_pretrained, source, config=config
        )
        return model.to(device).eval()
    shape, _ = shape_of(name, T5_SHAPES, T5_TOKENIZER)
    layers, width, heads, inner = T5_SHAPES[shape]
    config = transformers.T5Config(
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
        return transformers.T5ForConditionalGeneration(config).eval()


def open_lm(
    name: str, *, dtype: str = "auto", device: str = "auto", layer: str = "last"
) -> CausalLM:
    """Open an LM by name, or lay out a random one (`random:opt-13b`); it may end with a layer."""
    if not name.startswith(RANDOM):
        return CausalLM(name, dtype=dtype, device=device, layer=layer)
    shape, tokenizer = shape_of(name, OPT_SHAPES, TOKENIZER)
    layers, width, heads = OPT_SHAPES[shape]
    config = transformers.OPTConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        ffn_dim=4 * width,
        word_embed_proj_dim=width,
    )
    where = choose_device(device)
    model = _fill(config, where, choose_dtype(dtype, where))
    model.name_or_path = name
    return CausalLM(model, tokenizer, layer=layer)


def _fill(config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with device:
        return transformers.AutoModel.from_config(config, dtype=dtype).eval().requires_grad_(False)


def count_operations(config: Any, lengths: Sequence[int], *, behind: int = 0) -> float:
    """Count the operations of reading texts, from a model's configuration alone.

    A token that looks at c keys (its own among them) costs 2 N + 4 L W c: a multiplication and an
    addition for each of the N weights that stand in matrices, and the same for its query with each
    key and its weight with each value, in L layers whose heads are W wide together. That is the
    forward third of 6 N + 12 L H Q T in Chowdhery et al. 2022 ("PaLM", appendix B). Embeddings are
    looked up, not multiplied; a mixture of experts counts as if all experts ran.

    Args:
        config: Of the base model.
        lengths: Own tokens of each text.
        behind: Tokens before them that were read already; each text's tokens look at them.
    """
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    inner = [p for p in model.parameters() if p.dim() > 1 and id(p) not in tables]
    heads = getattr(config, "num_attention_heads", None) or 0  # none in a state-space LM
    head = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    looks = sum(n * behind + n * (n + 1) // 2 for n in lengths)
    attended = 4.0 * config.num_hidden_layers * heads * head * looks
    return float(2.0 * sum(p.numel() for p in inner) * sum(lengths) + attended)
