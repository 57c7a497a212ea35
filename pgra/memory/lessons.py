"""Lessons for an LM that shall follow clarifications: drawn, packed into sequences, and remembered.

A lesson is a question with its answer, with or without a clarification, about another word and in
other words than any question that is measured. Many questions say nothing of what is meant, or are
made of syllables, so that only the clarification can tell. What an LM learned with is kept beside
its weights; a stream with any of it is refused.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidfuzz import process
from rapidfuzz.distance import Levenshtein

from pgra.config import (
    Arguments,
    arg,
    find_yaml,
    from_values,
    list_yamls,
    read_yaml,
    typed_value,
)
from pgra.core import Json
from pgra.data.read import read_json
from pgra.errors import ArtifactError, ConfigError, DataError
from pgra.memory.families import Family, load_family
from pgra.memory.lookup import MAX_DISTANCE, normalize_key, strip_slot
from pgra.memory.prompts import FewShot, PromptExample, load_few_shot
from pgra.memory.stream import Step, Words, can_scramble, read_stream, read_words, scramble

if TYPE_CHECKING:
    from pgra.lm.causal_lm import CausalLM

IGNORED = -100
"""A label that is not learned (torch's)."""
SEEN_FILE = "memory_training.json"
_TOLD, _VAGUE = 0.45, 0.65  # below the first a question tells its type; then vague; then made up
_CLARIFIED = {True: 0.5, False: 0.8}  # share with a clarification: by whether the question tells
_CONSONANTS, _VOWELS = "bdfghjklmnprstvz", "aeiou"
_CUT_SHARE = 0.5


@dataclass(kw_only=True)
class FinetuneArguments(Arguments):
    """What an LM learns with, and how long."""

    lm: str = arg("bundled:smollm2-135m", "A causal LM: hub id, folder or bundled:NAME.")
    # What the first three hold stands in the courses, which decide.
    lessons: list[str] = arg(
        ["lexical"],
        "Names of YAMLs in configs/memory_training, or paths; each as often.",
        decides=False,
    )
    words: list[str] = arg(
        [],
        "Word lists beside those of the lessons: jsonl with type, word and answer, or for "
        "scrambles a text file with a word a line.",
        decides=False,
    )
    held_out: list[str] = arg(
        [],
        "Streams that will be measured: none of their words is learned with.",
        decides=False,
    )
    max_steps: int = arg(80, "Training steps.", least=1)
    packs_per_step: int = arg(4, "Sequences a step.", least=1)
    pack_tokens: int = arg(512, "Most tokens of a sequence, which holds many lessons.", least=1)
    learning_rate: float = arg(
        2e-4, "The highest; it rises over the first steps, then falls.", above=0, below=1
    )
    frozen_layers: int = arg(
        0, "First layers that stay as they are (faster), embeddings too.", least=0
    )
    bf16: bool = arg(False, "Multiply in bfloat16 (faster where the processor has it).")
    save_steps: int = arg(
        20, "Steps that a stop may lose; the same command goes on.", least=1, decides=False
    )
    seed: int = arg(0, "Of the lessons that are drawn.", least=0)
    output_dir: str = arg("runs/memory-lm", "Where it goes; the LM is in lm/.", decides=False)
    device: str = arg(
        "auto", "auto (a GPU if there is one) or cpu.", choices=("auto", "cpu"), decides=False
    )

    def check(self) -> None:
        """Refuse to teach nothing."""
        if not self.lessons:
            raise ConfigError("lessons names none: --lessons lexical")


@dataclass(frozen=True)
class Lessons:
    """What is taught of a family.

    Attributes:
        family: Its questions' answers and types are these lessons'.
        meant: By type: how a clarification names it.
        feedback: Ways to clarify, with {asked} and {meant}.
        questions: By type: ways to ask that tell it, with {word}.
        vague: Ways to ask that tell no type.
        words: What is asked about; the list that the YAML brings, or a longer one.
    """

    family: Family
    meant: Mapping[str, str]
    feedback: Sequence[str]
    questions: Mapping[str, Sequence[str]]
    vague: Sequence[str]
    words: Words

    def __post_init__(self) -> None:
        """Refuse what does not fit the family, and a question near one that is measured."""
        types = set(self.family.answers)
        kinds = {""} if self.family.words == "scrambles" else types
        for part, wanted in (("meant", types), ("questions", types), ("words", kinds)):
            if set(getattr(self, part)) != wanted:
                raise ConfigError(f"{part} must name the types {', '.join(self.family.answers)}")
        asked = [*self.vague, *(text for own in self.questions.values() for text in own)]
        for text in asked:
            if "< {word} >" not in text:
                raise ConfigError(f"the question '{text}' lacks < {{word}} >")
            near = nearest_form(normalize_key(text))
            if near is not None:
                raise ConfigError(
                    f"the question '{text}' is within an edit distance of {MAX_DISTANCE} of "
                    f"'{near}', which is measured: ask it otherwise"
                )
        for text in self.feedback:
            if "{meant}" not in text:
                raise ConfigError(f"the feedback '{text}' lacks {{meant}}")


def load_lessons(name: str) -> Lessons:
    """Read lessons by name, or from a YAML.

    Raises:
        ConfigError: If there are none, their YAML lacks something, or a question is near one that
            a family of configs/memory asks.
    """
    path = find_yaml("lessons", "memory_training", name)
    values = read_yaml(path)
    family, words = load_family(str(values.pop("family", ""))), values.pop("words", {})
    try:
        if isinstance(words, list):
            by_kind = {"": {str(word): [str(word)] for word in words if can_scramble(str(word))}}
        else:
            read = typed_value("words", words, Mapping[str, Mapping[str, str]])
            by_kind = {kind: {word: [own[word]] for word in own} for kind, own in read.items()}
        return from_values(Lessons, values, family=family, words=by_kind)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


@cache
def measured_forms() -> tuple[str, ...]:
    """Return the questions of all families of configs/memory without their words."""
    families = map(load_family, list_yamls("memory"))
    return tuple({normalize_key(p.question): None for f in families for p in f.phrasings})


def nearest_form(form: str) -> str | None:
    """Find a measured question that a look-up by edit distance takes for this one; None if none."""
    found = process.extractOne(
        form, measured_forms(), scorer=Levenshtein.distance, score_cutoff=MAX_DISTANCE
    )
    return None if found is None else str(found[0])


def word_of(step: Step, family: Family) -> str:
    """Return the word that a step is about, in lower case; of a scramble the word behind it."""
    if family.words != "scrambles":
        return step.word.lower()
    before = family.answers[step.kind].replace("{word}", step.word).partition("{answer}")[0]
    return step.expected[0].removeprefix(before).lower()


def read_courses(args: FinetuneArguments) -> list[Lessons]:
    """Read what is taught, without what is held out.

    Raises:
        ConfigError: If a word list suits no lessons.
        DataError: If a file is not as it must be, or no word is left.
    """
    taught = [load_lessons(name) for name in dict.fromkeys(args.lessons)]
    held_out = _read_held_out(args.held_out, taught)
    left = list(dict.fromkeys(args.words))
    courses = []
    for lessons in taught:
        suffix = ".txt" if lessons.family.words == "scrambles" else ".jsonl"
        own = [path for path in left if suffix in Path(path).suffixes]
        left = [path for path in left if path not in own]
        words: dict[str, dict[str, list[str]]] = {kind: {} for kind in lessons.words}
        for more in (lessons.words, *(read_words(Path(path), lessons.family) for path in own)):
            for kind, answers in more.items():
                for word, right in answers.items():
                    if word.lower() not in held_out:
                        words[kind].setdefault(word, []).extend(right)
        for kind, kept in words.items():
            if not kept:
                raise DataError(
                    f"no word{f' of type {kind!r}' if kind else ''} is left to learn with: all are "
                    "held out; give a longer list with --words"
                )
        courses.append(replace(lessons, words=words))
    if left:
        raise ConfigError(
            f"words names {left[0]}, which suits none of the lessons {', '.join(args.lessons)}: "
            "relations take .jsonl, scrambles .txt"
        )
    return courses


def _read_held_out(paths: Sequence[str], taught: Sequence[Lessons]) -> set[str]:
    """Return the words of streams, each read as one of the first family whose types it has."""
    found: set[str] = set()
    for path in paths:
        for lessons in taught:
            try:
                steps = read_stream(Path(path), lessons.family)
            except DataError:
                if lessons is taught[-1]:
                    raise
            else:
                found |= {word_of(step, lessons.family) for step in steps}
                break
    return found


def draw_lessons(lessons: Lessons, seen: "Seen", *, seed: int) -> Iterator[PromptExample]:
    """Draw lessons without end: types, kinds of question and words alike often.

    Args:
        lessons: What they are drawn of.
        seen: Takes up each lesson's word and question.
        seed: Of the draws.
    """
    draw, words = random.Random(seed), lessons.words
    pools = {kind: sorted(own) for kind, own in words.items()}
    while True:
        kind = draw.choice(list(lessons.family.answers))
        chance = draw.random()
        if chance < _TOLD:
            question = draw.choice(list(lessons.questions[kind]))
        elif chance < _VAGUE:
            question = draw.choice(list(lessons.vague))
        else:
            question = _make_up_question(draw)
        if "" in words:
            word = answer = draw.choice(pools[""])
            shown = scramble(word, kind, draw)
        else:
            word = shown = draw.choice(pools[kind])
            answer = draw.choice(list(words[kind][word]))
        feedback = ""
        if draw.random() < _CLARIFIED[chance < _TOLD]:
            asked = strip_slot(question).rstrip(" ?.:")
            frame = draw.choice(lessons.feedback)
            feedback = frame.replace("{asked}", asked).replace("{meant}", lessons.meant[kind])
        output = lessons.family.answers[kind].replace("{word}", shown).replace("{answer}", answer)
        seen.words.add(word.lower())
        seen.questions.add(normalize_key(question))
        yield PromptExample(question.replace("{word}", shown), output, feedback)


def _make_up_question(draw: random.Random) -> str:
    """Make a question of syllables that is near none that is measured."""
    while True:
        words = []
        for _ in range(draw.randint(2, 5)):
            syllables = [
                draw.choice(_CONSONANTS) + draw.choice(_VOWELS) for _ in range(draw.randint(1, 3))
            ]
            words.append("".join(syllables) + draw.choice(("", draw.choice(_CONSONANTS))))
        words.insert(draw.randint(0, len(words)), "< {word} >")
        question = " ".join(words) + " ?"
        if nearest_form(normalize_key(question)) is None:
            return question


Pack = dict[str, list[int]]
"""One sequence of lessons, in the form of a few-shot prompt.

A sequence costs what its tokens cost, and each of its answers is learned from: behind the first
few, an answer is read with examples before it, as in a prompt. Its `input_ids` are its tokens (T,),
and its `labels` the same where they belong to an answer or the word that ends it, else IGNORED.
"""


def pack_lessons(
    lessons: Iterator[PromptExample],
    tokenizer: Any,
    few_shot: FewShot,
    *,
    pack_tokens: int,
    seed: int,
    lead_ids: Sequence[int] = (),
) -> Iterator[Pack]:
    """Lay lessons side by side, as the prompter writes them, and none is cut.

    In a prompt the separator before the last answer is cut into tokens by itself, those before it
    together with what follows: two line breaks may be one token there and two here. Half of the
    answers are cut one way and half the other.

    Args:
        lessons: Without end.
        tokenizer: The LM's; a fast one, for it must tell where its tokens stand.
        few_shot: How questions and answers are written.
        pack_tokens: Most tokens of a sequence.
        seed: Of the cuts.
        lead_ids: Tokens that open every input of the LM.

    Raises:
        ConfigError: If the tokenizer is a slow one, or a lesson alone does not fit.
    """
    if not tokenizer.is_fast:
        raise ConfigError(
            f"the tokenizer {type(tokenizer).__name__} does not tell where its tokens stand: "
            "finetune an LM with a fast tokenizer"
        )
    draw, lead = random.Random(seed), list(lead_ids)
    ids, labels = list(lead), [IGNORED] * len(lead)
    for shown in lessons:
        text = few_shot.show(shown)
        start = len(few_shot.write(shown.question, feedback=shown.feedback, num_own=0))
        end = len(text) - len(few_shot.separator)
        bounds = (0, len(text)) if draw.random() >= _CUT_SHARE else (0, start, len(text))
        begun = len(ids)
        for left, right in pairwise(bounds):
            part = text[left:right]
            cut = tokenizer(part, add_special_tokens=False, return_offsets_mapping=True)
            for token, (first, last) in zip(cut["input_ids"], cut["offset_mapping"], strict=True):
                is_learned = start <= left + first < left + last <= end
                ids.append(token)
                labels.append(token if is_learned else IGNORED)
        size = len(ids) - begun
        if len(lead) + size > pack_tokens:
            raise ConfigError(
                f"pack_tokens is {pack_tokens}, and a lesson has {size} tokens: raise it"
            )
        if len(ids) > pack_tokens:
            yield {"input_ids": ids[:begun], "labels": labels[:begun]}
            ids, labels = lead + ids[begun:], [IGNORED] * len(lead) + labels[begun:]


def draw_packs(
    courses: Sequence[Lessons], lm: "CausalLM", args: FinetuneArguments
) -> "tuple[list[Pack], Seen]":
    """Draw as many sequences as are learned, the courses' in turn; and tell what is in them.

    Raises:
        ConfigError: As `pack_lessons`.
    """
    seen = Seen(set(), set())
    packers = [
        pack_lessons(
            draw_lessons(course, seen, seed=args.seed),
            lm.tokenizer,
            load_few_shot(course.family.prompt),
            pack_tokens=args.pack_tokens,
            seed=args.seed,
            lead_ids=lm.lead_ids,
        )
        for course in courses
    ]
    count = args.max_steps * args.packs_per_step
    return [next(packs) for packs in islice(cycle(packers), count)], seen


@dataclass(frozen=True)
class Seen:
    """What an LM learned with.

    Attributes:
        words: In lower case, unscrambled.
        questions: Without their words, as keys are compared.
    """

    words: set[str]
    questions: set[str]

    def as_json(self) -> dict[str, Json]:
        """Return what `SEEN_FILE` beside the LM's weights holds."""
        return {"words": sorted(self.words), "questions": sorted(self.questions)}

    def check_unseen(self, steps: Sequence[Step], family: Family) -> None:
        """Refuse a stream that asks what the LM learned with.

        Raises:
            DataError: If a word or a question of it is among that.
        """
        for step in steps:
            word, form = word_of(step, family), normalize_key(step.question)
            if word in self.words or form in self.questions:
                what = f"word '{word}'" if word in self.words else f"question '{form}'"
                raise DataError(
                    f"step {step.id} asks '{step.question}', and the LM was fine-tuned with the "
                    f"{what}: fine-tune it with --held_out naming this stream, or ask other "
                    "questions"
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
        values = read_json(path)
        return Seen(set(values["words"]), set(values["questions"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{path} is damaged ({error}): run pgra memory finetune again, into another folder"
        ) from None
