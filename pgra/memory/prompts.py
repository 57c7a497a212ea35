"""The prompter P(p, C): few-shot prompt, question, clarification.

What users typed (questions, clarifications, right answers) is data; see `as_data`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from pgra.config import find_yaml, from_yaml
from pgra.core import Example
from pgra.errors import ConfigError
from pgra.prompts.fewshot import PromptFormat, PromptTemplate


def as_data(
    text: str,
    *,
    clarified: str,
    separator: str,
    end: str,
    is_question: bool = False,
) -> str:
    """Return what a user typed as one line that adds no part to a prompt.

    Breaks up the prompt's separator, the word that ends an answer, and the mark of a clarification.
    Spaces collapse, but not in a question.

    Args:
        text: As it was typed.
        clarified: How the prompt shows a question with its clarification; the mark is between them.
        separator: Between the prompt's examples.
        end: The word that ends an answer.
        is_question: Keep a lone "|": it may be what is asked about.
    """
    line = " ".join(text.splitlines() if is_question else text.split())
    if not is_question:
        line = line.replace("|", "/")
    if end := end.strip():
        other = end.lower() if end.lower() != end else _spelled_apart(end)
        before = r"(?<!\w)" if end[0].isalnum() else ""  # WEEKEND stays
        behind = r"(?!\w)" if end[-1].isalnum() else ""
        line = re.sub(f"{before}{re.escape(end)}{behind}", lambda _: other, line)
    between = re.split(r"\{question\}|\{feedback\}", clarified)[1]
    mark = r"\s*".join(map(re.escape, between.split()))
    if mark:
        line = re.sub(mark, lambda found: _spelled_apart(found.group()), line, flags=re.IGNORECASE)
    core = separator.strip()
    while core and core in line:
        line = line.replace(core, _spelled_apart(core))
    return line


def _spelled_apart(mark: str) -> str:
    if "|" in mark:
        return mark.replace("|", "/")
    return " ".join(mark) if len(mark) > 1 else " "


def fill(form: str, **parts: str) -> str:
    """Fill {slots} by name, all at once: the values are data."""
    return re.sub(rf"\{{({'|'.join(parts)})\}}", lambda slot: parts[slot.group(1)], form)


@dataclass(frozen=True)
class PromptExample:
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
        if "\n" not in self.separator or not self.end.strip():
            raise ConfigError("separator must have a line break, and end a word")
        if not {"{question}", "{feedback}"} <= set(re.findall(r"\{\w+\}", self.clarified)):
            raise ConfigError("clarified must have {question} and {feedback}")

    def examples_of(self, question: str) -> Sequence[PromptExample]:
        return self.nearest.get(question, self.examples)

    def write(
        self,
        question: str,
        *,
        feedback: str = "",
        more: Sequence[PromptExample] = (),
        num_own: int | None = None,
    ) -> str:
        """Render a prompt for an LM to complete.

        Args:
            question: What is asked.
            feedback: Its clarification, or "".
            more: Examples after the question's own.
            num_own: How many of its own to show, the first ones; None for all.
        """
        shown = [
            Example("", self._ask(example.question, example.feedback), self.as_data(example.answer))
            for example in (*self.examples_of(question)[:num_own], *more)
        ]
        return f"{self._format.write(shown, self._ask(question, feedback))}{self.separator}"

    @property
    def _format(self) -> PromptFormat:
        template = PromptTemplate(
            "{question}",
            answer="",
            inputs=("question",),
            instruction="",
            gap=self.separator,
            separator=f" {self.end}{self.separator}",
        )
        return PromptFormat(template, {})

    def _ask(self, question: str, feedback: str) -> dict[str, str]:
        question = self.as_data(question, is_question=True)
        if feedback:
            question = fill(self.clarified, question=question, feedback=self.as_data(feedback))
        return {"question": question}

    @property
    def as_data(self) -> Callable[..., str]:
        """This module's `as_data` with the prompt's own separator, end and mark."""
        return partial(as_data, clarified=self.clarified, separator=self.separator, end=self.end)

    def read_output(self, text: str) -> str:
        """Cut an output to its answer: drop leading separators, stop at `end` or a separator."""
        core = self.separator.strip()
        text = text.lstrip()
        while core and text.startswith(core):
            text = text[len(core) :].lstrip()
        for stop in (self.end, core):
            text = text.split(stop, 1)[0] if stop else text
        return " ".join(text.split())


def load_few_shot(name: str) -> FewShot:
    """Read a prompt by name, or from a YAML; a ConfigError if there is none or it is invalid."""
    path = find_yaml("prompt", "memory_prompts", name)
    return from_yaml(FewShot, path, name=path.stem, nearest={})
