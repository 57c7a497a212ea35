"""Batches of tokenised inputs: segments in groups of like length, targets padded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pgra.models.fid import IGNORED
from pgra.models.segments import GroupCost, PackedSegments, pack_segments
from pgra.reader.tokens import TokenizedInput


@dataclass(frozen=True)
class ReaderBatch:
    """A batch of B examples.

    Attributes:
        packed: Their segments.
        labels: (B, T) int64, -100 where padded; None if an example has no label.
        example_ids: Which examples they are.
    """

    packed: PackedSegments
    labels: Tensor | None
    example_ids: tuple[str, ...]

    def to(self, device: torch.device) -> "ReaderBatch":
        """Copy to a device."""
        labels = None if self.labels is None else self.labels.to(device)
        return replace(self, packed=self.packed.to(device), labels=labels)


@dataclass(frozen=True)
class Collator:
    """Makes batches of tokenised inputs.

    Attributes:
        pad_token_id: The tokenizer's.
        cost: What decides how segments are grouped.
    """

    pad_token_id: int
    cost: GroupCost

    def __call__(self, rows: Sequence[TokenizedInput]) -> ReaderBatch:
        """Group the segments and pad the targets; N and L may differ from row to row."""
        packed = pack_segments(
            [row.segments for row in rows], pad_token_id=self.pad_token_id, cost=self.cost
        )
        targets = [row.target for row in rows if row.target is not None]
        labels = pad_targets(targets) if len(targets) == len(rows) else None
        return ReaderBatch(packed, labels, tuple(row.example_id for row in rows))

    def as_inputs(self, rows: Sequence[TokenizedInput]) -> dict[str, Any]:
        """Give a batch as the Trainer passes it on: the reader's arguments, and the examples' ids.

        The ids are for whoever has to name a batch; the reader does not take them.
        """
        batch = self(rows)
        named = {**batch.packed.as_inputs(), "example_ids": batch.example_ids}
        return named if batch.labels is None else {**named, "labels": batch.labels}


def pad_targets(targets: Sequence[Sequence[int] | npt.NDArray[np.int32]]) -> Tensor:
    """Pad targets with -100 to the longest, (n, T) int64."""
    padded = np.full((len(targets), max(len(t) for t in targets)), IGNORED, dtype=np.int64)
    for i, target in enumerate(targets):
        padded[i, : len(target)] = target
    return torch.from_numpy(padded)
