"""The paper's simulated user, and the three systems that answer (Madaan et al. 2022, 3.4 and 4).

A question is asked; the user looks at the understanding in the output; where it is wrong, and with
the clarification probability, says what was meant. Only failures are written.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pgra.evaluation.answers import is_exact_match
from pgra.icl.completion import Completer, Completion
from pgra.memory.families import QUESTION, Family
from pgra.memory.gate import pass_gate
from pgra.memory.log import FeedbackLog
from pgra.memory.lookup import Lookup, Match
from pgra.memory.prompter import FewShot, GrowingPrompt, Shown, check_fits
from pgra.memory.steps import Step, is_answered

Draws = npt.NDArray[np.float64]

_BATCH = 16  # prompts at once, where none depends on an answer


@dataclass(frozen=True)
class Asked:
    """A prompt, and what of the memory stands in it.

    Attributes:
        prompt: For the LM.
        match: The feedback that was used; None where none was.
        matched_kind: The type of the question that it was given for.
    """

    prompt: str
    match: Match | None = None
    matched_kind: str | None = None


class System(Protocol):
    """Makes a prompt of a question, and learns from corrections.

    Attributes:
        is_static: Whether it never learns, so that prompts do not depend on answers.
    """

    is_static: bool

    def ask(self, step: Step) -> Asked:
        """Write the prompt."""
        ...

    def learn(self, step: Step) -> None:
        """Take in what the user says of a question that was misunderstood."""
        ...


class NoMemory:
    """NO-MEM: the few-shot prompt and the question."""

    is_static = True

    def __init__(self, few_shot: FewShot) -> None:
        self._few_shot = few_shot

    def ask(self, step: Step) -> Asked:
        """Write the prompt; see `System`."""
        return Asked(self._few_shot.write(step.question))

    def learn(self, step: Step) -> None:
        """Forget it."""


class Growing:
    """GROW-PROMPT: corrections with the expected answer behind the few-shot prompt."""

    is_static = False

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
        threshold: The gate's.
        task: Under which name corrections are written.
    """

    few_shot: FewShot
    log: FeedbackLog
    lookup: Lookup
    threshold: float
    task: str = ""
    is_static: bool = field(default=False, init=False)
    _kinds: dict[str, str] = field(default_factory=dict, init=False)  # of keys, for the report

    def ask(self, step: Step) -> Asked:
        """Write the prompt; see `System`."""
        match = pass_gate(self.lookup.find(step.question), self.threshold)
        if match is None:
            return Asked(self.few_shot.write(step.question))
        prompt = self.few_shot.write(step.question, feedback=match.entry.feedback)
        return Asked(prompt, match, self._kinds.get(match.entry.key))

    def learn(self, step: Step) -> None:
        """Write it to the memory."""
        self.log.write(step.question, step.feedback, source="stream", task=self.task)
        self._kinds[step.question] = step.kind


class RecallingErrors:
    """Label feedback: the nearest questions that were answered wrongly, with their right answers.

    They stand behind the first of the prompt's own examples, the nearest last, and in place of the
    others, so that a prompt has as many whatever is in the memory (Madaan et al. 2022, App. D.3).
    """

    is_static = False

    def __init__(
        self, few_shot: FewShot, log: FeedbackLog, lookup: Lookup, *, num_remembered: int
    ) -> None:
        self._few_shot, self._log, self._lookup = few_shot, log, lookup
        self._most = num_remembered

    def ask(self, step: Step) -> Asked:
        """Write the prompt; see `System`."""
        found = self._lookup.find(step.question, self._most)
        more = [Shown(one.entry.key, one.entry.feedback) for one in reversed(found)]
        num_own = max(0, len(self._few_shot.examples) - len(more))
        prompt = self._few_shot.write(step.question, more=more, num_own=num_own)
        return Asked(prompt, found[0], QUESTION) if found else Asked(prompt)

    def learn(self, step: Step) -> None:
        """Write the question with its right answer."""
        self._log.write(step.question, step.feedback, source="stream")


@dataclass(frozen=True)
class Taken:
    """What happened at one step.

    Attributes:
        step: Its place in the stream, from 1.
        id: The question's.
        kind: The type that was meant.
        question: As it was asked.
        generated: What the LM wrote, cut to its answer.
        expected: The first of the right outputs.
        understood: Acc(u) of this step.
        answered: Acc(y) of this step.
        clarified: Whether the user then said what was meant.
        feedback: The stored clarification that was used; "" for none.
        matched_key: The question it was given for.
        matched_kind: That question's type.
        score: The look-up's, of what was used.
        num_prompt_tokens: Of this step's prompt.
        num_new_tokens: Written.
    """

    step: int
    id: str
    kind: str
    question: str
    generated: str
    expected: str
    understood: bool
    answered: bool
    clarified: bool
    feedback: str
    matched_key: str
    matched_kind: str | None
    score: float | None
    num_prompt_tokens: int
    num_new_tokens: int

    @property
    def used_memory(self) -> bool:
        """Say whether a stored clarification stood in the prompt."""
        return bool(self.feedback)

    @property
    def is_wrong_kind(self) -> bool:
        """Say whether that clarification was given for a question of another type."""
        return self.used_memory and self.matched_kind != self.kind


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """One run of a stream but for the system.

    Attributes:
        family: How the understanding is told.
        few_shot: How an output is read.
        completer: The LM.
        clarification_probability: That a user who was misunderstood says so.
        seed: Of these draws; step t has the same in every system.
        max_new_tokens: Of an answer (the paper: 64).
        max_prompt_tokens: Of a prompt.
        as_released: Whether the understanding is told as the release does.
    """

    family: Family
    few_shot: FewShot
    completer: Completer
    clarification_probability: float
    seed: int
    max_new_tokens: int = 64
    max_prompt_tokens: int = 2048
    as_released: bool = False

    def run(
        self, steps: Sequence[Step], system: System, *, advance: Callable[[int], None] | None = None
    ) -> Iterator[Taken]:
        """Give what happens at each step, in order.

        Args:
            steps: The stream.
            system: Fresh; it learns.
            advance: Called with the steps done, for a bar.

        Raises:
            DataError: If a question does not fit the LM's window.
        """
        draws = np.random.default_rng(self.seed).random(len(steps))
        size = _BATCH if system.is_static else 1
        for start in range(0, len(steps), size):
            group = steps[start : start + size]
            for place, taken in enumerate(self._take(group, system, start, draws)):
                if taken.clarified:
                    system.learn(group[place])
                yield taken
            if advance is not None:
                advance(len(group))

    def _take(self, group: Sequence[Step], system: System, start: int, draws: Draws) -> list[Taken]:
        asked = [system.ask(step) for step in group]
        prompts = [one.prompt for one in asked]
        sizes = self.completer.count_tokens(prompts)
        budget = min(self.max_prompt_tokens, self.completer.window - self.max_new_tokens)
        for step, size in zip(group, sizes, strict=True):
            check_fits(step.question, size, budget)
        written = self.completer.complete(
            prompts, max_new_tokens=self.max_new_tokens, stop=self.few_shot.end
        )
        return [
            self._judge(step, asked[i], written[i], number=start + i + 1, draw=draws[start + i])
            for i, step in enumerate(group)
        ]

    def _judge(
        self, step: Step, asked: Asked, written: Completion, *, number: int, draw: float
    ) -> Taken:
        output, match = self.few_shot.read_output(written.text), asked.match
        understood, answered = self._judge_output(step, output)
        return Taken(
            step=number,
            id=step.id,
            kind=step.kind,
            question=step.question,
            generated=output,
            expected=step.expected[0],
            understood=understood,
            answered=answered,
            clarified=not understood and bool(draw < self.clarification_probability),
            feedback=match.entry.feedback if match else "",
            matched_key=match.entry.key if match else "",
            matched_kind=asked.matched_kind,
            score=match.score if match else None,
            num_prompt_tokens=written.num_prompt_tokens,
            num_new_tokens=written.num_new_tokens,
        )

    def _judge_output(self, step: Step, output: str) -> tuple[bool, bool]:
        """Say whether the intent was understood, and whether the answer is right."""
        if self.family.is_of_answers:  # nobody tells the understanding
            is_right = is_exact_match(output, step.expected)
            return is_right, is_right
        told = self.family.is_understood(step.kind, output, as_released=self.as_released)
        return told, is_answered(step, output)
