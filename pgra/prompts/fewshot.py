"""Few-shot prompts: labelled examples, then a query whose answer is open.

`PromptFormat` writes all of them, in one of two formats. "task" is PGRA's: an instruction, then
texts under the task's template. "kate" is that of Liu et al. 2022, Table 11: `Sentence: ... Label:
Positive`, `Table: ... Sentence: ...`, `Q: ...` and `A: ...` on two lines; a blank line between
exemplars, no instruction before them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pgra.core import Example, Json
from pgra.data.tasks import GenerationTask, Task
from pgra.errors import ConfigError
from pgra.prompts.template import PromptTemplate

FORMATS = ("kate", "task")


@dataclass(frozen=True)
class FewShotPrompt:
    """A prompt up to its query: everything of h*(x) = LM(prefix + P(x)) but the LM and x.

    Attributes:
        template: How a text is shown.
        prefix: Instruction and exemplars, without the blank line after them; "" for none.
        exemplar_ids: Training examples in it, in its order.
    """

    template: PromptTemplate
    prefix: str = ""
    exemplar_ids: tuple[str, ...] = ()

    def suffix(self, fields: Mapping[str, str]) -> str:
        """Render one text; `prefix + suffix` is the whole prompt."""
        return self.template.render_query(fields, after_prefix=bool(self.prefix))

    @property
    def fingerprint(self) -> dict[str, Json]:
        """What a state depends on, besides the LM."""
        return {
            "prefix": self.prefix,
            "template": self.template.body,
            "answer": self.template.answer,
            "inputs": list(self.template.inputs),
        }


@dataclass(frozen=True)
class PromptFormat:
    """Writes prompts that end where the LM's answer begins, but for a space.

    `words` are the answers by label; empty where an example's label is its answer.
    """

    template: PromptTemplate
    words: Mapping[str, str]

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """All that a prompt depends on, besides exemplars and query."""
        shown = self.prompt(()).fingerprint
        return {**shown, "instruction": self.template.instruction, "words": dict(self.words)}

    def prompt(self, exemplars: Sequence[Example]) -> FewShotPrompt:
        """Write the prefix of labelled examples, in their order; "" for none."""
        if not exemplars:
            return FewShotPrompt(self.template)
        words = [self.words[e.label or ""] if self.words else e.label or "" for e in exemplars]
        pairs = zip(exemplars, words, strict=True)
        shown = [self.template.render_exemplar(example.fields, word) for example, word in pairs]
        prefix = self.template.instruction + self.template.separator.join(shown)
        return FewShotPrompt(self.template, prefix, tuple(e.id for e in exemplars))

    def write(self, exemplars: Sequence[Example], fields: Mapping[str, str]) -> str:
        """Write a query after exemplars, in their order."""
        prompt = self.prompt(exemplars)
        return prompt.prefix + prompt.suffix(fields)


def line_format(
    frame: str, inputs: Sequence[str], words: Mapping[str, str] | None = None
) -> PromptFormat:
    r"""Return KATE's format: one frame for exemplars and query, with the answer at its end.

    The frame shows the fields up to the answer, such as "Q: {question}\nA:". `words` are the
    answers by label; None where an example's label is its answer.
    """
    template = PromptTemplate(frame, "", tuple(inputs), instruction="", one_line=True)
    return PromptFormat(template, words or {})


def prompt_template(task: Task | str | Path) -> PromptTemplate:
    """Return a task's template as the LM sees it."""
    task = task if isinstance(task, Task) else Task.load(str(task))
    return PromptTemplate(task.prompt, task.answer, task.inputs)


def task_format(task: Task | GenerationTask, name: str = "task") -> PromptFormat:
    """Return the format of a task, by its name in `FORMATS`; written answers have their own frame.

    "kate" shows all inputs as one sentence, and labels answer by their own names, capitalised.
    """
    if isinstance(task, GenerationTask):
        return line_format(task.frame, task.inputs)
    if name == "task":
        return PromptFormat(prompt_template(task), task.prompt_words)
    slots = " ".join(f"{{{field}}}" for field in task.inputs)
    words = {label: label.replace("_", " ").capitalize() for label in task.labels}
    return line_format(f"Sentence: {slots} Label:", task.inputs, words)


def answer_words(words: Mapping[str, str]) -> list[str]:
    """Return words as they follow a prompt; ConfigError if one is a prefix of another."""
    for label, mine in words.items():
        for other, longer in words.items():
            if label != other and longer.startswith(mine):
                raise ConfigError(
                    f"prompt word '{mine}' ({label}) begins '{longer}' ({other}), so it would "
                    "always win: choose another in the task's prompt_words"
                )
    return [f" {word}" for word in words.values()]
