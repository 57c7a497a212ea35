"""Corrected labels: which are recalled, what they decide, and which entries are refused."""

import json

import pytest

from pgra.core import Example, Prediction
from pgra.errors import ConfigError, DataError
from pgra.memory.labels import (
    Correction,
    LabelMemory,
    PromptMemoryArguments,
    input_key,
    mix_labels,
)
from pgra.memory.log import Event, FeedbackLog

LABELS = ("negative", "positive")
GOOD, NEAR, FAR = "A film so bad it is good.", "a film so bad it's good", "Two hours of rain."


@pytest.fixture
def path(tmp_path):
    with FeedbackLog.open(tmp_path / "memory.sqlite") as log:
        log.write(GOOD, "positive", task="sst2")
        log.write(FAR, "positive", task="mr")
    return tmp_path / "memory.sqlite"


def opened(path, *, labels=LABELS, inputs=("text",), task="sst2", **changes):
    args = PromptMemoryArguments(memory=str(path), **changes)
    return LabelMemory(args, task=task, inputs=inputs, labels=labels, device="cpu")


def recalled(path, text, **changes):
    with opened(path, **changes) as memory:
        return [(one.example.id, one.score) for one in memory.recall({"text": text})]


def test_a_near_text_and_the_very_same_recall_a_correction_and_a_far_one_does_not(path):
    assert recalled(path, GOOD) == [("memory-1", 1)]
    near = 1 - 3 / 47  # " i" goes, "'" comes, of 24 and 23 letters
    assert recalled(path, NEAR) == [("memory-1", pytest.approx(near))]
    assert recalled(path, NEAR, memory_threshold=0.94) == []
    assert recalled(path, FAR) == []
    assert recalled(path, FAR, task="mr") == [("memory-2", 1)]


def test_entries_of_other_tasks_are_counted_and_none_of_the_task_is_a_warning(path, caplog):
    with opened(path) as memory:
        assert (memory.num_entries, memory.num_others) == (1, 1)
    assert not [one for one in caplog.records if one.levelname == "WARNING"]
    assert recalled(path, GOOD, task="cr") == []
    assert caplog.records[-1].levelname == "WARNING"
    assert "holds 0 corrections of task 'cr'; not used: 1 of 'mr', 1 of 'sst2'" in caplog.text


def test_a_label_that_the_task_does_not_have_is_refused_by_name(path):
    with FeedbackLog.open(path) as log:
        log.write(NEAR, "positiv", task="sst2")
    with pytest.raises(
        DataError, match=r"entry 3: unknown label 'positiv'\. Did you mean 'positive'\?.* correct 3"
    ):
        opened(path)
    with opened(path, labels=()):  # where answers are written, any is one
        pass


def test_the_order_of_writing_decides_nothing_but_of_one_text_the_last_word_counts(tmp_path):
    pairs = [(GOOD, "positive"), (FAR, "negative")]

    def found(name, *written):
        with FeedbackLog.open(tmp_path / name) as log:
            for key, label in written:
                log.write(key, label, task="sst2")
        with opened(tmp_path / name, memory_matches=2, memory_threshold=0) as memory:
            return [(one.entry.key, one.entry.feedback) for one in memory.recall({"text": NEAR})]

    assert found("one", *pairs) == found("other", *pairs[::-1]) == pairs
    assert found("last", *pairs, (GOOD, "negative")) == [(GOOD, "negative"), pairs[1]]


# BM25 of the only text: 0.115 a word that stands there once; all words, or all but one.
@pytest.mark.parametrize(("lookup", "gate"), [("edit", -1), ("bm25", 0.6)])
def test_what_stands_between_angle_brackets_is_text(tmp_path, lookup, gate):
    key = "A <br> terrible <br> film"
    with FeedbackLog.open(tmp_path / "m") as log:
        log.write(key, "negative", task="sst2")
    how = {"memory_lookup": lookup, "memory_threshold": gate}
    assert recalled(tmp_path / "m", key, **how)
    assert not recalled(tmp_path / "m", "A <br> great <br> film", **how)


def test_inputs_of_several_fields_are_keys_as_json(tmp_path):
    fields = {"question": "Who?", "sentence": 'A "man"\n came.'}
    key = input_key(fields, ("question", "sentence"))
    assert json.loads(key) == fields
    with FeedbackLog.open(tmp_path / "m") as log:
        log.write(key, "yes", task="qnli")
    args = {"inputs": ("question", "sentence"), "labels": ("no", "yes"), "task": "qnli"}
    with opened(tmp_path / "m", **args) as memory:
        (one,) = memory.recall(fields)
    assert one.example.fields == {"question": "Who?", "sentence": 'A "man" came.'}
    with FeedbackLog.open(tmp_path / "m") as log:
        log.write("Who? A man came.", "yes", task="qnli")
    with pytest.raises(DataError, match=r"entry 2: the key 'Who\? A man came\.' is no JSON object"):
        opened(tmp_path / "m", **args)


def corrections(*labels):
    examples = [Example(str(i), {}, label) for i, label in enumerate(labels)]
    return [Correction(Event(key="k", feedback="f"), 1.0, example) for example in examples]


def test_chances_are_mixed_with_the_shares_of_the_corrections():
    sure = Prediction("a", "negative", {"negative": 0.9, "positive": 0.1})
    mixed = mix_labels(sure, corrections("positive"), weight=0.6)
    assert mixed.label == "positive"
    assert mixed.scores == {"negative": pytest.approx(0.36), "positive": pytest.approx(0.64)}
    weak = mix_labels(sure, corrections("positive"), weight=0.3)  # 0.63 against 0.37
    assert (weak.label, weak.scores["positive"]) == ("negative", pytest.approx(0.37))
    split = mix_labels(sure, corrections("positive", "negative"), weight=0.6)
    assert split.scores == {"negative": pytest.approx(0.66), "positive": pytest.approx(0.34)}
    assert mix_labels(sure, [], weight=1) is sure


def test_a_gate_without_a_memory_and_one_of_another_look_up_are_refused():
    with pytest.raises(ConfigError, match=r"memory_threshold is 0\.5, and no memory is named"):
        PromptMemoryArguments(memory_threshold=0.5).check_named()
    with pytest.raises(ConfigError, match="threshold is 5: a relative edit distance is"):
        PromptMemoryArguments(memory="m", memory_threshold=5)
