"""Which labelled examples come before a query, and in what order (KATE, Liu et al. 2022).

KATE (section 2.3): the k nearest training examples of each query. Its baseline draws them by chance
for each query; drawn once for all, the prompts share one prefix. In all selectors the leak guard
(`pgra.retrieval.neighbors`) keeps a query's own text, and near duplicates of it, out of its prompt,
and of examples equal in text and label only the first is shown.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import ClassVar

import numpy as np

from pgra.artifacts import digest
from pgra.core import ALONE, MISSING_ROW, Candidates, Context, Example, Json, Rows, Scores
from pgra.data.text import text_key
from pgra.errors import ConfigError
from pgra.exemplars import SelectionArguments
from pgra.exemplars.similarity import PoolSimilarity
from pgra.retrieval.base import examples_digest, store_candidates
from pgra.retrieval.neighbors import Counts, LeakGuard

_STORED = 128  # fewest neighbors stored, so that other numbers of exemplars need no new search
_ORDER_SEED = 0x0DE5
Groups = Mapping[str | None, list[int]]  # rows of a pool by label


@dataclass(frozen=True)
class Chosen:
    """Exemplars of B queries, in the order of choice: the last is left out first.

    Attributes:
        rows: Of the pool, (B, m) int64, `MISSING_ROW` where there are fewer.
        similarity: To the query, (B, m) float32; NaN where nothing was compared.
        num_dropped: How many the leak guard left out for each query, (B,).
    """

    rows: Rows
    similarity: Scores
    num_dropped: Counts

    def of(self, query: int) -> list[int]:
        """Return one query's rows."""
        return [row for row in self.rows[query].tolist() if row != MISSING_ROW]


@dataclass
class ExemplarPool:
    """Labelled examples, from which each query's exemplars are chosen.

    Attributes:
        examples: The pool, in the order of its rows.
        jaccard: Share of common words from which on the guard drops an example; None drops none.
        root: Folder where neighbors are stored; None: they are not.
        context: The processes that wait while the main one searches.
        keeps: Whether the neighbors of some queries are stored; None: those of all.
    """

    examples: Sequence[Example]
    jaccard: float | None
    root: Path | None = None
    context: Context = ALONE
    keeps: Callable[[Sequence[Example]], bool] | None = None

    @cached_property
    def guard(self) -> LeakGuard:
        """Keeps a query's own text out of its prompt; its `distinct` rows are chosen from."""
        labels = [example.label for example in self.examples]
        return LeakGuard([example.text for example in self.examples], labels, jaccard=self.jaccard)


class Selector:
    """Chooses exemplars. A class from outside writes `rank` alone.

    Attributes:
        uses: Arguments that decide its choice, besides `exemplars` and `num_exemplars`.
        compares: Whether it needs a similarity.
        count: Exemplars a query, m.
    """

    uses: ClassVar[tuple[str, ...]] = ()
    compares: ClassVar[bool] = False

    def __init__(
        self, args: SelectionArguments, pool: ExemplarPool, similarity: PoolSimilarity | None = None
    ) -> None:
        """Check that the pool has what is asked for.

        Raises:
            ConfigError: If it has fewer examples, copies aside.
            ValueError: If the selector compares, and there is no similarity.
        """
        self.args, self.pool, self.count = args, pool, args.count
        if similarity is not None:
            self.similarity = similarity
        elif self.compares and self.count:
            raise ValueError(f"exemplars '{args.exemplars}' need a similarity")
        size, copies = len(pool.guard.distinct), pool.guard.num_copies
        if size < self.count:
            more = f" and {copies} copies of them" if copies else ""
            raise ConfigError(
                f"num_exemplars is {self.count}, but the pool holds only {size} examples{more}: "
                "ask for fewer, or give more training examples"
            )
        self.check()

    def check(self) -> None:
        """Refuse arguments that do not fit the pool; for subclasses."""

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Everything that decides the choice, besides pool, queries and similarity."""
        names = ("exemplars", *self.uses)
        return {"num_exemplars": self.count, **{n: getattr(self.args, n) for n in names}}

    def rank(self, queries: Sequence[Example], depth: int) -> Candidates:
        """Order the pool's `guard.distinct` rows for each query, (B, depth), best first.

        Scores are similarities to the query, or any falling numbers. Here: the pool's order.
        """
        rows = np.tile(self.pool.guard.distinct, (len(queries), 1))
        return Candidates.best(rows, -rows.astype(np.float32), depth)

    def choose(self, queries: Sequence[Example]) -> Chosen:
        """Choose each query's exemplars; a query's do not depend on those beside it.

        Raises:
            ArtifactError: If stored neighbors are damaged.
            ConfigError: If a class from outside ranks copies, or rows that are not there.
        """
        if self.count == 0:
            none = np.zeros((len(queries), 0))
            dropped = np.zeros(len(queries), np.int64)
            return Chosen(none.astype(np.int64), none.astype(np.float32), dropped)
        return self._choose(queries, self.count)

    def _choose(self, queries: Sequence[Example], count: int) -> Chosen:
        """Return the first `count` of each query's ranking that may be shown with it."""
        guard, first = self.pool.guard, _STORED
        while first < count + 8:  # some to spare for the leak guard
            first *= 2

        def search(depth: int) -> Candidates:
            found = self.rank(queries, depth)
            if not np.isin(found.rows, [MISSING_ROW, *guard.distinct]).all():
                raise ConfigError(
                    f"exemplars '{self.args.exemplars}' ranks rows that are not among the pool's "
                    "distinct ones (pool.guard.distinct): no example is shown twice"
                )
            return found

        texts = [query.text for query in queries]
        found, num_dropped = guard.nearest(search, texts, count, depth=first)
        return Chosen(found.rows, found.scores, num_dropped)


class Nearest(Selector):
    """KATE: the nearest examples of each query, or the farthest."""

    uses: ClassVar[tuple[str, ...]] = ("farthest",)
    compares: ClassVar[bool] = True

    def rank(self, queries: Sequence[Example], depth: int) -> Candidates:
        rows, farthest = self.pool.guard.distinct, self.args.farthest
        sign = -1 if farthest else 1
        find = partial(self.similarity.nearest, queries, rows, depth, sign=sign)
        root, keeps = self.pool.root, self.pool.keeps
        if root is None or not (keeps is None or keeps(queries)):
            return find()
        fields = {
            **self.similarity.fingerprint,
            "pool": examples_digest(self.pool.examples),
            "queries": examples_digest(queries),
            "farthest": farthest,
            "depth": depth,
            "rows": digest(rows.tolist()),
        }
        context = self.pool.context
        stored = store_candidates(
            root, "exemplars", fields, find, stage="neighbors", context=context
        )
        return stored.candidates

    def _choose(self, queries: Sequence[Example], count: int) -> Chosen:
        chosen = super()._choose(queries, count)
        # The farthest are ranked by negative similarities.
        return replace(chosen, similarity=-chosen.similarity) if self.args.farthest else chosen


class Random(Selector):
    """By chance: one draw for all queries, or a draw for each (KATE's baseline).

    `refills`: whether one that the leak guard drops is replaced, by one of its label if possible.
    """

    uses: ClassVar[tuple[str, ...]] = ("redraw", "exemplar_seed")
    refills: ClassVar[bool] = True

    @staticmethod
    def draw(rows: Sequence[int], groups: Groups, count: int, rng: random.Random) -> list[int]:  # noqa: ARG004
        """Draw `count` of the rows, which are in the pool's order; `groups` has them by label."""
        return rng.sample(rows, count)

    def draw_for(self, queries: Sequence[Example], count: int) -> list[list[int]]:
        """Draw each query's exemplars, before the leak guard."""
        rows, seed = self.pool.guard.distinct.tolist(), self.args.exemplar_seed or 0
        labels = [self.pool.examples[row].label for row in rows]
        groups = group_rows(rows, labels, sorted({label for label in labels if label is not None}))
        if not self.args.redraw:
            return [self.draw(rows, groups, count, random.Random(seed))] * len(queries)
        rngs = (random.Random(f"{seed} {_text_number(query.text)}") for query in queries)
        return [self.draw(rows, groups, count, rng) for rng in rngs]

    def _choose(self, queries: Sequence[Example], count: int) -> Chosen:
        drawn, labels = self.draw_for(queries, count), [e.label for e in self.pool.examples]
        width = max(map(len, drawn), default=count)
        rows: Rows = np.full((len(queries), width), MISSING_ROW, dtype=np.int64)
        dropped = np.zeros(len(queries), dtype=np.int64)
        for line, (query, first) in enumerate(zip(queries, drawn, strict=True)):
            is_leak = self.pool.guard.leaks(query.text)
            kept = [row for row in first if not is_leak(row)]
            dropped[line] = len(first) - len(kept)
            if self.refills and dropped[line]:
                taken = set(first)
                others = [row for row in self._others(query) if row not in taken]
                for gone in filter(is_leak, first):
                    label = labels[gone]
                    same = (row for row in others if labels[row] == label)
                    row = next((row for row in chain(same, others) if not is_leak(row)), None)
                    if row is not None:
                        kept.append(row)
                        others.remove(row)
            rows[line, : len(kept)] = kept
        return Chosen(rows, np.full(rows.shape, np.nan, np.float32), dropped)

    @cached_property
    def _shuffled(self) -> list[int]:
        rows: list[int] = self.pool.guard.distinct.tolist()
        random.Random(f"{self.args.exemplar_seed or 0} others").shuffle(rows)
        return rows

    def _others(self, query: Example) -> list[int]:
        """Return all rows as they replace others: with `redraw` from a row of the query's own."""
        rows = self._shuffled
        start = _text_number(query.text) % len(rows) if self.args.redraw else 0
        return [*rows[start:], *rows[:start]]


class Balanced(Random):
    """By chance, the labels in turn: their numbers differ by at most one while they last."""

    def check(self) -> None:
        if any(example.label is None for example in self.pool.examples):
            raise ConfigError(
                f"exemplars '{self.args.exemplars}' counts labels, and this task has none: use "
                "--exemplars random"
            )

    @staticmethod
    def draw(rows: Sequence[int], groups: Groups, count: int, rng: random.Random) -> list[int]:  # noqa: ARG004
        left = {label: list(group) for label, group in groups.items()}
        for group in left.values():
            rng.shuffle(group)
        # Which label is one ahead must not depend on the order of labels.
        order = rng.sample(list(left), len(left))
        chosen: list[int] = []
        while len(chosen) < count:
            for label in order:
                if left[label] and len(chosen) < count:
                    chosen.append(left[label].pop())
        rng.shuffle(chosen)
        return chosen


class Official(Balanced):
    """As PGRA's released code: in file order under a cap a label, until all labels are there.

    It takes its own number, 8 to 11 of 8. The released code shuffles unseeded, differently for each
    split; here one seeded order serves all.
    """

    @staticmethod
    def draw(rows: Sequence[int], groups: Groups, count: int, rng: random.Random) -> list[int]:
        cap = count // len(groups) + 1
        label_of = {row: label for label, group in groups.items() for row in group}
        taken: dict[str | None, list[int]] = {label: [] for label in groups}
        for row in rows:
            if len(taken[label_of[row]]) < cap:
                taken[label_of[row]].append(row)
            if sum(map(len, taken.values())) >= count and all(taken.values()):
                break
        chosen = [row for group in taken.values() for row in group]
        rng.shuffle(chosen)
        return chosen


class Fixed(Random):
    """The same for all queries, the pool's first; none is replaced."""

    uses: ClassVar[tuple[str, ...]] = ()
    refills: ClassVar[bool] = False

    @staticmethod
    def draw(rows: Sequence[int], groups: Groups, count: int, rng: random.Random) -> list[int]:  # noqa: ARG004
        return list(rows[:count])

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        return {**super().fingerprint, "fixed": self.pool.guard.distinct.tolist()[: self.count]}


def group_rows(rows: Sequence[int], labels: Sequence[str | None], names: Sequence[str]) -> Groups:
    """Group rows by label, the labels in the order of `names`."""
    groups: dict[str | None, list[int]] = {name: [] for name in names}
    for row, label in zip(rows, labels, strict=True):
        groups.setdefault(label, []).append(row)
    return groups


def _text_number(text: str) -> int:
    """Return a number of a query's text, so that its draw does not depend on others beside it."""
    return int(digest(text_key(text))[:12], 16)


def arrange(rows: Sequence[int], order: str, *, query: str, seed: int = 0) -> list[int]:
    """Put a query's exemplars, in the order of choice, into the order of its prompt.

    `order` is one of `ORDERS`; KATE's is "nearest-first" (section 5.3), so that the least similar
    comes next to the query. The seed is of "random", which differs by query.
    """
    if order == "nearest-first":
        return list(rows)
    if order == "nearest-last":
        return list(rows)[::-1]
    generator = np.random.default_rng([_ORDER_SEED, seed, _text_number(query)])
    return [rows[index] for index in generator.permutation(len(rows))]


def vote(targets: Sequence[str]) -> dict[str, float]:
    """Return each target's share of the votes, the winner first; targets come nearest first.

    KATE's kNN baseline (Liu et al. 2022, section 3.2): "majority voting among the k examples'
    targets"; of a tie "the target of the example most similar to the test sentence".
    """
    return {target: n / len(targets) for target, n in Counter(targets).most_common()}
