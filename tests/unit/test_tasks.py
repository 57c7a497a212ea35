"""Task YAMLs: the shipped ones, and each refusal."""

import string

import pytest
import yaml

from pgra.data.tasks import (
    generation_task_names,
    load_generation_task,
    load_task,
    task_names,
)
from pgra.errors import ConfigError

MINIMAL = {
    "labels": ["no", "yes"],
    "prompt": "Is it?\n{text}",
    "reader_template": "{text} <extra_id_0>",
    "verbalizer": {"no": "wrong", "yes": "right"},
}


PAPERS = ["cola", "cr", "mpqa", "mr", "sst2", "sst5", "subj", "trec"]


@pytest.mark.parametrize("name", generation_task_names())
def test_every_shipped_task_of_written_answers_is_sound(name):
    task = load_generation_task(name)
    shown = task.frame.format_map({field: "X" for field in task.inputs})
    assert shown in ("Q: X\nA:", "Table: X Sentence:")
    assert task.hub is not None


@pytest.mark.parametrize("name", task_names())
def test_every_shipped_task_is_whole(name):
    task = load_task(name)
    assert task.name == name
    assert set(task.verbalizer) == set(task.prompt_words) == set(task.labels)
    assert {f for _, f, _, _ in string.Formatter().parse(task.prompt) if f} == set(task.inputs)
    if name in PAPERS:
        assert "<extra_id_0>" in task.reader_template
        assert set(task.sizes) == {"train", "test"}
        assert task.hub.splits["train"] == "train"
        assert task.answer == "The answer is"


WRITTEN = {
    "kind": "question",
    "inputs": ["question"],
    "frame": "Q: {question}\nA:",
    "metrics": ["exact_match"],
    "num_exemplars": 4,
}
BAD = {
    "a task has at least two": {"labels": ["no"], "verbalizer": {"no": "a"}},
    "labels names something twice": {"labels": ["no", "no "]},
    "unknown metric 'acc'": {"metric": "acc"},
    "prompt holds no field; put {text}": {"prompt": "Is it?"},
    "verbalizer has no word for 'yes'": {"verbalizer": {"no": "wrong"}},
    "verbalizer has 'right' for both 'no' and 'yes'": {
        "verbalizer": {"no": "right ", "yes": "right"}
    },
    "prompt does not hold {question}, the first input": {
        "inputs": ["question", "text"],
        "prompt": "Is it so? {text}",
    },
    "'no' is in labels and in ignored_labels too": {"ignored_labels": ["no"]},
    "an input cannot be named 'label'": {"inputs": ["text", "label"]},
    "hub.labels are no, maybe": {"hub": {"id": "a/b", "labels": ["no", "maybe"]}},
    "unknown key of local.columns 'txt'": {"local": {"columns": {"txt": "claim"}}},
    "does not say which is the test split": {"local": {"splits": {"train": "train"}}},
    "uses one split twice": {"local": {"splits": {"train": "a", "test": "b", "validation": "b"}}},
}
BAD_WRITTEN = {
    "parent compares with a table": {"metrics": ["parent"]},
    "frame ends in a space": {"frame": "Q: {question} "},
    "frame does not show the input {table}": {"inputs": ["question", "table"]},
    "num_exemplars is 0: it must be at least 1": {"num_exemplars": 0},
    "hub.labels are for tasks with labels": {"hub": {"id": "a/b", "labels": ["a"]}},
}


@pytest.mark.parametrize(
    ("load", "whole", "change", "message"),
    [
        *((load_task, MINIMAL, change, message) for message, change in BAD.items()),
        *((load_generation_task, WRITTEN, c, message) for message, c in BAD_WRITTEN.items()),
    ],
)
def test_contradictory_yaml_is_refused(load, whole, change, message, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(whole))
    assert load(str(path)).name == "mine"  # the control: four keys are a task
    path.write_text(yaml.safe_dump({**whole, **change}))
    with pytest.raises(ConfigError, match=message) as caught:
        load(str(path))
    assert "mine.yaml" in str(caught.value)
    with pytest.raises(ConfigError, match=r"unknown task.*Did you mean '.*'\?.*give its path"):
        load({load_task: "sst3", load_generation_task: "webquestion"}[load])
