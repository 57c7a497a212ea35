"""Fit prompts into an LM's window: the last exemplar is dropped first, the query is never cut.

Liu et al. 2022, section 3.2, use fewer exemplars for a whole task where 64 "exceed the token limit"
of some query; here the other queries keep theirs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pgra.errors import ConfigError, DataError

Counts = npt.NDArray[np.int64]
CountTokens = Callable[[Sequence[str]], list[int]]
# returns all prompts of a query (by its index) with so many of its exemplars
Write = Callable[[int, int], Sequence[str]]


@dataclass(frozen=True)
class Fit:
    """Each query's exemplars that fit, those that do not, and longest prompt's tokens, (B,)."""

    counts: Counts
    num_dropped: Counts
    num_tokens: Counts


def fit_prompts(
    count_tokens: CountTokens,
    write: Write,
    wanted: Sequence[int],
    *,
    names: Sequence[str],
    window: int,
    num_new_tokens: int,
    unit: str = "exemplar",
) -> Fit:
    """Find how many exemplars, or words of evidence, each query's prompt has room for.

    Args:
        count_tokens: Counts the LM's tokens of texts.
        write: Writes a query's prompts.
        wanted: Exemplars of each query, (B,).
        names: The queries' ids, for messages.
        window: Most tokens of prompt and answer together.
        num_new_tokens: Room for the answer.
        unit: What is fitted, for messages.

    Raises:
        DataError: If a query does not fit even without exemplars; it is named.
        ConfigError: If no query has room for a single exemplar, and all want one.
    """

    def count(queries: Counts, counts: Counts) -> Counts:
        """Count the tokens of each query's longest prompt; equal texts are counted once."""
        pairs = zip(queries.tolist(), counts.tolist(), strict=True)
        prompts = [write(query, number) for query, number in pairs]
        distinct = list(dict.fromkeys(text for texts in prompts for text in texts))
        tokens = dict(zip(distinct, count_tokens(distinct), strict=True))
        return np.array([max(tokens[text] for text in texts) for texts in prompts], dtype=np.int64)

    room = window - num_new_tokens
    most = np.array(wanted, dtype=np.int64)
    lengths = count(np.arange(len(most)), most)
    over = lengths > room
    low, high = np.where(over, 0, most), np.where(over, most - 1, most)
    if over.any():
        (bare,) = np.nonzero(over)
        lengths[bare] = count(bare, np.zeros_like(bare))
        (long,) = np.nonzero(lengths > room)
        if len(long):
            more = f" ({len(long) - 1} more are too long)" if len(long) > 1 else ""
            raise DataError(
                f"query {names[long[0]]} has {lengths[long[0]]} tokens without any {unit}, and "
                f"the LM reads {window}, {num_new_tokens} of them its answer{more}: leave it out, "
                "or use an LM with a longer window"
            )
    while (low < high).any():
        (open_,) = np.nonzero(low < high)
        middle = (low[open_] + high[open_] + 1) // 2
        tokens = count(open_, middle)
        fits = tokens <= room
        low[open_[fits]], lengths[open_[fits]] = middle[fits], tokens[fits]
        high[open_[~fits]] = middle[~fits] - 1
    if len(most) and most.min() > 0 and low.max() == 0:
        raise ConfigError(
            f"the LM reads {window} tokens, {num_new_tokens} of them its answer, and no "
            f"query has room for one {unit}: use an LM with a longer window, or none of them"
        )
    return Fit(low, most - low, lengths)
