"""Which texts came before, in memory that does not grow with their number.

Hashes of 128 bits lie in sorted runs; a run that is full goes to a file without a name, which the
system removes with the process, and is memory-mapped.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

_RUN_ROWS = 1 << 23
"""Hashes in a full run, 128 MB. A look into one takes 8 ms for 16,384 texts (one core of a shared
machine), so that a billion texts, 120 runs in the end, take 8 hours in all."""

_Keys = npt.NDArray[np.uint64]  # (2, n): the halves of n hashes, sorted by the first


class SeenTexts:
    """Tells new texts from those that came before; equal means an equal xxh3-128."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: list[_Keys] = []  # the full ones first, then ever shorter ones

    def add(self, texts: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Take texts in, and say which are new.

        Args:
            texts: In their order: of equal ones the first is new.

        Returns:
            (n,) bool.

        Raises:
            OSError: If a full run cannot be written.
        """
        joined = b"".join(xxhash.xxh3_128_digest(text.encode()) for text in texts)
        halves = np.frombuffer(joined, dtype=np.uint64).reshape(-1, 2)
        order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: the first of equals stays first
        keys = np.ascontiguousarray(halves[order].T)
        is_new = np.ones(len(texts), dtype=np.bool_)
        is_new[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
        for run in self._runs:
            is_new &= ~_is_in(run, keys)
        self._keep(keys[:, is_new])
        answer = np.empty_like(is_new)
        answer[order] = is_new
        return answer

    def _keep(self, keys: _Keys) -> None:
        """Take a sorted run in; runs of like length become one, so that there are few."""
        while self._runs and self._runs[-1].shape[1] <= 2 * keys.shape[1] < _RUN_ROWS:
            both = np.concatenate([self._runs.pop(), keys], axis=1)
            keys = both[:, np.argsort(both[0], kind="stable")]
        if keys.shape[1] >= _RUN_ROWS // 2:
            self._runs.insert(0, self._write(keys))
        elif keys.shape[1]:
            self._runs.append(keys)

    def _write(self, keys: _Keys) -> _Keys:
        with tempfile.TemporaryFile(dir=self._folder) as file:
            file.write(keys.tobytes())
            file.flush()
            return np.memmap(file, dtype=np.uint64, mode="r", shape=keys.shape)


def _is_in(run: _Keys, keys: _Keys) -> npt.NDArray[np.bool_]:
    # Two hashes that share their first 64 bits but not the rest would hide the second one; among
    # a billion texts that is one chance in forty, and then costs a duplicate that is kept.
    places = np.minimum(np.searchsorted(run[0], keys[0]), run.shape[1] - 1)
    found: npt.NDArray[np.bool_] = (run[:, places] == keys).all(axis=0)
    return found
