"""Finished runs that a study of corrections asks, with and without a memory, whatever they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pgra.data.tasks import Task
from pgra.errors import DataError
from pgra.memory.label_arguments import PromptMemoryArguments
from pgra.memory.labels import LabelMemory, mix_labels
from pgra.memory.opening import OpenLookup, lookup_opener
from pgra.pipelines.icl_inputs import load_any_task
from pgra.pipelines.icl_predict import answer_queries, is_icl_run, load_icl_run
from pgra.pipelines.predict import Predictor
from pgra.reader.record import ReaderRecord, read_record
from pgra.types import Example, Prediction


@dataclass(frozen=True)
class Texts:
    """Labelled texts, and what the run decides of them alone."""

    name: str
    examples: Sequence[Example]
    unaided: Sequence[Prediction]


@dataclass(frozen=True)
class Told:
    """What was decided of a text with a memory.

    Attributes:
        label: The decision.
        is_aided: Whether a correction passed the gate.
    """

    label: str
    is_aided: bool


class Subject(Protocol):
    """A finished run that decides texts with and without a memory.

    Attributes:
        task: Its task's name.
        inputs: The task's inputs.
    """

    task: str
    inputs: tuple[str, ...]

    def decide(self, examples: Sequence[Example]) -> list[Prediction]:
        """Decide texts without a memory."""
        ...

    def decide_with(
        self, texts: Texts, memory: PromptMemoryArguments
    ) -> dict[float | None, list[Told]]:
        """Decide B texts with a memory, by the weight of its labels; None where none is mixed."""
        ...


class TrainedSubject:
    """A trained reader; see `Subject`."""

    def __init__(
        self, folder: Path, record: ReaderRecord, *, weights: Sequence[float], device: str
    ) -> None:
        self.task, self.inputs, self._weights = record.task, record.inputs, weights
        self._labels, self._device = record.labels, device
        self._predictor = Predictor.open(folder, device=device)
        self._open_lookup: OpenLookup | None = None

    def decide(self, examples: Sequence[Example]) -> list[Prediction]:
        """Decide texts without a memory; see `Subject`."""
        found = self._predictor.answer([dict(example.fields) for example in examples])
        return [answer.prediction for answer in found]

    def decide_with(
        self, texts: Texts, memory: PromptMemoryArguments
    ) -> dict[float | None, list[Told]]:
        """Mix the memory's labels in; see `Subject`."""
        if self._open_lookup is None:  # its encoder is loaded once for all memories
            args = memory.lookup()
            self._open_lookup = lookup_opener(args, device=self._device, task=self.task)
        opened = LabelMemory.open(
            memory,
            task=self.task,
            inputs=self.inputs,
            labels=self._labels,
            open_lookup=self._open_lookup,
        )
        with opened as labels:
            found = [labels.recall(example.fields) for example in texts.examples]
        told: dict[float | None, list[Told]] = {}
        for weight in self._weights:
            told[weight] = [
                Told(mix_labels(one, near, weight=weight).label, bool(near))
                for one, near in zip(texts.unaided, found, strict=True)
            ]
        return told


class PromptedSubject:
    """A frozen LM behind exemplars; see `Subject`."""

    def __init__(self, folder: Path, *, task: str, inputs: tuple[str, ...], device: str) -> None:
        self.task, self.inputs, self._folder = task, inputs, folder
        self._run = load_icl_run(folder, device=device)

    def decide(self, examples: Sequence[Example]) -> list[Prediction]:
        """Decide texts without a memory; see `Subject`."""
        fields = [dict(example.fields) for example in examples]
        told = answer_queries(self._folder, self._run, fields, PromptMemoryArguments())
        return [one.prediction for one in told]

    def decide_with(
        self, texts: Texts, memory: PromptMemoryArguments
    ) -> dict[float | None, list[Told]]:
        """Put corrections into prompts; see `Subject`."""
        fields = [dict(example.fields) for example in texts.examples]
        told = answer_queries(self._folder, self._run, fields, memory)
        return {None: [Told(one.prediction.label, bool(one.more["memory"])) for one in told]}


def open_subject(folder: Path, *, weights: Sequence[float], device: str) -> Subject:
    """Open a finished run.

    Args:
        folder: The run.
        weights: Of a memory's labels mixed with a reader's chances.
        device: What computes.

    Raises:
        DataError: If its answers are written, not labels.
        PgraError: As `pgra predict`.
    """
    if not is_icl_run(folder):
        record = read_record(folder, verify=False)
        return TrainedSubject(folder, record, weights=weights, device=device)
    task = load_any_task(load_icl_run(folder).data.task or "")
    if not isinstance(task, Task):
        raise DataError(f"{folder} writes answers, and this is a study of labels: give another run")
    return PromptedSubject(folder, task=task.name, inputs=task.inputs, device=device)
