"""Low-rank adapters on a fused reader (Hu et al. 2022), through `peft`.

Only the adapters train; the T5's own weights stay as they were loaded and are in no checkpoint. A
finished reader has them merged in: a plain T5 like any other.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pgra.config import ReaderArguments
from pgra.errors import ConfigError, ModelError
from pgra.models.fid import ARCHITECTURES, FusionReader
from pgra.models.loading import ModelSource, load_config


def check_adapters(args: ReaderArguments, source: ModelSource) -> None:
    """Refuse adapters that could not be made, before the long stages.

    Raises:
        ConfigError: If `peft` is not installed.
        ModelError: If the reader has no layer of a name that is asked for.
    """
    if args.lora_rank is None:
        return
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("lora_rank needs peft: pip install 'pgra[lora]', or leave it out")
    from transformers import AutoModelForSeq2SeqLM

    config = load_config(source)
    if args.lora_target_modules is None or config.model_type not in ARCHITECTURES:
        return  # what is no T5 is refused where the reader is loaded
    with torch.device("meta"):  # names and shapes, without the weights
        layers = AutoModelForSeq2SeqLM.from_config(config).named_modules()
    linear = sorted(
        {name.rpartition(".")[2] for name, layer in layers if isinstance(layer, torch.nn.Linear)}
    )
    for asked in args.lora_target_modules:
        if asked.rpartition(".")[2] not in linear:
            raise ModelError(
                f"lora_target_modules holds '{asked}', and reader '{source.name}' has no such "
                f"linear layer. It has: {', '.join(linear)}."
            )


def add_adapters(reader: FusionReader, args: ReaderArguments, *, seed: int) -> "AdaptedReader":
    """Put adapters into a reader; they change nothing until they are trained.

    Args:
        reader: Changed in place.
        args: With a rank; what is None is left to `peft`.
        seed: Of the adapters' first weights.

    Raises:
        ModelError: If `peft` cannot put them where they are asked for.
    """
    from peft import LoraConfig, LoraModel, TaskType

    given = {
        "r": args.lora_rank,
        "lora_alpha": args.lora_alpha,
        "lora_dropout": args.lora_dropout,
        "target_modules": args.lora_target_modules,
    }
    config = LoraConfig(
        task_type=TaskType.SEQ_2_SEQ_LM,
        **{name: value for name, value in given.items() if value is not None},
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            adapters = LoraModel(reader.t5, config, "default")
        except ValueError as error:
            raise ModelError(f"cannot put adapters into the reader: {error}") from None
    return AdaptedReader(reader.t5, adapters)


class AdaptedReader(FusionReader):
    """A reader whose T5 has adapters inside, until they are merged."""

    def __init__(self, t5: Any, adapters: Any) -> None:
        """Take a T5 and the `peft.LoraModel` around it."""
        super().__init__(t5)
        # In a tuple, for a module inside a module would give each weight a second name.
        self._adapters: tuple[Any, ...] = (adapters,)

    @property
    def is_merged(self) -> bool:
        """Say whether the adapters are part of the weights by now."""
        return not self._adapters

    def merge(self) -> None:
        """Add the adapters to the weights: a plain T5 with the same outputs is left."""
        if self._adapters:
            (adapters,) = self._adapters
            self.t5 = adapters.merge_and_unload().requires_grad_()
            self._adapters = ()

    def state_dict(
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Give the adapters' weights; a merged reader's are all of the T5's."""
        weights = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if self._adapters:
            trained = {prefix + name for name in self._trained()}
            for name in [name for name in weights if name not in trained]:
                del weights[name]
        return weights

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,  # noqa: FBT001, FBT002  torch's own signature
        assign: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        """Load the adapters' weights; the T5's own stay as they are.

        Raises:
            RuntimeError: If strict and a weight is missing or unknown.
        """
        if not self._adapters:
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        result = self.t5.load_state_dict(state_dict, strict=False, assign=assign)
        result.missing_keys[:] = sorted(self._trained() - set(state_dict))
        if strict and (result.missing_keys or result.unexpected_keys):
            raise RuntimeError(f"adapters do not fit: {result}")
        return result

    def save_pretrained(self, folder: Path) -> None:
        """Merge, and write a plain T5 folder: training is over then."""
        self.merge()
        super().save_pretrained(folder)

    def _trained(self) -> set[str]:
        return {name for name, weight in self.t5.named_parameters() if weight.requires_grad}
