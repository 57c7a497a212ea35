"""Tasks' YAMLs: the shipped ones, and each refusal."""

import string

import pytest
import yaml

from pgra.data.tasks import GenerationTask, Task
from pgra.errors import ConfigError

PAPERS = ["cola", "cr", "mpqa", "mr", "sst2", "sst5", "subj", "trec"]


def test_every_shipped_task_is_whole():
    for task in map(GenerationTask.load, GenerationTask.names()):
        shown = task.frame.format_map({field: "X" for field in task.inputs})
        assert shown in ("Q: X\nA:", "Table: X Sentence:")
    for task in map(Task.load, Task.names()):
        assert set(task.verbalizer) == set(task.prompt_words) == set(task.labels)
        assert {f for _, f, _, _ in string.Formatter().parse(task.prompt) if f} == {*task.inputs}
        if task.name in PAPERS:
            assert "<extra_id_0>" in task.reader_template
            assert set(task.sizes) == {"train", "test"}
            assert task.answer == "The answer is"


PLAIN = {
    "labels": ["no", "yes"],
    "prompt": "Is it?\n{text}",
    "reader_template": "{text} <extra_id_0>",
    "verbalizer": {"no": "bad", "yes": "good"},
}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "labels"),
        ({**PLAIN, "labels": "a"}, "labels is 'a'"),
        ({**PLAIN, "metric": ""}, "metric is ''"),
    ],
)
def test_what_does_not_fit_is_named_with_its_file(values, message, tmp_path):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=rf"mine\.yaml: .*{message}"):
        Task.load(tmp_path / "mine.yaml")


def test_every_task_comes_back_from_what_it_writes(tmp_path):
    own = Task(name="own", **PLAIN, answer="")
    for task in (Task.load("trec"), Task.load("mrpc"), GenerationTask.load("totto"), own):
        path = tmp_path / f"{task.name}.yaml"
        path.write_text(task.to_yaml())
        assert type(task).load(path) == task


def test_a_task_needs_no_file_and_its_answer_line_may_be_empty():
    made = Task(name="mine", **PLAIN, answer="")
    assert (made.labels, made.prompt_words) == (("no", "yes"), {"no": "no", "yes": "yes"})
    with pytest.raises(ConfigError, match="labels .*1"):
        Task(name="mine", **{**PLAIN, "labels": ["no", 1]})
