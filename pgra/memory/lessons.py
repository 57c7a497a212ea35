"""Lessons for an LM that a clarification shall correct: configs/memory_training/NAME.yaml.

A lesson is a question with its answer, with or without a clarification, about another word and in
other words than any question that is measured. Many questions say nothing of what is meant, or are
made of syllables, so that only the clarification can tell.
"""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rapidfuzz import process
from rapidfuzz.distance import Levenshtein

from pgra.checks import config_root, read_yaml
from pgra.errors import ConfigError, DataError, unknown_name
from pgra.memory.families import Family, family_names, load_family
from pgra.memory.keys import MAX_DISTANCE, normalize_key, strip_slot
from pgra.memory.prompter import Shown
from pgra.memory.scramble import can_scramble, scramble
from pgra.memory.steps import Step, Words

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
