"""The prompter P(p, C): few-shot prompt, question, clarification.

What users typed is data: questions, clarifications, right answers. Each stands on one line and has
neither the prompt's separator, nor the word that ends an answer, nor the mark of a clarification.
`as_data` makes it so, for these prompts and for those of `pgra icl`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pgra.config import config_root, read_yaml
from pgra.errors import ConfigError, DataError, unknown_name

_KEYS = {"separator", "end", "clarified", "examples"}
_FIELDS = {"question", "answer", "feedback"}
_SHOWN_CHARS = 80
CLARIFIED = "{question} | clarification: {feedback}"
"""How the paper shows a question with its clarification."""
_SLOTS = re.compile(r"\{(question|feedback)\}")


def as_data(
    text: str,
    *,
    clarified: str = CLARIFIED,
    separator: str = "",
    end: str = "",
    is_question: bool = False,
) -> str:
    """Give what a user typed as a prompt shows it: it adds no part to the prompt.

    Text without line breaks, separators, marks and the end's word comes back as it is, but that
    spaces collapse; a question keeps them.

    Args:
        text: As it was typed.
        clarified: How the prompt shows a question with its clarification; what stands between the
            two is the mark.
        separator: Between the prompt's examples.
        end: The word that ends an answer.
        is_question: Whether a lone "|" stays: it may be what is asked about.
    """
    line = " ".join(text.splitlines() if is_question else text.split())
    if not is_question:
        line = line.replace("|", "/")
    line = _without_end(line, end.strip())
    mark = r"\s*".join(map(re.escape, _SLOTS.split(clarified)[2].split()))
    if mark:
        line = re.sub(mark, lambda found: _spelled_apart(found.group()), line, flags=re.IGNORECASE)
    core = separator.strip()
    while core and core in line:
        line = line.replace(core, _spelled_apart(core))
    return line


def clarify(question: str, feedback: str, clarified: str = CLARIFIED) -> str:
    """Give a question with its clarification, both as data."""
    parts = {"question": question, "feedback": feedback}
    return _SLOTS.sub(lambda slot: parts[slot.group(1)], clarified)


def _without_end(line: str, end: str) -> str:
    if not end:
        return line
    told = end.lower() if end.lower() != end else _spelled_apart(end)
    before = r"(?<!\w)" if end[0].isalnum() else ""  # WEEKEND stays
    behind = r"(?!\w)" if end[-1].isalnum() else ""
    return re.sub(f"{before}{re.escape(end)}{behind}", lambda _: told, line)


def _spelled_apart(mark: str) -> str:
    if "|" in mark:
        return mark.replace("|", "/")
    return " ".join(mark) if len(mark) > 1 else " "


@dataclass(frozen=True)
class Shown:
    """A question with its answer, as a prompt shows them.

    Attributes:
        question: As it was asked.
        answer: Understanding and answer in one sentence.
        feedback: A clarification, or "".
    """

    question: str
    answer: str
    feedback: str = ""


@dataclass(frozen=True)
class FewShot:
    """A prompt from configs/memory_prompts/NAME.yaml.

    Attributes:
        name: The YAML's.
        separator: Between question and answer, and between examples (the paper's #).
        end: What ends an answer (the paper's END).
        clarified: How a question stands with its clarification: {question} and {feedback}.
        examples: Some with a clarification, some without.
        nearest: Instead of them, by question: its own, the nearest first (KATE).
    """

    name: str
    separator: str
    end: str
    clarified: str
    examples: Sequence[Shown]
    nearest: Mapping[str, Sequence[Shown]] = field(default_factory=dict)

    def examples_of(self, question: str) -> Sequence[Shown]:
        """Give the examples that stand before a question."""
        return self.nearest.get(question, self.examples)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Give all that decides a prompt, besides its question."""
        values = asdict(self)
        return values if self.nearest else {k: v for k, v in values.items() if k != "nearest"}

    def write(
        self,
        question: str,
        *,
        feedback: str = "",
        more: Sequence[Shown] = (),
        num_own: int | None = None,
    ) -> str:
        """Write a prompt that an answer goes on from.

        Args:
            question: What is asked.
            feedback: Its clarification, or "".
            more: Examples behind the question's own.
            num_own: How many of its own stand there, the first; None for all.
        """
        examples = (*self.examples_of(question)[:num_own], *more)
        shown = "".join(self.show(example) for example in examples)
        return f"{shown}{self._ask(question, feedback)}{self.separator}"

    def show(self, example: Shown) -> str:
        """Write one example, with the separator behind it."""
        asked = self._ask(example.question, example.feedback)
        return f"{asked}{self.separator}{self.as_data(example.answer)} {self.end}{self.separator}"

    def _ask(self, question: str, feedback: str) -> str:
        question = self.as_data(question, is_question=True)
        if not feedback:
            return question
        return clarify(question, self.as_data(feedback), self.clarified)

    def as_data(self, text: str, *, is_question: bool = False) -> str:
        """Give what a user typed as this prompt shows it; see `as_data` of this module."""
        return as_data(
            text,
            clarified=self.clarified,
            separator=self.separator,
            end=self.end,
            is_question=is_question,
        )

    def read_output(self, text: str) -> str:
        """Cut what an LM wrote to its answer: up to the end's word or the separator.

        Separators that it begins with are passed over: small LMs write the prompt's last once more.
        """
        core = self.separator.strip()
        text = text.lstrip()
        while core and text.startswith(core):
            text = text[len(core) :].lstrip()
        for stop in (self.end, core):
            text = text.split(stop, 1)[0] if stop else text
        return " ".join(text.split())


def prompt_names() -> list[str]:
    """Name the prompts there are."""
    return sorted(path.stem for path in (config_root() / "memory_prompts").glob("*.yaml"))


def load_few_shot(name: str) -> FewShot:
    """Read a prompt by name, or from a YAML.

    Raises:
        ConfigError: If there is none, or its YAML lacks something.
    """
    is_file = name.endswith(".yaml")
    path = Path(name) if is_file else config_root() / "memory_prompts" / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(unknown_name("prompt", name, prompt_names()))
    values = read_yaml(path)
    if set(values) != _KEYS or not all(isinstance(values[k], str) for k in _KEYS - {"examples"}):
        raise ConfigError(f"{path} must have {', '.join(sorted(_KEYS))}, all but examples texts")
    if "\n" not in values["separator"] or not str(values["end"]).strip():
        raise ConfigError(f"{path}: separator must have a line break, and end a word")
    if not {"{question}", "{feedback}"} <= set(re.findall(r"\{\w+\}", values["clarified"])):
        raise ConfigError(f"{path}: clarified must have {{question}} and {{feedback}}")
    examples = [_example(path, told) for told in values["examples"] or ()]
    return FewShot(
        path.stem, values["separator"], values["end"], values["clarified"], tuple(examples)
    )


def _example(path: Path, told: Mapping[str, Any]) -> Shown:
    if not isinstance(told, dict) or not {"question", "answer"} <= set(told) <= _FIELDS:
        raise ConfigError(f"{path}: an example has question, answer and perhaps feedback: {told}")
    return Shown(**{name: str(value) for name, value in told.items()})


class GrowingPrompt:
    """GROW-PROMPT: the newest corrections as further examples, as many as fit (Madaan et al., 4).

    The release counts words, 1,300 of them; here they are the LM's tokens, as the paper says.
    """

    def __init__(
        self,
        few_shot: FewShot,
        count_tokens: Callable[[Sequence[str]], list[int]],
        *,
        max_prompt_tokens: int,
        max_added: int | None = None,
    ) -> None:
        """Start with the prompt alone.

        Args:
            few_shot: The prompt.
            count_tokens: The LM's.
            max_prompt_tokens: Most tokens of a prompt with its question.
            max_added: Most corrections shown (the release: 20); None for no limit but the tokens.
        """
        self._few_shot, self._count = few_shot, count_tokens
        self._budget, self._most = max_prompt_tokens, max_added
        self._added: list[Shown] = []
        self._tokens: list[int] = []

    def add(self, shown: Shown) -> None:
        """Keep a correction, with the answer that was expected."""
        self._added.append(shown)
        self._tokens += self._count([self._few_shot.show(shown)])

    def write(self, question: str) -> str:
        """Write the prompt with the newest corrections that fit, the newest nearest the question.

        Raises:
            DataError: If the question does not fit with no correction at all.
        """
        used = self._newest(self._size(question, 0))
        while used and self._size(question, used) > self._budget:
            used -= 1  # tokens that meet may be cut otherwise than alone
        check_fits(question, self._size(question, used), self._budget)
        return self._render(question, used)

    def _newest(self, taken: int) -> int:
        most = len(self._added) if self._most is None else min(self._most, len(self._added))
        used = 0
        while used < most and taken + self._tokens[-1 - used] <= self._budget:
            taken += self._tokens[-1 - used]
            used += 1
        return used

    def _size(self, question: str, used: int) -> int:
        return self._count([self._render(question, used)])[0]

    def _render(self, question: str, used: int) -> str:
        more = self._added[len(self._added) - used :]
        return self._few_shot.write(question, more=more)


def check_fits(question: str, num_tokens: int, budget: int) -> None:
    """Refuse a question that does not fit; it is never cut.

    Raises:
        DataError: If it does not.
    """
    if num_tokens > budget:
        raise DataError(
            f"the question '{question[:_SHOWN_CHARS]}' makes a prompt of {num_tokens:,} tokens, "
            f"and {budget:,} fit beside the answer: use a shorter prompt, or an LM with a "
            "larger window"
        )
