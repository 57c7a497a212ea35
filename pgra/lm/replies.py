"""Parse an endpoint's replies: text without reasoning, log-probabilities of words, and errors.

Servers differ in how they spell tokens, where they put an error, and how they mark a missing
answer.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pgra.data.read import parse_json
from pgra.errors import ModelError

# What providers call a filter, as the reason why an answer ended or as an error's code.
FILTERS = ("content_filter", "content_policy_violation", "refusal", "safety", "sensitive")
WRITE = "use --decide_by generation"
_PASSING = re.compile("rate.?limit|overload|unavailable|time.?out|server.?error", re.I)
# How models that reason first mark it: DeepSeek R1, Qwen3 and most others; Seed-OSS; Magistral;
# Kimi; OpenThinker; Command A; Gemma 4; gpt-oss; Granite.
_OPENING = (
    r"<(?:think|thinking|thought|reasoning|seed:think)>|\[THINK\]|◁think▷|<\|begin_of_thought\|>"
    r"|<\|START_THINKING\|>|<\|channel>thought|<\|channel\|>analysis<\|message\|>"
    r"|Here(?: is|'s) my thought process:"
)
_CLOSING = (
    r"</(?:think|thinking|thought|reasoning|seed:think)>|\[/THINK\]|◁/think▷|<\|end_of_thought\|>"
    r"|<\|END_THINKING\|>|<channel\|>|<\|channel\|>final<\|message\|>"
    r"|Here(?: is|'s) my response:"
)
_BLOCK = re.compile(f"(?:{_OPENING}).*?(?:{_CLOSING})", re.S)
_OPENED, _CLOSED = re.compile(_OPENING), re.compile(_CLOSING)
_WRAPPING = re.compile(
    r"</?(?:answer|response)>|<\|(?:begin|end)_of_solution\|>|<\|(?:START|END)_RESPONSE\|>"
)


class Declined(ModelError):
    """An endpoint does not support what it was asked."""


@dataclass(frozen=True)
class Reply:
    """What an endpoint answered; token counts are None where it does not report them.

    Attributes:
        text: What was written, after the prompt where that was to be echoed.
        tokens: Text of each token, where log-probabilities were asked and given.
        chances: Log-probability of each; None for the first.
        is_full: Whether it ended for want of room.
        none: Why it is no answer: "filtered" or "refused"; "" where it is one.
    """

    text: str = ""
    num_prompt_tokens: int | None = None
    num_new_tokens: int | None = None
    tokens: tuple[str, ...] = ()
    chances: tuple[float | None, ...] = ()
    is_full: bool = False
    none: str = ""


def read_reply(text: str, *, is_chat: bool) -> Reply:
    """Parse the body of a completion, optional parts aside; ValueError if it is none."""
    try:
        reply = parse_json(text)
        if not reply["choices"]:
            return Reply()
        choice = reply["choices"][0]
        message = choice["message"] if is_chat else {"content": choice["text"]}
        usage, scored = reply.get("usage") or {}, choice.get("logprobs") or {}
        finish = str(choice.get("finish_reason")).casefold()
        chances = scored.get("token_logprobs") or ()
        return Reply(
            _without_halves(_text_of(message.get("content"))),
            _count_of(usage, "prompt_tokens"),
            _count_of(usage, "completion_tokens"),
            tokens=tuple(map(_without_halves, scored.get("tokens") or ())),
            chances=tuple(None if value is None else _chance(value) for value in chances),
            is_full=finish == "length",
            none="filtered" if finish in FILTERS else "refused" if message.get("refusal") else "",
        )
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"no completion: {error!r}") from None


def _text_of(content: Any) -> str:
    """Return a message's text: a string, None, or a list of parts, of which some are no text."""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if part.get("type", "text") == "text")
    if not isinstance(content, str | None):
        raise TypeError(type(content))
    return content or ""


def _count_of(usage: Mapping[str, Any], name: str) -> int | None:
    count = usage.get(name)
    return count if isinstance(count, int) and count >= 0 else None


def find_error(text: str) -> Any:
    """Return the error in a body, at its top or in its choice; None if there is none."""
    try:
        reply = parse_json(text)
        choices = reply.get("choices") or [{}]
        return reply.get("error") or choices[0].get("error")
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def error_message(text: str) -> str:
    """Return the message of the error in a body; the whole body where it has none."""
    error = find_error(text)
    return str((error.get("message") if isinstance(error, Mapping) else error) or text)


def show_error(response: Any) -> None:
    """Give an error with status 200 the status of its code, so that the client retries it.

    A hook of the HTTP client. If an account has no money left, nothing is retried.
    """
    response.read()
    error = find_error(response.text)
    code = str(error.get("code")) if isinstance(error, Mapping) else ""
    if error and response.is_success:
        if code.isdecimal() and int(code) in range(400, 600):
            response.status_code = int(code)
        else:
            response.status_code = 503 if _PASSING.search(str(error)) else 400
    if code == "insufficient_quota":
        response.headers["x-should-retry"] = "false"


def without_reasoning(text: str) -> tuple[str, bool]:
    """Return a text without its reasoning blocks, and whether one of them is not closed.

    Where the prompt opens the block, the text holds its end alone.
    """
    text = _BLOCK.sub("", text.replace("\ufeff", ""))
    if closed := list(_CLOSED.finditer(text)):
        text = text[closed[-1].end() :]
    opened = _OPENED.search(text)
    text = text[: opened.start()] if opened else text
    return _WRAPPING.sub("", text), opened is not None


def word_chance(name: str, reply: Reply, prompt: str, word: str) -> float:
    """Return the log-probability of all tokens of a word after a prompt.

    `reply` is to `prompt` and `word`, echoed, with one token more. The word is searched from the
    end: servers differ in what opens a prompt (a special token or none, and so other offsets), and
    in how they spell tokens of other scripts.

    Raises:
        Declined: If the prompt was not echoed, log-probabilities are missing or not finite, or no
            token begins where the word does.
    """
    if not reply.text.startswith(prompt + word):
        raise Declined(f"{name} does not echo a prompt, so it cannot score given words: {WRITE}")
    total = len(reply.tokens)
    if not reply.chances or len(reply.chances) != total:
        raise Declined(f"{name} gives no log-probabilities of a prompt's tokens: {WRITE}")
    # The prompt's tokens end before what was written, or where all do.
    written = 1 if reply.num_new_tokens is None else reply.num_new_tokens
    for end in (total - written, total):
        start = _find_start(reply.tokens, word, end)
        if start is not None:
            chances = reply.chances[start:end]
            chance = sum(math.nan if value is None else value for value in chances)
            if not math.isfinite(chance):
                raise Declined(f"{name} gives '{word}' no finite log-probability: {WRITE}")
            return chance
    raise Declined(
        f"{name} joins '{word}' to the prompt before it, or spells it otherwise: {WRITE}"
    )


def _find_start(tokens: tuple[str, ...], word: str, end: int) -> int | None:
    """Return the first token of a word that ends before `end`, its space aside, or None."""
    bare, tail = word.lstrip(), ""
    for start in range(end - 1, -1, -1):
        tail = tokens[start] + tail
        has_space_before = start > 0 and tokens[start - 1] + tail == word
        if tail == word or (tail == bare and not has_space_before):
            return start
        if len(tail) > len(word):
            return None
    return None


def _without_halves(text: object) -> str:
    """Replace lone surrogates by U+FFFD: a server may cut a character in two."""
    return str(text).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _chance(value: Any) -> float:
    """Parse a log-probability, which may be -inf; ValueError for NaN and inf."""
    chance = float(value)
    if math.isnan(chance) or chance == math.inf:
        raise ValueError
    return chance


def continuation(prompt: str, text: str) -> str:
    """Return what a chat's message adds to its prompt.

    Models like to repeat the end of the prompt: "A: Rome", "Label: Positive". Where the message
    begins with the end of the prompt's last line, from some word on, that is left out.
    """
    text = text.lstrip()
    last = prompt.rstrip().rpartition("\n")[2]
    for match in re.finditer(r"\S+", last):
        end = last[match.start() :]
        rest = text[len(end) :]
        if text.startswith(end) and rest[:1] == " " and rest.partition("\n")[0].strip():
            return rest
    return text
