"""Tasks whose answer is written, not chosen: one YAML in `configs/generation`, as in tasks.

Prompt formats and numbers of exemplars are KATE's (Liu et al. 2022, section 3.2, Table 11).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pgra.config import config_root
from pgra.data.tasks import HubSource
from pgra.data.yaml_keys import YamlKeys, slots
from pgra.errors import ConfigError, unknown_name

KINDS = ("question", "totto", "fetaqa")
GENERATION_METRICS = ("exact_match", "bleu", "parent")
ANSWERS = "answers"
_NEEDED = ("kind", "inputs", "frame", "metrics", "num_exemplars")
_OPTIONAL = ("max_new_tokens", "stop", "hub", "local", "sizes")


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
        self.check_keys(self.values, (*_NEEDED, *_OPTIONAL))
        for key in _NEEDED:
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
