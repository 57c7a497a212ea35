"""Streams of questions: read from a file, or made of a word list."""

import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pgra.data.textfile import Record, check_file, read_lines, read_records
from pgra.errors import DataError
from pgra.memory.families import QUESTION, Family, Phrasing
from pgra.memory.scramble import can_scramble, scramble
from pgra.memory.situations import SITUATION, read_situation

_STEP_KEYS = ("type", "word", "question", "feedback", "expected_answer")
_OUTER = " .,;:!?\"'"


@dataclass(frozen=True)
class Step:
    """One question of a stream, with what a user would say if it were misunderstood.

    Attributes:
        id: Its name in the stream.
        kind: The type of task that is meant, such as "syn".
        word: What the question is about; of a situation its category or rule of thumb.
        question: As it is asked.
        feedback: What a user says who was misunderstood.
        expected: Outputs that are right, the first the one that GROW-PROMPT shows.
    """

    id: str
    kind: str
    word: str
    question: str
    feedback: str
    expected: tuple[str, ...]

    @property
    def meaning(self) -> str:
        """Give what two questions share that the same feedback suits."""
        return self.feedback if self.kind == SITUATION else self.kind


def is_answered(step: Step, output: str) -> bool:
    """Say whether an output is one of those expected: Acc(y), but for case, spaces and its end."""
    return _plain(output) in {_plain(text) for text in step.expected}


def _plain(text: str) -> str:
    return " ".join(text.lower().split()).strip(_OUTER)


def read_stream(path: Path, family: Family) -> list[Step]:
    """Read a stream, one JSON object a line, as the paper's release has them.

    Args:
        path: jsonl with `type`, `word`, `question`, `feedback` and `expected_answer`; of a family
            of answers with `question` and `answers`, all that are right; of one of situations with
            `situation`, `label` and what it is about (see `read_situation`).
        family: Whose questions they are.

    Raises:
        DataError: If a line lacks one of them, or is of no type of the family.
    """
    _check_stream_file(path, family)
    read = _reader_of(family)
    steps = [read(path, record, family) for record in read_records(path)]
    if not steps:
        raise DataError(f"{path} holds no question")
    return steps


def _check_stream_file(path: Path, family: Family) -> None:
    if family.situations is not None and not path.exists():
        form = family.situations
        raise DataError(
            f"{path} does not exist, and the paper's data of '{family.name}' was never released: "
            f"give your own jsonl file, a line with situation, {form.about} and label "
            f"({', '.join(form.labels)}) for each"
        )
    check_file(path, ("jsonl",))


def _reader_of(family: Family) -> Callable[[Path, Record, Family], Step]:
    if family.situations is not None:
        return _situation_step
    return _answer_step if family.is_of_answers else _step


def _situation_step(path: Path, record: Record, family: Family) -> Step:
    form = family.situations
    assert form is not None  # _reader_of
    told = read_situation(f"{path}, line {record.line}", record.fields, form)
    parts = {"about": told.about, "label": told.label}
    output, feedback = (_fill(text, parts) for text in (form.output, form.feedback))
    kind = told.about if form.categories else SITUATION
    return Step(str(record.line), kind, told.about, told.text, feedback, (output,))


def _fill(text: str, parts: Mapping[str, str]) -> str:
    return re.sub(r"\{(about|label)\}", lambda found: parts[found.group(1)], text)


def _step(path: Path, record: Record, family: Family) -> Step:
    place, told = f"{path}, line {record.line}", record.fields
    for name in _STEP_KEYS:
        if not isinstance(told.get(name), str) or not str(told[name]).strip():
            raise DataError(f"{place}: {name} is {told.get(name)!r}, and must be text")
    kind = str(told["type"])
    if kind not in family.answers:
        known = ", ".join(family.answers)
        raise DataError(
            f"{place}: type '{kind}' is none of the family '{family.name}' ({known}): name the "
            "stream's own with --family"
        )
    feedback = str(told["feedback"]).removeprefix("clarification:").strip()
    return Step(
        id=str(record.line),
        kind=kind,
        word=str(told["word"]),
        question=str(told["question"]),
        feedback=feedback,
        expected=(str(told["expected_answer"]),),
    )


def _answer_step(path: Path, record: Record, family: Family) -> Step:
    question, answers = record.fields.get("question"), record.fields.get("answers")
    right = answers if isinstance(answers, list) and answers else [None]
    if not all(isinstance(text, str) and text.strip() for text in (question, *right)):
        raise DataError(
            f"{path}, line {record.line}: the family '{family.name}' takes question, a text, and "
            "answers, a list of texts"
        )
    told = tuple(str(text) for text in right)
    return Step(str(record.line), QUESTION, "", str(question), told[0], told)


Words = Mapping[str, Mapping[str, Sequence[str]]]
"""By type: answers by word. For scrambles: by "" the words to scramble, each its own answer."""


def read_words(path: Path, family: Family) -> Words:
    """Read a word list that streams are made of.

    Args:
        path: For relations jsonl with `type`, `word` and `answer`; for scrambles a text file with
            a word a line. Either may be packed.
        family: Whose questions are made.

    Raises:
        DataError: If a line is not so, a type has no word, or the family has no phrasings.
    """
    if not family.phrasings:
        raise DataError(f"the family '{family.name}' is not made of words: give it --stream FILE")
    if family.words == "scrambles":
        check_file(path, ("txt",))
        words = {line.text.strip().lower() for line in read_lines(path)}
        fit = sorted(word for word in words if can_scramble(word))
        if not fit:
            raise DataError(f"{path} has no word of 6 to 14 plain letters, one a line")
        return {"": {word: [word] for word in fit}}
    check_file(path, ("jsonl",))
    found: dict[str, dict[str, list[str]]] = {kind: defaultdict(list) for kind in family.answers}
    for record in read_records(path):
        told = {name: record.fields.get(name) for name in ("type", "word", "answer")}
        if not all(isinstance(value, str) and value.strip() for value in told.values()):
            raise DataError(
                f"{path}, line {record.line}: {json.dumps(told)[:80]} must have type, word and "
                "answer, each a text"
            )
        if told["type"] in found:
            found[str(told["type"])][str(told["word"])].append(str(told["answer"]))
    lacking = [kind for kind, words in found.items() if not words]
    if lacking:
        raise DataError(f"{path} has no word of type '{lacking[0]}'")
    return found


def make_stream(family: Family, words: Words, *, num_steps: int, seed: int) -> list[Step]:
    """Draw a stream: each step one phrasing and one word, all as likely as each other.

    Args:
        family: How questions are asked.
        words: Of `read_words`.
        num_steps: How many.
        seed: Of the draws.
    """
    draw = random.Random(seed)
    pools = {kind: sorted(answers) for kind, answers in words.items()}
    steps = []
    for number in range(1, num_steps + 1):
        phrasing = draw.choice(family.phrasings)
        if family.words == "scrambles":
            answer = draw.choice(pools[""])
            shown, answers = scramble(answer, phrasing.kind, draw), [answer]
        else:
            shown = draw.choice(pools[phrasing.kind])
            answers = list(words[phrasing.kind][shown])
        steps.append(_make_step(family, phrasing, shown, answers, number=number))
    return steps


def _make_step(
    family: Family, phrasing: Phrasing, word: str, answers: Sequence[str], *, number: int
) -> Step:
    frame = family.answers[phrasing.kind]
    return Step(
        id=str(number),
        kind=phrasing.kind,
        word=word,
        question=phrasing.question.replace("{word}", word),
        feedback=phrasing.feedback,
        expected=tuple(
            frame.replace("{word}", word).replace("{answer}", answer) for answer in answers
        ),
    )
