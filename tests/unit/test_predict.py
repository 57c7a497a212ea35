"""How labels are scored and decided: alike, whatever the batches."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import reader_inputs
from small_training import lively

from pgra.errors import ModelError
from pgra.lm.load import find_model, load_tokenizer
from pgra.prompts import Verbalizer
from pgra.reader.predict import T5Classifier, decide

VERBALIZER = Verbalizer(
    {"negative": "terrible", "positive": "great", "mixed": "a b"}, "{text} It was <extra_id_0> ."
)
TEXTS = ["the red sea", "a film", "the old house by the sea and the garden", "plot", "a cast"]
ITEMS = [
    (f"test-{i}", tuple(f"{text} {'and so on ' * n}" for n in range(i % 3 + 1)), None)
    for i, text in enumerate(TEXTS)
]


def parts(folder, items=ITEMS):
    tokenizer = load_tokenizer(find_model(str(folder)))
    inputs = reader_inputs(tokenizer, VERBALIZER, items)
    return T5Classifier(lively(folder), tokenizer, VERBALIZER), inputs


def test_scores_do_not_depend_on_batches_or_order_or_the_mode(reader_dir, monkeypatch):
    classifier, inputs = parts(reader_dir)
    classifier.module.double()  # in float32 a sum of 80 rounds to 2e-5
    together = classifier.score(inputs)
    classifier.module.train()
    monkeypatch.setattr("pgra.reader.predict._MAX_ROWS", 1)
    alone = classifier.score(inputs)
    assert classifier.module.model.training  # dropout is off meanwhile
    np.testing.assert_allclose(alone, together, atol=1e-5)
    backwards = parts(reader_dir, ITEMS[::-1])[1]
    monkeypatch.setattr("pgra.reader.predict._MAX_ROWS", 2)
    found = classifier.score(backwards)
    np.testing.assert_allclose(found[::-1], together, atol=1e-5)
    changed = parts(reader_dir, [(name, ("the boats",), None) for name, _, _ in ITEMS])[1]
    assert abs(classifier.score(changed) - together).max() > 1e-3


def test_the_official_decode_takes_the_label_whose_word_is_written(t5_dir, monkeypatch):
    classifier, inputs = parts(t5_dir, ITEMS[:3])
    # One token is written: "a", the first of "a b", is no label's word, and so the first label.
    written = classifier.tokenizer(
        ["<extra_id_0> great", "<extra_id_0> terrible", "<extra_id_0> a"],
        add_special_tokens=False,
        padding=True,
        return_tensors="pt",
    ).input_ids
    monkeypatch.setattr(type(classifier.module), "write", lambda *_, **__: written)
    official = replace(classifier, decode="official")
    found = [prediction.label for prediction in official.predict(inputs)]
    assert sorted(found) == ["negative", "negative", "positive"]


def test_ties_go_to_the_first_label_and_numbers_must_be_some():
    (found,) = decide(["test-0"], np.zeros((1, 3), dtype=np.float32), VERBALIZER.labels)
    assert found.label == "negative"
    with pytest.raises(ModelError, match="'test-0'"):
        decide(["test-0"], np.full((1, 3), np.nan, dtype=np.float32), VERBALIZER.labels)
