"""A causal LM with its tokenizer: last-token states, and the batch sizes that fitted."""

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from pgra.artifacts import canonical_json, write_json
from pgra.config import DEVICE_MAPS, QUANTIZATIONS, choose
from pgra.core import Json
from pgra.data.bundled import cache_dir
from pgra.errors import ModelError
from pgra.lm.load import (
    ModelSource,
    check_8bit,
    check_placement,
    check_quantization,
    choose_dtype,
    find_model,
    first_device,
    load_config,
    load_pretrained,
    load_tokenizer,
    model_fields,
    placement,
    quantization_kwargs,
    settle_4bit,
)

logger = logging.getLogger(__name__)

_NO_LIMIT = 1 << 20


@dataclass(frozen=True)
class CausalLM:
    """A decoder-only LM, without its head or with it: OPT, GPT-2, Llama, Qwen and their kin.

    The weights are loaded when they are first needed: a run whose states are all in the bank
    never reads them.

    Attributes:
        source: Where it came from.
        config: The base model's configuration.
        tokenizer: Its tokenizer.
        device: Where it runs; with a device map, where its token ids go and its states come out.
        dtype: Of its weights and states; quantized weights are made this for each product.
        quantization: "none", or "8bit" or "4bit" weights.
        device_map: "none", or how the weights are spread over all GPUs.
        with_head: Whether what turns states into words is loaded too (`pgra.lm.score`).
    """

    source: ModelSource
    config: Any
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    quantization: str = "none"
    device_map: str = "none"
    with_head: bool = False

    @classmethod
    def from_name(
        cls,
        name: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        quantization: str = "none",
        device_map: str = "none",
        with_head: bool = False,
    ) -> Self:
        """Find by hub id, folder or `bundled:NAME`.

        Raises:
            ConfigError: If a device map meets several processes, or one GPU by name, or 8-bit
                weights meet float16.
            ModelError: If it cannot be found, is of another kind, or a library is missing.
        """
        from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

        choose("lm_quantization", quantization, QUANTIZATIONS)
        choose("lm_device_map", device_map, DEVICE_MAPS)
        place = first_device(device, device_map)
        kind = choose_dtype(dtype, place)
        check_quantization(quantization, kind)
        source = find_model(name)
        config = load_config(source)
        if getattr(config, "is_encoder_decoder", False):
            raise ModelError(
                f"'{name}' is an encoder-decoder, not a causal LM: give a GPT, OPT, ..."
            )
        if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
            raise ModelError(
                f"'{name}' is a {config.model_type}, not a causal LM: give a GPT, OPT, Llama, ..."
            )
        tokenizer = load_tokenizer(source, config)
        return cls(source, config, tokenizer, place, kind, quantization, device_map, with_head)

    @cached_property
    def model(self) -> Any:
        """Load the base model, in evaluation mode.

        Raises:
            ModelError: If it cannot be loaded, does not fit or cannot be quantized, or later
                tokens change earlier states.
        """
        model = self.whole.base_model if self.with_head else self.whole
        self._check_causal(model)
        return model

    @cached_property
    def whole(self) -> Any:
        """Load what there is to load: the base model, or the one around it that has the head.

        Raises:
            ModelError: As `model`; also if the head's weights are missing.
        """
        model = self._load()
        if self.device_map != "none":
            check_placement(model, self.source, self.device)
        if self.quantization == "8bit":
            check_8bit(model, self.source)
        settle_4bit(model, self.source)
        return model.eval().requires_grad_(False)

    def _load(self) -> Any:
        from transformers import AutoModel, AutoModelForCausalLM

        kind = AutoModelForCausalLM if self.with_head else AutoModel
        try:
            model, report = load_pretrained(
                kind.from_pretrained,
                self.source,
                dtype=self.dtype,
                device_map=placement(self.device, self.device_map),
                output_loading_info=True,
                **quantization_kwargs(self.quantization, self.dtype),
            )
        except torch.OutOfMemoryError as error:
            raise ModelError(
                f"the weights of '{self.source.name}' in {self.dtype} do not fit {self.device}: "
                "use --lm_device_map auto (all GPUs), --lm_quantization 8bit, or a smaller LM"
            ) from error
        except ModelError as error:
            if self.quantization == "none":
                raise
            # Too little memory comes out as "some issues": the rest is in a log that is silent.
            raise ModelError(
                f"{str(error).rstrip('.! ')}. In {self.quantization} an LM must lie on its GPUs "
                "whole: where it does not fit, use more (--lm_device_map auto), or a smaller LM"
            ) from error
        missing = sorted(report["missing_keys"]) if self.with_head else []
        if missing:  # transformers fills them with random numbers
            raise ModelError(
                f"'{self.source.name}' lacks {len(missing)} weights, such as {missing[0]}: it "
                "cannot write words. Give an LM with its head"
            )
        return model

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give what a state depends on, besides the prompt."""
        fields = model_fields(self.source, self.dtype)
        return (
            fields if self.quantization == "none" else {**fields, "quantization": self.quantization}
        )

    @property
    def tolerance(self) -> float:
        """Give how far two ways of computing one state may lie apart, relative to its length."""
        return 1e-4 if self.dtype == torch.float32 else 0.05

    @cached_property
    def width(self) -> int:
        """Give H, the width of a state. It may differ from the config's: OPT-350m projects."""
        return int(self.states_of([[0]])[0].shape[-1])

    @property
    def window(self) -> int:
        """Give the longest input in tokens."""
        limit = getattr(self.config, "max_position_embeddings", None)
        return int(limit or min(self.tokenizer.model_max_length, _NO_LIMIT))

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Give each text's token ids, without special tokens."""
        if not texts:
            return []
        ids: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        return ids

    @cached_property
    def lead_ids(self) -> list[int]:
        """Give the special tokens that open every input, such as OPT's </s>; empty for GPT-2."""
        probe = "The answer is"
        full, bare = self.tokenizer(probe)["input_ids"], self.tokenize([probe])[0]
        starts = (i for i in range(len(full)) if full[i : i + len(bare)] == bare)
        return list(full[: next(starts, 0)])

    @torch.inference_mode()
    def states_of(self, batch: Sequence[Sequence[int]]) -> Tensor:
        """Run whole inputs, padded on the right.

        Args:
            batch: Token ids of n inputs, none empty.

        Returns:
            (n, H) in the LM's dtype, on its device: the last layer's output after the final norm,
            at each input's last token.
        """
        lengths = torch.tensor([len(ids) for ids in batch])
        padded = torch.zeros(len(batch), int(lengths.max()), dtype=torch.long)
        for row, ids in enumerate(batch):
            padded[row, : len(ids)] = torch.tensor(ids)
        # Right padding and causality keep real tokens from the padding; positions must be given,
        # for OPT and GPT-2 count them in other ways when they are not.
        positions = torch.arange(padded.shape[1]).expand_as(padded)
        mask = positions < lengths[:, None]
        hidden = self.model(
            input_ids=padded.to(self.device),
            position_ids=positions.to(self.device),
            attention_mask=mask.long().to(self.device),
            use_cache=False,
        ).last_hidden_state  # (n, L, H)
        states: Tensor = hidden[torch.arange(len(batch)), (lengths - 1).to(hidden.device)]
        return states

    def _check_causal(self, model: Any) -> None:
        ids = torch.tensor([self.tokenize(["The answer is a question of time"])[0]])
        if ids.shape[1] < 2:
            raise ModelError(f"the tokenizer of '{self.source.name}' does not split English text")
        with torch.inference_mode():
            followed = model(input_ids=ids.to(self.device)).last_hidden_state[0, -2]
            alone = model(input_ids=ids[:, :-1].to(self.device)).last_hidden_state[0, -1]
        if not torch.isfinite(alone).all():
            raise ModelError(
                f"'{self.source.name}' gives no finite state in {self.dtype}, even for plain "
                "English: its weights are damaged, or use --lm_dtype bfloat16 or float32"
            )
        slack = max(1e-3, self.tolerance) * float(alone.abs().max())
        if not torch.allclose(alone, followed, rtol=0, atol=slack):
            raise ModelError(
                f"'{self.source.name}' is not a causal LM: a later token changes an earlier state. "
                "Give a GPT, OPT, Llama, Qwen, ..."
            )


# Token budgets that fitted: what an out-of-memory back-off taught, kept for the next run.
#
# One small JSON under the pgra home folder, by device, LM and way of reading. It is a cache:
# deleting it costs one more back-off, and a damaged or unwritable one costs a warning, never a
# run.


FILE = "budgets.json"
_GIB = 1 << 30


def recall_budget(lm: CausalLM, kind: str) -> int | None:
    """Give the budget that last fitted this LM on this device; None if none was ever too large.

    Args:
        lm: The LM, on its device.
        kind: How it reads, such as "packed": each way has its own memory.
    """
    return _read(_path()).get(_key(lm, kind))


def remember_budget(lm: CausalLM, kind: str, tokens: int) -> None:
    """Keep the budget that fitted after a back-off; the last word on an LM and device stands.

    Args:
        lm: The LM, on its device.
        kind: How it reads.
        tokens: Tokens in one batch.

    Raises:
        ValueError: If `tokens` is below 1.
    """
    if tokens < 1:
        raise ValueError(f"tokens is {tokens}: it must be at least 1")
    path = _path()
    try:
        with _turn(path):  # read inside it, or what another job wrote meanwhile would be lost
            write_json(path, {**_read(path), _key(lm, kind): int(tokens)})
        logger.warning("%d tokens are remembered in %s: delete it to forget them", tokens, path)
    except OSError as error:
        logger.warning("the token budget is not remembered: %s (%s)", path, error.strerror)


def _path() -> Path:
    return cache_dir() / FILE


def _key(lm: CausalLM, kind: str) -> str:
    parts = [describe_device(lm.device), canonical_json(dict(lm.fingerprint)), kind]
    if lm.device_map != "none":  # the same states, but less room beside the weights, or more
        parts.append(f"device map {lm.device_map}")
    return " | ".join(parts)


def describe_device(device: torch.device) -> str:
    """Name a device by what decides how much fits: a GPU by model and memory, else the machine."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return f"{found.name}, {round(found.total_memory / _GIB)} GiB"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{device.type}, {round(memory / _GIB)} GiB"


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Wait for the right to write; the system takes it back if the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> dict[str, int]:
    """Read what is there; entries that cannot be are passed over, and gone with the next write."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read and is not used: %s", path, error)
        return {}
    if not isinstance(found, dict):
        logger.warning("%s is damaged and is not used: it holds no mapping", path)
        return {}
    # A bool is an int to Python, but no budget.
    sound = {key: value for key, value in found.items() if type(value) is int and value >= 1}
    if len(sound) < len(found):
        wrong = next(key for key in found if key not in sound)
        logger.warning("%s is damaged: %r is not used", path, found[wrong])
    return sound
