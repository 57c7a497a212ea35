"""Families of questions with an intent that an LM can miss: configs/memory/NAME.yaml.

A family has the forms of its answers, and the words that show the understanding (Madaan et al.
2022, 3.3). Ethical situations (ERT, section 3.3.2) are read from a user's own file: the paper's
ERT-CAT and ERT-NL were never released.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from pgra.config import config_root, find_yaml, from_yaml
from pgra.data.text import copy_key, strip_marks
from pgra.errors import ConfigError

SITUATION = "situation"  # the type of situations without categories
QUESTION = "question"  # the type of a family of answers
_OUTPUT = re.compile(
    r"about\s*:?(?P<about>.*?)\.?\s*(?:\bthe answer is\b(?P<label>.*)|\Z)", re.I | re.S
)


@dataclass(frozen=True)
class SituationForm:
    """How situations of a family are read and shown.

    `about` is the field of a line that names the situation's subject, `categories` its possible
    values in lower case (none: any text, such as a rule of thumb). `output`, the right one, has
    {about} and {label}, `feedback` has {about}.
    """

    about: str
    labels: tuple[str, ...]
    output: str
    feedback: str
    categories: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, slot in (("output", "{about}"), ("output", "{label}"), ("feedback", "{about}")):
            if slot not in getattr(self, name):
                raise ConfigError(f"{name} of situations must have {slot}")


@dataclass(frozen=True)
class Family:
    """Questions that share a prompt and a test of the understanding.

    It has one of `answers`, `situations` and `num_remembered`. The last is of questions of fact,
    whose feedback is the right answer: the paper's label feedback (App. D.3).

    Attributes:
        understood_by: By type: words that must all stand in the output.
        answers: By type: the form of the expected output, with {word} and {answer}.
        has_slots: Whether questions have their word in <...>.
        paper: Accuracy of the understanding that the paper prints, by system and type.
        num_remembered: How many wrongly answered questions replace examples in a prompt.
        is_of_paper: Whether it is one of configs/memory, whose rules are the paper's.
    """

    name: str
    prompt: str
    understood_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    answers: Mapping[str, str] = field(default_factory=dict)
    has_slots: bool = False
    paper: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    num_remembered: int = 0
    situations: SituationForm | None = None
    is_of_paper: bool = False

    def __post_init__(self) -> None:
        if sum(map(bool, (self.answers, self.situations, self.num_remembered))) != 1:
            raise ConfigError("a family has one of answers, situations and num_remembered")
        if set(self.understood_by) != set(self.answers):
            raise ConfigError("understood_by and answers must name the same types")

    @property
    def is_of_answers(self) -> bool:
        """Whether feedback is the right answer."""
        return bool(self.num_remembered)

    @property
    def follows_release(self) -> bool:
        """Whether edit distance compares its questions as the paper's release does."""
        return self.is_of_paper or self.has_slots

    @property
    def kinds(self) -> list[str]:
        if self.situations is not None:
            return list(self.situations.categories) or [SITUATION]
        return [QUESTION] if self.is_of_answers else list(self.answers)

    def is_understood(self, kind: str, output: str) -> bool:
        """Return whether an output of a type shows that the intent was understood: Acc(u).

        A case-insensitive test of substrings. It cannot tell an answer from an echo of a
        question that names another type ("a sentence that can be used to define").
        """
        return all(copy_key(word) in copy_key(output) for word in self.understood_by[kind])


def load_family(name: str) -> Family:
    """Read a family by name, or from a YAML; a ConfigError if there is none or it is invalid."""
    path = find_yaml("family of questions", "memory", name)
    is_of_paper = path.resolve().parent == (config_root() / "memory").resolve()
    return from_yaml(Family, path, name=path.stem, is_of_paper=is_of_paper)


def read_verdict(output: str) -> tuple[str, str]:
    """Parse an output about a situation, "This question is about: loyalty. The answer is BAD.".

    Returns its subject and the answer's first word, both `plain`; "" where missing.
    """
    found = _OUTPUT.search(output)
    if found is None:
        return "", ""
    label = strip_marks(found["label"] or "").split()[:1]
    return plain(found["about"]), plain("".join(label))


def judge_situation(output: str, expected: str) -> tuple[bool, bool]:
    """Return whether an output's subject is right, and its label (apart in figures 4 and 5)."""
    (about, label), (right_about, right_label) = read_verdict(output), read_verdict(expected)
    return about == right_about, label == right_label


def plain(text: str) -> str:
    """Return a text in lower case, with single spaces and no punctuation at its ends."""
    return strip_marks(copy_key(text))
