"""Lessons as an LM is trained on them: many in one sequence, in the form of a few-shot prompt.

A sequence costs what its tokens cost, and each of its answers is learned from: behind the first
few, an answer is read with examples before it, as in a prompt.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pgra.errors import ConfigError
from pgra.memory.lessons import Lesson
from pgra.memory.prompter import FewShot

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
