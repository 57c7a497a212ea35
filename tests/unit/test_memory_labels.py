"""Corrected labels: which are recalled, what they decide, and which entries are refused."""

import json

import pytest

from pgra.core import Example, Prediction
from pgra.errors import ConfigError
from pgra.memory.labels import (
    Correction,
    LabelMemory,
    PromptMemoryArguments,
    input_key,
    mix_labels,
    overrule,
)
from pgra.memory.log import Event

LABELS = ("negative", "positive")
GOOD, NEAR, FAR = "A film so bad it is good.", "a film so bad it's good", "Two hours of rain."


@pytest.fixture
def filled(log):
    log.write(GOOD, "positive", task="sst2")
    log.write(FAR, "positive", task="mr")
    return log


def opened(log, *, labels=LABELS, inputs=("text",), task="sst2", **changes):
    args = PromptMemoryArguments(memory=str(log.path), **changes)
    return LabelMemory(args, task=task, inputs=inputs, labels=labels, device="cpu")


def recalled(log, text, **changes):
    with opened(log, **changes) as memory:
        return [(one.example.id, one.score) for one in memory.recall({"text": text})]


def test_a_near_text_and_the_very_same_recall_a_correction_and_a_far_one_does_not(filled):
    assert recalled(filled, GOOD) == [("memory-1", 1)]
    near = 1 - 3 / 47  # " i" goes, "'" comes, of 24 and 23 letters
    assert recalled(filled, NEAR) == [("memory-1", pytest.approx(near))]
    assert recalled(filled, NEAR, memory_threshold=0.94) == []
    assert recalled(filled, FAR) == []  # of another task
    assert recalled(filled, FAR, task="mr") == [("memory-2", 1)]
    filled.write(NEAR, "no label", task="sst2")
    assert recalled(filled, NEAR, labels=()) == [("memory-3", 1)]  # answers that are written


def test_the_order_of_writing_decides_nothing_but_of_one_text_the_last_word_counts(log):
    pairs = [(GOOD, "positive"), (FAR, "negative")]

    def found(*written):
        log.forget(*(entry.id for entry in log.entries()))
        for key, label in written:
            log.write(key, label, task="sst2")
        with opened(log, memory_matches=2, memory_threshold=0) as memory:
            return [(one.entry.key, one.entry.feedback) for one in memory.recall({"text": NEAR})]

    assert found(*pairs) == found(*pairs[::-1]) == pairs
    assert found(*pairs, (GOOD, "negative")) == [(GOOD, "negative"), pairs[1]]


# BM25 of the only text: 0.115 a word that stands there once; all words, or all but one.
@pytest.mark.parametrize(("lookup", "gate"), [("edit", -1), ("bm25", 0.6)])
def test_what_stands_between_angle_brackets_is_text(log, lookup, gate):
    key = "A <br> terrible <br> film"
    log.write(key, "negative", task="sst2")
    how = {"memory_lookup": lookup, "memory_threshold": gate}
    assert recalled(log, key, **how)
    assert not recalled(log, "A <br> great <br> film", **how)


def test_inputs_of_several_fields_are_keys_as_json(log):
    fields = {"question": "Who?", "sentence": 'A "man"\n came.'}
    key = input_key(fields, list(fields))
    assert json.loads(key) == fields
    log.write(key, "yes", task="qnli")
    args = {"inputs": list(fields), "labels": ("no", "yes"), "task": "qnli"}
    with opened(log, **args) as memory:
        (one,) = memory.recall(fields)
    assert one.example.fields == {"question": "Who?", "sentence": 'A "man" came.'}


def corrections(*labels):
    examples = [Example(str(i), {}, label) for i, label in enumerate(labels)]
    return [Correction(Event(key="k", feedback="f"), 1.0, example) for example in examples]


def test_chances_are_mixed_with_the_shares_of_the_corrections():
    sure = Prediction("a", "negative", {"negative": 0.9, "positive": 0.1})
    for labels, weight, decided, chance in (
        (["positive"], 0.6, "positive", 0.64),
        (["positive"], 0.3, "negative", 0.37),
        (["positive", "negative"], 0.6, "negative", 0.34),
    ):
        mixed = mix_labels(sure, corrections(*labels), weight=weight)
        assert (mixed.label, mixed.scores["positive"]) == (decided, pytest.approx(chance))
        assert sum(mixed.scores.values()) == pytest.approx(1)
    assert mix_labels(sure, [], weight=1) is sure


def test_to_override_the_correction_of_an_equal_text_decides_and_no_other(log):
    log.write(GOOD, "negative", task="sst2")
    log.write(FAR, "positive", task="sst2")
    sure = Prediction("a", "positive", {"negative": 0.01, "positive": 0.99})

    def decided(text, **changes):
        how = {"memory_as": "override", "memory_lookup": "bm25", "memory_threshold": 99}
        with opened(log, **(how | changes)) as memory:
            found = memory.recall({"text": text})
        mixed = mix_labels(sure, found, weight=0.1)
        return mixed.label, overrule(sure, found).label, [one.entry.feedback for one in found]

    same = "a film so  bad it is GOOD"
    assert decided(same) == ("negative", "negative", ["negative"])  # no gate stops it
    # The controls: a text that is only near, and the same one as an exemplar.
    near = {"memory_lookup": "edit", "memory_threshold": -5}
    assert decided(NEAR, **near) == ("positive", "positive", ["negative"])
    assert decided(GOOD, memory_as="exemplar", **near) == ("positive", "positive", ["negative"])
    # A scope's own word counts before what all share, whichever is newer, and in its scope alone.
    log.write(GOOD, "positive", task="sst2", scope="anna")
    log.write(same, "negative", task="sst2")
    assert decided(GOOD, memory_scope="anna")[1] == "positive"
    assert decided(GOOD)[1] == decided(GOOD, memory_scope="bert")[1] == "negative"


def test_a_gate_without_a_memory_is_refused():
    with pytest.raises(ConfigError, match=r"memory_threshold is 0\.5, and no memory is named"):
        PromptMemoryArguments(memory_threshold=0.5).check_named()
