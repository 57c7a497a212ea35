"""Exact indexes of a corpus: FAISS' file written a block at a time, and search without that file.

In memory an exact index is float32, twice the shards' size. A file of it is written where it fits
in memory, and then mapped; beyond, queries are compared with the float16 shards one after another.
"""

import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from pgra.io import write_aside
from pgra.retrieval.choice import import_faiss
from pgra.retrieval.exact import Hits, Vectors, nearest, numbered

_ROWS_AT = 8  # of the number of rows: behind the kind and the width, 4 bytes each
_NUMBER = struct.Struct("<q")


class BlockSearch:
    """Exact search of vectors that are read anew each time, a block in memory at once.

    Attributes:
        ntotal: Rows.
    """

    def __init__(
        self, blocks: Callable[[], Iterable[Vectors]], num_rows: int, *, device: str = "cpu"
    ) -> None:
        """Open an index.

        Args:
            blocks: Gives all vectors in the order of rows.
            num_rows: How many there are.
            device: What multiplies.
        """
        self.ntotal = num_rows
        self._blocks, self._device = blocks, device

    def search(self, queries: Vectors, k: int) -> Hits:
        """Find each query's best k, as FAISS does in memory but for float32's rounding.

        Every call reads all vectors: ask for many queries at once.

        Args:
            queries: (B, D).
            k: Hits a query.
        """
        best = nearest(queries, numbered(self._blocks()), k, device=self._device)
        return Hits(best.scores, best.rows)


def write_flat(blocks: Iterable[Vectors], path: Path, *, header: bytes) -> None:
    """Write FAISS' file of an exact index, holding one block at a time.

    Args:
        blocks: All vectors, (n, D) each, in the order of rows.
        path: The file.
        header: What `flat_header` gives for them.

    Raises:
        OSError: If the disk is full.
    """
    with write_aside(path) as aside, aside.open("wb") as file:
        file.write(header)
        for vectors in blocks:
            file.write(np.ascontiguousarray(vectors, np.float32).data)


def flat_header(num_rows: int, width: int) -> bytes | None:
    """Give what stands in FAISS' file of an exact index before the vectors.

    FAISS' own words for an empty index with both its counts set: of rows, and of numbers. Whether
    that still is the form of the file is tried on one row.

    Args:
        num_rows: P.
        width: D.

    Returns:
        The bytes, or None where this FAISS writes another form.
    """
    faiss = import_faiss()
    index = faiss.IndexFlatIP(width)
    empty = faiss.serialize_index(index).tobytes()
    index.add(np.zeros((1, width), np.float32))
    one = faiss.serialize_index(index).tobytes()
    if _count(empty, 1, width) + bytes(4 * width) != one:
        return None
    return _count(empty, num_rows, width)


def _count(empty: bytes, num_rows: int, width: int) -> bytes:
    words = bytearray(empty)
    _NUMBER.pack_into(words, _ROWS_AT, num_rows)
    _NUMBER.pack_into(words, len(words) - _NUMBER.size, num_rows * width)
    return bytes(words)
