"""Tasks: one YAML each in `configs/tasks`, or in `configs/generation` where the answer is written.

Only `labels`, `prompt`, `reader_template` and `verbalizer` are needed; the rest has defaults.
"""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pgra.config import config_root, find_class, read_yaml
from pgra.errors import ConfigError, unknown_name

# A YAML of `configs/` read key by key, so that each message names the file and the key.


SPLITS = ("train", "validation", "test")


class YamlKeys:
    """Checks the values of one YAML; all methods raise ConfigError."""

    def __init__(self, path: Path) -> None:
        """Read a YAML file, a mapping."""
        self.path = path
        self.values = read_yaml(path)

    def check_keys(self, values: Mapping[Any, Any], known: Sequence[str]) -> None:
        """Refuse keys that are not known."""
        for key in values:
            if key not in known:
                raise ConfigError(f"{self.path}: {unknown_name('key', str(key), known)}")

    def text(self, key: str, value: object) -> str:
        """Give a value that must be text."""
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(
                f"{self.path}: {key} is {value!r}; it must be text "
                "(in quotes, where YAML reads yes, no, true or a number)"
            )
        return value

    def names(self, key: str, value: object) -> tuple[str, ...]:
        """Give a list of names, each once."""
        if not isinstance(value, list) or not value:
            raise ConfigError(f"{self.path}: {key} is {value!r}; it must be a list of names")
        names = tuple(self.text(key, item).strip() for item in value)
        if len(set(names)) < len(names):
            raise ConfigError(f"{self.path}: {key} names something twice: {', '.join(names)}")
        return names

    def mapping(self, key: str, value: object) -> dict[str, Any]:
        """Give a mapping by name."""
        if not isinstance(value, dict):
            raise ConfigError(f"{self.path}: {key} is {value!r}; it must be a mapping")
        return {self.text(key, name): item for name, item in value.items()}

    def template(self, key: str, inputs: Sequence[str]) -> str:
        """Give a key's text, whose fields are all inputs."""
        text = self.text(key, self.values[key])
        try:
            names = slots(text)
        except ValueError as error:
            raise ConfigError(
                f"{self.path}: {key} has a stray brace ({error}); write {{{{ for a plain one"
            ) from None
        for name in names:
            if name not in inputs:
                message = unknown_name(f"field in {key}", name, inputs)
                raise ConfigError(f"{self.path}: {message}")
        if not names:
            raise ConfigError(f"{self.path}: {key} holds no field; put {{{inputs[0]}}} into it")
        return text

    def splits(self, key: str, value: object) -> Mapping[str, str]:
        """Give a source's split by ours; train and test must be there."""
        splits = {s: self.text(key, name) for s, name in self.mapping(key, value).items()}
        self.check_keys(splits, SPLITS)
        for split in ("train", "test"):
            if split not in splits:
                raise ConfigError(f"{self.path}: {key} does not say which is the {split} split")
        if len(set(splits.values())) < len(splits):
            raise ConfigError(f"{self.path}: {key} uses one split twice: {dict(splits)}")
        return splits

    def sizes(self) -> Mapping[str, int]:
        """Give the rows that a task's splits have."""
        sizes = self.mapping("sizes", self.values.get("sizes") or {})
        self.check_keys(sizes, SPLITS)
        for split, rows in sizes.items():
            if not isinstance(rows, int) or isinstance(rows, bool):
                raise ConfigError(f"{self.path}: sizes.{split} is {rows!r}; it must be a number")
        return sizes


def slots(template: str) -> list[str]:
    """Give the fields in braces, in order."""
    parts = string.Formatter().parse(template)
    return [field for _, field, _, _ in parts if field is not None]


LABEL = "label"
TASK_METRICS = {name: f"pgra.report.metrics:{name}" for name in ("accuracy", "macro_f1", "mcc")}
_NEEDED = ("labels", "prompt", "reader_template", "verbalizer")
_OPTIONAL = (
    *("inputs", "answer", "prompt_words", "metric", "hub", "local", "sizes", "ignored_labels"),
)
_HUB_KEYS = ("id", "config", "revision", "columns", "labels", "splits")


@dataclass(frozen=True)
class HubSource:
    """A task's data set on the hub.

    Attributes:
        id: The data set.
        config: Its configuration, if it has several.
        revision: A branch or commit other than its main one.
        columns: Column by input name, and by "label".
        labels: Our label names in the order of the hub's integers; None: the column holds names.
        splits: The hub's split by ours ("train", "test", perhaps "validation").
    """

    id: str
    config: str | None
    revision: str | None
    columns: Mapping[str, str]
    labels: tuple[str, ...] | None
    splits: Mapping[str, str]


@dataclass(frozen=True)
class Task:
    """A classification task.

    Attributes:
        name: The YAML's name.
        inputs: Fields every example has, in the order they are searched with. A passage fills the
            first one when the LM reads it, so the first is the one that is most like a passage.
        labels: Names; their order is that of ids.
        prompt: P(x) of the second stage, with the inputs in braces.
        answer: What follows P(x), on a line of its own, before the word.
        prompt_words: Word by label, in the second stage's exemplars.
        reader_template: How the reader sees an example.
        verbalizer: Word by label, which the reader writes.
        metric: Its headline metric, a name of `pgra.report.metrics.METRICS`.
        hub: Where its data is on the hub, or None.
        local_splits: File name (without suffix) by split, in a local folder; None: train,
            validation if there is one, and test.
        sizes: Rows the papers' splits have; empty where unknown.
        local_columns: Column of a file by input name; an input that is not here has its own name.
        ignored_labels: Labels of the data that the task does without: their rows are left out.
    """

    name: str
    inputs: tuple[str, ...]
    labels: tuple[str, ...]
    prompt: str
    answer: str
    prompt_words: Mapping[str, str]
    reader_template: str
    verbalizer: Mapping[str, str]
    metric: str
    hub: HubSource | None
    local_splits: Mapping[str, str] | None
    sizes: Mapping[str, int]
    local_columns: Mapping[str, str] = field(default_factory=dict)
    ignored_labels: tuple[str, ...] = ()


def task_names() -> list[str]:
    """Give the names of the shipped tasks."""
    return sorted(path.stem for path in (config_root() / "tasks").glob("*.yaml"))


def load_task(name_or_path: str) -> Task:
    """Read a task by its name in `configs/tasks`, or from a path that ends in .yaml.

    Raises:
        ConfigError: If there is no such task, or its YAML has an unknown key, lacks one, or
            contradicts itself.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        if name_or_path not in task_names():
            message = unknown_name("task", name_or_path, task_names())
            raise ConfigError(f"{message} A new task is one YAML: give its path.")
        path = config_root() / "tasks" / f"{name_or_path}.yaml"
    return _TaskReader(path).read()


class _TaskReader(YamlKeys):
    """Checks one task's YAML."""

    def read(self) -> Task:
        self.check_keys(self.values, (*_NEEDED, *_OPTIONAL))
        for key in _NEEDED:
            if key not in self.values:
                raise ConfigError(f"{self.path}: '{key}' is missing")
        inputs = self.names("inputs", self.values.get("inputs", ["text"]))
        labels = self.names("labels", self.values["labels"])
        if len(labels) < 2:
            raise ConfigError(f"{self.path}: labels are {list(labels)}: a task has at least two")
        if LABEL in inputs:
            raise ConfigError(f"{self.path}: an input cannot be named '{LABEL}'")
        metric = self.text("metric", self.values.get("metric", "accuracy"))
        try:
            find_class("metric", metric, TASK_METRICS)
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from None
        same = {label: label for label in labels}
        return Task(
            name=self.path.stem,
            inputs=inputs,
            labels=labels,
            prompt=self._prompt(inputs),
            answer=self.text("answer", self.values.get("answer", "The answer is")),
            prompt_words=self._words("prompt_words", labels, same),
            reader_template=self.template("reader_template", inputs),
            verbalizer=self._words("verbalizer", labels, same),
            metric=metric,
            hub=self._hub(inputs, labels),
            local_splits=self._local_splits(),
            local_columns=self._local_columns(inputs),
            sizes=self.sizes(),
            ignored_labels=self._ignored(labels),
        )

    def _prompt(self, inputs: Sequence[str]) -> str:
        prompt = self.template("prompt", inputs)
        if inputs[0] not in slots(prompt):
            raise ConfigError(
                f"{self.path}: prompt does not hold {{{inputs[0]}}}, the first input, which a "
                "passage fills: all passages would look alike to the LM; put it in, or list "
                "another first"
            )
        return prompt

    def _ignored(self, labels: Sequence[str]) -> tuple[str, ...]:
        if self.values.get("ignored_labels") is None:
            return ()
        ignored = self.names("ignored_labels", self.values["ignored_labels"])
        for name in ignored:
            if name in labels:
                raise ConfigError(f"{self.path}: '{name}' is in labels and in ignored_labels too")
        return ignored

    def _words(
        self, key: str, labels: Sequence[str], default: Mapping[str, str]
    ) -> Mapping[str, str]:
        given = self.mapping(key, self.values.get(key, default))
        self.check_keys(given, labels)
        lacking = [label for label in labels if label not in given]
        if lacking:
            raise ConfigError(f"{self.path}: {key} has no word for '{lacking[0]}'")
        words = {label: self.text(key, given[label]).strip() for label in labels}
        owner: dict[str, str] = {}
        for label, word in words.items():
            if word in owner:
                raise ConfigError(
                    f"{self.path}: {key} has '{word}' for both '{owner[word]}' and '{label}'"
                )
            owner[word] = label
        return words

    def _hub(self, inputs: Sequence[str], labels: Sequence[str]) -> HubSource | None:
        if self.values.get("hub") is None:
            return None
        hub = self.mapping("hub", self.values["hub"])
        self.check_keys(hub, _HUB_KEYS)
        wanted = (*inputs, LABEL)
        columns = self.mapping("hub.columns", hub.get("columns", {}))
        self.check_keys(columns, wanted)
        by_id = None if hub.get("labels") is None else self.names("hub.labels", hub["labels"])
        if by_id is not None and set(by_id) != set(labels):
            raise ConfigError(
                f"{self.path}: hub.labels are {', '.join(by_id)}, labels are {', '.join(labels)}: "
                "they must be the same names, in the order of the hub's integers"
            )
        return HubSource(
            id=self.text("hub.id", hub.get("id")),
            config=None if hub.get("config") is None else self.text("hub.config", hub["config"]),
            revision=None
            if hub.get("revision") is None
            else self.text("hub.revision", hub["revision"]),
            columns={n: self.text("hub.columns", columns.get(n, n)) for n in wanted},
            labels=by_id,
            splits=self.splits("hub.splits", hub.get("splits", {"train": "train", "test": "test"})),
        )

    def _local_splits(self) -> Mapping[str, str] | None:
        if self.values.get("local") is None:
            return None
        local = self.mapping("local", self.values["local"])
        self.check_keys(local, ("splits", "columns"))
        return self.splits("local.splits", local.get("splits"))

    def _local_columns(self, inputs: Sequence[str]) -> Mapping[str, str]:
        columns = self.mapping("local.columns", (self.values.get("local") or {}).get("columns", {}))
        self.check_keys(columns, inputs)
        return {name: self.text("local.columns", column) for name, column in columns.items()}


# Tasks whose answer is written, not chosen: one YAML in `configs/generation`, as in tasks.
#
# Prompt formats and numbers of exemplars are KATE's (Liu et al. 2022, section 3.2, Table 11).


KINDS = ("question", "totto", "fetaqa")
GENERATION_METRICS = ("exact_match", "bleu", "parent")
ANSWERS = "answers"
_NEEDED_WRITTEN = ("kind", "inputs", "frame", "metrics", "num_exemplars")
_OPTIONAL_WRITTEN = ("max_new_tokens", "stop", "hub", "local", "sizes")


@dataclass(frozen=True)
class GenerationTask:
    r"""A task whose answer an LM writes.

    Attributes:
        name: The YAML's name.
        kind: How rows are read: "question" (text fields and answers), "totto" or "fetaqa".
        inputs: Fields every example has, in the order they are searched with. A table's are
            "table", and "question" of FeTaQA.
        frame: How fields are shown, up to where the answer begins: "Q: {question}\nA:". An
            exemplar's answer follows behind a space, and a blank line behind that.
        metrics: Names of `GENERATION_METRICS`, the headline first.
        num_exemplars: The paper's.
        max_new_tokens: Most tokens of an answer.
        stop: Where an answer ends.
        hub: Where its data is on the hub, or None.
        local_splits: File name (without suffix) by split, in a local folder; None: train, test.
        local_columns: Column of a file by field, and by "answers"; what is not here has its name.
        sizes: Rows the usual splits have; empty where unknown.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    frame: str
    metrics: tuple[str, ...]
    num_exemplars: int
    max_new_tokens: int
    stop: str
    hub: HubSource | None
    local_splits: Mapping[str, str] | None
    local_columns: Mapping[str, str]
    sizes: Mapping[str, int]


def generation_task_names() -> list[str]:
    """Give the names of the shipped tasks."""
    return sorted(path.stem for path in (config_root() / "generation").glob("*.yaml"))


def load_generation_task(name_or_path: str) -> GenerationTask:
    """Read a task by its name in `configs/generation`, or from a path that ends in .yaml.

    Raises:
        ConfigError: If there is no such task, or its YAML has an unknown key, lacks one, or
            contradicts itself.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        names = generation_task_names()
        if name_or_path not in names:
            raise ConfigError(unknown_name("task of generation", name_or_path, names))
        path = config_root() / "generation" / f"{name_or_path}.yaml"
    return _Reader(path).read()


class _Reader(YamlKeys):
    """Checks one task's YAML."""

    def read(self) -> GenerationTask:
        self.check_keys(self.values, (*_NEEDED_WRITTEN, *_OPTIONAL_WRITTEN))
        for key in _NEEDED_WRITTEN:
            if key not in self.values:
                raise ConfigError(f"{self.path}: '{key}' is missing")
        inputs = self.names("inputs", self.values["inputs"])
        local = self.mapping("local", self.values.get("local") or {})
        self.check_keys(local, ("splits", "columns"))
        return GenerationTask(
            name=self.path.stem,
            kind=self._one_of("kind", self.values["kind"], KINDS),
            inputs=inputs,
            frame=self._frame(inputs),
            metrics=self._metrics(),
            num_exemplars=self._count("num_exemplars", 8),
            max_new_tokens=self._count("max_new_tokens", 10),
            stop=self._stop(),
            hub=self._hub(inputs),
            local_splits=self.splits("local.splits", local["splits"])
            if "splits" in local
            else None,
            local_columns=self._columns("local.columns", local.get("columns", {}), inputs),
            sizes=self.sizes(),
        )

    def _one_of(self, key: str, value: object, known: tuple[str, ...]) -> str:
        name = self.text(key, value)
        if name not in known:
            raise ConfigError(f"{self.path}: {unknown_name(key, name, known)}")
        return name

    def _frame(self, inputs: tuple[str, ...]) -> str:
        frame = self.template("frame", inputs)
        absent = [name for name in inputs if name not in slots(frame)]
        if absent:
            raise ConfigError(f"{self.path}: frame does not show the input {{{absent[0]}}}")
        if frame != frame.rstrip():
            raise ConfigError(f"{self.path}: frame ends in a space: the answer brings its own")
        return frame

    def _metrics(self) -> tuple[str, ...]:
        names = self.names("metrics", self.values["metrics"])
        metrics = tuple(self._one_of("metrics", name, GENERATION_METRICS) for name in names)
        if "parent" in metrics and self.values["kind"] == "question":
            raise ConfigError(f"{self.path}: parent compares with a table, and there is none")
        return metrics

    def _count(self, key: str, default: int) -> int:
        value = self.values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{self.path}: {key} is {value!r}; it must be a number from 1")
        return value

    def _stop(self) -> str:
        stop = self.values.get("stop", "\n")
        if not isinstance(stop, str) or not stop:
            raise ConfigError(f"{self.path}: stop is {stop!r}; it must be text that is not empty")
        return stop

    def _columns(self, key: str, value: object, inputs: tuple[str, ...]) -> Mapping[str, str]:
        columns = self.mapping(key, value)
        self.check_keys(columns, (*inputs, ANSWERS))
        return {name: self.text(key, column) for name, column in columns.items()}

    def _hub(self, inputs: tuple[str, ...]) -> HubSource | None:
        if self.values.get("hub") is None:
            return None
        hub = self.mapping("hub", self.values["hub"])
        self.check_keys(hub, ("id", "config", "revision", "columns", "splits"))
        chosen = (key for key in ("config", "revision") if key in hub)
        texts = {key: self.text(f"hub.{key}", hub[key]) for key in chosen}
        return HubSource(
            id=self.text("hub.id", hub.get("id")),
            config=texts.get("config"),
            revision=texts.get("revision"),
            columns=self._columns("hub.columns", hub.get("columns", {}), inputs),
            labels=None,
            splits=self.splits("hub.splits", hub.get("splits", {"train": "train", "test": "test"})),
        )
