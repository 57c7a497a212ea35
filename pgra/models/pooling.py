"""From token states to one vector: the poolings there are, and which one a model was made with."""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pgra.data.hubfile import hub_errors, hub_reason
from pgra.errors import ModelError
from pgra.models.loading import ModelSource

logger = logging.getLogger(__name__)

POOLINGS = ("cls", "cls_before_pooler", "mean", "pooler")
_FILE = "1_Pooling/config.json"
_MODES = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}


def pool(output: Any, mask: Tensor, pooling: str) -> Tensor:
    """Pool token states.

    Args:
        output: What a transformers encoder returns; its states are (B, L, D).
        mask: True on real tokens, (B, L) bool.
        pooling: "cls" or "cls_before_pooler" (two names in use for one vector: the first token's
            last hidden state), "mean" (over real tokens, special ones included, as
            sentence-transformers does), or "pooler" (BERT's tanh layer on the first token, which
            the paper's code uses).

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
    return hidden[:, 0]


def resolve_pooling(source: ModelSource) -> str:
    """Choose the pooling a model was made with.

    A sentence-transformers model says it in its `1_Pooling/config.json`. SimCSE (Gao et al. 2021)
    says it nowhere: its own tool takes the pooler for supervised models, and the first token before
    the pooler for unsupervised ones. Everything else gets the mean.

    Raises:
        ModelError: If the model asks for a pooling that there is not.
    """
    path = _find_pooling_file(source)
    if path is not None:
        return _read_pooling(source, path)
    name = Path(source.name).name.lower()  # not the folders above it
    if "simcse" in name:
        is_supervised = "sup-simcse" in name and "unsup-simcse" not in name
        return "pooler" if is_supervised else "cls_before_pooler"
    return "mean"


def _find_pooling_file(source: ModelSource) -> Path | None:
    if source.revision is None:
        path = Path(source.path) / _FILE
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    known = try_to_load_from_cache(source.path, _FILE, revision=source.revision)
    if known is not None:  # a path, or a mark that the commit has no such file
        return Path(known) if isinstance(known, str) else None
    try:
        return Path(hf_hub_download(source.path, _FILE, **source.kwargs))
    except hub_errors() as error:
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            logger.debug("%s has no %s", source.name, _FILE)
            return None
        logger.warning(
            "cannot see if '%s' has its own pooling: give --pooling to be sure (%s)",
            source.name,
            hub_reason(error),
        )
    return None


def _read_pooling(source: ModelSource, path: Path) -> str:
    try:
        modes = json.loads(path.read_text())
        asked = modes.get("pooling_mode") or next(
            (key for key, value in modes.items() if key.startswith("pooling_mode") and value), None
        )
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{path} of '{source.name}' cannot be read: {error}") from None
    pooling = _MODES.get(str(asked), str(asked))
    if pooling not in ("cls", "mean"):
        raise ModelError(
            f"'{source.name}' asks for pooling '{asked}', which there is not: "
            f"give --pooling, one of {', '.join(POOLINGS)}"
        )
    return pooling
