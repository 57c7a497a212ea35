"""`pgra.ExemplarSelector`: KATE on anybody's list, without a run."""

import numpy as np
import pytest
from conftest import review_rows

import pgra
from pgra.errors import DataError

ROWS = review_rows(60)  # the queries' own texts among them
QUERIES = [row["text"] for row in review_rows(12, start=20)]
TALK = [("how do I pay?", "billing"), ("it crashed again", "bug"), ("where is my bill?", "billing")]


@pytest.fixture(scope="module")
def encoder(encoder_dir):
    return pgra.Encoder(str(encoder_dir), normalize=False, device="cpu")


def select(encoder, queries=QUERIES, k=3, pool=ROWS, **options):
    return pgra.ExemplarSelector(pool, encoder=encoder, **options).select(list(queries), k)


def test_it_chooses_the_nearest_that_are_no_copies_of_the_query(encoder):
    pool = [*TALK, ("How do I  pay?", "bug")]
    asked = "how do I pay?"
    near = np.argsort(-(encoder.encode([t for t, _ in pool]) @ encoder.encode([asked])[0]))
    found = select(encoder, [asked], 2, pool, metric="dot")
    assert found == [[pool[row] for row in near if row not in (0, 3)]]
    every = select(encoder, [asked], 4, pool, metric="dot", leak_guard=False)  # the control
    assert every == [[pool[row] for row in near]]
    blocks = pgra.ExemplarSelector(TALK, encoder=encoder).prompt("pay what?", 3).split("\n\n")
    assert blocks[-1] == "Text: pay what?\nLabel:"
    assert {f"Text: {text}\nLabel: {label}" for text, label in TALK} == {*blocks[:-1]}


@pytest.mark.parametrize("how", ["euclidean", "bm25"])
def test_what_is_added_is_chosen_as_if_it_had_always_been_there(encoder, how):
    options = {"encoder": "bm25"} if how == "bm25" else {"encoder": encoder, "metric": how}
    grown, empty = pgra.ExemplarSelector(ROWS[:20], **options), pgra.ExemplarSelector([], **options)
    assert empty.select("a film", 3) == []
    before = grown.select(QUERIES, 3)
    grown.add(ROWS[20])
    grown.add(ROWS[21:])
    for row in ROWS:
        empty.add(row)
    whole = pgra.ExemplarSelector(ROWS, **options).select(QUERIES, 3)
    assert grown.select(QUERIES, 3) == empty.select(QUERIES, 3) == whole != before
    assert len(grown) == len(ROWS)


def test_a_refused_addition_leaves_the_pool_as_it_was(encoder):
    selector = pgra.ExemplarSelector(TALK, encoder=encoder)
    with pytest.raises(DataError, match="pool, row 1 has no label"):
        selector.add([("new", "bug"), ("newer", None)])
    assert len(selector) == len(selector.select("pay", 9)) == len(TALK)
