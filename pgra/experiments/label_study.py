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
from pgra.data.tasks import Task, load_any_task
from pgra.errors import DataError
from pgra.memory.labels import LabelMemory, PromptMemoryArguments, input_key, mix_labels
from pgra.memory.log import FeedbackLog
from pgra.memory.lookup import load_lookup
from pgra.report.metrics import mcnemar
from pgra.report.results import PREDICTIONS_FILE, damaged, read_lines
from pgra.report.tables import Cell, Table
from pgra.runs import Answer, Predictor, read_arguments

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
        DataError: If the run's answers are written, it has fewer than two texts, or none of the
            first half is wrong.
        PgraError: As `pgra predict`.
    """
    args = read_arguments(folder, {})
    task = load_any_task(args.data.task or "")
    if not isinstance(task, Task):
        raise DataError(f"{folder} writes answers, and this is a study of labels: give another run")
    is_prompted = "memory" in args.sections  # corrections stand in its prompts
    unaided = _read(folder, task.inputs)[:most]
    first, second = unaided[: len(unaided) // 2], unaided[len(unaided) // 2 :]
    wrong = [a.query for a in first if a.query.label != a.prediction.label]
    if not wrong:
        raise DataError(
            f"{folder} decides all {len(first)} texts of the first half rightly, so that nothing "
            "is corrected: give a run with more test examples"
        )
    logger.info("study: %d of %d texts are decided wrongly", len(wrong), len(first))
    run = Predictor.open(folder, device=device)
    copies = [leave_out_words(answer.query) for answer in first]
    said = run.answer([copy.fields for copy in copies])
    near = [replace(answer, query=copy) for answer, copy in zip(said, copies, strict=True)]
    sets = dict(zip(SETS, (first, near, second), strict=True))
    # Its encoder is loaded once for all memories.
    look = (
        None
        if is_prompted
        else load_lookup(memory.lookup(), Context(device=device), task=task.name)
    )
    rows = []
    users = [(p, seed) for p in probabilities for seed in (seeds if p < 1 else seeds[:1])]
    for probability, seed in users:
        corrected = draw_corrections(wrong, probability, seed)
        with tempfile.TemporaryDirectory() as root:
            filled = replace(memory, memory=str(Path(root) / "memory.sqlite"))
            with FeedbackLog.open(Path(str(filled.memory))) as log:
                for example in corrected:
                    key = input_key(example.fields, task.inputs)
                    log.write(key, str(example.label), source="simulated", task=task.name)
            for name, alone in sets.items():
                aided: dict[float | None, list[Answer]] = {}
                if is_prompted:
                    run = Predictor.open(folder, device=device, memory=filled)
                    aided[None] = run.answer([a.query.fields for a in alone])
                else:
                    with LabelMemory(
                        filled,
                        task=task.name,
                        inputs=task.inputs,
                        labels=task.labels,
                        open_lookup=look,
                    ) as labels:
                        found = [labels.recall(a.query.fields) for a in alone]
                    pairs = list(zip(alone, found, strict=True))
                    for w in weights:
                        mixed = [mix_labels(a.prediction, near, weight=w) for a, near in pairs]
                        aided[w] = [
                            replace(a, prediction=label, corrections=near)
                            for (a, near), label in zip(pairs, mixed, strict=True)
                        ]
                for weight, answers in aided.items():
                    before, after = (
                        [a.query.label == b.prediction.label for a, b in zip(alone, s, strict=True)]
                        for s in (alone, answers)
                    )
                    both = list(zip(before, after, strict=True))
                    helped = [bool(a.corrections or a.details.get("memory")) for a in answers]
                    rows.append(
                        Row(
                            texts=name,
                            probability=probability,
                            seed=seed,
                            weight=weight,
                            n=len(alone),
                            corrections=len(corrected),
                            aided=sum(helped),
                            without=mean(before),
                            with_memory=mean(after),
                            mended=both.count((False, True)),
                            broken=both.count((True, False)),
                            mcnemar_p=mcnemar(after, before),
                        )
                    )
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


def _read(folder: Path, inputs: Sequence[str]) -> list[Answer]:
    """Read what a run said of its test examples."""
    run = folder.parent if (folder.parent / PREDICTIONS_FILE).is_file() else folder
    path = run / PREDICTIONS_FILE
    answers = []
    for line in read_lines(path):
        try:
            fields = line.get("fields") or {inputs[0]: line["text"]}
            example = Example(str(line["id"]), fields, str(line["label"]))
            said = Prediction(example.id, line["prediction"], line["scores"])
        except KeyError as error:
            raise damaged(path, error) from None
        answers.append(Answer(example, said))
    return answers


_FORMS = {
    **{"corrections": ".4g", "aided": ".4g", "without": ".3f", "with_memory": ".3f"},
    **{"mended": ".3g", "broken": ".3g"},
}


def study_table(rows: Sequence[Row]) -> Table:
    """Return means over the user's seeds."""
    groups: dict[tuple[str, float, float | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.texts, row.probability, row.weight), []).append(row)
    lines = []
    for (texts, chance, weight), same in groups.items():
        first = [
            Cell(texts),
            Cell.of(chance, "g"),
            Cell.of("in the prompt" if weight is None else weight, "g"),
        ]
        means = {name: mean(getattr(row, name) for row in same) for name in _FORMS}
        lines.append([*first, *(Cell.of(v, _FORMS[name]) for name, v in means.items())])
    head = ["texts", "p", "weight", *(name.removesuffix("_memory") for name in _FORMS)]
    return Table("", head, lines)
