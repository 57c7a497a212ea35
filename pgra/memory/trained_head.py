"""Trains a layer on an encoder so that questions are as near as what is said of them.

Two targets of one objective, (cos(f(x_i), f(x_j)) - t_ij)^2 over pairs of questions:

- "feedback": t = cos(fb_i, fb_j), the paper's first attempt (Madaan et al. 2022, App. A.2);
- "type": 1 for questions of one type and 0 for others, as the release trains its semantic memory.

The encoder stays as it is and its vectors are made once, so that this takes seconds on a CPU; the
paper and the release train the encoder too. What is written is a sentence-transformers folder.
"""

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import normalize
from tqdm import tqdm

from pgra.artifacts import digest, sync_folder, write_json
from pgra.config import argument as _arg
from pgra.config import at_least, choose
from pgra.core import Json
from pgra.encoders.encoder import DenseLayer, Encoder
from pgra.errors import ConfigError, DataError, ModelError
from pgra.memory.lookup import KEY_FORMS, strip_slot
from pgra.memory.stream import Pair, kinds_of
from pgra.memory.train import ABOUT_FILE, Trained, check_new

# Writes an encoder with one more layer as a sentence-transformers folder, to be read as one.


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


TARGETS = ("feedback", "type")
_LEAST = 4  # questions that can be trained on


@dataclass(kw_only=True)
class SimilarityArguments:
    """How the layer is trained."""

    target: str = _arg(
        "feedback",
        "What the cosine of two questions is to be: feedback (that of their feedback: the paper's "
        "A.2), or type (1 for one type, 0 for others: the release's semantic memory).",
    )
    encoder: str = _arg(
        "sentence-transformers/all-MiniLM-L6-v2",
        "Encoder below the layer: hub id, folder or bundled:NAME. It stays as it is.",
    )
    key_form: str = _arg(
        "slotless", "What is read of a question: slotless (without <...>), or whole."
    )
    width: int = _arg(256, "Of the layer, tanh behind it (the release: 256).")
    num_steps: int = _arg(500, "Steps, each over all pairs of a batch.")
    batch_size: int = _arg(128, "Questions a step.")
    learning_rate: float = _arg(1e-3, "Adam's.")
    seed: int = _arg(0, "Of the layer's first weights and of the batches.")

    def __post_init__(self) -> None:
        """Refuse what cannot train."""
        choose("target", self.target, TARGETS)
        choose("key_form", self.key_form, KEY_FORMS)
        for name, least in (("width", 1), ("num_steps", 1), ("batch_size", 2)):
            at_least(name, getattr(self, name), least)
        if not self.learning_rate > 0:
            raise ConfigError(f"learning_rate is {self.learning_rate:g}: it must be above 0")


def train_encoder(
    pairs: Sequence[Pair], folder: Path, arguments: SimilarityArguments, *, device: str = "auto"
) -> Trained:
    """Train the layer, and write the encoder with it.

    Args:
        pairs: Questions with feedback; with a type for the target "type".
        folder: New; any --encoder may name it.
        arguments: How.
        device: "auto", "cpu", "cuda", ...

    Raises:
        ArtifactError: If the folder is there already.
        ConfigError: If the encoder's pooling cannot be written.
        DataError: If the pairs are too few, all the same, or lack their types.
        ModelError: If the encoder cannot be loaded, or the loss stops being a number.
    """
    check_new(folder)
    if len(pairs) < _LEAST:
        raise DataError(f"there are {len(pairs)} questions to learn from: give at least {_LEAST}")
    kinds = kinds_of(pairs) if arguments.target == "type" else []
    start = time.monotonic()
    encoder = Encoder.from_name(arguments.encoder, dtype="float32", device=device)
    check_writable(encoder)
    vectors = torch.from_numpy(encoder.encode([_key(p, arguments.key_form) for p in pairs]))
    if arguments.target == "type":
        wanted = same_kind(kinds)
    else:
        said = torch.from_numpy(encoder.encode([pair.feedback for pair in pairs]))
        wanted = cosines(said)
    head, loss = fit_head(vectors, wanted, arguments)
    about: dict[str, Json] = {
        "encoder": str(encoder.fingerprint["encoder"]),
        "pairs": digest([asdict(pair) for pair in pairs])[:12],
        "num_pairs": len(pairs),
        **{name: value for name, value in asdict(arguments).items() if name != "encoder"},
    }
    _keep(encoder, head, folder, about=about)
    return Trained(folder, arguments.num_steps, loss, time.monotonic() - start)


def _key(pair: Pair, form: str) -> str:
    """Give a question as `KeyEncoder` reads it."""
    return (strip_slot(pair.question) or pair.question) if form == "slotless" else pair.question


def same_kind(kinds: Sequence[str]) -> Tensor:
    """Give 1 where two are of one type and 0 elsewhere, (n, n) float32."""
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    told = torch.tensor([numbers[kind] for kind in kinds])
    return (told[:, None] == told[None, :]).float()


def cosines(vectors: Tensor) -> Tensor:
    """Give the cosine of every two of (n, D), (n, n)."""
    unit = normalize(vectors, dim=-1)
    return unit @ unit.T


def fit_head(vectors: Tensor, wanted: Tensor, arguments: SimilarityArguments) -> tuple[Head, float]:
    """Fit a layer whose vectors' cosines are those wanted: mean squared error (App. A.2).

    Args:
        vectors: Of the questions (n, D).
        wanted: Cosine of every two of them (n, n).
        arguments: How.

    Returns:
        The layer, and the mean loss of the last tenth of the steps.

    Raises:
        ModelError: If the loss stops being a number.
    """
    draw = torch.Generator().manual_seed(arguments.seed)
    width = vectors.shape[1]
    bound = width**-0.5  # as torch.nn.Linear begins
    weight = torch.empty(arguments.width, width).uniform_(-bound, bound, generator=draw)
    head = Head(weight.requires_grad_(), torch.zeros(arguments.width, requires_grad=True))
    optimizer = torch.optim.Adam([head.weight, head.bias], lr=arguments.learning_rate)
    size = min(arguments.batch_size, len(vectors))
    others = ~torch.eye(size, dtype=torch.bool)  # a question beside itself teaches nothing
    losses = []
    for _ in tqdm(range(arguments.num_steps), desc="training", unit="step"):
        rows = torch.randperm(len(vectors), generator=draw)[:size]
        gaps = cosines(head.apply(vectors[rows])) - wanted[rows][:, rows]
        loss = gaps[others].square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    last = torch.stack(losses[-max(1, len(losses) // 10) :]).mean().item()
    if not torch.isfinite(torch.stack(losses)).all():
        raise ModelError(
            f"the loss is no number: lower the learning rate ({arguments.learning_rate:g})"
        )
    return Head(head.weight.detach(), head.bias.detach()), last


def _keep(encoder: Encoder, head: Head, folder: Path, *, about: dict[str, Json]) -> None:
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)  # of a job that was killed
    save_with_head(encoder, head, aside)
    write_json(aside / ABOUT_FILE, about)
    aside.rename(folder)
    sync_folder(folder.parent)
