"""How exemplars and a query become a prompt: as PGRA's tasks write it, or as KATE does.

KATE (Liu et al. 2022, Table 11): `Sentence: ... Label: Positive`, `Table: ... Sentence: ...`,
`Q: ...` and `A: ...` on two lines; a blank line between exemplars, no instruction before them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pgra.core import Example, Json
from pgra.data.tasks import Task
from pgra.errors import ConfigError
from pgra.prompts.fewshot import write_prompt
from pgra.prompts.template import SEPARATOR, PromptTemplate

FORMATS = ("kate", "task")
_SENTENCE = "Sentence: {text} Label:"


class PromptFormat(Protocol):
    """Writes prompts that end where the LM's answer begins, but for a space."""

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give all that a prompt depends on, besides exemplars and query."""
        ...

    def write(self, exemplars: Sequence[Example], fields: Mapping[str, str]) -> str:
        """Write a query behind exemplars, in their order."""
        ...


@dataclass(frozen=True)
class TaskFormat:
    """PGRA's: an instruction, exemplars under the task's template, the query.

    Attributes:
        template: How a text is shown.
        words: The word that answers, by label.
    """

    template: PromptTemplate
    words: Mapping[str, str]

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give template and words."""
        shown = write_prompt(self.template, (), self.words).fingerprint
        return {"format": "task", **shown, "words": dict(self.words)}

    def write(self, exemplars: Sequence[Example], fields: Mapping[str, str]) -> str:
        """Write a query behind exemplars, in their order."""
        prompt = write_prompt(self.template, exemplars, self.words)
        return prompt.prefix + prompt.suffix(fields)


@dataclass(frozen=True)
class LineFormat:
    r"""KATE's: one frame for exemplars and query, and the target behind it.

    Attributes:
        frame: How fields are shown, up to where the answer begins, such as "Q: {question}\nA:".
        words: The target by label; empty where an example's label is its target.
    """

    frame: str
    words: Mapping[str, str]

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give frame and words."""
        return {"format": "kate", "frame": self.frame, "words": dict(self.words)}

    def write(self, exemplars: Sequence[Example], fields: Mapping[str, str]) -> str:
        """Write a query behind exemplars, in their order."""
        shown = [f"{self._show(e.fields)} {self._target(e)}" for e in exemplars]
        return SEPARATOR.join([*shown, self._show(fields)])

    def _show(self, fields: Mapping[str, str]) -> str:
        # A blank line would look like the border between exemplars, a line like the answer's end.
        return self.frame.format_map({n: " ".join(v.split()) for n, v in fields.items()})

    def _target(self, example: Example) -> str:
        label = example.label or ""
        return " ".join((self.words[label] if self.words else label).split())


def task_format(task: Task, name: str) -> TaskFormat | LineFormat:
    """Give the format of a classification task.

    Args:
        task: The task; KATE's format shows all its inputs as one sentence.
        name: One of `FORMATS`. With "kate" labels answer by their own names, capitalised.
    """
    if name == "task":
        template = PromptTemplate(task.prompt, task.answer, task.inputs)
        return TaskFormat(template, task.prompt_words)
    slots = " ".join(f"{{{field}}}" for field in task.inputs)
    words = {label: label.replace("_", " ").capitalize() for label in task.labels}
    return LineFormat(_SENTENCE.format(text=slots), words)


def answer_words(words: Mapping[str, str]) -> list[str]:
    """Give words as they follow a prompt, in the order of labels.

    Raises:
        ConfigError: If one begins another, which would then always win.
    """
    for label, mine in words.items():
        for other, longer in words.items():
            if label != other and longer.startswith(mine):
                raise ConfigError(
                    f"prompt word '{mine}' ({label}) begins '{longer}' ({other}), so it would "
                    "always win: choose another in the task's prompt_words"
                )
    return [f" {word}" for word in words.values()]
