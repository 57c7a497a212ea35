"""Writes an encoder with one more layer as a sentence-transformers folder, to be read as one."""

from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from pgra.errors import ConfigError
from pgra.io import write_json
from pgra.models.encoder import Encoder
from pgra.models.sentence import DenseLayer
from pgra.types import Json

_POOLINGS = {
    "cls": "pooling_mode_cls_token",
    "cls_before_pooler": "pooling_mode_cls_token",
    "last": "pooling_mode_lasttoken",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
}
_TYPE = "sentence_transformers.models."
_ACTIVATION = "torch.nn."


@dataclass(frozen=True)
class Head:
    """A linear layer with tanh behind it.

    Attributes:
        weight: (D_out, D_in) float32.
        bias: (D_out,) float32.
    """

    weight: Tensor
    bias: Tensor

    def apply(self, vectors: Tensor) -> Tensor:
        """Turn (B, D_in) into (B, D_out)."""
        return (vectors @ self.weight.T + self.bias).tanh()


def check_writable(encoder: Encoder) -> None:
    """Refuse an encoder that such a folder cannot describe.

    Raises:
        ConfigError: If it is one.
    """
    pooling = str(encoder.fingerprint["pooling"])
    if pooling not in _POOLINGS:
        raise ConfigError(
            f"a sentence-transformers folder cannot say pooling '{pooling}': choose an encoder "
            f"with {', '.join(_POOLINGS)}"
        )


def save_with_head(encoder: Encoder, head: Head, folder: Path) -> None:
    """Write an encoder whose vectors are a head's, at unit length.

    Args:
        encoder: What it has behind its pooling comes before the head.
        head: As wide as the encoder.
        folder: New.

    Raises:
        ConfigError: As `check_writable`.
    """
    check_writable(encoder)
    encoder.model.save_pretrained(folder)
    encoder.tokenizer.save_pretrained(folder)
    _write_limits(encoder, folder)
    parts = ["Transformer", "Pooling"]
    layers = [*encoder.sentence.layers]
    if encoder.fingerprint["normalize"] and not encoder.sentence.is_normalized:
        layers.append(None)  # as `Encoder` gives it, whatever its folder says
    last = DenseLayer(head.weight, head.bias, "Tanh", "")
    for layer in (*layers, last, None):
        name = "Normalize" if layer is None else "Dense"
        if layer is not None:
            _write_dense(layer, folder / f"{len(parts)}_{name}")
        parts.append(name)
    modules: list[Json] = [
        {
            "idx": place,
            "name": str(place),
            "path": "" if place == 0 else f"{place}_{name}",
            "type": f"{_TYPE}{name}",
        }
        for place, name in enumerate(parts)
    ]
    write_json(folder / "modules.json", modules)


def _write_limits(encoder: Encoder, folder: Path) -> None:
    pooling = str(encoder.fingerprint["pooling"])
    width = encoder.model.config.hidden_size
    write_json(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": width, _POOLINGS[pooling]: True},
    )
    limits: dict[str, Json] = {
        "max_seq_length": encoder.fingerprint["max_tokens"],
        "do_lower_case": encoder.sentence.is_lower,
    }
    write_json(folder / "sentence_bert_config.json", limits)
    prompts: dict[str, Json] = {
        "query": encoder.query_prompt,
        "document": str(encoder.fingerprint.get("passage_prompt", "")),
    }
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts})


def _write_dense(layer: DenseLayer, folder: Path) -> None:
    config: dict[str, Json] = {
        "in_features": layer.weight.shape[1],
        "out_features": layer.weight.shape[0],
        "bias": layer.bias is not None,
        "activation_function": f"{_ACTIVATION}{layer.activation}",
    }
    write_json(folder / "config.json", config)
    weights = {"linear.weight": layer.weight, "linear.bias": layer.bias}
    tensors = {name: one.cpu().contiguous() for name, one in weights.items() if one is not None}
    save_file(tensors, folder / "model.safetensors")
