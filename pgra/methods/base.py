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
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from pgra.arrays import Scores
from pgra.artifacts import digest
from pgra.config import CHOOSING, Defaults, Entry, find_class, parse_arguments
from pgra.context import Context
from pgra.data.bundled import BUNDLED_DATA, BUNDLED_MODELS
from pgra.data.examples import AnsweredExample, DataArguments, load_splits
from pgra.data.tasks import GenerationTask, Task, load_any_task
from pgra.errors import ConfigError, unknown_name
from pgra.methods.arguments import METHODS, OPTIONS, RunArguments, RuntimeArguments, decided_by
from pgra.reader.arguments import FolderArguments
from pgra.reader.calibration import Calibration, decide
from pgra.report.metrics import measure, measure_written
from pgra.report.results import Decisions as Decisions
from pgra.rerank import RERANKERS, find_reranker
from pgra.retrieval.base import RETRIEVERS, examples_digest, find_retriever
from pgra.types import Example, Json

SPLITS = ("train", "dev", "test")
_BOOTSTRAP_SEED = 0
_DRAWS = 2000
_EXACT = "exact_match"


@dataclass
class TaskData:
    """A task and its examples.

    Train is learned from, dev chooses settings and checkpoints, test is reported on. `notes` are
    what a reader of the numbers must know of the data, `set_aside` the training examples that stand
    in the prompt of an LM, its own or a control's, and are not learned from.
    """

    task: Task | GenerationTask
    train: Sequence[Example]
    dev: Sequence[Example]
    test: Sequence[Example]
    notes: Mapping[str, Json] = field(default_factory=dict)
    set_aside: Sequence[Example] = ()

    @classmethod
    def read(cls, args: RunArguments, *, least_dev: int = 0) -> Self:
        """Read a task and its splits; `least_dev` as in `load_splits`.

        Raises:
            ConfigError: If no task is named, or there is none of that name.
            DataError: If the data cannot be read.
        """
        task = load_any_task(task_name(args))
        splits = load_splits(task, args.data, least_dev=least_dev)
        return cls(task, splits.train, splits.dev, splits.test, splits.notes)

    @classmethod
    def read_pool(cls, args: RunArguments) -> Self:
        """Read any task's train, a pool of exemplars, and its test set, the queries; see `read`."""
        task = load_any_task(task_name(args))
        other = args["icl"].query_dataset_name
        splits = load_splits(task, args.data, is_trained=False, query_dataset_name=other)
        return cls(task, splits.train, [], splits.test, splits.notes)

    @property
    def labels(self) -> tuple[str, ...]:
        """The task's labels; none where answers are written."""
        return self.task.labels

    @property
    def metric(self) -> str:
        return self.task.metric

    def labelled(self) -> Self:
        """Return itself; a ConfigError where answers are written."""
        if isinstance(self.task, GenerationTask):
            raise ConfigError(
                f"task '{self.task.name}' has no labels, which this method needs: try pgra or kate"
            )
        return self

    def examples(self, split: str) -> list[Example]:
        return list(getattr(self, split))

    def answered(self, split: str) -> list[AnsweredExample]:
        """Return a split's examples with right answers; none of a task with labels."""
        return [each for each in getattr(self, split) if isinstance(each, AnsweredExample)]

    def measure_dev(self, decided: Sequence[str]) -> dict[str, float]:
        """Return the metric, and those that belong to it, of the dev set's decisions."""
        if isinstance(self.task, GenerationTask):
            return dict(measure_written(self.task, decided, self.answered("dev")).values)
        truth = [str(example.label) for example in self.dev]
        return measure(self.metric, truth, decided, self.labels)

    def fingerprints(self, splits: Sequence[str] = SPLITS) -> dict[str, Json]:
        """Return digests of the splits' examples and labels, and of the test set's answers."""
        found: dict[str, Json] = {}
        for split in splits:
            examples = self.examples(split)
            labels = [example.label for example in examples]
            found[split] = digest([examples_digest(examples), labels])
        if answers := [list(example.answers) for example in self.answered("test")]:
            found["answers"] = digest(answers)
        return found


def label_shares(data: TaskData) -> npt.NDArray[np.float64]:
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
        decided = [data.labels[place] for place in other.apply(scores).argmax(axis=1)]
        value = measure(data.metric, truth, decided, data.labels)[data.metric]
        entry["otherwise"] = value
        note += f": {data.metric} is {value:.4f} otherwise"
    return Decisions(predictions, notes=[*notes, note], metrics={"label_bias": entry})


def measure_answers(
    task: GenerationTask,
    asked: Sequence[AnsweredExample],
    decided: Decisions,
    more: Mapping[str, Sequence[float]] | None = None,
) -> Decisions:
    """Add what is measured on written texts: each example's own values, and all metrics.

    `more` are further measures by name, a fraction an example, (B,).
    """
    found = measure_written(task, [prediction.label for prediction in decided.predictions], asked)
    each = {**found.each, **(more or {})}
    details: list[Mapping[str, Json]] = []
    for i, example in enumerate(asked):
        values = {name: round(own[i], 6) for name, own in each.items()}
        line: dict[str, Json] = {"answers": list(example.answers)}
        if _EXACT in values:
            line["is_right"] = values.pop(_EXACT) == 1
        line |= values
        if found.counts:
            line["bleu_counts"] = list(found.counts[i])
        if example.table:
            line["is_overlap"] = example.table.is_overlap
        details.append({**line, **(decided.details[i] if decided.details else {})})
    interval = None  # BLEU is of all texts together and has none
    if task.metric in found.each:
        own = np.array(found.each[task.metric])
        generator = np.random.default_rng(_BOOTSTRAP_SEED)
        rows = generator.integers(len(own), size=(_DRAWS, len(own)))
        interval = np.percentile(own[rows].mean(axis=1), [2.5, 97.5]).tolist()
    means = {name: float(np.mean(own)) for name, own in (more or {}).items()}
    return replace(decided, details=details, values={**found.values, **means}, interval=interval)


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
        seconds: Wall-clock time by stage.
        fingerprints: Digests of each stage's input.
    """

    SECTIONS: ClassVar[Mapping[str, type]] = {}

    data: TaskData

    def __init__(self, args: RunArguments, context: Context) -> None:
        super().__init__()
        self.args = args
        self.context = context
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
        own = [section for section in self.args.sections if section in self.SECTIONS]
        named = {section: self.args[section].deciding() for section in own}
        return {f"{section}.{name}": v for section in named for name, v in named[section].items()}

    def prepare(self, splits: Sequence[str] = SPLITS) -> None:
        """Do, or load, the long work that runs with other seeds share."""

    def with_seed(self, args: RunArguments) -> Self:
        """Return the method of a run with another seed or training, sharing what is prepared."""
        other = copy.copy(self)
        other.args = args
        other.seed = args.seed
        other.seconds, other.fingerprints = dict(self.seconds), dict(self.fingerprints)
        return other

    def fit(self, folder: Path) -> Mapping[str, Json] | None:  # noqa: ARG002 (the contract's)
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

    def sources(self) -> list[str]:
        """Return the names of all models and data that it uses, as the user wrote them."""
        return [self.args.data.dataset_name or ""]

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
        for name in dict.fromkeys(self.sources()):
            part = bundled.get(name.removeprefix("bundled:")) if "bundled:" in name else None
            notes += [f"{name}: {part.note}"] if part and part.note else []
        return notes


def find_method(name: str) -> type[Method]:
    """Import a method's class: of `METHODS`, an entry point of `pgra.methods`, or `module:Class`.

    Raises:
        ConfigError: If there is none of that name.
    """
    table = {known: entry.path for known, entry in METHODS.items()}
    found: type[Method] = find_class("method", name, table)
    return found


def find_sections(chosen: Mapping[str, Any]) -> dict[str, type]:
    """Return the argument dataclasses of a run by section.

    `chosen` holds the given values of `method` and of others in `pgra.config.CHOOSING`, on which
    the sections depend. An unknown name is a ConfigError.
    """
    method = str(chosen.get("method", RuntimeArguments.method))
    sections: dict[str, type] = {"runtime": RuntimeArguments, "data": DataArguments}
    ours = METHODS.get(method)
    sections |= ours.sections if ours else find_method(method).SECTIONS
    if "training" not in sections:
        sections["folder"] = FolderArguments
    options = find_options(chosen).items()
    return sections | {n: own for n, own in options if n.removesuffix("_options") in sections}


def find_options(chosen: Mapping[str, Any]) -> dict[str, type]:
    """Return the own arguments of the chosen retriever and reranker, by section.

    Those of ours are known without their class.
    """
    kinds: dict[str, tuple[str, Mapping[str, Entry], Any]] = {
        "retriever_options": ("retriever", RETRIEVERS, find_retriever),
        "rerank_options": ("reranker", RERANKERS, find_reranker),
    }
    found = {}
    for section, (kind, table, find) in kinds.items():
        name = str(chosen.get(kind, "none"))
        name = "run" if name.startswith("run:") else name
        is_ours = name in table or name == "none"
        found[section] = OPTIONS[kind].get(name) if is_ours else find(name).Arguments
    return {section: cls for section, cls in found.items() if cls is not None}


def known_options() -> dict[str, str]:
    """Map own arguments of our stages to their flag, such as "--reranker cross-encoder"."""
    return {
        f.name: f"--{kind} {name}"
        for kind, classes in OPTIONS.items()
        for name, own in classes.items()
        for f in fields(own)
    }


def arguments_of(values: Mapping[str, Any], layers: Sequence[str], *, caller: str) -> RunArguments:
    """Make a run's arguments from values by their command-line names; a `Path` is read as text.

    `layers` are flags for the layers below them: `--profile NAME`, `--config FILE`. Messages name
    the `caller`.

    Raises:
        ConfigError: If the method has no argument of a name, or a value has another type, is out of
            range, or contradicts others.
    """
    given = Defaults(caller, {name: _plain_value(value) for name, value in values.items()})
    names: list[str] = []

    def classes(chosen: Mapping[str, Any]) -> list[type]:
        sections = find_sections(chosen)
        names.extend(sections)
        _refuse_strangers(given.values, sections, chosen)
        return list(sections.values())

    parsed = parse_arguments(classes, layers, prog=caller, description="", over=[given])
    sections = dict(zip(names, parsed, strict=True))
    refuse_contradictions(values, sections)
    return fill_folder(RunArguments(sections))


def _plain_value(value: Any) -> Any:
    """Return a value as a YAML would give it."""
    if isinstance(value, list | tuple):
        return [_plain_value(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _refuse_strangers(
    given: Mapping[str, Any], sections: Mapping[str, type], chosen: Mapping[str, Any]
) -> None:
    """Refuse what the method does not have; a layer would ignore it in silence."""
    known = {f.name for cls in sections.values() for f in fields(cls)}
    for name in given:
        if name not in known:
            message = unknown_name("argument", name, known).partition(" Known:")[0]
            method = chosen.get("method", RuntimeArguments.method)
            raise ConfigError(f"{message} (pgra train --method {method} --help lists them)")


def fill_folder(args: RunArguments) -> RunArguments:
    """Fill in all of the folder's name but the seed, of which there may be several."""
    task = (args.data.task or "").rpartition("/")[2].removesuffix(".yaml")
    name = str(args[args.output_section].output_dir).replace("{task}", task)
    name = name.replace("{method}", find_method(args.runtime.method).name(args))
    return args.change(args.output_section, output_dir=name)


def refuse_contradictions(given: Collection[str], sections: Mapping[str, Any]) -> None:
    """Refuse given arguments that contradict the method; it overrides what a YAML says of them."""
    method = sections["runtime"].method
    for name, decided in decided_by(method).items():
        asked = next(getattr(part, name) for part in sections.values() if hasattr(part, name))
        if name in given and asked != decided:
            raise ConfigError(
                f"{name} is {asked}, and method '{method}' is the one with {decided}: leave it out"
            )


def arguments_from(values: Mapping[str, Any], changes: Mapping[str, Any]) -> RunArguments:
    """Make arguments from a run's record of them, by section, with changes by name.

    Raises:
        ConfigError: If they contradict each other, or the method has no argument of a name.
        KeyError: If a section is missing.
        TypeError: If this version does not know an argument.
    """
    made = values.values()
    chosen = {name: value for own in made for name, value in own.items() if name in CHOOSING}
    chosen["method"] = values["runtime"]["method"]
    sections = {}
    unknown = set(changes)
    for name, cls in find_sections(chosen).items():
        asked = {f.name: changes[f.name] for f in fields(cls) if f.name in changes}
        unknown -= set(asked)
        if name == "training" and name not in values:  # a reader alone
            sections["folder"] = FolderArguments()
        else:
            sections[name] = cls(**{**values[name], **asked})
    if unknown:
        raise ConfigError(f"{min(unknown)} is not of method '{chosen['method']}': leave it out")
    return RunArguments(sections)


def open_method(args: RunArguments, context: Context) -> Method:
    """Make and open the method that the arguments name; it raises as `Method.open`."""
    method = find_method(args.runtime.method)(args, context)
    method.open()
    return method


def task_name(args: RunArguments) -> str:
    """Return the name of the task; without one it is a ConfigError."""
    if args.data.task is None:
        raise ConfigError("--task is missing: name one (pgra list lists them), or give a YAML")
    return args.data.task
