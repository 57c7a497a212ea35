"""A Hugging Face model as the Trainer trains and saves it.

Checkpoints hold the model's weights under its own names, each tied weight once, so that a
checkpoint's folder is one of the plain model.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pgra.config import choose

# How a reader multiplies: in bfloat16 by autocast, in float32, or on a GPU with factors rounded to
# TF32. Weights, sums and norms are float32.
PRECISIONS = ("bfloat16", "float32", "tf32")
_PRECISION_KEY = "pgra_precision"
_INNER = "model."


class ReaderModule(nn.Module):
    """A model inside; a subclass adds `forward(**batch)`, whose output has a `.loss`.

    `forward` takes `num_items_in_batch`: the target tokens of all accumulated batches and all
    processes, to divide the summed loss by, so that 8 examples a batch and 2 times 4 are one step.
    """

    accepts_loss_kwargs = True  # the Trainer then counts the items

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def precision(self) -> str:
        """The one of `PRECISIONS` that it was last trained in, kept in its configuration."""
        return str(getattr(self.model.config, _PRECISION_KEY, "float32"))

    @precision.setter
    def precision(self, name: str) -> None:
        choose("precision", name, PRECISIONS)
        if hasattr(self.model.config, _PRECISION_KEY):
            delattr(self.model.config, _PRECISION_KEY)
        if name != "float32":
            setattr(self.model.config, _PRECISION_KEY, name)

    @contextmanager
    def rounding(self) -> Iterator[None]:
        """Round float32 factors meanwhile if its precision is TF32; this is process-wide."""
        before = torch.get_float32_matmul_precision()
        if self.precision == "tf32" and self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Multiply in its precision meanwhile; in training the Trainer calls autocast."""
        is_half = self.precision == "bfloat16"
        with self.rounding(), torch.autocast(self.device.type, torch.bfloat16, enabled=is_half):
            yield

    def save_pretrained(self, folder: Path) -> None:
        """Write a plain model folder in safetensors."""
        self.model.save_pretrained(folder)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return a checkpoint's weights, each tied one once, as safetensors requires."""
        weights = super().state_dict(*args, **kwargs)
        twins = {twin for _, *twins in self._tied() for twin in twins}
        return {n.removeprefix(_INNER): w for n, w in weights.items() if n not in twins}

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,  # noqa: FBT001, FBT002  torch's own signature
        assign: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        """Load a checkpoint's weights, or a plain model's; a tied one may be there once.

        Raises:
            RuntimeError: If strict and a weight is missing or unknown, or two that are tied here
                differ.
        """
        others = tuple(f"{name}." for name, _ in self.named_children() if name != "model")
        weights = {n if n.startswith(others) else _INNER + n: w for n, w in state_dict.items()}
        twins: dict[str, list[str]] = {}
        for first, *rest in self._tied():
            twins[first.removeprefix(_INNER)] = rest
            for twin in rest:
                if {first, twin} <= set(weights) and not torch.equal(weights[first], weights[twin]):
                    names = [name.removeprefix(_INNER) for name in (first, twin)]
                    raise RuntimeError(f"weights do not fit: {' and '.join(names)} are one here")
        result = super().load_state_dict(weights, strict=False, assign=assign)
        result.missing_keys[:] = [
            name
            for name in self.state_dict()
            if name not in state_dict and not any(twin in weights for twin in twins.get(name, ()))
        ]
        if strict and (result.missing_keys or result.unexpected_keys):
            raise RuntimeError(f"weights do not fit: {result}")
        return result

    def _tied(self) -> list[list[str]]:
        """Return the names that share one tensor, the model's first name for it first."""
        names: dict[int, list[str]] = {}
        for name, tensor in super().state_dict(keep_vars=True).items():
            names.setdefault(id(tensor), []).append(name)
        return [group for group in names.values() if len(group) > 1]

    def activation_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Trade time for memory: keep only some layers' activations (the Trainer calls this)."""
        self.model.activation_checkpointing_enable(*args, **kwargs)

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """As above, by the name that a Trainer before transformers 5.23 calls."""
        self.model.gradient_checkpointing_enable(*args, **kwargs)


@dataclass(frozen=True)
class Trainable(ABC):
    """A module to train in place, and the tokenizer that each checkpoint gets."""

    module: ReaderModule
    tokenizer: Any

    @abstractmethod
    def collator(self, device: torch.device) -> Callable[[Sequence[Any]], dict[str, Any]]:
        """Return a function that makes a batch of rows; it may be pickled for worker processes."""

    def save(self, folder: Path) -> None:
        """Write a plain model folder with its tokenizer."""
        self.module.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
