"""The paper's streams: questions, a simulated user, the systems compared, what is measured.

A question is asked; the user looks at the understanding in the output; where it is wrong, and with
the clarification probability, says what was meant. Only failures are written.
"""

import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import correlation, fmean
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pgra.core import Json
from pgra.data.read import Record, Row, check_file, json_rows, read_lines, read_records, table_rows
from pgra.errors import DataError
from pgra.lm.base import Completion, LanguageModel
from pgra.memory.families import (
    QUESTION,
    SITUATION,
    Family,
    Phrasing,
    judge_situation,
    read_situation,
)
from pgra.memory.log import FeedbackLog, read_events, replay
from pgra.memory.lookup import Lookup, Match, pass_gate, passing
from pgra.memory.prompts import FewShot, GrowingPrompt, Shown, check_fits
from pgra.report.text_metrics import is_exact_match

# Five ways to scramble a word (Brown et al. 2020, section 3.9.2; Madaan et al. 2022, 3.3.2).


_SYMBOLS = "!./- "
_FIT = re.compile(r"[a-z]{6,14}")


def can_scramble(word: str) -> bool:
    """Say whether every way changes a word: 6 to 14 letters, of the inner ones two that differ."""
    return bool(_FIT.fullmatch(word)) and len(set(word[2:-2])) > 1 and word != word[::-1]


def scramble(word: str, kind: str, draw: random.Random) -> str:
    """Scramble a word.

    Args:
        word: One that `can_scramble`.
        kind: One of `SCRAMBLES`.
        draw: Gives the randomness.

    Returns:
        A text that is not the word.
    """
    while (changed := SCRAMBLES[kind](word, draw)) == word:
        pass
    return changed


def _cycle(word: str, draw: random.Random) -> str:
    place = draw.randrange(1, len(word))
    return word[place:] + word[:place]


def _shuffle_inside(word: str, draw: random.Random, kept: int) -> str:
    inner = list(word[kept:-kept])
    draw.shuffle(inner)
    return word[:kept] + "".join(inner) + word[-kept:]


def _insert_symbols(word: str, draw: random.Random) -> str:
    return "".join(letter + draw.choice(_SYMBOLS) for letter in word[:-1]) + word[-1]


SCRAMBLES: Mapping[str, Callable[[str, random.Random], str]] = {
    "cyc": _cycle,
    "anag1": lambda word, draw: _shuffle_inside(word, draw, 1),
    "anag2": lambda word, draw: _shuffle_inside(word, draw, 2),
    "randsym": _insert_symbols,
    "rev": lambda word, _: word[::-1],
}


# Streams of questions: read from a file, or made of a word list.


_STEP_KEYS = ("type", "word", "question", "feedback", "expected_answer")
_OUTER = " .,;:!?\"'"


@dataclass(frozen=True)
class Step:
    """One question of a stream, with what a user would say if it were misunderstood.

    Attributes:
        id: Its name in the stream.
        kind: The type of task that is meant, such as "syn".
        word: What the question is about; of a situation its category or rule of thumb.
        question: As it is asked.
        feedback: What a user says who was misunderstood.
        expected: Outputs that are right, the first the one that GROW-PROMPT shows.
    """

    id: str
    kind: str
    word: str
    question: str
    feedback: str
    expected: tuple[str, ...]

    @property
    def meaning(self) -> str:
        """Give what two questions share that the same feedback suits."""
        return self.feedback if self.kind == SITUATION else self.kind


def is_answered(step: Step, output: str) -> bool:
    """Say whether an output is one of those expected: Acc(y), but for case, spaces and its end."""
    return _plain(output) in {_plain(text) for text in step.expected}


def _plain(text: str) -> str:
    return " ".join(text.lower().split()).strip(_OUTER)


def read_stream(path: Path, family: Family) -> list[Step]:
    """Read a stream, one JSON object a line, as the paper's release has them.

    Args:
        path: jsonl with `type`, `word`, `question`, `feedback` and `expected_answer`; of a family
            of answers with `question` and `answers`, all that are right; of one of situations with
            `situation`, `label` and what it is about (see `read_situation`).
        family: Whose questions they are.

    Raises:
        DataError: If a line lacks one of them, or is of no type of the family.
    """
    _check_stream_file(path, family)
    read = _reader_of(family)
    steps = [read(path, record, family) for record in read_records(path)]
    if not steps:
        raise DataError(f"{path} holds no question")
    return steps


def _check_stream_file(path: Path, family: Family) -> None:
    if family.situations is not None and not path.exists():
        form = family.situations
        raise DataError(
            f"{path} does not exist, and the paper's data of '{family.name}' was never released: "
            f"give your own jsonl file, a line with situation, {form.about} and label "
            f"({', '.join(form.labels)}) for each"
        )
    check_file(path, ("jsonl",))


def _reader_of(family: Family) -> Callable[[Path, Record, Family], Step]:
    if family.situations is not None:
        return _situation_step
    return _answer_step if family.is_of_answers else _step


def _situation_step(path: Path, record: Record, family: Family) -> Step:
    form = family.situations
    assert form is not None  # _reader_of
    told = read_situation(f"{path}, line {record.line}", record.fields, form)
    parts = {"about": told.about, "label": told.label}
    output, feedback = (_fill(text, parts) for text in (form.output, form.feedback))
    kind = told.about if form.categories else SITUATION
    return Step(str(record.line), kind, told.about, told.text, feedback, (output,))


def _fill(text: str, parts: Mapping[str, str]) -> str:
    return re.sub(r"\{(about|label)\}", lambda found: parts[found.group(1)], text)


def _step(path: Path, record: Record, family: Family) -> Step:
    place, told = f"{path}, line {record.line}", record.fields
    for name in _STEP_KEYS:
        if not isinstance(told.get(name), str) or not str(told[name]).strip():
            raise DataError(f"{place}: {name} is {told.get(name)!r}, and must be text")
    kind = str(told["type"])
    if kind not in family.answers:
        known = ", ".join(family.answers)
        raise DataError(
            f"{place}: type '{kind}' is none of the family '{family.name}' ({known}): name the "
            "stream's own with --family"
        )
    feedback = str(told["feedback"]).removeprefix("clarification:").strip()
    return Step(
        id=str(record.line),
        kind=kind,
        word=str(told["word"]),
        question=str(told["question"]),
        feedback=feedback,
        expected=(str(told["expected_answer"]),),
    )


def _answer_step(path: Path, record: Record, family: Family) -> Step:
    question, answers = record.fields.get("question"), record.fields.get("answers")
    right = answers if isinstance(answers, list) and answers else [None]
    if not all(isinstance(text, str) and text.strip() for text in (question, *right)):
        raise DataError(
            f"{path}, line {record.line}: the family '{family.name}' takes question, a text, and "
            "answers, a list of texts"
        )
    told = tuple(str(text) for text in right)
    return Step(str(record.line), QUESTION, "", str(question), told[0], told)


Words = Mapping[str, Mapping[str, Sequence[str]]]
"""By type: answers by word. For scrambles: by "" the words to scramble, each its own answer."""


def read_words(path: Path, family: Family) -> Words:
    """Read a word list that streams are made of.

    Args:
        path: For relations jsonl with `type`, `word` and `answer`; for scrambles a text file with
            a word a line. Either may be packed.
        family: Whose questions are made.

    Raises:
        DataError: If a line is not so, a type has no word, or the family has no phrasings.
    """
    if not family.phrasings:
        raise DataError(f"the family '{family.name}' is not made of words: give it --stream FILE")
    if family.words == "scrambles":
        check_file(path, ("txt",))
        words = {line.text.strip().lower() for line in read_lines(path)}
        fit = sorted(word for word in words if can_scramble(word))
        if not fit:
            raise DataError(f"{path} has no word of 6 to 14 plain letters, one a line")
        return {"": {word: [word] for word in fit}}
    check_file(path, ("jsonl",))
    found: dict[str, dict[str, list[str]]] = {kind: defaultdict(list) for kind in family.answers}
    for record in read_records(path):
        told = {name: record.fields.get(name) for name in ("type", "word", "answer")}
        if not all(isinstance(value, str) and value.strip() for value in told.values()):
            raise DataError(
                f"{path}, line {record.line}: {json.dumps(told)[:80]} must have type, word and "
                "answer, each a text"
            )
        if told["type"] in found:
            found[str(told["type"])][str(told["word"])].append(str(told["answer"]))
    lacking = [kind for kind, words in found.items() if not words]
    if lacking:
        raise DataError(f"{path} has no word of type '{lacking[0]}'")
    return found


def make_stream(family: Family, words: Words, *, num_steps: int, seed: int) -> list[Step]:
    """Draw a stream: each step one phrasing and one word, all as likely as each other.

    Args:
        family: How questions are asked.
        words: Of `read_words`.
        num_steps: How many.
        seed: Of the draws.
    """
    draw = random.Random(seed)
    pools = {kind: sorted(answers) for kind, answers in words.items()}
    steps = []
    for number in range(1, num_steps + 1):
        phrasing = draw.choice(family.phrasings)
        if family.words == "scrambles":
            answer = draw.choice(pools[""])
            shown, answers = scramble(answer, phrasing.kind, draw), [answer]
        else:
            shown = draw.choice(pools[phrasing.kind])
            answers = list(words[phrasing.kind][shown])
        steps.append(_make_step(family, phrasing, shown, answers, number=number))
    return steps


def _make_step(
    family: Family, phrasing: Phrasing, word: str, answers: Sequence[str], *, number: int
) -> Step:
    frame = family.answers[phrasing.kind]
    return Step(
        id=str(number),
        kind=phrasing.kind,
        word=word,
        question=phrasing.question.replace("{word}", word),
        feedback=phrasing.feedback,
        expected=tuple(
            frame.replace("{word}", word).replace("{answer}", answer) for answer in answers
        ),
    )


# NO-MEM, GROW-PROMPT, MEM-PROMPT: how each makes a prompt, and what it keeps of a correction.
#
# Madaan et al. 2022, section 4; label feedback is that of App. D.3.


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
    completer: LanguageModel
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
    completer: LanguageModel,
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


# What a stream measured: accuracy over time, by type, and what the look-ups did.


LAST = 100
"""Steps at the end whose accuracy is told apart: what the system can do once it has learned."""


def running_accuracy(outcomes: Sequence[bool]) -> list[float]:
    """Give the share of the steps up to each that went well, (n,), as the paper plots it."""
    running, right = [], 0
    for number, outcome in enumerate(outcomes, 1):
        right += outcome
        running.append(right / number)
    return running


def correlate(first: Sequence[bool], second: Sequence[bool]) -> float | None:
    """Give the correlation of two outcomes (phi); None where one of them is always the same."""
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return correlation(list(map(float, first)), list(map(float, second)))


def measure(taken: Sequence[Taken]) -> dict[str, Json]:
    """Measure a whole stream.

    Args:
        taken: Its steps, in order.

    Returns:
        Accuracy of the understanding and of the answer (of all steps, of the last 100, and the mean
        of the running accuracy, which is the area under its curve); by type; what look-ups did;
        tokens of prompts and of outputs.
    """
    understood = [one.understood for one in taken]
    kinds = sorted({one.kind for one in taken})
    return {
        "n": len(taken),
        "understood": fmean(understood),
        "understood_area": fmean(running_accuracy(understood)),
        f"understood_last_{LAST}": fmean(understood[-LAST:]),
        "understood_by_type": {
            kind: fmean(one.understood for one in taken if one.kind == kind) for kind in kinds
        },
        "answered": fmean(one.answered for one in taken),
        "answered_area": fmean(running_accuracy([one.answered for one in taken])),
        "clarifications": sum(one.clarified for one in taken),
        "prompt_tokens": sum(one.num_prompt_tokens for one in taken),
        "new_tokens": sum(one.num_new_tokens for one in taken),
        "lookups": measure_lookups(taken),
    }


def measure_lookups(taken: Sequence[Taken]) -> dict[str, Json]:
    """Say what the clarifications did that were found in the memory.

    Args:
        taken: A stream's steps.

    Returns:
        How many were used; the share of those after which the question was understood (the paper's
        "effective", 97 %) and of those given for a question of another type.
    """
    used = [one for one in taken if one.used_memory]
    return {
        "used": len(used),
        "effective": fmean(one.understood for one in used) if used else None,
        "wrong_type": fmean(one.is_wrong_kind for one in used) if used else None,
    }


def compare_with(taken: Sequence[Taken], without: Sequence[Taken]) -> dict[str, Json]:
    """Say which look-ups helped and which hurt, beside the same stream without a memory.

    Args:
        taken: The stream's steps.
        without: The same questions, with NO-MEM.

    Returns:
        Shares of the steps with a clarification from the memory that are understood with it and not
        without (helped), the other way round (hurt), and either way or neither (no change).

    Raises:
        ValueError: If the questions are not the same.
    """
    if [one.question for one in taken] != [one.question for one in without]:
        raise ValueError("the two streams ask different questions")
    pairs = [
        (one.understood, bare.understood)
        for one, bare in zip(taken, without, strict=True)
        if one.used_memory
    ]
    if not pairs:
        return {"helped": None, "hurt": None, "no_change": None}
    helped = fmean(now and not before for now, before in pairs)
    hurt = fmean(before and not now for now, before in pairs)
    return {"helped": helped, "hurt": hurt, "no_change": 1 - helped - hurt}


def wrong_type_pairs(taken: Sequence[Taken]) -> list[Mapping[str, Json]]:
    """List the collisions that a stream ran into, the most frequent first.

    Returns:
        For each pair of types: what was asked, what was found, one example of each, how often, and
        how often the question was understood all the same.
    """
    found: dict[tuple[str, str], list[Taken]] = {}
    for one in taken:
        if one.is_wrong_kind:
            found.setdefault((one.kind, str(one.matched_kind)), []).append(one)
    ordered = sorted(found.items(), key=lambda item: -len(item[1]))
    return [
        {
            "asked": asked,
            "found": other,
            "question": ones[0].question,
            "key": ones[0].matched_key,
            "score": ones[0].score,
            "times": len(ones),
            "understood": sum(one.understood for one in ones),
        }
        for (asked, other), ones in ordered
    ]


# Scores outputs that stand in a file: the paper's Acc(u), and Acc(y), by type.
#
# Files are jsonl or csv, a question a row, with one output or those of several systems side by
# side: the release's `results.csv` has `question`, `gold`, `GPT-3 generated` and
# `with_mem_learned_ir generated`; a run's `steps.jsonl` has `expected` and `generated`.


_GOLD = ("gold", "expected", "expected_answer")
_KIND = ("type", "kind")
_OUTPUT = "generated"


@dataclass(frozen=True)
class Scored:
    """What one column of outputs reached.

    Attributes:
        column: Its name.
        counts: Outputs by type.
        understood: Acc(u) by type, and of "all", which is over outputs.
        answered: Acc(y) of all.
    """

    column: str
    counts: Mapping[str, int]
    understood: Mapping[str, float]
    answered: float


@dataclass(frozen=True)
class _Judged:
    kind: str
    understood: bool
    answered: bool


def score_file(path: Path, family: Family, *, as_released: bool = False) -> list[Scored]:
    """Score each column of outputs, those whose names end in "generated".

    A row's type is its `type` or `kind`, else that whose expected output begins as its own does.

    Args:
        path: jsonl or csv.
        family: Whose questions they answer.
        as_released: Whether the understanding is told as the paper's release does.

    Raises:
        DataError: If the family's understanding is not told, there is no row or no such column, or
            a row has no type.
    """
    if family.is_of_answers:
        raise DataError(
            f"the family '{family.name}' has no understanding to score: pgra icl scores answers"
        )
    judged: dict[str, list[_Judged]] = {}
    for row in _rows(path):
        gold = _text(row, _GOLD)
        if gold is None:
            raise DataError(f"{row.place} has none of {', '.join(_GOLD)}: the right output")
        kind = _kind(row, gold, family)
        for column in _columns(row):
            output = str(row.values[column])
            told = _judge(output, gold, kind, family=family, as_released=as_released)
            judged.setdefault(column, []).append(told)
    if not judged:
        raise DataError(f"{path} holds no row of outputs")
    if len({len(ones) for ones in judged.values()}) > 1:
        raise DataError(f"{path}: not every row has every output column: {', '.join(judged)}")
    return [_score(column, ones, family.kinds) for column, ones in judged.items()]


def _rows(path: Path) -> Iterator[Row]:
    kind = check_file(path, ("jsonl", "csv"))
    return json_rows(path) if kind == "jsonl" else table_rows(path, kind, ())


def _text(row: Row, names: Sequence[str]) -> str | None:
    found = (row.values.get(name) for name in names)
    return next((text for text in found if isinstance(text, str) and text.strip()), None)


def _columns(row: Row) -> list[str]:
    columns = [name for name in row.values if name.endswith(_OUTPUT)]
    if not columns:
        raise DataError(f"{row.place} has no output: its column's name must end in '{_OUTPUT}'")
    return columns


def _kind(row: Row, gold: str, family: Family) -> str:
    if family.situations is not None and not family.situations.categories:
        return family.kinds[0]
    told = _text(row, _KIND)
    found = told if told is not None else _kind_of(gold, family)
    if found not in family.kinds:
        raise DataError(
            f"{row.place}: the right output '{gold[:80]}' is of no type of the family "
            f"'{family.name}' ({', '.join(family.kinds)}): name the file's own with --family"
        )
    return found


def _kind_of(gold: str, family: Family) -> str | None:
    for kind, frame in family.answers.items():
        parts = re.split(r"\{word\}|\{answer\}", frame)
        shape = ".*".join(map(re.escape, parts))
        if re.fullmatch(shape, gold, re.IGNORECASE | re.DOTALL):
            return kind
    return None


def _judge(output: str, gold: str, kind: str, *, family: Family, as_released: bool) -> _Judged:
    if family.situations is not None:
        return _Judged(kind, *judge_situation(output, gold))
    understood = family.is_understood(kind, output, as_released=as_released)
    step = Step("", kind, "", "", "", (gold,))
    return _Judged(kind, understood, is_answered(step, output))


def _score(column: str, ones: Sequence[_Judged], kinds: Sequence[str]) -> Scored:
    by_kind = {kind: [one.understood for one in ones if one.kind == kind] for kind in kinds}
    met = {kind: outcomes for kind, outcomes in by_kind.items() if outcomes}
    return Scored(
        column,
        {**{kind: len(outcomes) for kind, outcomes in met.items()}, "all": len(ones)},
        {
            **{kind: fmean(outcomes) for kind, outcomes in met.items()},
            "all": fmean(one.understood for one in ones),
        },
        fmean(one.answered for one in ones),
    )


# Questions with the feedback each got: what look-ups are trained on.


_MARK = "clarification:"  # what the released streams begin a feedback with


@dataclass(frozen=True)
class Pair:
    """A question and the feedback it got.

    Attributes:
        question: As it was asked.
        feedback: What a user said of it.
        kind: The type that was meant; "" where that is not known.
    """

    question: str
    feedback: str
    kind: str = ""


def read_pairs(path: Path, family: Family | None = None) -> list[Pair]:
    """Read pairs.

    Args:
        path: A memory (.sqlite), a log that `pgra memory export` wrote, or a jsonl file with
            `question` and `feedback`, and perhaps `type`; with a family a stream of it.
        family: Whose stream the file is.

    Raises:
        DataError: If there is no pair, or a line lacks one of both.
        ArtifactError: If a memory cannot be read.
    """
    pairs = _from_stream(path, family) if family is not None else _from_file(path)
    if not pairs:
        raise DataError(f"{path} holds no question with a feedback: there is nothing to learn")
    return pairs


def _from_stream(path: Path, family: Family) -> list[Pair]:
    return [Pair(one.question, one.feedback, one.kind) for one in read_stream(path, family)]


def _from_file(path: Path) -> list[Pair]:
    if check_file(path, ("jsonl", "sqlite")) == "sqlite":
        with FeedbackLog.open(path, is_writable=False) as log:
            return [Pair(entry.key, entry.feedback) for entry in log.entries()]
    records = list(read_records(path))
    if records and {"key", "kind"} <= set(records[0].fields):
        return [Pair(entry.key, entry.feedback) for entry in replay(read_events(path))]
    return [_pair(path, record) for record in records]


def _pair(path: Path, record: Record) -> Pair:
    told = record.fields
    for name in ("question", "feedback"):
        if not isinstance(told.get(name), str) or not str(told[name]).strip():
            raise DataError(
                f"{path}, line {record.line}: {name} is {told.get(name)!r}, and must be text: each "
                "line has a question and the feedback it got"
            )
    feedback = str(told["feedback"]).removeprefix(_MARK).strip()
    return Pair(str(told["question"]), feedback, str(told.get("type") or ""))


def kinds_of(pairs: Sequence[Pair]) -> list[str]:
    """Give the type of each pair.

    Raises:
        DataError: If one has none, or all have the same.
    """
    kinds = [pair.kind for pair in pairs]
    if "" in kinds:
        bare = pairs[kinds.index("")].question
        raise DataError(
            f"the question '{bare[:80]}' has no type: give each line one, or --target feedback"
        )
    if len(set(kinds)) < 2:
        raise DataError(f"all {len(kinds)} questions are of type '{kinds[0]}': give some of others")
    return kinds
