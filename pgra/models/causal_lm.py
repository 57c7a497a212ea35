"""A frozen causal LM: token ids to the hidden states that predict the next token."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from pgra.errors import ModelError
from pgra.models.loading import (
    ModelSource,
    choose_device,
    choose_dtype,
    find_model,
    load_config,
    load_pretrained,
    load_tokenizer,
    model_fields,
)
from pgra.types import Json

logger = logging.getLogger(__name__)

_NO_LIMIT = 1 << 20


@dataclass(frozen=True)
class CausalLM:
    """A decoder-only LM without its head: OPT, GPT-2, Llama, Qwen and their kin.

    The weights are loaded when they are first needed: a run whose states are all in the bank
    never reads them.

    Attributes:
        source: Where it came from.
        config: The base model's configuration.
        tokenizer: Its tokenizer.
        device: Where it runs.
        dtype: Of its weights and states.
    """

    source: ModelSource
    config: Any
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def from_name(cls, name: str, *, dtype: str = "auto", device: str = "auto") -> Self:
        """Find by hub id, folder or `bundled:NAME`.

        Raises:
            ModelError: If it cannot be found, or is of another kind.
        """
        from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

        source, place = find_model(name), choose_device(device)
        config = load_config(source)
        if getattr(config, "is_encoder_decoder", False):
            raise ModelError(
                f"'{name}' is an encoder-decoder, not a causal LM: give a GPT, OPT, ..."
            )
        if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
            raise ModelError(
                f"'{name}' is a {config.model_type}, not a causal LM: give a GPT, OPT, Llama, ..."
            )
        return cls(source, config, load_tokenizer(source), place, choose_dtype(dtype, place))

    @cached_property
    def model(self) -> Any:
        """Load the base model, in evaluation mode.

        Raises:
            ModelError: If it cannot be loaded, or later tokens change earlier states.
        """
        from transformers import AutoModel

        model = load_pretrained(AutoModel.from_pretrained, self.source, dtype=self.dtype)
        model = model.eval().requires_grad_(False).to(self.device)
        self._check_causal(model)
        return model

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give what a state depends on, besides the prompt."""
        return model_fields(self.source, self.dtype)

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
        slack = (1e-3 if self.dtype == torch.float32 else 0.05) * float(alone.abs().max())
        if not torch.allclose(alone, followed, rtol=0, atol=slack):
            raise ModelError(
                f"'{self.source.name}' is not a causal LM: a later token changes an earlier state. "
                "Give a GPT, OPT, Llama, Qwen, ..."
            )
