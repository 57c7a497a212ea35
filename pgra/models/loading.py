"""Models by name: a hub id (with an optional `@revision`), a local folder, or `bundled:NAME`.

Weights are safetensors only and never bring code of their own. A model's identity in fingerprints
is its content: the hub's commit, or the checksums of a folder's files, never just its name.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from pgra.data.hubfile import hub_errors, hub_reason
from pgra.errors import ModelError
from pgra.io import digest, file_checksum
from pgra.models.bundled import bundled_model_dir
from pgra.models.hub import find_commit
from pgra.types import Json

logger = logging.getLogger(__name__)

BUNDLED = "bundled:"
_IDENTITY = (".safetensors", ".json", ".txt", ".model", ".jinja")


@dataclass(frozen=True)
class ModelSource:
    """Where a model is loaded from.

    Attributes:
        name: As the user wrote it.
        path: Hub id or local folder, as `from_pretrained` takes it.
        revision: The hub's commit, None for a folder.
        identity: What fingerprints hold of it: the hub's id and commit, or a digest of the files.
        is_only_cached: Whether the hub cannot be asked, so that all must come from the cache.
    """

    name: str
    path: str
    revision: str | None
    identity: str
    is_only_cached: bool = False

    @property
    def kwargs(self) -> dict[str, Any]:
        """Arguments that every `from_pretrained` gets."""
        if self.revision is None:
            return {}
        return {"revision": self.revision, "local_files_only": self.is_only_cached}


def find_model(name: str) -> ModelSource:
    """Find a model by name, without loading it.

    Raises:
        ModelError: If a bundled name is unknown or its package absent, a folder holds no
            safetensors, or the hub has no such model or cannot be reached.
    """
    if name.startswith(BUNDLED):
        folder = bundled_model_dir(name.removeprefix(BUNDLED))
        return ModelSource(name, str(folder), None, _folder_identity(folder))
    folder = Path(name).expanduser()
    if folder.is_dir():
        _check_folder(folder)
        return ModelSource(name, str(folder), None, _folder_identity(folder))
    return _find_on_hub(name)


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is not a model folder: it has no config.json")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{folder} has no .safetensors weights, the only kind that is loaded: "
            "load it once with transformers and write it again with save_pretrained"
        )


def _folder_identity(folder: Path) -> str:
    files = sorted(
        p for p in folder.iterdir() if p.suffix in _IDENTITY and p.name != "manifest.json"
    )
    stamps = tuple((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files)
    return _files_digest(folder, stamps)


@lru_cache(maxsize=32)
def _files_digest(folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> str:
    return digest({name: file_checksum(folder / name) for name, _, _ in stamps})[:32]


def _find_on_hub(name: str) -> ModelSource:
    repo, _, revision = name.partition("@")
    found = find_commit(repo, revision or None)
    identity = f"{repo}@{found.commit}"
    return ModelSource(name, repo, found.commit, identity, is_only_cached=found.is_only_cached)


def find_model_file(source: ModelSource, name: str) -> Path | None:
    """Give a file that a model may have beside its weights, or None where it has none.

    Where the hub cannot be asked and the cache does not know, that is told.
    """
    if source.revision is None:
        path = Path(source.path) / name
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    known = try_to_load_from_cache(source.path, name, revision=source.revision)
    if known is not None:  # a path, or a mark that the commit has no such file
        return Path(known) if isinstance(known, str) else None
    try:
        return Path(hf_hub_download(source.path, name, **source.kwargs))
    except hub_errors() as error:
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            logger.debug("%s has no %s", source.name, name)
            return None
        logger.warning(
            "cannot see if '%s' has %s, its own pooling or prompts: give --pooling, --query_prompt "
            "and --passage_prompt to be sure (%s)",
            source.name,
            name,
            hub_reason(error),
        )
    return None


def load_pretrained(loader: Callable[..., Any], source: ModelSource, **kwargs: Any) -> Any:
    """Call a model's `from_pretrained` on a found model, safetensors only.

    Raises:
        ModelError: If the weights are missing, damaged or of another architecture.
    """
    return _load(loader, source, use_safetensors=True, **kwargs)


def _load(loader: Callable[..., Any], source: ModelSource, **kwargs: Any) -> Any:
    try:
        return loader(source.path, **source.kwargs, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except hub_errors(ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        is_partial = source.revision is not None and isinstance(error, hub_errors())
        hint = " If the connection broke, run again: what came is kept." if is_partial else ""
        raise ModelError(f"cannot load model '{source.name}': {hub_reason(error)}{hint}") from error


def load_config(source: ModelSource) -> Any:
    """Load a model's configuration.

    Raises:
        ModelError: If it has none, or of an architecture that transformers does not know.
    """
    from transformers import AutoConfig

    return _load(AutoConfig.from_pretrained, source)


def load_tokenizer(source: ModelSource, config: Any = None) -> Any:
    """Load a model's tokenizer.

    Args:
        source: The model.
        config: Its configuration, where it was read already; None: it is read once more.

    Raises:
        ModelError: If it has none that works.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source.path, config=config, **source.kwargs)
    except hub_errors(ValueError, KeyError, TypeError, AttributeError) as error:
        reason = hub_reason(error)
        raise ModelError(f"cannot load the tokenizer of '{source.name}': {reason}") from error
    if (
        len(tokenizer) < 2
    ):  # transformers 5 gives an empty one, without a word, when files are named oddly
        raise ModelError(
            f"the tokenizer of '{source.name}' is empty: its folder lacks the vocabulary files"
        )
    return tokenizer


def tokenizer_identity(tokenizer: Any) -> str:
    """Give a digest of all that decides a tokenizer's tokens: a trained copy's is the same."""
    state = (
        tokenizer.backend_tokenizer.to_str()
        if tokenizer.is_fast
        else [tokenizer.get_vocab(), tokenizer.special_tokens_map]
    )
    return digest([type(tokenizer).__name__, state])


def choose_device(name: str) -> torch.device:
    """Give the device of that name, made ready; "auto" is the current GPU if there is one.

    Raises:
        ModelError: If there is no such device.
    """
    if name == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return ready_device(torch.device("cuda", torch.cuda.current_device()))
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"cannot use device '{name}': {reason}. Use auto or cpu.") from None
    return ready_device(device)


def ready_device(device: torch.device) -> torch.device:
    """Set what models need on this device, for the whole process; give the device back.

    On a GPU scaled_dot_product_attention goes without cuDNN's kernel: torch prefers that one for
    half precision on H100 and H200, but it gives a mask no gradient, and a T5 learns its position
    bias through the mask.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Give the dtype of that name; "auto" is bfloat16 on a GPU and float32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Spell a dtype as arguments and fingerprints do: "float32"."""
    return str(dtype).removeprefix("torch.")


def batch_budget(tokens: int, device: torch.device) -> int:
    """Scale a CPU's token budget to a device: 16 times as many on a GPU."""
    return tokens * (16 if device.type == "cuda" else 1)


def model_fields(source: ModelSource, dtype: torch.dtype) -> Mapping[str, Json]:
    """Give what a fingerprint holds of a loaded model."""
    return {"model": source.identity, "dtype": dtype_name(dtype)}
