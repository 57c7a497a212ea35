"""Templates: how a task shows a text to the LM, P(x) of Guo et al. 2023, section 3.2.

A prompt is `prefix + suffix`: instruction and exemplars, the same for all texts of a task, then the
text under the template. They are split before the blank line between them, because byte-pair merges
do not cross that place but do cross the one after it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pgra.data.tasks import check_slots

INSTRUCTION = "Follow the demonstrations:\n"
SEPARATOR = "\n\n"
_BREAKS = re.compile(r"\n{2,}")


@dataclass(frozen=True)
class PromptTemplate:
    """How one task shows texts to the LM.

    Attributes:
        body: P(x), with a slot for each input of the task.
        answer: What the LM completes, on a line of its own after P(x); "" where P(x) ends with it.
        inputs: The task's inputs. A passage fills the first one; a line of empty inputs alone is
            left out, so a passage has one state, whatever query it is compared with.
        instruction: Text before the first exemplar.
        one_line: Whether a text's line breaks become spaces, as in KATE's prompts.
        gap: Text before an exemplar's answer.
        separator: Text between exemplars, and between the last one and the query.
    """

    body: str
    answer: str = "The answer is"
    inputs: tuple[str, ...] = ("text",)
    instruction: str = INSTRUCTION
    one_line: bool = False
    gap: str = " "
    separator: str = SEPARATOR

    def __post_init__(self) -> None:
        check_slots(f"template {self.body!r}", self.body, self.inputs)

    def passage_fields(self, text: str) -> dict[str, str]:
        return {name: text if i == 0 else "" for i, name in enumerate(self.inputs)}

    def render(self, fields: Mapping[str, str]) -> str:
        """Fill P(x), without blank lines, which would look like the border between exemplars."""
        if self.one_line:
            return self.body.format_map({n: " ".join(v.split()) for n, v in fields.items()})
        values = {name: value.strip() for name, value in fields.items()}
        return _BREAKS.sub("\n", self.body.format_map(values)).strip("\n")

    def render_exemplar(self, fields: Mapping[str, str], word: str) -> str:
        """Fill P(x) and add its answer."""
        word = " ".join(word.split()) if self.one_line else word
        return f"{self.render_query(fields, after_prefix=False)}{self.gap}{word}"

    def render_query(self, fields: Mapping[str, str], *, after_prefix: bool) -> str:
        """Fill P(x) and leave the answer open: the suffix of a prompt."""
        answer = f"\n{self.answer}" if self.answer else ""
        return f"{self.separator if after_prefix else ''}{self.render(fields)}{answer}"
