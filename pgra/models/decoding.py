"""Greedy decoding of many prompts: read in batches of like length, written on side by side.

Reading is bound by arithmetic, so that small batches without padding are best; writing a token is
bound by reading the weights, so that many prompts together cost little more than one. Hence the
two have sizes of their own: prompts are read in batches of so many tokens, and wait until as many
are there as the memory for keys and values takes. Those that are done leave, and others follow.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from pgra.errors import ModelError
from pgra.models.causal_lm import CausalLM
from pgra.models.loading import batch_budget
from pgra.models.prefix_groups import LEAST_SHARED, group_by_prefix
from pgra.models.reading import KeptPrompts, PromptReader, Shelf, join
from pgra.models.segments import GroupCost, group_by_length

logger = logging.getLogger(__name__)

IsDone = Callable[[Sequence[int]], bool]
"""Told the tokens written so far, says whether they are enough."""

_KEPT_BYTES = 1 << 29  # keys and values on a CPU
_KEPT_SHARE = 0.3  # of what is free on a GPU; they are copied when others join them
_HEADROOM = 64  # tokens that may follow a prompt, where a batch of prompts is cut
_DONE_SHARE = 4  # one in so many must be done before the others are moved together


@dataclass(frozen=True)
class Batch:
    """Prompts that are read in one call.

    Attributes:
        rows: Which.
        shared: Tokens they all begin with, which are read once for all batches of a group.
    """

    rows: list[int]
    shared: tuple[int, ...] = ()


@dataclass
class BatchReader:
    """Reads many prompts, those that begin alike behind one reading of their beginning.

    Attributes:
        lm: An LM with its head.
        batch_tokens: Tokens in one batch on a CPU; a GPU takes 16 times as many.
        kept_bytes: Most bytes of keys and values that are kept at a time; None goes by the device.
        num_tokens: Tokens read so far, padding not counted.
    """

    lm: CausalLM
    batch_tokens: int = 2048
    kept_bytes: int | None = None
    num_tokens: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.reader = PromptReader(self.lm)
        most = batch_budget(self.batch_tokens, self.lm.device)
        self._cost = replace(GroupCost.on(self.lm.device), max_tokens=most)
        self._shared: tuple[int, ...] = ()
        self._behind: KeptPrompts | None = None
        self._shelf = Shelf()

    def shelf(self, num_tokens: int) -> Shelf:
        """Give where prompts that are written on can be laid, so many tokens at a time.

        On a CPU it is the same in every call, since memory that is new costs more there than what
        is written in it; a GPU's is needed elsewhere, and torch keeps it.
        """
        shelf = self._shelf if self.lm.device.type == "cpu" else Shelf()
        shelf.expect(num_tokens)
        return shelf

    @property
    def room(self) -> int:
        """Give the tokens whose keys and values may be kept at a time."""
        most = self.kept_bytes
        if most is None and self.lm.device.type == "cuda":
            most = int(_KEPT_SHARE * torch.cuda.mem_get_info(self.lm.device)[0])
        return (_KEPT_BYTES if most is None else most) // self.reader.token_bytes

    def batches(self, prompts: Sequence[Sequence[int]]) -> list[Batch]:
        """Cut prompts into batches: those that begin alike together, each kind longest first.

        The cuts fall where padding and calls together cost least. However short what prompts have
        of their own, each one's keys and values are whole.
        """
        found, room = [], self.room if len(prompts) > 1 else 0
        for group in group_by_prefix(prompts):
            shared = tuple(prompts[group.rows[0]][: group.num_shared])
            own = np.array([len(prompts[row]) - len(shared) for row in group.rows])
            most = max(1, room // (len(shared) + int(own.max()) + _HEADROOM))
            batches = group_by_length(own, self._cost)
            for places in sorted(batches, key=lambda places: -own[places].max()):
                rows = [group.rows[place] for place in reversed(places)]
                found += [Batch(rows[i : i + most], shared) for i in range(0, len(rows), most)]
        return found

    def read(self, prompts: Sequence[Sequence[int]], batch: Batch) -> list[KeptPrompts]:
        """Read a batch; in parts, where the memory does not take it whole.

        Raises:
            ModelError: If one prompt alone does not fit, or gives no finite number.
        """
        try:
            behind = self._read_shared(batch.shared)
            kept = self.reader.read([prompts[row] for row in batch.rows], behind=behind)
        except torch.OutOfMemoryError as error:
            if len(batch.rows) == 1:
                raise ModelError(
                    f"a prompt of {len(prompts[batch.rows[0]])} tokens does not fit the memory of "
                    f"{self.lm.device} with '{self.lm.source.name}': use a smaller LM or --lm_dtype"
                ) from error
        else:
            self.num_tokens += sum(len(prompts[r]) - len(batch.shared) for r in batch.rows)
            return [kept]
        torch.cuda.empty_cache()  # outside the handler, which holds what did not fit
        half = len(batch.rows) // 2
        logger.warning("out of memory: %d prompts are read in two parts", len(batch.rows))
        parts = (batch.rows[:half], batch.rows[half:])
        return [kept for rows in parts for kept in self.read(prompts, Batch(rows, batch.shared))]

    def count_unread(self, prompts: Sequence[Sequence[int]]) -> int:
        """Count the tokens that reading these prompts now would take."""
        batches = self.batches(prompts)
        own = sum(len(prompts[row]) - len(batch.shared) for batch in batches for row in batch.rows)
        shared = {batch.shared for batch in batches if batch.shared}
        return own + sum(len(one) - self._count_known(one) for one in shared)

    def _read_shared(self, shared: tuple[int, ...]) -> KeptPrompts | None:
        if not shared:
            return None
        if self._behind is None or self._shared != shared:
            known = self._count_known(shared)
            begun = self._behind.cut(known) if self._behind is not None and known else None
            self._behind = None  # gone before the next is read
            is_known = begun is not None and known == len(shared)
            self._behind = begun if is_known else self.reader.read([shared], behind=begun)
            self._shared = shared
            self.num_tokens += len(shared) - known
        return self._behind

    def _count_known(self, shared: Sequence[int]) -> int:
        """Count the tokens at its start that the last shared beginning started with too.

        A prompt that grows from call to call is so read once.
        """
        if self._behind is None:
            return 0
        pairs = zip(self._shared, shared, strict=False)
        most = min(len(self._shared), len(shared))
        joint = next((i for i, (one, other) in enumerate(pairs) if one != other), most)
        return joint if joint >= LEAST_SHARED else 0


@dataclass(frozen=True)
class _Writing:
    """Prompts that are gone on with.

    Attributes:
        rows: Which.
        kept: What was read of them, and the logits of what follows.
    """

    rows: list[int]
    kept: KeptPrompts


@dataclass(frozen=True)
class GreedyDecoder:
    """Writes the likeliest token behind a prompt, and then the likeliest behind that.

    Attributes:
        reader: What reads the prompts.
    """

    reader: BatchReader

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        is_done: IsDone,
        advance: Callable[[int], object] = int,
    ) -> list[list[int]]:
        """Go on with prompts.

        Args:
            prompts: Token ids, none empty; all fit the LM's window with the new tokens.
            max_new_tokens: Most tokens behind each.
            is_done: Asked after each token.
            advance: Told how many more prompts are done.

        Returns:
            The tokens written behind each prompt, in the order given; the one after which it was
            done included.

        Raises:
            ModelError: If a prompt does not fit the memory, or gives no finite number.
        """
        answers = _Answers(self.reader.lm, len(prompts), max_new_tokens, is_done, advance)
        room = self.reader.room
        queue = deque(self.reader.batches(prompts))
        longest = max(map(len, prompts), default=0) + max_new_tokens
        shelf = self.reader.shelf(min(room, len(prompts) * longest))
        writing: _Writing | None = None
        while queue or writing:
            begun = [writing] if writing else []
            while queue and _fits(begun, queue[0], prompts, max_new_tokens, room):
                begun += self._begin(prompts, queue.popleft(), answers)
            writing = _gather(begun, max_new_tokens, shelf)
            del begun  # what was read stands on the shelf
            least = len(writing.rows) // 2 if writing and queue else 0
            while writing and len(writing.rows) > least:
                tokens = [answers.written[row][-1] for row in writing.rows]
                kept = self.reader.reader.step(writing.kept, tokens)
                answers.add(writing.rows, kept)
                writing = answers.undone(_Writing(writing.rows, kept), share=_DONE_SHARE)
        return answers.written

    def _begin(
        self, prompts: Sequence[Sequence[int]], batch: Batch, answers: "_Answers"
    ) -> list[_Writing]:
        """Read a batch, and write each prompt's first token; those that are done leave."""
        begun, start = [], 0
        for kept in self.reader.read(prompts, batch):
            rows = batch.rows[start : start + len(kept)]
            start += len(kept)
            answers.add(rows, kept)
            left = answers.undone(_Writing(rows, kept))
            begun += [left] if left else []
        return begun


@dataclass
class _Answers:
    """What was written behind each prompt of a call."""

    lm: CausalLM
    count: int
    max_new_tokens: int
    is_done: IsDone
    advance: Callable[[int], object]

    def __post_init__(self) -> None:
        self.written: list[list[int]] = [[] for _ in range(self.count)]
        self._is_whole = [False] * self.count

    def add(self, rows: Sequence[int], kept: KeptPrompts) -> None:
        """Write the likeliest token behind each prompt that is not done."""
        before = sum(self._is_whole)
        for row, token in zip(rows, likeliest(kept.logits, self.lm), strict=True):
            if not self._is_whole[row]:
                self.written[row].append(token)
                is_full = len(self.written[row]) >= self.max_new_tokens
                self._is_whole[row] = is_full or self.is_done(self.written[row])
        self.advance(sum(self._is_whole) - before)

    def undone(self, writing: _Writing, *, share: int | None = None) -> _Writing | None:
        """Let those leave that are done; None if all are.

        Args:
            writing: Prompts.
            share: Only if at least one in so many is done, for the others are moved; None always.
        """
        left = [place for place, row in enumerate(writing.rows) if not self._is_whole[row]]
        if not left:
            return None
        if share is not None and (len(writing.rows) - len(left)) * share < len(writing.rows):
            return writing
        return _Writing([writing.rows[place] for place in left], writing.kept.keep(left))


def likeliest(logits: Tensor, lm: CausalLM) -> list[int]:
    """Give the likeliest token of each row.

    Raises:
        ModelError: If a row holds a number that is not finite.
    """
    best, tokens = logits.max(dim=1)
    if not torch.isfinite(best).all():
        raise ModelError(
            f"'{lm.source.name}' gives no finite number in {lm.dtype} for a prompt: "
            "use --lm_dtype bfloat16 or float32"
        )
    found: list[int] = tokens.tolist()
    return found


def _fits(
    begun: Sequence[_Writing],
    batch: Batch,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    room: int,
) -> bool:
    """Say whether a batch's keys and values fit beside what is kept already."""
    if not begun:
        return True
    longest = max(len(prompts[row]) for row in batch.rows)
    longest = max(longest, *(writing.kept.longest for writing in begun)) + max_new_tokens
    count = len(batch.rows) + sum(len(writing.rows) for writing in begun)
    return count * longest <= room


def _gather(begun: Sequence[_Writing], room: int, shelf: Shelf) -> _Writing | None:
    if not begun:
        return None
    rows = [row for writing in begun for row in writing.rows]
    return _Writing(rows, join([writing.kept for writing in begun], room=room, shelf=shelf))
