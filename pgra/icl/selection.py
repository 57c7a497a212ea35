"""Which labelled examples stand before a query, and in what order.

KATE (Liu et al. 2022, section 2.3): the k nearest training examples of each query. Its baseline
draws them by chance for each query; drawn once for all, the prompts share one prefix. Whatever the
way, the leak guard (`pgra.retrieval.leaks`) keeps a query's own text out of its prompt.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from pgra.config import choose
from pgra.errors import ConfigError
from pgra.icl.diversity import marginal_relevance
from pgra.icl.drawing import Drawing, draw, take
from pgra.icl.likeness import Likeness
from pgra.io import digest
from pgra.processes import Processes
from pgra.retrieval.leaks import Allowed, Counts, LeakGuard, text_key
from pgra.retrieval.store import examples_digest, store_candidates
from pgra.types import MISSING_ROW, Candidates, Example, Json, Rows, Scores

logger = logging.getLogger(__name__)

SELECTORS = ("balanced", "fixed", "knn", "knn-mmr", "random")
NEIGHBOR_SELECTORS = ("knn", "knn-mmr")
ORDERS = ("nearest-first", "nearest-last", "random")
_STORED = 128
"""Neighbors that are looked up and stored at the least: what is asked for with other numbers of
exemplars is then there already."""
_ORDER_SEED = 0x0DE5


@dataclass(frozen=True)
class Choice:
    """How exemplars are chosen.

    Attributes:
        method: One of `SELECTORS`.
        count: Exemplars a query, m.
        farthest: Whether `knn` takes the least alike: the control of KATE's Table 2.
        redraw: Whether `random` and `balanced` draw anew for each query.
        seed: Of what is drawn.
        fixed: Rows of the pool that all queries get, with "fixed".
        diversity: With "knn-mmr": lambda of maximal marginal relevance, 1 is `knn`.
        num_near: With "knn-mmr": among how many nearest it chooses.

    Raises:
        ConfigError: If they contradict each other.
    """

    method: str = "knn"
    count: int = 8
    farthest: bool = False
    redraw: bool = False
    seed: int = 0
    fixed: tuple[int, ...] = ()
    diversity: float = 0.5
    num_near: int = 100

    def __post_init__(self) -> None:
        choose("exemplars", self.method, SELECTORS)
        if self.farthest and self.method != "knn":
            raise ConfigError(
                f"farthest is for exemplars 'knn', and they are '{self.method}': leave it out"
            )
        if self.redraw and self.method not in ("balanced", "random"):
            raise ConfigError(
                f"redraw draws for each query, and exemplars '{self.method}' draws nothing: leave "
                "it out, or use --exemplars random"
            )
        if not 0 <= self.diversity <= 1:
            raise ConfigError(f"mmr_lambda is {self.diversity}: it must lie between 0 and 1")
        if self.method == "knn-mmr" and self.num_near < self.count:
            raise ConfigError(
                f"mmr_candidates is {self.num_near}, and {self.count} exemplars are chosen among "
                "them: raise it, or lower --num_exemplars"
            )

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give what decides the choice, besides pool, queries and likeness."""
        named: dict[str, Json] = {"exemplars": self.method, "num_exemplars": self.count}
        if self.method == "knn":
            named["farthest"] = self.farthest
        if self.method == "knn-mmr":
            named |= {"mmr_lambda": self.diversity, "mmr_candidates": self.num_near}
        if self.method in ("balanced", "random"):
            named |= {"redraw": self.redraw, "exemplar_seed": self.seed}
        if self.method == "fixed":
            named["fixed"] = list(self.fixed)
        return named


@dataclass(frozen=True)
class Chosen:
    """Exemplars of B queries, in the order of choice: the first to go is the last.

    Attributes:
        rows: Of the pool, (B, m) int64, `MISSING_ROW` where there are fewer.
        similarity: Likeness to the query, (B, m) float32; NaN where nothing was compared.
        num_dropped: What the leak guard left out of each query's, (B,).
    """

    rows: Rows
    similarity: Scores
    num_dropped: Counts

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
        self.guard = LeakGuard([example.text for example in examples], jaccard=jaccard)

    def check(self, count: int) -> None:
        """Refuse to look for more exemplars than there are.

        Raises:
            ConfigError: If the pool has fewer distinct texts.
        """
        size = len(self.guard.distinct)
        if size < count:
            copies = len(self.examples) - size
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
        order: One of `ORDERS`. KATE's default is "nearest-first" (section 5.3), so that the least
            similar stands next to the query.
        query: Its text.
        seed: Of "random", which is another order for each query.
    """
    if order == "nearest-first":
        return list(rows)
    if order == "nearest-last":
        return list(rows)[::-1]
    generator = np.random.default_rng([_ORDER_SEED, seed, text_number(query)])
    return [rows[place] for place in generator.permutation(len(rows))]
