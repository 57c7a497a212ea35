"""How an LM's answer becomes a label: by its label words' chances, or by what it writes.

Brown et al. 2020, section 2.4, score each candidate answer. KATE (Liu et al. 2022) lets GPT-3 write
and compares what it wrote with the label.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pgra.core import UNDECIDED, Example, Json, Prediction, Scores
from pgra.lm.base import Advance, LanguageModel
from pgra.progress import Bar
from pgra.prompts.fewshot import PromptFormat, answer_words
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.calibrate import decide

CONTENT_FREE = ("N/A", "", "[MASK]")
"""The inputs without content of Zhao et al. 2021, section 5.2; their chances are averaged."""


def calibrate(scores: Scores, free: Scores) -> Scores:
    """Divide each label's chance by its chance without content (Zhao et al. 2021, section 4).

    Exemplars make an LM lean to some labels, whatever is asked. W = diag(p_cf)^-1 and b = 0 there;
    both chances are of the labels alone.

    Args:
        scores: Log-probabilities of the labels' words, (B, C).
        free: The same after the inputs without content, (B, 3, C).

    Returns:
        (B, C): logarithms of the chances, which sum to 1.
    """
    from scipy.special import log_softmax, softmax

    bias = softmax(free.astype(np.float64), axis=-1).mean(axis=1)
    ratio = log_softmax(scores.astype(np.float64), axis=-1)
    ratio -= np.log(np.maximum(bias, np.finfo(np.float64).tiny))
    return np.asarray(log_softmax(ratio, axis=-1), np.float32)


@dataclass(frozen=True)
class Answer:
    """What an LM said of a query.

    Attributes:
        prediction: The label it means; of a task without labels the text that it wrote.
        details: What else `predictions.jsonl` says of it.
    """

    prediction: Prediction
    details: Mapping[str, Json]


@dataclass(frozen=True, kw_only=True)
class Answerer(ABC):
    """Asks an LM for the labels of queries.

    Attributes:
        lm: Who is asked.
        format: How prompts are written, and which word answers for which label; without words the
            text itself is the answer.
        progress: Whether to show a bar.
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

    def prompts(self, exemplars: Sequence[Example], query: Example) -> list[str]:
        """Render all prompts that are asked for a query; its own is the first."""
        return [self.format.write(exemplars, query.fields)]

    @abstractmethod
    def answer(self, queries: Sequence[Example], prompts: Sequence[Sequence[str]]) -> list[Answer]:
        """Ask the LM what `prompts` rendered for each of B queries."""


@dataclass(frozen=True, kw_only=True)
class WordScorer(Answerer):
    """Takes the label whose word is likeliest after the prompt, all its tokens counted.

    Attributes:
        calibrated: Whether the same prompt is asked for inputs without content too.
        length_normalize: Whether a word's log-probability is divided by its tokens.
        num_top: Where an endpoint tells the chances of first tokens alone, of how many; else 0.
    """

    calibrated: bool = False
    length_normalize: bool = False
    num_top: int = 0

    def __post_init__(self) -> None:
        answer_words(self.format.words)  # refuses words that cannot be told apart, before anything

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Format, words and what is done with their chances."""
        return {
            **self.format.fingerprint,
            "decide_by": "first_token" if self.num_top else "score",
            **({"num_top": self.num_top} if self.num_top else {}),
            "calibrate": self.calibrated,
            "length_normalize": self.length_normalize,
        }

    @cached_property
    def _lengths(self) -> list[int]:
        """Count the tokens of each word, without those that open every text."""
        opening, *whole = self.lm.count_tokens(["", *answer_words(self.format.words)])
        return [max(1, length - opening) for length in whole]

    @property
    def num_new_tokens(self) -> int:
        """The tokens of the longest word."""
        return 1 if self.num_top else max(self._lengths)

    def prompts(self, exemplars: Sequence[Example], query: Example) -> list[str]:
        """Render a query's prompt, and with calibration the same one for no content."""
        free = CONTENT_FREE if self.calibrated else ()
        asked = [query.fields, *(dict.fromkeys(self.format.template.inputs, text) for text in free)]
        return [self.format.write(exemplars, fields) for fields in asked]

    def answer(self, queries: Sequence[Example], prompts: Sequence[Sequence[str]]) -> list[Answer]:
        """Score the words after each prompt; see `Answerer`."""
        flat, words = [prompt for each in prompts for prompt in each], self.format.words
        with progress_bar(flat, progress=self.progress) as advance:
            logs = self.lm.score(flat, answer_words(words), advance=advance)
        scores = np.array(logs, np.float32).reshape(len(queries), -1, len(words))
        if self.length_normalize:
            scores /= np.array(self._lengths, dtype=np.float32)
        # Of first tokens none may begin a word.
        seen = np.asarray(np.isfinite(scores).any(axis=-1))
        scores[~seen] = 0.0
        final = calibrate(scores[:, 0], scores[:, 1:]) if self.calibrated else scores[:, 0]
        predictions = decide([query.id for query in queries], final, list(words))
        nothing = dict.fromkeys(words, 0.0)
        return [
            Answer(one if is_seen else Prediction(one.example_id, UNDECIDED, nothing), {})
            for one, is_seen in zip(predictions, seen[:, 0].tolist(), strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class TextWriter(Answerer):
    r"""Lets the LM write; the answer is the text, or the label whose word it wrote.

    Attributes:
        max_new_tokens: Most tokens that are written.
        stop: Where an answer ends.
    """

    max_new_tokens: int
    stop: str = "\n"

    def __post_init__(self) -> None:
        self._verbalizer  # refuses words that cannot be told apart, before anything  # noqa: B018

    @cached_property
    def _verbalizer(self) -> Verbalizer:
        return Verbalizer(self.format.words, template="")

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Format, words and how much is written."""
        return {
            **self.format.fingerprint,
            "decide_by": "generation",
            "max_new_tokens": self.max_new_tokens,
            "stop": self.stop,
        }

    @property
    def num_new_tokens(self) -> int:
        """The most tokens that are written."""
        return self.max_new_tokens

    def answer(self, queries: Sequence[Example], prompts: Sequence[Sequence[str]]) -> list[Answer]:
        """Let the LM write, and read labels; see `Answerer`."""
        flat = [each[0] for each in prompts]
        with progress_bar(flat, progress=self.progress) as advance:
            written = self.lm.complete(
                flat, max_new_tokens=self.max_new_tokens, stop=self.stop, advance=advance
            )
        pairs = zip(queries, written, strict=True)
        return [self._read(query, completion.text.strip()) for query, completion in pairs]

    def _read(self, query: Example, text: str) -> Answer:
        words = self.format.words
        if not words:
            return Answer(Prediction(query.id, text, {}), {})
        label = self._verbalizer.label_of_word(text)
        scores = {name: float(name == label) for name in words}
        return Answer(Prediction(query.id, label or UNDECIDED, scores), {"written": text})


@contextlib.contextmanager
def progress_bar(prompts: Sequence[str], *, progress: bool) -> Iterator[Advance]:
    """Show how many of the distinct prompts are answered."""
    total = len(set(prompts))
    with Bar(total=total, desc="answers", unit="prompt", disable=not progress) as bar:
        yield bar.update
