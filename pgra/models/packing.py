"""Texts side by side in rows behind one copy of a prefix: who stands where, and who sees whom."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


def pack_rows(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Lay texts side by side into rows of about equal length.

    Args:
        lengths: Tokens of each text, longest first for tight rows.
        row_tokens: A row takes texts until it would pass this; a longer text has its own row.

    Returns:
        For each row the places of its texts.
    """
    rows: list[list[int]] = []
    room = 0
    for i, length in enumerate(lengths):
        if not rows or length > room:
            rows.append([])
            room = max(row_tokens, length)
        rows[-1].append(i)
        room -= length
    return rows


@dataclass(frozen=True)
class RowLayout:
    """Where each text stands in a batch of R rows of T tokens.

    Attributes:
        segments: (R, T) int64, which text a token belongs to; -1 is padding.
        positions: (R, T) int64, a token's place in its text.
        rows: (n,) int64, each text's row.
        ends: (n,) int64, the column of each text's last token.
    """

    segments: Tensor
    positions: Tensor
    rows: Tensor
    ends: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], rows: Sequence[Sequence[int]]) -> Self:
        """Lay out texts of these lengths in these rows."""
        width = max(sum(lengths[i] for i in members) for members in rows)
        segments = torch.full((len(rows), width), -1)
        positions = torch.zeros(len(rows), width, dtype=torch.long)
        row_of, ends = torch.zeros(2, len(lengths), dtype=torch.long)
        for row, members in enumerate(rows):
            start = 0
            for i in members:
                end = start + lengths[i]
                segments[row, start:end] = i
                positions[row, start:end] = torch.arange(lengths[i])
                row_of[i], ends[i] = row, end - 1
                start = end
        return cls(segments, positions, row_of, ends)

    def mask(self, shared: int, dtype: torch.dtype) -> Tensor:
        """Give the additive mask (R, 1, T, shared + T): 0 where a token may look, else lowest.

        A token sees the whole prefix, and of the row only its own text up to itself.
        """
        same = self.segments[:, :, None] == self.segments[:, None, :]
        own = same & torch.ones(same.shape[-2:], dtype=torch.bool).tril()
        seen = torch.cat([torch.ones(*own.shape[:2], shared, dtype=torch.bool), own], dim=-1)
        lowest = torch.finfo(dtype).min
        return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, lowest)[:, None]
