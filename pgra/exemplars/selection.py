"""Which labelled examples stand before a query, and in what order (KATE, Liu et al. 2022).

KATE (Liu et al. 2022, section 2.3): the k nearest training examples of each query. Its baseline
draws them by chance for each query; drawn once for all, the prompts share one prefix. Whatever the
way, the leak guard (`pgra.retrieval.neighbors`) keeps a query's own text out of its prompt.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pgra.artifacts import digest
from pgra.core import ALONE, MISSING_ROW, Candidates, Context, Example, Json, Rows, Scores
from pgra.errors import ConfigError
from pgra.exemplars.choice import NEIGHBOR_SELECTORS, Choice
from pgra.lm.prefix import PromptedEncoder
from pgra.retrieval.bm25 import BM25Retriever
from pgra.retrieval.faiss import Vectors, nearest
from pgra.retrieval.neighbors import Allowed, Counts, LeakGuard, Neighbors, text_key
from pgra.retrieval.shards import examples_digest, store_candidates

# Exemplars by chance: one draw for all queries, or a draw for each (KATE's baseline).


@dataclass(frozen=True)
class Drawing:
    """What is drawn from.

    Attributes:
        guard: The pool's texts, of which each stands once in the urn.
        labels: Of the pool's examples, None where they have none.
    """

    guard: LeakGuard
    labels: Sequence[str | None]


@dataclass(frozen=True)
class Taken:
    """Rows of B queries.

    Attributes:
        rows: (B, m), `MISSING_ROW` where there are fewer.
        num_dropped: What the leak guard left out of each query's, (B,).
    """

    rows: Rows
    num_dropped: Counts


def draw(drawing: Drawing, *, method: str, count: int, seed: Sequence[int]) -> Rows:
    """Give the pool's rows in the order of a draw: the first m are drawn, the others stand by.

    Args:
        drawing: What is drawn from.
        method: "random", or "balanced": the labels in turn, so that their numbers among the first
            m differ by at most one while they last.
        count: m.
        seed: Of the draw.

    Raises:
        ConfigError: If labels are to be balanced and an example has none.
    """
    generator = np.random.default_rng(list(seed))
    rows: Rows = generator.permutation(drawing.guard.distinct)
    if method == "random":
        return rows
    named = [drawing.labels[row] for row in rows.tolist()]
    if None in named:
        raise ConfigError(
            "exemplars 'balanced' takes the labels in turn, and this task has none: use "
            "--exemplars random"
        )
    names = sorted({str(name) for name in named})
    ranks = generator.permutation(len(names))  # which label is one ahead must not depend on names
    rank_of = {name: int(rank) for name, rank in zip(names, ranks, strict=True)}
    turn, rank = np.empty(len(rows), np.int64), np.array([rank_of[str(name)] for name in named])
    for each in range(len(names)):
        (places,) = np.nonzero(rank == each)
        turn[places] = np.arange(len(places))
    order = np.lexsort((rank, turn))
    first, rest = order[:count], order[count:]
    drawn: Rows = rows[np.concatenate([generator.permutation(first), rest])]
    return drawn


def take(
    drawing: Drawing,
    queries: Sequence[str],
    order_of: Callable[[int], Rows],
    count: int,
    *,
    refill: bool,
) -> Taken:
    """Give each query the first m of its order that may be shown with it.

    Args:
        drawing: What was drawn from.
        queries: B texts.
        order_of: Gives the order of a query's rows, by its place.
        count: m.
        refill: Whether one that the leak guard leaves out is replaced, by the next of its label
            where there is one.
    """
    rows: Rows = np.full((len(queries), count), MISSING_ROW, dtype=np.int64)
    dropped = np.zeros(len(queries), dtype=np.int64)
    for line, query in enumerate(queries):
        order, is_leak = order_of(line), drawing.guard.leaks(query)
        first = order[:count].tolist()
        kept = [row for row in first if not is_leak(row)]
        dropped[line] = len(first) - len(kept)
        if refill and dropped[line]:
            spare = [row for row in order[count:].tolist() if not is_leak(row)]
            gone = [drawing.labels[row] for row in first if is_leak(row)]
            kept += list(_replace(drawing, gone, spare))
        rows[line, : len(kept)] = kept
    return Taken(rows, dropped)


def _replace(drawing: Drawing, gone: Sequence[str | None], spare: list[int]) -> Iterator[int]:
    for label in gone:
        if spare:
            same = (place for place, row in enumerate(spare) if drawing.labels[row] == label)
            yield spare.pop(next(same, 0))


# Exemplars that are near a query, and unlike each other.


def marginal_relevance(
    relevance: Scores, among: npt.NDArray[np.float32], count: int, *, diversity: float
) -> list[int]:
    """Choose by maximal marginal relevance (Carbonell and Goldstein 1998, section 2).

    One after the other: the most relevant, then what maximises
    lambda * relevance - (1 - lambda) * the largest likeness to what is chosen.

    Args:
        relevance: Likeness to the query, (n,).
        among: Likeness to each other, (n, n).
        count: How many to choose.
        diversity: Lambda; 1 chooses by relevance alone.

    Returns:
        Their places in the order of choice; of equals the first.
    """
    chosen: list[int] = []
    closest = np.full(len(relevance), -np.inf, dtype=np.float32)
    gain = np.asarray(relevance, np.float64)
    for _ in range(min(count, len(relevance))):
        gain[chosen] = -np.inf
        best = int(gain.argmax())
        chosen.append(best)
        closest = np.maximum(closest, among[best])
        gain = diversity * np.asarray(relevance, np.float64) - (1 - diversity) * closest
    return chosen


# How like two examples are: by vectors under a metric, or by the words they share.
#
# KATE (Liu et al. 2022, section 3.1) compares by negative Euclidean distance where the encoder is
# plain RoBERTa, and by cosine where it is trained on sentence pairs.


_GATHERED = 1 << 24  # numbers of vectors that are gathered at once to be compared exactly


class Likeness(Protocol):
    """Compares queries with a pool of labelled examples; higher is more alike."""

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give all that decides who is like whom."""
        ...

    def nearest(self, queries: Sequence[Example], rows: Rows, depth: int) -> Candidates:
        """Give each query's most alike among some rows of the pool, (B, depth), ties by row."""
        ...

    def farthest(self, queries: Sequence[Example], rows: Rows, depth: int) -> Candidates:
        """Give each query's least alike, the least first; scores are negative likenesses.

        Raises:
            ConfigError: If there is no such thing.
        """
        ...

    def among(self, rows: Rows) -> npt.NDArray[np.float32]:
        """Give the likeness of some rows of the pool with each other, (n, n).

        Raises:
            ConfigError: If there is no such thing.
        """
        ...


class VectorLikeness:
    """Compares by vectors, which are made once and kept."""

    def __init__(
        self,
        neighbors: Neighbors,
        metric: str,
        context: Context = ALONE,
    ) -> None:
        """Remember what is compared; nothing is encoded yet.

        Args:
            neighbors: The pool, and what gives vectors; as the model gives them, not of unit
                length, or all metrics are one.
            metric: One of `pgra.exemplars.choice.METRICS`.
            context: Who waits while the main one encodes the pool.
        """
        self._neighbors, self._metric, self._context = neighbors, metric, context

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give encoder, pool and metric."""
        return {**self._neighbors.fingerprint, "metric": self._metric}

    @cached_property
    def _pool(self) -> Vectors:
        """Give the pool's vectors so that the metric is simple on them, (n, D)."""
        return self._shape(self._neighbors.vectors(self._context))

    @cached_property
    def _middle(self) -> Vectors:
        # Distances do not change when all points move; near 0 float32 tells them apart best. The
        # states of a plain BERT share one huge component.
        mean = self._neighbors.vectors(self._context).mean(axis=0, dtype=np.float64)
        return np.asarray(mean, np.float32)

    def _shape(self, vectors: Vectors) -> Vectors:
        if self._metric == "cosine":
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            return np.asarray(vectors / np.maximum(lengths, np.finfo(np.float32).tiny), np.float32)
        return vectors - self._middle if self._metric == "euclidean" else vectors

    def _encode(self, queries: Sequence[Example]) -> Vectors:
        return self._shape(self._neighbors.encode(queries))

    def nearest(self, queries: Sequence[Example], rows: Rows, depth: int) -> Candidates:
        """Give each query's most alike; see `Likeness`."""
        return self._search(queries, rows, depth, sign=1)

    def farthest(self, queries: Sequence[Example], rows: Rows, depth: int) -> Candidates:
        """Give each query's least alike; see `Likeness`."""
        return self._search(queries, rows, depth, sign=-1)

    def _search(
        self, queries: Sequence[Example], rows: Rows, depth: int, *, sign: int
    ) -> Candidates:
        asked, pool = self._encode(queries), self._pool[rows]
        if self._metric != "euclidean":
            return nearest(sign * asked, [(rows, pool)], depth)
        # -|q - x|^2 / 2 = qx - |x|^2 / 2 - |q|^2 / 2, where the last part is the query's alone.
        halves = -0.5 * np.square(pool).sum(axis=1, keepdims=True)
        ones = np.ones((len(asked), 1), np.float32)
        found = nearest(sign * np.hstack([asked, ones]), [(rows, np.hstack([pool, halves]))], depth)
        return Candidates.best(found.rows, -sign * self._distances(asked, found.rows), depth)

    def _distances(self, asked: Vectors, rows: Rows) -> npt.NDArray[np.float32]:
        """Give the distances themselves, (B, K): their squares lose digits in the product."""
        distances = np.empty(rows.shape, dtype=np.float32)
        step = max(1, _GATHERED // max(1, rows.shape[1] * asked.shape[1]))
        for start in range(0, len(asked), step):
            part = slice(start, start + step)
            gaps = self._pool[rows[part]] - asked[part, None, :]  # (b, K, D)
            distances[part] = np.sqrt(np.square(gaps).sum(axis=2))
        return distances

    def among(self, rows: Rows) -> npt.NDArray[np.float32]:
        """Give the likeness of rows with each other; see `Likeness`."""
        vectors = self._pool[rows]
        products = np.asarray(vectors @ vectors.T, np.float32)
        if self._metric != "euclidean":
            return products
        squares = np.diagonal(products)
        gaps = squares[:, None] + squares[None, :] - 2 * products
        return np.asarray(-np.sqrt(np.maximum(gaps, 0)), np.float32)


class WordLikeness:
    """Compares by shared words: Okapi BM25, the pool's examples being the passages."""

    def __init__(self, pool: Sequence[Example]) -> None:
        """Remember the pool; it is indexed when it is first searched."""
        self._texts = [example.text for example in pool]

    @cached_property
    def _index(self) -> BM25Retriever:
        return BM25Retriever.of_texts(self._texts)

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give BM25's constants and a digest of the pool."""
        return {"metric": "bm25", **self._index.fingerprint}

    def nearest(self, queries: Sequence[Example], rows: Rows, depth: int) -> Candidates:
        """Give each query's most alike; those that share no word with it are missing."""
        self._index.removed = np.setdiff1d(np.arange(len(self._texts)), rows)
        return self._index.retrieve([query.text for query in queries], depth)

    def farthest(self, queries: Sequence[Example], rows: Rows, depth: int) -> Candidates:  # noqa: ARG002
        """Refuse: most of a pool shares no word with a query, so the least alike all tie.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "encoder 'bm25' has no farthest examples, since most of a pool shares no word with a "
            "query: leave out --farthest, or use another --encoder"
        )

    def among(self, rows: Rows) -> npt.NDArray[np.float32]:  # noqa: ARG002
        """Refuse: BM25 compares a query with a passage, not two passages.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "exemplars 'knn-mmr' compares exemplars with each other, and encoder 'bm25' cannot: "
            "use --exemplars knn, or another --encoder"
        )


@dataclass(frozen=True)
class PromptedStates:
    """Vectors of examples that are an LM's states under a task's prompt: h*(x) of PGRA.

    Guo et al. 2023, eq. 2, compare queries with corpus passages by these; here they compare queries
    with the examples that KATE chooses from.

    Attributes:
        encoder: The LM under the task's prompt.
        advance: Told how many more are done, for a bar.
    """

    encoder: PromptedEncoder
    advance: Callable[[int], object] = int

    @property
    def query_fingerprint(self) -> Mapping[str, Json]:
        """Give all that determines a state, besides the example."""
        return self.encoder.fingerprint

    def encode_examples(self, examples: Sequence[Example]) -> Vectors:
        """Give the states of examples, (B, H) float32.

        Raises:
            ModelError: If one is not finite.
        """
        fields = [example.fields for example in examples]
        states = self.encoder.encode_fields(fields, advance=self.advance)
        return np.asarray(states.float().numpy(), np.float32)


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
        context: Context = ALONE,
    ) -> Chosen:
        """Choose each query's exemplars.

        Args:
            queries: B queries.
            choice: How.
            likeness: What compares; only neighbors need one.
            context: Who waits while the main one searches.

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
        chosen = self._choose(queries, choice, likeness, context)
        return replace(chosen, num_copies=self.guard.num_copies)

    def _choose(
        self,
        queries: Sequence[Example],
        choice: Choice,
        likeness: Likeness | None,
        context: Context,
    ) -> Chosen:
        if choice.method in NEIGHBOR_SELECTORS:
            if likeness is None:
                raise ValueError(f"exemplars '{choice.method}' need a likeness")
            return self._nearest(queries, choice, likeness, context)
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
        self, queries: Sequence[Example], choice: Choice, likeness: Likeness, context: Context
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
                context=context,
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
        order: One of `choice.ORDERS`. KATE's default is "nearest-first" (section 5.3), so that the
            least similar stands next to the query.
        query: Its text.
        seed: Of "random", which is another order for each query.
    """
    if order == "nearest-first":
        return list(rows)
    if order == "nearest-last":
        return list(rows)[::-1]
    generator = np.random.default_rng([_ORDER_SEED, seed, text_number(query)])
    return [rows[place] for place in generator.permutation(len(rows))]


# KATE's kNN baseline: the target that most of a query's neighbors have, without an LM.
#
# Liu et al. 2022, section 3.2: "majority voting among the k examples' targets"; of a tie "the
# target of the example most similar to the test sentence".


def majority(targets: Sequence[str]) -> str:
    """Give the most frequent target; of a tie the one that stands first, being the nearest's.

    Args:
        targets: Of a query's neighbors, nearest first; at least one.
    """
    votes = Counter(targets)
    most = max(votes.values())
    return next(target for target in targets if votes[target] == most)


def vote_shares(targets: Sequence[str], names: Sequence[str]) -> list[float]:
    """Give the share of the votes that each name has, in the order of names."""
    votes = Counter(targets)
    return [votes[name] / len(targets) for name in names]
