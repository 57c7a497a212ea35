"""A Hugging Face model as a training sees it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model
from torch import nn
from transformers.utils import is_torch_tf32_available

from pgra.config import choose
from pgra.errors import ModelError
from pgra.reader.arguments import TrainingArguments

# How a reader multiplies: in bfloat16 by autocast, in float32, or on a GPU with factors rounded to
# TF32. Weights, sums and norms are float32.
PRECISIONS = ("bfloat16", "float32", "tf32")
_PRECISION_KEY = "pgra_precision"


class ReaderModule(nn.Module):
    """A model inside; a subclass adds `forward(**batch)`, whose output has a `.loss`.

    `forward` takes `num_items_in_batch`: the target tokens of all accumulated batches and all
    processes, to divide the summed loss by, so that 8 examples a batch and 2 times 4 are one step.
    """

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
        """Multiply in its precision meanwhile: in a forward pass, not in a backward one."""
        is_half = self.precision == "bfloat16"
        with self.rounding(), torch.autocast(self.device.type, torch.bfloat16, enabled=is_half):
            yield

    def save_pretrained(self, folder: Path) -> None:
        """Write a plain model folder in safetensors."""
        self.model.save_pretrained(folder)

    def load_weights(self, folder: Path) -> None:
        """Load what `save_pretrained` wrote."""
        load_model(self.model, folder / "model.safetensors", device=str(self.device))


@dataclass(frozen=True)
class Trainable(ABC):
    """A module to train in place, and the tokenizer that each checkpoint gets."""

    module: ReaderModule
    tokenizer: Any

    @abstractmethod
    def collator(self, device: torch.device) -> Callable[[Sequence[Any]], dict[str, Any]]:
        """Return a function that makes a batch of rows; it may be pickled for worker processes."""

    def optimizer(self, arguments: TrainingArguments) -> torch.optim.Optimizer:
        """Return AdamW, which decays all weights but norms and biases."""
        assert arguments.learning_rate is not None  # the method chose it
        weights: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, weight in self.module.named_parameters():
            if weight.requires_grad:
                weights["bias" not in name and "norm" not in name.lower()].append(weight)
        return torch.optim.AdamW(
            [
                {"params": weights[True], "weight_decay": arguments.weight_decay},
                {"params": weights[False], "weight_decay": 0.0},
            ],
            lr=arguments.learning_rate,
            eps=arguments.adam_epsilon,
            fused=True,
        )

    def save(self, folder: Path) -> None:
        """Write a plain model folder with its tokenizer."""
        self.module.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def choose_precision(arguments: TrainingArguments, device: torch.device) -> str:
    """Return how a device multiplies in training: one of `PRECISIONS`.

    Raises:
        ModelError: If bfloat16 is asked for, and the GPU has none.
    """
    is_on_gpu = device.type == "cuda"
    # Torch emulates bfloat16 on any GPU, slower than float32.
    has_bf16 = is_on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    if arguments.bf16 and is_on_gpu and not has_bf16:
        raise ModelError(f"{device} has no bfloat16: use --no_bf16")
    if arguments.bf16 or (arguments.bf16 is None and has_bf16):
        return "bfloat16"
    rounds = is_on_gpu and is_torch_tf32_available() and arguments.tf32 is not False
    return "tf32" if rounds else "float32"
