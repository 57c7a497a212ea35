import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_training import VERBALIZER, tokens

from ablations.lm_bff import build_demonstrated, draw_demonstrations, draw_shots
from ablations.separate import SeparateInputs
from pgra.errors import DataError
from pgra.prompts import Verbalizer
from pgra.reader.inputs import SegmentLayout
from pgra.types import Example

LABELS = VERBALIZER.labels
TEXTS = ("A dull story.", "A warm album.", "A lifeless plot.", "A funny film.")
SUPPORT = [Example(f"train-{i}", {"text": text}, LABELS[i % 2]) for i, text in enumerate(TEXTS)]
VECTORS = np.eye(4, dtype=np.float32)
QUERY = Example("test-0", {"text": "The sea."})


def draw(queries, *, near=None, share=1.0, seed=0):
    near = np.zeros((len(queries), 4)) if near is None else near
    vectors = np.array(near, np.float32), VECTORS
    how = {"num_sets": 8, "share": share, "seed": seed}
    return draw_demonstrations(queries, SUPPORT, vectors, LABELS, **how)


def build(tokenizer, drawn, queries=(QUERY,), *, verbalizer=VERBALIZER, max_tokens=64):
    layout = SegmentLayout(verbalizer.template, max_tokens=max_tokens)
    return build_demonstrated(
        queries, np.array(drawn), SUPPORT, tokenizer, verbalizer, layout=layout
    )


@given(seed=st.integers(0, 99), rows=st.lists(st.integers(0, 3), min_size=1, unique=True))
def test_a_set_is_one_example_of_each_label_and_never_the_query_itself(seed, rows):
    queries = [QUERY, *(SUPPORT[row] for row in rows)]
    drawn = draw(queries, seed=seed)
    assert drawn.shape == (len(queries), 8, 2)
    assert (drawn % 2 == [0, 1]).all()
    for row, sets in zip(rows, drawn[1:], strict=True):
        assert row not in sets
    np.testing.assert_array_equal(draw([QUERY], seed=seed), drawn[:1])  # whatever is beside it
    assert (draw([QUERY], seed=seed + 1) != drawn[:1]).any()


def test_demonstrations_come_from_the_nearer_half():
    """The query lies nearest to 2 of the negative and to 1 of the positive."""
    near = [[0.1, 0.7, 0.7, 0.1]]
    assert set(map(tuple, draw([QUERY], near=near, share=0.5)[0].tolist())) == {(2, 1)}
    assert len(set(map(tuple, draw([QUERY], near=near)[0].tolist()))) > 1  # the control


def test_the_query_keeps_its_slot(tokenizer):
    inputs = build(tokenizer, [[[0, 1], [2, 3]]])
    texts = [("A dull story.", "A warm album."), ("A lifeless plot.", "A funny film.")]
    whole = [
        tokenizer(f"The sea. <extra_id_0> {one} terrible {two} great success").input_ids
        for one, two in texts
    ]
    assert [segment.tolist() for segment in inputs[0].segments] == whole
    plain = Verbalizer(VERBALIZER.words, "{text} Review:")
    text = tokenizer.decode(build(tokenizer, [[[0, 1]]], verbalizer=plain)[0].segments[0])
    assert text.startswith("The sea. Review: A dull story. Review: terrible A warm")


def test_the_draw_is_numpys_shuffle_and_each_labels_first():
    """RandomState(42).shuffle(range(10)) is 8 1 5 0 7 2 9 4 3 6; the even ones are the first's."""
    examples = [Example(f"train-{i}", {"text": f"text {i}"}, LABELS[i % 2]) for i in range(10)]
    train, dev = shots = draw_shots(examples, LABELS, 2, seed=42)
    assert [e.id for e in train] == ["train-8", "train-0", "train-1", "train-5"]
    assert [e.id for e in dev] == ["train-2", "train-4", "train-7", "train-9"]
    assert draw_shots(examples, LABELS, 2, seed=43) != shots  # the control
    with pytest.raises(DataError, match="num_shots"):
        draw_shots(examples, LABELS, 3, seed=0)


ROWS = [
    ("a", ("A warm film <extra_id_0>", "A dull film <extra_id_0>"), "positive"),
    ("b", ("A story <extra_id_0>",), "negative"),
]
SCORES = np.log(np.array([[0.5, 0.5], [0.125, 0.5], [0.25, 0.5]], dtype=np.float32))


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        # The means of log 1/2 and log 1/8, and of log 1/2 twice.
        (None, [[0.25, 0.5], [0.25, 0.5]]),
        # 0.75 * 1/2 + 0.25 * 1/8, and so on; one segment is sure to be read.
        ([0.75, 0.25, 1.0], [[0.40625, 0.5], [0.25, 0.5]]),
        # A segment of no weight says nothing.
        ([1.0, 0.0, 1.0], [[0.5, 0.5], [0.25, 0.5]]),
    ],
)
def test_scores_are_averaged_or_summed_over_an_examples_segments(t5_dir, weights, expected):
    with np.errstate(divide="ignore"):
        logs = None if weights is None else np.log(weights)
    separate = SeparateInputs(**vars(tokens(t5_dir, ROWS)), log_weights=logs)
    np.testing.assert_allclose(np.exp(separate.combine(SCORES)), expected, rtol=1e-6)
