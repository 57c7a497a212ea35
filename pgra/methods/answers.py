"""How an LM's answer becomes a label: by its label words' probabilities, or by the text it writes.

Brown et al. 2020, section 2.4, score each candidate answer. KATE (Liu et al. 2022) lets GPT-3 write
and compares the text with the label.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pgra.core import UNDECIDED, Example, Json, Prediction
from pgra.lm.base import Advance, LanguageModel
from pgra.progress import Bar
from pgra.prompts.fewshot import PromptFormat, answer_words
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.calibrate import decide


@dataclass(frozen=True)
class LMAnswer:
    """An LM's answer to a query: its label, or its text where there are no labels.

    `details` are further entries of `predictions.jsonl`.
    """

    prediction: Prediction
    details: Mapping[str, Json]


@dataclass(frozen=True, kw_only=True)
class Answerer(ABC):
    """Asks an LM for the labels of queries.

    `format` writes prompts and has each label's word; without words the text itself is the answer.
    """

    lm: LanguageModel
    format: PromptFormat
    progress: bool = False

    @property
    @abstractmethod
    def fingerprint(self) -> Mapping[str, Json]:
        """All that decides, besides the LM, exemplars and queries."""

    @property
    @abstractmethod
    def num_new_tokens(self) -> int:
        """The room that an answer needs."""

    @abstractmethod
    def answer(self, queries: Sequence[Example], prompts: Sequence[str]) -> list[LMAnswer]:
        """Ask the LM each of B queries' prompt."""


@dataclass(frozen=True, kw_only=True)
class WordScorer(Answerer):
    """Takes the label whose word is likeliest after the prompt, all its tokens counted."""

    def __post_init__(self) -> None:
        answer_words(self.format.words)  # refuses ambiguous words, before anything

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        return {**self.format.fingerprint, "decide_by": "score"}

    @property
    def num_new_tokens(self) -> int:
        """The tokens of the longest word, without those that open every text."""
        opening, *whole = self.lm.count_tokens(["", *answer_words(self.format.words)])
        return max(1, max(whole) - opening)

    def answer(self, queries: Sequence[Example], prompts: Sequence[str]) -> list[LMAnswer]:
        words = self.format.words
        with progress_bar(prompts, progress=self.progress) as advance:
            logs = self.lm.score(prompts, answer_words(words), advance=advance)
        scores = np.array(logs, np.float32).reshape(len(queries), len(words))
        predictions = decide([query.id for query in queries], scores, list(words))
        return [LMAnswer(prediction, {}) for prediction in predictions]


@dataclass(frozen=True, kw_only=True)
class TextWriter(Answerer):
    r"""Lets the LM write until `stop`; the answer is the text, or the label whose word it wrote."""

    max_new_tokens: int
    stop: str = "\n"

    def __post_init__(self) -> None:
        self._verbalizer  # refuses ambiguous words, before anything  # noqa: B018

    @cached_property
    def _verbalizer(self) -> Verbalizer:
        return Verbalizer(self.format.words, template="")

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        return {
            **self.format.fingerprint,
            "decide_by": "generation",
            "max_new_tokens": self.max_new_tokens,
            "stop": self.stop,
        }

    @property
    def num_new_tokens(self) -> int:
        return self.max_new_tokens

    def answer(self, queries: Sequence[Example], prompts: Sequence[str]) -> list[LMAnswer]:
        with progress_bar(prompts, progress=self.progress) as advance:
            written = self.lm.complete(
                prompts, max_new_tokens=self.max_new_tokens, stop=self.stop, advance=advance
            )
        pairs = zip(queries, written, strict=True)
        return [self._read(query, completion.text.strip()) for query, completion in pairs]

    def _read(self, query: Example, text: str) -> LMAnswer:
        words = self.format.words
        if not words:
            return LMAnswer(Prediction(query.id, text, {}), {})
        label = self._verbalizer.label_of_word(text)
        scores = {name: float(name == label) for name in words}
        return LMAnswer(Prediction(query.id, label or UNDECIDED, scores), {"written": text})


@contextlib.contextmanager
def progress_bar(prompts: Sequence[str], *, progress: bool) -> Iterator[Advance]:
    """Show how many of the distinct prompts are answered."""
    total = len(set(prompts))
    with Bar(total=total, desc="answers", unit="prompt", disable=not progress) as bar:
        yield bar.update
