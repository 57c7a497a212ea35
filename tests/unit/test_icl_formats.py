"""Prompts as they are written, what is taken off for nothing, and the vote."""

import numpy as np
import pytest

from pgra.core import Example
from pgra.data.tasks import load_task
from pgra.errors import ConfigError
from pgra.exemplars.selection import majority, vote_shares
from pgra.methods.answers import CONTENT_FREE, calibrate, content_free_fields
from pgra.prompts.fewshot import FORMATS, PromptFormat, answer_words, line_format, task_format

SHOWN = [
    Example("train-0", {"text": "A warm film."}, "positive"),
    Example("train-1", {"text": "Dull,\n\nlong."}, "negative"),
]


def test_kates_sentiment_prompt_is_that_of_its_table_11():
    written = task_format(load_task("sst2"), "kate").write(SHOWN, {"text": "Red apples."})
    assert written == (
        "Sentence: A warm film. Label: Positive\n\nSentence: Dull, long. Label: Negative\n\n"
        "Sentence: Red apples. Label:"
    )


def test_a_question_and_its_answer_stand_on_two_lines():
    shown = [Example("train-0", {"question": "who?"}, "Ada")]
    written = line_format("Q: {question}\nA:", ["question"]).write(shown, {"question": "where?"})
    assert written == "Q: who?\nA: Ada\n\nQ: where?\nA:"


def test_a_tasks_own_prompt_is_the_rerankers():
    task = load_task("sst2")
    format_ = task_format(task, "task")
    prompt = PromptFormat(format_.template, task.prompt_words).prompt(SHOWN)
    fields = {"text": "Red apples."}
    assert format_.write(SHOWN, fields) == prompt.prefix + prompt.suffix(fields)
    assert not format_.write((), fields).startswith("Follow")
    assert format_.fingerprint != task_format(task, "kate").fingerprint


@pytest.mark.parametrize("name", FORMATS)
def test_every_label_has_a_word_that_begins_no_other(name):
    for task in ("sst2", "trec", "cola", "mrpc"):
        words = answer_words(task_format(load_task(task), name).words)
        assert len(set(words)) == len(words)
        assert all(word.startswith(" ") for word in words)


def test_a_word_that_begins_another_is_refused():
    with pytest.raises(ConfigError, match=r"'un' \(a\) begins 'undone' \(b\)"):
        answer_words({"a": "un", "b": "undone"})


def test_calibration_by_hand():
    scores = np.log(np.array([[0.06, 0.04], [0.2, 0.2]], np.float32))
    # Without content the LM says 0.8 and 0.2 on the mean of three inputs.
    free = np.log(np.array([[[0.9, 0.1], [0.8, 0.2], [0.07, 0.03]]] * 2, np.float32))
    expected = np.array([[0.6 / 0.8, 0.4 / 0.2], [0.5 / 0.8, 0.5 / 0.2]])
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(np.exp(calibrate(scores, free)), expected, rtol=1e-5)
    even = np.zeros((2, 3, 2), np.float32)  # the control: an LM that leans to nothing
    plain = np.array([[0.6, 0.4], [0.5, 0.5]])
    np.testing.assert_allclose(np.exp(calibrate(scores, even)), plain, rtol=1e-5)


def test_chances_of_next_to_nothing_stay_finite():
    scores, free = np.array([[-2000.0, -1.0]], np.float32), np.zeros((1, 3, 2), np.float32)
    assert np.isfinite(calibrate(scores, free)).all()


def test_an_input_without_content_fills_every_field():
    assert content_free_fields(("text", "other"))[0] == {"text": "N/A", "other": "N/A"}
    assert len(content_free_fields(("text",))) == len(CONTENT_FREE) == 3


def test_a_tie_of_the_vote_goes_to_the_nearest_of_the_tied():
    assert majority(["c", "a", "b", "b", "a"]) == "a"
    assert majority(["c", "b", "a", "b", "a"]) == "b"  # the control
    assert majority(["c", "a", "a"]) == "a"
    assert vote_shares(["c", "a", "a", "c"], ["a", "b", "c"]) == [0.5, 0, 0.5]
