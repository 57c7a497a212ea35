"""A T5's encoder as a text encoder: the k-NN baseline's in Guo et al. 2023."""

import torch

from pgra.errors import ModelError
from pgra.models.encoder import Encoder
from pgra.models.loading import (
    choose_device,
    dtype_name,
    find_model,
    load_pretrained,
    load_tokenizer,
)


def load_t5_encoder(
    name: str,
    *,
    normalize: bool = True,
    max_tokens: int = 128,
    device: str = "auto",
    batch_tokens: int = 1024,
) -> Encoder:
    """Load the encoder of a T5; a vector is the mean of its last states, </s> included.

    Args:
        name: Hub id, folder or bundled:NAME, of a T5 with its decoder or without.
        normalize: Whether vectors get unit length.
        max_tokens: Tokens of a text that are read.
        device: "auto", "cpu", "cuda", ...
        batch_tokens: Padded tokens a batch on a CPU; a GPU takes 16 times as many.

    Raises:
        ModelError: If it cannot be found or loaded, or is no T5.
    """
    from transformers import AutoModelForTextEncoding

    source, place = find_model(name), choose_device(device)
    # float32: a T5 overflows in float16, and the texts are few.
    model, report = load_pretrained(
        AutoModelForTextEncoding.from_pretrained,
        source,
        dtype=torch.float32,
        output_loading_info=True,
    )
    missing = sorted(report["missing_keys"])
    if missing or not hasattr(model.config, "relative_attention_num_buckets"):
        lacks = f"it lacks weights, such as {missing[0]}" if missing else "it is no T5"
        raise ModelError(
            f"'{name}' gives no T5 encoder ({lacks}): use --neighbor_encoder encoder, or a T5"
        )
    fingerprint = {
        "encoder": source.identity,
        "part": "encoder of a T5",
        "pooling": "mean",
        "normalize": normalize,
        "max_tokens": max_tokens,
        "dtype": dtype_name(torch.float32),
    }
    return Encoder(
        model.to(place).eval(),
        load_tokenizer(source),
        fingerprint=fingerprint,
        device=place,
        batch_tokens=batch_tokens,
    )
