"""`pgra.Classifier` from no example to many, and as an estimator of scikit-learn's."""

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import SENTENCES
from datasets import Dataset
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.utils import estimator_checks
from small_reranking import TRAIN, plain_lm

import pgra
from pgra.arrays import log_softmax
from pgra.errors import ArtifactError, ConfigError, DataError

PAIRS = [(example.text, example.label) for example in TRAIN]
TEXTS = [text for text, _ in PAIRS]
NAMES = [label for _, label in PAIRS]
ASKED = ["A great film by the sea.", "Dull!", *SENTENCES[:10]]


def make(lm_dirs, *rows, encoder="none", **options):
    return pgra.Classifier(str(lm_dirs["opt"]), *rows, encoder=encoder, device="cpu", **options)


def stock_logits(lm_dir, prompts, words):
    """The logits of words after prompts, by a call of its own of a stock model with its head."""
    model, tokenizer = plain_lm(lm_dir, with_head=True)
    ids = [tokenizer(f" {word}", add_special_tokens=False).input_ids for word in words]
    logits = [model(**tokenizer(p, return_tensors="pt")).logits[0, -1].detach() for p in prompts]
    return np.array([[float(line[word].mean()) for word in ids] for line in logits])


def test_without_an_example_it_is_the_lms_opinion_less_its_mean(lm_dirs):
    labels = {"good": "a warm film", "bad": "a dull one"}
    found = make(lm_dirs, labels=labels)
    prompt = "Labels:\ngood: a warm film\nbad: a dull one\n\nText: {}\nLabel:"
    logits = stock_logits(lm_dirs["opt"], [prompt.format(text) for text in ASKED], labels)
    blank = stock_logits(lm_dirs["opt"], [prompt.format(t) for t in ("N/A", "[MASK]", "")], labels)

    def check(chances, mean, number):
        expected = np.exp(log_softmax((logits[number] - mean) / 2))  # one view weighs a half
        np.testing.assert_allclose(chances, expected, atol=2e-3)

    check(found.predict_proba(ASKED[:2]), blank.mean(axis=0), slice(2))
    found.predict(ASKED[2:])  # then twelve were seen; one that comes again counts once
    check(found.predict_proba(ASKED[:1]), logits.mean(axis=0), slice(1))
    assert abs(blank.mean(axis=0) - logits.mean(axis=0)).max() > 1e-3  # the control
    assert list(found.classes_) == ["good", "bad"]


def test_words_that_begin_alike_are_scored_whole(lm_dirs):
    words = ["very good", "very bad"]
    model, tokenizer = plain_lm(lm_dirs["opt"], with_head=True)

    def score(text, word):
        begin = tokenizer(f"Text: {text}\nLabel:").input_ids
        after = tokenizer(f" {word}", add_special_tokens=False).input_ids
        logits = model(torch.tensor([begin + after])).logits[0].detach().numpy()
        chances = log_softmax(logits[len(begin) - 1 : -1])
        return sum(chances[row, token] for row, token in enumerate(after))

    found = make(lm_dirs, labels=words)
    found.predict(ASKED)
    scores = np.array([[score(text, word) for word in words] for text in ASKED])
    expected = np.exp(log_softmax((scores - scores.mean(axis=0)) / 2))
    np.testing.assert_allclose(found.predict_proba(ASKED), expected, atol=2e-3)
    assert abs(expected - 0.5).max() > 1e-3  # the control: the words differ


def test_it_learns_and_a_saved_one_decides_alike(lm_dirs, tmp_path):
    ours = make(lm_dirs, PAIRS, num_exemplars=2)
    assert np.mean(ours.predict(TEXTS) == np.array(NAMES)) > 0.8  # it learnt something
    ours.save(tmp_path)
    again = pgra.Classifier.load(tmp_path, device="cpu")
    np.testing.assert_array_equal(again.predict_proba(ASKED), ours.predict_proba(ASKED))
    assert again.report().accuracy == ours.report().accuracy
    again.add("A warm film.", NAMES[0])  # and goes on
    assert again.report().count == ours.report().count + 1
    shown = next(text for text in TEXTS if text in ours._reader.prompted.prompt.prefix)
    with pytest.raises(ConfigError, match="fit it again"):
        again.remove(shown)  # its other texts are not there to write a prompt of
    with pytest.raises(ArtifactError, match="Classifier.load"):
        pgra.Reranker.load(tmp_path, device="cpu")


def test_a_text_that_is_removed_was_never_learned_from(lm_dirs):
    ours = make(lm_dirs, PAIRS, num_exemplars=2)
    before = ours.predict_proba(ASKED)
    ours.add("A new film of the sea.", "negative")
    assert abs(ours.predict_proba(ASKED) - before).max() > 1e-4  # the control
    np.testing.assert_array_equal(
        ours.remove("A new film of the sea.").predict_proba(ASKED), before
    )
    shown = next(text for text in TEXTS if text in ours._reader.prompted.prompt.prefix)
    rest = [pair for pair in PAIRS if pair[0] != shown]
    fresh = make(lm_dirs, rest, num_exemplars=2)
    np.testing.assert_array_equal(
        ours.remove(shown).predict_proba(ASKED), fresh.predict_proba(ASKED)
    )
    with pytest.raises(ConfigError, match="not learned from"):
        ours.remove("never seen")


def test_an_encoder_alone_decides_too(lm_dirs, encoder_dir, tmp_path):
    alone = pgra.Classifier(pgra.Encoder(str(encoder_dir), device="cpu"), PAIRS)
    assert np.mean(alone.predict(TEXTS) == np.array(NAMES)) > 0.6
    joined = make(lm_dirs, PAIRS, encoder=str(encoder_dir)).predict_proba(ASKED)
    assert abs(joined - make(lm_dirs, PAIRS).predict_proba(ASKED)).max() > 1e-3
    assert "nearest neighbour" in str(alone.report())
    alone.save(tmp_path)
    again = pgra.Classifier.load(tmp_path, device="cpu")
    np.testing.assert_array_equal(again.predict_proba(ASKED), alone.predict_proba(ASKED))


def test_it_is_an_estimator(lm_dirs):
    lm = pgra.CausalLM(str(lm_dirs["opt"]), device="cpu")
    ours = pgra.Classifier(lm, encoder="none", num_exemplars=2)
    for check in ("get_params_invariance", "set_params", "no_attributes_set_in_init"):
        getattr(estimator_checks, f"check_{check}")("Classifier", ours)
    assert clone(ours).lm is lm  # no copy of the weights
    scores = cross_val_score(ours, TEXTS, NAMES, cv=3)
    assert len(scores) == 3
    assert not np.isnan(scores).any()
    search = GridSearchCV(ours, {"num_exemplars": [0, 2]}, cv=2).fit(TEXTS, NAMES)
    assert search.predict(TEXTS).shape == (len(TEXTS),)
    with pytest.raises(ConfigError, match="knows no labels"):
        ours.predict("a film")


def test_labels_are_those_that_were_given(lm_dirs, tmp_path):
    def labels(rows, y=None):
        found = make(lm_dirs, num_exemplars=0).fit(rows, y)
        assert found.predict("a film") in found.classes_.tolist()
        return found.classes_.tolist()

    rows = [{"text": text, "label": 10 - (label == "positive")} for text, label in PAIRS]
    assert labels(rows) == labels(TEXTS, np.array([row["label"] for row in rows])) == [9, 10]
    table = pd.DataFrame(PAIRS, columns=["text", "label"])
    table.to_csv(tmp_path / "train.csv")
    named = Dataset.from_pandas(table).class_encode_column("label")
    columns = {"text": TEXTS, "label": [f" {name} " for name in NAMES]}
    names = ["negative", "positive"]
    for kind in (tmp_path / "train.csv", table, named, columns):
        assert labels(kind) == names
    assert labels(TEXTS, NAMES) == names
    with pytest.raises(DataError, match="3 texts, and y 2"):
        labels(TEXTS[:3], [1, 2])
    with pytest.raises(DataError, match="no label"):
        labels(TEXTS[:3], ["a", "b", " "])
    with pytest.raises(ConfigError, match="at least two"):
        labels(TEXTS[:3], ["a", "a", "a"])
