"""A head on an LM's states as a method, and from Python: by hand, from stock states."""

import numpy as np
import pandas as pd
import pytest
from datasets import Dataset
from small_reranking import TEMPLATE, TRAIN, WORDS, plain_lm

import pgra
from pgra.arrays import log_softmax
from pgra.data.tasks import Task
from pgra.errors import ArtifactError, ConfigError
from pgra.rerank.head import affine, fit_head

PAIRS = [(example.text, example.label) for example in TRAIN]
TASK = Task(name="own", labels=tuple(WORDS), prompt=TEMPLATE.body, prompt_words=WORDS)


def stock_states(lm_dir, texts):
    """The state at each prompt's end, by a call of its own of a stock model."""
    model, tokenizer = plain_lm(lm_dir)
    states = [
        model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1] for text in texts
    ]
    return np.stack([state.detach().numpy() for state in states])


def test_its_scores_are_those_of_a_head_on_stock_states(lm_dirs):
    found = pgra.Classifier(str(lm_dirs["opt"]), PAIRS, task=TASK, dtype="float32", device="cpu")
    asked = ["A great film by the sea.", "Dull!"]
    shown = [f"{TEMPLATE.body}\nThe answer is".format(text=text) for text, _ in PAIRS]
    targets = np.array([list(WORDS).index(label) for _, label in PAIRS])
    head = fit_head(stock_states(lm_dirs["opt"], shown), targets, 2, shown)
    states = stock_states(
        lm_dirs["opt"], [f"{TEMPLATE.body}\nThe answer is".format(text=text) for text in asked]
    )
    logits = affine((states - head.stats[0]) / head.stats[1], head.weights)
    expected = np.exp(log_softmax(logits))
    answers = found.predict(asked)
    scores = [[one.scores[label] for label in WORDS] for one in answers]
    np.testing.assert_allclose(scores, expected, atol=2e-3)
    assert found.predict(asked[0]) == answers[0]
    assert [one.label for one in found.predict([text for text, _ in PAIRS])] == [
        label for _, label in PAIRS
    ]  # the control: it learnt something


def test_a_saved_one_decides_alike(lm_dirs, tmp_path):
    rows = [(text, int(label == "positive")) for text, label in PAIRS]
    ours = pgra.Classifier(str(lm_dirs["opt"]), rows, num_exemplars=2, device="cpu")
    ours.save(tmp_path)
    again = pgra.Classifier.load(tmp_path, device="cpu")
    assert again.predict(["A great film."]) == ours.predict(["A great film."])
    assert (again.labels, again.accuracy) == (ours.labels, ours.accuracy)
    with pytest.raises(ArtifactError, match="Classifier.load"):
        pgra.Reranker.load(tmp_path, device="cpu")


def test_without_a_task_the_labels_are_the_examples_as_they_were_given(lm_dirs, tmp_path):
    def labels(rows):
        found = pgra.Classifier(str(lm_dirs["opt"]), rows, device="cpu")
        assert list(found.labels) == list(found.predict("a film").scores)
        return list(found.labels)

    rows = [{"text": text, "label": 10 - (label == "positive")} for text, label in PAIRS]
    assert labels(rows) == [9, 10]
    table = pd.DataFrame(PAIRS, columns=["text", "label"])
    table.to_csv(tmp_path / "train.csv")
    named = Dataset.from_pandas(table).class_encode_column("label")
    assert labels(tmp_path / "train.csv") == labels(table) == labels(named) == [*WORDS]
    with pytest.raises(ConfigError, match="'negative'"):  # copies are one text
        labels([*PAIRS[1::2], PAIRS[0], (PAIRS[0][0].upper(), "negative")])
