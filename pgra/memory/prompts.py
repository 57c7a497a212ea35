"""The prompter P(p, C): few-shot prompt, question, clarification.

What users typed is data: questions, clarifications, right answers. Each stands on one line and has
neither the prompt's separator, nor the word that ends an answer, nor the mark of a clarification.
`as_data` makes it so.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from pgra.config import find_yaml, from_yaml
from pgra.errors import ConfigError

CLARIFIED = "{question} | clarification: {feedback}"
"""How the paper shows a question with its clarification."""


def as_data(
    text: str,
    *,
    clarified: str = CLARIFIED,
    separator: str = "",
    end: str = "",
    is_question: bool = False,
) -> str:
    """Return what a user typed as a prompt shows it: it adds no part to the prompt.

    Text without line breaks, separators, marks and the end's word comes back as it is, but that
    spaces collapse; a question keeps them.

    Args:
        text: As it was typed.
        clarified: How the prompt shows a question with its clarification; what stands between the
            two is the mark.
        separator: Between the prompt's examples.
        end: The word that ends an answer.
        is_question: Whether a lone "|" stays: it may be what is asked about.
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
    """Fill the {slots} of these names, all at once: what is filled in is data."""
    return re.sub(rf"\{{({'|'.join(parts)})\}}", lambda slot: parts[slot.group(1)], form)


def clarify(question: str, feedback: str, clarified: str = CLARIFIED) -> str:
    """Return a question with its clarification, both as data."""
    return fill(clarified, question=question, feedback=feedback)


@dataclass(frozen=True)
class PromptExample:
    """A question with its answer, as a prompt shows them.

    Attributes:
        question: As it was asked.
        answer: Understanding and answer in one sentence.
        feedback: A clarification, or "".
    """

    question: str
    answer: str
    feedback: str = ""


@dataclass(frozen=True)
class FewShot:
    """A prompt from configs/memory_prompts/NAME.yaml.

    Attributes:
        name: The YAML's.
        separator: Between question and answer, and between examples (the paper's #).
        end: What ends an answer (the paper's END).
        clarified: How a question stands with its clarification: {question} and {feedback}.
        examples: Some with a clarification, some without.
        nearest: Instead of them, by question: its own, the nearest first (KATE).
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
        """Return the examples that stand before a question."""
        return self.nearest.get(question, self.examples)

    def write(
        self,
        question: str,
        *,
        feedback: str = "",
        more: Sequence[PromptExample] = (),
        num_own: int | None = None,
    ) -> str:
        """Render a prompt that an answer goes on from.

        Args:
            question: What is asked.
            feedback: Its clarification, or "".
            more: Examples behind the question's own.
            num_own: How many of its own stand there, the first; None for all.
        """
        examples = (*self.examples_of(question)[:num_own], *more)
        shown = "".join(self.show(example) for example in examples)
        return f"{shown}{self._ask(question, feedback)}{self.separator}"

    def show(self, example: PromptExample) -> str:
        """Render one example, with the separator behind it."""
        question = self._ask(example.question, example.feedback)
        answer = self.as_data(example.answer)
        return f"{question}{self.separator}{answer} {self.end}{self.separator}"

    def _ask(self, question: str, feedback: str) -> str:
        question = self.as_data(question, is_question=True)
        if not feedback:
            return question
        return clarify(question, self.as_data(feedback), self.clarified)

    @property
    def as_data(self) -> Callable[..., str]:
        """Return what a user typed as this prompt shows it; see `as_data` of this module."""
        return partial(as_data, clarified=self.clarified, separator=self.separator, end=self.end)

    def read_output(self, text: str) -> str:
        """Cut what an LM wrote to its answer: up to the end's word or the separator.

        Separators that it begins with are passed over: small LMs write the prompt's last once more.
        """
        core = self.separator.strip()
        text = text.lstrip()
        while core and text.startswith(core):
            text = text[len(core) :].lstrip()
        for stop in (self.end, core):
            text = text.split(stop, 1)[0] if stop else text
        return " ".join(text.split())


def load_few_shot(name: str) -> FewShot:
    """Read a prompt by name, or from a YAML.

    Raises:
        ConfigError: If there is none, or its YAML lacks something.
    """
    path = find_yaml("prompt", "memory_prompts", name)
    return from_yaml(FewShot, path, name=path.stem, nearest={})
