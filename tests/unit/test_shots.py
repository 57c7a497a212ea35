import pytest

from pgra.core import Example
from pgra.data.examples import draw_shots, whole_train
from pgra.errors import ConfigError, DataError

LABELS = ("bad", "good")


def examples(count, split="train"):
    return [Example(f"{split}-{i}", {"text": f"text {i}"}, LABELS[i % 2]) for i in range(count)]


def ids(found):
    return [example.id for example in found]


def test_each_label_has_its_shots_and_no_example_is_in_both_parts():
    shots = draw_shots(examples(20), LABELS, 3, seed=13)
    for part in (shots.train, shots.dev):
        assert [example.label for example in part] == ["bad"] * 3 + ["good"] * 3
    assert not set(ids(shots.train)) & set(ids(shots.dev))


def test_the_draw_is_numpys_shuffle_and_each_labels_first():
    """RandomState(42).shuffle(range(10)) is 8 1 5 0 7 2 9 4 3 6; the even ones are bad."""
    shots = draw_shots(examples(10), LABELS, 2, seed=42)
    assert ids(shots.train) == ["train-8", "train-0", "train-1", "train-5"]
    assert ids(shots.dev) == ["train-2", "train-4", "train-7", "train-9"]


def test_another_seed_draws_others():
    one, again, other = (draw_shots(examples(40), LABELS, 4, seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert ids(one.train) != ids(other.train)


def test_what_was_held_out_is_put_back_in_its_place():
    rows = examples(6)
    assert whole_train([rows[0], rows[2], rows[5]], [rows[1], rows[4]]) == [
        rows[i] for i in (0, 1, 2, 4, 5)
    ]
    own = examples(2, split="validation")  # the control: a dev set with a file of its own
    assert whole_train(rows, own) == rows


def test_too_few_examples_are_refused():
    with pytest.raises(DataError, match=r"'bad' has 5 .*num_shots \(3\) asks for 6.*lower it"):
        draw_shots(examples(10), LABELS, 3, seed=0)
    with pytest.raises(ConfigError, match="num_shots is 1: it must be at least 2"):
        draw_shots(examples(10), LABELS, 1, seed=0)
