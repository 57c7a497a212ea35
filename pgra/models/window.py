"""How many tokens of a text an encoder reads."""

from typing import Any

import torch

from pgra.errors import ConfigError
from pgra.models.sentence import DEFAULT_MAX_TOKENS, SentenceModel

_NO_LENGTH = 1 << 31  # what tokenizers say that know of none is larger still


def own_length(sentence: SentenceModel, model: Any, tokenizer: Any) -> int:
    """Give the tokens that sentence-transformers reads of a text; 128 for a plain encoder."""
    if not sentence.is_one:
        return DEFAULT_MAX_TOKENS
    most = sentence.max_tokens or tokenizer.model_max_length
    window = _count_positions(model)
    if window is None:
        return int(most) if most < _NO_LENGTH else DEFAULT_MAX_TOKENS
    return min(int(most), window)


def check_window(name: str, model: Any, max_tokens: int) -> None:
    """Refuse to read more tokens than a model has positions for.

    Raises:
        ConfigError: With both numbers.
    """
    window = _count_positions(model)
    if window is not None and max_tokens > window:
        raise ConfigError(
            f"max_encoder_tokens is {max_tokens}, but '{name}' reads at most {window}: lower it"
        )


def _count_positions(model: Any) -> int | None:
    table = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    if isinstance(table, torch.nn.Embedding):
        # RoBERTa's kind counts positions from behind its padding index: 514 rows read 512 tokens.
        unused = 0 if table.padding_idx is None else table.padding_idx + 1
        return table.num_embeddings - unused
    window: int | None = getattr(model.config, "max_position_embeddings", None)
    return window
