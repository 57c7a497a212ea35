"""An LM whose answers are kept on disk, so that a stopped stream goes on where it was."""

from collections.abc import Mapping, Sequence

from pgra.icl.answers_cache import Answer, AnswersCache
from pgra.icl.completion import Advance, Completer, Completion
from pgra.io import digest
from pgra.types import Json


class KeptCompleter:
    """Asks an LM only what it was not asked before.

    Attributes:
        window: The LM's.
        num_asked: Prompts that the LM read.
    """

    def __init__(self, completer: Completer, cache: AnswersCache) -> None:
        self.window = completer.window
        self.num_asked = 0
        self._completer, self._cache = completer, cache

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give the LM's."""
        return self._completer.fingerprint

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of texts, (B,)."""
        return self._completer.count_tokens(texts)

    def complete(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int,
        stop: str,
        advance: Advance | None = None,
    ) -> list[Completion]:
        """Go on with each prompt; see `Completer`."""
        asked = {"lm": dict(self.fingerprint), "max_new_tokens": max_new_tokens, "stop": stop}
        keys = [digest({**asked, "prompt": prompt}) for prompt in prompts]
        known = self._cache.find(keys)
        new = {key: p for key, p in zip(keys, prompts, strict=True) if key not in known}
        if new:
            written = self._completer.complete(
                list(new.values()), max_new_tokens=max_new_tokens, stop=stop, advance=advance
            )
            self.num_asked += len(new)
            answers = {
                key: Answer(one.text, one.num_prompt_tokens, one.num_new_tokens)
                for key, one in zip(new, written, strict=True)
            }
            self._cache.keep_all(answers, model=str(self.fingerprint.get("lm", "")))
            known |= answers
        return [_completion(known[key]) for key in keys]

    def score(
        self, prompts: Sequence[str], words: Sequence[str], *, advance: Advance | None = None
    ) -> list[list[float]]:
        """Score words; nothing of that is kept."""
        return self._completer.score(prompts, words, advance=advance)


def _completion(answer: Answer) -> Completion:
    return Completion(answer.text, answer.num_prompt_tokens or 0, answer.num_new_tokens or 0)
