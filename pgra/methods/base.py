"""The contract of a method: what decides a task's examples.

A method is opened with its arguments, reads its task, and refuses early what cannot work. `prepare`
does the long work that runs with other seeds share, `fit` trains, `decide` decides. Folders, locks,
resume, seeds and results are the run's (`pgra.runs`), so that they are alike for all methods.
"""

import copy
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

from pgra.artifacts import digest
from pgra.config import RunArguments, find_class
from pgra.core import Context, Example, Json, Prediction
from pgra.data.bundled import BUNDLED_DATA
from pgra.data.examples import load_splits
from pgra.data.tasks import GenerationTask, Task, load_task
from pgra.errors import ConfigError
from pgra.lm.bundled import BUNDLED_MODELS
from pgra.report.results import EvidenceLine
from pgra.retrieval.shards import examples_digest

logger = logging.getLogger(__name__)

METHODS: dict[str, str] = {
    "exhaustive": "pgra.methods.pgra:Pgra",
    "fid": "pgra.methods.pgra:Pgra",
    "icl": "pgra.methods.kate:Icl",
    "kate": "pgra.methods.kate:Kate",
    "knn": "pgra.methods.knn:NearestNeighbors",
    "lm-bff": "pgra.methods.lm_bff:LmBff",
    "pgra": "pgra.methods.pgra:Pgra",
    "plain": "pgra.methods.pgra:Pgra",
    "rag": "pgra.methods.rag:Rag",
    "ralm": "pgra.methods.ralm:Ralm",
    "random": "pgra.methods.pgra:Pgra",
}
"""Where each method's class is. What `--method` names else is `module:Class`, or an entry point of
the group `pgra.methods`. Readers that differ in their evidence alone are one class: what tells
them apart stands in `pgra.config.READERS`."""

SPLITS = ("train", "dev", "test")


@dataclass
class TaskData:
    """A task's examples.

    Attributes:
        task: The task: its labels are chosen, or its answers written.
        train: What is learned from.
        dev: What settings and checkpoints are chosen on.
        test: What is reported on.
        notes: What a reader of the numbers must know of the data.
    """

    task: Task | GenerationTask
    train: Sequence[Example]
    dev: Sequence[Example]
    test: Sequence[Example]
    notes: Mapping[str, Json] = field(default_factory=dict)

    @classmethod
    def read(cls, args: RunArguments) -> Self:
        """Read a task with labels, and its splits.

        Raises:
            ConfigError: If no task is named, or there is none of that name.
            DataError: If the data cannot be read.
        """
        task = load_task(task_name(args))
        splits = load_splits(task, args.data)
        return cls(task, splits.train, splits.dev, splits.test, splits.notes)

    @property
    def labels(self) -> tuple[str, ...]:
        """The task's labels; none where answers are written."""
        return self.task.labels if isinstance(self.task, Task) else ()

    @property
    def metric(self) -> str:
        """The headline metric."""
        return self.task.metric if isinstance(self.task, Task) else self.task.metrics[0]

    def examples(self, split: str) -> list[Example]:
        """Return a split's examples."""
        return list({"train": self.train, "dev": self.dev, "test": self.test}[split])

    def fingerprint(self, split: str) -> str:
        """Return a digest of a split's examples and their labels."""
        examples = self.examples(split)
        return digest([examples_digest(examples), [example.label for example in examples]])


@dataclass(frozen=True)
class Decisions:
    """What a method says of B examples.

    Attributes:
        predictions: One for each, in order.
        evidence: What was read beside each; empty where nothing was.
        details: Further entries of each one's line in `predictions.jsonl`; empty for none.
        notes: What a reader of the numbers must know.
        metrics: Further entries of `metrics.json`.
        calibration: The temperature of the probabilities, and what it changed; None without one.
        values: Metrics by name, where labels alone do not give them.
        interval: Of the headline metric among `values`.
    """

    predictions: Sequence[Prediction]
    evidence: Sequence[Sequence[EvidenceLine]] = ()
    details: Sequence[Mapping[str, Json]] = ()
    notes: Sequence[str] = ()
    metrics: Mapping[str, Json] = field(default_factory=dict)
    calibration: Mapping[str, Json] | None = None
    values: Mapping[str, float] | None = None
    interval: Sequence[float] | None = None


class Method(ABC):
    """Decides a task's examples. Knows nothing of run folders, several seeds or reports.

    A method from outside needs `decide` alone: `--method my_package.methods:MyMethod`.

    Attributes:
        SECTIONS: Its own argument dataclasses by section, beside `runtime` and `data`.
        TRAINS: Whether `fit` trains weights, which a run keeps in its `reader/`.
        SEEDS: What a seed changes, as `summary.json` says it.
        args: All arguments.
        context: Where it runs.
        data: The task's examples.
        seed: Of this run.
        seconds: Wall-clock time by stage.
        fingerprints: Digests of what each stage is given.
    """

    SECTIONS: ClassVar[Mapping[str, type]] = {}
    TRAINS: ClassVar[bool] = False
    SEEDS: ClassVar[str] = "of no effect here: nothing is drawn, nothing is trained"

    data: TaskData

    def __init__(self, args: RunArguments, context: Context) -> None:
        self.args, self.context, self.seed = args, context, args.seed
        self.seconds: dict[str, float] = {}
        self.fingerprints: dict[str, Json] = {}

    def open(self) -> None:
        """Read the task, and refuse what cannot work; load nothing heavy.

        Raises:
            PgraError: If arguments, data or models cannot be used.
        """
        self.data = TaskData.read(self.args)
        self.fingerprints |= {split: self.data.fingerprint(split) for split in SPLITS}

    def identity(self) -> dict[str, Json]:
        """Return what decides predictions, as far as it is known yet, besides the examples."""
        named = self.args.deciding(self.SECTIONS)
        return {f"{section}.{name}": v for section in named for name, v in named[section].items()}

    def prepare(self, splits: Sequence[str] = SPLITS) -> None:
        """Do the long work that runs with other seeds share, or take up what is there."""

    def with_seed(self, args: RunArguments) -> Self:
        """Return the method of a run with another seed or training, sharing what is prepared."""
        other = copy.copy(self)
        other.args, other.seed = args, args.seed
        other.seconds, other.fingerprints = dict(self.seconds), dict(self.fingerprints)
        return other

    def fit(self, folder: Path) -> Mapping[str, Json] | None:  # noqa: ARG002 (the contract's)
        """Learn from the training examples, in a folder that a stopped run goes on in.

        Returns:
            What the dev set said: "metric", "value", ...; None if nothing was decided on it.
        """
        return None

    def load(self, folder: Path) -> None:
        """Take up what `fit` left in a run's folder."""
        self.fit(folder)

    @abstractmethod
    def decide(self, examples: Sequence[Example]) -> Decisions:
        """Decide examples: a split's, or new ones."""

    def finish(self, folder: Path) -> None:
        """Complete a measured run's folder, in the main process."""

    def models(self) -> Sequence[str]:
        """Return the names of all models it uses, as the user wrote them."""
        return ()

    def sample_prompt(self) -> str | None:
        """Return a prompt as the LM sees it, for `prompt.txt`; None without one."""
        return None

    @classmethod
    def restore(cls, folder: Path, args: RunArguments, context: Context) -> Self:
        """Open a finished run to decide new examples.

        Args:
            folder: The run.
            args: Its arguments.
            context: Where it runs now.

        Raises:
            ArtifactError: If the data are not those of the run.
        """
        from pgra.runs import check_restored

        method = cls(args, context)
        method.open()
        check_restored(folder, {**method.identity(), **method.fingerprints})
        method.prepare(())
        method.load(folder)
        return method

    def foresee(self) -> "Forecast":
        """Tell what the LM has yet to read, before anything is run."""
        return Forecast(None, f"{self.args.method} is not foreseen")

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Keep a stage's wall-clock time."""
        start = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - start

    def notes(self) -> list[str]:
        """Return what a reader of the numbers must know of data and models."""
        shared = self.data.notes.get("test_rows_in_train")
        sources = [self.args.data.dataset_name or ""]
        found = [f"{shared} test texts also stand in the training file"] if shared else []
        return [*bundled_notes(self.models(), sources), *found]


@dataclass(frozen=True)
class Forecast:
    """What an LM has yet to read.

    Attributes:
        texts: Texts or prompts; None if it cannot be told.
        note: Why, or of what kind they are.
        is_exact: Whether it is a count, not an estimate.
        parts: Names of what is read once: runs that share all of theirs read nothing more.
    """

    texts: int | None
    note: str = ""
    is_exact: bool = True
    parts: Sequence[str] = ()


def find_method(name: str) -> type[Method]:
    """Import a method's class.

    Raises:
        ConfigError: If there is none of that name, with the nearest.
    """
    found: type[Method] = find_class("method", name, METHODS)
    return found


def open_method(args: RunArguments, context: Context) -> Method:
    """Make and open the method that the arguments name.

    Raises:
        PgraError: As `Method.open`.
    """
    method = find_method(args.runtime.method)(args, context)
    method.open()
    return method


def task_name(args: RunArguments) -> str:
    """Return the task that is named.

    Raises:
        ConfigError: If none is.
    """
    if args.data.task is None:
        raise ConfigError("--task is missing: name one (pgra data lists them), or give a YAML")
    return args.data.task


def bundled_notes(models: Sequence[str], data: Sequence[str]) -> list[str]:
    """Gather what is to be known of bundled models and data among some names.

    Args:
        models: Names of models, as the user wrote them.
        data: Names of data sets and corpora.
    """
    notes = []
    for names, table in ((models, BUNDLED_MODELS), (data, BUNDLED_DATA)):
        for name in names:
            part = table.get(name.removeprefix("bundled:")) if "bundled:" in name else None
            notes += [f"{name}: {part.note}"] if part and part.note else []
    return notes
