"""Tasks: one YAML each in `configs/tasks`, or in `configs/generation` where the answer is written.

A YAML's keys are the fields of its kind, `Task` or `GenerationTask`; its name is the file's. From
Python, `Task(name=..., labels=..., ...)`. What kinds do differently are the methods of `TaskBase`.
"""

import string
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import ClassVar, Literal, NoReturn, Self

import msgspec
import yaml

from pgra.config import (
    choose,
    find_class,
    find_yaml,
    from_yaml,
    list_yamls,
    read_yaml,
    typed_value,
)
from pgra.data.answers import (
    ANSWERS,
    EXACT_MATCH,
    SUBSETS,
    AnsweredExample,
    SumMetric,
    read_answered,
)
from pgra.data.read import TABLES, RawSplit, Record, read_label
from pgra.data.text import normalize_answer, word_key
from pgra.errors import ConfigError
from pgra.types import Example

# of true labels, predictions and the task's label names
Metric = Callable[[Sequence[str], Sequence[str], Sequence[str]], float]
# of a stripped text and its example, a fraction; the mean over texts counts
TextMetric = Callable[[str, AnsweredExample], float] | SumMetric

SPLITS = ("train", "validation", "test")
# Any `module:function` of one's own will do too, of type `Metric` or `TextMetric`.
METRICS = {name: f"pgra.report.metrics:{name}" for name in ("accuracy", "macro_f1", "mcc")}
TEXT_METRICS = {
    name: f"pgra.report.metrics:{name}"
    for name in (EXACT_MATCH, "f1", "contains", "bleu", "parent")
}
LABEL = "label"


class HubSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    columns: Mapping[str, str] = {}
    labels: tuple[str, ...] | None = None
    splits: Mapping[str, str] = msgspec.field(
        default_factory=lambda: {"train": "train", "test": "test"}
    )


class LocalSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a task's files are laid out in a local folder.

    Attributes:
        splits: File name (without suffix) by split; None: train, test, and validation if it exists.
        columns: Column of a file by field, and by "answers"; by default the same name.
    """

    splits: Mapping[str, str] | None = None
    columns: Mapping[str, str] = {}


@dataclass(frozen=True)
class Wording:
    """How an LM is shown a task.

    Attributes:
        body: P(x), with the inputs in braces.
        words: What answers, by label; empty where an example's label is its answer.
        answer: What follows P(x), on a line of its own; None where all is on one line.
    """

    body: str
    words: Mapping[str, str] = field(default_factory=dict)
    answer: str | None = None


@dataclass(frozen=True)
class Measures:
    """Metrics of B predictions.

    Attributes:
        values: By name, fractions, the task's headline first; of ToTTo also by subset:
            "overlap/bleu".
        by_text: By name a fraction a text, for paired tests; of "parent" its F.
        counts: By the name of a `SumMetric` its rows, one a text.
    """

    values: Mapping[str, float]
    by_text: Mapping[str, Sequence[float]] = field(default_factory=dict)
    counts: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TaskBase(ABC):
    """What all kinds of task have, and what each kind does in its own way.

    Attributes:
        folder: Of `configs`, where the shipped ones are.
        target: What a row has besides its inputs: "label" or "answers".
        file_kinds: Of its files.
        prompt_style: Of `wording`, by default.
        inputs: Fields every example has, in the order they are searched with. A passage fills the
            first one when the LM reads it, so the first is the one that is most like a passage.
        hub: Its data set on the hub; None where it has none.
        local: How its files are read.
        sizes: Rows of the usual splits; empty where unknown.
        num_exemplars: In a prompt of `pgra icl`, unless a flag says it; None: the flag's default.
        max_new_tokens: Most tokens of an LM's answer.
        stop: Where an LM's answer ends.
    """

    folder: ClassVar[str]
    target: ClassVar[str]
    file_kinds: ClassVar[Sequence[str]] = TABLES
    prompt_style: ClassVar[str]
    name: str
    inputs: tuple[str, ...]
    hub: HubSource | None = None
    local: LocalSource = field(default=LocalSource())
    sizes: Mapping[str, int] = field(default_factory=dict)

    @abstractmethod
    def example(self, row: Record, raw: RawSplit, name: str) -> Example:
        """Read a row of a split; `name` is the example's id.

        Raises:
            DataError: If a column or what it should hold is missing.
        """

    @staticmethod
    def answer_key(text: str) -> str:
        """Return an answer as it is compared with others where exemplars vote."""
        return text

    @abstractmethod
    def wording(self, style: str) -> Wording:
        """Return how an LM is shown an example, in a style of `pgra.prompts.FORMATS`."""

    @abstractmethod
    def measure(self, predictions: Sequence[str], examples: Sequence[Example]) -> Measures:
        """Measure what was predicted for examples of this task, (B,), by its metrics."""

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
            splits = source.splits or {}
            for split in splits:
                choose(f"key of {name}.splits", split, SPLITS)
            check_distinct(f"{name}.splits", [*splits.values()])

    def _check_types(self) -> None:
        """Refuse what a YAML could not say; lists become tuples."""
        hints = typing.get_type_hints(type(self))
        for f in fields(self):
            value = getattr(self, f.name)
            if value != f.default:
                object.__setattr__(self, f.name, typed_value(f.name, value, hints[f.name]))

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
        values = msgspec.to_builtins(self)
        del values["name"]
        for f in fields(self):
            if getattr(self, f.name) == f.default:
                del values[f.name]
        return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


@dataclass(frozen=True, kw_only=True)
class Task(TaskBase):
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
    prompt_style = "task"
    num_exemplars = None
    max_new_tokens = 10  # KATE's max_tokens
    stop = "\n"
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
        find_metric(self.metric)  # refused before anything long
        check_distinct("labels, with ignored_labels,", [*self.labels, *self.ignored_labels])
        if len(self.labels) < 2:
            raise ConfigError(f"labels are {list(self.labels)}: a task has at least two")
        if self.reader_template:
            check_slots("reader_template", self.reader_template, self.inputs)
        if self.inputs[0] not in check_slots("prompt", self.prompt, self.inputs):
            raise ConfigError(f"prompt lacks {{{self.inputs[0]}}}, which a passage fills")
        labels = dict(zip(self.labels, self.labels, strict=True))
        self._set_words("prompt_words", self.prompt_words or labels)
        if self.verbalizer:
            self._set_words("verbalizer", self.verbalizer)
        if self.hub and self.hub.labels and {*self.hub.labels} != {*self.labels}:
            raise ConfigError("hub.labels are other names than labels")

    def example(self, row: Record, raw: RawSplit, name: str) -> Example:
        """Read a row; a blank one has no label, and an ignored label is one."""
        texts = {field: row.text(raw.columns[field]) for field in self.inputs}
        label = None
        if any(texts.values()):
            labels = (*self.labels, *self.ignored_labels)
            label = read_label(row, raw.columns[LABEL], labels=labels, classes=raw.classes)
        return Example(name, texts, label)

    def wording(self, style: str) -> Wording:
        """Return the prompt; "kate" shows all inputs as one sentence, and labels capitalised."""
        if style == "task":
            return Wording(self.prompt, self.prompt_words, self.answer)
        slots = " ".join(f"{{{field}}}" for field in self.inputs)
        words = {label: label.replace("_", " ").capitalize() for label in self.labels}
        return Wording(f"Sentence: {slots} Label:", words)

    def measure(self, predictions: Sequence[str], examples: Sequence[Example]) -> Measures:
        """Measure predicted labels."""
        labels = [str(example.label) for example in examples]
        return Measures(measure_labels(self.metric, labels, predictions, self.labels))

    @property
    def has_reader(self) -> bool:
        """Whether a trained reader can see and write it."""
        return bool(self.reader_template and self.verbalizer)

    @property
    def reader_words(self) -> Mapping[str, str]:
        """The verbalizer for a reader; a ConfigError if the task has none."""
        return self.verbalizer or self._lacks("verbalizer")

    @property
    def reader_text(self) -> str:
        """The template for a reader; a ConfigError if the task has none."""
        return self.reader_template or self._lacks("reader_template")

    def _lacks(self, key: str) -> NoReturn:
        raise ConfigError(f"task '{self.name}' has no {key}, which a reader needs: add it")

    def _set_words(self, key: str, words: Mapping[str, str]) -> None:
        """Set the words in the order of labels."""
        for label in words:
            choose(f"key of {key}", label, self.labels)
        words = {label: words.get(label, "").strip() for label in self.labels}
        check_words(key, words)
        object.__setattr__(self, key, words)


@dataclass(frozen=True, kw_only=True)
class GenerationTask(TaskBase):
    r"""A task whose answer is written, by an LM or a trained reader; it has no labels.

    Prompt formats and numbers of exemplars are KATE's (Liu et al. 2022, section 3.2, Table 11). A
    reader learns to write an example's first answer.

    Attributes:
        kind: How rows are read: "question" (text fields and answers), "totto" or "fetaqa". A
            table's input is "table", and "question" of FeTaQA.
        frame: How an LM sees fields, up to the answer: "Q: {question}\nA:". In an exemplar a
            space, the answer and a blank line follow.
        metrics: Of `TEXT_METRICS`, or a `module:function` of the user's own; the headline first.
    """

    folder = "generation"
    target = ANSWERS
    prompt_style = "kate"
    answer_key = staticmethod(normalize_answer)  # as exact match compares
    has_reader = True
    ignored_labels = ()
    labels: ClassVar[tuple[str, ...]] = ()
    prompt_words: ClassVar[Mapping[str, str]] = {}
    reader_words = prompt_words
    kind: Literal["question", "totto", "fetaqa"]
    frame: str
    metrics: tuple[str, ...]
    num_exemplars: int
    max_new_tokens: int = 10
    stop: str = "\n"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_distinct("metrics", self.metrics)
        self._functions()  # an unknown metric is refused before anything long
        slots = check_slots("frame", self.frame, self.inputs)
        for name in self.inputs:
            if name not in slots:
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

    def example(self, row: Record, raw: RawSplit, name: str) -> AnsweredExample:
        """Read a row with its answers, and its table."""
        return read_answered(self.kind, row, raw.columns, self.inputs, name)

    def wording(self, style: str) -> Wording:  # noqa: ARG002 (it has one)
        """Return the frame."""
        return Wording(self.frame)

    def measure(self, predictions: Sequence[str], examples: Sequence[Example]) -> Measures:
        """Measure what was written; spaces around a text do not count."""
        texts = [text.strip() for text in predictions]
        references = [example for example in examples if isinstance(example, AnsweredExample)]
        subsets: dict[str, Sequence[int]] = {"": range(len(texts))}
        for subset, is_overlap in SUBSETS.items():
            tables = [reference.table for reference in references]
            rows = [i for i, table in enumerate(tables) if table and table.is_overlap is is_overlap]
            if rows:
                subsets[f"{subset}/"] = rows
        values: dict[str, float] = {}
        by_text: dict[str, list[float]] = {}
        counts: dict[str, list[list[int]]] = {}
        for name, metric in self._functions().items():
            if isinstance(metric, SumMetric):
                counts[name] = metric.counts(texts, references)
                for subset, numbers in subsets.items():
                    columns = zip(*(counts[name][row] for row in numbers), strict=True)
                    values[subset + name] = metric.of_sum(list(map(sum, columns)))
            else:
                pairs = zip(texts, references, strict=True)
                by_text[name] = [float(metric(*pair)) for pair in pairs]
                for subset, numbers in subsets.items():
                    values[subset + name] = fmean(by_text[name][row] for row in numbers)
        return Measures(values, by_text, counts)

    def _functions(self) -> dict[str, TextMetric]:
        return {name: find_class("metric", name, TEXT_METRICS) for name in self.metrics}


AnyTask = Task | GenerationTask  # a new kind is a class, and a name here


def load_any_task(name: str) -> AnyTask:
    """Read a task of any kind by its name or YAML."""
    if Path(name).suffix in (".yaml", ".yml"):
        is_written = "kind" in read_yaml(Path(name))
    else:
        choose("task", name, [*Task.names(), *GenerationTask.names()])
        is_written = name in GenerationTask.names()
    return GenerationTask.load(name) if is_written else Task.load(name)


def find_metric(name: str) -> Metric:
    """Return a metric of labels by its name, or from a module ("module:NAME").

    Raises:
        ConfigError: If there is none.
    """
    metric: Metric = find_class("metric", name, METRICS)
    return metric


def measure_labels(
    metric: str, labels: Sequence[str], predictions: Sequence[str], names: Sequence[str]
) -> dict[str, float]:
    """Return a metric of labels first, then the others of `METRICS`, by name.

    Raises:
        ValueError: If the lengths differ, or there is nothing to measure.
    """
    order = dict.fromkeys([metric, *METRICS])
    return {name: float(find_metric(name)(labels, predictions, names)) for name in order}


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
        metrics=(EXACT_MATCH,),
        num_exemplars=0,
    )


def check_slots(key: str, template: str, inputs: Sequence[str]) -> list[str]:
    """Return the fields in a template's braces, in order; refuse any that is not an input."""
    try:
        slots = [slot for slot in string.Formatter().parse(template) if slot[1] is not None]
    except ValueError as error:
        raise ConfigError(f"{key}: {error}; write {{{{ for a plain brace") from None
    names = [str(name) for _, name, _, _ in slots]
    for name in names:
        choose(f"field in {key}", name, inputs)
    if not names or any(form or conversion for _, _, form, conversion in slots):
        raise ConfigError(f"{key} must hold {{{inputs[0]}}} or the like, without ':' or '!' in it")
    return names
