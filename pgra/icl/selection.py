"""Which labelled examples stand before a query, and in what order.

KATE (Liu et al. 2022, section 2.3): the k nearest training examples of each query. Its baseline
draws them by chance for each query; drawn once for all, the prompts share one prefix. Whatever the
way, the leak guard (`pgra.retrieval.leaks`) keeps a query's own text out of its prompt.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from pgra.errors import ConfigError
from pgra.icl.choice import NEIGHBOR_SELECTORS, Choice
from pgra.icl.diversity import marginal_relevance
from pgra.icl.drawing import Drawing, draw, take
from pgra.icl.likeness import Likeness
from pgra.io import digest
from pgra.processes import Processes
from pgra.retrieval.leaks import Allowed, Counts, LeakGuard, text_key
from pgra.retrieval.store import examples_digest, store_candidates
from pgra.types import MISSING_ROW, Candidates, Example, Rows, Scores

logger = logging.getLogger(__name__)

_STORED = 128
"""Neighbors that are looked up and stored at the least: what is asked for with other numbers of
exemplars is then there already."""
_ORDER_SEED = 0x0DE5


@dataclass(frozen=True)
class Chosen:
    """Exemplars of B queries, in the order of choice: the first to go is the last.

    Attributes:
        rows: Of the pool, (B, m) int64, `MISSING_ROW` where there are fewer.
        similarity: Likeness to the query, (B, m) float32; NaN where nothing was compared.
        num_dropped: What the leak guard left out of each query's, (B,).
        num_copies: Examples of the pool that nobody is shown, being copies of an earlier one.
    """

    rows: Rows
    similarity: Scores
    num_dropped: Counts
    num_copies: int = 0

    def of(self, query: int) -> list[int]:
        """Give one query's rows."""
        return [row for row in self.rows[query].tolist() if row != MISSING_ROW]

    @property
    def counts(self) -> Counts:
        """Give how many each query has, (B,)."""
        return np.asarray((self.rows != MISSING_ROW).sum(axis=1), np.int64)


class ExemplarPool:
    """Labelled examples, from which each query's exemplars are chosen.

    Attributes:
        examples: The pool, n examples.
        guard: Keeps a query's own text out of its prompt.
    """

    def __init__(self, examples: Sequence[Example], *, jaccard: float, root: Path) -> None:
        """Remember the pool.

        Args:
            examples: Labelled, in the order of their rows.
            jaccard: Of the leak guard.
            root: Folder of the task's neighbors, which are stored there.

        Raises:
            ConfigError: If the threshold is none.
        """
        self.examples, self._root = examples, root
        labels = [example.label for example in examples]
        texts = [example.text for example in examples]
        self.guard = LeakGuard(texts, labels, jaccard=jaccard)

    def check(self, count: int) -> None:
        """Refuse to look for more exemplars than there are.

        Raises:
            ConfigError: If the pool has fewer, copies aside.
        """
        size = len(self.guard.distinct)
        if size < count:
            copies = self.guard.num_copies
            told = f" and {copies} copies of them" if copies else ""
            raise ConfigError(
                f"num_exemplars is {count}, but the pool holds only {size} examples{told}: ask "
                "for fewer, or give more training examples"
            )

    def choose(
        self,
        queries: Sequence[Example],
        choice: Choice,
        likeness: Likeness | None = None,
        processes: Processes = Processes(),  # noqa: B008 (frozen)
    ) -> Chosen:
        """Choose each query's exemplars.

        Args:
            queries: B queries.
            choice: How.
            likeness: What compares; only neighbors need one.
            processes: Who waits while the main one searches.

        Raises:
            ConfigError: If the pool is too small, or has no labels to balance.
            ArtifactError: If stored neighbors are damaged.
            ValueError: If neighbors are asked for without a likeness.
        """
        if choice.count == 0:
            none = np.zeros((len(queries), 0))
            dropped = np.zeros(len(queries), np.int64)
            return Chosen(none.astype(np.int64), none.astype(np.float32), dropped)
        self.check(choice.count)
        chosen = self._choose(queries, choice, likeness, processes)
        return replace(chosen, num_copies=self.guard.num_copies)

    def _choose(
        self,
        queries: Sequence[Example],
        choice: Choice,
        likeness: Likeness | None,
        processes: Processes,
    ) -> Chosen:
        if choice.method in NEIGHBOR_SELECTORS:
            if likeness is None:
                raise ValueError(f"exemplars '{choice.method}' need a likeness")
            return self._nearest(queries, choice, likeness, processes)
        drawing = Drawing(self.guard, [example.label for example in self.examples])
        texts = [query.text for query in queries]
        if choice.method == "fixed":
            rows = choice.fixed or tuple(self.guard.distinct[: choice.count].tolist())
            taken = take(drawing, texts, lambda _: np.array(rows), choice.count, refill=False)
        else:
            order = partial(draw, drawing, method=choice.method, count=choice.count)
            if choice.redraw:
                lines = [order(seed=[choice.seed, text_number(text)]) for text in texts]
            else:
                lines = [order(seed=[choice.seed])] * len(texts)
            taken = take(drawing, texts, lines.__getitem__, choice.count, refill=True)
        return Chosen(taken.rows, np.full(taken.rows.shape, np.nan, np.float32), taken.num_dropped)

    def _nearest(
        self, queries: Sequence[Example], choice: Choice, likeness: Likeness, processes: Processes
    ) -> Chosen:
        rows, texts = self.guard.distinct, [query.text for query in queries]
        is_diverse = choice.method == "knn-mmr"
        count = min(len(rows), choice.num_near) if is_diverse else choice.count
        find = likeness.farthest if choice.farthest else likeness.nearest

        def search(depth: int) -> Candidates:
            fields = {
                **likeness.fingerprint,
                "pool": examples_digest(self.examples),
                "queries": examples_digest(queries),
                "farthest": choice.farthest,
                "depth": depth,
                "rows": digest(rows.tolist()),
            }
            stored = store_candidates(
                self._root,
                "exemplars",
                fields,
                lambda: find(queries, rows, depth),
                stage="neighbors",
                processes=processes,
            )
            logger.info(
                "neighbors: the %s %d of %d examples for each of %d queries%s",
                "farthest" if choice.farthest else "nearest",
                depth,
                len(rows),
                len(queries),
                " (reused)" if stored.reused else "",
            )
            return stored.candidates

        allowed = self.guard.nearest(search, texts, count, depth=_stored_depth(count))
        if is_diverse:
            return _diversify(allowed, choice, likeness)
        found = allowed.candidates
        sign = -1 if choice.farthest else 1
        return Chosen(found.rows, sign * found.scores, allowed.num_dropped)


def _stored_depth(count: int) -> int:
    """Give a number of neighbors to store, with some to spare for the leak guard."""
    depth = _STORED
    while depth < count + 8:
        depth *= 2
    return depth


def text_number(text: str) -> int:
    """Give a number of a query's text, so that its draw does not depend on who is asked beside."""
    return int(digest(text_key(text))[:12], 16)


def _diversify(allowed: Allowed, choice: Choice, likeness: Likeness) -> Chosen:
    near = allowed.candidates
    rows: Rows = np.full((len(near), choice.count), MISSING_ROW, dtype=np.int64)
    similarity = np.full(rows.shape, -np.inf, dtype=np.float32)
    for line in range(len(near)):
        own = near.rows[line][near.rows[line] != MISSING_ROW]
        scores = near.scores[line][: len(own)]
        places = marginal_relevance(
            scores, likeness.among(own), choice.count, diversity=choice.diversity
        )
        rows[line, : len(places)], similarity[line, : len(places)] = own[places], scores[places]
    return Chosen(rows, similarity, allowed.num_dropped)


def arrange(rows: Sequence[int], order: str, *, query: str, seed: int = 0) -> list[int]:
    """Put a query's exemplars into the order in which its prompt shows them.

    Args:
        rows: In the order of choice: the nearest first; the farthest, where these were asked for.
        order: One of `pgra.icl.choice.ORDERS`. KATE's default is "nearest-first" (section 5.3), so
            that the least similar stands next to the query.
        query: Its text.
        seed: Of "random", which is another order for each query.
    """
    if order == "nearest-first":
        return list(rows)
    if order == "nearest-last":
        return list(rows)[::-1]
    generator = np.random.default_rng([_ORDER_SEED, seed, text_number(query)])
    return [rows[place] for place in generator.permutation(len(rows))]
