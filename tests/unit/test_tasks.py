"""YAMLs: the shipped tasks and each refusal, and how type hints read any of them."""

import string
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pgra.config import from_yaml
from pgra.data.tasks import GenerationTask, Task
from pgra.errors import ConfigError

PAPERS = ["cola", "cr", "mpqa", "mr", "sst2", "sst5", "subj", "trec"]


@pytest.mark.parametrize("name", GenerationTask.names())
def test_every_shipped_task_of_written_answers_is_sound(name):
    task = GenerationTask.load(name)
    shown = task.frame.format_map({field: "X" for field in task.inputs})
    assert shown in ("Q: X\nA:", "Table: X Sentence:")
    assert task.hub is not None


@pytest.mark.parametrize("name", Task.names())
def test_every_shipped_task_is_whole(name):
    task = Task.load(name)
    assert task.name == name
    assert set(task.verbalizer) == set(task.prompt_words) == set(task.labels)
    assert {f for _, f, _, _ in string.Formatter().parse(task.prompt) if f} == set(task.inputs)
    if name in PAPERS:
        assert "<extra_id_0>" in task.reader_template
        assert set(task.sizes) == {"train", "test"}
        assert task.hub.splits["train"] == "train"
        assert task.answer == "The answer is"


# YAMLs become dataclasses by their type hints: what fits comes back, what does not is named.


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\x85\u2028\u2029"), min_size=1)


@dataclass(frozen=True)
class Inner:
    word: str
    share: float = 0.5


@dataclass(frozen=True)
class Whole:
    word: str
    number: int = 0
    is_loud: bool = False
    color: Literal["red", "blue"] = "red"
    names: tuple[str, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)
    inner: Inner | None = None
    several: str | list[str] = "one"
    anything: Any = None
    folder: Path | None = None
    name: str = ""


def read(path, values, cls=Whole, **given):
    path.write_text(yaml.safe_dump(values, allow_unicode=True), encoding="utf-8")
    return from_yaml(cls, path, **given)


VALUES = {
    "number": st.integers(0, 9),
    "is_loud": st.booleans(),
    "color": st.sampled_from(["red", "blue"]),
    "names": st.lists(WORDS, min_size=1).map(tuple),
    "sizes": st.dictionaries(WORDS, st.integers()),
    "inner": st.none() | st.fixed_dictionaries({"word": WORDS, "share": st.floats(0, 1)}),
    "several": WORDS | st.lists(WORDS, min_size=1),
    "anything": st.none() | st.integers() | WORDS,
}


@given(values=st.fixed_dictionaries({"word": WORDS}, optional=VALUES))
def test_what_fits_comes_back(values, tmp_path_factory):
    plain = {name: list(v) if name == "names" else v for name, v in values.items()}
    made = asdict(read(tmp_path_factory.getbasetemp() / "any.yaml", plain))
    assert {name: made[name] for name in values} == values


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "'word' is missing"),
        ({"word": "x", "numbr": 1}, "unknown key 'numbr'. Did you mean 'number'"),
        ({"word": "x", "number": True}, "number is True: Expected int, got bool"),
        ({"word": "x", "names": "a"}, "names is 'a': Expected array, got str"),
        ({"word": "x", "inner": {"word": "x", "share": "x"}}, "Expected float.*share"),
    ],
)
def test_what_does_not_fit_is_named_with_its_file(values, message, tmp_path):
    with pytest.raises(ConfigError, match=rf"mine\.yaml: .*{message}"):
        read(tmp_path / "mine.yaml", values)


PLAIN = {
    "labels": ["no", "yes"],
    "prompt": "Is it?\n{text}",
    "reader_template": "{text} <extra_id_0>",
    "verbalizer": {"no": "bad", "yes": "good"},
}


@pytest.mark.parametrize("kind", [Task, GenerationTask])
def test_every_task_comes_back_from_what_it_writes(kind, tmp_path):
    for name in kind.names():
        path = tmp_path / f"{name}.yaml"
        path.write_text(kind.load(name).to_yaml())
        assert kind.load(path) == kind.load(name)


@pytest.mark.parametrize("answer", ["", "Mood:", "The answer is"])
def test_a_line_before_the_answer_is_kept_though_it_is_empty(answer, tmp_path):
    made = Task(name="mine", **PLAIN, answer=answer)
    (tmp_path / "mine.yaml").write_text(made.to_yaml())
    assert Task.load(tmp_path / "mine.yaml").answer == answer
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**PLAIN, "metric": ""}))
    with pytest.raises(ConfigError, match="metric is ''"):  # the control: that cannot be empty
        Task.load(tmp_path / "mine.yaml")


def test_a_task_needs_no_file():
    made = Task(name="mine", **PLAIN)
    assert made.labels == ("no", "yes")
    for changes, message in (
        ({"labels": ["no", 1]}, "labels is .*: Expected str, got int - at .*1"),
        ({"name": "a/b"}, "name is 'a/b', and files are named by it"),
        ({"name": None}, "name is None: Expected str, got null"),
    ):
        values = {"name": "mine", **PLAIN, **changes}
        with pytest.raises(ConfigError, match=message):
            Task(**values)
