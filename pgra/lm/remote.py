"""An LM at an OpenAI-compatible endpoint, of completions or of chats.

OpenAI's own client (`pip install 'pgra[openai]'`) retries, times out and pools connections. The key
comes from the environment alone; only the client has it, and it is removed from all that an
endpoint returns. An answer is on disk (`pgra.lm.cache`) before it is used, so a stopped run pays
again only for the few calls in flight.

A missing answer (filtered, refused, empty, or cut before it began) counts as empty, is reported,
and is not kept: the next run asks again.
"""

import copy
import json
import logging
import math
import os
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Self

from pgra.artifacts import at_home, digest
from pgra.core import Json
from pgra.data.read import parse_json
from pgra.errors import ConfigError, ModelError, cut
from pgra.lm.base import (
    AUTO,
    CHAT,
    COMPLETIONS,
    REMOTE,
    Advance,
    CompleterArguments,
    Completion,
)
from pgra.lm.cache import AnswersCache

logger = logging.getLogger(__name__)

KEY = "OPENAI_API_KEY"
SCORE, GENERATION = "score", "generation"
WRITE = "use --decide_by generation"
_MOST_RETRIES = 6  # after 429, 5xx, a time-out or a lost connection
_WINDOW = 2048  # tokens of an endpoint's LM, where nobody says
_NO_KEY = "none"  # the client wants one; servers of one's own want none
_SHOWN = 120  # characters of what an endpoint said
_KEY_LIKE = re.compile(r"\bsk-[\w*-]+")  # as endpoints quote keys, with their middle left out
_BYTES_PER_TOKEN = 3  # of UTF-8; English has 4 to 5, so that an estimate is rather too large
_INSTRUCTION = (
    "Continue the text below. Write only what comes next, in the manner of its examples.\n\n"
)
_TRIAL = ("Q: red\nA: warm\n\nQ: blue\nA:", " cold")  # a prompt and a word, to see what is offered
_DECLINED = (400, 403, 404, 405, 415, 422, 501)  # what is asked is not offered here
_OPTIONAL = {"max_tokens", "stop", "temperature"}  # that some chat models do not take
_ONE_TOKEN: Mapping[str, Json] = {"max_tokens": 1}
_REASONS = ("filtered", "refused", "empty", "cut")  # why an answer is none
# What providers call a filter, as the reason why an answer ended or as an error's code.
FILTERS = ("content_filter", "content_policy_violation", "refusal", "safety", "sensitive")
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


@dataclass(frozen=True)
class Way:
    """How an endpoint is asked, and how it decides between label words.

    In a chat the prompt is one user message, after a line that asks to continue it. `SCORE`
    compares log-probabilities of the words' tokens, echoed; `GENERATION` reads what is written.
    """

    endpoint: str
    decide_by: str


@dataclass(frozen=True)
class _Question:
    """One call: its key on disk, what is sent, and the word at its prompt's end that is scored."""

    key: str
    body: Mapping[str, Json]
    prompt: str
    word: str | None = None


class RemoteLM:
    """An LM at an endpoint; see `LanguageModel`. Messages begin with `name`."""

    def __init__(self, args: CompleterArguments, answers: AnswersCache) -> None:
        """Prepare to ask, without asking.

        Raises:
            ConfigError: If the client is not installed, the address is invalid, or OpenAI's key is
                missing.
            ModelError: If there is no tokenizer of that name.
        """
        self.answers = answers
        self.window = (args.lm_window or _WINDOW) - 1  # less the token that scoring has written
        self._args, self._model = args, args.lm.removeprefix(REMOTE)
        self._client = _open_client(args)
        self._base_url = str(self._client.base_url).rstrip("/")
        self.name = f"{args.lm} at {self._base_url}"
        self._counter_identity, self._counter = open_counter(args.tokenizer)
        self._lock = threading.Lock()
        self._spent: Counter[str] = Counter()
        self._unknown: set[str] = set()  # parameters that this model does not take
        self._way: Way | None = None

    @property
    def way(self) -> Way:
        """How it is asked; chosen as by `settle` for generated text if it was not."""
        if self._way is None:
            self._way = self._choose([GENERATION])
        return self._way

    def settle(self, decide_by: str | None) -> Self:
        """Resolve endpoint and scoring mode, by a few first calls where several are possible.

        The first that is offered wins: words are scored, or a label is written; for the latter,
        completions before chats. `decide_by` is one of a way's; None chooses.

        Raises:
            ConfigError: If the arguments contradict each other.
            ModelError: If what is asked is not offered, or the endpoint cannot be reached.
        """
        settled = copy.copy(self)
        settled._way = self._choose([decide_by] if decide_by else [SCORE, GENERATION])
        return settled

    def _choose(self, asked: Sequence[str]) -> Way:
        """Return and keep the first way that a one-token call finds; a single way is not tried."""
        named = self._args.endpoint
        ends = (COMPLETIONS, CHAT) if named == AUTO else (named,)
        ways = [Way(end, how) for how in asked for end in ends if (end, how) != (CHAT, SCORE)]
        if not ways:
            raise ConfigError(
                "decide_by score needs a prompt's chances, and chats give none: leave --endpoint "
                f"out, or {WRITE}"
            )
        if len(ways) == 1:
            return ways[0]
        place = {"base_url": self._base_url, "model": self._model}
        key = digest({**place, "ways": [vars(way) for way in ways]})
        if kept := self.answers.find([key]).get(key):
            return Way(**json.loads(kept.text))
        prompt, word = _TRIAL
        for way in ways:
            question = self._question(way, prompt, word if way.decide_by == SCORE else None)
            try:
                self._answer_of(self._call(question.body), question)
                break
            except Declined:
                if way == ways[-1]:
                    raise
        self.answers.keep({key: Completion(json.dumps(vars(way)))}, model=self._model)
        logger.info("%s is asked by %s, labels by %s", self.name, way.endpoint, way.decide_by)
        return way

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """All that its answers depend on, besides the prompt; token counts decide its cut."""
        endpoint = self.way.endpoint if self._args.endpoint == AUTO else self._args.endpoint
        return {
            "lm": self._args.lm,
            "base_url": self._base_url,
            "window": self.window + 1,
            "tokens": self._counter_identity,
            **({"endpoint": CHAT, "instruction": _INSTRUCTION} if endpoint == CHAT else {}),
        }

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of texts, (B,); in a chat including those of the instruction."""
        is_chat = self._args.endpoint == CHAT or (self._way and self._way.endpoint == CHAT)
        return self._counter([_INSTRUCTION + text for text in texts] if is_chat else texts)

    def describe_spending(self) -> dict[str, Json]:
        """Return how it was asked, and calls and tokens since the last call of this method.

        Tokens are None where the endpoint did not report those of every call.
        """
        with self._lock:
            spent = Counter(self._spent)
            self._spent.clear()
        tokens = ("prompt_tokens", "completion_tokens")
        return {
            **vars(self.way),
            **{name: spent[name] for name in ("calls", "reused")},
            **{name: None if spent["uncounted"] else spent[name] for name in tokens},
            "unanswered": sum(spent[reason] for reason in _REASONS),
        }

    def close(self) -> None:
        self._client.close()

    def complete(
        self, prompts: Sequence[str], *, max_new_tokens: int, stop: str, advance: Advance = int
    ) -> list[Completion]:
        """Continue each prompt greedily until `stop`.

        A chat is not sent `stop`: it could end a model's reasoning.

        Raises:
            ModelError: If a call failed for good; earlier answers are kept.
            ArtifactError: If answers cannot be kept.
        """
        way = self.way
        parameters: dict[str, Json] = {"max_tokens": max_new_tokens}
        if way.endpoint == COMPLETIONS:
            parameters["stop"] = [stop]
        questions = [self._question(way, prompt, parameters=parameters) for prompt in prompts]
        answers = self._ask([[question] for question in questions], advance)
        done = []
        for prompt, [answer] in zip(prompts, answers, strict=True):
            text = continuation(prompt, answer.text) if way.endpoint == CHAT else answer.text
            # Some servers write the stop string too, or pass over it.
            done.append(replace(answer, text=text.split(stop, 1)[0]))
        return done

    def score(
        self, prompts: Sequence[str], words: Sequence[str], *, advance: Advance = int
    ) -> list[list[float]]:
        """Return the log-probability of all tokens of each word after each prompt, B lists of C.

        One call for each prompt and word, echoed. Raises as `complete`, also if the endpoint gives
        no log-probabilities.
        """
        way = Way(COMPLETIONS, SCORE)
        questions = [[self._question(way, prompt, word) for word in words] for prompt in prompts]
        answers = self._ask(questions, advance)
        return [[float(answer.log_probability or 0.0) for answer in line] for line in answers]

    def _question(
        self,
        way: Way,
        prompt: str,
        word: str | None = None,
        *,
        parameters: Mapping[str, Json] = _ONE_TOKEN,
    ) -> _Question:
        if word is not None:
            # One token is written, and left out: several servers refuse to write none.
            parameters = {"max_tokens": 1, "echo": True, "logprobs": 1}
        whole = prompt + (word or "")
        shown: dict[str, Json] = {"prompt": whole}
        if way.endpoint == CHAT:
            shown = {"messages": [{"role": "user", "content": _INSTRUCTION + whole}]}
        body = {"model": self._model, **shown, "temperature": 0, **parameters}
        # One text can be cut into a prompt and a word in several ways.
        key = digest({"base_url": self._base_url, "body": {**body, "word": word}})
        return _Question(key, body, prompt, word)

    def _ask(
        self, questions: Sequence[Sequence[_Question]], advance: Advance
    ) -> list[list[Completion]]:
        """Ask what is not on disk, equal prompts once; after a failure no other call starts."""
        lines = {tuple(question.key for question in line): line for line in questions}
        answers = self.answers.find([key for keys in lines for key in keys])
        new = [line for keys, line in lines.items() if not answers.keys() >= {*keys}]
        advance(len(lines) - len(new))
        before = Counter(self._spent)
        self._count(reused=len(answers))

        def ask(line: Sequence[_Question]) -> dict[str, Completion]:
            return {q.key: answers.get(q.key) or self._answer(q) for q in line}

        with ThreadPoolExecutor(self._args.max_parallel_calls, "pgra-call") as pool:
            futures = [pool.submit(ask, line) for line in new]
            try:
                for future in as_completed(futures):
                    answers = answers | future.result()
                    advance(1)
            except BaseException as error:
                pool.shutdown(wait=False, cancel_futures=True)
                if not isinstance(error, ModelError):
                    raise
                raise ModelError(
                    f"{error}. What was answered is in {self.answers.path}: the same command "
                    "continues from there"
                ) from None
        self._report(self._spent - before)
        return [[answers[question.key] for question in line] for line in questions]

    def _report(self, spent: Mapping[str, int]) -> None:
        none = {reason: spent[reason] for reason in _REASONS if spent[reason]}
        if none:
            logger.warning(
                "%s: %d of %d answers are none (%s): they count as empty and are not kept, so that "
                "the next run asks again; one that is cut needs more tokens (--max_new_tokens)",
                self.name,
                sum(none.values()),
                spent["calls"] + spent["reused"],
                ", ".join(f"{count} {reason}" for reason, count in none.items()),
            )

    def _answer(self, question: _Question) -> Completion:
        """Ask one question, and keep its answer unless it is missing."""
        reply = self._call(question.body)
        answer, none = self._answer_of(reply, question)
        tokens = reply.num_prompt_tokens, reply.num_new_tokens
        self._count(calls=1, uncounted=int(None in tokens))
        self._count(prompt_tokens=tokens[0] or 0, completion_tokens=tokens[1] or 0)
        if none == "cut" and not reply.is_full and "stop" in question.body:
            # The stop string ended a reasoning block.
            body = {name: value for name, value in question.body.items() if name != "stop"}
            return self._answer(replace(question, body=body))
        if none:
            self._count(**{none: 1})
        else:
            self.answers.keep({question.key: answer}, model=self._model)
        return answer

    def _answer_of(self, reply: Reply, question: _Question) -> tuple[Completion, str]:
        """Return what is kept of a reply, and why it is no answer ("" where it is one)."""
        counts = reply.num_prompt_tokens, reply.num_new_tokens
        if question.word is not None:
            chance = word_chance(self.name, reply, question.prompt, question.word)
            return Completion("", *counts, chance), ""
        text, is_open = without_reasoning(reply.text)
        none = reply.none
        if not none and not text.strip():
            none = "cut" if is_open or reply.is_full else "empty"
        return Completion("" if none else text, *counts), none

    def _count(self, **more: int) -> None:
        with self._lock:
            self._spent.update(more)

    def _call(self, body: Mapping[str, Json]) -> Reply:
        import openai

        is_chat = "messages" in body
        api = self._client.chat.completions if is_chat else self._client.completions
        sent = {name: value for name, value in body.items() if name not in self._unknown}
        if "max_tokens" not in sent:
            sent["max_completion_tokens"] = body["max_tokens"]
        try:
            text = api.with_raw_response.create(**sent).text
        except openai.APIStatusError as error:
            if error.code in FILTERS:
                return Reply("", 0, 0, none="filtered")
            if is_chat and error.status_code in (400, 422) and error.param in _OPTIONAL & {*sent}:
                self._unknown.add(str(error.param))
                logger.warning("%s takes no %s: it is asked without", self.name, error.param)
                return self._call(body)
            self._refuse(error)
        except openai.OpenAIError as error:
            raise ModelError(
                f"{self.name} cannot be reached, or did not answer in --request_timeout "
                f"{self._args.request_timeout:g} s ({self._excerpt(str(error.__cause__ or error))})"
            ) from None
        try:
            return read_reply(text, is_chat=is_chat)
        except ValueError:
            raise ModelError(
                f"{self.name} answered '{self._excerpt(text)}', which is no "
                f"{'chat completion' if is_chat else 'completion'}: is "
                "--base_url that of an OpenAI-compatible endpoint (it usually ends in /v1)?"
            ) from None

    def _refuse(self, error: Any) -> NoReturn:
        status = error.status_code
        way = f"see --base_url (it usually ends in /v1), --lm, --endpoint, --lm_window and {KEY}"
        if status == 429 or status >= 500:
            way = "try again later"
        reason = self._excerpt(error_message(error.response.text))
        kind = Declined if status in _DECLINED else ModelError
        raise kind(f"{self.name} answered {status} '{reason}': {way}") from None

    def _excerpt(self, text: str) -> str:
        """Shorten an endpoint's text to one line without the key."""
        if (key := self._client.api_key) != _NO_KEY:
            text = text.replace(key, "***")
        return cut(" ".join(_KEY_LIKE.sub("***", text).split()), _SHOWN)


def _open_client(args: CompleterArguments) -> Any:
    try:
        import openai
    except ImportError:
        raise ConfigError(
            f"--lm {args.lm} needs OpenAI's client: pip install 'pgra[openai]'"
        ) from None
    if args.lm == REMOTE:
        raise ConfigError(f"--lm {REMOTE} names no model: write --lm {REMOTE}MODEL")
    key = os.environ.get(KEY, "").strip()
    if not all("!" <= char <= "~" for char in key):  # the client would quote what no header holds
        raise ConfigError(f"{KEY} holds characters that no key has, such as a space: set it again")
    base_url = args.base_url or os.environ.get("OPENAI_BASE_URL") or None
    if base_url is not None:
        _check_address(base_url)
        if key and re.match(r"http://(?!localhost|127\.0\.0\.1|\[::1\])", base_url):
            logger.warning("the key goes to %s unencrypted", base_url)
    elif not key:
        raise ConfigError(
            f"--lm {args.lm} needs a key in the environment (export {KEY}=...), or --base_url URL "
            "of an endpoint that needs none"
        )

    http = openai.DefaultHttpxClient(
        follow_redirects=False,  # prompts go to the address that was given alone
        event_hooks={"response": [show_error]},
    )
    client = openai.OpenAI(
        api_key=key or _NO_KEY,
        base_url=base_url,
        timeout=args.request_timeout,
        max_retries=_MOST_RETRIES,
        http_client=http,
    )
    weakref.finalize(client, http.close)
    return client


def _check_address(base_url: str) -> None:
    """Refuse an invalid address, or one with a secret, which files and messages would show."""
    if not re.fullmatch(r"https?://(\[[\da-f:]+\]|[^/:\s@?#]+)(:[1-9]\d*)?(/[^\s@?#]*)?", base_url):
        raise ConfigError(
            "--base_url must be http(s)://HOST[:PORT]/v1, without a user name, password or query, "
            f"which would be written down: give the key in {KEY}"
        )


def estimate_tokens(texts: Sequence[str]) -> list[int]:
    """Estimate tokens without a tokenizer: one for every 3 bytes of UTF-8, rounded up.

    It does not learn from an endpoint's counts: a resumed run must send the same prompts, or pay
    twice.
    """
    return [math.ceil(len(text.encode()) / _BYTES_PER_TOKEN) for text in texts]


def open_counter(name: str | None) -> tuple[str, Callable[[Sequence[str]], list[int]]]:
    """Return a tokenizer's identity and its counting function, special tokens included.

    `name` is a hub id, folder or `bundled:NAME`, without need of weights; None estimates.
    """
    if name is None:
        return "estimate", estimate_tokens
    from pgra.lm.load import ModelSource, find_model, read_tokenizer, tokenizer_identity

    folder = at_home(name)
    source = ModelSource(name, str(folder), None, "") if folder.is_dir() else find_model(name)
    tokenizer = read_tokenizer(source)

    def count(texts: Sequence[str]) -> list[int]:
        return (
            [len(ids) for ids in tokenizer(list(texts), verbose=False).input_ids] if texts else []
        )

    return tokenizer_identity(tokenizer), count


# What endpoints reply. They differ in how they spell tokens, where they put an error, and how they
# mark a missing answer.


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
            chances=tuple(None if value is None else float(value) for value in chances),
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
