"""Ethical situations: what is one about, and is it good? (Madaan et al. 2022, 3.3.2: ERT).

The paper's ERT-CAT and ERT-NL were never released: the situations come from a user's copy of the
data. An output is "This question is about: <category or rule of thumb>. The answer is <label>."
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pgra.errors import ConfigError, DataError

SITUATION = "situation"
"""The one type of a family whose situations have no categories."""
_KEYS = {"about", "categories", "labels", "output", "feedback"}
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
    if not isinstance(told, dict) or set(told) != _KEYS or not told["labels"]:
        raise ConfigError(f"{path}: situations must have {', '.join(sorted(_KEYS))}")
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
