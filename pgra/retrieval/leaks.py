"""The leak guard: a query, and what is nearly the same text, is never its own exemplar.

Public sets hold texts twice, in one split or in both: 731 of SST-2's 872 test sentences stand in
MR's training set. The nearest neighbor of such a query is itself, and brings its own label.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pgra.errors import ConfigError
from pgra.types import MISSING_ROW, Candidates, Rows

Counts = npt.NDArray[np.int64]
Search = Callable[[int], Candidates]
"""Gives each query its so many nearest, (B, depth): rows of the collection, each text once."""

DEFAULT_JACCARD = 0.9
_DEEPER = 4
_NOT_WORDS = re.compile(r"[\W_]+")


def text_key(text: str) -> str:
    """Give a text as it is compared for equality: case, spaces and punctuation do not count."""
    folded = text.casefold()
    # Of a text without words its marks must count, or "?!" would be the same as "...".
    return _NOT_WORDS.sub(" ", folded).strip() or " ".join(folded.split())


@dataclass(frozen=True)
class Allowed:
    """What the guard let pass.

    Attributes:
        candidates: (B, m), best first; missing where a query has fewer.
        num_dropped: How many the guard left out of each query's, (B,): those that would have been
            among its m.
    """

    candidates: Candidates
    num_dropped: Counts


class LeakGuard:
    """Tells which texts of a collection must not be shown with a query.

    Attributes:
        jaccard: From which share of common words on two texts are nearly the same.
        keys: The collection's texts as they are compared.
    """

    def __init__(self, texts: Sequence[str], *, jaccard: float = DEFAULT_JACCARD) -> None:
        """Remember a collection of n texts.

        Args:
            texts: The collection, in the order of its rows.
            jaccard: Words that two texts have in common, over all words of either (their sets).
                From this share on they are nearly the same; 1: they have the same words.

        Raises:
            ConfigError: If the share is not above 0 and at most 1.
        """
        if not 0 < jaccard <= 1:
            raise ConfigError(
                f"leak_jaccard is {jaccard}: it must be above 0 and at most 1 (1 leaves out texts "
                "of the same words only)"
            )
        self.jaccard = jaccard
        self.keys = [text_key(text) for text in texts]
        self._words: dict[int, frozenset[str]] = {}

    @cached_property
    def distinct(self) -> Rows:
        """Give the first row of each text, in order: copies would stand in a prompt twice."""
        firsts: dict[str, int] = {}
        for row, key in enumerate(self.keys):
            firsts.setdefault(key, row)
        return np.fromiter(firsts.values(), dtype=np.int64)

    def leaks(self, query: str) -> Callable[[int], bool]:
        """Give what says of a row whether it is the query's text, or nearly.

        Args:
            query: The query's text.
        """
        key = text_key(query)
        words = frozenset(key.split())

        def is_leak(row: int) -> bool:
            if self.keys[row] == key:
                return True
            other = self._words_of(row)
            common = len(words & other)
            return common >= self.jaccard * (len(words) + len(other) - common)

        return is_leak

    def _words_of(self, row: int) -> frozenset[str]:
        if row not in self._words:
            self._words[row] = frozenset(self.keys[row].split())
        return self._words[row]

    def sift(self, queries: Sequence[str], found: Candidates, count: int) -> Allowed:
        """Keep each query's best that may be shown with it.

        Args:
            queries: B texts.
            found: (B, K), best first.
            count: How many to keep, m.
        """
        rows: Rows = np.full((len(queries), count), MISSING_ROW, dtype=np.int64)
        scores = np.full((len(queries), count), -np.inf, dtype=np.float32)
        dropped = np.zeros(len(queries), dtype=np.int64)
        for line, query in enumerate(queries):
            is_leak, kept = self.leaks(query), 0
            for row, score in zip(found.rows[line].tolist(), found.scores[line], strict=True):
                if row == MISSING_ROW or kept == count:
                    break
                if is_leak(row):
                    dropped[line] += 1
                    continue
                rows[line, kept], scores[line, kept] = row, score
                kept += 1
        return Allowed(Candidates(rows, scores), dropped)

    def nearest(
        self, search: Search, queries: Sequence[str], count: int, *, depth: int | None = None
    ) -> Allowed:
        """Give each query its nearest that may be shown with it, looking deeper where some fall.

        Args:
            search: Finds among the `distinct` rows.
            queries: B texts.
            count: How many, m.
            depth: How many to look at first; None: one more than m.
        """
        most = len(self.distinct)
        depth = min(most, count + 1 if depth is None else depth)
        while True:
            found = search(depth)
            allowed = self.sift(queries, found, count)
            is_short = (allowed.candidates.rows == MISSING_ROW).any(axis=1)
            has_more = (found.rows != MISSING_ROW).all(axis=1)  # BM25 finds no row without a word
            if depth == most or not (is_short & has_more).any():
                return allowed
            depth = min(most, _DEEPER * depth)
