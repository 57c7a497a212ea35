"""A local LM whose answers are kept on disk: a run that was stopped does not ask again.

What a remote LM answers is kept by itself (`pgra.icl.remote`), in the same file.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from pgra.icl.answers_cache import Answer, AnswersCache, answer_key
from pgra.icl.completion import Advance, Completer, Completion
from pgra.types import Json

_LOCAL = "local:"
_FIRST, _MOST = 32, 1024  # prompts that are asked before their answers are written
_SECONDS = 20.0  # of work that a stop may lose, about


class KeptCompleter:
    """A `Completer` that asks another one what it has not answered before.

    Attributes:
        inner: The LM.
        num_asked: Prompts that it was asked so far.
        num_found: Prompts whose answers were there.
    """

    def __init__(self, inner: Completer, answers: AnswersCache) -> None:
        """Keep the answers of an LM.

        Args:
            inner: The LM.
            answers: Where they are kept.
        """
        self.inner, self.window, self._answers = inner, inner.window, answers
        self.num_asked = self.num_found = 0

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give the LM's."""
        return self.inner.fingerprint

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of texts, (B,)."""
        return self.inner.count_tokens(texts)

    def complete(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int,
        stop: str,
        advance: Advance | None = None,
    ) -> list[Completion]:
        """Go on with each prompt; see `Completer`."""
        asked: dict[str, Json] = {"max_new_tokens": max_new_tokens, "stop": stop}

        def ask(part: Sequence[str], tell: Advance | None) -> list[list[Answer]]:
            done = self.inner.complete(part, max_new_tokens=max_new_tokens, stop=stop, advance=tell)
            return [[Answer(c.text, c.num_prompt_tokens, c.num_new_tokens)] for c in done]

        found = self._find_or_ask(prompts, [asked], ask, advance)
        return [
            Completion(answer.text, answer.num_prompt_tokens or 0, answer.num_new_tokens or 0)
            for (answer,) in found
        ]

    def score(
        self, prompts: Sequence[str], words: Sequence[str], *, advance: Advance | None = None
    ) -> list[list[float]]:
        """Give the log-probability of each word after each prompt; see `Completer`."""

        def ask(part: Sequence[str], tell: Advance | None) -> list[list[Answer]]:
            lines = self.inner.score(part, words, advance=tell)
            return [[Answer("", log_probability=value) for value in line] for line in lines]

        found = self._find_or_ask(prompts, [{"word": word} for word in words], ask, advance)
        return [[float(answer.log_probability or 0.0) for answer in line] for line in found]

    def _find_or_ask(
        self,
        prompts: Sequence[str],
        questions: Sequence[Mapping[str, Json]],
        ask: Callable[[Sequence[str], Advance | None], list[list[Answer]]],
        advance: Advance | None,
    ) -> list[list[Answer]]:
        """Give each prompt's answers to the questions; equal prompts are asked once."""
        lm = dict(self.fingerprint)
        keys = {
            prompt: [answer_key(_LOCAL, {"lm": lm, "prompt": prompt, **q}) for q in questions]
            for prompt in dict.fromkeys(prompts)
        }
        known = self._answers.find([key for own in keys.values() for key in own])
        new = [prompt for prompt, own in keys.items() if any(key not in known for key in own)]
        self.num_found += len(keys) - len(new)
        self.num_asked += len(new)
        if advance is not None:
            advance(len(keys) - len(new))
        start, size = 0, _FIRST
        while start < len(new):
            part, began = new[start : start + size], time.monotonic()
            told = {
                key: answer
                for prompt, answers in zip(part, ask(part, advance), strict=True)
                for key, answer in zip(keys[prompt], answers, strict=True)
            }
            self._answers.keep_all(told, model=str(lm.get("lm", "")))
            known.update(told)
            start += size
            if time.monotonic() - began < _SECONDS / 2:
                size = min(_MOST, 2 * size)
        return [[known[key] for key in keys[prompt]] for prompt in prompts]
