"""What an endpoint's answers cost: its tokens, counted or estimated, and their price."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

CountTokens = Callable[[Sequence[str]], list[int]]
_BYTES_PER_TOKEN = 3  # of UTF-8; English has 4 to 5, so that an estimate is rather too large


@dataclass(frozen=True)
class TokenCounter:
    """Counts the tokens of texts.

    Attributes:
        identity: Of the tokenizer, or "estimate".
        count: Gives the tokens of each text.
    """

    identity: str
    count: CountTokens


@dataclass(frozen=True)
class Prices:
    """What a million tokens cost, in any currency.

    Attributes:
        prompt: Of prompts.
        new: Of what is written.
    """

    prompt: float
    new: float

    def cost(self, num_prompt_tokens: int, num_new_tokens: int) -> float:
        """Give what so many tokens cost."""
        return (num_prompt_tokens * self.prompt + num_new_tokens * self.new) / 1e6


@dataclass(frozen=True)
class Spending:
    """What was asked and paid since a completer was made.

    Attributes:
        num_calls: Calls that were answered, and so are paid for.
        num_kept: Answers that were on disk.
        num_retries: Calls that failed and were made again; a time-out may have been paid for too.
        num_prompt_tokens: Of the calls.
        num_new_tokens: Of the calls.
        is_estimated: Whether the endpoint left out some counts, so that they are our own.
        cost: By the prices; None without prices.
    """

    num_calls: int = 0
    num_kept: int = 0
    num_retries: int = 0
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    is_estimated: bool = False
    cost: float | None = None

    def plus(self, more: "Spending") -> "Spending":
        """Add counts; what is paid for them is left to prices."""
        return Spending(
            self.num_calls + more.num_calls,
            self.num_kept + more.num_kept,
            self.num_retries + more.num_retries,
            self.num_prompt_tokens + more.num_prompt_tokens,
            self.num_new_tokens + more.num_new_tokens,
            self.is_estimated or more.is_estimated,
        )

    def __str__(self) -> str:
        """Word it for a log."""
        about = "about " if self.is_estimated else ""
        paid = "" if self.cost is None else f", cost {about}{self.cost:.4f}"
        return (
            f"{self.num_calls} calls ({self.num_kept} answers were on disk, {self.num_retries} "
            f"retries), {about}{self.num_prompt_tokens} prompt tokens and {about}"
            f"{self.num_new_tokens} new ones{paid}"
        )


def estimate_tokens(texts: Sequence[str]) -> list[int]:
    """Estimate tokens without a tokenizer: a token for every 3 bytes of UTF-8, rounded up.

    It does not learn from what the endpoint counts: the prompts of a run that goes on must be those
    it began with, or they are paid for twice.
    """
    return [math.ceil(len(text.encode()) / _BYTES_PER_TOKEN) for text in texts]
