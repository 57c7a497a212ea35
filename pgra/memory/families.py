"""Families of questions with an intent that an LM can miss: configs/memory/NAME.yaml.

A family says how its questions are asked, what a user says of one that was misunderstood, what the
answer looks like, and by which words in it the understanding is known (Madaan et al. 2022, 3.3).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pgra.checks import config_root, read_yaml
from pgra.errors import ConfigError, unknown_name
from pgra.memory.situations import SituationForm, read_form

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
