"""Lessons for an LM that shall follow clarifications, packed into sequences; what it has seen.

A lesson is a question with its answer, with or without a clarification, about another word and in
other words than any question that is measured. Many questions say nothing of what is meant, or are
made of syllables, so that only the clarification can tell.
"""

import json
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rapidfuzz import process
from rapidfuzz.distance import Levenshtein

from pgra.artifacts import write_json
from pgra.config import config_root, read_yaml
from pgra.errors import ArtifactError, ConfigError, DataError, unknown_name
from pgra.memory.families import Family, family_names, load_family
from pgra.memory.lookup import MAX_DISTANCE, normalize_key, strip_slot
from pgra.memory.prompts import FewShot, Shown
from pgra.memory.stream import Step, Words, can_scramble, scramble

_KEYS = {"family", "meant", "feedback", "questions", "vague", "words"}
_TOLD, _VAGUE = 0.45, 0.65  # below the first a question tells its type; then vague; then made up
_CLARIFIED = {True: 0.5, False: 0.8}  # share with a clarification: by whether the question tells
_CONSONANTS, _VOWELS = "bdfghjklmnprstvz", "aeiou"


@dataclass(frozen=True)
class Lessons:
    """What is taught of a family.

    Attributes:
        family: Its questions' answers and types are these lessons'.
        meant: By type: how a clarification names it.
        feedback: Ways to clarify, with {asked} and {meant}.
        questions: By type: ways to ask that tell it, with {word}.
        vague: Ways to ask that tell no type.
        words: The list that the YAML brings.
    """

    family: Family
    meant: Mapping[str, str]
    feedback: Sequence[str]
    questions: Mapping[str, Sequence[str]]
    vague: Sequence[str]
    words: Words


@dataclass(frozen=True)
class Lesson:
    """A question as it is taught.

    Attributes:
        shown: Question, answer, and a clarification or "".
        form: The question without its word, as keys are compared.
        word: Unscrambled.
    """

    shown: Shown
    form: str
    word: str


def lesson_names() -> list[str]:
    """Name the lessons there are."""
    return sorted(path.stem for path in (config_root() / "memory_training").glob("*.yaml"))


def load_lessons(name: str) -> Lessons:
    """Read lessons by name, or from a YAML.

    Raises:
        ConfigError: If there are none, their YAML lacks something, or a question is near one that
            a family of configs/memory asks.
    """
    is_file = name.endswith(".yaml")
    path = Path(name) if is_file else config_root() / "memory_training" / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(unknown_name("lessons", name, lesson_names()))
    values = read_yaml(path)
    if set(values) != _KEYS:
        raise ConfigError(f"{path} must have {', '.join(sorted(_KEYS))}, and no more")
    family = load_family(str(values["family"]))
    _check_values(path, family, values)
    lessons = Lessons(
        family,
        values["meant"],
        values["feedback"],
        values["questions"],
        values["vague"],
        _own_words(values["words"]),
    )
    _check_questions(path, lessons)
    return lessons


def _check_values(path: Path, family: Family, values: Mapping[str, Any]) -> None:
    for name in ("meant", "questions"):
        if set(values[name]) != set(family.answers):
            raise ConfigError(f"{path}: {name} must name the types {', '.join(family.answers)}")
    texts = [*values["vague"], *(text for own in values["questions"].values() for text in own)]
    wrong = [text for text in texts if "< {word} >" not in text]
    wrong += [text for text in values["feedback"] if "{meant}" not in text]
    if wrong:
        raise ConfigError(
            f"{path}: '{wrong[0]}' lacks < {{word}} > (a question) or {{meant}} (feedback)"
        )


def _own_words(told: Any) -> Words:
    if isinstance(told, list):
        return {"": {word: [word] for word in told if can_scramble(word)}}
    return {
        kind: {word: [str(answer)] for word, answer in own.items()} for kind, own in told.items()
    }


def _check_questions(path: Path, lessons: Lessons) -> None:
    measured = measured_forms()
    for text in (*lessons.vague, *(text for own in lessons.questions.values() for text in own)):
        near = nearest_form(normalize_key(text), measured)
        if near is not None:
            raise ConfigError(
                f"{path}: the question '{text}' is within an edit distance of {MAX_DISTANCE} of "
                f"'{near}', which is measured: ask it otherwise"
            )


@cache
def measured_forms() -> tuple[str, ...]:
    """Give the questions of all families of configs/memory without their words."""
    families = map(load_family, family_names())
    return tuple({normalize_key(p.question): None for f in families for p in f.phrasings})


def nearest_form(form: str, measured: Collection[str]) -> str | None:
    """Find a measured question that a look-up by edit distance takes for this one; None if none."""
    found = process.extractOne(
        form, measured, scorer=Levenshtein.distance, score_cutoff=MAX_DISTANCE
    )
    return None if found is None else str(found[0])


def word_of(step: Step, family: Family) -> str:
    """Give the word that a step is about, in lower case; of a scramble the word behind it."""
    if family.words != "scrambles":
        return step.word.lower()
    before = family.answers[step.kind].replace("{word}", step.word).partition("{answer}")[0]
    return step.expected[0].removeprefix(before).lower()


def leave_out(words: Words, held_out: Collection[str]) -> Words:
    """Give a word list without the words that are measured.

    Raises:
        DataError: If a type has none left.
    """
    left = {
        kind: {word: answers for word, answers in own.items() if word.lower() not in held_out}
        for kind, own in words.items()
    }
    for kind, own in left.items():
        if not own:
            raise DataError(
                f"no word{f' of type {kind!r}' if kind else ''} is left to learn with: all are "
                "held out; give a longer list with --words"
            )
    return left


def draw_lessons(lessons: Lessons, words: Words, *, seed: int) -> Callable[[], Lesson]:
    """Give what draws lessons without end: types, kinds of question and words alike often.

    Args:
        lessons: What is taught.
        words: Of what; none that is measured.
        seed: Of the draws.
    """
    draw, measured = random.Random(seed), measured_forms()
    pools = {kind: sorted(own) for kind, own in words.items()}

    def next_lesson() -> Lesson:
        kind = draw.choice(list(lessons.family.answers))
        question, tells = _draw_question(lessons, kind, draw, measured)
        one = _draw_word(words, pools, kind, draw)
        feedback = ""
        if draw.random() < _CLARIFIED[tells]:
            asked = strip_slot(question).rstrip(" ?.:")
            frame = draw.choice(lessons.feedback)
            feedback = frame.replace("{asked}", asked).replace("{meant}", lessons.meant[kind])
        told = lessons.family.answers[kind].replace("{word}", one.shown)
        shown = Shown(
            question.replace("{word}", one.shown), told.replace("{answer}", one.answer), feedback
        )
        return Lesson(shown, normalize_key(question), one.word.lower())

    return next_lesson


@dataclass(frozen=True)
class _Drawn:
    """A word, as a question shows it, and its answer."""

    word: str
    shown: str
    answer: str


def _draw_word(
    words: Words, pools: Mapping[str, Sequence[str]], kind: str, draw: random.Random
) -> _Drawn:
    if "" in words:
        word = draw.choice(pools[""])
        return _Drawn(word, scramble(word, kind, draw), word)
    word = draw.choice(pools[kind])
    return _Drawn(word, word, draw.choice(list(words[kind][word])))


def _draw_question(
    lessons: Lessons, kind: str, draw: random.Random, measured: Collection[str]
) -> tuple[str, bool]:
    chance = draw.random()
    if chance < _TOLD:
        return draw.choice(list(lessons.questions[kind])), True
    if chance < _VAGUE:
        return draw.choice(list(lessons.vague)), False
    while nearest_form(normalize_key(question := _make_up(draw)), measured) is not None:
        pass
    return question, False


def _make_up(draw: random.Random) -> str:
    words = [_made_up_word(draw) for _ in range(draw.randint(2, 5))]
    words.insert(draw.randint(0, len(words)), "< {word} >")
    return " ".join(words) + " ?"


def _made_up_word(draw: random.Random) -> str:
    syllables = [draw.choice(_CONSONANTS) + draw.choice(_VOWELS) for _ in range(draw.randint(1, 3))]
    return "".join(syllables) + draw.choice(("", draw.choice(_CONSONANTS)))


# Lessons as an LM is trained on them: many in one sequence, in the form of a few-shot prompt.
#
# A sequence costs what its tokens cost, and each of its answers is learned from: behind the first
# few, an answer is read with examples before it, as in a prompt.


IGNORED = -100
"""A label that is not learned (torch's)."""
_CUT_SHARE = 0.5


@dataclass(frozen=True)
class Pack:
    """One sequence.

    Attributes:
        input_ids: Its tokens, (T,).
        labels: The same where they belong to an answer or the word that ends it, else IGNORED.
    """

    input_ids: list[int]
    labels: list[int]


class Packer:
    """Lays lessons side by side, as the prompter writes them.

    In a prompt the separator before the last answer is cut into tokens by itself, those before it
    together with what follows: two line breaks may be one token there and two here. Half of the
    answers are cut one way and half the other.
    """

    def __init__(
        self,
        tokenizer: Any,
        few_shot: FewShot,
        *,
        pack_tokens: int,
        seed: int,
        lead_ids: Sequence[int] = (),
    ) -> None:
        """Take what cuts and what writes.

        Args:
            tokenizer: The LM's; a fast one, for it must tell where its tokens stand.
            few_shot: How questions and answers are written.
            pack_tokens: Most tokens of a sequence.
            seed: Of the cuts.
            lead_ids: Tokens that open every input of the LM.

        Raises:
            ConfigError: If the tokenizer is a slow one.
        """
        if not tokenizer.is_fast:
            raise ConfigError(
                f"the tokenizer {type(tokenizer).__name__} does not tell where its tokens stand: "
                "finetune an LM with a fast tokenizer"
            )
        self._tokenizer, self._few_shot, self._most = tokenizer, few_shot, pack_tokens
        self._draw, self._lead = random.Random(seed), list(lead_ids)
        self._waiting: Pack | None = None

    def pack(self, next_lesson: Callable[[], Lesson]) -> Pack:
        """Fill a sequence.

        Args:
            next_lesson: Gives lessons; one that does not fit opens the next sequence.

        Raises:
            ConfigError: If a lesson alone does not fit.
        """
        ids = list(self._lead)
        labels = [IGNORED] * len(ids)
        while True:
            one = self._waiting or self._cut(next_lesson())
            self._waiting = None
            if len(self._lead) + len(one.input_ids) > self._most:
                raise ConfigError(
                    f"pack_tokens is {self._most}, and a lesson has {len(one.input_ids)} tokens: "
                    "raise it"
                )
            if len(ids) + len(one.input_ids) > self._most:
                self._waiting = one
                return Pack(ids, labels)
            ids += one.input_ids
            labels += one.labels

    def _cut(self, lesson: Lesson) -> Pack:
        text = self._few_shot.show(lesson.shown)
        prompt = self._few_shot.write(
            lesson.shown.question, feedback=lesson.shown.feedback, num_own=0
        )
        end = len(text) - len(self._few_shot.separator)
        if self._draw.random() >= _CUT_SHARE:
            return self._tokenize(text, len(prompt), end)
        asked = self._tokenize(prompt, len(prompt), len(prompt))
        answer = self._tokenize(text[len(prompt) :], 0, end - len(prompt))
        return Pack(asked.input_ids + answer.input_ids, asked.labels + answer.labels)

    def _tokenize(self, text: str, start: int, end: int) -> Pack:
        """Cut a text; what stands from `start` to `end` is learned."""
        cut = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = list(cut["input_ids"])
        places = cut["offset_mapping"]
        labels = [
            token if start <= first and last <= end and first < last else IGNORED
            for token, (first, last) in zip(ids, places, strict=True)
        ]
        return Pack(ids, labels)


# What a fine-tuned LM learned with, kept beside its weights: a stream with any is refused.


SEEN_FILE = "memory_training.json"


@dataclass(frozen=True)
class Seen:
    """What was learned with.

    Attributes:
        words: In lower case, unscrambled.
        forms: Questions without their words, as keys are compared.
    """

    words: Collection[str]
    forms: Collection[str]

    def write(self, folder: Path) -> None:
        """Write it beside an LM's weights."""
        write_json(
            folder / SEEN_FILE, {"words": sorted(self.words), "questions": sorted(self.forms)}
        )


def read_seen(lm: str) -> Seen | None:
    """Read what an LM was fine-tuned with; None for one that is no folder with such a record.

    Raises:
        ArtifactError: If the record is damaged.
    """
    path = Path(lm) / SEEN_FILE
    if not path.is_file():
        return None
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return Seen(frozenset(told["words"]), frozenset(told["questions"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{path} is damaged ({error}): run pgra memory finetune again, into another folder"
        ) from None


def check_unseen(seen: Seen, steps: Sequence[Step], family: Family) -> None:
    """Refuse a stream that asks what the LM learned with.

    Raises:
        DataError: If a word or a question of it is among that.
    """
    for step in steps:
        word, form = word_of(step, family), normalize_key(step.question)
        if word in seen.words or form in seen.forms:
            what = f"word '{word}'" if word in seen.words else f"question '{form}'"
            raise DataError(
                f"step {step.id} asks '{step.question}', and the LM was fine-tuned with the "
                f"{what}: fine-tune it with --held_out naming this stream, or ask other questions"
            )
