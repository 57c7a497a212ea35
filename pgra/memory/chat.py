"""A person in the simulated user's place: asks, sees what was understood, corrects, asks again.

Prompts, look-up, gate and LM are those of the streams (`pgra.memory.stream`; Madaan et al. 2022,
figure 1). The terminal and the web page show the same conversation.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pgra.errors import DataError
from pgra.lm.base import LanguageModel
from pgra.memory.families import Family
from pgra.memory.log import Event, FeedbackLog
from pgra.memory.lookup import Lookup, Match, Near, find_near
from pgra.memory.prompts import FewShot
from pgra.memory.stream import Step, ask_lm, open_system

_LEFT_OUT = "…"


@dataclass(frozen=True)
class Reading:
    """An output, taken apart.

    Attributes:
        understanding: What was understood, with … where the answer stands; "" where the output has
            none of the family's forms.
        answer: The answer; the whole output where no understanding is told.
    """

    understanding: str
    answer: str


def read_understanding(family: Family, output: str) -> Reading:
    """Take an output apart by the forms that a family's answers have, letters of any case."""
    for form in family.answers.values():
        pattern = re.escape(form).replace(r"\{word\}", ".+?").replace(r"\{answer\}", "(.+)")
        found = re.fullmatch(pattern, output.strip(), flags=re.IGNORECASE | re.DOTALL)
        if found:
            start, end = found.span(1)
            told = output.strip()
            return Reading(f"{told[:start]}{_LEFT_OUT}{told[end:]}", found.group(1))
    return Reading("", output)


@dataclass(frozen=True)
class Turn:
    """A question and what came of it.

    Attributes:
        question: As it was asked.
        output: What the LM wrote, cut to its answer.
        reading: The same, taken apart.
        found: What the look-up gave, the nearest first.
        num_used: How many of these stood in the prompt, the first.
        prompt: What the LM read.
        num_prompt_tokens: Of it.
    """

    question: str
    output: str
    reading: Reading
    found: Sequence[Match]
    num_used: int
    prompt: str
    num_prompt_tokens: int

    @property
    def used(self) -> Sequence[Match]:
        """Give the feedback that stood in the prompt."""
        return self.found[: self.num_used]


@dataclass(frozen=True)
class Noted:
    """A correction that was kept.

    Attributes:
        entry: As it is in the memory.
        near: Others that may be found for it, or it for them.
        in_prompt: How it stands in a prompt, where that is not as it was typed; else "".
    """

    entry: Event
    near: Sequence[Near]
    in_prompt: str


@dataclass(kw_only=True)
class Conversation:
    """What a person talks to. It holds no turns: any number of people may share one.

    Attributes:
        family: Of the questions.
        few_shot: The prompt.
        completer: The LM.
        log: The memory.
        lookup: M(x), which follows the log.
        threshold: The gate's; None lets all through.
        task: Under which name corrections are written.
        source: Who is said to have made them.
        max_new_tokens: Of an answer.
        max_prompt_tokens: Of a prompt.
    """

    family: Family
    few_shot: FewShot
    completer: LanguageModel
    log: FeedbackLog
    lookup: Lookup
    threshold: float | None
    task: str = ""
    source: str = "user"
    max_new_tokens: int = 64
    max_prompt_tokens: int = 2048

    def __post_init__(self) -> None:
        """Open the system that makes the prompts."""
        self._system = open_system(
            self.family, self.few_shot, self.log, lookup=self.lookup, threshold=self.threshold
        )

    @property
    def wants_answers(self) -> bool:
        """Say whether a correction is the right answer, and not what was meant."""
        return self.family.is_of_answers

    def ask(self, question: str) -> Turn:
        """Ask, with what the memory has for the question.

        Raises:
            DataError: If it is empty, or does not fit the LM's window.
        """
        question = question.strip()
        if not question:
            raise DataError("the question is empty: type one")
        step = Step(id="", kind="", word="", question=question, feedback="", expected=())
        asked = self._system.ask(step)
        (written,) = ask_lm(
            self.completer,
            self.few_shot,
            [asked.prompt],
            max_new_tokens=self.max_new_tokens,
            max_prompt_tokens=self.max_prompt_tokens,
        )
        output = self.few_shot.read_output(written.text)
        return Turn(
            question=question,
            output=output,
            reading=read_understanding(self.family, output),
            found=tuple(asked.found),
            num_used=asked.num_used,
            prompt=asked.prompt,
            num_prompt_tokens=written.num_prompt_tokens,
        )

    def correct(self, question: str, feedback: str) -> Noted:
        """Keep what a person says of a question that was misunderstood.

        Returns:
            What is on the disk now, and what is near it.

        Raises:
            DataError: If it is empty, too long, or holds what is no text.
            ArtifactError: If the memory cannot be written.
        """
        entry = self.log.write(question, feedback.strip(), source=self.source, task=self.task)
        shown = self.few_shot.as_data(entry.feedback)
        differs = shown != " ".join(entry.feedback.split())
        near = find_near(self.log, entry, is_relative=not self.family.follows_release)
        return Noted(entry, near, shown if differs else "")

    def forget(self, *entry_ids: int) -> None:
        """Take entries out of the memory, all or none.

        Raises:
            DataError: If one is not there any more.
            ArtifactError: If the memory cannot be written.
        """
        self.log.forget(*entry_ids, source=self.source)

    def entries(self) -> list[Event]:
        """Give what is in the memory for these questions, the oldest first."""
        return [entry for entry in self.log.entries() if entry.task == self.task]
