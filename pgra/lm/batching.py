"""Batches by token budget, by length, or by shared beginning; halved where memory runs out."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from pgra.arrays import Counts
from pgra.errors import ModelError
from pgra.lm.base import Prompts

logger = logging.getLogger(__name__)


def token_budget_batches(
    lengths: Sequence[int], budget: int, *, max_rows: int | None = None
) -> list[list[int]]:
    """Return batches of indices into `lengths` whose padded size fits a token budget.

    The longest come first (ties by index), so that too little memory shows at once. `budget` is the
    most padded tokens (rows times longest) a batch; a longer text goes alone. `max_rows` is the
    most texts a batch; None for no limit.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batches: list[list[int]] = []
    start = 0
    while start < len(order):
        rows = max(1, budget // max(1, lengths[order[start]]))
        if max_rows is not None:
            rows = min(rows, max_rows)
        batches.append(order[start : start + rows])
        start += rows
    return batches


T = TypeVar("T")
R = TypeVar("R")


@dataclass
class BackOff:
    """Runs batches of up to `budget` tokens; halves one that does not fit in memory.

    Later batches are then smaller. `advice` says whose memory it is and what to do, for the error
    of a single item that does not fit.
    """

    budget: int
    advice: str

    def run(
        self,
        batch: Sequence[T],
        size: Callable[[Sequence[T]], int],
        run: Callable[[Sequence[T]], R],
    ) -> list[R]:
        """Run a batch in as few calls of `run` as memory allows; `size` counts tokens.

        Raises:
            ModelError: If one item alone does not fit.
        """
        tokens = size(batch)
        if len(batch) == 1 or tokens <= self.budget:  # else an earlier one like it did not fit
            try:
                return [run(batch)]
            except torch.OutOfMemoryError as error:
                if len(batch) == 1:
                    raise ModelError(
                        f"one text of {tokens} tokens does not fit the memory of {self.advice}"
                    ) from error
            # Outside the handler, or the failed attempt's tensors would live on.
            torch.cuda.empty_cache()
            self.budget = max(1, tokens // 2)
            logger.warning("out of memory: batches now take %d tokens at a time", self.budget)
        half = len(batch) // 2
        return self.run(batch[:half], size, run) + self.run(batch[half:], size, run)


def pad(texts: Prompts, fill: int = 0) -> tuple[Tensor, Tensor]:
    """Pad token ids on the right: ids (n, L) int64, and a mask (n, L) bool, True on real tokens."""
    lengths = torch.tensor([len(text) for text in texts])
    mask = torch.arange(max(1, int(lengths.max()))) < lengths[:, None]
    ids = torch.full(mask.shape, fill)
    ids[mask] = torch.tensor(list(chain.from_iterable(texts)), dtype=torch.long)
    return ids, mask


def send(values: Tensor, device: torch.device) -> Tensor:
    """Send values from the host without waiting for the device's current work."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def begin_fetch(values: Tensor) -> Callable[[], Tensor]:
    """Start copying values to the host; the returned function waits for this copy alone."""
    if values.device.type != "cuda":
        return values.cpu
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    is_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    is_done.record(torch.cuda.current_stream(values.device))

    def wait() -> Tensor:
        is_done.synchronize()
        return host

    return wait


# Texts grouped by length, so that hardly a token is padding: where the cuts fall is the cheapest of
# all ways, given what one more call of the model costs.


@dataclass(frozen=True)
class GroupCost:
    """What decides how texts are grouped.

    Attributes:
        overhead: Cost of one more call, in tokens.
        max_tokens: Most padded tokens of a call; a longer text goes alone.
        multiple: Padded lengths are multiples of it, so that shapes recur.
    """

    overhead: int
    max_tokens: int
    multiple: int = 1

    @classmethod
    def on(cls, device: torch.device, *, is_training: bool = False) -> "GroupCost":
        """Return what suits a device.

        On a CPU a call of 8,192 tokens exceeds the cache (T5-small, two cores: 2,700 tokens a
        second, 3,900 at 2,048); in training each call also adds up gradients of all weights. A
        GPU's values are estimates for a T5-base in bfloat16, not measured; its multiple gives 12
        shapes in place of 1,157 in 5,000 steps of the paper's size, for 0.6 % more tokens.
        """
        if device.type == "cuda":
            return cls(1 << 14, 1 << 16, 16)
        return cls(128, 4096) if is_training else cls(24, 2048)

    def padded(self, length: int) -> int:
        return -(-length // self.multiple) * self.multiple


def group_by_length(lengths: Counts, cost: GroupCost) -> list[Counts]:
    """Return groups of indices with the least cost of padding and calls, each sorted by length.

    Lengths are (n,) int64, at least 1; ties go by index.
    """
    order = np.argsort(lengths, kind="stable")
    distinct, counts = np.unique(lengths, return_counts=True)
    upto = np.concatenate([[0], np.cumsum(counts)])
    # cheapest[j] is the least cost of the j shortest lengths; the last group begins at chosen[j].
    cheapest = np.zeros(len(distinct) + 1)
    chosen = np.zeros(len(distinct) + 1, dtype=np.int64)
    for j, length in enumerate(map(cost.padded, distinct.tolist()), 1):
        tokens = (upto[j] - upto[:j]) * length
        calls = np.ceil(tokens / max(cost.max_tokens, length))
        costs = cheapest[:j] + tokens + calls * cost.overhead
        chosen[j] = costs.argmin()
        cheapest[j] = costs[chosen[j]]
    groups: list[Counts] = []
    j = len(distinct)
    while j:
        rows = order[upto[chosen[j]] : upto[j]]
        most = max(1, cost.max_tokens // cost.padded(int(distinct[j - 1])))
        groups += np.array_split(rows, -(-len(rows) // most))
        j = int(chosen[j])
    return groups


# Which prompts begin alike: what they share is then read once (`pgra.lm.generate`).


_LEAST_SHARED = 32  # fewer tokens are not worth a call of their own
_LEAST_SHARE = 1 / 4  # of a prompt: less does not pay for batches that are cut smaller


def group_by_prefix(prompts: Prompts) -> list[tuple[tuple[int, ...], list[int]]]:
    """Group prompts, none empty, that begin with the same 32 tokens or more.

    Returns the shared tokens of each group, and its prompts' rows; each has at least one token
    more. The last group shares nothing, or too little to pay for a call of its own.
    """
    alike: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        alike.setdefault(tuple(prompt[:_LEAST_SHARED]), []).append(row)
    groups = list[tuple[tuple[int, ...], list[int]]]()
    alone = list[int]()
    for rows in alike.values():
        texts = [list(prompts[row]) for row in rows]
        shared = share_tokens(texts)
        if len(rows) > 1 and len(shared) >= max(_LEAST_SHARED, _LEAST_SHARE * max(map(len, texts))):
            groups.append((tuple(shared), rows))
        else:
            alone += rows
    return [*groups, ((), sorted(alone))] if alone else groups


def share_tokens(texts: Sequence[list[int]]) -> list[int]:
    """Return the tokens that all texts begin with, so that each has at least one more."""
    first = min(texts)
    last = max(texts)  # of all texts, these two differ first
    most = min(map(len, texts)) - 1
    count = 0
    while count < most and first[count] == last[count]:
        count += 1
    return first[:count]
