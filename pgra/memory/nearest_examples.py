"""A prompt's examples by nearest neighbours: KATE as MemPrompt's prefix (Madaan et al. 2022, 4.2).

"KATE being used to dynamically create the prompt prefix, whereas MEM-PROMPT is used like before": a
question's nearest examples stand before it, in every system, and what the memory has beside it. The
prompts of two questions then begin differently, so nothing of them is read once for all.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pgra.config import LEAK_JACCARD
from pgra.core import Example
from pgra.data.read import check_file, read_records
from pgra.errors import ConfigError, DataError
from pgra.exemplars import SelectionArguments
from pgra.exemplars.selection import ExemplarPool, Nearest
from pgra.exemplars.similarity import Similarity
from pgra.memory.lookup import strip_slot
from pgra.memory.prompts import FewShot, Shown

logger = logging.getLogger(__name__)


def read_pool(path: Path) -> list[Shown]:
    """Read examples to choose from: jsonl with `question`, `answer` and perhaps `feedback`.

    Of questions of fact `answers` may stand there, of which the first is shown.

    Raises:
        DataError: If a line lacks a question or an answer, or there is no line.
    """
    check_file(path, ("jsonl",))
    pool = []
    for record in read_records(path):
        told = record.fields
        answers = told.get("answers")
        first = answers[0] if isinstance(answers, list) and answers else None
        values = {"question": told.get("question"), "answer": told.get("answer", first)}
        if "feedback" in told:
            values["feedback"] = told["feedback"]
        for name, value in values.items():
            if not isinstance(value, str) or not value.strip():
                raise DataError(f"{path}, line {record.line}: {name} is {value!r}, not text")
        pool.append(Shown(**{name: str(value) for name, value in values.items()}))
    if not pool:
        raise DataError(f"{path} holds no example")
    return pool


def as_examples(questions: Sequence[str], answers: Sequence[str] | None = None) -> list[Example]:
    """Give questions as what the leak guard and the look-up of neighbors take."""
    labels = [None] * len(questions) if answers is None else answers
    return [
        Example(f"question-{i}", {"question": text}, label)
        for i, (text, label) in enumerate(zip(questions, labels, strict=True))
    ]


def without_slots(examples: Sequence[Example]) -> list[Example]:
    """Take out of each question the word that it is about, if anything is left then."""
    return [replace(one, fields={"question": strip_slot(one.text) or one.text}) for one in examples]


def choose_examples(
    few_shot: FewShot,
    pool: Sequence[Shown],
    questions: Sequence[str],
    similarity: Similarity,
    *,
    count: int,
    root: Path,
) -> FewShot:
    """Give a prompt whose examples are each question's nearest, the nearest first.

    A question is never shown itself, nor what is nearly its text (`LeakGuard`). Where
    fewer share a word with it (BM25), the pool's first others stand behind them.

    Args:
        few_shot: The prompt; its own examples stand before any other question.
        pool: To choose from.
        questions: All that will be asked.
        similarity: Compares questions with the pool's.
        count: Examples before each, the paper's k.
        root: Folder of the neighbors, which are kept.

    Raises:
        ConfigError: If the pool holds fewer.
    """
    examples = as_examples([one.question for one in pool], [one.answer for one in pool])
    exemplars = ExemplarPool(examples, jaccard=LEAK_JACCARD, root=root)
    size = len(exemplars.guard.distinct)
    if not 0 < count <= size:
        raise ConfigError(
            f"prefix_examples is {count}, and there are {size} different examples to choose from: "
            "give another number, or more examples with --prefix_pool"
        )
    asked = list(dict.fromkeys(questions))
    selector = Nearest(SelectionArguments(num_exemplars=count), exemplars, similarity)
    chosen = selector.choose(as_examples(asked))
    logger.info(
        "prefix: each of %d questions has its own %d of %d examples, so that prompts share "
        "nothing; %d examples were left out, being nearly a question itself",
        *(len(asked), count, size, int(chosen.num_dropped.sum())),
    )
    nearest = {
        question: tuple(pool[row] for row in _filled(exemplars, question, chosen.of(place), count))
        for place, question in enumerate(asked)
    }
    return replace(few_shot, nearest=nearest)


def _filled(exemplars: ExemplarPool, question: str, rows: list[int], count: int) -> list[int]:
    is_leak = exemplars.guard.leaks(question)
    others = (row for row in exemplars.guard.distinct.tolist() if row not in rows)
    return [*rows, *(row for row in others if not is_leak(row))][:count]
