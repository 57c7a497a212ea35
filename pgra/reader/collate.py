"""Tokenises reader inputs once, and pads them into batches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

from pgra.models.fid import IGNORED
from pgra.prompts.verbalizer import Verbalizer
from pgra.types import ReaderInput

_CHUNK = 1024


@dataclass(frozen=True)
class TokenizedInput:
    """One example as tokens, kept as arrays: lists of Python integers take ten times the memory.

    Attributes:
        segments: N arrays of token ids, int32.
        target: Token ids of the label's target, None without a label.
    """

    segments: tuple[npt.NDArray[np.int32], ...]
    target: npt.NDArray[np.int32] | None

    @property
    def size(self) -> int:
        """Padded tokens: segments times the longest."""
        return len(self.segments) * max(len(segment) for segment in self.segments)


@dataclass(frozen=True)
class ReaderBatch:
    """A padded batch. N and L are the batch's own largest.

    Attributes:
        input_ids: (B, N, L) int64.
        attention_mask: True on real tokens, (B, N, L) bool; a missing segment is wholly False.
        labels: (B, T) int64, -100 where padded; None if an example has no label.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor | None

    def to(self, device: torch.device) -> "ReaderBatch":
        """Copy to a device."""
        labels = None if self.labels is None else self.labels.to(device)
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            attention_mask=self.attention_mask.to(device),
            labels=labels,
        )


def tokenize_inputs(
    inputs: Sequence[ReaderInput],
    tokenizer: Any,
    verbalizer: Verbalizer,
    *,
    progress: bool = False,
) -> list[TokenizedInput]:
    """Tokenise inputs, whole segments at a time (they fit: `build_inputs` saw to it).

    Args:
        inputs: Each with at least one segment.
        tokenizer: The reader's, a fast one.
        verbalizer: Gives each label its target.
        progress: Whether to show a bar.

    Returns:
        One for each input, in order.
    """
    ids = zip(verbalizer.labels, verbalizer.target_ids(tokenizer), strict=True)
    targets = {label: np.array(target, dtype=np.int32) for label, target in ids}
    done: list[TokenizedInput] = []
    with tqdm(total=len(inputs), desc="tokenise", unit="ex", disable=not progress) as bar:
        for start in range(0, len(inputs), _CHUNK):
            chunk = inputs[start : start + _CHUNK]
            texts = [segment for item in chunk for segment in item.segments]
            rows = iter(tokenizer(texts).input_ids)
            for item in chunk:
                segments = tuple(np.array(next(rows), dtype=np.int32) for _ in item.segments)
                target = None if item.label is None else targets[item.label]
                done.append(TokenizedInput(segments, target))
            bar.update(len(chunk))
    return done


@dataclass(frozen=True)
class Collator:
    """Pads tokenised inputs into a batch.

    Attributes:
        pad_token_id: The tokenizer's; its value cannot matter, the mask hides it.
    """

    pad_token_id: int

    def __call__(self, rows: Sequence[TokenizedInput]) -> ReaderBatch:
        """Pad to the batch's most segments and longest segment."""
        N = max(len(row.segments) for row in rows)
        L = max(len(segment) for row in rows for segment in row.segments)
        ids = np.full((len(rows), N, L), self.pad_token_id, dtype=np.int64)
        mask = np.zeros((len(rows), N, L), dtype=np.bool_)
        for i, row in enumerate(rows):
            for n, segment in enumerate(row.segments):
                ids[i, n, : len(segment)] = segment
                mask[i, n, : len(segment)] = True
        targets = [row.target for row in rows if row.target is not None]
        labels = pad_targets(targets) if len(targets) == len(rows) else None
        return ReaderBatch(torch.from_numpy(ids), torch.from_numpy(mask), labels)

    def as_inputs(self, rows: Sequence[TokenizedInput]) -> dict[str, Tensor]:
        """Pad, and name the tensors as the Trainer passes them to the reader."""
        batch = self(rows)
        named = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        return named if batch.labels is None else {**named, "labels": batch.labels}


def pad_targets(targets: Sequence[Sequence[int] | npt.NDArray[np.int32]]) -> Tensor:
    """Pad targets with -100 to the longest, (n, T) int64."""
    padded = np.full((len(targets), max(len(t) for t in targets)), IGNORED, dtype=np.int64)
    for i, target in enumerate(targets):
        padded[i, : len(target)] = target
    return torch.from_numpy(padded)
