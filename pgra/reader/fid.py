"""Fusion-in-Decoder: a T5 that reads segments apart and decodes over all (Izacard and Grave 2021).

By composition: the T5 is a plain one, its checkpoints are plain T5 folders. The encoder reads each
segment alone; the decoder attends to all of an example's tokens. Its cross-attention has no
positions, so the order of segments cannot matter, and one segment is plain T5.
"""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from pgra.config import ReaderArguments
from pgra.errors import ConfigError, ModelError
from pgra.lm.batching import Group, PackedSegments
from pgra.lm.kernels import read_encoded_tokens
from pgra.lm.load import ModelSource, dtype_name, find_model, load_config, load_pretrained

IGNORED = -100
"""Label of a padded target token, as in PyTorch's cross entropy."""
ARCHITECTURES = ("mt5", "t5")
"""Model types: T5, v1.1, flan-T5 and ByT5 are all "t5". Not "umt5": transformers 5.2 to 5.23 scale
its logits like the original T5's, but it was trained without, with a head of its own."""
_MAX_LOGITS = 1024
"""Most target tokens whose logits stand in memory: 130 MB for T5's vocabulary."""
Fused = tuple[BaseModelOutput, Tensor]
"""What `FusionReader.fuse` gives."""


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
        read_encoded_tokens(t5.get_decoder())

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
        config = load_config(source)
        if config.model_type not in ARCHITECTURES:
            raise ModelError(
                f"reader '{name}' is a {config.model_type}, not a T5: "
                "give a T5, T5 v1.1, flan-T5, mT5 or ByT5"
            )
        if config.dense_act_fn == "gelu_new":  # the same function, in one kernel instead of eight
            config.dense_act_fn = "gelu_pytorch_tanh"
        model = load_pretrained(
            AutoModelForSeq2SeqLM.from_pretrained, source, dtype=dtype, config=config
        )
        reader = cls(model)
        return reader.eval()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.t5.device
        return device

    def fuse(self, packed: PackedSegments) -> Fused:
        """Encode each segment alone, then lay an example's tokens side by side.

        Fusion-in-Decoder (Izacard and Grave 2021). Segments are encoded in groups of like length,
        and no padding is left between them: S is the most real tokens of an example.

        Args:
            packed: The segments of B examples.

        Returns:
            Encoder output (B, S, D) and its mask (B, S) bool, as the decoder reads them.
        """
        encoder, start, parts = self.t5.get_encoder(), 0, []
        # All at once: the gradient of the embeddings is as large as they are, for each call.
        embedded = self.t5.get_input_embeddings()(packed.input_ids)  # (M, D)
        for rows, length, tokens in packed.groups:
            group = slice(start, start + rows * length)
            is_full = tokens == rows * length  # then no mask of its size is made
            hidden = encoder(
                inputs_embeds=embedded[group].view(rows, length, -1),
                attention_mask=None if is_full else packed.attention_mask[group].view(rows, length),
            ).last_hidden_state  # (rows, length, D)
            parts.append(hidden.flatten(0, 1))
            start = group.stop
        B, S = packed.places.shape
        flat = torch.cat(parts) if len(parts) > 1 else parts[0]
        # Where an example has no more tokens stands any other's: the mask hides it.
        fused = flat.index_select(0, packed.places.flatten().clamp(min=0)).view(B, S, -1)
        return BaseModelOutput(last_hidden_state=fused), packed.places >= 0

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        groups: Sequence[Group],
        places: Tensor,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Seq2SeqLMOutput:
        """Read a batch with known targets.

        Args:
            input_ids: As in `PackedSegments`, like the next three.
            attention_mask: Which of these are real tokens.
            groups: How they were grouped.
            places: Where each example's tokens stand.
            labels: (B, T) int64, `IGNORED` where padded.
            num_items_in_batch: Target tokens to divide the summed loss by; None is this batch's.

        Returns:
            With `.loss` (mean cross entropy of a target token) and `.logits` (B, T, V).
        """
        packed = PackedSegments(input_ids, attention_mask, tuple(groups), places)
        encoded, mask = self.fuse(packed)
        output = self.t5(
            encoder_outputs=encoded,
            attention_mask=mask[:, None, None],
            labels=labels,
            use_cache=False,
        )
        if labels is not None and num_items_in_batch is not None:
            output.loss = output.loss * ((labels != IGNORED).sum() / num_items_in_batch)
        return output

    @torch.inference_mode()
    def score_labels(
        self, packed: PackedSegments, targets: Tensor, *, fused: Fused | None = None
    ) -> Tensor:
        """Score each label by its whole target.

        The encoder runs once, and a pass of the decoder takes many labels, which read the same
        encoded tokens.

        Args:
            packed: The segments of B examples.
            targets: Target tokens of each of C labels, (C, T) int64, `IGNORED` where padded.
            fused: What `fuse` gave for them, if that is known.

        Returns:
            Log-probability of all of each target's tokens, (B, C) float32.
        """
        encoded, mask = fused or self.fuse(packed)
        B, (C, T) = len(mask), targets.shape
        scores = torch.empty(B, C, device=mask.device)
        # The logits of a token are a float for each of the vocabulary.
        most = max(1, _MAX_LOGITS // (B * T))
        for first in range(0, C, most):
            labels = targets[first : first + most]  # (C', T)
            rows = labels.repeat(B, 1)  # (B * C', T)
            logits = self.t5(
                encoder_outputs=encoded,
                attention_mask=mask[:, None, None],
                decoder_input_ids=self.t5.prepare_decoder_input_ids_from_labels(rows),
                use_cache=False,
            ).logits.float()  # (B * C', T, V)
            chosen = logits.gather(2, rows.clamp(min=0)[..., None]).squeeze(2)
            chances = (chosen - logits.logsumexp(dim=2)).masked_fill(rows == IGNORED, 0.0)
            scores[:, first : first + most] = chances.sum(dim=1).view(B, -1)
        return scores

    @torch.inference_mode()
    def generate(self, packed: PackedSegments, **kwargs: Any) -> Tensor:
        """Write text freely.

        Args:
            packed: The segments of B examples.
            **kwargs: As `transformers.GenerationMixin.generate` takes them (`max_new_tokens`,
                `num_beams`, `do_sample`, ...).

        Returns:
            Token ids with the decoder's start token, (B, T) int64.
        """
        encoded, mask = self.fuse(packed)
        written: Tensor = self.t5.generate(encoder_outputs=encoded, attention_mask=mask, **kwargs)
        return written

    @torch.inference_mode()
    def attention_mass(
        self,
        packed: PackedSegments,
        lengths: Sequence[Sequence[int]],
        labels: Tensor,
        *,
        fused: Fused | None = None,
    ) -> list[list[float]]:
        """Say what share of the decoder's attention each segment gets.

        Mean over layers, heads and the target's tokens of the cross-attention, added up over a
        segment's tokens; after Izacard and Grave 2021b ("Distilling Knowledge from Reader to
        Retriever"), who take such scores for the relevance of a passage.

        Args:
            packed: The segments of B examples.
            lengths: Tokens of each segment, by example.
            labels: What the decoder is to write, (B, T) int64, `IGNORED` where padded.
            fused: What `fuse` gave for them, if that is known.

        Returns:
            For each example a share for each segment; they add up to 1.
        """
        encoded, mask = fused or self.fuse(packed)
        layers = self.t5(
            encoder_outputs=encoded,
            attention_mask=mask[:, None, None],
            decoder_input_ids=self.t5.prepare_decoder_input_ids_from_labels(labels),
            output_attentions=True,
            use_cache=False,
        ).cross_attentions
        weights = torch.stack(list(layers)).float().mean(dim=(0, 2))  # (B, T, S)
        real = (labels != IGNORED).to(weights.device)[..., None]
        tokens = ((weights * real).sum(dim=1) / real.sum(dim=1)).cpu()  # (B, S)
        return [
            [float(part.sum()) for part in row[: sum(counts)].split(list(counts))]
            for row, counts in zip(tokens, lengths, strict=True)
        ]

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

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Do the same under the name by which a Trainer before transformers 5.23 asks for it."""
        self.t5.gradient_checkpointing_enable(gradient_checkpointing_kwargs, **kwargs)

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
            RuntimeError: If strict and a weight is missing or unknown, or two that are one weight
                here differ there: the second would replace the first.
        """
        tied = {name: names for names in self._tied() for name in names}
        for name, (first, *_) in tied.items():
            is_given = first in state_dict and name in state_dict
            if is_given and not torch.equal(state_dict[first], state_dict[name]):
                raise RuntimeError(f"weights do not fit: {first} and {name} are one here")
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


# Low-rank adapters on a fused reader (Hu et al. 2022), through `peft`.
#
# Only the adapters train; the T5's own weights stay as they were loaded and are in no checkpoint. A
# finished reader has them merged in: a plain T5 like any other.


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
