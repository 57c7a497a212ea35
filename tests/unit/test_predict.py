"""How labels are scored and decided: by plain T5's chances, whatever the batches."""

import numpy as np
import pytest
import torch
from conftest import reader_inputs
from oracle import ScriptedT5

from pgra.errors import ModelError
from pgra.lm.load import find_model, load_tokenizer
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.calibrate import decide, label_chances
from pgra.reader.fid import FusionReader
from pgra.reader.predict import Decision, T5Classifier

WORDS = {"negative": "terrible", "positive": "great", "mixed": "a b"}
VERBALIZER = Verbalizer(WORDS, "{text} It was <extra_id_0> .")
LABELS = VERBALIZER.labels
TEXTS = ["the red sea", "a film", "the old house by the sea and the garden", "plot", "a cast"]
ITEMS = [
    (f"test-{i}", tuple(f"{text} {'and so on ' * n}" for n in range(i % 3 + 1)), None)
    for i, text in enumerate(TEXTS)
]


@pytest.fixture(scope="module")
def tokenizer(t5_dir):
    return load_tokenizer(find_model(str(t5_dir)))


@pytest.fixture(scope="module")
def inputs(tokenizer):
    return reader_inputs(tokenizer, VERBALIZER, ITEMS)


@pytest.fixture(scope="module")
def reader(t5_dir):
    return lively(t5_dir)


def lively(folder):
    reader = FusionReader.from_name(str(folder))
    generator = torch.Generator().manual_seed(5)
    for parameter in reader.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator) * 0.1
    return reader


def predict(reader, tokenizer, inputs, verbalizer=VERBALIZER, *how):
    return T5Classifier(reader, tokenizer, verbalizer, *how).predict(inputs)


def chances(predictions):
    return np.array([list(p.scores.values()) for p in predictions])


def assert_same(found, expected):
    pairs = [[(p.example_id, p.label) for p in predictions] for predictions in (found, expected)]
    assert pairs[0] == pairs[1]
    np.testing.assert_allclose(chances(found), chances(expected), atol=1e-5)


def test_predictions_do_not_depend_on_batches_or_order(reader_dir):
    reader, tokenizer = lively(reader_dir), load_tokenizer(find_model(str(reader_dir)))
    inputs = reader_inputs(tokenizer, VERBALIZER, ITEMS)
    together = predict(reader, tokenizer, inputs)
    assert_same(predict(reader, tokenizer, inputs, VERBALIZER, Decision(), 1), together)
    back = reader_inputs(tokenizer, VERBALIZER, ITEMS[::-1])
    assert_same(predict(reader, tokenizer, back, VERBALIZER, Decision(), 60)[::-1], together)
    changed = [(name, ("the boats",), None) for name, _, _ in ITEMS]
    other = predict(reader, tokenizer, reader_inputs(tokenizer, VERBALIZER, changed))
    assert other[0].scores != together[0].scores


def test_dropout_is_off_and_training_mode_comes_back(reader, tokenizer, inputs):
    expected = predict(reader, tokenizer, inputs)
    reader.train()
    assert_same(predict(reader, tokenizer, inputs), expected)
    assert reader.model.training
    reader.eval()


def test_ties_go_to_the_first_label_and_numbers_must_be_some():
    (found,) = decide(["test-0"], np.zeros((1, 3), dtype=np.float32), LABELS)
    assert found.label == "negative"
    with pytest.raises(ModelError, match="scores of example 'test-0' are NaN"):
        decide(["test-0"], np.full((1, 3), np.nan, dtype=np.float32), LABELS)


def test_a_temperature_flattens_chances_and_changes_no_decision():
    scores = np.log(np.array([[0.8, 0.15, 0.05]], dtype=np.float32))
    (cold,), (warm,) = label_chances(scores), label_chances(scores, 2.0)
    np.testing.assert_allclose(cold, [0.8, 0.15, 0.05], rtol=1e-5)
    roots = np.sqrt([0.8, 0.15, 0.05])
    np.testing.assert_allclose(warm, roots / roots.sum(), rtol=1e-5)
    for temperature in (0.1, 1.0, 9.0):
        (found,) = decide(["test-0"], scores, LABELS, temperature=temperature)
        assert found.label == "negative"


def test_all_tokens_of_a_word_count_not_only_its_first(tokenizer):
    """By hand: "a b" has 0.6 * 0.5 = 0.30, "sea" 0.4 * 0.9 = 0.36, though "a" is likelier first."""
    a, b, sea = tokenizer("a b sea", add_special_tokens=False).input_ids
    end, other = tokenizer.eos_token_id, tokenizer.unk_token_id
    script = {
        (): {a: 0.6, sea: 0.4},
        (a,): {b: 0.5, other: 0.5},
        (a, b): {end: 1.0},
        (sea,): {end: 0.9, other: 0.1},
    }
    # Behind a shorter word stands padding.
    model = ScriptedT5(tokenizer, lambda query, written: script.get(written, {}))
    verbalizer = Verbalizer({"two": "a b", "one": "sea"}, "{text} It was")
    parts = FusionReader(model.eval()), tokenizer, reader_inputs(tokenizer, verbalizer, ITEMS[:1])
    (found,) = predict(*parts, verbalizer)
    assert found.label == "one"
    assert chances([found])[0] == pytest.approx([0.30 / 0.66, 0.36 / 0.66], abs=1e-5)
    # The mean prefers the longer word: 0.30 over 3 tokens, the end too, against 0.36 over 2.
    (found,) = predict(*parts, verbalizer, Decision(length_normalize=True))
    assert found.label == "two"
    weights = np.array([0.30 ** (1 / 3), 0.36 ** (1 / 2)])
    assert chances([found])[0] == pytest.approx(weights / weights.sum(), abs=1e-5)
    # One token is "a", which is no label's word, and so the first label.
    (found,) = predict(*parts, verbalizer, Decision("official"))
    assert found.label == "two"
