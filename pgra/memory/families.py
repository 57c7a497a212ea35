"""Families of questions with an intent that an LM can miss, their streams, and few-shot prompts.

A family (configs/memory/NAME.yaml) has the forms of its answers, and the words that show the
understanding (Madaan et al. 2022, 3.3). The paper's ethical situations (ERT, section 3.3.2) were
never released.

The prompter P(p, C) writes few-shot prompt, question and clarification. What users typed
(questions, clarifications, right answers) is data; see `FewShot.sanitize`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pgra.config import find_yaml, from_yaml
from pgra.data.read import Record, read_table
from pgra.data.text import copy_key, strip_marks
from pgra.errors import ConfigError, DataError, one_line, show

QUESTION = "question"  # the type of a family of answers
_MARK = "clarification:"  # what the released streams begin a feedback with


@dataclass(frozen=True)
class Family:
    """Questions that share a prompt and a test of the understanding.

    It has `answers` or `num_remembered`. The last is of questions of fact,
    whose feedback is the right answer: the paper's label feedback (App. D.3).

    Attributes:
        understood_by: By type: words that must all stand in the output.
        answers: By type: the form of the expected output, with {word} and {answer}.
        has_slots: Whether questions have their word in <...>.
        paper: Accuracy of the understanding that the paper prints, by system and type.
        num_remembered: How many wrongly answered questions replace examples in a prompt.
        lookup: The one used where none is named.
        is_gated: Whether its threshold is the look-up's own where none is named; else all pass.
    """

    name: str
    prompt: str
    understood_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    answers: Mapping[str, str] = field(default_factory=dict)
    has_slots: bool = False
    paper: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    num_remembered: int = 0
    lookup: str = "relative-edit"
    is_gated: bool = True

    @property
    def is_of_answers(self) -> bool:
        """Whether feedback is the right answer."""
        return bool(self.num_remembered)

    @property
    def kinds(self) -> list[str]:
        return [QUESTION] if self.is_of_answers else list(self.answers)

    def is_understood(self, kind: str, output: str) -> bool:
        """Return whether an output of a type shows that the intent was understood: Acc(u).

        A case-insensitive test of substrings. It cannot tell an answer from an echo of a
        question that names another type ("a sentence that can be used to define").
        """
        return all(copy_key(word) in copy_key(output) for word in self.understood_by[kind])


ANY = Family("any", prompt="any")  # questions of any kind


def load_family(name: str) -> Family:
    """Read a family by name, or from a YAML; a ConfigError if there is none or it is invalid."""
    path = find_yaml("family of questions", "memory", name)
    return from_yaml(Family, path, name=path.stem)


def plain(text: str) -> str:
    """Return a text in lower case, with single spaces and no punctuation at its ends."""
    return strip_marks(copy_key(text))


# Their streams.


@dataclass(frozen=True)
class Step:
    """One question of a stream.

    Attributes:
        kind: The type of task that is meant, such as "syn".
        feedback: What a user says who was misunderstood.
        expected: Right outputs, the first the one that GROW-PROMPT shows.
    """

    kind: str
    question: str
    feedback: str
    expected: tuple[str, ...] = ()


def read_texts(record: Record, *names: str) -> list[str]:
    """Return fields of a line, which must be texts; `answers` may be a list of texts."""
    texts: list[str] = []
    for name in names:
        value: Any = record.fields.get(name)
        values = value if name == "answers" and isinstance(value, list) and value else [value]
        if not all(isinstance(text, str) and text.strip() for text in values):
            raise DataError(f"{record.where}: {name} is {show(value)}, and must be text")
        texts += values
    return texts


def read_stream(path: Path, family: Family) -> list[Step]:
    """Read a stream, one JSON object a line, in the release's format.

    A line has `type`, `question`, `feedback` and `expected_answer`; for a family of answers
    `question` and `answers` (all right ones).

    Raises:
        DataError: If a line lacks a field, or its type is unknown to the family.
    """
    return [_read_step(record, family) for record in read_table(path, ("jsonl",))]


def _read_step(record: Record, family: Family) -> Step:
    if family.is_of_answers:
        question, *answers = read_texts(record, "question", "answers")
        return Step(QUESTION, question, answers[0], tuple(answers))
    names = ("type", "question", "feedback", "expected_answer")
    kind, question, feedback, expected = read_texts(record, *names)
    if kind not in family.kinds:
        raise DataError(f"{record.where}: type '{kind}' is not one of {', '.join(family.kinds)}")
    return Step(kind, question, feedback.removeprefix(_MARK).strip(), (expected,))


# Their prompts.


def _spelled_apart(mark: str) -> str:
    if "|" in mark:
        return mark.replace("|", "/")
    return " ".join(mark) if len(mark) > 1 else " "


def fill_slots(form: str, **values: str) -> str:
    """Fill {slots} by name, all at once: the values are data."""
    return re.sub(rf"\{{({'|'.join(values)})\}}", lambda slot: values[slot.group(1)], form)


class PromptExample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question, its answer (one sentence, with the understanding), its clarification or ""."""

    question: str
    answer: str
    feedback: str = ""


@dataclass(frozen=True)
class FewShot:
    """A prompt from configs/memory_prompts/NAME.yaml.

    Attributes:
        separator: Between question and answer, and between examples (the paper's #).
        end: What ends an answer (the paper's END).
        clarified: A question with its clarification: {question} and {feedback}.
        examples: Some with a clarification, some without.
        nearest: By question: its own examples instead, the nearest first (KATE).
    """

    name: str
    separator: str
    end: str
    clarified: str
    examples: tuple[PromptExample, ...]
    nearest: Mapping[str, tuple[PromptExample, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not {"{question}", "{feedback}"} <= set(re.findall(r"\{\w+\}", self.clarified)):
            raise ConfigError(f"{self.clarified!r} lacks {{question}} or {{feedback}}: add it")

    def examples_of(self, question: str) -> Sequence[PromptExample]:
        return self.nearest.get(question, self.examples)

    def write(
        self,
        question: str,
        *,
        feedback: str = "",
        examples: Sequence[PromptExample] | None = None,
    ) -> str:
        """Render a prompt for an LM to complete.

        Args:
            question: What is asked.
            feedback: Its clarification, or "".
            examples: What stands before it; None for its own.
        """
        blocks = []
        for example in self.examples_of(question) if examples is None else examples:
            clarified = self._clarify(example.question, example.feedback)
            answer = self.sanitize(example.answer)
            blocks.append(f"{clarified}{self.separator}{answer} {self.end}{self.separator}")
        blocks.append(f"{self._clarify(question, feedback)}{self.separator}")
        return "".join(blocks)

    def _clarify(self, question: str, feedback: str) -> str:
        question = self.sanitize(question, is_question=True)
        if feedback:
            feedback = self.sanitize(feedback)
            question = fill_slots(self.clarified, question=question, feedback=feedback)
        return question.strip()

    def sanitize(self, text: str, *, is_question: bool = False) -> str:
        """Return what a user typed as one line that adds nothing of its own to the prompt.

        Breaks up the prompt's separator, the word that ends an answer, and the mark between a
        question and its clarification. Spaces collapse, but not in a question, which may have a
        lone "|": it may be what is asked about.
        """
        line = " ".join(text.splitlines()) if is_question else one_line(text).replace("|", "/")
        if end := self.end.strip():
            other = end.lower() if end.lower() != end else _spelled_apart(end)
            before = r"(?<!\w)" if end[0].isalnum() else ""  # WEEKEND stays
            after = r"(?!\w)" if end[-1].isalnum() else ""
            line = re.sub(f"{before}{re.escape(end)}{after}", lambda _: other, line)
        between = re.split(r"\{question\}|\{feedback\}", self.clarified)[1]
        mark = r"\s*".join(map(re.escape, between.split()))
        if mark:
            line = re.sub(mark, lambda match: _spelled_apart(match.group()), line, flags=re.I)
        core = self.separator.strip()
        while core and core in line:
            line = line.replace(core, _spelled_apart(core))
        return line

    def read_output(self, text: str) -> str:
        """Cut an output to its answer: drop leading separators, stop at `end` or a separator."""
        core = self.separator.strip()
        text = text.lstrip()
        while core and text.startswith(core):
            text = text[len(core) :].lstrip()
        for stop in (self.end, core):
            text = text.split(stop, 1)[0] if stop else text
        return one_line(text)


def load_few_shot(name: str) -> FewShot:
    """Read a prompt by name, or from a YAML; a ConfigError if there is none or it is invalid."""
    path = find_yaml("prompt", "memory_prompts", name)
    return from_yaml(FewShot, path, name=path.stem, nearest={})
