"""What a sentence-transformers folder says beside its transformer, so that vectors are its own.

`modules.json` lists the parts: a transformer, a pooling, and what comes behind it. Prompts and the
longest text stand in files of their own. A part that is not known here is refused by name: without
it the vectors would be plausible, and another model's.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pgra.errors import ModelError
from pgra.io import file_checksum
from pgra.models.loading import ModelSource, find_model_file
from pgra.types import Json

DEFAULT_MAX_TOKENS = 128
"""What the paper's code and SimCSE's tool read of a text, where a model does not say."""
_MODULES = "modules.json"
_ALONE = ("Dropout", "Pooling", "Transformer")  # read elsewhere, or without effect
_PASSAGE_PROMPTS = ("document", "passage", "corpus")
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "GELU": torch.nn.functional.gelu,
    "Identity": lambda x: x,
    "ReLU": torch.relu,
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
}
_DEFAULTS = {"module_input_name": "sentence_embedding", "use_residual": False}


@dataclass(frozen=True)
class DenseLayer:
    """A linear layer behind the pooling.

    Attributes:
        weight: (D_out, D_in) float32.
        bias: (D_out,) float32, or None.
        activation: Its name in `torch.nn`.
        identity: Checksum of its weights and its activation, for fingerprints.
    """

    weight: Tensor
    bias: Tensor | None
    activation: str
    identity: str

    def apply(self, vectors: Tensor) -> Tensor:
        """Turn (B, D_in) into (B, D_out)."""
        return _ACTIVATIONS[self.activation](
            torch.nn.functional.linear(vectors, self.weight, self.bias)
        )

    def to(self, device: torch.device) -> "DenseLayer":
        """Move it to a device."""
        bias = None if self.bias is None else self.bias.to(device)
        return DenseLayer(self.weight.to(device), bias, self.activation, self.identity)


@dataclass(frozen=True)
class SentenceModel:
    """What a folder says; that of a plain transformer says nothing.

    Attributes:
        is_one: Whether it is a sentence-transformers model at all.
        max_tokens: Its longest text, or None where it does not say.
        is_lower: Whether texts are put into lower case first.
        query_prompt: What a query begins with.
        passage_prompt: What a passage begins with.
        layers: What comes behind the pooling, in order; None stands for unit length.
    """

    is_one: bool = False
    max_tokens: int | None = None
    is_lower: bool = False
    query_prompt: str = ""
    passage_prompt: str = ""
    layers: Sequence[DenseLayer | None] = ()

    @property
    def is_normalized(self) -> bool:
        """Whether its vectors have unit length."""
        return bool(self.layers) and self.layers[-1] is None


def read_sentence_model(source: ModelSource) -> SentenceModel:
    """Read a folder's or hub model's `modules.json` and what belongs to it.

    Raises:
        ModelError: If a file is damaged, or it has a part that is not known here.
    """
    path = find_model_file(source, _MODULES)
    if path is None:
        return SentenceModel()
    layers = _read_layers(source, _read_json(source, path, list))
    limits = _read_optional(source, "sentence_bert_config.json")
    prompts = _read_prompts(source)
    passage = next((prompts[name] for name in _PASSAGE_PROMPTS if prompts.get(name)), "")
    longest = limits.get("max_seq_length")
    return SentenceModel(
        is_one=True,
        max_tokens=longest if isinstance(longest, int) else None,
        is_lower=bool(limits.get("do_lower_case")),
        query_prompt=prompts.get("query") or "",
        passage_prompt=passage,
        layers=layers,
    )


def choose_max_tokens(source: ModelSource, asked: int | None) -> int:
    """Give the tokens that are read of a text: as asked, or the model's own, or 128."""
    if asked is not None:
        return asked
    return read_sentence_model(source).max_tokens or DEFAULT_MAX_TOKENS


def dense_fields(model: SentenceModel) -> dict[str, Json]:
    """Give what fingerprints hold of the layers: nothing where there is none but unit length."""
    if not any(model.layers):
        return {}
    return {"layers": [layer.identity if layer else "normalize" for layer in model.layers]}


def _read_layers(source: ModelSource, modules: Sequence[Any]) -> tuple[DenseLayer | None, ...]:
    layers: list[DenseLayer | None] = []
    kinds = [_module_kind(source, module) for module in modules]
    for kind, module in zip(kinds, modules, strict=True):
        if kind == "Dense":
            layers.append(_read_dense(source, str(module.get("path", ""))))
        elif kind == "Normalize":
            layers.append(None)
        elif kind not in _ALONE:
            known = ", ".join(sorted((*_ALONE, "Dense", "Normalize")))
            raise ModelError(
                f"'{source.name}' has a part '{kind}' (in {_MODULES}), and only {known} are known "
                "here: choose another encoder"
            )
    if "Pooling" not in kinds:
        raise ModelError(
            f"'{source.name}' has no Pooling (in {_MODULES}), so it gives no single vector of a "
            "text: choose another encoder"
        )
    return tuple(layers)


def _module_kind(source: ModelSource, module: object) -> str:
    kind = module.get("type") if isinstance(module, dict) else None
    if not isinstance(kind, str):
        raise ModelError(f"{_MODULES} of '{source.name}' cannot be read: a part without a type")
    if not kind.startswith("sentence_transformers."):
        raise ModelError(
            f"'{source.name}' needs code of its own ('{kind}' in {_MODULES}), which is never run: "
            "choose another encoder"
        )
    return kind.rpartition(".")[2]


def _read_prompts(source: ModelSource) -> Mapping[str, str]:
    prompts = _read_optional(source, "config_sentence_transformers.json").get("prompts") or {}
    if not isinstance(prompts, dict):
        raise ModelError(f"the prompts of '{source.name}' are {prompts!r}, not texts by name")
    return {name: text for name, text in prompts.items() if isinstance(text, str)}


def _read_dense(source: ModelSource, folder: str) -> DenseLayer:
    config = _read_optional(source, f"{folder}/config.json")
    weights = find_model_file(source, f"{folder}/model.safetensors")
    if not config or weights is None:
        raise ModelError(
            f"'{source.name}' has a Dense part without {folder}/config.json or model.safetensors, "
            "the only weights that are loaded: save it again with sentence-transformers"
        )
    activation = str(config.get("activation_function", "torch.nn.Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise ModelError(
            f"{folder} of '{source.name}' has activation '{activation}', and only "
            f"{', '.join(_ACTIVATIONS)} are known here: choose another encoder"
        )
    for name, plain in _DEFAULTS.items():
        if config.get(name, plain) != plain:
            raise ModelError(
                f"{folder} of '{source.name}' has {name} {config[name]!r}, which is not done here: "
                "choose another encoder"
            )
    try:
        tensors = load_file(weights)
        weight, bias = tensors["linear.weight"].float(), tensors.get("linear.bias")
    except (SafetensorError, OSError, KeyError) as error:
        raise ModelError(f"{weights} of '{source.name}' cannot be read: {error}") from None
    return DenseLayer(
        weight,
        None if bias is None else bias.float(),
        activation,
        f"{activation}:{file_checksum(weights)}",
    )


def _read_optional(source: ModelSource, name: str) -> Mapping[str, Any]:
    path = find_model_file(source, name)
    return {} if path is None else _read_json(source, path, dict)


def _read_json(source: ModelSource, path: Path, kind: type) -> Any:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.name} of '{source.name}' cannot be read: {error}") from None
    if not isinstance(value, kind):
        raise ModelError(f"{path.name} of '{source.name}' cannot be read: it is no {kind.__name__}")
    return value
