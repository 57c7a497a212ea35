"""What a task is: one YAML in `configs/tasks`, whose name is the file's.

Only `labels`, `prompt`, `reader_template` and `verbalizer` are needed; the rest has defaults.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pgra.config import config_root
from pgra.data.yaml_keys import YamlKeys, slots
from pgra.errors import ConfigError, unknown_name

LABEL = "label"
TASK_METRICS = ("accuracy", "macro_f1", "mcc")
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
        metric: Its headline metric, a name of `pgra.evaluation.metrics.METRICS`.
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
        if metric not in TASK_METRICS:
            raise ConfigError(f"{self.path}: {unknown_name('metric', metric, TASK_METRICS)}")
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
