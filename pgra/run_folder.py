"""A run's folder: whose it is, what decides it, whether it is whole; what stages leave in it."""

import copy
import errno
import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from pgra.artifacts import check_fingerprint, file_checksum, write_json
from pgra.config import PgraArguments
from pgra.core import MISSING_ROW, Candidates, Example, Json
from pgra.data.corpus import Corpus
from pgra.data.examples import Splits
from pgra.data.tasks import Task
from pgra.errors import ArtifactError
from pgra.exemplars.prompt import NearestExemplars
from pgra.lm.load import ModelSource
from pgra.prompts.fewshot import FewShotPrompt
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.reader.fields import NOT_DECIDING
from pgra.reader.record import READER_FOLDER
from pgra.reader.resume import last_checkpoint
from pgra.reader.train import TrainResult
from pgra.report.results import (
    METRICS_FILE,
    EvidenceLine,
    damaged,
    read_object,
)
from pgra.rerank import Reference, Reranker
from pgra.retrieval.base import Stored

# What the stages before the reader leave: a task's examples with their evidence.


SPLITS = ("train", "dev", "test")


@dataclass
class Found:
    """A task's examples with their evidence.

    Attributes:
        task: The task.
        splits: Its examples; training examples that stand in the prompt are left out.
        prompt: The LM's prompt; without exemplars where each query has its own.
        exemplars: Chooses each query's own; None where one prompt serves all.
        corpus: What was searched; None where nothing was.
        reranker: The second stage; None where nothing was searched.
        candidates: First stage, by split; the evidence itself where there is no first stage.
        evidence: Second stage, by split: all candidates in the new order.
        depth: How many the reader gets, the paper's d.
        seconds: Wall-clock time by stage.
        fingerprints: Of each stage's input.
    """

    task: Task
    splits: Splits
    prompt: FewShotPrompt
    exemplars: NearestExemplars | None = None
    corpus: Corpus | None = None
    reranker: Reranker | None = None
    candidates: dict[str, Stored] = field(default_factory=dict)
    evidence: dict[str, Stored] = field(default_factory=dict)
    depth: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    fingerprints: dict[str, Json] = field(default_factory=dict)

    def copy(self) -> "Found":
        """Give one for another run: times and fingerprints of its own, the same evidence."""
        return replace(self, seconds=dict(self.seconds), fingerprints=dict(self.fingerprints))

    @property
    def reference(self) -> Reference:
        """Give what a similarity is fitted to."""
        return Reference(self.splits.train, self.task.prompt_words)

    def examples(self, split: str) -> list[Example]:
        """Give a split's examples."""
        by_name = {"train": self.splits.train, "dev": self.splits.dev, "test": self.splits.test}
        return by_name[split]

    def evidence_texts(self, split: str) -> list[list[str]]:
        """Give what the reader reads beside each example of a split; missing rows are left out."""
        return [[line.text for line in lines] for lines in self.evidence_lines(split)]

    def evidence_lines(
        self, split: str, best: Candidates | None = None
    ) -> list[list[EvidenceLine]]:
        """Give each example's top evidence with its standing in both stages.

        Args:
            split: Which examples.
            best: What they were read with, where that is not the second stage's best.
        """
        if self.corpus is None:
            return [[] for _ in self.examples(split)]
        if best is None:
            best = self.evidence[split].candidates.top(self.depth)
        return evidence_lines(self.corpus, self.candidates[split].candidates, best)


def evidence_lines(corpus: Corpus, first: Candidates, best: Candidates) -> list[list[EvidenceLine]]:
    """Give each query's evidence with its text and its standing in both stages.

    Args:
        corpus: What rows stand for.
        first: The first stage's candidates, (B, K).
        best: The second stage's, (B, N), of the same rows; missing ones are left out.
    """
    distinct = np.unique(best.rows[best.rows != MISSING_ROW])
    texts = dict(zip(distinct.tolist(), corpus.texts(distinct), strict=True))
    lines = []
    for query in range(len(best)):
        rank = {int(row): place for place, row in enumerate(first.rows[query])}
        pairs = zip(best.rows[query].tolist(), best.scores[query].tolist(), strict=True)
        lines.append(
            [
                EvidenceLine(
                    row, texts[row], rank[row] + 1, float(first.scores[query, rank[row]]), score
                )
                for row, score in pairs
                if row != MISSING_ROW
            ]
        )
    return lines


@contextmanager
def timed(found: Found, stage: str) -> Iterator[None]:
    """Keep a stage's wall-clock time."""
    start = time.perf_counter()
    yield
    found.seconds[stage] = time.perf_counter() - start


IDENTITY_FILE = "run.json"
ARGUMENTS_FILE = "arguments.json"
TRAINING_FILE = "training.json"
WEIGHTS_FILE = "model.safetensors"
# Others follow from these, so a difference is told of these first.
_LEADING = ("task", "method", "num_evidence", "max_steps")


def task_identity(args: PgraArguments, found: Found) -> dict[str, Json]:
    """Give what decides predictions, besides the reader's weights."""
    return {
        "method": args.method,
        "task": found.task.name,
        "labels": list(found.task.labels),
        "metric": found.task.metric,
        **args.reader.deciding(),
        "verbalizer": dict(found.task.verbalizer),
        "reader_template": args.reader.reader_template or found.task.reader_template,
        "num_evidence": args.rerank.num_evidence,
        **found.fingerprints,
    }


def run_identity(
    args: PgraArguments, training: ReaderTrainingArguments, found: Found, source: ModelSource
) -> dict[str, Json]:
    """Give what decides a run's weights and predictions."""
    return {
        **task_identity(args, found),
        "reader_weights": source.identity,
        "num_processes": training.world_size,
        **training_identity(training, found.task.metric),
    }


def training_identity(training: ReaderTrainingArguments, metric: str) -> dict[str, Json]:
    """Give the Trainer's arguments that decide the weights, as they will be resolved.

    Args:
        training: All of them.
        metric: The task's, which chooses the checkpoint where no other is named.
    """
    chosen = copy.copy(training)
    chosen.choose_metric(metric)
    values = chosen.to_dict()
    return {name: _plain(value) for name, value in values.items() if name not in NOT_DECIDING}


def _plain(value: Any) -> Json:
    """Write a whole number in one way: 0 is a default of `transformers`, 0.0 the command line's."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list) else value


def check_writable(folder: Path) -> None:
    """Refuse a folder that could not be made or written, without making it.

    Raises:
        OSError: If a part of its path is no folder, or may not be written.
    """
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))


def check_same_run(folder: Path, identity: Mapping[str, Json], *, is_whole: bool = True) -> None:
    """Let the same run go on; refuse another one, unless it ended before its first checkpoint.

    Args:
        folder: The run.
        identity: What decides it.
        is_whole: Whether all of it is known yet; if not, only what is known is compared.

    Raises:
        ArtifactError: If the folder holds another run; the first difference is named.
    """
    path = folder / IDENTITY_FILE
    has_begun = (folder / READER_FOLDER).is_dir() or last_checkpoint(folder) is not None
    has_begun = has_begun or (folder / METRICS_FILE).is_file()  # a system that trains nothing
    if not path.is_file() or not has_begun:
        return
    made = _known(read_object(path), identity, is_whole=is_whole)
    _compare(folder, made, identity, "choose another --output_dir, or delete it")


def check_same_checkpoint(
    checkpoint: Path, identity: Mapping[str, Json], *, is_whole: bool = True
) -> None:
    """Refuse to go on from a checkpoint of a run that something else decided.

    Args:
        checkpoint: A folder within its run.
        identity: What decides the run that would go on.
        is_whole: Whether all of it is known yet; if not, only what is known is compared.

    Raises:
        ArtifactError: If it is no checkpoint, its run is unknown, or another; the first difference
            is named.
    """
    if not checkpoint.is_dir():
        raise ArtifactError(
            f"resume_from_checkpoint '{checkpoint}' is no folder: give a checkpoint-STEP folder, "
            "or true for the last one"
        )
    path = checkpoint.resolve().parent / IDENTITY_FILE
    if not path.is_file():
        raise ArtifactError(
            f"{checkpoint} has no {IDENTITY_FILE} beside it, so what it was trained on is unknown: "
            "give a checkpoint inside its run's folder"
        )
    made = _known(read_object(path), identity, is_whole=is_whole)
    _compare(checkpoint, made, identity, "give a checkpoint of the same run")


def _known(
    made: Mapping[str, Json], identity: Mapping[str, Json], *, is_whole: bool
) -> Mapping[str, Json]:
    return made if is_whole else {name: v for name, v in made.items() if name in identity}


def check_same_inputs(run: Path, asked: Mapping[str, Json], *, free: Collection[str]) -> None:
    """Refuse to measure a run on other inputs than it was trained with.

    Args:
        run: The run.
        asked: What of its identity is known now.
        free: Fields that may differ.

    Raises:
        ArtifactError: If another field differs; it is named.
    """
    made = read_object(run / IDENTITY_FILE)
    both = [name for name in asked if name in made and name not in free]
    _compare(
        run,
        {name: made[name] for name in both},
        {name: asked[name] for name in both},
        "its data, task or corpus changed since; restore them, or train again",
    )


def _compare(
    folder: Path, made: Mapping[str, Json], asked: Mapping[str, Json], way_out: str
) -> None:
    """Compare two identities: what a person chose first, then digests of what follows from it."""
    for kind in range(3):
        parts = [
            {name: value for name, value in values.items() if _kind(name) == kind}
            for values in (made, asked)
        ]
        try:
            check_fingerprint(folder, made=parts[0], asked=parts[1])
        except ArtifactError as error:
            reason = str(error).removesuffix(": use another folder or build it again")
            raise ArtifactError(f"{reason}: {way_out}") from None


def _kind(name: str) -> int:
    """Sort a field of an identity: what others follow from, a value, or a product's digest."""
    return 0 if name in _LEADING else 2 if "/" in name else 1


def reader_checksum(run: Path) -> str:
    """Give the checksum of a run's weights.

    Raises:
        ArtifactError: If there are none.
    """
    path = run / READER_FOLDER / WEIGHTS_FILE
    if not path.is_file():
        raise ArtifactError(f"{path} is missing: delete {path.parent} and run train.py again")
    return file_checksum(path)


def write_training(run: Path, result: TrainResult, arguments: ReaderTrainingArguments) -> None:
    """Say that a run's training is finished, and what it gave on the dev set."""
    record: dict[str, Json] = {
        "metric": str(arguments.metric_for_best_model).removeprefix("eval_"),
        "greater_is_better": bool(arguments.greater_is_better),
        "value": result.best_metric,
        "step": result.best_step,
        "steps": result.steps,
        "train_loss": result.train_loss,
        "seconds": round(result.seconds, 3),
        "reader": reader_checksum(run),
    }
    write_json(run / TRAINING_FILE, record)


def read_training(run: Path) -> dict[str, Any] | None:
    """Read what a finished training gave; None if it is not finished.

    Raises:
        ArtifactError: If the reader is not the one that was trained.
    """
    if not (run / TRAINING_FILE).is_file() or not (run / READER_FOLDER).is_dir():
        return None
    record = read_object(run / TRAINING_FILE)
    if record.get("reader") != reader_checksum(run):
        raise _other_reader(run, TRAINING_FILE)
    return record


def _other_reader(run: Path, told_in: str) -> ArtifactError:
    path = run / READER_FOLDER / WEIGHTS_FILE
    return ArtifactError(
        f"{path} is damaged (it is not what {told_in} tells of): "
        f"delete {path.parent} and run train.py again"
    )


def check_reader(run: Path) -> str:
    """Give the checksum of a finished run's weights.

    Raises:
        ArtifactError: If there are none, or not those that the run's metrics tell of.
    """
    checksum = reader_checksum(run)
    if (run / METRICS_FILE).is_file():
        known = read_object(run / METRICS_FILE).get("fingerprints", {}).get("reader", checksum)
        if known != checksum:
            raise _other_reader(run, METRICS_FILE)
    return checksum


def load_run_arguments(
    run: Path, changes: Mapping[str, Mapping[str, Any]]
) -> tuple[PgraArguments, int]:
    """Read a run's resolved arguments, with changes, and its seed.

    Raises:
        ArtifactError: If the folder holds no finished reader.
    """
    if not (run / READER_FOLDER).is_dir() or not (run / ARGUMENTS_FILE).is_file():
        raise ArtifactError(
            f"{run} holds no trained reader: give the folder of a finished run of train.py"
        )
    values = read_object(run / ARGUMENTS_FILE)
    try:
        return arguments_from(values, changes), int(values["training"]["seed"])
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(run / ARGUMENTS_FILE, error) from None


def arguments_from(
    values: Mapping[str, Any], changes: Mapping[str, Mapping[str, Any]]
) -> PgraArguments:
    """Make arguments of a run's record of them, with changes, by section.

    Raises:
        ConfigError: If they contradict each other.
        KeyError: If a section is missing.
        TypeError: If there is one that this version does not know.
    """
    sections = {}
    for section in fields(PgraArguments):
        cls: Any = section.type
        sections[section.name] = cls(**{**values[section.name], **changes.get(section.name, {})})
    return PgraArguments(**sections)
