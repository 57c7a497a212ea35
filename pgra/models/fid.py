"""Fusion-in-Decoder: a T5 that reads many segments at once (Izacard and Grave 2021).

By composition: the T5 is a plain one, its checkpoints are plain T5 folders. The encoder reads each
segment alone; the decoder attends to all of an example's tokens. Its cross-attention has no
positions, so the order of segments cannot matter, and one segment is plain T5.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSeq2SeqLM, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from pgra.errors import ConfigError, ModelError
from pgra.models.loading import dtype_name, find_model, load_pretrained

IGNORED = -100
"""Label of a padded target token, as in PyTorch's cross entropy."""


class FusionReader(nn.Module):
    """A T5 with fusion in the decoder.

    Attributes:
        t5: The `T5ForConditionalGeneration` (original, v1.1 or flan).
    """

    # The Trainer then counts target tokens over all accumulated batches and all processes, so that
    # 8 examples a batch and 2 times 4 are the same step.
    accepts_loss_kwargs = True

    def __init__(self, t5: Any) -> None:
        super().__init__()
        self.t5 = t5

    @classmethod
    def from_name(cls, name: str, *, dtype: torch.dtype = torch.float32) -> Self:
        """Load a reader: hub id, folder or `bundled:NAME`.

        Args:
            name: Any T5.
            dtype: float32 or bfloat16.

        Raises:
            ConfigError: If the dtype is float16.
            ModelError: If it cannot be loaded, or is no T5.
        """
        if dtype is torch.float16:
            raise ConfigError(
                f"a T5 reader overflows to NaN in {dtype_name(dtype)}: use bfloat16 or float32"
            )
        source = find_model(name)
        model = load_pretrained(AutoModelForSeq2SeqLM.from_pretrained, source, dtype=dtype)
        if model.config.model_type != "t5":
            raise ModelError(
                f"reader '{name}' is a {model.config.model_type}, not a T5: "
                "give a T5, T5 v1.1 or flan-T5"
            )
        reader = cls(model)
        return reader.eval()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.t5.device
        return device

    def fuse(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[BaseModelOutput, Tensor]:
        """Encode each segment alone, then lay an example's tokens side by side.

        Fusion-in-Decoder (Izacard and Grave 2021). Wholly padded segments are not encoded, and
        padding between segments is dropped: S is the most real tokens of an example.

        Args:
            input_ids: Token ids, (B, N, L) int64.
            attention_mask: True on real tokens, (B, N, L) bool. A wholly False segment is absent.

        Returns:
            Encoder output (B, S, D) and its mask (B, S) bool, as the decoder reads them.

        Raises:
            ValueError: If the two shapes differ.
        """
        if input_ids.shape != attention_mask.shape:
            raise ValueError(f"input_ids are {input_ids.shape}, the mask is {attention_mask.shape}")
        present = attention_mask.any(dim=2)  # (B, N)
        mask = attention_mask[present]  # (R, L), R real segments
        hidden = self.t5.get_encoder()(
            input_ids=input_ids[present], attention_mask=mask
        ).last_hidden_state  # (R, L, D)
        counts = attention_mask.sum(dim=(1, 2))  # (B,)
        tokens = hidden[mask].split(counts.tolist())
        fused = pad_sequence(list(tokens), batch_first=True)  # (B, S, D)
        places = torch.arange(fused.shape[1], device=counts.device)
        return BaseModelOutput(last_hidden_state=fused), places < counts[:, None]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Seq2SeqLMOutput:
        """Read a batch with known targets.

        Args:
            input_ids: (B, N, L) int64.
            attention_mask: (B, N, L) bool.
            labels: (B, T) int64, `IGNORED` where padded.
            num_items_in_batch: Target tokens to divide the summed loss by; None is this batch's.

        Returns:
            With `.loss` (mean cross entropy of a target token) and `.logits` (B, T, V).
        """
        encoded, mask = self.fuse(input_ids, attention_mask)
        output = self.t5(
            encoder_outputs=encoded, attention_mask=mask, labels=labels, use_cache=False
        )
        if labels is not None and num_items_in_batch is not None:
            output.loss = output.loss * ((labels != IGNORED).sum() / num_items_in_batch)
        return output

    @torch.inference_mode()
    def score_labels(self, input_ids: Tensor, attention_mask: Tensor, targets: Tensor) -> Tensor:
        """Score each label by its whole target.

        The encoder and the decoder's keys and values over its output are computed once.

        Args:
            input_ids: (B, N, L) int64.
            attention_mask: (B, N, L) bool.
            targets: Target tokens of each of C labels, (C, T) int64, `IGNORED` where padded.

        Returns:
            Log-probability of all of each target's tokens, (B, C) float32.
        """
        encoded, mask = self.fuse(input_ids, attention_mask)
        seen = DynamicCache()  # cross-attention keys and values, filled by the first label
        scores = torch.empty(len(input_ids), len(targets), device=input_ids.device)
        for column, target in enumerate(targets):
            labels = target[target != IGNORED].expand(len(input_ids), -1)  # (B, T')
            logits = self.t5(
                encoder_outputs=encoded,
                attention_mask=mask,
                decoder_input_ids=self.t5.prepare_decoder_input_ids_from_labels(labels),
                past_key_values=EncoderDecoderCache(DynamicCache(), seen),
                use_cache=True,
            ).logits.float()  # (B, T', V)
            chosen = logits.gather(2, labels[..., None]).squeeze(2)
            scores[:, column] = (chosen - logits.logsumexp(dim=2)).sum(dim=1)
        return scores

    @torch.inference_mode()
    def generate_tokens(self, input_ids: Tensor, attention_mask: Tensor, count: int) -> Tensor:
        """Write the likeliest tokens, one after the other.

        Returns:
            (B, count) int64.
        """
        encoded, mask = self.fuse(input_ids, attention_mask)
        start = self.t5.config.decoder_start_token_id
        written = torch.full((len(input_ids), 1), start, device=input_ids.device)
        for _ in range(count):
            logits = self.t5(
                encoder_outputs=encoded,
                attention_mask=mask,
                decoder_input_ids=written,
                use_cache=False,
            ).logits[:, -1]
            written = torch.cat([written, logits.argmax(dim=1, keepdim=True)], dim=1)
        return written[:, 1:]

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,  # noqa: FBT001, FBT002  the Trainer's own signature
    ) -> None:
        """Trade time for memory: keep only some layers' activations (the Trainer calls this)."""
        self.t5.activation_checkpointing_enable(
            activation_checkpointing_kwargs=activation_checkpointing_kwargs,
            every_n_layers=every_n_layers,
            offload=offload,
        )

    def state_dict(
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Give the T5's weights under the T5's names, each tied one once: safetensors asks so."""
        weights = self.t5.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        for names in self._tied():
            for name in names[1:]:
                weights.pop(prefix + name, None)
        return weights

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,  # noqa: FBT001, FBT002  torch's own signature
        assign: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        """Load a T5's weights; a tied one may stand once.

        Raises:
            RuntimeError: If strict and a weight is missing or unknown.
        """
        tied = {name: names for names in self._tied() for name in names}
        result = self.t5.load_state_dict(state_dict, strict=False, assign=assign)
        result.missing_keys[:] = [
            name
            for name in result.missing_keys
            if not any(twin in state_dict for twin in tied.get(name, ()))
        ]
        if strict and (result.missing_keys or result.unexpected_keys):
            raise RuntimeError(f"weights do not fit: {result}")
        return result

    def _tied(self) -> Iterator[list[str]]:
        """Give the names that share one tensor, the T5's first name for it first."""
        names: dict[int, list[str]] = {}
        for name, tensor in self.t5.state_dict(keep_vars=True).items():
            names.setdefault(id(tensor), []).append(name)
        return (group for group in names.values() if len(group) > 1)

    def save_pretrained(self, folder: Path) -> None:
        """Write a plain T5 folder, in safetensors, that `AutoModelForSeq2SeqLM` loads."""
        self.t5.save_pretrained(folder)
