"""Keys of queries' states."""

from collections.abc import Sequence

import numpy as np
import xxhash

from pgra.io import canonical_json
from pgra.types import Example


def query_key(example: Example, written: Sequence[int] = ()) -> int:
    """Give the key of a query's state: a 64-bit hash of its fields, and of what follows its prompt.

    Args:
        example: The query.
        written: Token ids behind its prompt: the beginning of an answer.
    """
    fields = dict(example.fields)
    text = canonical_json({"fields": fields, "written": list(written)} if written else fields)
    unsigned = np.uint64(xxhash.xxh3_64_intdigest(text.encode()))
    return int(unsigned.astype(np.int64))
