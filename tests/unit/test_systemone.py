"""System One's decisions, beside `pipeline("decision")` and by hand."""

import numpy as np
import pytest
import torch
from small_reranking import TRAIN, plain_lm
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


def chances(answers):
    """The probabilities of all answers, in order."""
    values = [list(one.get("probabilities", one).values()) for one in answers.values()]
    return np.array([value for line in values for value in line if isinstance(value, float)])


@pytest.fixture
def lm(lm_dirs):
    return pgra.CausalLM(str(lm_dirs["opt"]), device="cpu")


def logits(lm_dirs, state, question):
    """The logits of A and B after a prompt, by a call of its own of a stock model."""
    model, tokenizer = plain_lm(lm_dirs["opt"], with_head=True)
    config = DecisionConfig(chat_template=f"{DECISION_PROMPT}\nAnswer:\n")
    ((inputs, _),) = config.prepare_inputs({"state": state, "questions": {"": question}}, tokenizer)
    ids = tokenizer(["A", "B"], add_special_tokens=False).input_ids
    return model(inputs["input_ids"]).logits[0, -1, [token for (token,) in ids]].detach().numpy()


def test_an_opinion_is_the_lms_less_that_of_no_content(lm, lm_dirs):
    raw = logits(lm_dirs, STATE, TONE)
    bias = np.mean([logits(lm_dirs, blank, TONE) for blank in ("N/A", "[MASK]", "")], axis=0)
    assert abs(bias[0] - bias[1]) > 1e-3  # the control
    for label_bias, values in (("none", raw), ("content-free", raw - bias)):
        decider = Decider(lm, label_bias=label_bias)
        expected = np.exp(values) / np.exp(values).sum()
        for questions in ({"x": TONE}, {**QUESTIONS, "x": TONE}):  # others change nothing
            answer = decider.answer(STATE, questions)["x"]
            assert list(answer["probabilities"].values()) == pytest.approx(expected, abs=1e-5)
    for question, reason in ((({"type": "yes"}), "must be one of"), (TONE, "reads")):
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
    assert chances(after) == pytest.approx(chances(other.answer(STATE, QUESTIONS)), abs=1e-5)
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
    left = [answers["urgent"], plain["urgent"]]
    assert chances({"": left[0]}) == pytest.approx(chances({"": left[1]}), abs=1e-5)
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


@pytest.mark.slow
def test_without_calibration_it_is_the_decision_pipeline():
    lm = pgra.CausalLM("bundled:smollm2-135m", device="cpu")
    model = lm.source.path
    theirs = pipeline("decision", model=model, dtype=torch.float32, device="cpu")
    questions = {**QUESTIONS, "bare": {"type": "noul"}}
    for state in (STATE, {"subject": "환불", "body": ["é", 1]}):
        expected = theirs({"state": state, "questions": questions})
        ours = Decider(lm, label_bias="none").answer(state, questions)
        np.testing.assert_allclose(chances(ours), chances(expected), atol=1e-4)
        assert abs(chances(Decider(lm).answer(state, questions)) - chances(ours)).max() > 0.01
