"""Exact search on a GPU: float16 products choose, and sums without rounding decide.

The shards are float16, so a product with rounded queries reads each vector once, in the format that
a GPU is fastest at. How far such a product may lie from the true one is known. Some more hits than
are asked for are scored again by sums in float64, rounded to float32 once. Where a vector that was
left out might still come in, the query is searched again, deeper. So scores are the float32 nearest
to the true inner products, equal ones go by row, and neither blocks nor the other queries matter.
"""

import contextlib
import logging
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pgra.core import MISSING_ROW, Rows
from pgra.errors import ModelError, device_failures
from pgra.lm.batching import send
from pgra.retrieval.faiss import Vectors, VectorSource

logger = logging.getLogger(__name__)

_GB = 1e9
_SPARE = 64  # hits beyond those asked for; mostly enough for the doubt
_DEEPER = 4
_BLOCK_ROWS = 1 << 16  # vectors that are multiplied at once
_CELLS = 1 << 27  # products that are held at once, 2 bytes each; fewer where memory is short
_LEAST_CELLS = 1 << 12
_GATHERED = 1 << 25  # numbers that are scored again at once, 8 bytes each, twice
_GPU_SHARE = 0.5  # of the free memory, for the vectors
_LARGEST = 2.0**14  # product; float16 ends at 65,504
_HALF, _SINGLE = 2.0**-10, 2.0**-24  # twice what rounding to float16 takes off, and to float32
_LEAST_HALF = 2.0**-24  # the smallest float16


class _Found(NamedTuple):
    """Scores and rows, (B, k), and of which queries they are the best of all."""

    scores: Vectors
    rows: Rows
    is_sure: npt.NDArray[np.bool_]


class HalfSearch:
    """Exact search of float16 vectors on a GPU; on a CPU it gives the same, slowly.

    Vectors are copied once, as they are stored, where they take no more than half of the GPU's free
    memory. Beyond that they are copied in blocks for each search.
    """

    def __init__(self, source: VectorSource, device: str) -> None:
        """Open the search; nothing is copied yet.

        Args:
            source: The vectors; it has `halves`.
            device: "cuda", "cuda:1", ...
        """
        self.ntotal = source.num_rows
        self._source, self._device, self._cells = source, device, _CELLS

    def search(self, queries: Vectors, k: int) -> tuple[Vectors, Rows]:
        """Return scores and rows of each query's largest inner products, (B, k) each.

        Best first, equal scores by row; missing behind the last vector.

        Args:
            queries: (B, D) float32, finite.
            k: Hits a query.

        Raises:
            ModelError: If the device fails, or has no room for a few products.
        """
        scores = np.full((len(queries), k), -np.inf, dtype=np.float32)
        rows = np.full((len(queries), k), MISSING_ROW, dtype=np.int64)
        kept = min(k, self.ntotal)
        waiting = [(np.arange(len(queries)), min(kept + _SPARE, self.ntotal))]
        with device_failures("the search"), _whole_sums():
            while kept and waiting:
                group, depth = waiting.pop()
                step = max(1, self._cells // depth)
                if len(group) > step:
                    waiting.append((group[step:], depth))
                    group = group[:step]
                found = None
                with contextlib.suppress(torch.OutOfMemoryError):
                    found = self._find(queries[group], kept, depth)
                if found is None:  # outside the handler: the failed attempt's tensors are gone
                    self._take_less()
                    waiting.append((group, depth))
                    continue
                sure, unsure = group[found.is_sure], group[~found.is_sure]
                scores[sure, :kept] = found.scores[found.is_sure]
                rows[sure, :kept] = found.rows[found.is_sure]
                if len(unsure):
                    waiting.append((unsure, min(_DEEPER * depth, self.ntotal)))
        return scores, rows

    def _take_less(self) -> None:
        torch.cuda.empty_cache()
        self._cells //= 4
        if self._cells < _LEAST_CELLS:
            raise ModelError(
                f"the memory of {self._device} does not hold {4 * self._cells:,} products of "
                "queries and passages: free some, or use --device cpu"
            )
        logger.warning("out of memory: the search now holds %d products at a time", self._cells)

    def _find(self, queries: Vectors, k: int, depth: int) -> _Found:
        """Return the best k of those that are the `depth` best by float16."""
        device, longest = torch.device(self._device), self._loaded[1]
        asked = send(torch.from_numpy(np.ascontiguousarray(queries)), device).double()
        lengths = torch.linalg.vector_norm(asked, dim=1)
        # By a power of two, which changes no digit; then no product overflows.
        most = _LARGEST / (lengths * max(longest, 1.0)).clamp(min=1e-30)
        scale = torch.exp2(torch.log2(most).floor().clamp(-100, 100))
        scaled = asked * scale[:, None]
        halves = scaled.half()
        doubt = torch.linalg.vector_norm(scaled - halves.double(), dim=1)  # of the query's rounding
        doubt += _SINGLE * asked.shape[1] * lengths * scale  # and of float32 sums
        nearly, rows = self._choose(halves, depth)
        rows = rows.sort(dim=1).values
        scores, order = self._score(asked, rows).sort(dim=1, descending=True, stable=True)
        rows, scores = rows.gather(1, order)[:, :k], scores[:, :k]
        is_sure = np.ones(len(queries), dtype=np.bool_)
        if depth < self.ntotal:
            last = nearly.amin(dim=1).double()
            highest = (last + _HALF * last.abs() + _LEAST_HALF + doubt * longest) / scale
            is_sure = (scores[:, -1] > highest.float()).cpu().numpy()  # than all that was left out
        return _Found(scores.cpu().numpy(), rows.cpu().numpy(), is_sure)

    def _choose(self, halves: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Return the `depth` largest float16 products of each query, and their rows, unsorted."""
        nearly = torch.full(
            (len(halves), depth), -torch.inf, dtype=halves.dtype, device=halves.device
        )
        rows = torch.zeros(nearly.shape, dtype=torch.int64, device=halves.device)
        for first, vectors in self._blocks():
            step = max(1, self._cells // len(vectors))
            count = min(depth, len(vectors))
            for start in range(0, len(halves), step):
                part = slice(start, start + step)
                new, places = (halves[part] @ vectors.T).topk(count, dim=1, sorted=False)
                both = torch.cat([nearly[part], new], dim=1)
                nearly[part], order = both.topk(depth, dim=1, sorted=False)
                rows[part] = torch.cat([rows[part], places + first], dim=1).gather(1, order)
        return nearly, rows

    def _blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield all vectors on the device, a block at a time, with the first one's row."""
        most = min(_BLOCK_ROWS, self._cells)
        held, _ = self._loaded
        for first, vectors in self._sent() if held is None else [(0, held)]:
            for start in range(0, len(vectors), most):
                yield first + start, vectors[start : start + most]

    def _score(self, asked: Tensor, rows: Tensor) -> Tensor:
        """Return float32 products of queries (B, D) with the vectors of their rows, (B, K)."""
        scores = torch.empty(rows.numel(), dtype=torch.float32, device=rows.device)
        flat, K = rows.flatten(), rows.shape[1]
        step = max(1, min(_GATHERED, self._cells) // asked.shape[1])
        for start in range(0, len(flat), step):
            some = flat[start : start + step]
            owners = torch.arange(start, start + len(some), device=rows.device) // K
            # Summed row by row: a matrix product may add up two equal vectors in different orders.
            scores[start : start + step] = (self._gather(some) * asked[owners]).sum(dim=1)
        return scores.view(rows.shape)

    def _gather(self, rows: Tensor) -> Tensor:
        """Return the vectors of some rows in float64."""
        held, _ = self._loaded
        if held is not None:
            return held[rows].double()
        distinct, places = np.unique(rows.cpu().numpy(), return_inverse=True)
        vectors = send(torch.from_numpy(self._source.read(distinct)), rows.device)
        return vectors[send(torch.from_numpy(places), rows.device)].double()

    def _sent(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the stored blocks on the device, with the first row of each."""
        assert self._source.halves is not None, "the vectors are not float16"
        first = 0
        for halves in self._source.halves():
            yield first, send(torch.from_numpy(halves), torch.device(self._device))
            first += len(halves)

    @cached_property
    def _loaded(self) -> tuple[Tensor | None, float]:
        """All vectors on the device, None where they do not fit, and the longest one's length."""
        source, longest = self._source, list[Tensor]()
        needed, free = 2 * source.num_rows * source.width, free_memory(self._device)
        held = None
        if needed <= _GPU_SHARE * free:
            shape = (source.num_rows, source.width)
            held = torch.empty(shape, dtype=torch.float16, device=self._device)
        else:
            logger.warning(
                "%.3g GB of vectors exceed half of the %.3g GB free on %s: they are copied there "
                "for each search",
                *(needed / _GB, free / _GB, self._device),
            )
        for first, vectors in self._sent():
            if held is not None:
                held[first : first + len(vectors)] = vectors
            longest.append(torch.linalg.vector_norm(vectors.double(), dim=1).amax())
        return held, float(torch.stack(longest).amax()) if longest else 0.0


def free_memory(device: str) -> float:
    """Return the bytes that are free on a GPU; on a CPU there is no limit of ours."""
    where = torch.device(device)
    return torch.cuda.mem_get_info(where)[0] if where.type == "cuda" else float("inf")


@contextlib.contextmanager
def _whole_sums() -> Iterator[None]:
    """Let a GPU add up float16 products in float32, whatever the process says otherwise."""
    settings = torch.backends.cuda.matmul
    reduces = (
        settings.allow_fp16_reduced_precision_reduction,
        settings.allow_fp16_reduced_precision_reduction_split_k,
    )
    accumulates = settings.allow_fp16_accumulation
    settings.allow_fp16_reduced_precision_reduction = settings.allow_fp16_accumulation = False
    try:
        yield
    finally:
        settings.allow_fp16_reduced_precision_reduction = reduces
        settings.allow_fp16_accumulation = accumulates
