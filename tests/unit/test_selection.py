"""Who stands in a prompt: the nearest, the farthest, the diverse, or whom chance takes."""

from collections import Counter

import numpy as np
import pytest

from pgra.core import MISSING_ROW, Candidates, Example
from pgra.errors import ConfigError
from pgra.exemplars.choice import Choice
from pgra.exemplars.selection import ExemplarPool, arrange, marginal_relevance

WORDS = ["ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "qr", "st"]
TEXTS = [f"{word} number {i}" for i, word in enumerate(WORDS)]
POOL = [Example(f"train-{i}", {"text": t}, "xyz"[i % 3]) for i, t in enumerate(TEXTS)]
NEW = [Example(f"test-{i}", {"text": f"new words {i * 7}"}) for i in range(6)]
PLACES = np.array([0, 1, 2, 4, 8, 16, 32, 64, 128, 256], dtype=np.float32)


class OnALine:
    """Examples are as alike as they are near on a line; a query stands at its number."""

    def __init__(self, places=PLACES):
        self.searches, self.fingerprint, self.places = 0, {"metric": "line"}, places

    def nearest(self, queries, rows, depth):
        self.searches += 1
        at = np.array([float(query.text.split()[-1]) for query in queries])
        scores = -np.abs(at[:, None] - self.places[rows][None, :]).astype(np.float32)
        return Candidates.best(np.broadcast_to(rows, scores.shape), scores, depth)

    def farthest(self, queries, rows, depth):
        found = self.nearest(queries, rows, len(rows))
        return Candidates.best(found.rows, -found.scores, depth)

    def among(self, rows):
        return -np.abs(self.places[rows][:, None] - self.places[rows][None, :])


@pytest.fixture
def pool(tmp_path):
    return ExemplarPool(POOL, jaccard=0.9, root=tmp_path / "neighbors")


def test_the_nearest_come_first_with_their_likeness(pool):
    chosen = pool.choose(NEW[:2], Choice(count=3), OnALine())
    assert chosen.rows.tolist() == [[0, 1, 2], [4, 3, 2]]  # of 7: 8, 4, 2
    assert chosen.similarity.tolist() == [[0, -1, -2], [-1, -3, -5]]
    far = pool.choose(NEW[:2], Choice(count=3, farthest=True), OnALine())
    assert far.rows.tolist() == [[9, 8, 7]] * 2
    assert far.similarity.tolist() == [[-256, -128, -64], [-249, -121, -57]]


@pytest.mark.parametrize(
    "choice",
    [
        Choice(count=4),
        Choice(count=4, farthest=True),
        Choice(method="knn-mmr", count=4),
        Choice(method="random", count=4),
        Choice(method="random", count=4, redraw=True),
        Choice(method="balanced", count=4),
        Choice(method="fixed", count=4),
    ],
)
def test_no_selector_shows_a_query_its_own_text(pool, choice):
    own = [Example(f"test-{i}", {"text": f"{t.upper()} "}) for i, t in enumerate(TEXTS)]
    chosen = pool.choose(own, choice, OnALine())
    for row, line in enumerate(chosen.rows):
        assert row not in line
    assert chosen.num_dropped.sum() > 0
    fresh = pool.choose(NEW, choice, OnALine())  # the control
    assert fresh.num_dropped.sum() == 0
    full = 3 if choice.method == "fixed" else 4  # what is fixed is not replaced
    assert chosen.counts.min() == full
    assert (fresh.counts == 4).all()


def test_neighbors_are_stored_and_serve_other_numbers_of_exemplars(pool, tmp_path):
    line = OnALine()
    first = pool.choose(NEW, Choice(count=3), line)
    again = ExemplarPool(POOL, jaccard=0.9, root=tmp_path / "neighbors")
    more = again.choose(NEW, Choice(count=5), line)
    assert line.searches == 1
    np.testing.assert_array_equal(more.rows[:, :3], first.rows)
    again.choose(NEW[1:], Choice(count=3), line)  # the control: other queries
    assert line.searches == 2


def test_one_draw_serves_all_and_a_redraw_each(pool):
    one = pool.choose(NEW, Choice(method="random", count=4), None).rows
    assert len({tuple(line) for line in one.tolist()}) == 1
    each = pool.choose(NEW, Choice(method="random", count=4, redraw=True)).rows
    assert len({tuple(line) for line in each.tolist()}) == len(NEW)
    other = pool.choose(NEW, Choice(method="random", count=4, seed=1)).rows
    assert other.tolist() != one.tolist()
    assert np.isnan(pool.choose(NEW, Choice(method="random", count=4)).similarity).all()


def test_a_querys_draw_does_not_depend_on_who_is_asked_beside(pool):
    choice = Choice(method="random", count=4, redraw=True)
    together = pool.choose(NEW, choice).rows.tolist()
    assert [pool.choose([query], choice).rows[0].tolist() for query in NEW] == together


@pytest.mark.parametrize("redraw", [False, True])
def test_balanced_takes_the_labels_in_turn(pool, redraw):
    choice = Choice(method="balanced", count=6, redraw=redraw)
    for line in pool.choose(NEW, choice).rows.tolist():
        assert sorted(Counter(POOL[row].label for row in line).values()) == [2, 2, 2]
    # What is left out is replaced by one of its label.
    own = [Example("test-0", {"text": TEXTS[row]}) for row in range(len(TEXTS))]
    for line in pool.choose(own, choice).rows.tolist():
        assert sorted(Counter(POOL[row].label for row in line).values()) == [2, 2, 2]
    unlabeled = [Example(e.id, e.fields) for e in POOL]
    bare = ExemplarPool(unlabeled, jaccard=0.9, root=pool._root)
    with pytest.raises(ConfigError, match="'balanced' takes the labels in turn"):
        bare.choose(NEW, choice)


def test_fixed_rows_are_the_first_or_those_that_are_named(pool):
    assert pool.choose(NEW, Choice(method="fixed", count=2)).rows[0].tolist() == [0, 1]
    named = Choice(method="fixed", count=2, fixed=(7, 3))
    assert pool.choose(NEW, named).rows[0].tolist() == [7, 3]


def test_marginal_relevance_by_hand():
    relevance = np.array([1.0, 0.9, 0.5], np.float32)
    among = np.array([[1, 0.95, 0.1], [0.95, 1, 0.1], [0.1, 0.1, 1]], np.float32)
    # After the first: 0.5 * 0.9 - 0.5 * 0.95 < 0.5 * 0.5 - 0.5 * 0.1.
    assert marginal_relevance(relevance, among, 3, diversity=0.5) == [0, 2, 1]
    assert marginal_relevance(relevance, among, 3, diversity=1.0) == [0, 1, 2]  # the control


def test_diverse_neighbors_of_lambda_1_are_the_nearest(pool):
    plain = pool.choose(NEW, Choice(count=4), OnALine())
    same = pool.choose(NEW, Choice(method="knn-mmr", count=4, diversity=1.0), OnALine())
    np.testing.assert_array_equal(same.rows, plain.rows)
    np.testing.assert_array_equal(same.similarity, plain.similarity)
    other = pool.choose(NEW, Choice(method="knn-mmr", count=4, diversity=0.3), OnALine())
    assert other.rows.tolist() != plain.rows.tolist()
    assert other.rows[:, 0].tolist() == plain.rows[:, 0].tolist()


def test_orders_of_a_prompt():
    rows = [5, 3, 9, 1]
    assert arrange(rows, "nearest-first", query="a") == rows
    assert arrange(rows, "nearest-last", query="a") == [1, 9, 3, 5]
    shuffled = {tuple(arrange(rows, "random", query=text, seed=2)) for text in "abcdefgh"}
    assert len(shuffled) > 3
    assert all(sorted(line) == [1, 3, 5, 9] for line in shuffled)
    again = arrange(rows, "random", query="a", seed=2)
    assert again == arrange(rows, "random", query="a", seed=2)


def test_a_pool_that_is_too_small_is_refused(tmp_path):
    twice = [*POOL[:2], Example("train-9", {"text": TEXTS[0]}, "x")]
    pool = ExemplarPool(twice, jaccard=0.9, root=tmp_path)
    told = "num_exemplars is 3, but the pool holds only 2 examples and 1 copies of them"
    with pytest.raises(ConfigError, match=told):
        pool.choose(NEW, Choice(method="random", count=3))
    few = pool.choose([Example("test-0", {"text": TEXTS[0]})], Choice(count=2), OnALine())
    assert few.rows.tolist() == [[1, MISSING_ROW]]


@pytest.mark.parametrize("method", ["knn", "random", "balanced"])
def test_an_equal_text_of_another_label_is_shown_and_a_copy_is_not(tmp_path, method):
    again = [Example("train-10", {"text": TEXTS[3].upper()}, "y"), POOL[3]]  # POOL[3] is an "x"
    pool = ExemplarPool([*POOL, *again], jaccard=0.9, root=tmp_path)
    likeness = OnALine(np.append(PLACES, [3, 3]))
    chosen = pool.choose(NEW[:1], Choice(method=method, count=11), likeness)
    assert sorted(chosen.of(0)) == list(range(11))  # 10 is the "y"; 11 is the copy
    assert chosen.num_copies == 1
    one_label = [Example(one.id, one.fields, "x") for one in pool.examples]
    control = ExemplarPool(one_label, jaccard=0.9, root=tmp_path)
    assert control.choose(NEW[:1], Choice(method=method, count=10), likeness).num_copies == 2


def test_neighbors_that_were_found_among_other_rows_are_not_taken(tmp_path):
    twice = [*POOL, Example("train-10", {"text": TEXTS[0]}, "y")]
    likeness = OnALine(np.append(PLACES, [0]))
    for label, expected in (("x", [0, 1]), ("y", [0, 10])):  # a copy, and none
        pool = [*POOL, Example("train-10", {"text": TEXTS[0]}, label)]
        chosen = ExemplarPool(pool, jaccard=0.9, root=tmp_path).choose(
            NEW[:1], Choice(count=2), likeness
        )
        assert chosen.rows.tolist() == [expected]
    assert likeness.searches == 2
    ExemplarPool(twice, jaccard=0.9, root=tmp_path).choose(NEW[:1], Choice(count=2), likeness)
    assert likeness.searches == 2  # the control: the same rows are


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"method": "nearest"}, "unknown exemplars 'nearest'"),
        ({"method": "random", "farthest": True}, "farthest is for exemplars 'knn'"),
        ({"redraw": True}, "redraw draws for each query, and exemplars 'knn' draws nothing"),
        ({"diversity": 1.5}, "mmr_lambda is 1.5"),
        ({"method": "knn-mmr", "num_near": 4}, "mmr_candidates is 4, and 8 exemplars"),
    ],
)
def test_contradictions_are_refused(values, told):
    with pytest.raises(ConfigError, match=told):
        Choice(**values)
