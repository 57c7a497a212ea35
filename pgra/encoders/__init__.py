"""Text encoders: a sentence to a vector."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from pgra.config import Arguments, arg, find_class
from pgra.lm.base import DTYPES

if TYPE_CHECKING:
    from pgra.encoders.encoder import Encoder

POOLINGS = ("auto", "cls", "cls_before_pooler", "last", "max", "mean", "pooler")


@dataclass(kw_only=True)
class EncoderArguments(Arguments):
    """Which encoder, and how it reads; shared by all that have one."""

    GROUP = "Retriever"

    encoder: str = arg(
        "google-bert/bert-base-uncased", "Encoder: hub id, folder or bundled:NAME.", is_common=True
    )
    pooling: str = arg(
        "auto",
        "auto (the model's own, else mean), cls, last, max, mean, pooler or cls_before_pooler. "
        "Under another than its own a sentence-transformers model has no Dense and Normalize.",
        choices=POOLINGS,
    )
    max_encoder_tokens: int | None = arg(
        None,
        "Tokens of a text that it reads; default: as a sentence-transformers model says, else 128.",
        least=4,
    )
    query_prompt: str | None = arg(
        None,
        "What it reads before each query, such as 'query: ' for E5; default: as the model says.",
    )
    encoder_dtype: str = arg(
        "auto",
        "auto (bfloat16 on a GPU, else float32), float32, bfloat16 or float16.",
        choices=DTYPES,
    )


@dataclass(kw_only=True)
class PassageEncoderArguments(EncoderArguments):
    """How an encoder writes the vectors of a corpus."""

    GROUP = "Retriever"

    normalize: bool = arg(
        True,
        "Unit vectors, so that the inner product is the cosine.",
        off="Vectors as the encoder gives them.",
    )
    passage_prompt: str | None = arg(
        None, "What it reads before each passage, such as 'passage: '."
    )
    encoder_batch_tokens: int = arg(
        1024,
        "Padded tokens in one encoder batch on a CPU; a GPU takes 32 times as many.",
        least=1,
        decides=False,
    )


def as_encoder(encoder: Any, *, device: str = "auto", **options: Any) -> "Encoder":
    """Return an `Encoder`, given as one, as arguments, or as its constructor takes it.

    Options are those of `Encoder`, and override arguments; one that is open stays as it is.

    Raises:
        ConfigError: Where torch is not installed, or as `Encoder`.
        ModelError: As `Encoder`.
        ValueError: If it is none of these.
    """
    name = str(getattr(encoder, "encoder", encoder))
    kind = find_class("encoder", name, {name: "pgra.encoders.encoder:Encoder"})
    if isinstance(encoder, EncoderArguments):
        names = {field.name for field in fields(PassageEncoderArguments)}
        options = {**{n: v for n, v in vars(encoder).items() if n in names}, **options}
        encoder = options.pop("encoder")
    opened: Encoder = encoder
    if not isinstance(encoder, kind):
        opened = kind(encoder, device=device, **options)
    return opened
