"""Tasks: one YAML each in `configs/tasks`, or in `configs/generation` where the answer is written.

A YAML's keys are the fields of `Task` or `GenerationTask`; its name is the file's. From Python,
`Task(name=..., labels=..., ...)`.
"""

import string
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import ClassVar, Literal, Self

import yaml

from pgra.config import (
    check_parts,
    choose,
    find_class,
    find_yaml,
    from_yaml,
    list_yamls,
    read_yaml,
    typed_value,
)
from pgra.data.text import word_key
from pgra.errors import ConfigError

WrittenMetric = Literal["exact_match", "f1", "bleu", "parent"]
SPLITS = ("train", "validation", "test")
# Metrics of labels; any `module:function` of type `pgra.report.metrics.Metric` will do too.
METRICS = {name: f"pgra.report.metrics:{name}" for name in ("accuracy", "macro_f1", "mcc")}
LABEL = "label"
ANSWERS = "answers"


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """A task's data set on the hub.

    Attributes:
        config: Its configuration, if it has several.
        revision: A branch or commit other than its main one.
        columns: Column by input name, and by "label" or "answers"; by default the same name.
        labels: Our label names in the order of the hub's integers; None: the column holds names.
        splits: The hub's split by ours.
    """

    id: str
    config: str | None = None
    revision: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    labels: tuple[str, ...] | None = None
    splits: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "test": "test"})


@dataclass(frozen=True, kw_only=True)
class LocalSource:
    """How a task's files are laid out in a local folder.

    Attributes:
        splits: File name (without suffix) by split; None: train, test, and validation if it exists.
        columns: Column of a file by field, and by "answers"; by default the same name.
    """

    splits: Mapping[str, str] | None = None
    columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Sourced:
    """What all tasks have.

    Attributes:
        folder: Of `configs`, where the shipped ones are.
        target: What a row has besides its inputs: "label" or "answers".
        inputs: Fields every example has, in the order they are searched with. A passage fills the
            first one when the LM reads it, so the first is the one that is most like a passage.
        sizes: Rows of the usual splits; empty where unknown.
    """

    folder: ClassVar[str]
    target: ClassVar[str]
    file_kinds: ClassVar[Sequence[str]]
    name: str
    inputs: tuple[str, ...]
    hub: HubSource | None = None
    local: LocalSource = LocalSource()
    sizes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_types()
        if self.name in ("", ".", "..") or {*self.name} & {*"/\\"}:
            raise ConfigError(f"a task's name is '{self.name}': it names folders, so take words")
        check_distinct("inputs", self.inputs)
        if self.target in self.inputs:
            raise ConfigError(f"an input cannot be named '{self.target}'")
        for name, source in (("hub", self.hub), ("local", self.local)):
            if source is None:
                continue
            for column in source.columns:
                choose(f"key of {name}.columns", column, (*self.inputs, self.target))
            if source.splits is None:
                continue
            for split in source.splits:
                choose(f"key of {name}.splits", split, SPLITS)
            check_distinct(f"{name}.splits", [*source.splits.values()])

    def _check_types(self) -> None:
        """Refuse what a YAML could not say; lists become tuples."""
        hints = typing.get_type_hints(type(self))
        for f in fields(self):
            given = getattr(self, f.name)
            if given != f.default and not is_dataclass(given):  # else a default, or checked itself
                check_parts(f.name, given, hints[f.name])
                object.__setattr__(self, f.name, typed_value(f.name, given, hints[f.name]))

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the shipped tasks."""
        return list_yamls(cls.folder)

    @classmethod
    def load(cls, name_or_path: str | Path) -> Self:
        """Read a task by the name of a shipped one, or from a path that ends in .yaml.

        Raises:
            ConfigError: If there is none, or its YAML has an unknown key, lacks one or contradicts
                itself.
        """
        path = find_yaml("task", cls.folder, str(name_or_path))
        return from_yaml(cls, path, name=path.stem)

    def to_yaml(self) -> str:
        """Return the YAML that `load` and `--task` take, in a file of the task's name."""
        made = asdict(self)
        kept = {f.name: made[f.name] for f in fields(self) if getattr(self, f.name) != f.default}
        del kept["name"]
        return str(yaml.safe_dump(kept, sort_keys=False, allow_unicode=True))


@dataclass(frozen=True, kw_only=True)
class Task(_Sourced):
    """A classification task.

    Attributes:
        labels: Names; their order is that of ids.
        prompt: P(x) of the second stage, with the inputs in braces.
        answer: What follows P(x), on a line of its own, before the word; "" for none.
        prompt_words: Word by label in the second stage's exemplars; default: the labels.
        reader_template: How a trained reader sees an example; "" where there is none.
        verbalizer: Word by label that a trained reader writes; empty where there is none.
        metric: Its headline metric: of `METRICS`, or a `module:function` of the user's own.
        ignored_labels: Labels whose rows are left out.
    """

    folder = "tasks"
    target = LABEL
    file_kinds = ("jsonl", "csv", "tsv")
    inputs: tuple[str, ...] = ("text",)
    labels: tuple[str, ...]
    prompt: str
    reader_template: str = ""
    verbalizer: Mapping[str, str] = field(default_factory=dict)
    answer: str = field(default="The answer is", metadata={"may_be_empty": True})
    prompt_words: Mapping[str, str] = field(default_factory=dict)
    metric: str = "accuracy"
    ignored_labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        find_class("metric", self.metric, METRICS)  # refused before anything long
        check_distinct("labels, with ignored_labels,", [*self.labels, *self.ignored_labels])
        if len(self.labels) < 2:
            raise ConfigError(f"labels are {list(self.labels)}: a task has at least two")
        if self.reader_template:
            check_slots("reader_template", self.reader_template, self.inputs)
        if self.inputs[0] not in check_slots("prompt", self.prompt, self.inputs):
            raise ConfigError(f"prompt lacks {{{self.inputs[0]}}}, which a passage fills")
        words = self.prompt_words or {label: label for label in self.labels}
        object.__setattr__(self, "prompt_words", self._words("prompt_words", words))
        if self.verbalizer:
            object.__setattr__(self, "verbalizer", self._words("verbalizer", self.verbalizer))
        if self.hub and self.hub.labels and {*self.hub.labels} != {*self.labels}:
            raise ConfigError("hub.labels are other names than labels")

    @property
    def reader_words(self) -> Mapping[str, str]:
        """The verbalizer for a reader; a ConfigError if the task has none."""
        self._check_has("verbalizer")
        return self.verbalizer

    @property
    def reader_text(self) -> str:
        """The template for a reader; a ConfigError if the task has none."""
        self._check_has("reader_template")
        return self.reader_template

    def _check_has(self, key: str) -> None:
        if not getattr(self, key):
            raise ConfigError(f"task '{self.name}' has no {key}, which a reader needs: add it")

    def _words(self, key: str, given: Mapping[str, str]) -> Mapping[str, str]:
        """Return the words in the order of labels."""
        for label in given:
            choose(f"key of {key}", label, self.labels)
        words = {label: given.get(label, "").strip() for label in self.labels}
        check_words(key, words)
        return words


@dataclass(frozen=True, kw_only=True)
class GenerationTask(_Sourced):
    r"""A task whose answer is written, by an LM or a trained reader; it has no labels.

    Prompt formats and numbers of exemplars are KATE's (Liu et al. 2022, section 3.2, Table 11). A
    reader learns to write an example's first answer.

    Attributes:
        kind: How rows are read: "question" (text fields and answers), "totto" or "fetaqa". A
            table's input is "table", and "question" of FeTaQA.
        frame: How an LM sees fields, up to the answer: "Q: {question}\nA:". In an exemplar a
            space, the answer and a blank line follow.
        metrics: The headline first.
        max_new_tokens: Most tokens of an answer.
        stop: Where an answer ends.
    """

    folder = "generation"
    target = ANSWERS
    file_kinds: ClassVar[Sequence[str]] = ("jsonl",)
    labels: ClassVar[tuple[str, ...]] = ()
    prompt_words: ClassVar[Mapping[str, str]] = {}
    reader_words: ClassVar[Mapping[str, str]] = {}
    kind: Literal["question", "totto", "fetaqa"]
    frame: str
    metrics: tuple[WrittenMetric, ...]
    num_exemplars: int
    max_new_tokens: int = 10
    stop: str = "\n"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_distinct("metrics", self.metrics)
        shown = check_slots("frame", self.frame, self.inputs)
        for name in self.inputs:
            if name not in shown:
                raise ConfigError(f"frame does not show the input {{{name}}}")
        if self.frame != self.frame.rstrip():
            raise ConfigError("frame ends in a space: the answer brings its own")

    @property
    def metric(self) -> str:
        """The headline metric."""
        return self.metrics[0]

    @property
    def reader_text(self) -> str:
        """How a trained reader sees an example: "question: {question}", as T5 and FiD."""
        return " ".join(f"{name}: {{{name}}}" for name in self.inputs)


def load_any_task(name: str) -> Task | GenerationTask:
    """Read a task by its name or YAML: one with labels, or one whose answers are written."""
    if Path(name).suffix in (".yaml", ".yml"):
        is_written = "kind" in read_yaml(Path(name))
    else:
        choose("task", name, [*Task.names(), *GenerationTask.names()])
        is_written = name in GenerationTask.names()
    return GenerationTask.load(name) if is_written else Task.load(name)


def check_words(key: str, words: Mapping[str, str]) -> None:
    """Refuse labels without a word, and two whose words an answer cannot tell apart."""
    owner: dict[str, str] = {}
    for label, word in words.items():
        if not word.strip():
            raise ConfigError(f"{key} has no word for '{label}'")
        other = owner.setdefault(word_key(word), label)
        if other != label:
            raise ConfigError(
                f"{key}: '{words[other]}' ({other}), '{word}' ({label}) are one word: choose others"
            )


def check_distinct(key: str, names: Sequence[str]) -> None:
    """Refuse duplicate or blank names."""
    plain = [name.strip() for name in names]
    if len(set(plain)) < len(plain) or "" in plain:
        raise ConfigError(f"{key} names something twice, or nothing: {', '.join(names)}")


def bare_task(name: str, inputs: Sequence[str]) -> GenerationTask:
    """Return a task of which only the inputs are read."""
    return GenerationTask(
        name=name,
        inputs=tuple(inputs),
        kind="question",
        frame=" ".join(f"{{{field}}}" for field in inputs),
        metrics=("exact_match",),
        num_exemplars=0,
    )


def check_slots(key: str, template: str, inputs: Sequence[str]) -> list[str]:
    """Return the fields in a template's braces, in order; refuse any that is no input."""
    try:
        found = [slot for slot in string.Formatter().parse(template) if slot[1] is not None]
    except ValueError as error:
        raise ConfigError(f"{key}: {error}; write {{{{ for a plain brace") from None
    names = [str(name) for _, name, _, _ in found]
    for name in names:
        choose(f"field in {key}", name, inputs)
    if not names or any(form or conversion for _, _, form, conversion in found):
        raise ConfigError(f"{key} must hold {{{inputs[0]}}} or the like, without ':' or '!' in it")
    return names
