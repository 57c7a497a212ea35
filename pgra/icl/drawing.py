"""Exemplars by chance: one draw for all queries, or a draw for each (KATE's baseline)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pgra.errors import ConfigError
from pgra.retrieval.leaks import Counts, LeakGuard
from pgra.types import MISSING_ROW, Rows


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
