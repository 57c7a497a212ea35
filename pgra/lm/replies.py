"""What an endpoint's replies say: texts without reasoning, chances of words, errors, and no answer.

Servers differ in how they spell tokens, where they put an error, and how they say that they give no
answer.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pgra.data.read import parse_json
from pgra.errors import ModelError

FILTERS = ("content_filter", "content_policy_violation", "refusal", "safety", "sensitive")
"""What providers call a filter, as the reason why an answer ended or as an error's code."""
WRITE = "use --decide_by generation"
_INSTEAD = "use --decide_by first_token or generation"
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
    """An endpoint does not do what it was asked to."""


@dataclass(frozen=True)
class Reply:
    """What an endpoint answered.

    Attributes:
        text: What was written, after the prompt where that was to be echoed.
        num_prompt_tokens: As the endpoint counted them; None where it does not.
        num_new_tokens: The same, of what it wrote.
        tokens: Text of each token, where chances were asked and given.
        chances: Log-probability of each; None for a first one.
        top: The likeliest first tokens of what was written with their log-probabilities, where
            these were asked and given.
        is_full: Whether it ended for want of room.
        none: Why it is no answer: "filtered" or "refused"; "" where it is one.
    """

    text: str = ""
    num_prompt_tokens: int | None = None
    num_new_tokens: int | None = None
    tokens: tuple[str, ...] = ()
    chances: tuple[float | None, ...] = ()
    top: tuple[tuple[str, float], ...] = ()
    is_full: bool = False
    none: str = ""


def read_reply(text: str, *, is_chat: bool) -> Reply:
    """Read the body of a completion; what is not needed of it may be missing.

    Raises:
        ValueError: If it is none.
    """
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
            top=_read_top(scored),
            is_full=finish == "length",
            none="filtered" if finish in FILTERS else "refused" if message.get("refusal") else "",
        )
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"no completion: {error!r}") from None


def _text_of(content: Any) -> str:
    """Return what a message says: a text, none, or a list of parts, of which some are no text."""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if part.get("type", "text") == "text")
    if not isinstance(content, str | None):
        raise TypeError(type(content))
    return content or ""


def _count_of(usage: Mapping[str, Any], name: str) -> int | None:
    count = usage.get(name)
    return count if isinstance(count, int) and count >= 0 else None


def find_error(text: str) -> Any:
    """Return the error that a body holds, for itself or in place of its choice; None without."""
    try:
        reply = parse_json(text)
        choices = reply.get("choices") or [{}]
        return reply.get("error") or choices[0].get("error")
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def error_message(text: str) -> str:
    """Return the message of the error that a body holds; all of the body where it has none."""
    error = find_error(text)
    return str((error.get("message") if isinstance(error, Mapping) else error) or text)


def show_error(response: Any) -> None:
    """Give an error under status 200 the status of its code, so that the client retries it.

    A hook of the HTTP client. Where an account has no money left, nothing is retried.
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
    """Return what a text says besides its reasoning blocks, and whether one of them is not closed.

    Where a prompt opens the block, the text holds its end alone.
    """
    text = _BLOCK.sub("", text.replace("\ufeff", ""))
    if closed := list(_CLOSED.finditer(text)):
        text = text[closed[-1].end() :]
    opened = _OPENED.search(text)
    text = text[: opened.start()] if opened else text
    return _WRAPPING.sub("", text), opened is not None


def begins_reasoning(top: Sequence[tuple[str, float]]) -> bool:
    """Whether the likeliest first token opens a reasoning block."""
    likeliest = max(top, key=lambda pair: pair[1], default=("", 0.0))[0]
    return _OPENED.match(likeliest.strip()) is not None


def word_chance(name: str, reply: Reply, prompt: str, word: str) -> float:
    """Return the log-probability of all tokens of a word after a prompt.

    The word is found from the end of the prompt: servers differ in what stands at its beginning (a
    special token or none, and so other offsets), and in how they spell tokens of other scripts.

    Args:
        name: The words that a message begins with.
        reply: To `prompt` and `word`, echoed, with one token more.
        prompt: What stands before the word.
        word: With its space.

    Raises:
        ModelError: If the prompt was not echoed, has no chances, or the tokens do not begin a new
            one where the word begins.
    """
    if not reply.text.startswith(prompt + word):
        raise Declined(f"{name} does not echo a prompt, so it cannot score given words: {_INSTEAD}")
    total = len(reply.tokens)
    if not reply.chances or len(reply.chances) != total:
        raise Declined(f"{name} gives no log-probabilities of a prompt's tokens: {_INSTEAD}")
    # The prompt's tokens end before what was written, or where all do.
    written = 1 if reply.num_new_tokens is None else reply.num_new_tokens
    for end in (total - written, total):
        start = _find_start(reply.tokens, word, end)
        if start is not None:
            chances = reply.chances[start:end]
            chance = sum(math.nan if value is None else value for value in chances)
            if not math.isfinite(chance):
                raise Declined(f"{name} gives '{word}' no finite log-probability: {_INSTEAD}")
            return chance
    raise Declined(
        f"{name} joins '{word}' to the prompt before it, or spells it otherwise: {_INSTEAD}"
    )


def _find_start(tokens: tuple[str, ...], word: str, end: int) -> int | None:
    """Return the first token of a word that ends before `end`; None where none begins with it.

    SentencePiece's tokens are given without their space, so a word may lack it.
    """
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
    """Put U+FFFD for halves of characters, which a server sends that cuts one in two."""
    return str(text).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _chance(value: Any) -> float:
    """Read a log-probability, which may be -inf; NaN and inf are none (a ValueError)."""
    chance = float(value)
    if math.isnan(chance) or chance == math.inf:
        raise ValueError
    return chance


def _read_top(scored: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """Read the chances of the first token that was written, in either form.

    That of chats, which llama.cpp gives of completions too, is a list of objects by token; that of
    completions one dict by token, for each token.
    """
    if content := scored.get("content"):
        told = content[0].get("top_logprobs") or ()
        return tuple((_without_halves(one["token"]), _chance(one["logprob"])) for one in told)
    tokens = scored.get("top_logprobs") or ()
    first = (tokens[-1] if tokens else None) or {}
    return tuple((_without_halves(token), _chance(value)) for token, value in first.items())


def first_chances(name: str, top: Sequence[tuple[str, float]], words: Sequence[str]) -> list[float]:
    """Return the log-probability that what is written begins as each word, (C,).

    It is that of all told tokens that begin the word, and no other one, whatever their case: " Pos"
    and "positive" count for " positive". A word without any has the least chance that was told, for
    its own is no larger. Where no word has any, all have -inf.

    Args:
        name: The words that a message begins with.
        top: First tokens with their log-probabilities.
        words: With their spaces.

    Raises:
        ModelError: If a token that begins several words is likelier than those that begin one.
    """
    plain = [_bare(word) for word in words]
    sums, shared, likeliest = [0.0] * len(plain), ("", "", ""), 0.0
    for token, value in top:
        start, chance = _bare(token), math.exp(value)
        begun = [i for i, word in enumerate(plain) if start and word.startswith(start)]
        if len(begun) == 1:
            sums[begun[0]] += chance
        elif begun and chance > likeliest:
            first, second, *_ = begun
            likeliest, shared = chance, (token.strip(), words[first].strip(), words[second].strip())
    if likeliest > sum(sums):
        raise ModelError(
            "{}: first token '{}' begins '{}' and '{}' alike: {}, or choose other "
            "prompt_words".format(name, *shared, WRITE)
        )
    least = min(value for _, value in top) if any(sums) else -math.inf
    return [math.log(chance) if chance else least for chance in sums]


def _bare(text: str) -> str:
    """Return a token or word without case and space, however tokenizers spell that."""
    return text.strip(" \t\r\n▁Ġ").casefold()


def begin_alike(words: Sequence[str]) -> tuple[str, str] | None:
    """Return two words whose first tokens are surely one: their first words are."""
    seen: dict[str, str] = {}
    for word in words:
        first = _bare(word).split(" ")[0]
        if first in seen:
            return seen[first], word.strip()
        seen[first] = word.strip()
    return None


def continuation(prompt: str, text: str) -> str:
    """Return what a chat's message adds to its prompt.

    Models like to say the end of the prompt again: "A: Rome", "Label: Positive". What the message
    begins with of the prompt's last line, from some word of it on, is left out.
    """
    text = text.lstrip()
    last = prompt.rstrip().rpartition("\n")[2]
    for match in re.finditer(r"\S+", last):
        end = last[match.start() :]
        rest = text[len(end) :]
        if text.startswith(end) and rest[:1] == " " and rest.partition("\n")[0].strip():
            return rest
    return text
