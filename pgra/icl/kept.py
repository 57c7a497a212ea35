"""A local LM whose answers are kept on disk: a run that was stopped does not ask again.

What a remote LM answers is kept by itself (`pgra.icl.remote`), in the same file. Several processes
share prompts out, and read from that file what the others were answered.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from pgra.errors import ArtifactError
from pgra.icl.answers_cache import Answer, AnswersCache, answer_key
from pgra.icl.completion import Advance, Completer, Completion
from pgra.processes import Processes
from pgra.types import Json

_LOCAL = "local:"
_FIRST, _MOST = 32, 1024  # prompts that are asked before their answers are written
_SECONDS = 20.0  # of work that a stop may lose, about


class KeptCompleter:
    """A `Completer` that asks another one what it has not answered before.

    Attributes:
        inner: The LM.
        num_asked: Prompts that it was asked so far, by all processes.
        num_found: Prompts whose answers were there.
    """

    def __init__(
        self,
        inner: Completer,
        answers: AnswersCache,
        processes: Processes = Processes(),  # noqa: B008 (frozen)
    ) -> None:
        """Keep the answers of an LM.

        Args:
            inner: The LM.
            answers: Where they are kept.
            processes: Who asks the same prompts in the same order, each an LM of its own; each is
                asked its share.
        """
        self.inner, self.window, self._answers = inner, inner.window, answers
        self._processes = processes
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
        self._processes.barrier()  # all have looked: they share the same prompts out
        worker = self._processes.worker
        mine = worker.share(new)
        tell = _tell_of_all(advance, len(new), worker.world)
        start, size = 0, _FIRST
        while start < len(mine):
            part, began = mine[start : start + size], time.monotonic()
            told = {
                key: answer
                for prompt, answers in zip(part, ask(part, tell), strict=True)
                for key, answer in zip(keys[prompt], answers, strict=True)
            }
            self._answers.keep_all(told, model=str(lm.get("lm", "")))
            known.update(told)
            start += size
            if time.monotonic() - began < _SECONDS / 2:
                size = min(_MOST, 2 * size)
        self._processes.barrier()
        if len(mine) < len(new):
            known.update(self._find_others([key for prompt in new for key in keys[prompt]]))
        return [[known[key] for key in keys[prompt]] for prompt in prompts]

    def _find_others(self, keys: Sequence[str]) -> dict[str, Answer]:
        """Read what all processes were answered."""
        found = self._answers.find(keys)
        if missing := sum(key not in found for key in keys):
            raise ArtifactError(
                f"{self._answers.path} lacks {missing} answers that other processes were given: "
                "all of them must see one --artifacts_dir"
            )
        return found


def _tell_of_all(advance: Advance | None, total: int, world: int) -> Advance | None:
    """Tell of the others' prompts as if they were as far as this process."""
    if advance is None or world == 1:
        return advance
    left = total

    def tell(count: int) -> None:
        nonlocal left
        step = min(left, count * world)
        left -= step
        advance(step)

    return tell
