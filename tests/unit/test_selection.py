"""Who stands in a prompt: one contract for all selectors, then what each one promises."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from pgra.errors import ConfigError
from pgra.exemplars import ORDERS, SELECTORS, SelectionArguments
from pgra.exemplars.selection import ExemplarPool, Selector, arrange
from pgra.types import Candidates, Example

WORDS = ["ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "qr", "st"]
TEXTS = [f"{word} number {i}" for i, word in enumerate(WORDS)]
POOL = [Example(f"train-{i}", {"text": t}, "xyz"[i % 3]) for i, t in enumerate(TEXTS)]
NEW = [Example(f"test-{i}", {"text": f"new words {i * 7}"}) for i in range(6)]
OWN = [Example(f"test-{i}", {"text": f"{t.upper()} "}) for i, t in enumerate(TEXTS)]
PLACES = np.array([0, 1, 2, 4, 8, 16, 32, 64, 128, 256], dtype=np.float32)


class LastFirst(Selector):
    """A selector as somebody outside writes it: the pool's last examples first."""

    def rank(self, queries, depth):
        rows = np.tile(self.pool.guard.distinct[::-1], (len(queries), 1))
        return Candidates.best(rows, rows.astype(np.float32), depth)


class OnALine:
    """Examples are as alike as they are near on a line; a query stands at its number."""

    def __init__(self, places=PLACES):
        self.places = places

    def nearest(self, queries, rows, depth, *, sign=1):
        at = np.array([float(query.text.split()[-1]) for query in queries])
        scores = -sign * np.abs(at[:, None] - self.places[rows][None, :]).astype(np.float32)
        return Candidates.best(np.broadcast_to(rows, scores.shape), scores, depth)


def open_selector(examples=POOL, *, similarity=None, **values):
    args = SelectionArguments(**{"num_exemplars": 4, **values})
    return args.selector(args, ExemplarPool(examples, jaccard=0.9), similarity)


def select(queries, examples=POOL, *, similarity=None, **values):
    return open_selector(examples, similarity=similarity or OnALine(), **values).choose(queries)


def rows_of(*args, **values):
    return select(*args, **values).rows.tolist()


WAYS = {
    **{name: {"exemplars": name} for name in SELECTORS},
    "farthest": {"exemplars": "knn", "farthest": True},
    "random for each": {"exemplars": "random", "redraw": True},
    "balanced for each": {"exemplars": "balanced", "redraw": True},
    "from outside": {"exemplars": "test_selection:LastFirst"},
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@every_way
def test_no_query_is_shown_its_own_text(way):
    chosen, fresh = select(OWN, **way), select(NEW, **way)
    assert all(row not in line for row, line in enumerate(chosen.rows.tolist()))
    assert chosen.num_dropped.sum() > 0
    assert fresh.num_dropped.sum() == 0  # the control
    assert {len(fresh.of(i)) for i in range(len(NEW))} == {4}
    assert min(len(chosen.of(i)) for i in range(len(OWN))) == 4  # what is left out is replaced


@every_way
def test_the_seed_decides_what_is_drawn_and_no_other_query_does(way):
    queries = [*NEW, *OWN]
    together = rows_of(queries, exemplar_seed=3, **way)
    assert [rows_of([query], exemplar_seed=3, **way)[0] for query in queries] == together
    draws = SelectionArguments(**way).draws
    assert (rows_of(queries, exemplar_seed=4, **way) != together) == draws


@every_way
def test_no_copy_is_shown_and_an_equal_text_of_another_label_is(way):
    other, copy = Example("train-10", {"text": TEXTS[3].upper()}, "y"), POOL[3]  # POOL[3] is an "x"
    similarity = OnALine(np.append(PLACES, [3, 3]))
    every = {**way, "num_exemplars": 11, "similarity": similarity}
    assert sorted(select(NEW[:1], [*POOL, other, copy], **every).of(0)) == [*range(11)]
    same = replace(other, label="x")  # the control: two copies
    with pytest.raises(ConfigError, match="10"):
        select(NEW[:1], [*POOL, same, copy], **every)


@pytest.mark.parametrize("redraw", [False, True])
def test_balanced_takes_the_labels_in_turn(redraw):
    for line in rows_of([*NEW, *OWN], exemplars="balanced", num_exemplars=6, redraw=redraw):
        assert sorted(Counter(POOL[row].label for row in line).values()) == [2, 2, 2]


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_keeps_the_rows_and_reversing_reverses(order):
    rows = [3, 9, 4, 0, 7]
    shown = arrange(rows, order, query="b c", seed=1)
    assert sorted(shown) == sorted(rows)
    assert shown == arrange(rows, order, query="b c", seed=1)
    assert arrange(rows, "nearest-last", query="")[::-1] == rows
