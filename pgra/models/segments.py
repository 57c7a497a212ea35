"""Segments packed for the reader: grouped by length, so that hardly a token is padding.

Released readers pad every segment to 128 tokens, twice what there is to read. Here a batch's
segments are sorted by length and cut into groups, each padded to its own longest; where the cuts
fall is the cheapest of all ways, given what one more call of the encoder costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

TokenIds = npt.NDArray[np.int32]
Group = tuple[int, int, int]
"""Rows, padded length, and real tokens of one call of the encoder."""


@dataclass(frozen=True)
class GroupCost:
    """What decides how segments are grouped.

    Attributes:
        overhead: What one more call of the encoder costs, in tokens.
        max_tokens: Most padded tokens of a call; a single longer segment goes alone.
    """

    overhead: int
    max_tokens: int

    @classmethod
    def on(cls, device: torch.device, *, is_training: bool = False) -> "GroupCost":
        """Give what suits a device.

        On a CPU a call of 8,192 tokens leaves the cache (T5-small, two cores: 2,700 tokens a
        second, 3,900 at 2,048); in training each call also adds up gradients of all weights. On a
        GPU few large calls keep it busy (not measured yet).
        """
        if device.type == "cuda":
            return cls(1024, 1 << 16)
        return cls(128, 4096) if is_training else cls(24, 2048)


@dataclass(frozen=True)
class PackedSegments:
    """The segments of B examples as the encoder and then the decoder see them.

    Attributes:
        input_ids: The groups' padded rows one after the other, (M,) int64.
        attention_mask: True on real tokens, (M,) bool.
        groups: Rows, padded length and real tokens of each group; the products of the first two
            add up to M.
        places: Where each example's tokens stand among the M, segment after segment, (B, S) int64;
            -1 behind an example's last token. S is the most tokens of an example.
    """

    input_ids: Tensor
    attention_mask: Tensor
    groups: tuple[Group, ...]
    places: Tensor

    def to(self, device: torch.device) -> "PackedSegments":
        """Copy to a device."""
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            attention_mask=self.attention_mask.to(device),
            places=self.places.to(device),
        )

    def as_inputs(self) -> dict[str, Any]:
        """Name the parts as `FusionReader.forward` takes them."""
        return {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            "groups": self.groups,
            "places": self.places,
        }


def pack_segments(
    examples: Sequence[Sequence[TokenIds]], *, pad_token_id: int, cost: GroupCost
) -> PackedSegments:
    """Group the segments of B examples by length.

    Args:
        examples: Token ids of each segment; their number may differ from example to example.
        pad_token_id: The tokenizer's; its value cannot matter, the mask hides it.
        cost: What decides the groups.

    Raises:
        ValueError: If an example has no segment, or a segment no token.
    """
    segments = [segment for example in examples for segment in example]
    lengths = np.array([len(segment) for segment in segments], dtype=np.int64)
    if not all(len(example) for example in examples) or not lengths.all():
        raise ValueError("an example has no segment, or a segment no token")
    ids: list[npt.NDArray[np.int64]] = []
    starts = np.empty(len(segments), dtype=np.int64)  # of each segment among the M tokens
    groups: list[Group] = []
    done = 0
    for indices in group_by_length(lengths, cost):
        longest = int(lengths[indices].max())
        block = np.full((len(indices), longest), pad_token_id, dtype=np.int64)
        for row, index in enumerate(indices):
            block[row, : lengths[index]] = segments[index]
        starts[indices] = done + np.arange(len(indices)) * longest
        ids.append(block.ravel())
        groups.append((len(indices), longest, int(lengths[indices].sum())))
        done += block.size
    places = _places(starts, lengths, [len(example) for example in examples])
    mask = np.zeros(done, dtype=np.bool_)
    mask[places[places >= 0]] = True
    return PackedSegments(
        torch.from_numpy(np.concatenate(ids)),
        torch.from_numpy(mask),
        tuple(groups),
        torch.from_numpy(places),
    )


def _places(
    starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], counts: Sequence[int]
) -> npt.NDArray[np.int64]:
    """Say where each example's tokens stand, (B, S), -1 where there are no more."""
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    flat = np.repeat(starts, lengths) + within
    owners = np.repeat(np.arange(len(counts)), counts)
    totals = np.bincount(owners, weights=lengths, minlength=len(counts)).astype(np.int64)
    places = np.full((len(counts), totals.max()), -1, dtype=np.int64)
    places[np.arange(places.shape[1]) < totals[:, None]] = flat
    return places


def group_by_length(lengths: npt.NDArray[np.int64], cost: GroupCost) -> list[npt.NDArray[np.int64]]:
    """Cut segments, sorted by length, into the groups whose padded tokens and calls cost least.

    Args:
        lengths: Tokens of each segment, (n,) int64, all at least 1.
        cost: What a call costs, and the most it may hold.

    Returns:
        Indices into `lengths`, each exactly once; in a group sorted by length, ties by index.
    """
    order = np.argsort(lengths, kind="stable")
    distinct, counts = np.unique(lengths, return_counts=True)
    upto = np.concatenate([[0], np.cumsum(counts)])
    # cheapest[j] is the least cost of the j shortest lengths; the last group begins at chosen[j].
    cheapest = np.zeros(len(distinct) + 1)
    chosen = np.zeros(len(distinct) + 1, dtype=np.int64)
    for j, length in enumerate(distinct, 1):
        tokens = (upto[j] - upto[:j]) * length
        calls = np.ceil(tokens / max(cost.max_tokens, length))
        costs = cheapest[:j] + tokens + calls * cost.overhead
        chosen[j] = costs.argmin()
        cheapest[j] = costs[chosen[j]]
    groups: list[npt.NDArray[np.int64]] = []
    j = len(distinct)
    while j:
        rows = order[upto[chosen[j]] : upto[j]]
        most = max(1, cost.max_tokens // int(distinct[j - 1]))
        groups += np.array_split(rows, -(-len(rows) // most))
        j = int(chosen[j])
    return groups
