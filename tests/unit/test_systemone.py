"""System One's decisions, beside `pipeline("decision")` and by hand."""

import numpy as np
import pytest
import torch
from conftest import one_quick
from small_reranking import TRAIN
from transformers import pipeline
from transformers.decision import DECISION_PROMPT, DecisionConfig

import pgra
from pgra.errors import DataError
from pgra.integrations.systemone import Decider

STATE = "I was charged twice for my order and want a refund."
TONE = {
    "type": "choice",
    "instructions": "What is the tone?",
    "criteria": {"calm": "A polite message", "angry": None},
}
URGENT = {"type": "score", "instructions": "How urgent?", "criteria": ["can wait", "week", "now"]}
NAMES = {"positive": "calm", "negative": "angry"}
QUESTIONS = {"tone": TONE, "urgent": URGENT, "refund": {"type": "noul", "instructions": "Money?"}}


def chances(answers, name):
    return np.array(list(answers[name]["probabilities"].values()))


@pytest.fixture
def lm(lm_dirs):
    return pgra.CausalLM(str(lm_dirs["opt"]), device="cpu")


@pytest.mark.parametrize("name", one_quick(["opt", "bundled:smollm2-135m"], "opt"))
def test_an_opinion_is_the_pipelines_less_that_of_no_content(name, lm_dirs):
    lm = pgra.CausalLM(str(lm_dirs.get(name, name)), device="cpu")
    is_plain = lm.tokenizer.chat_template is None
    config = DecisionConfig(chat_template=f"{DECISION_PROMPT}\nAnswer:\n" if is_plain else None)
    model = lm.source.path
    theirs = pipeline("decision", model, decision_config=config, dtype=torch.float32, device="cpu")

    def logs(state, question):
        return np.log(chances(theirs({"state": state, "questions": {"x": question}}), "x"))

    for state in (STATE, {"subject": "환불", "body": ["é", 1]}):
        for asked in ("tone", "urgent"):
            raw = logs(state, QUESTIONS[asked])
            blanks = [logs(blank, QUESTIONS[asked]) for blank in ("N/A", "[MASK]", "")]
            for label_bias, values in (("none", raw), ("content-free", raw - np.mean(blanks, 0))):
                answers = Decider(lm, label_bias=label_bias).answer(state, QUESTIONS)
                expected = np.exp(values) / np.exp(values).sum()
                np.testing.assert_allclose(chances(answers, asked), expected, atol=1e-4)
            assert np.ptp(np.mean(blanks, 0)) > 1e-3  # the control


def test_what_is_no_question_or_too_long_is_refused(lm):
    for question, reason in (({"type": "yes"}, "must be one of"), (TONE, "reads")):
        with pytest.raises(DataError, match=reason):
            Decider(lm).answer("word " * lm.window, {"x": question})


def test_it_learns_from_feedback_and_a_later_answer_replaces_one(lm):
    decider = Decider(lm)
    other = Decider(lm)
    before = decider.answer(STATE, QUESTIONS)
    answers = {example.text: NAMES[str(example.label)] for example in TRAIN}
    other.learn(TRAIN[0].text, TONE, "calm")
    for text, answer in answers.items():
        decider.learn(text, TONE, answer)
        other.learn(text, TONE, answer)
    right = [decider.answer(text, {"": TONE})[""]["choice"] == answers[text] for text in answers]
    assert sum(right) > 0.8 * len(right)
    after = decider.answer(STATE, QUESTIONS)
    again = chances(other.answer(STATE, QUESTIONS), "tone")
    np.testing.assert_allclose(chances(after, "tone"), again, atol=1e-5)
    assert after["tone"] != before["tone"]
    assert after["urgent"] == before["urgent"]  # another question
    with pytest.raises(DataError, match="'furious' is not of"):
        decider.learn(STATE, TONE, "furious")


def test_a_saved_classifier_decides_the_question_of_its_labels_and_instructions(lm, encoder_dir):
    template = "{text}\nWhat is the tone?"
    ours = pgra.Classifier(lm, labels=["calm", "angry"], template=template, encoder="none")
    vectors = pgra.Classifier(
        str(encoder_dir), [(e.text, e.label) for e in TRAIN], device="cpu", encoder="none"
    )
    decider = Decider(lm, {"tone": ours, "mood": vectors})
    plain = Decider(lm).answer(STATE, QUESTIONS)
    (truth,) = ours.decide([STATE])
    answers = decider.answer(STATE, QUESTIONS)
    assert answers["tone"]["probabilities"] == pytest.approx(truth.scores, abs=1e-5)
    np.testing.assert_allclose(chances(answers, "urgent"), chances(plain, "urgent"), atol=1e-5)
    mood = {"type": "choice", "criteria": dict.fromkeys(vectors.classes_)}
    assert decider.answer(STATE, {"mood": mood})["mood"]["choice"] == vectors.predict(STATE)
    for state in (STATE, f"{STATE} Now!"):
        decider.learn(state, TONE, "angry")
    assert ours.decide([STATE])[0].scores["angry"] != truth.scores["angry"]
    other = {**TONE, "criteria": {"calm": None, "rude": None}}
    with pytest.raises(DataError, match="the classifier 'tone'"):
        decider.answer(STATE, {"tone": other})
    with pytest.raises(DataError, match="give --lm"):
        Decider(None, {"mood": vectors}).answer(STATE, {"tone": TONE})
