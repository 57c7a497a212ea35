"""What corrected labels are worth to a finished run: a simulated user, near and other texts.

The user corrects, with some probability, each text of the first half of a run's test set that was
decided wrongly. Then the run decides, with that memory: the first half again; the first half with
words left out, which are near texts of known label; the second half, which nobody corrected.
"""

import logging
import random
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Protocol

from pgra.core import Context, Example, Json, Prediction
from pgra.data.tasks import Task
from pgra.errors import DataError
from pgra.memory.labels import LabelMemory, PromptMemoryArguments, input_key, mix_labels
from pgra.memory.log import FeedbackLog
from pgra.memory.lookup import OpenLookup, load_lookup
from pgra.methods.kate import load_any_task
from pgra.reader.record import ReaderRecord, read_record
from pgra.report.metrics import mcnemar
from pgra.report.results import PREDICTIONS_FILE, damaged, read_lines
from pgra.runs import Predictor, read_arguments

# Finished runs that a study of corrections asks, with and without a memory, whatever they are.


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
            self._open_lookup = load_lookup(args, Context(device=self._device), task=self.task)
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
        self._device = device

    def decide(self, examples: Sequence[Example]) -> list[Prediction]:
        """Decide texts without a memory; see `Subject`."""
        predictor = Predictor.open(self._folder, device=self._device)
        found = predictor.answer([dict(example.fields) for example in examples])
        return [answer.prediction for answer in found]

    def decide_with(
        self, texts: Texts, memory: PromptMemoryArguments
    ) -> dict[float | None, list[Told]]:
        """Put corrections into prompts; see `Subject`."""
        predictor = Predictor.open(self._folder, device=self._device, memory=memory)
        found = predictor.answer([dict(example.fields) for example in texts.examples])
        return {None: [Told(each.prediction.label, bool(each.details["memory"])) for each in found]}


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
    args = read_arguments(folder, {})
    if "memory" not in args.sections:
        record = read_record(folder, verify=False)
        return TrainedSubject(folder, record, weights=weights, device=device)
    task = load_any_task(args.data.task or "")
    if not isinstance(task, Task):
        raise DataError(f"{folder} writes answers, and this is a study of labels: give another run")
    return PromptedSubject(folder, task=task.name, inputs=task.inputs, device=device)


logger = logging.getLogger(__name__)

SETS = ("first half again", "first half, words left out", "second half")
_ONE_IN = 8  # words that are left out of a near copy, at least one


@dataclass(frozen=True)
class Row:
    """One set of texts under one memory.

    Attributes:
        texts: One of `SETS`.
        probability: That the user corrects.
        seed: Of the user.
        weight: Of the memory's labels; None where they stand in prompts.
        n: Texts.
        corrections: Entries of the memory.
        aided: Texts that got one.
        without: Share decided rightly without the memory.
        with_memory: The same with it.
        mended: Texts that became right.
        broken: Texts that became wrong.
        mcnemar_p: Of the two.
    """

    texts: str
    probability: float
    seed: int
    weight: float | None
    n: int
    corrections: int
    aided: int
    without: float
    with_memory: float
    mended: int
    broken: int
    mcnemar_p: float


def study_corrections(
    folder: Path,
    memory: PromptMemoryArguments,
    *,
    probabilities: Sequence[float],
    seeds: Sequence[int],
    weights: Sequence[float],
    most: int | None = None,
    device: str = "auto",
) -> list[Row]:
    """Let a simulated user correct half of a run's test texts, and measure.

    Args:
        folder: A finished run.
        memory: Look-up and gate; its `memory` is not read, for each user fills a new one.
        probabilities: That a wrong decision is corrected.
        seeds: Of the user; where all is corrected, the first one does.
        weights: Of a memory's labels mixed with a reader's chances.
        most: Texts of the test set, the first; None for all.
        device: What computes.

    Raises:
        DataError: If the run has fewer than two texts, or none of the first half is wrong.
        PgraError: As `pgra predict`.
    """
    subject = open_subject(folder, weights=weights, device=device)
    decided = _read(folder, subject.inputs)
    count = len(decided.examples[:most])
    half = count // 2
    first = Texts(SETS[0], decided.examples[:half], decided.unaided[:half])
    wrong = [e for e, p in zip(first.examples, first.unaided, strict=True) if e.label != p.label]
    if not wrong:
        raise DataError(
            f"{folder} decides all {half} texts of the first half rightly, so that nothing is "
            "corrected: give a run with more test examples"
        )
    copies = [leave_out_words(example) for example in first.examples]
    logger.info("study: %d of %d texts are decided wrongly", len(wrong), half)
    sets = [
        first,
        Texts(SETS[1], copies, subject.decide(copies)),
        Texts(SETS[2], decided.examples[half:count], decided.unaided[half:count]),
    ]
    rows = []
    for chance in probabilities:
        for seed in seeds if chance < 1 else seeds[:1]:
            corrected = draw_corrections(wrong, chance, seed)
            rows += _measure(subject, corrected, sets, memory, chance=chance, seed=seed)
    return rows


def draw_corrections(wrong: Sequence[Example], probability: float, seed: int) -> list[Example]:
    """Give those of the wrongly decided that the user corrects."""
    draw = random.Random(f"corrections/{seed}")
    return [example for example in wrong if draw.random() < probability]


def leave_out_words(example: Example) -> Example:
    """Give a near copy: of every field one word in eight is left out, at least one of two.

    Which ones depends on the text alone.
    """
    fields = {name: _leave_out(text) for name, text in example.fields.items()}
    return replace(example, id=f"{example.id}-copy", fields=fields)


def _leave_out(text: str) -> str:
    words = text.split()
    if len(words) < 2:
        return text
    count = max(1, round(len(words) / _ONE_IN))
    gone = set(random.Random(f"copy/{text}").sample(range(len(words)), count))
    return " ".join(word for place, word in enumerate(words) if place not in gone)


def _read(folder: Path, inputs: Sequence[str]) -> Texts:
    run = folder.parent if (folder.parent / PREDICTIONS_FILE).is_file() else folder
    path = run / PREDICTIONS_FILE
    examples, unaided = [], []
    for line in read_lines(path):
        try:
            fields = line.get("fields") or {inputs[0]: line["text"]}
            examples.append(Example(str(line["id"]), fields, str(line["label"])))
            unaided.append(Prediction(str(line["id"]), line["prediction"], line["scores"]))
        except KeyError as error:
            raise damaged(path, error) from None
    return Texts("all", examples, unaided)


def _measure(
    subject: Subject,
    corrected: Sequence[Example],
    sets: Sequence[Texts],
    memory: PromptMemoryArguments,
    *,
    chance: float,
    seed: int,
) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as root:
        path = Path(root) / "memory.sqlite"
        with FeedbackLog.open(path) as log:
            for one in corrected:
                key = input_key(one.fields, subject.inputs)
                log.write(key, str(one.label), source="simulated", task=subject.task)
        named = replace(memory, memory=str(path))
        for texts in sets:
            found = subject.decide_with(texts, named)
            for weight, told in found.items():
                row = _compare(texts, told, chance=chance, seed=seed, weight=weight)
                rows.append(replace(row, corrections=len(corrected)))
    return rows


def _compare(
    texts: Texts, told: Sequence[Told], *, chance: float, seed: int, weight: float | None
) -> Row:
    truth = [example.label for example in texts.examples]
    before = [a == b.label for a, b in zip(truth, texts.unaided, strict=True)]
    after = [a == b.label for a, b in zip(truth, told, strict=True)]
    pairs = list(zip(before, after, strict=True))
    return Row(
        texts=texts.name,
        probability=chance,
        seed=seed,
        weight=weight,
        n=len(truth),
        corrections=0,
        aided=sum(one.is_aided for one in told),
        without=mean(before),
        with_memory=mean(after),
        mended=pairs.count((False, True)),
        broken=pairs.count((True, False)),
        mcnemar_p=mcnemar(after, before),
    )


def as_records(rows: Sequence[Row]) -> list[dict[str, Json]]:
    """Give rows as JSON tells them."""
    return [asdict(row) for row in rows]


def write_table(rows: Sequence[Row]) -> str:
    """Lay rows out as a table in Markdown, means over the user's seeds."""
    lines = [
        "| texts | p | weight | corrections | aided | without | with | mended | broken |",
        "|:--|:-:|:-:|:-:|:-:|:-:|:-:|:-:|:-:|",
    ]
    groups: dict[tuple[str, float, float | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.texts, row.probability, row.weight), []).append(row)
    for (texts, chance, weight), same in groups.items():
        told = "in the prompt" if weight is None else f"{weight:g}"
        counts = [
            mean(values)
            for values in zip(
                *((r.corrections, r.aided, r.mended, r.broken) for r in same), strict=True
            )
        ]
        accuracy = [mean(r.without for r in same), mean(r.with_memory for r in same)]
        cells = [texts, f"{chance:g}", told, *(f"{one:.4g}" for one in counts[:2])]
        cells += [*(f"{one:.3f}" for one in accuracy), *(f"{one:.3g}" for one in counts[2:])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
