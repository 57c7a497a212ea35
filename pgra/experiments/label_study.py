"""What corrected labels are worth to a finished run: a simulated user, near and other texts.

The user corrects, with some probability, each text of the first half of a run's test set that was
decided wrongly. Then the run decides, with that memory: the first half again; the first half with
words left out, which are near texts of known label; the second half, which nobody corrected.
"""

import logging
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from pgra.core import Context, Example, Prediction
from pgra.data.tasks import Task
from pgra.errors import DataError
from pgra.memory.labels import LabelMemory, PromptMemoryArguments, input_key, mix_labels
from pgra.memory.log import FeedbackLog
from pgra.memory.lookup import OpenLookup, load_lookup
from pgra.methods.kate import load_any_task
from pgra.report.metrics import mcnemar
from pgra.report.results import PREDICTIONS_FILE, damaged, read_lines
from pgra.report.tables import Cell, Table
from pgra.runs import Predictor, read_arguments

logger = logging.getLogger(__name__)

SETS = ("first half again", "first half, words left out", "second half")
_ONE_IN = 8  # words that are left out of a near copy, at least one


class Subject:
    """A finished run that decides texts with and without a memory."""

    def __init__(self, folder: Path, *, weights: Sequence[float], device: str) -> None:
        """Open the run.

        Args:
            folder: The run.
            weights: Of a memory's labels, where they are mixed with the run's probabilities.
            device: What computes.

        Raises:
            DataError: If its answers are written, not labels.
            PgraError: As `pgra predict`.
        """
        args = read_arguments(folder, {})
        task = load_any_task(args.data.task or "")
        if not isinstance(task, Task):
            raise DataError(
                f"{folder} writes answers, and this is a study of labels: give another run"
            )
        self.task, self._folder, self._weights, self._device = task, folder, weights, device
        self._is_prompted = "memory" in args.sections  # corrections stand in its prompts
        self._run = Predictor.open(folder, device=device)
        self._open_lookup: OpenLookup | None = None

    def decide(self, examples: Sequence[Example]) -> list[Prediction]:
        """Decide texts without a memory."""
        return [a.prediction for a in self._run.answer([e.fields for e in examples])]

    def decide_with(
        self,
        memory: PromptMemoryArguments,
        examples: Sequence[Example],
        unaided: Sequence[Prediction],
    ) -> dict[float | None, list[tuple[str, bool]]]:
        """Decide B texts with a memory.

        Args:
            memory: Which, and its gate.
            examples: The texts.
            unaided: What the run decides of them alone.

        Returns:
            By the weight of its labels (None where none is mixed): each text's label, and whether
            a correction passed the gate.
        """
        if self._is_prompted:
            run = Predictor.open(self._folder, device=self._device, memory=memory)
            answers = run.answer([example.fields for example in examples])
            return {None: [(a.prediction.label, bool(a.details["memory"])) for a in answers]}
        if self._open_lookup is None:  # its encoder is loaded once for all memories
            context = Context(device=self._device)
            self._open_lookup = load_lookup(memory.lookup(), context, task=self.task.name)
        with LabelMemory(
            memory,
            task=self.task.name,
            inputs=self.task.inputs,
            labels=self.task.labels,
            open_lookup=self._open_lookup,
        ) as labels:
            found = [labels.recall(example.fields) for example in examples]
        return {
            weight: [
                (mix_labels(alone, near, weight=weight).label, bool(near))
                for alone, near in zip(unaided, found, strict=True)
            ]
            for weight in self._weights
        }


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
    subject = Subject(folder, weights=weights, device=device)
    inputs = subject.task.inputs
    examples, unaided = _read(folder, inputs)
    half = len(examples[:most]) // 2
    first = examples[:half]
    wrong = [e for e, said in zip(first, unaided, strict=False) if e.label != said.label]
    if not wrong:
        raise DataError(
            f"{folder} decides all {half} texts of the first half rightly, so that nothing is "
            "corrected: give a run with more test examples"
        )
    logger.info("study: %d of %d texts are decided wrongly", len(wrong), half)
    copies = [leave_out_words(example) for example in first]
    parts = (
        (first, unaided[:half]),
        (copies, subject.decide(copies)),
        (examples[half:most], unaided[half:most]),
    )
    rows = []
    for chance in probabilities:
        for seed in seeds if chance < 1 else seeds[:1]:
            corrected = draw_corrections(wrong, chance, seed)
            with tempfile.TemporaryDirectory() as root:
                path = Path(root) / "memory.sqlite"
                with FeedbackLog.open(path) as log:
                    for example in corrected:
                        key = input_key(example.fields, inputs)
                        log.write(
                            key, str(example.label), source="simulated", task=subject.task.name
                        )
                filled = replace(memory, memory=str(path))
                for name, (texts, alone) in zip(SETS, parts, strict=True):
                    truth = [example.label for example in texts]
                    before = [a == b.label for a, b in zip(truth, alone, strict=True)]
                    for weight, said in subject.decide_with(filled, texts, alone).items():
                        after = [a == b for a, (b, _) in zip(truth, said, strict=True)]
                        pairs = list(zip(before, after, strict=True))
                        row = Row(
                            texts=name,
                            probability=chance,
                            seed=seed,
                            weight=weight,
                            n=len(texts),
                            corrections=len(corrected),
                            aided=sum(is_aided for _, is_aided in said),
                            without=mean(before),
                            with_memory=mean(after),
                            mended=pairs.count((False, True)),
                            broken=pairs.count((True, False)),
                            mcnemar_p=mcnemar(after, before),
                        )
                        rows.append(row)
    return rows


def draw_corrections(wrong: Sequence[Example], probability: float, seed: int) -> list[Example]:
    """Return those of the wrongly decided that the user corrects."""
    draw = random.Random(f"corrections/{seed}")
    return [example for example in wrong if draw.random() < probability]


def leave_out_words(example: Example) -> Example:
    """Return a near copy: of every field one word in eight is left out, at least one of two.

    Which ones depends on the text alone.
    """
    fields = {}
    for name, text in example.fields.items():
        words = text.split()
        count = max(1, round(len(words) / _ONE_IN)) if len(words) > 1 else 0
        gone = random.Random(f"copy/{text}").sample(range(len(words)), count)
        kept = " ".join(word for i, word in enumerate(words) if i not in gone)
        fields[name] = kept if count else text
    return replace(example, id=f"{example.id}-copy", fields=fields)


def _read(folder: Path, inputs: Sequence[str]) -> tuple[list[Example], list[Prediction]]:
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
    return examples, unaided


def study_table(rows: Sequence[Row]) -> Table:
    """Return means over the user's seeds."""
    groups: dict[tuple[str, float, float | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.texts, row.probability, row.weight), []).append(row)
    lines = []
    for (texts, chance, weight), same in groups.items():
        cells = [texts, f"{chance:g}", "in the prompt" if weight is None else f"{weight:g}"]
        cells += [
            f"{mean(getattr(row, name) for row in same):{digits}}"
            for name, digits in _COLUMNS.items()
        ]
        lines.append([Cell(text) for text in cells])
    head = ["texts", "p", "weight", "corrections", "aided", "without", "with", "mended", "broken"]
    return Table("", head, lines)


_COLUMNS = {
    **{"corrections": ".4g", "aided": ".4g", "without": ".3f", "with_memory": ".3f"},
    **{"mended": ".3g", "broken": ".3g"},
}
