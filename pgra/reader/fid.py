"""Fusion-in-Decoder: a T5 that reads segments apart and decodes over all (Izacard and Grave 2021).

Checkpoints are plain T5 folders. The encoder reads each segment alone; the decoder attends to all
of an example's tokens. Cross-attention has no positions, so the order of segments cannot matter,
and one segment is plain T5.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSeq2SeqLM
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from pgra.errors import ModelError, cut, one_line
from pgra.lm.batching import GroupCost, group_by_length, send
from pgra.lm.kernels import fuse_norms, read_encoded_tokens
from pgra.lm.load import ModelSource, load_config, load_pretrained

_HALF_KEY = "pgra_precision"
IGNORED = -100  # label of a padded target token, as in PyTorch's cross entropy
# T5, v1.1, flan-T5 and ByT5 are all "t5". Not "umt5": transformers 5.2 to 5.23 scale its logits
# like the original T5's, but it was trained without, with a head of its own.
ARCHITECTURES = ("mt5", "t5")
_MAX_LOGITS = 1024  # target tokens with logits in memory: 130 MB for T5's vocabulary
Fused = tuple[BaseModelOutput, Tensor]
TokenIds = npt.NDArray[np.int32]
SegmentGroup = tuple[int, int, int]  # rows, padded length and real tokens of one encoder call
_SEGMENTS = 8  # an example has about so many: its tokens are padded to as many times the multiple


# Segments packed for the encoder. Released readers pad every segment to 128 tokens, twice what
# there is to read. Here a batch's segments are grouped by length, each group padded to its longest.


@dataclass(frozen=True)
class PackedSegments:
    """The segments of B examples as the encoder and then the decoder read them.

    Attributes:
        input_ids: The groups' padded rows one after the other, (M,) int64.
        attention_mask: True on real tokens, (M,) bool.
        groups: Rows, padded length and real tokens of each group.
        places: Positions of each example's tokens among the M, in order, (B, S) int64; -1 is
            padding.
    """

    input_ids: Tensor
    attention_mask: Tensor
    groups: tuple[SegmentGroup, ...]
    places: Tensor

    def to(self, device: torch.device) -> "PackedSegments":
        return PackedSegments(
            send(self.input_ids, device),
            send(self.attention_mask, device),
            self.groups,
            send(self.places, device),
        )


def pack_segments(
    examples: Sequence[Sequence[TokenIds]], *, pad_token_id: int, cost: GroupCost
) -> PackedSegments:
    """Group the segments of B examples by length; each example has one or more, none empty."""
    segments = list(chain.from_iterable(examples))
    lengths = np.array([len(segment) for segment in segments], dtype=np.int64)
    ids: list[npt.NDArray[np.int64]] = []
    starts = np.empty(len(segments), dtype=np.int64)  # of each segment among the M tokens
    groups: list[SegmentGroup] = []
    done = 0
    for indices in group_by_length(lengths, cost):
        longest = cost.padded(int(lengths[indices].max()))
        block = np.full((len(indices), longest), pad_token_id, dtype=np.int64)
        for row, index in enumerate(indices):
            block[row, : lengths[index]] = segments[index]
        starts[indices] = done + np.arange(len(indices)) * longest
        ids.append(block.ravel())
        groups.append((len(indices), longest, int(lengths[indices].sum())))
        done += block.size
    ends = np.cumsum(lengths)
    real = np.repeat(starts - ends + lengths, lengths) + np.arange(ends[-1])  # tokens, in order
    lasts = np.cumsum([len(example) for example in examples]) - 1
    places = pad_rows(np.split(real, ends[lasts[:-1]]), -1)
    spare = -places.shape[1] % (_SEGMENTS * cost.multiple) if cost.multiple > 1 else 0
    mask = torch.zeros(done, dtype=torch.bool)
    mask[torch.from_numpy(real)] = True
    return PackedSegments(
        torch.from_numpy(np.concatenate(ids)),
        mask,
        tuple(groups),
        pad(places, (0, spare), value=-1),
    )


def pad_rows(rows: Sequence[npt.ArrayLike], value: int) -> Tensor:
    """Pad rows of integers to the longest, int64."""
    tensors = [torch.from_numpy(np.asarray(row, dtype=np.int64)) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=value)


class FusionReader(nn.Module):
    """A `T5ForConditionalGeneration` (original, v1.1 or flan) with fusion in the decoder."""

    def __init__(self, t5: Any) -> None:
        super().__init__()
        self.model = t5
        read_encoded_tokens(t5.get_decoder())
        fuse_norms(t5)

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    @property
    def is_half(self) -> bool:
        """Whether it was last trained in bfloat16, in which it then decides; in its configuration.

        Factors are rounded, by autocast; weights, sums and norms are float32.
        """
        return hasattr(self.model.config, _HALF_KEY)

    @is_half.setter
    def is_half(self, value: bool) -> None:
        if value:
            setattr(self.model.config, _HALF_KEY, "bfloat16")
        elif self.is_half:
            delattr(self.model.config, _HALF_KEY)

    def deciding(self) -> torch.autocast:
        """Multiply as it was trained meanwhile: in a forward pass, not in a backward one."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_half)

    def compile_layers(self, **kwargs: Any) -> None:
        """Compile the encoder's layers in place, as `torch.compile` takes `kwargs`.

        They are nearly all the work. Weights keep their names.

        Raises:
            ModelError: If nothing can be compiled here.
        """
        try:
            torch.compile(torch.neg, **kwargs)(torch.zeros(2, device=self.device))
        except RuntimeError as error:  # such as: there is no C++ compiler
            reason = cut(one_line(error), 200)
            raise ModelError(f"torch.compile fails: {reason}: leave --torch_compile out") from error
        for block in self.model.get_encoder().block:
            block.compile(**kwargs)

    def save_pretrained(self, folder: Path) -> None:
        """Write a plain model folder in safetensors."""
        self.model.save_pretrained(folder)

    def load_weights(self, folder: Path) -> None:
        """Load what `save_pretrained` wrote."""
        load_model(self.model, folder / "model.safetensors", device=str(self.device))

    @classmethod
    def from_source(cls, source: ModelSource) -> Self:
        """Load a T5 in float32 from where it was found.

        Raises:
            ArtifactError: If its files changed since.
            ModelError: If it is not a T5, or cannot be loaded.
        """
        config = load_config(source)
        if config.model_type not in ARCHITECTURES:
            raise ModelError(
                f"reader '{source.name}' is a {config.model_type}: give a T5, flan-T5, mT5 or ByT5"
            )
        if config.dense_act_fn == "gelu_new":  # the same function, in one kernel instead of eight
            config.dense_act_fn = "gelu_pytorch_tanh"
        load = AutoModelForSeq2SeqLM.from_pretrained
        return cls(load_pretrained(load, source, dtype=torch.float32, config=config)).eval()

    def fuse(self, packed: PackedSegments) -> Fused:
        """Encode each segment alone, then lay an example's tokens side by side.

        Fusion-in-Decoder (Izacard and Grave 2021). Segments of similar length form groups.

        Returns:
            Encoder output (B, S, D) and its mask (B, S) bool, as the decoder reads them; S is the
            most real tokens of an example.
        """
        encoder = self.model.get_encoder()
        start = 0
        parts = []
        # All at once: the gradient of the embeddings is as large as they are, for each call.
        embedded = self.model.get_input_embeddings()(packed.input_ids)  # (M, D)
        for rows, length, tokens in packed.groups:
            group = slice(start, start + rows * length)
            is_full = tokens == rows * length  # then no mask of its size is made
            mask = packed.attention_mask[group].view(rows, 1, 1, length)
            hidden = encoder(
                inputs_embeds=embedded[group].view(rows, length, -1),
                # Of a mask (rows, length) transformers asks whether it is full: a GPU would wait.
                attention_mask=None if is_full else mask,
            ).last_hidden_state  # (rows, length, D)
            parts.append(hidden.flatten(0, 1))
            start = group.stop
        B, S = packed.places.shape
        flat = torch.cat(parts) if len(parts) > 1 else parts[0]
        # Past an example's last token is any other's: the mask hides it. Not always the
        # same one's, or a GPU would add up all their gradients, which are 0, in one place.
        spread = torch.arange(B * S, device=flat.device).remainder_(len(flat)).view(B, S)
        places = torch.where(packed.places < 0, spread, packed.places)
        fused = flat.index_select(0, places.flatten()).view(B, S, -1)
        return BaseModelOutput(last_hidden_state=fused), packed.places >= 0

    def decode(self, fused: Fused, **targets: Tensor) -> Any:
        """Run the decoder on labels or on its own ids, over what `fuse` returned."""
        encoded, mask = fused
        mask = mask[:, None, None]
        return self.model(encoder_outputs=encoded, attention_mask=mask, use_cache=False, **targets)

    def forward(
        self, packed: PackedSegments, labels: Tensor, num_items_in_batch: Tensor | int | None = None
    ) -> Seq2SeqLMOutput:
        """Read a batch with known targets.

        Labels are (B, T) int64, `IGNORED` where padded. `num_items_in_batch` are the target tokens
        to divide the summed loss by; None is this batch's.

        Returns:
            With `.loss` (mean cross entropy of a target token) and `.logits` (B, T, V).
        """
        output: Seq2SeqLMOutput = self.decode(self.fuse(packed), labels=labels)
        if num_items_in_batch is not None:
            output.loss = output.loss * ((labels != IGNORED).sum() / num_items_in_batch)
        return output

    def score_targets(self, fused: Fused, labels: Tensor) -> Tensor:
        """Return the log-probability of each row's whole target, (R,) float32.

        `fused` is of B examples. Labels are (R, T) int64: R / B rows in turn for each example.
        """
        ids = self.model.prepare_decoder_input_ids_from_labels(labels)
        logits = self.decode(fused, decoder_input_ids=ids).logits.float()  # (R, T, V)
        chosen = logits.gather(2, labels.clamp(min=0)[..., None]).squeeze(2)
        scores = (chosen - logits.logsumexp(dim=2)).masked_fill(labels == IGNORED, 0.0)
        total: Tensor = scores.sum(dim=1)
        return total

    @torch.inference_mode()
    def score_labels(self, packed: PackedSegments, targets: Tensor) -> Tensor:
        """Return the log-probability of each label's whole target, (B, C) float32.

        Targets are (C, T) int64, `IGNORED` where padded. The encoder runs once for all labels.
        """
        fused = self.fuse(packed)
        B = len(packed.places)
        # The logits of a token are a float for each of the vocabulary.
        most = max(1, _MAX_LOGITS // (B * targets.shape[1]))
        parts = [
            self.score_targets(fused, targets[first : first + most].repeat(B, 1)).view(B, -1)
            for first in range(0, len(targets), most)
        ]
        return torch.cat(parts, dim=1)

    @torch.inference_mode()
    def write(self, packed: PackedSegments, count: int) -> Tensor:
        """Write the likeliest `count` tokens, (B, count) int64, padded after the text's end."""
        encoded, mask = self.fuse(packed)
        ids = self.model.generate(
            encoder_outputs=encoded,
            attention_mask=mask,
            max_new_tokens=count,
            do_sample=False,
            num_beams=1,
            use_cache=False,  # of what is encoded no keys and values are made
        )
        end = self.model.config.pad_token_id
        return pad(ids[:, 1:], (0, count + 1 - ids.shape[1]), value=end)
