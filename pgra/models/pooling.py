"""From token states to one vector: the poolings there are, and which one a model was made with."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pgra.errors import ModelError
from pgra.models.loading import ModelSource, find_model_file

POOLINGS = ("cls", "cls_before_pooler", "last", "max", "mean", "pooler")
_FILE = "1_Pooling/config.json"
_MODES = {
    "lasttoken": "last",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
}
_VECTOR_OF = {"cls_before_pooler": "cls"}  # two names in use for one vector


def pool(output: Any, mask: Tensor, pooling: str) -> Tensor:
    """Pool token states.

    Args:
        output: What a transformers encoder returns; its states are (B, L, D).
        mask: True on real tokens, (B, L) bool.
        pooling: "cls" or "cls_before_pooler" (two names in use for one vector: the first token's
            last hidden state), "last" (the last real token's), "max" and "mean" (over real
            tokens, special ones included, as sentence-transformers does), or "pooler" (BERT's
            tanh layer on the first token, which the paper's code uses).

    Returns:
        (B, D) float32.
    """
    if pooling == "pooler":
        pooled: Tensor = output.pooler_output
        return pooled.float()
    hidden: Tensor = output.last_hidden_state.float()  # (B, L, D)
    if pooling == "mean":
        weights = mask.unsqueeze(-1).to(hidden.dtype)  # (B, L, 1)
        return torch.sum(hidden * weights, dim=1) / weights.sum(dim=1)
    if pooling == "max":
        return hidden.masked_fill(~mask.unsqueeze(-1), float("-inf")).max(dim=1).values
    if pooling == "last":
        last = mask.sum(dim=1) - 1  # padding stands on the right
        return hidden[torch.arange(len(hidden), device=hidden.device), last]
    return hidden[:, 0]


def resolve_pooling(source: ModelSource) -> str:
    """Choose the pooling a model was made with.

    A sentence-transformers model says it in its `1_Pooling/config.json`. SimCSE (Gao et al. 2021)
    says it nowhere: its own tool takes the pooler for supervised models, and the first token before
    the pooler for unsupervised ones. Everything else gets the mean.

    Raises:
        ModelError: If the model asks for a pooling that there is not.
    """
    path = find_model_file(source, _FILE)
    if path is not None:
        return _read_pooling(source, path)
    name = Path(source.name).name.lower()  # not the folders above it
    if "simcse" in name:
        is_supervised = "sup-simcse" in name and "unsup-simcse" not in name
        return "pooler" if is_supervised else "cls_before_pooler"
    return "mean"


def is_own_pooling(source: ModelSource, pooling: str) -> bool:
    """Return whether a pooling is the one a model was made with.

    What a sentence-transformers model has behind its pooling (Dense, Normalize) was trained on that
    pooling's vectors, so it belongs to no other.

    Args:
        source: The model.
        pooling: One of `POOLINGS`.

    Raises:
        ModelError: If the model's pooling cannot be read.
    """
    path = find_model_file(source, _FILE)
    own = resolve_pooling(source) if path is None else _pooling_name(_read_modes(source, path))
    return _VECTOR_OF.get(pooling, pooling) == _VECTOR_OF.get(own, own)


def _read_pooling(source: ModelSource, path: Path) -> str:
    modes = _read_modes(source, path)
    pooling = _pooling_name(modes)
    if pooling not in ("cls", "last", "max", "mean"):
        raise ModelError(
            f"'{source.name}' asks for pooling '{pooling}', which there is not: "
            f"give --pooling, one of {', '.join(POOLINGS)}"
        )
    if not modes.get("include_prompt", True):
        raise ModelError(
            f"'{source.name}' leaves its prompt out of the pooling (include_prompt), which is not "
            "done here: choose another encoder, or a --pooling to take it in"
        )
    return pooling


def _read_modes(source: ModelSource, path: Path) -> Mapping[str, Any]:
    try:
        modes = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} of '{source.name}' cannot be read: {error}") from None
    if not isinstance(modes, dict):
        raise ModelError(f"{path} of '{source.name}' cannot be read: it is no dict")
    return modes


def _pooling_name(modes: Mapping[str, Any]) -> str:
    """Give the pooling that is asked for; several, or an unknown one, by the library's names."""
    asked = modes.get("pooling_mode") or [
        key for key, value in modes.items() if key.startswith("pooling_mode") and value
    ]
    names = [asked] if isinstance(asked, str) else [str(name) for name in asked]
    return _MODES.get(names[0], names[0]) if len(names) == 1 else " + ".join(names)
