"""The contract of a method: what decides a task's examples.

`open` reads the task and refuses early what cannot work. `prepare` does the long work that runs
with other seeds share, `fit` trains, `decide` decides. Folders, locks, resume, seeds and results
are the run's (`pgra.runs`).
"""

import copy
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from pgra.arrays import Scores, Values
from pgra.artifacts import digest
from pgra.config import Defaults, field_names, find_class, parse_sections
from pgra.context import Context
from pgra.data.answers import EXACT_MATCH, AnsweredExample
from pgra.data.bundled import BUNDLED, BUNDLED_DATA, BUNDLED_MODELS
from pgra.data.examples import DataArguments, Splits, load_splits
from pgra.data.tasks import AnyTask, find_metric, load_any_task
from pgra.errors import ConfigError, unknown_name
from pgra.methods.arguments import METHODS, OPTIONS, RunArguments, RuntimeArguments, decided_by
from pgra.reader.arguments import FolderArguments
from pgra.reader.calibration import Calibration, decide
from pgra.report.metrics import TextOutcomes, bootstrap, interval_95
from pgra.report.results import Decisions as Decisions
from pgra.rerank import ReadyReranker, find_reranker
from pgra.retrieval.base import examples_digest, find_retriever
from pgra.types import Example, Fields, Json, Prediction

SPLITS = ("train", "dev", "test")


@dataclass(frozen=True)
class TaskData(Splits):
    """A task and its examples.

    Train is learned from, dev chooses settings and checkpoints, test is reported on. `notes` are
    what a reader of the numbers must know of the data, `set_aside` the training examples that stand
    in the prompt of an LM, its own or a control's, and are not learned from.
    """

    set_aside: Sequence[Example] = ()

    @classmethod
    def read(cls, args: RunArguments, *, is_trained: bool = True, least_dev: int = 0) -> Self:
        """Read a task and its splits, as `load_splits`.

        Raises:
            ConfigError: If no task is named, or there is none of that name.
            DataError: If the data cannot be read.
        """
        task = load_any_task(task_name(args))
        queries = None if is_trained else args["icl"].query_dataset_name
        splits = load_splits(
            task, args.data, is_trained=is_trained, least_dev=least_dev, query_dataset_name=queries
        )
        return cls(**vars(splits))

    @property
    def labels(self) -> tuple[str, ...]:
        """The task's labels; none where answers are written."""
        return self.task.labels

    @property
    def metric(self) -> str:
        return self.task.metric

    def labelled(self) -> Self:
        """Return itself; a ConfigError where answers are written."""
        if not self.labels:
            raise ConfigError(
                f"task '{self.task.name}' has no labels, which this method needs: try pgra or kate"
            )
        return self

    def examples(self, split: str) -> list[Example]:
        return list(getattr(self, split))

    def answered(self, split: str) -> list[AnsweredExample]:
        """Return a split's examples with right answers; none of a task with labels."""
        return [e for e in self.examples(split) if isinstance(e, AnsweredExample)]

    def measure_dev(self, decided: Sequence[str]) -> Mapping[str, float]:
        """Return the metric, and those that belong to it, of the dev set's decisions."""
        return self.task.measure(decided, self.dev).values

    def measure_dev_scores(self, scores: Scores) -> Mapping[str, float]:
        """Return what `measure_dev` does, of the likeliest labels by scores, (B, C)."""
        predictions = decide([example.id for example in self.dev], scores, self.labels)
        return self.measure_dev([prediction.label for prediction in predictions])

    def make_prediction(
        self, query: Example, label: str, shares: Mapping[str, float]
    ) -> Prediction:
        """Return a query's prediction, with the shares of the task's labels."""
        return Prediction(query.id, label, {name: shares.get(name, 0.0) for name in self.labels})

    def fingerprints(self, splits: Sequence[str] = SPLITS) -> dict[str, Json]:
        """Return digests of the splits' examples and labels, and of the test set's answers."""
        digests: dict[str, Json] = {}
        for split in splits:
            examples = self.examples(split)
            labels = [example.label for example in examples]
            digests[split] = digest([examples_digest(examples), labels])
        if answers := [list(example.answers) for example in self.answered("test")]:
            digests["answers"] = digest(answers)
        return digests


def label_shares(data: TaskData) -> Values:
    """Return the labels' shares among the training examples, (C,), each with one example more."""
    counts = Counter(str(example.label) for example in data.train)
    shares = np.array([counts[label] + 1 for label in data.labels], np.float64)
    shares /= shares.sum()
    return shares


def decide_labels(
    examples: Sequence[Example],
    scores: Scores,
    data: TaskData,
    calibration: Calibration,
    label_bias: str,
) -> Decisions:
    """Decide examples by a reader's scores, (B, C), and report its label bias.

    `metrics` have the bias, and the metric as it is otherwise, if the examples have labels.
    """
    if label_bias == "batch" and data.train:  # else the bias is the one that was kept
        calibration = calibration.rematched(scores, label_shares(data))
    ids = [example.id for example in examples]
    predictions = decide(ids, calibration.apply(scores), data.labels)
    notes = [calibration.note] if calibration.note else []
    if not calibration.bias:
        if calibration.bias_from:
            notes.append(f"label bias is left in: {calibration.bias_from}")
        return Decisions(predictions, notes=notes)
    entry: dict[str, Json] = {
        "fitted_on": calibration.bias_from,
        "is_out": calibration.is_bias_out,
        "by_label": dict(zip(data.labels, calibration.bias, strict=True)),
    }
    done = "taken out" if calibration.is_bias_out else "left in"
    note = f"label bias is {done} (fitted on {calibration.bias_from})"
    truth = [str(example.label) for example in examples if example.label is not None]
    if truth and len(truth) == len(examples):
        other = replace(calibration, is_bias_out=not calibration.is_bias_out)
        decided = [data.labels[number] for number in other.apply(scores).argmax(axis=1)]
        value = float(find_metric(data.metric)(truth, decided, data.labels))
        entry["otherwise"] = value
        note += f": {data.metric} is {value:.4f} otherwise"
    return Decisions(predictions, notes=[*notes, note], metrics={"label_bias": entry})


def measure_answers(
    task: AnyTask,
    examples: Sequence[AnsweredExample],
    decided: Decisions,
    more: Mapping[str, Sequence[float]] | None = None,
) -> Decisions:
    """Add what is measured on written texts: each example's own values, and all metrics.

    `more` are further measures by name, a fraction an example, (B,).
    """
    measures = task.measure([prediction.label for prediction in decided.predictions], examples)
    more = more or {}
    details: list[Fields] = []
    for i, example in enumerate(examples):
        line: dict[str, Json] = {"answers": list(example.answers)}
        for name, values in {**measures.by_text, **more}.items():
            if name == EXACT_MATCH:
                line["is_right"] = values[i] == 1
            else:
                line[name] = round(values[i], 6)
        for name, counts in measures.counts.items():
            line[f"{name}_counts"] = list(counts[i])
        if example.table:
            line["is_overlap"] = example.table.is_overlap
        if decided.details:
            line |= decided.details[i]
        details.append(line)
    interval = None  # what is of all texts together has none
    if task.metric in measures.by_text:
        outcomes = TextOutcomes(task.metric, np.array(measures.by_text[task.metric])[:, None])
        interval = interval_95(bootstrap([outcomes], seed=0)[0])
    means = {name: float(np.mean(values)) for name, values in more.items()}
    return replace(decided, details=details, values={**measures.values, **means}, interval=interval)


class Timed:
    """Keeps its stages' wall-clock times, and digests of their inputs."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.fingerprints: dict[str, Json] = {}

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - start


class Method(Timed, ABC):
    """Decides a task's examples. Knows nothing of run folders, several seeds or reports.

    A method from outside needs `decide` alone: `--method my_package.methods:MyMethod`.

    Attributes:
        SECTIONS: Its own argument dataclasses by section, beside `runtime` and `data`. With one
            named `training` it trains weights, which a run keeps in its `reader/`.
        DECIDED: Arguments of retriever and reranker that make the method, by name; other flags are
            refused.
        seconds: Wall-clock time by stage.
        fingerprints: Digests of each stage's input.
    """

    SECTIONS: ClassVar[Mapping[str, type]] = {}
    DECIDED: ClassVar[Mapping[str, Any]] = {}

    data: TaskData

    def __init__(
        self, args: RunArguments, context: Context, reranker: ReadyReranker | None = None
    ) -> None:
        """Keep what to run, and where; a ready `reranker` replaces the one of the arguments."""
        super().__init__()
        self.args = args
        self.context = context
        self.reranker = reranker
        self.seed = args.seed

    @classmethod
    def name(cls, args: RunArguments) -> str:
        """Return its name in runs, folders and reports."""
        return args.method

    def open(self) -> None:
        """Read the task, and refuse what cannot work; load nothing heavy.

        Raises:
            PgraError: If arguments, data or models cannot be used.
        """
        self.data = TaskData.read(self.args).labelled()
        self.fingerprints |= self.data.fingerprints()

    def check(self) -> None:
        """Refuse what this run's own arguments cannot do on these examples."""

    def identity(self) -> dict[str, Json]:
        """Return what decides predictions, as far as it is known yet, besides the examples."""
        values: dict[str, Json] = {}
        for section in self.args.sections:
            if section in self.SECTIONS:
                deciding = self.args[section].deciding()
                values |= {f"{section}.{name}": value for name, value in deciding.items()}
        return values

    def prepare(self, splits: Sequence[str] = SPLITS) -> None:
        """Do, or load, the long work that runs with other seeds share."""

    def with_seed(self, args: RunArguments) -> Self:
        """Return the method of a run with another seed or training, sharing what is prepared."""
        other = copy.copy(self)
        other.args = args
        other.seed = args.seed
        other.seconds = dict(self.seconds)
        other.fingerprints = dict(self.fingerprints)
        return other

    def fit(self, folder: Path) -> Fields | None:  # noqa: ARG002 (the contract's)
        """Learn from the training examples; a stopped run resumes in the same folder.

        Returns the dev set's results, "metric", "value", ...; None if it decided nothing.
        """
        return None

    def load(self, folder: Path) -> None:
        """Load what `fit` left in a run's folder."""
        self.fit(folder)

    @abstractmethod
    def decide(self, examples: Sequence[Example]) -> Decisions:
        """Decide examples: a split's, or new ones."""

    def finish(self, folder: Path) -> None:
        """Complete a measured run's folder, in the main process."""

    @classmethod
    def sources(cls, args: RunArguments) -> list[tuple[str, str]]:
        """Return what it reads: "task", "model" or "corpus", and the name, as the user wrote it."""
        return [("task", f"{args.data.task} {args.data.dataset_name or ''}".strip())]

    def sample_prompt(self) -> str | None:
        """Return a prompt as the LM reads it, for `prompt.txt`; None without one."""
        return None

    def restore(self, folder: Path) -> bool:  # noqa: ARG002 (the contract's)
        """Open a finished run to decide new examples, if that needs less than a whole run."""
        return False

    @classmethod
    def uses_seed(cls, args: RunArguments) -> bool:  # noqa: ARG003 (the contract's)
        """Whether the seed decides anything."""
        return True

    def notes(self) -> list[str]:
        """Return what a reader of the numbers must know of data and models."""
        shared = self.data.notes.get("test_rows_in_train")
        notes = [f"{shared} test texts also stand in the training file"] if shared else []
        if self.data.notes.get("test_rule"):
            notes.append(str(self.data.notes["test_rule"]))
        bundled = {**BUNDLED_MODELS, **BUNDLED_DATA}
        for _, source in dict.fromkeys(self.sources(self.args)):
            entry = bundled.get(source.partition(BUNDLED)[2])
            if entry and entry.note:
                notes.append(f"{BUNDLED}{entry.name}: {entry.note}")
        return notes


def find_method(name: str) -> type[Method]:
    """Import a method's class: of `METHODS`, an entry point of `pgra.methods`, or `module:Class`.

    Raises:
        ConfigError: If there is none of that name.
    """
    method: type[Method] = find_class("method", name, METHODS)
    return method


def find_sections(chosen: Mapping[str, Any]) -> dict[str, type]:
    """Return the argument dataclasses of a run by section.

    `chosen` holds given values by name; the sections depend on those of `pgra.config.CHOOSING`. An
    unknown name is a ConfigError.
    """
    method = str(chosen.get("method", RuntimeArguments.method))
    sections: dict[str, type] = {"runtime": RuntimeArguments, "data": DataArguments}
    ours = METHODS.get(method)
    sections |= ours.sections if ours else find_method(method).SECTIONS
    if "training" not in sections:
        sections["folder"] = FolderArguments
    for section, cls in find_options(chosen).items():
        if section.removesuffix("_options") in sections:
            sections[section] = cls
    return sections


def find_options(chosen: Mapping[str, Any]) -> dict[str, type]:
    """Return the own arguments of the chosen retriever and reranker, by section.

    Those of ours are known without their class.
    """
    kinds: dict[str, tuple[str, Any]] = {
        "retriever_options": ("retriever", find_retriever),
        "rerank_options": ("reranker", find_reranker),
    }
    options = {}
    for section, (kind, find) in kinds.items():
        name = str(chosen.get(kind, "none"))
        name = "run" if name.startswith("run:") else name
        ours = OPTIONS[kind]
        cls = ours[name] if name in ours else find(name).options_class
        if cls is not None:
            options[section] = cls
    return options


def known_options() -> dict[str, str]:
    """Map own arguments of our stages to their flag, such as "--reranker cross-encoder"."""
    flags: dict[str, str] = {}
    for kind, classes in OPTIONS.items():
        for name, cls in classes.items():
            if cls is None:
                continue
            flags |= {f.name: f"--{kind} {name}" for f in fields(cls)}
    return flags


def arguments_of(values: Mapping[str, Any], layers: Sequence[str], *, caller: str) -> RunArguments:
    """Make a run's arguments from values by their command-line names; a `Path` is read as text.

    `layers` are flags for the layers below them: `--profile NAME`, `--config FILE`. Messages name
    the `caller`.

    Raises:
        ConfigError: If the method has no argument of a name, or a value has another type, is out of
            range, or contradicts others.
    """
    plain = {name: _plain_value(value) for name, value in values.items()}
    over = Defaults(caller, plain, wins=True)

    def find(chosen: Mapping[str, Any]) -> dict[str, type]:
        sections = find_sections(chosen)
        arguments = field_names(sections.values())
        for name in over.values:
            if name not in arguments:  # a layer would ignore it in silence
                message = unknown_name("argument", name, arguments).partition(" Known:")[0]
                method = chosen.get("method", RuntimeArguments.method)
                raise ConfigError(f"{message} (pgra train --method {method} --help lists them)")
        return sections

    sections = parse_sections(find, layers, prog=caller, description="", defaults=[over])
    refuse_contradictions(values, sections)
    return fill_folder(RunArguments(sections))


def _plain_value(value: Any) -> Any:
    """Return a value as a YAML would give it."""
    if isinstance(value, list | tuple):
        return [_plain_value(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def bare_name(task: str) -> str:
    """Return a task's name, where it was named by its YAML too."""
    return task.rpartition("/")[2].removesuffix(".yaml")


def fill_folder(args: RunArguments) -> RunArguments:
    """Fill in all of the folder's name but the seed, of which there may be several."""
    task = bare_name(args.data.task or "")
    name = str(args[args.output_section].output_dir).replace("{task}", task)
    name = name.replace("{method}", find_method(args.runtime.method).name(args))
    return args.change(args.output_section, output_dir=name)


def refuse_contradictions(names: Collection[str], sections: Mapping[str, Any]) -> None:
    """Refuse given arguments that contradict the method; it overrides what a YAML says of them."""
    method = sections["runtime"].method
    for name, decided in decided_by(method).items():
        value = next(getattr(args, name) for args in sections.values() if hasattr(args, name))
        if name in names and value != decided:
            raise ConfigError(
                f"{name} is {value}, and method '{method}' is the one with {decided}: leave it out"
            )


def arguments_from(values: Mapping[str, Any], changes: Mapping[str, Any]) -> RunArguments:
    """Make arguments from a run's record of them, by section, with changes by name.

    Raises:
        ConfigError: If they contradict each other, or the method has no argument of a name.
        KeyError: If a section is missing.
        TypeError: If this version does not know an argument.
    """
    merged: dict[str, Any] = {}
    for section in values.values():
        merged |= section
    merged |= changes
    classes = find_sections(merged)
    if unknown := {*changes} - field_names(classes.values()):
        raise ConfigError(f"{min(unknown)} is not of method '{merged['method']}': leave it out")
    sections = {}
    for name, cls in classes.items():
        if name == "training" and name not in values:  # a reader alone
            sections["folder"] = FolderArguments()
        else:
            changed = {f.name: changes[f.name] for f in fields(cls) if f.name in changes}
            sections[name] = cls(**{**values[name], **changed})
    return RunArguments(sections)


def open_method(
    args: RunArguments, context: Context, reranker: ReadyReranker | None = None
) -> Method:
    """Make and open the method that the arguments name; it raises as `Method.open`."""
    method = find_method(args.runtime.method)(args, context, reranker)
    method.open()
    return method


def task_name(args: RunArguments) -> str:
    """Return the name of the task; without one it is a ConfigError."""
    if args.data.task is None:
        raise ConfigError("--task is missing: name one (pgra list lists them), or give a YAML")
    return args.data.task
