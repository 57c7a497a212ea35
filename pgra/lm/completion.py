"""What KATE and MemPrompt ask of an LM: to go on with a prompt, or to score given continuations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pgra.core import Json


@dataclass(frozen=True)
class Completion:
    """What an LM wrote after a prompt.

    Attributes:
        text: Up to the stop string, which is left out.
        num_prompt_tokens: Tokens of the prompt.
        num_new_tokens: Tokens that were written.
    """

    text: str
    num_prompt_tokens: int
    num_new_tokens: int


Advance = Callable[[int], None]


class Completer(Protocol):
    """An LM, here or behind an endpoint.

    Attributes:
        window: Most tokens of prompt and answer together.
    """

    window: int

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give all that its answers depend on, besides the prompt."""
        ...

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of texts, (B,)."""
        ...

    def complete(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int,
        stop: str,
        advance: Advance | None = None,
    ) -> list[Completion]:
        """Go on with each prompt greedily until `stop`, in the order of prompts."""
        ...

    def score(
        self, prompts: Sequence[str], words: Sequence[str], *, advance: Advance | None = None
    ) -> list[list[float]]:
        """Give the log-probability of all tokens of each word after each prompt, B lists of C."""
        ...
