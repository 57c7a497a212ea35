"""Models by name: a hub id (with an optional `@revision`), a folder, or `bundled:NAME`.

Which commit of the hub, and which device. Weights are safetensors only and never bring code of
their own. Fingerprints hold a model's content (the hub's commit, or the checksums of a folder's
files), never just its name.
"""

import contextlib
import json
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import xxhash

from pgra import artifacts as store
from pgra.context import check_device
from pgra.data.bundled import BUNDLED, bundled_model_dir
from pgra.data.read import hub_errors, hub_reason, read_json
from pgra.errors import ConfigError, ModelError, PgraError, cut, device_fault, reading
from pgra.lm.names import is_model
from pgra.progress import quiet_transformers
from pgra.types import Fields

logger = logging.getLogger(__name__)

_IDENTITY = (".safetensors", ".json", ".txt", ".model", ".jinja")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_MAIN = "main"
_PULL_REQUESTS = "refs/pr/"
_BOT = "SFconvertbot"  # only its requests are read: anyone may open one
_CONFIG = "config.json"
MODULES = "modules.json"
_ADAPTER = "adapter_config.json"
_LONGEST_REASON = 200  # characters of what a library says of a file: it may list all it knows
# Tokens of a batch on a GPU, times those on a CPU: a small LM's batch of 16 times as many takes
# Python longer to launch than the GPU to run (by arithmetic).
_GPU_TIMES = 64
# Their positions begin after the padding's index: of 514, 512 are tokens'.
_AFTER_PADDING = (
    "camembert",
    "data2vec-text",
    "esm",
    "ibert",
    "lilt",
    "longformer",
    "luke",
    "markuplm",
    "mpnet",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)


@dataclass(frozen=True)
class ModelSource:
    """Where a model is loaded from.

    Attributes:
        name: As the user wrote it.
        path: Hub id or local folder, as `from_pretrained` takes it.
        revision: The hub's commit, None for a folder.
        identity: For fingerprints: the hub's id and commit, or a digest of the files.
        is_only_cached: Whether the hub is unreachable, so that all must come from the cache.
        subfolder: Where in it the transformer is; "" is the top.
        inputs: A folder's files as they were found; the hub's cache never changes.
    """

    name: str
    path: str
    revision: str | None
    identity: str
    is_only_cached: bool = False
    subfolder: str = ""
    inputs: store.Inputs = field(default=store.NO_INPUTS, repr=False, compare=False)

    @property
    def kwargs(self) -> dict[str, Any]:
        if self.revision is None:
            return {"subfolder": self.subfolder} if self.subfolder else {}
        return {"revision": self.revision, "local_files_only": self.is_only_cached}


def find_model(name: str) -> ModelSource:
    """Find a model by name, without loading it.

    Raises:
        ModelError: If a bundled name is unknown or its package absent, a folder holds no
            safetensors or only adapters, or the hub has no such model or cannot be reached.
    """
    if not is_model(name):  # an engine's, or a user's own class, which have the files
        return ModelSource(name, name, None, name)
    if name.startswith(BUNDLED):
        folder = bundled_model_dir(name.removeprefix(BUNDLED))
    else:
        folder = store.at_home(name)
        if not folder.is_dir():
            return _find_on_hub(name)
    parts = read_parts(ModelSource(name, str(folder), None, ""))
    subfolder = parts[0] if parts else ""
    if (folder / subfolder / _ADAPTER).is_file():
        raise ModelError(_adapter_problem(str(folder / subfolder)))
    files = sorted(
        file
        for file in (folder.rglob("*") if parts else folder.iterdir())
        if file.suffix in _IDENTITY and file.name != "manifest.json"
    )
    inputs = store.Inputs.of(files)
    identity = _files_digest(folder, inputs)
    return ModelSource(name, str(folder), None, identity, subfolder=subfolder, inputs=inputs)


def _adapter_problem(name: str) -> str:
    return f"'{name}' holds adapters of peft: merge them (merge_and_unload), and save the model"


@lru_cache(maxsize=32)
def _files_digest(folder: Path, inputs: store.Inputs) -> str:
    for name, what in store.find_changes(folder):  # of a model that pgra trained
        raise ModelError(
            f"{folder / name} {what}: train it again, or move {store.CHECKSUMS_FILE} away"
        )
    paths = [Path(stamp[0]) for stamp in inputs.stamps]
    return store.digest(
        {path.relative_to(folder).as_posix(): store.file_checksum(path) for path in paths}
    )[:32]


@lru_cache(maxsize=32)
def _find_on_hub(name: str) -> ModelSource:
    """Find the commit to load, one with safetensors: from the hub, or else from the local cache."""
    repo, _, revision = name.partition("@")
    try:
        commit = _ask_hub(repo, revision)
        return ModelSource(name, repo, commit, f"{repo}@{commit}")
    except hub_errors() as error:
        reason = hub_reason(error)
    cached = None
    with contextlib.suppress(*hub_errors()):  # such as of a name that no model can have
        cached = _find_cached(repo, revision)
    if cached is None:
        raise ModelError(
            f"cannot find model '{name}': it is not a folder here, and the hub says: {reason} "
            "Give a folder, a hub id, or one of pgra list, such as --encoder bundled:minilm-l6, "
            "--lm bundled:smollm2-135m, --model_name_or_path bundled:t5-small-titles."
        )
    return ModelSource(name, repo, cached, f"{repo}@{cached}", is_only_cached=True)


def _ask_hub(repo: str, revision: str) -> str:
    """Ask for the commit of a revision; "" is main, or the bot's pull request with safetensors."""
    from huggingface_hub import HfApi, constants, hf_hub_download

    for reference in chain([revision or _MAIN], () if revision else _bot_requests(repo)):
        info = HfApi().model_info(repo, revision=reference, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        files = [file.rfilename for file in info.siblings or []]
        if _has_weights(files):
            # A file is fetched by its branch: the cache then knows which commit that is.
            first = _CONFIG if _CONFIG in files else MODULES
            return Path(hf_hub_download(repo, first, revision=reference)).parent.name
    name = f"{repo}@{revision}" if revision else repo
    raise ModelError(
        f"model '{name}' has no safetensors: name a commit that has "
        f"them ({repo}@{_PULL_REQUESTS}N), or write it to a folder with save_pretrained"
    )


def _bot_requests(repo: str) -> Iterator[str]:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    with contextlib.suppress(HfHubHTTPError):  # a model may have its discussions closed
        for request in HfApi().get_repo_discussions(repo, author=_BOT):
            if request.is_pull_request and (request.author, request.status) == (_BOT, "open"):
                yield f"{_PULL_REQUESTS}{request.num}"


def _find_cached(repo: str, revision: str) -> str | None:
    """Return a revision's commit in the local cache; "" is main, or a pull request."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repo, repo_type="model"))
    requests = [] if revision else sorted(folder.glob(f"refs/{_PULL_REQUESTS}*"))
    names = [path.relative_to(folder / "refs").as_posix() for path in requests]
    for reference in (revision or _MAIN, *names):
        for first in (_CONFIG, MODULES):
            path = try_to_load_from_cache(repo, first, revision=reference)
            if not isinstance(path, str):
                continue
            root = Path(path).parent
            if _has_weights(file.relative_to(root).as_posix() for file in root.rglob("*")):
                return root.name
    return None


def _has_weights(files: Iterable[str]) -> bool:
    names = set(files)
    if MODULES in names and "pytorch_model.bin" not in names:  # perhaps in its parts' folders
        return any(name.endswith(_WEIGHTS) for name in names)
    return _ADAPTER not in names and not names.isdisjoint(_WEIGHTS)


def find_model_file(source: ModelSource, name: str) -> Path | None:
    """Return a file beside a model's weights, or None; warns if neither hub nor cache can say."""
    if source.revision is None:
        path = Path(source.path) / name
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    try:
        return Path(hf_hub_download(source.path, name, **source.kwargs))
    except hub_errors() as error:
        if not isinstance(error, RemoteEntryNotFoundError):
            logger.warning("cannot see if '%s' has %s (%s)", source.name, name, hub_reason(error))
        return None


def read_parts(source: ModelSource) -> list[str]:
    """Return the folders of a sentence-transformers model's parts; none of another model."""
    modules = read_model_json(source, MODULES, list) or []
    with reading(f"{MODULES} of '{source.name}'", ModelError):
        return [str(module["path"]) for module in modules]


def fetch_parts(source: ModelSource) -> ModelSource:
    """Return an encoder's folder, downloaded if it is on the hub: weights and texts, no code."""
    if source.revision is not None:
        from huggingface_hub import snapshot_download

        wanted = [f"*{ending}" for ending in _IDENTITY]
        with _loading(source):
            path = snapshot_download(source.path, allow_patterns=wanted, **source.kwargs)
        source = replace(source, path=path, revision=None)
        source = replace(source, subfolder=[*read_parts(source), ""][0])
    for file in Path(source.path).rglob("pytorch_model.bin") if read_parts(source) else ():
        if not any(file.parent.glob("*.safetensors")):
            raise ModelError(f"{file.parent} has no .safetensors, the only kind that is loaded")
    return source


def read_model_json(source: ModelSource, name: str, kind: type) -> Any:
    """Read a model's JSON file, None if there is none; ModelError if it does not hold a `kind`."""
    path = find_model_file(source, name)
    with reading(f"{name} of '{source.name}'", ModelError):
        value = None if path is None else read_json(path)
        if not isinstance(value, kind | None):
            raise TypeError(f"it is not a {kind.__name__}")
        return value


def load_pretrained(
    loader: Callable[..., Any], source: ModelSource, *, unused: Collection[str] = (), **kwargs: Any
) -> Any:
    """Call a model's `from_pretrained` on a found model, safetensors only.

    transformers fills missing weights with random numbers and only logs it; here they are an error,
    but for the top-level parts in `unused`.

    Raises:
        ModelError: If weights are missing, damaged or of another architecture.
    """
    if "config" not in kwargs:
        kwargs["config"] = load_config(source)
    kwargs |= {"use_safetensors": True, "output_loading_info": True}
    model, report = load_by(loader, source, **kwargs)
    missing = [key for key in report["missing_keys"] if key.partition(".")[0] not in unused]
    missing += _find_lost_head(model, source)
    if any("lora_" in key or "ia3_" in key for key in report["unexpected_keys"]):
        raise ModelError(_adapter_problem(source.name))
    if missing:
        raise ModelError(
            f"'{source.name}' lacks {len(missing)} weights of a {type(model).__name__}, such as "
            f"{min(missing)}, which would be random: save the whole model again"
        )
    return model


def _find_lost_head(model: Any, source: ModelSource) -> list[str]:
    """Name the head that a T5's file lacks: transformers silently uses the embeddings instead."""
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None or weight is not model.get_input_embeddings().weight:
        return []
    name = PurePosixPath(source.subfolder, _CONFIG).as_posix()
    is_own = read_model_json(source, name, dict).get("tie_word_embeddings") is False
    return ["lm_head.weight"] if is_own else []


def load_by(
    loader: Callable[..., Any], source: ModelSource, part: str = "model", **kwargs: Any
) -> Any:
    """Call a loader on a found model, whose own code it neither runs nor asks to run.

    Raises:
        ModelError: If it fails, or the model cannot be loaded without its own code.
    """
    with _loading(source, part):
        # None would ask on the console, where a "y" of any origin runs a stranger's code.
        return loader(source.path, trust_remote_code=False, **source.kwargs, **kwargs)


@contextlib.contextmanager
def _loading(source: ModelSource, part: str = "model") -> Iterator[None]:
    """Turn any error meanwhile into a ModelError; refuse files that changed meanwhile."""
    try:
        with quiet_transformers():
            yield
        source.inputs.check()
    except (torch.OutOfMemoryError, PgraError):
        raise
    except Exception as error:
        reason = device_fault(error) or cut(hub_reason(error), _LONGEST_REASON)
        if "trust_remote_code" in reason:
            reason = "it needs code of its own, which is never run: give another model"
        raise ModelError(f"cannot load {part} '{source.name}': {reason}") from error


def check_loaded(model: Any, tokenizer: Any, what: str) -> None:
    """Raise ValueError for what is no loaded model of transformers with its tokenizer."""
    if not hasattr(model, "save_pretrained") or not hasattr(tokenizer, "save_pretrained"):
        raise ValueError(
            f"{what} is a name, or (model, tokenizer) of transformers, not a {type(model).__name__}"
        )


def save_loaded(model: Any, tokenizer: Any) -> store.TemporaryFolder:
    """Write a loaded encoder, or a `SentenceTransformer`, to a folder; raises as `check_loaded`."""
    folder = store.TemporaryFolder()
    if not type(model).__module__.startswith("sentence_transformers"):
        check_loaded(model, tokenizer, "an encoder")
        tokenizer.save_pretrained(str(folder.path))
    model.save_pretrained(str(folder.path))
    return folder


def loaded_source(model: Any, name: str) -> ModelSource:
    """Return the source of a loaded model, whose identity is a checksum of its weights."""
    hasher = xxhash.xxh3_128()
    for key, weight in model.state_dict().items():
        hasher.update(f"{key} {tuple(weight.shape)} {weight.dtype}".encode())
        hasher.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    config = store.digest(json.loads(model.config.to_json_string()))
    return ModelSource(name, "", None, f"loaded:{config[:12]}:{hasher.hexdigest()}")


def load_config(source: ModelSource) -> Any:
    """Load a model's configuration; ModelError if it is missing or of an unknown architecture."""
    from transformers import AutoConfig

    return load_by(AutoConfig.from_pretrained, source)


def is_encoder(name: str) -> bool:
    """Whether a name's model reads in both directions and writes no words, as BERT."""
    if not is_model(name):
        return False
    config = load_config(find_model(name))
    writes = "".join(config.architectures or ()).endswith(("CausalLM", "LMHeadModel"))
    return getattr(config, "is_decoder", None) is False and not writes


def cut_layers(config: Any, layer: str, name: str) -> int | None:
    """End a configuration with an earlier layer, in place: later ones are neither loaded nor run.

    Returns the layer's number; None if it is the last one, and nothing was changed. `layer` is
    "last", a number from 1 on, or a share of the depth between 0 and 1.

    Raises:
        ConfigError: If it is none of these, or there is no such layer.
    """
    if layer == "last":
        return None
    depth = int(config.num_hidden_layers)
    is_share = "." in layer
    number = 0
    with contextlib.suppress(ValueError, OverflowError):
        number = math.floor(float(layer) * (depth if is_share else 1) + 0.5)
    number = max(number, 1) if is_share and 0 < float(layer) < 1 else number
    if not 1 <= number <= depth:
        raise ConfigError(
            f"lm_layer is '{layer}', of {depth} in '{name}': give last, a number from 1, or a share"
        )
    if number == depth:
        return None
    config.num_hidden_layers = number
    for name in ("layer_types", "mlp_layer_types"):  # each as long as there are layers
        if kinds := getattr(config, name, None):
            setattr(config, name, kinds[:number])
    return number


def load_tokenizer(source: ModelSource, config: Any = None) -> Any:
    """Load a model's tokenizer, and check it against its configuration (None: read here).

    Raises:
        ModelError: If there is none that works, or one with tokens that the model does not have.
    """
    config = config or load_config(source)
    tokenizer = read_tokenizer(source, config)
    check_tokens(tokenizer, config, source.name)
    return tokenizer


def check_tokens(tokenizer: Any, config: Any, name: str) -> None:
    """Raise ModelError if a tokenizer has ids beyond the embeddings, which would crash on a GPU."""
    rows = getattr(config.get_text_config(), "vocab_size", None)
    last = max(tokenizer.get_vocab().values())
    if isinstance(rows, int) and last >= rows:
        raise ModelError(f"'{name}' has {rows} tokens, its tokenizer {last + 1}: give it its own")


def read_tokenizer(source: ModelSource, config: Any = None) -> Any:
    """Load a tokenizer, without need of the model's weights; ModelError if none works."""
    from transformers import AutoTokenizer

    tokenizer = load_by(AutoTokenizer.from_pretrained, source, "the tokenizer of", config=config)
    if len(tokenizer) < 2:  # transformers 5's answer to files that are named oddly
        raise ModelError(f"the tokenizer of '{source.name}' is empty: it lacks vocabulary files")
    return tokenizer


def choose_device(name: str) -> torch.device:
    """Return the device of that name, made ready; "auto" is the current GPU, or the CPU.

    "cuda" is the current GPU too: each of several processes has its own. A GPU that is named
    becomes the current one, for streams, pinned memory and libraries that ask for none.

    Raises:
        ModelError: If there is no such device; the message lists the GPUs.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    check_device(name)
    device = torch.device(name)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        # torch prefers it for half precision on H100 and H200: it gives a mask no gradient, and a
        # T5 learns its position bias through the mask.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def choose_dtype(name: str, device: torch.device, config: Any = None) -> torch.dtype:
    """Return the dtype of that name; "auto" is half precision on a GPU and float32 elsewhere.

    On a GPU "auto" is float16 where the configuration's weights are float16 (OPT), which is the
    more exact half; else bfloat16, whose range is float32's.
    """
    if name == "auto":
        if device.type != "cuda":
            return torch.float32
        is_half = getattr(config, "dtype", None) == torch.float16
        return torch.float16 if is_half else torch.bfloat16
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as in arguments and fingerprints: "float32"."""
    return str(dtype).removeprefix("torch.")


def batch_budget(tokens: int, device: torch.device) -> int:
    """Scale a CPU's token budget to a device: 64 times on a GPU."""
    return tokens * (_GPU_TIMES if device.type == "cuda" else 1)


def model_fields(source: ModelSource, dtype: torch.dtype) -> Fields:
    return {"model": source.identity, "dtype": dtype_name(dtype)}


def num_positions(config: Any) -> float:
    """Return how many tokens a model's positions are for; in RoBERTa's kind less than there are."""
    positions: float = getattr(config, "max_position_embeddings", None) or math.inf
    if positions < 0:  # XLNet's, which counts none
        return math.inf
    is_after = config.model_type in _AFTER_PADDING
    return positions - (config.pad_token_id + 1 if is_after else 0)
