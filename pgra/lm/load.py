"""Models by name: a hub id (with an optional `@revision`), a folder, or `bundled:NAME`.

Which commit of the hub, which devices, and how many bits. Weights are safetensors only and never
bring code of their own. Fingerprints hold a model's content (the hub's commit, or the checksums of
a folder's files), never just its name.
"""

import contextlib
import importlib.util
import json
import logging
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import xxhash

from pgra.artifacts import (
    CHECKSUMS_FILE,
    NO_INPUTS,
    Inputs,
    TemporaryFolder,
    at_home,
    digest,
    file_checksum,
    find_changes,
)
from pgra.core import Json, check_device, machine_memory
from pgra.data.bundled import bundled_model_dir
from pgra.data.read import hub_errors, hub_reason, read_json
from pgra.errors import ConfigError, ModelError, PgraError, cut, device_fault, show
from pgra.progress import quiet_transformers

logger = logging.getLogger(__name__)

BUNDLED = "bundled:"
_IDENTITY = (".safetensors", ".json", ".txt", ".model", ".jinja")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_MAIN = "main"
_PULL_REQUESTS = "refs/pr/"
_BOT = "SFconvertbot"  # only its requests are read: anyone may open one
_CONFIG = "config.json"
MODULES = "modules.json"
_ADAPTER = "adapter_config.json"
_LONGEST_REASON = 200  # characters of what a library says of a file: it may list all it knows
_LARGE = 13e9  # weights of an LM for which a batch is 16 times a CPU's
_MOST_TIMES = 16  # that batch, for smaller ones


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
    inputs: Inputs = field(default=NO_INPUTS, repr=False, compare=False)

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
    subfolder = ""
    if name.startswith(BUNDLED):
        folder = bundled_model_dir(name.removeprefix(BUNDLED))
    else:
        folder = at_home(name)
        if not folder.is_dir():
            return _find_on_hub(name)
        subfolder = _find_transformer(name, folder)
    home = folder / subfolder
    files = sorted(
        file
        for place in {folder, home}
        for file in place.iterdir()
        if file.suffix in _IDENTITY and file.name != "manifest.json"
    )
    inputs = Inputs.of(files)
    identity = _files_digest(folder, inputs)
    return ModelSource(name, str(folder), None, identity, subfolder=subfolder, inputs=inputs)


def _find_transformer(name: str, folder: Path) -> str:
    """Return a folder's subfolder with the transformer, "" for the top; refuse what is no model."""
    parts = read_parts(ModelSource(name, str(folder), None, ""))
    first = parts[0] if parts else ModelPart("Transformer", "")
    kind = first.kind.rpartition(".")[2]
    subfolder = first.path if kind == "Transformer" else ""
    home = folder / subfolder
    if (home / _ADAPTER).is_file():
        raise ModelError(_adapter_problem(str(home)))
    if not (home / _CONFIG).is_file():
        lacks = "it has no config.json"
        if kind != "Transformer":
            lacks = f"its first part is {show(kind)} (in {MODULES}), not a Transformer"
        raise ModelError(f"{home} is not a model folder: {lacks}")
    if not any(home.glob("*.safetensors")):
        raise ModelError(
            f"{home} has no .safetensors weights, the only kind that is loaded: "
            "load it once with transformers and write it again with save_pretrained"
        )
    return subfolder


def _adapter_problem(name: str) -> str:
    return (
        f"'{name}' holds adapters of peft (LoRA), not a whole model: load it with peft, merge "
        "them (merge_and_unload), and save that model and its tokenizer with save_pretrained"
    )


@lru_cache(maxsize=32)
def _files_digest(folder: Path, inputs: Inputs) -> str:
    for name, what in find_changes(folder):  # of a model that pgra trained
        raise ModelError(
            f"{folder / name} {what}: train it again, or move {folder / CHECKSUMS_FILE} away if "
            "you changed it yourself"
        )
    paths = [Path(stamp[0]) for stamp in inputs.stamps]
    return digest({path.relative_to(folder).as_posix(): file_checksum(path) for path in paths})[:32]


@lru_cache(maxsize=32)
def _find_on_hub(name: str) -> ModelSource:
    """Find the commit to load, one with safetensors: from the hub, or else from the local cache."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    repo, _, revision = name.partition("@")
    try:
        commit = _ask_hub(repo, revision)
        return ModelSource(name, repo, commit, f"{repo}@{commit}")
    except hub_errors() as error:
        reason, is_offline = hub_reason(error), isinstance(error, OfflineModeIsEnabled)
    cached = _find_cached(repo, revision)
    if cached is None:
        raise ModelError(
            f"cannot find model '{name}': it is no folder here, and the hub says: {reason} "
            "Give a local folder, a hub id that you can reach, or a bundled: name "
            "(pgra models lists them)."
        )
    level = logging.INFO if is_offline else logging.WARNING
    why = "offline mode" if is_offline else reason.rstrip(".")
    logger.log(level, "model %s: commit %s from the cache (%s)", name, cached, why)
    return ModelSource(name, repo, cached, f"{repo}@{cached}", is_only_cached=True)


def _ask_hub(repo: str, revision: str) -> str:
    """Return the commit of a branch, tag, commit or refs/pr/N; "" is main, or else the bot's."""
    from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache

    first, timeout = revision or _MAIN, constants.HF_HUB_ETAG_TIMEOUT
    for reference in chain([first], () if revision else _bot_requests(repo)):
        info = HfApi().model_info(repo, revision=reference, timeout=timeout)
        files = [file.rfilename for file in info.siblings or []]
        if _has_weights(files):
            break
    else:
        beside = "" if revision else f", nor has an open pull request of {_BOT}"
        raise ModelError(
            f"model '{repo}{revision and '@'}{revision}' has no safetensors, the only kind that is "
            f"loaded{beside}: name a commit or pull request that has them "
            f"({repo}@{_PULL_REQUESTS}N), or load it once with transformers and write it to a "
            "folder with save_pretrained"
        )
    if reference != first:
        logger.info(
            "model %s: its main branch has no safetensors; those of the hub's bot are loaded (%s)",
            repo,
            reference,
        )
    commit = str(info.sha)
    # The configuration is fetched by its branch: the cache then knows which commit that is.
    known = try_to_load_from_cache(repo, _CONFIG, revision=reference)
    if not isinstance(known, str) or Path(known).parent.name != commit:
        logger.info("model %s: commit %s is new here; its weights come when needed", repo, commit)
        hf_hub_download(repo, _CONFIG, revision=reference)
    return commit


def _bot_requests(repo: str) -> Iterator[str]:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    with contextlib.suppress(HfHubHTTPError):  # a model may have its discussions closed
        for request in HfApi().get_repo_discussions(repo, author=_BOT):
            if request.is_pull_request and (request.author, request.status) == (_BOT, "open"):
                yield f"{_PULL_REQUESTS}{request.num}"


def _find_cached(repo: str, revision: str) -> str | None:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cached = scan_cache_dir().repos
    except CacheNotFound:
        return None
    commits = [
        commit
        for entry in cached
        if entry.repo_type == "model" and entry.repo_id == repo
        for commit in entry.revisions
        if _has_weights(str(f.file_path.relative_to(commit.snapshot_path)) for f in commit.files)
        and revision in ("", *commit.refs, commit.commit_hash[: max(len(revision), 7)])
    ]

    def preference(commit: Any) -> tuple[bool, bool, float]:
        has_request = any(reference.startswith(_PULL_REQUESTS) for reference in commit.refs)
        return _MAIN in commit.refs, has_request, commit.last_modified

    return max(commits, key=preference).commit_hash if commits else None


def _has_weights(files: Iterable[str]) -> bool:
    names = set(files)
    return _ADAPTER not in names and not names.isdisjoint(_WEIGHTS)


def find_model_file(source: ModelSource, name: str) -> Path | None:
    """Return a file beside a model's weights, or None; warns if neither hub nor cache can say."""
    if source.revision is None:
        path = Path(source.path) / name
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    known = try_to_load_from_cache(source.path, name, revision=source.revision)
    if known is None:
        try:
            known = hf_hub_download(source.path, name, **source.kwargs)
        except hub_errors() as error:
            if isinstance(error, LocalEntryNotFoundError) or not isinstance(
                error, EntryNotFoundError
            ):
                logger.warning(
                    "cannot see if '%s' has %s, its own pooling or prompts: give --pooling, "
                    "--query_prompt and --passage_prompt to be sure (%s)",
                    source.name,
                    name,
                    hub_reason(error),
                )
    return Path(known) if isinstance(known, str) else None  # or a mark that it has no such file


@dataclass(frozen=True)
class ModelPart:
    """A part of a sentence-transformers model: its class, and the folder of its files."""

    kind: str
    path: str


def read_parts(source: ModelSource) -> list[ModelPart]:
    """Return the parts in `modules.json`, none without that file; ModelError if it is damaged."""
    parts = []
    for module in read_model_json(source, MODULES, list) or []:
        kind = module.get("type") if isinstance(module, dict) else None
        if not isinstance(kind, str):
            raise ModelError(f"{MODULES} of '{source.name}' cannot be read: a part without a type")
        path = PurePosixPath(str(module.get("path") or ""))
        if path.is_absolute() or ".." in path.parts:
            raise ModelError(f"{MODULES} of '{source.name}' has a path outside it: {show(path)}")
        parts.append(ModelPart(kind, "" if path == PurePosixPath() else str(path)))
    return parts


def read_model_json(source: ModelSource, name: str, kind: type) -> Any:
    """Read a model's JSON file, None if there is none; ModelError if it does not hold a `kind`."""
    path = find_model_file(source, name)
    if path is None:
        return None
    try:
        value = read_json(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{name} of '{source.name}' cannot be read: {error}") from None
    if not isinstance(value, kind):
        raise ModelError(f"{name} of '{source.name}' cannot be read: it is no {kind.__name__}")
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
    model, report = _load(loader, source, **kwargs)
    missing = [key for key in report["missing_keys"] if key.partition(".")[0] not in unused]
    missing += _find_lost_head(model, source)
    if any("lora_" in key or "ia3_" in key for key in report["unexpected_keys"]):
        raise ModelError(_adapter_problem(source.name))
    if missing:
        raise ModelError(
            f"'{source.name}' lacks {len(missing)} weights of a {type(model).__name__}, such as "
            f"{min(missing)}: they would be random. Save the whole model again with "
            "save_pretrained (without torch.compile, DDP or peft around it), or choose another one"
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


def _load(
    loader: Callable[..., Any], source: ModelSource, part: str = "model", **kwargs: Any
) -> Any:
    try:
        with quiet_transformers():
            loaded = loader(source.path, **source.kwargs, **kwargs)
        source.inputs.check()
        return loaded
    except (torch.OutOfMemoryError, PgraError):
        raise
    except Exception as error:
        reason = device_fault(error) or cut(hub_reason(error), _LONGEST_REASON)
        raise ModelError(f"cannot load {part} '{source.name}': {reason}") from error


def check_loaded(model: Any, tokenizer: Any, what: str) -> None:
    """Raise ValueError for what is no loaded model of transformers with its tokenizer."""
    if not hasattr(model, "save_pretrained") or not hasattr(model, "config"):
        raise ValueError(
            f"{what} is a hub id, a folder, bundled:NAME or a loaded model, and this is of type "
            f"{type(model).__name__}"
        )
    if not hasattr(tokenizer, "save_pretrained"):
        raise ValueError("a loaded model needs its tokenizer: give (model, tokenizer)")


def save_loaded(model: Any, tokenizer: Any, what: str) -> TemporaryFolder:
    """Write a loaded model, or a `SentenceTransformer`, to a folder; raises as `check_loaded`."""
    is_sentence_model = type(model).__module__.startswith("sentence_transformers")
    if not is_sentence_model:
        check_loaded(model, tokenizer, what)
    folder = TemporaryFolder()
    model.save_pretrained(str(folder.path))
    if not is_sentence_model:
        tokenizer.save_pretrained(str(folder.path))
    return folder


def loaded_source(model: Any, name: str) -> ModelSource:
    """Return the source of a loaded model, whose identity is a checksum of its weights."""
    hasher = xxhash.xxh3_128()
    for key, weight in model.state_dict().items():
        hasher.update(f"{key} {tuple(weight.shape)} {weight.dtype}".encode())
        hasher.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    config = digest(json.loads(model.config.to_json_string()))
    return ModelSource(name, "", None, f"loaded:{config[:12]}:{hasher.hexdigest()}")


def load_config(source: ModelSource) -> Any:
    """Load a model's configuration; ModelError if it is missing or of an unknown architecture."""
    from transformers import AutoConfig

    return _load(AutoConfig.from_pretrained, source)


def cut_layers(config: Any, layer: str, name: str) -> int | None:
    """End a configuration with an earlier layer, in place: later ones are neither loaded nor run.

    Returns the layer's number; None if it is the last one, and nothing was changed. `layer` is
    "last", a number from 1 on, or a share of the depth between 0 and 1.

    Raises:
        ConfigError: If it is none of these, or there is no such layer.
        ModelError: If the configuration does not give the number of layers.
    """
    if layer == "last":
        return None
    if not re.fullmatch(r"[1-9]\d*|0?\.0*[1-9]\d*", layer):
        raise ConfigError(
            f"lm_layer is '{layer}': give last, the number of a layer (from 1 on), or a share of "
            "the depth between 0 and 1, such as 0.6"
        )
    depth = getattr(config, "num_hidden_layers", None)
    if not isinstance(depth, int):
        raise ModelError(
            f"the configuration of '{name}' does not say how many layers it has: use --lm_layer "
            "last"
        )
    number = int(layer) if "." not in layer else max(1, math.floor(float(layer) * depth + 0.5))
    if number > depth:
        raise ConfigError(
            f"lm_layer is {number}, and '{name}' has {depth} layers: give at most that, or a share "
            "of the depth, such as 0.6"
        )
    if number == depth:
        return None
    config.num_hidden_layers = number
    for part in ("layer_types", "mlp_layer_types"):  # each as long as there are layers
        if getattr(config, part, None) is not None:
            setattr(config, part, getattr(config, part)[:number])
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
    vocabulary = tokenizer.get_vocab()
    last = max(vocabulary, key=vocabulary.__getitem__)
    if isinstance(rows, int) and vocabulary[last] >= rows:
        raise ModelError(
            f"'{name}': its tokenizer has {vocabulary[last] + 1} tokens, the model {rows}, so that "
            f"{show(last)} has no embedding. Give the model its own tokenizer, or enlarge it "
            "(resize_token_embeddings), train it and save it"
        )


def read_tokenizer(source: ModelSource, config: Any = None) -> Any:
    """Load a tokenizer, without need of the model's weights; ModelError if none works."""
    from transformers import AutoTokenizer

    tokenizer = _load(AutoTokenizer.from_pretrained, source, "the tokenizer of", config=config)
    if len(tokenizer) < 2:  # transformers 5's answer to files that are named oddly
        raise ModelError(
            f"the tokenizer of '{source.name}' is empty: its folder lacks the vocabulary files"
        )
    return tokenizer


def tokenizer_identity(tokenizer: Any) -> str:
    """Return a digest of all that decides a tokenizer's tokens: a trained copy's is the same."""
    state = (
        tokenizer.backend_tokenizer.to_str()
        if tokenizer.is_fast
        else [tokenizer.get_vocab(), tokenizer.special_tokens_map]
    )
    return digest([type(tokenizer).__name__, state])


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
    return ready_device(device)


def ready_device(device: torch.device) -> torch.device:
    """Set what models need on this device, for the whole process; return the device.

    On a GPU this disables cuDNN's attention kernel, which torch prefers for half precision on H100
    and H200: it gives a mask no gradient, and a T5 learns its position bias through the mask.
    """
    if device.type == "cuda":
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


def batch_budget(tokens: int, device: torch.device, *, weights: int | None = None) -> int:
    """Scale a CPU's token budget to a device: 16 times on a GPU, or more for a small model.

    A batch of less than about 100 ms takes a GPU no longer than Python takes to launch it. By
    arithmetic (not measured) 8,192 tokens are that for 13 billion weights, and small matrices are
    slower for each weight; so the factor grows as weights to the power of -0.7, up to 16 times
    more. None ignores the weights.
    """
    if device.type != "cuda":
        return tokens
    more = 1.0 if weights is None else min(_MOST_TIMES, (_LARGE / weights) ** 0.7)
    return max(1, int(tokens * 16 * more))


def lay_out(config: Any) -> Any:
    """Return a base model of a configuration on the meta device: its weights take no memory."""
    from transformers import AutoModel

    try:
        with torch.device("meta"):
            return AutoModel.from_config(config)
    except (ValueError, KeyError, AttributeError, RuntimeError) as error:
        kind = getattr(config, "model_type", "model")
        raise ModelError(f"cannot lay out '{kind}' from its configuration: {error}") from error


def check_room(source: ModelSource, needed: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ModelError if `needed` bytes exceed the GPU's free memory or the machine's whole."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        there, way_out = f"{device} has {free / 1e9:.3g} GB free", "--lm_device_map auto (all GPUs)"
    else:
        free = machine_memory()
        there, way_out = f"this machine has {free / 1e9:.3g} GB", "--lm_dtype bfloat16"
    if needed > free:
        raise ModelError(
            f"the weights of '{source.name}' take {needed / 1e9:.3g} GB in {dtype_name(dtype)}, "
            f"and {there}: use {way_out}, --lm_quantization 8bit, or a smaller LM"
        )


def model_fields(source: ModelSource, dtype: torch.dtype) -> Mapping[str, Json]:
    return {"model": source.identity, "dtype": dtype_name(dtype)}


# Where an LM's weights go, one device or many, and in how many bits they are kept.


def first_device(name: str, device_map: str) -> torch.device:
    """Return the device that token ids go to: with a device map, the first of all GPUs.

    Raises:
        ConfigError: If a map is asked for together with one GPU, or in one of several processes.
    """
    device = choose_device(name)
    if device_map == "none":
        return device
    count = os.environ.get("WORLD_SIZE", "1")
    if int(count) > 1:
        raise ConfigError(
            f"lm_device_map is '{device_map}' and there are {count} processes: one process spreads "
            "the LM over all GPUs. Start one process, or use --lm_device_map none"
        )
    if ":" in name:
        raise ConfigError(
            f"device '{name}' is one GPU and lm_device_map '{device_map}' takes all of them: use "
            "--device auto, or --lm_device_map none"
        )
    return torch.device("cuda", 0) if device.type == "cuda" else device


def placement(device: torch.device, device_map: str) -> Any:
    """Return the `device_map` for `from_pretrained`; weights load in place, without a copy."""
    # Asked for the CPU, accelerate would still take the GPUs that it sees.
    spreads = device_map != "none" and (device.type == "cuda" or not torch.cuda.is_available())
    return device_map if spreads else {"": device}


def check_quantization(quantization: str, dtype: torch.dtype) -> None:
    """Refuse 8-bit weights in float16 (ConfigError) or without torchao (ModelError)."""
    if quantization == "none":
        return
    if dtype == torch.float16:
        # torchao multiplies by the whole numbers up to 127 and scales after that: above 65504 is
        # infinity, and SmolLM2-135M gets there in each sentence.
        raise ConfigError(
            "lm_quantization '8bit' overflows in float16: use --lm_dtype bfloat16 or float32"
        )
    if importlib.util.find_spec("torchao") is None:
        raise ModelError(
            "lm_quantization '8bit' needs torchao: pip install 'pgra[int8]', or use "
            "--lm_quantization none"
        )


def quantization_kwargs(quantization: str) -> dict[str, Any]:
    """Return `from_pretrained`'s arguments for 8-bit or ("none") plain weights.

    Only weights are rounded, with a scale for each row, and become the LM's dtype for each product,
    so a state depends on its own text alone. LLM.int8 (Dettmers et al. 2022) also rounds
    activations, depending on the rest of the batch, and loses several times as much of the
    evidence.
    """
    if quantization == "none":
        return {}
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    # Its compiler settings are for the whole process, and nothing is compiled here.
    return {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False))}


def check_8bit(model: Any, source: ModelSource) -> None:
    """Raise ModelError if torchao silently skipped most of an LM's weights, such as GPT-2's."""
    from torchao.quantization import Int8Tensor

    layers = [part for part in model.modules() if not isinstance(part, torch.nn.Embedding)]
    weights = [w for part in layers for w in part.parameters(recurse=False) if w.dim() >= 2]
    done = sum(weight.numel() for weight in weights if isinstance(weight, Int8Tensor))
    if 2 * done < sum(weight.numel() for weight in weights):
        raise ModelError(
            f"lm_quantization '8bit' leaves most weights of '{source.name}' as they are: torchao "
            "does not know its layers. Use --lm_quantization none"
        )
