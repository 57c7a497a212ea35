"""The paper's streams (Madaan et al. 2022, section 4): questions, a simulated user, the systems.

If an answer shows a wrong understanding, the user says what was meant with the clarification
probability. Only failures are written.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pgra.config import Arguments, arg
from pgra.core import Context
from pgra.data.read import Record, check_file, read_table
from pgra.errors import DataError, show
from pgra.lm import open_lm
from pgra.lm.base import CompleterArguments, Completion, LanguageModel
from pgra.memory.families import (
    QUESTION,
    SITUATION,
    Family,
    FewShot,
    PromptExample,
    fill,
    judge_situation,
    plain,
)
from pgra.memory.log import MemoryEntry, read_events, replay
from pgra.memory.lookup import Match, passing
from pgra.memory.memory import Memory
from pgra.report.metrics import is_exact_match

_MARK = "clarification:"  # what the released streams begin a feedback with
_SHOWN_CHARS = 80


@dataclass(frozen=True)
class Step:
    """One question of a stream.

    Attributes:
        kind: The type of task that is meant, such as "syn"; "" if unknown.
        feedback: What a user says who was misunderstood.
        word: What the question is about; of a situation its category or rule of thumb.
        expected: Right outputs, the first the one that GROW-PROMPT shows.
    """

    id: str
    kind: str
    question: str
    feedback: str
    word: str = ""
    expected: tuple[str, ...] = ()

    @property
    def meaning(self) -> str:
        """What questions share that the same feedback suits."""
        return self.feedback if self.kind == SITUATION else self.kind


def judge_output(
    family: Family, kind: str, output: str, expected: Sequence[str]
) -> tuple[bool, bool]:
    """Return whether the intent was understood, Acc(u), and whether the output is right, Acc(y).

    `kind` is the type that was meant. For Acc(y) case, spaces and final punctuation do not count.
    """
    if family.is_of_answers:  # nobody tells the understanding
        is_right = is_exact_match(output, expected)
        return is_right, is_right
    if family.situations is not None:
        return judge_situation(output, expected[0])
    understood = family.is_understood(kind, output)
    return understood, plain(output) in map(plain, expected)


def match_form(family: Family, text: str) -> tuple[str, re.Match[str]] | None:
    """Match a text with the forms of a family's answers, ignoring case.

    Returns the type that answers so and a match whose one group is the answer; None without a
    match.
    """
    for kind, form in family.answers.items():
        pattern = re.escape(form).replace(r"\{word\}", ".+?").replace(r"\{answer\}", "(.+)")
        if found := re.fullmatch(pattern, text, flags=re.IGNORECASE | re.DOTALL):
            return kind, found
    return None


def read_texts(record: Record, names: Sequence[str]) -> list[str]:
    """Return fields of a line, which must be texts; `answers` may be a list of texts."""
    texts: list[str] = []
    for name in names:
        value: Any = record.fields.get(name)
        parts = value if name == "answers" and isinstance(value, list) and value else [value]
        if not all(isinstance(part, str) and part.strip() for part in parts):
            raise DataError(
                f"{record.place}: {name} is {show(value)}, and must be text: a line has "
                f"{', '.join(names)}"
            )
        texts += parts
    return texts


def read_stream(path: Path, family: Family) -> list[Step]:
    """Read a stream, one JSON object a line, in the release's format.

    A line has `type`, `word`, `question`, `feedback` and `expected_answer`; for a family of answers
    `question` and `answers` (all right ones); for one of situations `situation`, `label` and the
    field that its form names.

    Raises:
        DataError: If a line lacks a field, or its type is unknown to the family.
    """
    form = family.situations
    if form is not None and not path.exists():
        raise DataError(
            f"{path} does not exist, and the paper's data of '{family.name}' was never released: "
            f"give your own, lines with situation, {form.about}, label ({', '.join(form.labels)})"
        )
    read = _read_situation if form else _read_fact if family.is_of_answers else _read_step
    steps = [read(record, family) for record in read_table(path, ("jsonl",))]
    if not steps:
        raise DataError(f"{path} holds no question")
    return steps


def _read_step(record: Record, family: Family) -> Step:
    names = ("type", "word", "question", "feedback", "expected_answer")
    kind, word, question, feedback, expected = read_texts(record, names)
    _check_known(record, "type", kind, family.kinds)
    feedback = feedback.removeprefix(_MARK).strip()
    return Step(str(record.line), kind, question, feedback, word, (expected,))


def _read_fact(record: Record, _: Family) -> Step:
    question, *answers = read_texts(record, ("question", "answers"))
    return Step(str(record.line), QUESTION, question, answers[0], expected=tuple(answers))


def _read_situation(record: Record, family: Family) -> Step:
    form = family.situations
    assert form is not None  # read_stream
    texts = read_texts(record, ("situation", form.about, "label"))
    text, about, label = (" ".join(part.split()) for part in texts)
    label = next((known for known in form.labels if known.lower() == label.lower()), label)
    _check_known(record, "label", label, form.labels)
    about = about.lower() if form.categories else about.rstrip(".")
    if form.categories:
        _check_known(record, form.about, about, form.categories)
    output, feedback = (
        fill(frame, about=about, label=label) for frame in (form.output, form.feedback)
    )
    kind = about if form.categories else SITUATION
    return Step(str(record.line), kind, text, feedback, about, (output,))


def _check_known(record: Record, name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise DataError(f"{record.place}: {name} '{value}' is none of {', '.join(known)}")


def read_pairs(path: Path, family: Family | None = None) -> list[Step]:
    """Read questions with their feedback, to train look-ups.

    From a memory (.sqlite), a log of `pgra memory export`, or jsonl with `question`, `feedback` and
    optionally `type`; with a family, a stream of it.

    Raises:
        DataError: If there is no pair, or a line lacks question or feedback.
    """
    if family is not None:
        return read_stream(path, family)
    entries, records = list[MemoryEntry](), list[Record]()
    if check_file(path, ("jsonl", "sqlite")) == "sqlite":
        with Memory(path, create=False) as memory:
            entries = list(memory)
    else:
        records = list(read_table(path, ("jsonl",)))
        if records and {"kind", "source"} <= set(records[0].fields):
            entries, records = replay(read_events(path)), []
    pairs = [Step(str(entry.id), "", entry.question, entry.feedback) for entry in entries]
    for record in records:
        kind = str(record.fields.get("type") or "")
        question, feedback = read_texts(record, ("question", "feedback"))
        pairs.append(Step(str(record.line), kind, question, feedback.removeprefix(_MARK).strip()))
    if not pairs:
        raise DataError(f"{path} holds no question with a feedback: there is nothing to learn")
    return pairs


@dataclass(kw_only=True)
class PromptedArguments(Arguments):
    """What is asked, and in which prompt."""

    family: str = arg("lexical", "Name of a YAML in configs/memory, or the path of one.")
    prompt: str | None = arg(
        None, "Name of a YAML in configs/memory_prompts, or a path; default: the family's."
    )
    max_new_tokens: int = arg(64, "Most tokens of an answer.", least=1)
    max_prompt_tokens: int = arg(2048, "Most tokens of a prompt, within the LM's window.", least=1)
    artifacts_dir: str = arg("artifacts", "Where the LM's answers are kept.", decides=False)
    device: str = arg("auto", "auto (a GPU if there is one), cpu, cuda, ...", decides=False)

    @property
    def context(self) -> Context:
        return Context(artifacts=Path(self.artifacts_dir), device=self.device)

    def open_lm(self, few_shot: FewShot, lm: CompleterArguments) -> "PromptedLM":
        return PromptedLM(
            few_shot=few_shot,
            completer=open_lm(lm, self.context),
            max_new_tokens=self.max_new_tokens,
            max_prompt_tokens=self.max_prompt_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class PromptedLM:
    """An LM that completes the prompts of a few-shot prompt."""

    few_shot: FewShot
    completer: LanguageModel
    max_new_tokens: int = 64
    max_prompt_tokens: int = 2048

    @property
    def budget(self) -> int:
        """Most tokens of a prompt; the LM's window may be the limit."""
        return min(self.max_prompt_tokens, self.completer.window - self.max_new_tokens)

    def complete(self, prompts: Sequence[str]) -> list[Completion]:
        """Complete prompts; none is cut: a DataError if one exceeds the budget."""
        for prompt, size in zip(prompts, self.completer.count_tokens(prompts), strict=True):
            if size > self.budget:
                question = prompt.split(self.few_shot.separator)[-2]
                raise DataError(
                    f"the question '{question[:_SHOWN_CHARS]}' makes a prompt of {size:,} "
                    f"tokens, and {self.budget:,} fit: shorten the prompt, or use another LM"
                )
        end = self.few_shot.end
        return self.completer.complete(prompts, max_new_tokens=self.max_new_tokens, stop=end)


@dataclass(frozen=True)
class BuiltPrompt:
    """A prompt, and what the memory gave for it.

    Attributes:
        found: The look-up's matches, the nearest first.
        num_used: How many of them, the first, stand in the prompt.
        matched_kind: The type of the question that the first was given for.
    """

    text: str
    found: Sequence[Match] = ()
    num_used: int = 0
    matched_kind: str | None = None


@dataclass(frozen=True)
class GrowPrompt:
    """GROW-PROMPT: the newest corrections as further examples, as many as fit (section 4).

    The release counts 1,300 words; here the LM's tokens count, as in the paper.

    Attributes:
        max_added: Most corrections shown (the release: 20); None for no limit but the tokens; 0 is
            NO-MEM, the few-shot prompt and the question.
        added: The corrections, the newest last.
    """

    lm: PromptedLM
    max_added: int | None = None
    added: list[PromptExample] = field(default_factory=list)

    def ask(self, step: Step) -> BuiltPrompt:
        """Build the prompt, with the newest correction nearest the question."""

        def write(used: int) -> str:
            return self.lm.few_shot.write(step.question, more=self.added[len(self.added) - used :])

        def size(used: int) -> int:
            return self.lm.completer.count_tokens([write(used)])[0]

        most = len(self.added) if self.max_added is None else min(self.max_added, len(self.added))
        return BuiltPrompt(write(bisect_right(range(1, most + 1), self.lm.budget, key=size)))

    def learn(self, step: Step) -> None:
        feedback = "" if step.kind == QUESTION else step.feedback  # there it is the answer itself
        self.added.append(PromptExample(step.question, step.expected[0], feedback))


@dataclass(frozen=True)
class MemPrompt:
    """MEM-PROMPT: the feedback nearest a question stands in its prompt, if it passes the gate.

    For most families it is the nearest clarification, beside the question. For label feedback (App.
    D.3) the nearest wrongly answered questions, with their right answers, replace as many of the
    prompt's own examples and stand after the rest, the nearest last.

    Attributes:
        memory: Its threshold is the gate; None lets all pass, as the paper does with label
            feedback.
        kinds: Each question's type, for the report.
    """

    family: Family
    few_shot: FewShot
    memory: Memory
    kinds: dict[str, str] = field(default_factory=dict)

    def ask(self, step: Step) -> BuiltPrompt:
        question, is_of_answers = step.question, self.family.is_of_answers
        num_found = self.family.num_remembered if is_of_answers else 1
        found = self.memory.search(question, num_found, threshold=-math.inf)
        near = passing(found, self.memory.threshold)
        if is_of_answers:
            more = [PromptExample(entry.question, entry.feedback) for entry in reversed(near)]
            num_own = max(0, len(self.few_shot.examples_of(question)) - len(more))
            text = self.few_shot.write(question, more=more, num_own=num_own)
        else:
            feedback = near[0].feedback if near else ""
            text = self.few_shot.write(question, feedback=feedback)
        kind = self.kinds.get(near[0].question) if near else None
        return BuiltPrompt(text, found, len(near), kind)

    def learn(self, step: Step) -> None:
        self.memory.add(step.question, step.feedback)
        self.kinds[step.question] = step.kind


System = GrowPrompt | MemPrompt


@dataclass(frozen=True)
class StepOutcome:
    """What happened at one step.

    Attributes:
        step: Its number in the stream, from 1.
        generated: What the LM wrote, cut to its answer.
        understood: Acc(u) of this step.
        answered: Acc(y) of this step.
        clarified: Whether the user then said what was meant.
        feedback: The stored clarification that was used; "" for none.
        neighbors: The questions whose feedback stood in the prompt, the nearest first.
        matched_kind: The type of the nearest one.
        score: The look-up's, of the used feedback.
        num_prompt_tokens: None where an endpoint does not report them; `num_new_tokens` likewise.
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
    neighbors: list[str]
    matched_kind: str | None
    score: float | None
    num_prompt_tokens: int | None
    num_new_tokens: int | None

    @property
    def used_memory(self) -> bool:
        """Whether a stored clarification stood in the prompt."""
        return bool(self.feedback)

    @property
    def is_wrong_kind(self) -> bool:
        """Whether that clarification was given for a question of another type."""
        return self.used_memory and self.matched_kind != self.kind


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A simulated user, and the LM that is asked.

    At most `num_ahead` questions are asked together; those whose prompt a correction changes are
    asked again. It changes no outcome; 1 wastes no call of a paid endpoint.
    """

    family: Family
    lm: PromptedLM
    num_ahead: int = 16

    def play(
        self, steps: Sequence[Step], system: System, *, probability: float, seed: int
    ) -> Iterator[StepOutcome]:
        """Ask a stream's questions, in order; the system must be fresh, and learns.

        A user who was misunderstood says so with the probability; step t has the same draw in every
        system.

        Raises:
            DataError: If a question does not fit the LM's window.
        """
        draws = np.random.default_rng(seed).random(len(steps))
        answers = dict[str, Completion]()
        size, asked = 1, 0  # rows that are asked together; and up to this one all were asked
        for row, step in enumerate(steps):
            prompt = system.ask(step)
            if prompt.text not in answers:
                # Half as many where a correction changed a prompt that was asked ahead.
                size = min(2 * size, self.num_ahead) if row >= asked else max(1, size // 2)
                asked = row + size
                ahead = [system.ask(later).text for later in steps[row + 1 : row + size]]
                new = [text for text in dict.fromkeys([prompt.text, *ahead]) if text not in answers]
                answers |= zip(new, self.lm.complete(new), strict=True)
            completion = answers[prompt.text]
            output = self.lm.few_shot.read_output(completion.text)
            understood, answered = judge_output(self.family, step.kind, output, step.expected)
            used = prompt.found[0] if prompt.num_used else None
            outcome = StepOutcome(
                step=row + 1,
                id=step.id,
                kind=step.kind,
                question=step.question,
                generated=output,
                expected=step.expected[0],
                understood=understood,
                answered=answered,
                clarified=not understood and bool(draws[row] < probability),
                feedback=used.feedback if used else "",
                neighbors=[match.question for match in prompt.found[: prompt.num_used]],
                matched_kind=prompt.matched_kind,
                score=used.score if used else None,
                num_prompt_tokens=completion.num_prompt_tokens,
                num_new_tokens=completion.num_new_tokens,
            )
            if outcome.clarified:
                system.learn(step)
            yield outcome
