"""NO-MEM, GROW-PROMPT, MEM-PROMPT: how each makes a prompt, and what it keeps of a correction.

Madaan et al. 2022, section 4; label feedback is that of App. D.3.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pgra.memory.families import QUESTION, Family
from pgra.memory.gate import pass_gate, passing
from pgra.memory.log import FeedbackLog
from pgra.memory.lookup import Lookup, Match
from pgra.memory.prompter import FewShot, GrowingPrompt, Shown
from pgra.memory.steps import Step


@dataclass(frozen=True)
class Asked:
    """A prompt, and what of the memory stands in it.

    Attributes:
        prompt: For the LM.
        match: The feedback that was used, the nearest of several; None where none was.
        matched_kind: The type of the question that it was given for.
        found: What the look-up gave, the nearest first.
        num_used: How many of these stand in the prompt, the first.
    """

    prompt: str
    match: Match | None = None
    matched_kind: str | None = None
    found: Sequence[Match] = ()
    num_used: int = 0


class System(Protocol):
    """Makes a prompt of a question, and learns from corrections.

    Attributes:
        keeps_prompts: Whether a correction leaves most prompts as they are.
    """

    keeps_prompts: bool

    def ask(self, step: Step) -> Asked:
        """Write the prompt."""
        ...

    def learn(self, step: Step) -> None:
        """Take in what the user says of a question that was misunderstood."""
        ...


class NoMemory:
    """NO-MEM: the few-shot prompt and the question."""

    keeps_prompts = True

    def __init__(self, few_shot: FewShot) -> None:
        self._few_shot = few_shot

    def ask(self, step: Step) -> Asked:
        """Write the prompt; see `System`."""
        return Asked(self._few_shot.write(step.question))

    def learn(self, step: Step) -> None:
        """Forget it."""


class Growing:
    """GROW-PROMPT: corrections with the expected answer behind the few-shot prompt."""

    keeps_prompts = False

    def __init__(self, growing: GrowingPrompt) -> None:
        self._growing = growing

    def ask(self, step: Step) -> Asked:
        """Write the prompt; see `System`."""
        return Asked(self._growing.write(step.question))

    def learn(self, step: Step) -> None:
        """Add it to the prompt."""
        feedback = "" if step.kind == QUESTION else step.feedback  # there it is the answer itself
        self._growing.add(Shown(step.question, step.expected[0], feedback))


@dataclass
class Remembering:
    """MEM-PROMPT: the nearest stored clarification beside the question, if the gate lets it pass.

    Attributes:
        few_shot: The prompt.
        log: The memory.
        lookup: M(x), which follows the log.
        threshold: The gate's; None lets all through.
        task: Under which name corrections are written.
    """

    few_shot: FewShot
    log: FeedbackLog
    lookup: Lookup
    threshold: float | None
    task: str = ""
    keeps_prompts: bool = field(default=True, init=False)
    _kinds: dict[str, str] = field(default_factory=dict, init=False)  # of keys, for the report

    def ask(self, step: Step) -> Asked:
        """Write the prompt; see `System`."""
        found = self.lookup.find(step.question)
        match = pass_gate(found, self.threshold)
        if match is None:
            return Asked(self.few_shot.write(step.question), found=found)
        prompt = self.few_shot.write(step.question, feedback=match.entry.feedback)
        kind = self._kinds.get(match.entry.key)
        return Asked(prompt, match, kind, found=found, num_used=1)

    def learn(self, step: Step) -> None:
        """Write it to the memory."""
        self.log.write(step.question, step.feedback, source="stream", task=self.task)
        self._kinds[step.question] = step.kind


class RecallingErrors:
    """Label feedback: the nearest questions that were answered wrongly, with their right answers.

    They stand behind the first of the prompt's own examples, the nearest last, and in place of the
    others, so that a prompt has as many whatever is in the memory (Madaan et al. 2022, App. D.3).
    """

    keeps_prompts = False  # a new error is among the nearest of many questions, of all at first

    def __init__(
        self,
        few_shot: FewShot,
        log: FeedbackLog,
        lookup: Lookup,
        *,
        num_remembered: int,
        threshold: float | None = None,
    ) -> None:
        """Join prompt and memory.

        Args:
            few_shot: The prompt.
            log: The memory.
            lookup: M(x), which follows the log.
            num_remembered: Most questions of the memory in a prompt.
            threshold: The gate's; None lets all through, as the paper does.
        """
        self._few_shot, self._log, self._lookup = few_shot, log, lookup
        self._most, self._threshold = num_remembered, threshold

    def ask(self, step: Step) -> Asked:
        """Write the prompt; see `System`."""
        found = self._lookup.find(step.question, self._most)
        near = passing(found, self._threshold)
        more = [Shown(one.entry.key, one.entry.feedback) for one in reversed(near)]
        num_own = max(0, len(self._few_shot.examples_of(step.question)) - len(more))
        prompt = self._few_shot.write(step.question, more=more, num_own=num_own)
        if not near:
            return Asked(prompt, found=found)
        return Asked(prompt, near[0], QUESTION, found=found, num_used=len(near))

    def learn(self, step: Step) -> None:
        """Write the question with its right answer."""
        self._log.write(step.question, step.feedback, source="stream")


def open_system(
    family: Family, few_shot: FewShot, log: FeedbackLog, *, lookup: Lookup, threshold: float | None
) -> System:
    """Give the system that uses a memory as a family of questions has it.

    Args:
        family: Of the questions.
        few_shot: The prompt.
        log: The memory.
        lookup: Follows it.
        threshold: The gate's; None lets all through.
    """
    if family.is_of_answers:
        most = family.num_remembered
        return RecallingErrors(few_shot, log, lookup, num_remembered=most, threshold=threshold)
    return Remembering(few_shot, log, lookup, threshold)
