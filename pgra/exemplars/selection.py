"""Which labelled examples come before a query, and in what order (KATE, Liu et al. 2022).

KATE (section 2.3): the k nearest training examples of each query. Its baseline draws them by chance
for each query; drawn once for all, the prompts share one prefix. In all selectors the leak guard
(`pgra.retrieval.neighbors`) keeps a query's own text, and near duplicates of it, out of its prompt,
and of examples equal in text and label only the first is shown.

Section 3.1 compares by negative Euclidean distance where the encoder is plain RoBERTa, and by
cosine where it is trained on sentence pairs.
"""

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from pgra.arrays import Counts, Rows, Scores, Vectors, unit
from pgra.artifacts import digest
from pgra.data.text import text_key
from pgra.encoders import as_encoder
from pgra.errors import ConfigError
from pgra.exemplars import BM25, SelectionArguments
from pgra.retrieval.bm25 import BM25Retriever
from pgra.retrieval.faiss import nearest
from pgra.retrieval.neighbors import LeakGuard, Neighbors
from pgra.types import MISSING_ROW, Candidates, Example, Fields

_ORDER_SEED = 0x0DE5
Labels = Mapping[int, str | None]  # by row of a pool, in the pool's order


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
    """

    examples: Sequence[Example]
    jaccard: float | None

    @cached_property
    def guard(self) -> LeakGuard:
        """Keeps a query's own text out of its prompt; its `distinct` rows are chosen from."""
        labels = [example.label for example in self.examples]
        return LeakGuard([example.text for example in self.examples], labels, jaccard=self.jaccard)


class PoolSimilarity(ABC):
    """Compares queries with a pool of labelled examples; higher is more similar.

    `neighbors` has the pool, and an encoder without unit length, or all metrics are one.
    """

    def __init__(self, neighbors: Neighbors, metric: str) -> None:
        self.neighbors = neighbors
        self.metric = metric

    def renewed(self) -> Self:
        """Return the same comparison with a pool that has grown; its vectors are reused."""
        return type(self)(self.neighbors, self.metric)

    @property
    def fingerprint(self) -> Fields:
        """Everything that decides how similar two examples are: encoder, pool and metric."""
        return {**self.neighbors.fingerprint, "metric": self.metric}

    @abstractmethod
    def nearest(
        self, queries: Sequence[Example], rows: Rows, depth: int, *, sign: int = 1
    ) -> Candidates:
        """Return each query's most similar of some rows of the pool, (B, depth), ties by row.

        With sign -1 the least similar, the least first; scores are negative similarities. BM25
        refuses that with a ConfigError.
        """


class VectorSimilarity(PoolSimilarity):
    """Compares vectors, made once and stored: by "dot", "cosine" or "euclidean" (its negative)."""

    @cached_property
    def _pool(self) -> Vectors:
        return self._shape(self.neighbors.vectors())

    def _shape(self, vectors: Vectors) -> Vectors:
        """Change vectors so that the metric is simple on them, (n, D)."""
        if self.metric == "cosine":
            return unit(vectors)
        if self.metric == "euclidean":
            # Distances do not change when all points move; float32 is finest near 0. The states of
            # a plain BERT share one huge component.
            mean = self.neighbors.vectors().mean(axis=0, dtype=np.float64)
            return vectors - np.asarray(mean, np.float32)
        return vectors

    def nearest(
        self, queries: Sequence[Example], rows: Rows, depth: int, *, sign: int = 1
    ) -> Candidates:
        vectors = self._shape(self.neighbors.encoder.encode_examples(queries))
        pool = self._pool[rows]
        if self.metric != "euclidean":
            return nearest(sign * vectors, [(rows, pool)], depth)
        # -|q - x|^2 / 2 = qx - |x|^2 / 2 - |q|^2 / 2, where the last part is the query's alone.
        halves = -0.5 * np.square(pool).sum(axis=1, keepdims=True)
        wide = np.hstack([vectors, np.ones((len(vectors), 1), np.float32)])
        hits = nearest(sign * wide, [(rows, np.hstack([pool, halves]))], depth).rows
        # The distances themselves: their squares lose digits in the product.
        distances = [
            np.linalg.norm(self._pool[line] - vector, axis=1)
            for line, vector in zip(hits, vectors, strict=True)
        ]
        return Candidates.best(hits, -sign * np.array(distances).reshape(hits.shape), depth)


class WordSimilarity(PoolSimilarity):
    """Compares by shared words, with Okapi BM25; a query misses examples without any."""

    @cached_property
    def _index(self) -> BM25Retriever:
        return BM25Retriever.of_texts([example.text for example in self.neighbors.examples])

    @property
    def fingerprint(self) -> Fields:
        return {**self._index.fingerprint, "metric": self.metric}

    def nearest(
        self, queries: Sequence[Example], rows: Rows, depth: int, *, sign: int = 1
    ) -> Candidates:
        if sign < 0:  # most of a pool shares no word with a query, so the least alike all tie
            raise ConfigError("encoder 'bm25' has no farthest examples: use another --encoder")
        self._index.removed = np.setdiff1d(np.arange(len(self.neighbors.examples)), rows)
        return self._index.retrieve([query.text for query in queries], depth)


def open_similarity(
    args: SelectionArguments,
    examples: Sequence[Example],
    root: Path | None = None,
    *,
    device: str,
    encoder: Any = None,
) -> PoolSimilarity | None:
    """Open what `--encoder` and `--vector_metric` name; None if nothing is compared.

    `root` is the folder of the pool's vectors; None: in memory alone. `encoder` replaces
    `--encoder`, which is loaded when it is first needed.
    """
    if not args.compares:
        return None
    # Lengths stay: the metric reads them.
    open_encoder = partial(as_encoder, encoder or args, device=device, normalize=False)
    neighbors = Neighbors(open_encoder, examples, root)
    if args.encoder == BM25:
        return WordSimilarity(neighbors, BM25)
    return VectorSimilarity(neighbors, args.vector_metric)


class Selector:
    """Chooses exemplars; by itself the pool's first. A class from outside writes `rank` alone.

    Attributes:
        uses: Arguments that decide its choice, besides `exemplars` and `num_exemplars`.
        compares: Whether it needs a similarity.
        count: Exemplars a query, m.
    """

    uses: ClassVar[tuple[str, ...]] = ()
    compares: ClassVar[bool] = False
    similarity: PoolSimilarity

    def __init__(
        self, args: SelectionArguments, pool: ExemplarPool, similarity: PoolSimilarity | None = None
    ) -> None:
        """Take what it chooses from; a ConfigError if the pool has fewer examples, copies aside."""
        self.args = args
        self.pool = pool
        self.count = args.count
        if similarity is not None:
            self.similarity = similarity
        if (size := len(pool.guard.distinct)) < self.count:
            raise ConfigError(
                f"num_exemplars is {self.count}, the pool has {size} different: lower it"
            )

    @property
    def fingerprint(self) -> Fields:
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
        """Choose each query's exemplars: the first of its ranking that may be shown with it.

        A query's do not depend on those beside it. A class from outside that ranks other rows than
        `guard.distinct` is a ConfigError.
        """
        candidates = Candidates.missing(len(queries), 0)
        dropped = np.zeros(len(queries), np.int64)
        if self.count:
            texts = [query.text for query in queries]
            rank = partial(self.rank, queries)
            depth = self.count + 8  # some to spare for the leak guard
            candidates, dropped = self.pool.guard.nearest(rank, texts, self.count, depth=depth)
        if not np.isin(candidates.rows, [MISSING_ROW, *self.pool.guard.distinct]).all():
            raise ConfigError(f"exemplars '{self.args.exemplars}' ranks copies, or unknown rows")
        scores = candidates.scores if self.compares else np.full_like(candidates.scores, np.nan)
        return Chosen(candidates.rows, scores, dropped)


class Nearest(Selector):
    """KATE: the nearest examples of each query, or the farthest."""

    uses: ClassVar[tuple[str, ...]] = ("farthest",)
    compares: ClassVar[bool] = True

    def rank(self, queries: Sequence[Example], depth: int) -> Candidates:
        sign = -1 if self.args.farthest else 1
        best = self.similarity.nearest(queries, self.pool.guard.distinct, depth, sign=sign)
        return Candidates(best.rows, sign * best.scores)


def draw_rows(
    method: str, labels: Labels, names: Sequence[str], count: int, rng: random.Random
) -> list[int]:
    """Draw `count` rows of a pool.

    "random" draws them all alike; "balanced" the labels in turn, so that their numbers differ by at
    most one while they last; "official" as PGRA's code, see `_draw_official`; "fixed" takes the
    pool's first. `names` are the labels in the task's order.
    """
    if method == "fixed":
        return list(labels)[:count]
    if method == "random":
        return rng.sample(list(labels), count)
    draw = _draw_balanced if method == "balanced" else _draw_official
    chosen = draw(labels, {name: [] for name in names}, count, rng)
    rng.shuffle(chosen)
    return chosen


Groups = dict[str | None, list[int]]  # rows by label


def _draw_balanced(labels: Labels, groups: Groups, count: int, rng: random.Random) -> list[int]:
    for row, label in labels.items():
        groups.setdefault(label, []).append(row)
    for group in groups.values():
        rng.shuffle(group)
    # Which label is one ahead must not depend on the order of labels.
    order = rng.sample(list(groups), len(groups))
    chosen: list[int] = []
    while len(chosen) < count:
        for label in order:
            if groups[label] and len(chosen) < count:
                chosen.append(groups[label].pop())
    return chosen


def _draw_official(
    labels: Labels,
    groups: Groups,
    count: int,
    rng: random.Random,  # noqa: ARG001 (nothing is drawn)
) -> list[int]:
    """Take rows in file order under a cap a label, until all labels are there: PGRA's code.

    It takes its own number, 8 to 11 of 8. The released code shuffles unseeded, differently for each
    split; here one seeded order serves all.
    """
    cap = count // len(groups) + 1
    for row, label in labels.items():
        if len(groups[label]) < cap:
            groups[label].append(row)
        if sum(map(len, groups.values())) >= count and all(groups.values()):
            break
    return list(chain.from_iterable(groups.values()))


class Drawn(Selector):
    """By chance: one draw for all queries, or one for each (KATE's baseline); see `draw_rows`.

    One that the leak guard drops is replaced, by one of its label if possible.
    """

    uses: ClassVar[tuple[str, ...]] = ("redraw", "exemplar_seed")

    def rank(self, queries: Sequence[Example], depth: int) -> Candidates:
        """Return each query's draw, and after it what may replace those that leak."""
        guard = self.pool.guard
        labels = {row: self.pool.examples[row].label for row in guard.distinct.tolist()}
        names = sorted({label for label in labels.values() if label is not None})
        seed = self.args.exemplar_seed or 0
        spare = list(labels)
        random.Random(f"{seed} others").shuffle(spare)

        @cache
        def draw(seed: int | str) -> list[int]:
            rng = random.Random(seed)
            return draw_rows(self.args.exemplars, labels, names, self.count, rng)

        ranked = Candidates.missing(len(queries), depth)
        for line, query in enumerate(queries):
            number = _text_number(query.text) if self.args.redraw else 0
            rows = draw(f"{seed} {number}" if self.args.redraw else seed)
            leaked = {labels[row] for row in filter(guard.leaks(query.text), rows)}
            if leaked:
                start = number % len(spare)
                others = [row for row in spare[start:] + spare[:start] if row not in rows]
                rows = rows + sorted(others, key=lambda row: labels[row] not in leaked)
            rows = rows[:depth]
            ranked.rows[line, : len(rows)] = rows
            ranked.scores[line, : len(rows)] = -np.arange(len(rows))
        return ranked


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
