"""An LM behind an OpenAI-compatible completions endpoint: calls, limits, retries, costs.

What was answered once is never asked again, in this run or another (`pgra.lm.cache`); an
answer is on disk before anybody sees it. So a run that was stopped, by whatever, goes on without
paying twice, but for the few calls that were on their way.
"""

import email.utils
import json
import logging
import math
import os
import random
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from pgra.core import Json
from pgra.errors import ConfigError, ModelError, PgraError
from pgra.lm.cache import Answer, AnswersCache, answer_key
from pgra.lm.completion import Advance, Completion

# When the next call to an endpoint may start: a limit a minute, pauses it asks for, back-off.


logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_FIRST_DELAY = 0.5  # seconds, doubled at each further try
_LONGEST_DELAY = 60.0
_LONGEST_WISH = 600.0  # a longer pause than this is for the user to wait for


class Hiccup(Exception):
    """A call that failed in a way that may pass.

    Attributes:
        wish: Seconds that the endpoint asks to wait; None where it says nothing.
    """

    def __init__(self, message: str, wish: float | None = None) -> None:
        super().__init__(message)
        self.wish = wish


class Halted(Exception):
    """A call that was not made, because another one failed for good."""


class Pace:
    """Lets calls start one after the other, over all threads.

    A pause holds every thread: what the endpoint says to one call holds for the next one too.

    Attributes:
        num_retries: Calls that were made again.
    """

    def __init__(self, requests_per_minute: float | None = None) -> None:
        """Start at once, or evenly spread over each minute."""
        self._gap = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._lock = threading.Lock()
        self._next = 0.0
        self._held_until = 0.0
        self.num_retries = 0

    def wait(self, halt: threading.Event) -> None:
        """Wait for a turn.

        Raises:
            Halted: If `halt` is set before.
        """
        while not halt.is_set():
            with self._lock:
                now = time.monotonic()
                start = max(self._next, self._held_until)
                if start <= now:
                    self._next = now + self._gap
                    return
            halt.wait(start - now)
        raise Halted

    def hold(self, seconds: float) -> bool:
        """Let no call start for so many seconds, and say whether none held already."""
        with self._lock:
            self.num_retries += 1
            now = time.monotonic()
            was_free = self._held_until <= now
            self._held_until = max(self._held_until, now + seconds)
            return was_free

    def patiently(self, call: Callable[[], _T], *, halt: threading.Event, max_retries: int) -> _T:
        """Call in turn, and again after each hiccup, with growing pauses.

        Args:
            call: Raises `Hiccup` where trying again may help.
            halt: Set when no call shall start any more.
            max_retries: Tries after the first.

        Raises:
            Halted: If `halt` was set.
            ModelError: If the last try failed too, or the endpoint asks for too long a pause.
        """
        for tried in range(max_retries + 1):
            self.wait(halt)
            try:
                return call()
            except Hiccup as hiccup:
                self._pause(hiccup, tried, max_retries)
        raise AssertionError("the last try returns or raises")

    def _pause(self, hiccup: Hiccup, tried: int, max_retries: int) -> None:
        if tried == max_retries:
            raise ModelError(f"{hiccup} ({tried + 1} tries)") from None
        if hiccup.wish is not None and hiccup.wish > _LONGEST_WISH:
            raise ModelError(f"{hiccup}, and asks to wait {hiccup.wish:.0f} s") from None
        delay = back_off(tried) if hiccup.wish is None else hiccup.wish
        if self.hold(delay):  # one line for the many calls that meet the same hiccup
            logger.warning("%s: again in %.1f s (try %d)", hiccup, delay, tried + 2)


def back_off(tried: int) -> float:
    """Give the seconds to wait after so many failed tries more than one, spread by a quarter.

    The spread keeps several processes from coming back together; no result depends on it.
    """
    return min(_FIRST_DELAY * 2.0**tried, _LONGEST_DELAY) * random.uniform(0.75, 1.0)


def read_retry_after(value: str | None, *, now: float | None = None) -> float | None:
    """Read a Retry-After header (RFC 9110, section 10.2.3): seconds, or a date.

    Args:
        value: The header; None where there is none.
        now: Seconds since the epoch; None is the clock's.

    Returns:
        Seconds from now, at least 0; None where the header says nothing.
    """
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = email.utils.parsedate_to_datetime(value)
        except ValueError:
            return None
        seconds = date.timestamp() - (time.time() if now is None else now)
    return max(0.0, seconds) if math.isfinite(seconds) else None


# One call to an OpenAI-compatible completions endpoint, and what its failures mean for a user.
#
# OpenAI's own client (`pip install 'pgra[openai]'`) speaks; tries, pauses and limits are
# `pgra.lm.remote`'s, which all threads share. The key comes from the environment alone. Only the
# client has it, and it is struck out of all that an endpoint says.


KEY = "OPENAI_API_KEY"
_NO_KEY = "none"  # the client wants one; servers of one's own want none
_SHOWN = 200  # characters of what an endpoint said
_HERE = ("localhost", "127.0.0.1", "::1")
_MAY_PASS = (408, 409, 425, 429)  # and all from 500
_STRUCK = "***"
_KEY_LIKE = re.compile(r"\bsk-[\w*-]+")  # as endpoints quote keys, with their middle left out


@dataclass(frozen=True)
class Reply:
    """What an endpoint answered.

    Attributes:
        text: What the LM wrote, behind the prompt where that was to be echoed.
        num_prompt_tokens: As the endpoint counts; None where it does not say.
        num_new_tokens: The same, of what it wrote.
        tokens: Text of each token, where chances were asked and given.
        chances: Log-probability of each; None for a first one.
    """

    text: str
    num_prompt_tokens: int | None
    num_new_tokens: int | None
    tokens: tuple[str, ...] = ()
    chances: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Endpoint:
    """A model behind an endpoint.

    Attributes:
        model: As the endpoint calls it.
        base_url: Without a slash at its end.
        client: OpenAI's, which has the key.
    """

    model: str
    base_url: str
    client: Any = field(repr=False)

    @classmethod
    def open(cls, model: str, *, base_url: str | None = None, timeout: float = 60.0) -> Self:
        """Prepare to call, without calling.

        Args:
            model: As the endpoint calls it.
            base_url: Its address, up to `/v1`; None is OPENAI_BASE_URL, or OpenAI's own.
            timeout: Seconds without a byte after which a call has failed.

        Raises:
            ConfigError: If the client is not installed, the address is none, or it is OpenAI's and
                there is no key.
        """
        try:
            import openai
        except ImportError:
            raise ConfigError(
                f"--lm openai:{model} needs OpenAI's client: pip install 'pgra[openai]'"
            ) from None
        if not model:
            raise ConfigError("--lm openai: names no model: write --lm openai:MODEL")
        key = _read_key()
        base_url = base_url or os.environ.get("OPENAI_BASE_URL") or None
        if base_url is not None:
            _check_address(base_url, with_key=key is not None)
        elif key is None:
            raise ConfigError(
                f"--lm openai:{model} needs a key in the environment (export {KEY}=...), or "
                "--base_url URL of an endpoint that needs none"
            )
        client = openai.OpenAI(
            api_key=key or _NO_KEY, base_url=base_url, timeout=timeout, max_retries=0
        )
        return cls(model, str(client.base_url).rstrip("/"), client)

    @property
    def name(self) -> str:
        """Give the words that messages begin with."""
        return f"openai:{self.model} at {self.base_url}"

    def call(self, body: Mapping[str, Json]) -> Reply:
        """Ask once.

        Args:
            body: The request: model, prompt and parameters.

        Raises:
            Hiccup: If it failed in a way that may pass: no connection, no answer in time, too many
                calls, or an error of the endpoint's own.
            ModelError: If it failed in another way, or what came is no completion.
        """
        import openai

        try:
            raw = self.client.completions.with_raw_response.create(**body)
        except openai.APITimeoutError:
            raise Hiccup(
                f"{self.name} did not answer in {self.client.timeout:g} s (--request_timeout)"
            ) from None
        except openai.APIConnectionError as error:
            reason = self.excerpt(str(error.__cause__ or error))
            raise Hiccup(f"{self.name} cannot be reached ({reason})") from None
        except openai.APIStatusError as error:
            raise self._word(error, body) from None
        except openai.OpenAIError as error:
            raise ModelError(f"{self.name}: {self.excerpt(str(error))}") from None
        return self._read(raw.text)

    def excerpt(self, text: str) -> str:
        """Shorten what an endpoint said to one line without the key."""
        key = self.client.api_key
        if key != _NO_KEY:
            text = text.replace(key, _STRUCK)
        text = " ".join(_KEY_LIKE.sub(_STRUCK, text).split())
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"

    def _word(self, error: Any, body: Mapping[str, Json]) -> Hiccup | ModelError:
        """Word a status that is no success.

        Args:
            error: openai.APIStatusError.
            body: What was asked.
        """
        status = error.status_code
        said = error.message if isinstance(error.body, Mapping) else f"{error.body or ''}"
        said = self.excerpt(said.removeprefix(f"Error code: {status}").removeprefix(" - "))
        told = f"{self.name} answered {status} '{said}'"
        if error.code == "insufficient_quota":
            return ModelError(f"{told}: the account has no money left; pay, and run again")
        if status in _MAY_PASS or status >= 500:
            return Hiccup(told, read_retry_after(error.response.headers.get("retry-after")))
        return ModelError(f"{told}: {_way_out(status, is_echo='echo' in body)}")

    def _read(self, text: str) -> Reply:
        """Read an answer; what is not needed of it may be missing.

        Raises:
            ModelError: If it is no completion.
        """
        try:
            told = json.loads(text)
            choice = told["choices"][0]
            written = choice["text"]
            if not isinstance(written, str):
                raise TypeError
        except (ValueError, KeyError, IndexError, TypeError):
            raise ModelError(
                f"{self.name} answered '{self.excerpt(text)}', which is no completion: is "
                "--base_url that of an OpenAI-compatible endpoint (it usually ends in /v1)?"
            ) from None
        usage, chances = _mapping(told, "usage"), _mapping(choice, "logprobs")
        return Reply(
            written,
            _count(usage.get("prompt_tokens")),
            _count(usage.get("completion_tokens")),
            tuple(str(token) for token in _list(chances.get("tokens"))),
            tuple(_number(chance) for chance in _list(chances.get("token_logprobs"))),
        )


def _read_key() -> str | None:
    """Read the key; a header cannot hold every character, and the client would quote it.

    Raises:
        ConfigError: If it is no key.
    """
    key = os.environ.get(KEY, "").strip()
    if not all("!" <= char <= "~" for char in key):
        raise ConfigError(f"{KEY} holds characters that no key has, such as a space: set it again")
    return key or None


def _check_address(base_url: str, *, with_key: bool) -> None:
    """Refuse what is no address, or has a secret in it, which files and messages would show.

    Raises:
        ConfigError: If it is not plain http(s)://HOST[:PORT][/PATH].
    """
    try:
        parts = urlsplit(base_url)
        has_host = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        raise ConfigError("--base_url is no address: write http(s)://HOST[:PORT]/v1") from None
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            "--base_url holds a user name, a password or a query, which would be written down: "
            f"give the address alone, and the key in {KEY}"
        )
    if parts.scheme not in ("http", "https") or not has_host:
        raise ConfigError(f"--base_url '{base_url}' is no address: write http(s)://HOST[:PORT]/v1")
    if with_key and parts.scheme == "http" and parts.hostname not in _HERE:
        logger.warning("the key goes to %s over plain http, for all on the way to read", base_url)


def _way_out(status: int, *, is_echo: bool) -> str:
    if status in (401, 403):
        return f"see that {KEY} is set to a key that may use this model"
    if status == 404:
        return (
            "see --base_url (it usually ends in /v1) and the model's name; a model for chats alone "
            "has no completions"
        )
    if is_echo:
        return (
            "it does not score given words, or the prompt is too long for it (--lm_window): "
            "use --decide_by generation"
        )
    return "see that --lm_window is no larger than the model's"


def _mapping(told: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = told.get(name)
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


# The chance of a given word, of a prompt that an endpoint echoes with its tokens' chances.
#
# The word is found from the end of the prompt: servers differ in what stands at its beginning (a
# special token or none, and so other offsets), and in how they spell tokens of other scripts.


_INSTEAD = "use --decide_by generation"


def word_chance(reply: Reply, prompt: str, word: str) -> float:
    """Give the log-probability of all tokens of a word after a prompt.

    Args:
        reply: To `prompt` and `word`, echoed, with one token more.
        prompt: What stands before the word.
        word: With its space.

    Raises:
        ModelError: If the prompt was not echoed, has no chances, or the tokens do not begin a new
            one where the word begins.
    """
    if not reply.text.startswith(prompt + word):
        raise ModelError(f"does not echo a prompt, so it cannot score given words: {_INSTEAD}")
    if not reply.chances or len(reply.chances) != len(reply.tokens):
        raise ModelError(f"gives no log-probabilities of a prompt's tokens: {_INSTEAD}")
    for end in _ends(reply):
        start = _find_start(reply.tokens, word, end)
        if start is not None:
            return _add(reply.chances[start:end], word)
    raise ModelError(f"joins '{word}' to the prompt before it, or spells it otherwise: {_INSTEAD}")


def _ends(reply: Reply) -> list[int]:
    """Give where the prompt's tokens may end: before what was written, or where all do."""
    total = len(reply.tokens)
    written = 1 if reply.num_new_tokens is None else reply.num_new_tokens
    return [end for end in dict.fromkeys((total - written, total)) if end > 0]


def _find_start(tokens: tuple[str, ...], word: str, end: int) -> int | None:
    """Give the first token of a word that ends before `end`; None where none begins with it.

    SentencePiece's tokens are told without their space, so a word may lack it.
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


def _add(chances: tuple[float | None, ...], word: str) -> float:
    total = sum(math.nan if chance is None else chance for chance in chances)
    if not math.isfinite(total):
        raise ModelError(f"gives '{word}' no finite log-probability: {_INSTEAD}")
    return total


# What an endpoint's answers cost: its tokens, counted or estimated, and their price.


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


Body = Mapping[str, Json]


@dataclass(frozen=True)
class _Question:
    """One call: what is sent, its key on disk, and the word at its prompt's end that is scored."""

    key: str
    body: Body
    prompt: str
    word: str | None


class RemoteCompleter:
    """A `Completer` over an endpoint.

    Attributes:
        window: Most tokens of prompt and answer together.
        answers: What was answered so far.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        answers: AnswersCache,
        *,
        window: int,
        counter: TokenCounter | None = None,
        max_parallel_calls: int = 8,
        max_retries: int = 6,
        requests_per_minute: float | None = None,
        prices: Prices | None = None,
    ) -> None:
        """Prepare to ask, without asking.

        Args:
            endpoint: Whom to ask.
            answers: Where answers are kept.
            window: Most tokens that the LM reads and writes, as the user says.
            counter: What counts the tokens of texts; None estimates them.
            max_parallel_calls: Calls under way at a time.
            max_retries: Tries of a call after the first.
            requests_per_minute: Most calls a minute, tries included; None has no limit.
            prices: Of tokens.
        """
        self.window = window - 1  # of a scored prompt: the token that is written and left out
        self.answers = answers
        self._endpoint = endpoint
        self._counter = counter or TokenCounter("estimate", estimate_tokens)
        self._count = self._counter.count
        self._max_parallel_calls = max_parallel_calls
        self._max_retries = max_retries
        self._prices = prices
        self._pace = Pace(requests_per_minute)
        self._lock = threading.Lock()
        self._spent = Spending()

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give all that its answers depend on, besides the prompt; what counts tokens cuts it."""
        return {
            "lm": f"openai:{self._endpoint.model}",
            "base_url": self._endpoint.base_url,
            "window": self.window + 1,
            "tokens": self._counter.identity,
        }

    @property
    def spending(self) -> Spending:
        """Give what was asked and paid so far."""
        spent = replace(self._spent, num_retries=self._pace.num_retries)
        if self._prices is None:
            return spent
        cost = self._prices.cost(spent.num_prompt_tokens, spent.num_new_tokens)
        return replace(spent, cost=cost)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of texts, (B,), by the tokenizer; without one they are estimated."""
        return self._count(texts)

    def complete(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int,
        stop: str,
        advance: Advance | None = None,
    ) -> list[Completion]:
        """Go on with each prompt greedily until `stop`, in the order of prompts.

        Args:
            prompts: B prompts.
            max_new_tokens: Most tokens to write.
            stop: What ends an answer; empty has no such end.
            advance: Told of each prompt that is answered.

        Raises:
            ModelError: If a call failed for good; all that was answered is kept.
            ArtifactError: If answers cannot be kept.
        """
        parameters = {"max_tokens": max_new_tokens, **({"stop": [stop]} if stop else {})}
        questions = [self._question(prompt, parameters) for prompt in prompts]
        answers = self._ask([[question] for question in questions], advance)
        return [
            Completion(_cut(answer.text, stop), *self._counts(prompt, answer))
            for prompt, [answer] in zip(prompts, answers, strict=True)
        ]

    def score(
        self, prompts: Sequence[str], words: Sequence[str], *, advance: Advance | None = None
    ) -> list[list[float]]:
        """Give the log-probability of all tokens of each word after each prompt, B lists of C.

        One call for each prompt and word, which the endpoint echoes with the chance of each token.

        Args:
            prompts: B prompts.
            words: C words, with the space before them.
            advance: Told of each prompt whose words are all scored.

        Raises:
            ModelError: As `complete`; also if the endpoint gives no chances of given words.
            ArtifactError: If answers cannot be kept.
        """
        # One token is written, and left out: several servers refuse to write none.
        parameters = {"max_tokens": 1, "echo": True, "logprobs": 1}
        questions = [
            [self._question(prompt, parameters, word) for word in words] for prompt in prompts
        ]
        answers = self._ask(questions, advance)
        return [[_chance(answer) for answer in line] for line in answers]

    def _question(self, prompt: str, parameters: Body, word: str | None = None) -> _Question:
        whole = prompt + (word or "")
        body = {"model": self._endpoint.model, "prompt": whole, "temperature": 0, **parameters}
        # One text can be cut into a prompt and a word in several ways.
        key = answer_key(self._endpoint.base_url, {**body, "word": word})
        return _Question(key, body, prompt, word)

    def _ask(
        self, questions: Sequence[Sequence[_Question]], advance: Advance | None
    ) -> list[list[Answer]]:
        """Ask what is not on disk, equal questions once; lines of answers as those of questions."""
        lines: dict[str, list[int]] = defaultdict(list)
        for number, line in enumerate(questions):
            for question in line:
                lines[question.key].append(number)
        missing = [len(line) for line in questions]
        done = advance or (lambda _: None)

        def note(key: str) -> None:
            for number in lines[key]:
                missing[number] -= 1
                if missing[number] == 0:
                    done(1)

        answers = self.answers.find(list(lines))
        for key in answers:
            note(key)
        self._add(Spending(num_kept=len(answers)))
        every = {question.key: question for line in questions for question in line}
        new = [question for key, question in every.items() if key not in answers]
        if new:
            answers |= self._call(new, note)
        return [[answers[question.key] for question in line] for line in questions]

    def _call(
        self, questions: Sequence[_Question], note: Callable[[str], None]
    ) -> dict[str, Answer]:
        """Call side by side; at the first failure start no more, and wait for those under way."""
        halt = threading.Event()
        answers: dict[str, Answer] = {}
        failure: PgraError | None = None
        with ThreadPoolExecutor(self._max_parallel_calls, "pgra-call") as pool:
            futures = {pool.submit(self._answer, q, halt): q.key for q in questions}
            try:
                for future in as_completed(futures):
                    try:
                        answers[futures[future]] = future.result()
                        note(futures[future])
                    except Halted:
                        continue
                    except PgraError as error:
                        failure = failure or error
            except KeyboardInterrupt:
                logger.warning("waiting for the calls under way: they are paid for")
                raise
            finally:
                halt.set()
        logger.info("%s: %s", self._endpoint.name, self.spending)
        if isinstance(failure, ModelError):
            raise ModelError(
                f"{failure}. {len(answers)} new answers are in {self.answers.path}: the same "
                "command goes on from there"
            ) from None
        if failure is not None:
            raise failure
        return answers

    def _answer(self, question: _Question, halt: threading.Event) -> Answer:
        """Answer one question, in a thread; the first that fails lets no other one start."""
        try:
            # Another process may have asked it meanwhile.
            kept = self.answers.find([question.key])
            if not kept:
                return self._pay_for(question, halt)
        except BaseException:
            halt.set()
            raise
        self._add(Spending(num_kept=1))
        return kept[question.key]

    def _pay_for(self, question: _Question, halt: threading.Event) -> Answer:
        """Ask, and keep the answer before anybody sees it."""
        reply = self._pace.patiently(
            lambda: self._endpoint.call(question.body), halt=halt, max_retries=self._max_retries
        )
        self._add(self._spent_on(question.prompt, reply))
        answer = self._judge(question, reply)
        self.answers.keep(question.key, answer, model=self._endpoint.model)
        return answer

    def _judge(self, question: _Question, reply: Reply) -> Answer:
        counts = reply.num_prompt_tokens, reply.num_new_tokens
        if question.word is None:
            return Answer(reply.text, *counts)
        try:
            return Answer("", *counts, word_chance(reply, question.prompt, question.word))
        except ModelError as error:
            raise ModelError(f"{self._endpoint.name} {error}") from None

    def _spent_on(self, prompt: str, reply: Reply) -> Spending:
        """Give what a call cost, in tokens; the endpoint's own counts where it gives them."""
        told = reply.num_prompt_tokens, reply.num_new_tokens
        counts = _or_counted(told, self._count, [prompt, reply.text])
        return Spending(
            1, num_prompt_tokens=counts[0], num_new_tokens=counts[1], is_estimated=None in told
        )

    def _counts(self, prompt: str, answer: Answer) -> list[int]:
        told = answer.num_prompt_tokens, answer.num_new_tokens
        return _or_counted(told, self._count, [prompt, answer.text])

    def _add(self, more: Spending) -> None:
        with self._lock:
            self._spent = self._spent.plus(more)


def _or_counted(told: Sequence[int | None], count: CountTokens, texts: Sequence[str]) -> list[int]:
    """Give counts as they were told, and our own where they were not."""
    if None not in told:
        return [number for number in told if number is not None]
    own = count(texts)
    return [mine if number is None else number for number, mine in zip(told, own, strict=True)]


def _chance(answer: Answer) -> float:
    assert answer.log_probability is not None  # the word is in the key
    return answer.log_probability


def _cut(text: str, stop: str) -> str:
    """Cut an answer where it stops: some servers write the stop string too, or pass over it."""
    return text.split(stop, 1)[0] if stop else text
