"""An LM behind an OpenAI-compatible completions endpoint.

OpenAI's own client (`pip install 'pgra[openai]'`) speaks, and tries again what may pass. The key
comes from the environment alone; only the client has it, and it is struck out of all that an
endpoint says. What was answered once is never asked again, in this run or another
(`pgra.lm.cache`); an answer is on disk before anybody sees it. So a run that was stopped, by
whatever, goes on without paying twice, but for the few calls that were on their way.
"""

import json
import logging
import math
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from pgra.artifacts import digest
from pgra.core import Json
from pgra.errors import ConfigError, ModelError, PgraError
from pgra.lm.base import REMOTE, Advance, CompleterArguments, Completion
from pgra.lm.cache import Answer, AnswersCache

logger = logging.getLogger(__name__)

KEY = "OPENAI_API_KEY"
_WINDOW = 2048  # tokens of an endpoint's LM, where nobody says
_NO_KEY = "none"  # the client wants one; servers of one's own want none
_SHOWN = 200  # characters of what an endpoint said
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_MAY_PASS = (408, 409, 429)  # and all from 500: what the client tries again
_LONGEST_PAUSE = 120.0  # seconds; where an endpoint asks for more, the client gives up
_STRUCK = "***"
_KEY_LIKE = re.compile(r"\bsk-[\w*-]+")  # as endpoints quote keys, with their middle left out
_BYTES_PER_TOKEN = 3  # of UTF-8; English has 4 to 5, so that an estimate is rather too large
_INSTEAD = "use --decide_by generation"


@dataclass(frozen=True)
class Reply(Answer):
    """What an endpoint answered: its text stands behind the prompt where that was to be echoed.

    Attributes:
        tokens: Text of each token, where chances were asked and given.
        chances: Log-probability of each; None for a first one.
    """

    tokens: tuple[str, ...] = ()
    chances: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Spending:
    """What was asked and paid since an LM was opened.

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

    def __str__(self) -> str:
        """Word it for a log."""
        about = "about " if self.is_estimated else ""
        paid = "" if self.cost is None else f", cost {about}{self.cost:.4f}"
        return (
            f"{self.num_calls} calls ({self.num_kept} answers were on disk, {self.num_retries} "
            f"retries), {about}{self.num_prompt_tokens} prompt tokens and {about}"
            f"{self.num_new_tokens} new ones{paid}"
        )


@dataclass(frozen=True)
class _Question:
    """One call: its key on disk, what is sent, and the word at its prompt's end that is scored."""

    key: str
    body: Mapping[str, Json]
    prompt: str
    word: str | None


class Halted(BaseException):
    """A request that was not made, because another one failed for good.

    No Exception: the client would try again.
    """


class RemoteLM:
    """An LM behind an endpoint; see `LanguageModel`.

    Attributes:
        window: Most tokens of prompt and answer together.
        answers: What was answered so far.
        name: The words that messages begin with.
    """

    def __init__(self, args: CompleterArguments, answers: AnswersCache) -> None:
        """Prepare to ask, without asking.

        Args:
            args: Which LM, where, and how it is asked.
            answers: Where answers are kept.

        Raises:
            ConfigError: If the client is not installed, the address is none, or it is OpenAI's and
                there is no key.
            ModelError: If there is no tokenizer of that name.
        """
        self.answers = answers
        self.window = (args.lm_window or _WINDOW) - 1  # less the token that scoring has written
        self._args, self._model = args, args.lm.removeprefix(REMOTE)
        hooks = {"request": [self._start], "response": [_check_quota]}
        self._client = _open_client(args, self._model, hooks)
        self._base_url = str(self._client.base_url).rstrip("/")
        self.name = f"{args.lm} at {self._base_url}"
        self._counter_identity, self.count_tokens = open_counter(args.tokenizer)
        self._lock, self._halt = threading.Lock(), threading.Event()
        self._spent: Counter[str] = Counter()
        self._next_start = 0.0

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """All that its answers depend on, besides the prompt; what counts tokens cuts it."""
        return {
            "lm": self._args.lm,
            "base_url": self._base_url,
            "window": self.window + 1,
            "tokens": self._counter_identity,
        }

    @property
    def spending(self) -> Spending:
        """What was asked and paid so far."""
        counts, price = self._spent, self._args.price_per_million_input
        new_price, cost = self._args.price_per_million_output, None
        if price is not None and new_price is not None:
            paid = counts["num_prompt_tokens"] * price + counts["num_new_tokens"] * new_price
            cost = paid / 1e6
        given: dict[str, Any] = {**counts, "is_estimated": counts["is_estimated"] > 0}
        return Spending(**given, cost=cost)

    def _start(self, request: Any) -> None:
        """Let a request wait for its turn; a hook of the HTTP client, tries included.

        Raises:
            Halted: If none shall start any more.
        """
        gap = 60.0 / (self._args.requests_per_minute or math.inf)
        with self._lock:
            now = time.monotonic()
            start = max(now, self._next_start)
            self._next_start = start + gap
        if self._halt.wait(start - now):
            raise Halted
        self._count(num_retries=int(request.headers["x-stainless-retry-count"]) > 0)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def complete(
        self, prompts: Sequence[str], *, max_new_tokens: int, stop: str, advance: Advance = int
    ) -> list[Completion]:
        """Go on with each prompt greedily until `stop`.

        Raises:
            ModelError: If a call failed for good; all that was answered is kept.
            ArtifactError: If answers cannot be kept.
        """
        parameters = {"max_tokens": max_new_tokens, "stop": [stop]}
        questions = [self._question(prompt, parameters) for prompt in prompts]
        answers = self._ask([[question] for question in questions], advance)
        # Some servers write the stop string too, or pass over it.
        return [
            Completion(answer.text.split(stop, 1)[0], *self._counts(answer, prompt))
            for prompt, [answer] in zip(prompts, answers, strict=True)
        ]

    def score(
        self, prompts: Sequence[str], words: Sequence[str], *, advance: Advance = int
    ) -> list[list[float]]:
        """Return the log-probability of all tokens of each word after each prompt, B lists of C.

        One call for each prompt and word, which the endpoint echoes with the chance of each token.

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
        return [[float(answer.log_probability or 0.0) for answer in line] for line in answers]

    def _question(
        self, prompt: str, parameters: Mapping[str, Json], word: str | None = None
    ) -> _Question:
        whole = prompt + (word or "")
        body = {"model": self._model, "prompt": whole, "temperature": 0, **parameters}
        # One text can be cut into a prompt and a word in several ways.
        key = digest({"base_url": self._base_url, "body": {**body, "word": word}})
        return _Question(key, body, prompt, word)

    def _ask(
        self, questions: Sequence[Sequence[_Question]], advance: Advance
    ) -> list[list[Answer]]:
        """Ask what is not on disk, equal questions once; lines of answers as those of questions."""
        every = {question.key: question for line in questions for question in line}
        told = [number * len(questions) // max(1, len(every)) for number in range(len(every) + 1)]
        steps = (after - before for before, after in pairwise(told))  # of lines, as answers come

        def note() -> None:
            advance(next(steps))

        answers = self.answers.find(list(every))
        for _ in answers:
            note()
        self._count(num_kept=len(answers))
        new = [question for key, question in every.items() if key not in answers]
        if new:
            answers |= self._call_all(new, note)
        return [[answers[question.key] for question in line] for line in questions]

    def _call_all(
        self, questions: Sequence[_Question], note: Callable[[], None]
    ) -> dict[str, Answer]:
        """Call side by side; at the first failure start no more, and wait for those under way."""
        self._halt.clear()
        answers: dict[str, Answer] = {}
        failure: PgraError | None = None
        with ThreadPoolExecutor(self._args.max_parallel_calls, "pgra-call") as pool:
            futures = {pool.submit(self._answer, q): q.key for q in questions}
            try:
                for future in as_completed(futures):
                    try:
                        answers[futures[future]] = future.result()
                        note()
                    except Halted:
                        continue
                    except PgraError as error:
                        failure = failure or error
            except KeyboardInterrupt:
                logger.warning("waiting for the calls under way: they are paid for")
                raise
            finally:
                self._halt.set()
        logger.info("%s: %s", self.name, self.spending)
        if isinstance(failure, ModelError):
            raise ModelError(
                f"{failure}. {len(answers)} new answers are in {self.answers.path}: the same "
                "command goes on from there"
            ) from None
        if failure is not None:
            raise failure
        return answers

    def _answer(self, question: _Question) -> Answer:
        """Answer one question, in a thread; the first that fails lets no other one start."""
        if self._halt.is_set():
            raise Halted
        try:
            # Another process may have asked it meanwhile.
            kept = self.answers.find([question.key])
            if kept:
                self._count(num_kept=1)
                return kept[question.key]
            reply = self._call(question.body)
            counts = reply.num_prompt_tokens, reply.num_new_tokens
            prompt_tokens, new_tokens = self._counts(reply, question.prompt)
            self._count(
                num_calls=1,
                num_prompt_tokens=prompt_tokens,
                num_new_tokens=new_tokens,
                is_estimated=None in counts,
            )
            answer = Answer(reply.text, *counts)
            if question.word is not None:
                chance = word_chance(self.name, reply, question.prompt, question.word)
                answer = Answer("", *counts, chance)
            self.answers.keep({question.key: answer}, model=self._model)
        except BaseException:
            self._halt.set()
            raise
        return answer

    def _counts(self, answer: Answer, prompt: str) -> list[int]:
        """Return the endpoint's own counts, and ours where it gives none."""
        given = answer.num_prompt_tokens, answer.num_new_tokens
        own = self.count_tokens([prompt, answer.text]) if None in given else [0, 0]
        return [mine if count is None else count for count, mine in zip(given, own, strict=True)]

    def _count(self, **more: int) -> None:
        """Add to what was spent."""
        with self._lock:
            self._spent.update(more)

    def _call(self, body: Mapping[str, Json]) -> Reply:
        """Ask, as often as it takes and is allowed.

        Raises:
            ModelError: If it failed for good, or what came is no completion.
        """
        import openai

        tries = f"({self._args.max_retries + 1} tries)"
        try:
            raw = self._client.completions.with_raw_response.create(**body)
        except openai.APITimeoutError:
            raise ModelError(
                f"{self.name} did not answer in {self._args.request_timeout:g} s "
                f"(--request_timeout) {tries}"
            ) from None
        except openai.APIConnectionError as error:
            reason = self._excerpt(str(error.__cause__ or error))
            raise ModelError(f"{self.name} cannot be reached ({reason}) {tries}") from None
        except openai.APIStatusError as error:
            self._refuse(error, tries, is_echo="echo" in body)
        except openai.OpenAIError as error:
            raise ModelError(f"{self.name}: {self._excerpt(str(error))}") from None
        return self._read(raw.text)

    def _refuse(self, error: Any, tries: str, *, is_echo: bool) -> NoReturn:
        """Word a status that is no success, an openai.APIStatusError."""
        status = error.status_code
        said = error.message if isinstance(error.body, Mapping) else f"{error.body or ''}"
        said = self._excerpt(said.removeprefix(f"Error code: {status}").removeprefix(" - "))
        if error.code == "insufficient_quota":
            way = ": the account has no money left; pay, and run again"
        elif status in _MAY_PASS or status >= 500:
            wish = error.response.headers.get("retry-after", "")
            is_long = wish.isdecimal() and float(wish) > _LONGEST_PAUSE
            way = f", and asks to wait {wish} s" if is_long else f" {tries}"
        elif status in (401, 403):
            way = f": see that {KEY} is set to a key that may use this model"
        elif status == 404:
            way = (
                ": see --base_url (it usually ends in /v1) and the model's name; a model for chats "
                "alone has no completions"
            )
        elif is_echo:
            way = (
                ": it does not score given words, or the prompt is too long for it (--lm_window): "
                + _INSTEAD
            )
        else:
            way = ": see that --lm_window is no larger than the model's"
        raise ModelError(f"{self.name} answered {status} '{said}'{way}") from None

    def _read(self, text: str) -> Reply:
        """Read an answer; what is not needed of it may be missing."""
        try:
            reply = json.loads(text)
            choice = reply["choices"][0]
            usage, scored = reply.get("usage") or {}, choice.get("logprobs") or {}
            num_prompt_tokens, num_new_tokens = (
                count if isinstance(count := usage.get(name), int) and count >= 0 else None
                for name in ("prompt_tokens", "completion_tokens")
            )
            written, chances = choice["text"], scored.get("token_logprobs") or ()
            if not isinstance(written, str):
                raise TypeError
            return Reply(
                written,
                num_prompt_tokens,
                num_new_tokens,
                tokens=tuple(map(str, scored.get("tokens") or ())),
                chances=tuple(None if value is None else float(value) for value in chances),
            )
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise ModelError(
                f"{self.name} answered '{self._excerpt(text)}', which is no completion: is "
                "--base_url that of an OpenAI-compatible endpoint (it usually ends in /v1)?"
            ) from None

    def _excerpt(self, text: str) -> str:
        """Shorten what an endpoint said to one line without the key."""
        key = self._client.api_key
        if key != _NO_KEY:
            text = text.replace(key, _STRUCK)
        text = " ".join(_KEY_LIKE.sub(_STRUCK, text).split())
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _check_quota(response: Any) -> None:
    """Have the client try no more where an account has no money left; a hook of it."""
    if response.status_code == 429 and b"insufficient_quota" in response.read():
        response.headers["x-should-retry"] = "false"


def _open_client(args: CompleterArguments, model: str, hooks: Mapping[str, Any]) -> Any:
    try:
        import openai
    except ImportError:
        raise ConfigError(
            f"--lm {args.lm} needs OpenAI's client: pip install 'pgra[openai]'"
        ) from None
    if not model:
        raise ConfigError(f"--lm {REMOTE} names no model: write --lm {REMOTE}MODEL")
    key = os.environ.get(KEY, "").strip()
    if not all("!" <= char <= "~" for char in key):  # the client would quote what no header holds
        raise ConfigError(f"{KEY} holds characters that no key has, such as a space: set it again")
    base_url = args.base_url or os.environ.get("OPENAI_BASE_URL") or None
    if base_url is not None:
        _check_address(base_url, with_key=bool(key))
    elif not key:
        raise ConfigError(
            f"--lm {args.lm} needs a key in the environment (export {KEY}=...), or --base_url URL "
            "of an endpoint that needs none"
        )
    return openai.OpenAI(
        api_key=key or _NO_KEY,
        base_url=base_url,
        timeout=args.request_timeout,
        max_retries=args.max_retries,
        http_client=openai.DefaultHttpxClient(event_hooks=dict(hooks)),
    )


def _check_address(base_url: str, *, with_key: bool) -> None:
    """Refuse what is no address, or has a secret in it, which files and messages would show."""
    if {*"@?#"} & {*base_url}:
        raise ConfigError(
            "--base_url holds a user name, a password or a query, which would be written down: "
            f"give the address alone, and the key in {KEY}"
        )
    try:
        parts = urlsplit(base_url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_one = False
    if not is_one:
        raise ConfigError(f"--base_url '{base_url}' is no address: write http(s)://HOST[:PORT]/v1")
    if with_key and parts.scheme == "http" and parts.hostname not in _LOOPBACK:
        logger.warning("the key goes to %s over plain http, for all on the way to read", base_url)


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
        raise ModelError(
            f"{name} does not echo a prompt, so it cannot score given words: {_INSTEAD}"
        )
    total = len(reply.tokens)
    if not reply.chances or len(reply.chances) != total:
        raise ModelError(f"{name} gives no log-probabilities of a prompt's tokens: {_INSTEAD}")
    # The prompt's tokens end before what was written, or where all do.
    written = 1 if reply.num_new_tokens is None else reply.num_new_tokens
    for end in (total - written, total):
        start = _find_start(reply.tokens, word, end)
        if start is not None:
            chances = reply.chances[start:end]
            chance = sum(math.nan if value is None else value for value in chances)
            if not math.isfinite(chance):
                raise ModelError(f"{name} gives '{word}' no finite log-probability: {_INSTEAD}")
            return chance
    raise ModelError(
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


def estimate_tokens(texts: Sequence[str]) -> list[int]:
    """Estimate tokens without a tokenizer: a token for every 3 bytes of UTF-8, rounded up.

    It does not learn from what the endpoint counts: the prompts of a run that goes on must be those
    it began with, or they are paid for twice.
    """
    return [math.ceil(len(text.encode()) / _BYTES_PER_TOKEN) for text in texts]


def open_counter(name: str | None) -> tuple[str, Callable[[Sequence[str]], list[int]]]:
    """Open a tokenizer to count with, special tokens included: its identity, and what counts.

    Args:
        name: Hub id, folder or `bundled:NAME`, which needs no weights; None estimates.

    Raises:
        ModelError: If there is none.
    """
    if name is None:
        return "estimate", estimate_tokens
    from pgra.lm.load import ModelSource, find_model, load_tokenizer, tokenizer_identity

    folder = Path(name).expanduser()
    source = ModelSource(name, str(folder), None, "") if folder.is_dir() else find_model(name)
    tokenizer = load_tokenizer(source)

    def count(texts: Sequence[str]) -> list[int]:
        return (
            [len(ids) for ids in tokenizer(list(texts), verbose=False).input_ids] if texts else []
        )

    return tokenizer_identity(tokenizer), count
