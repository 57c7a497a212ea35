"""Texts side by side in rows: who stands where, and who sees whom."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
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


def send(values: Tensor, device: torch.device) -> Tensor:
    """Send values from the host without waiting for what the device does now."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


@dataclass(frozen=True)
class RowLayout:
    """Where each text stands in a batch of R rows of T tokens.

    Attributes:
        segments: (R, T) int64, which text a token belongs to; -1 is padding.
        positions: (R, T) int64, a token's place in its text.
        rows: (n,) int64, each text's row.
        ends: (n,) int64, the column of each text's last token.
        lengths: (n,) int64, each text's tokens.
    """

    segments: Tensor
    positions: Tensor
    rows: Tensor
    ends: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], rows: Sequence[Sequence[int]]) -> Self:
        """Lay out texts of these lengths in these rows, each text once."""
        sizes = np.asarray(lengths, dtype=np.int64)
        order = np.concatenate([np.asarray(members, dtype=np.int64) for members in rows])
        row = np.repeat(np.arange(len(rows)), [len(members) for members in rows])
        stop = np.cumsum(sizes[order])
        first = np.searchsorted(row, np.arange(len(rows)))  # of each row, its first text
        start = stop - sizes[order]
        start -= start[first][row]
        own = np.arange(stop[-1]) - np.repeat(stop - sizes[order], sizes[order])
        width = int((start + sizes[order]).max())
        place = np.repeat(row * width + start, sizes[order]) + own
        segments = np.full(len(rows) * width, -1)
        positions = np.zeros(len(rows) * width, dtype=np.int64)
        segments[place], positions[place] = np.repeat(order, sizes[order]), own
        row_of, ends = np.empty((2, len(sizes)), dtype=np.int64)
        row_of[order], ends[order] = row, start + sizes[order] - 1
        shape = (len(rows), width)
        arrays = (segments.reshape(shape), positions.reshape(shape), row_of, ends, sizes)
        return cls(*map(torch.from_numpy, arrays))

    @cached_property
    def flat_ends(self) -> Tensor:
        """Give each text's last token among the R*T, (n,) int64."""
        return self.rows * self.segments.shape[1] + self.ends

    def place(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Lay token ids where they belong, (R, T) int64; padding is 0."""
        ids = np.concatenate([np.asarray(text, dtype=np.int64) for text in texts])
        before = torch.cumsum(self.lengths, 0) - self.lengths
        source = (before[self.segments] + self.positions).masked_fill_(self.segments < 0, len(ids))
        return torch.from_numpy(np.append(ids, 0))[source]

    def mask(self, shared: int, dtype: torch.dtype) -> Tensor:
        """Say who may look where behind a shared prefix: as a model is told it.

        Where each text has its own row, that is the stock mask (R, shared + T), 1 for tokens and 0
        for the padding behind them: the LM looks at no later token, and one that counts places by
        the mask (ALiBi, as in BLOOM) can do so. Else it is additive, (R, 1, T, shared + T), 0 where
        a token may look and the lowest number elsewhere.

        A token sees the whole prefix, and of the row only its own text up to itself.
        """
        if len(self.segments) == len(self.lengths):
            return F.pad((self.segments >= 0).long(), (shared, 0), value=1)
        same = self.segments[:, :, None] == self.segments[:, None, :]
        own = same & torch.ones(same.shape[-2:], dtype=torch.bool).tril()
        seen = torch.cat([torch.ones(*own.shape[:2], shared, dtype=torch.bool), own], dim=-1)
        lowest = torch.finfo(dtype).min
        return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, lowest)[:, None]
