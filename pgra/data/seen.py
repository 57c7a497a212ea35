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
"""Hashes in a full run, 128 MB. A billion texts make 120 runs; a look into one takes about a
millisecond for 16,384 texts."""

_Keys = npt.NDArray[np.uint64]  # (n, 2), sorted by the first column


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
        keys = np.frombuffer(joined, dtype=np.uint64).reshape(-1, 2)
        order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: of equal ones the first stays first
        ranked = keys[order]
        is_new = np.ones(len(texts), dtype=np.bool_)
        is_new[1:] = (ranked[1:] != ranked[:-1]).any(axis=1)
        for run in self._runs:
            is_new &= ~_is_in(run, ranked)
        self._keep(ranked[is_new])
        answer = np.empty_like(is_new)
        answer[order] = is_new
        return answer

    def _keep(self, keys: _Keys) -> None:
        """Take a sorted run in; runs of like length become one, so that there are few."""
        while self._runs and len(self._runs[-1]) <= 2 * len(keys) < _RUN_ROWS:
            both = np.concatenate([self._runs.pop(), keys])
            keys = both[np.argsort(both[:, 0], kind="stable")]
        if len(keys) >= _RUN_ROWS // 2:
            self._runs.insert(0, self._write(keys))
        elif len(keys):
            self._runs.append(keys)

    def _write(self, keys: _Keys) -> _Keys:
        with tempfile.TemporaryFile(dir=self._folder) as file:
            file.write(keys.tobytes())
            file.flush()
            return np.memmap(file, dtype=np.uint64, mode="r", shape=keys.shape)


def _is_in(run: _Keys, keys: _Keys) -> npt.NDArray[np.bool_]:
    # Two hashes that share their first 64 bits but not the rest would hide the second one; among
    # a billion texts that is one chance in forty, and then costs a duplicate that is kept.
    places = np.minimum(np.searchsorted(run[:, 0], keys[:, 0]), len(run) - 1)
    found: npt.NDArray[np.bool_] = (run[places] == keys).all(axis=1)
    return found
