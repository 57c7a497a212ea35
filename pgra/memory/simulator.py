"""The paper's simulated user (Madaan et al. 2022, sections 3.4 and 4).

A question is asked; the user looks at the understanding in the output; where it is wrong, and with
the clarification probability, says what was meant. Only failures are written.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pgra.evaluation.answers import is_exact_match
from pgra.icl.completion import Completer, Completion
from pgra.memory.families import Family
from pgra.memory.prompter import FewShot, check_fits
from pgra.memory.situations import judge_situation
from pgra.memory.steps import Step, is_answered
from pgra.memory.systems import Asked, System

_LEAST_AHEAD = 2  # where a correction changes every prompt
Draws = npt.NDArray[np.float64]


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
        num_ahead: Questions that are asked together, as the memory is at the first of them; those
            whose prompt a correction changed meanwhile are asked again. It changes no outcome.
    """

    family: Family
    few_shot: FewShot
    completer: Completer
    clarification_probability: float
    seed: int
    max_new_tokens: int = 64
    max_prompt_tokens: int = 2048
    as_released: bool = False
    num_ahead: int = 16

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
        least = self.num_ahead if system.keeps_prompts else min(_LEAST_AHEAD, self.num_ahead)
        size = least
        answers: dict[str, Completion] = {}
        for place, step in enumerate(steps):
            asked = system.ask(step)
            if asked.prompt not in answers:
                ahead = [system.ask(later).prompt for later in steps[place + 1 : place + size]]
                size = min(2 * size, self.num_ahead)  # unless a correction comes before
                answers = self._answer([asked.prompt, *ahead], answers)
            taken = self._judge(
                step, asked, answers[asked.prompt], number=place + 1, draw=draws[place]
            )
            if taken.clarified:
                system.learn(step)
                size = least
            yield taken
            if advance is not None:
                advance(1)

    def _answer(
        self, prompts: Sequence[str], known: Mapping[str, Completion]
    ) -> dict[str, Completion]:
        """Ask the LM what is not known yet; give the answers of these prompts."""
        new = list(dict.fromkeys(prompt for prompt in prompts if prompt not in known))
        written = ask_lm(
            self.completer,
            self.few_shot,
            new,
            max_new_tokens=self.max_new_tokens,
            max_prompt_tokens=self.max_prompt_tokens,
        )
        told = dict(zip(new, written, strict=True))
        return {prompt: told[prompt] if prompt in told else known[prompt] for prompt in prompts}

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
        if self.family.situations is not None:
            return judge_situation(output, step.expected[0])
        told = self.family.is_understood(step.kind, output, as_released=self.as_released)
        return told, is_answered(step, output)


def ask_lm(
    completer: Completer,
    few_shot: FewShot,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    max_prompt_tokens: int,
) -> list[Completion]:
    """Have an LM go on with prompts, which must fit.

    Args:
        completer: The LM.
        few_shot: What the prompts were written by.
        prompts: In the order of the answers (B,).
        max_new_tokens: Of an answer.
        max_prompt_tokens: Of a prompt, the LM's window permitting.

    Raises:
        DataError: If a question does not fit.
    """
    budget = min(max_prompt_tokens, completer.window - max_new_tokens)
    for prompt, size in zip(prompts, completer.count_tokens(prompts), strict=True):
        check_fits(prompt.split(few_shot.separator)[-2], size, budget)
    return completer.complete(prompts, max_new_tokens=max_new_tokens, stop=few_shot.end)
