"""Families of questions with an intent that an LM can miss, and ethical situations.

A family says how its questions are asked, what a user says of one that was misunderstood, what the
answer looks like, and by which words in it the understanding is known (Madaan et al. 2022, 3.3).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pgra.config import config_root, read_yaml
from pgra.errors import ConfigError, DataError, unknown_name

# Ethical situations: what is one about, and is it good? (Madaan et al. 2022, 3.3.2: ERT).
#
# The paper's ERT-CAT and ERT-NL were never released: the situations come from a user's copy of the
# data. An output is "This question is about: <category or rule of thumb>. The answer is <label>."


SITUATION = "situation"
"""The one type of a family whose situations have no categories."""
_SITUATION_KEYS = {"about", "categories", "labels", "output", "feedback"}
_PLACES = {"output": {"{about}", "{label}"}, "feedback": {"{about}"}}
_OUTER = " .,;:!?\"'"
_OUTPUT = re.compile(r"about\s*:?(?P<about>.*?)\.?\s*\bthe answer is\b(?P<label>.*)", re.I | re.S)
_ABOUT_ALONE = re.compile(r"about\s*:?(?P<about>.*)", re.I | re.S)


@dataclass(frozen=True)
class SituationForm:
    """How situations of a family are read and shown.

    Attributes:
        about: The field of a line that says what its situation is about.
        categories: What that may be, in lower case; none: any text, such as a rule of thumb.
        labels: The answers, as they are written.
        output: The right output, with {about} and {label}.
        feedback: What a user says who was misunderstood, with {about}.
    """

    about: str
    categories: Sequence[str]
    labels: Sequence[str]
    output: str
    feedback: str

    @property
    def kinds(self) -> list[str]:
        """Name the types: the categories, or one for all."""
        return list(self.categories) or [SITUATION]


@dataclass(frozen=True)
class Situation:
    """One line of a user's data.

    Attributes:
        text: The situation.
        about: Its category or rule of thumb.
        label: As the form writes it.
    """

    text: str
    about: str
    label: str


def read_form(path: object, values: Mapping[str, Any]) -> SituationForm:
    """Read a form from a family's YAML.

    Raises:
        ConfigError: If it lacks something.
    """
    told = values["situations"]
    if not isinstance(told, dict) or set(told) != _SITUATION_KEYS or not told["labels"]:
        raise ConfigError(f"{path}: situations must have {', '.join(sorted(_SITUATION_KEYS))}")
    for name, places in _PLACES.items():
        lacking = sorted(place for place in places if place not in told[name])
        if lacking:
            raise ConfigError(f"{path}: {name} of situations must have {lacking[0]}")
    return SituationForm(
        about=str(told["about"]),
        categories=tuple(str(name).lower() for name in told["categories"] or ()),
        labels=tuple(str(name) for name in told["labels"]),
        output=str(told["output"]),
        feedback=str(told["feedback"]),
    )


def read_situation(place: str, fields: Mapping[str, object], form: SituationForm) -> Situation:
    """Read one line.

    Args:
        place: Where it stands, for messages.
        fields: With `situation`, `label` and the form's own field, each a text.
        form: Of the family.

    Raises:
        DataError: If one is missing, the label is unknown, or the category is.
    """
    names = ("situation", form.about, "label")
    for name in names:
        if not isinstance(fields.get(name), str) or not str(fields[name]).strip():
            raise DataError(
                f"{place}: {name} is {fields.get(name)!r}, and must be text: each line has "
                f"{', '.join(names)}"
            )
    text, about, label = (" ".join(str(fields[name]).split()) for name in names)
    by_lower = {known.lower(): known for known in form.labels}
    if label.lower() not in by_lower:
        raise DataError(f"{place}: label '{label}' is none of {', '.join(form.labels)}")
    if form.categories and about.lower() not in form.categories:
        raise DataError(f"{place}: {form.about} '{about}' is none of {', '.join(form.categories)}")
    about = about.lower() if form.categories else about.rstrip(".")
    return Situation(text, about, by_lower[label.lower()])


@dataclass(frozen=True)
class Verdict:
    """What an output says, in lower case and without punctuation at the ends; "" for nothing.

    Attributes:
        about: What the situation is about.
        label: The answer's first word.
    """

    about: str
    label: str


def read_verdict(output: str) -> Verdict:
    """Read an output: "This question is about: loyalty. The answer is BAD."."""
    found = _OUTPUT.search(output)
    if found is None:
        alone = _ABOUT_ALONE.search(output)
        return Verdict(_plain(alone["about"]) if alone else "", "")
    words = found["label"].strip(_OUTER).split()
    return Verdict(_plain(found["about"]), _plain(words[0]) if words else "")


def judge_situation(output: str, expected: str) -> tuple[bool, bool]:
    """Say whether an output's understanding is right (exact match), and whether its label is.

    Each by itself: the paper counts the two accuracies apart (figures 4 and 5).
    """
    told, wanted = read_verdict(output), read_verdict(expected)
    return told.about == wanted.about, told.label == wanted.label


def _plain(text: str) -> str:
    return " ".join(text.lower().split()).strip(_OUTER)


WORD_KINDS = ("answers", "relations", "scrambles", "situations")
_ASKED = {"understood_by", "answers", "templates"}
_KEYS = {
    "relations": {"prompt", "words", *_ASKED},
    "scrambles": {"prompt", "words", *_ASKED},
    "answers": {"prompt", "words", "num_remembered"},
    "situations": {"prompt", "words", "situations"},
}
_MORE_KEYS = {"released_check", "paper", "paper_answered"}
QUESTION = "question"
"""The one type of a family of answers."""
_TEMPLATE_KEYS = {"id", "type", "question", "feedback"}


@dataclass(frozen=True)
class Phrasing:
    """One way to ask.

    Attributes:
        id: Its name in the family.
        kind: The type of task that is meant, such as "syn".
        question: With {word}.
        feedback: What a user says who was misunderstood.
    """

    id: str
    kind: str
    question: str
    feedback: str


@dataclass(frozen=True)
class Family:
    """Questions that share a prompt and a way to tell what was understood.

    Attributes:
        name: The YAML's.
        prompt: The name of its few-shot prompt.
        words: Of what its questions are made: "relations" (word and answer), "scrambles",
            "answers": questions of fact, whose understanding nobody tells and whose feedback is
            the right answer (the paper's label feedback, App. D.3), or "situations".
        understood_by: By type: words that must all stand in the output.
        released_check: The same where the paper's release asks for more.
        answers: By type: the expected output, with {word} and {answer}.
        phrasings: Ways to ask, several a type.
        paper: Accuracy of the understanding that the paper prints, by system and type.
        num_remembered: Of "answers": questions that were answered wrongly which stand in a prompt,
            in place of as many of its own examples.
        situations: Of "situations": how they are read and shown.
        paper_answered: Accuracy of the answer that the paper prints, by system.
        is_of_paper: Whether it is one of configs/memory, whose rules are the paper's.
    """

    name: str
    prompt: str
    words: str
    understood_by: Mapping[str, Sequence[str]] = field(default_factory=dict)
    answers: Mapping[str, str] = field(default_factory=dict)
    phrasings: Sequence[Phrasing] = ()
    released_check: Mapping[str, Sequence[str]] = field(default_factory=dict)
    paper: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    num_remembered: int = 0
    situations: SituationForm | None = None
    paper_answered: Mapping[str, float] = field(default_factory=dict)
    is_of_paper: bool = False

    @property
    def is_of_answers(self) -> bool:
        """Say whether feedback is the right answer."""
        return self.words == "answers"

    @property
    def has_slots(self) -> bool:
        """Say whether what a question is about stands in <...>."""
        return any("<" in phrasing.question for phrasing in self.phrasings)

    @property
    def follows_release(self) -> bool:
        """Say whether edit distance compares its questions as the paper's release does."""
        return self.is_of_paper or self.has_slots

    @property
    def kinds(self) -> list[str]:
        """Name the types of task."""
        if self.situations is not None:
            return self.situations.kinds
        return [QUESTION] if self.is_of_answers else list(self.answers)

    def is_understood(self, kind: str, output: str, *, as_released: bool = False) -> bool:
        """Say whether an output shows that the intent was understood: Acc(u).

        A test of substrings, letters of any case. It cannot tell an answer from an echo of a
        question that names another type ("a sentence that can be used to define").

        Args:
            kind: The type that was meant.
            output: What the LM wrote.
            as_released: Whether to ask all that the paper's release asks.
        """
        wanted = self.understood_by[kind]
        if as_released:
            wanted = self.released_check.get(kind, wanted)
        return all(word in output.lower() for word in wanted)


def family_names() -> list[str]:
    """Name the families there are."""
    return sorted(path.stem for path in (config_root() / "memory").glob("*.yaml"))


def load_family(name: str) -> Family:
    """Read a family by name, or from a YAML.

    Raises:
        ConfigError: If there is none, or its YAML lacks something.
    """
    path = Path(name) if name.endswith(".yaml") else config_root() / "memory" / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(unknown_name("family of questions", name, family_names()))
    values = read_yaml(path)
    _check_keys(path, values)
    return Family(
        name=path.stem,
        prompt=str(values["prompt"]),
        words=str(values["words"]),
        understood_by=_word_lists(values.get("understood_by", {})),
        answers={str(kind): str(text) for kind, text in values.get("answers", {}).items()},
        phrasings=[
            _phrasing(path, told, values["answers"]) for told in values.get("templates", ())
        ],
        released_check=_word_lists(values.get("released_check", {})),
        paper=values.get("paper", {}),
        num_remembered=int(values.get("num_remembered", 0)),
        situations=read_form(path, values) if values["words"] == "situations" else None,
        paper_answered=values.get("paper_answered", {}),
        is_of_paper=path.resolve().parent == (config_root() / "memory").resolve(),
    )


def check_has_types(name: str, family: Family) -> None:
    """Refuse to choose a threshold on questions that all mean the same.

    Args:
        name: Of what would choose it.
        family: Of the questions.

    Raises:
        ConfigError: If it is a family of answers, of which any feedback would count as right.
    """
    if family.is_of_answers:
        raise ConfigError(
            f"{name} chooses a threshold by the types of questions, and those of '{family.name}' "
            "have none: give --threshold to what uses it"
        )


def _check_keys(path: Path, values: Mapping[str, Any]) -> None:
    words = str(values.get("words"))
    if words not in WORD_KINDS:
        raise ConfigError(f"{path}: {unknown_name('words', words, WORD_KINDS)}")
    keys = _KEYS[words]
    missing, unknown = sorted(keys - set(values)), sorted(set(values) - keys - _MORE_KEYS)
    if missing or unknown:
        what = f"has no {missing[0]}" if missing else f"has an unknown key {unknown[0]}"
        raise ConfigError(f"{path} {what}: its keys are {', '.join(sorted(keys | _MORE_KEYS))}")
    if set(values.get("understood_by", ())) != set(values.get("answers", ())):
        raise ConfigError(f"{path}: understood_by and answers must name the same types")


def _word_lists(values: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    return {kind: [str(word).lower() for word in words] for kind, words in values.items()}


def _phrasing(path: Path, told: Mapping[str, Any], kinds: Mapping[str, str]) -> Phrasing:
    if set(told) != _TEMPLATE_KEYS or told["type"] not in kinds or "{word}" not in told["question"]:
        raise ConfigError(
            f"{path}: template {told.get('id')!r} must have {', '.join(sorted(_TEMPLATE_KEYS))}, "
            f"a type of {', '.join(kinds)}, and {{word}} in its question"
        )
    return Phrasing(told["id"], told["type"], told["question"], told["feedback"])
