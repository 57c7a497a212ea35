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
from urllib.parse import urlsplit

from pgra.artifacts import at_home, digest
from pgra.core import Json
from pgra.errors import ConfigError, ModelError
from pgra.lm.base import (
    AUTO,
    CHAT,
    COMPLETIONS,
    REMOTE,
    Advance,
    CompleterArguments,
    Completion,
)
from pgra.lm.cache import AnswersCache, CachedAnswer
from pgra.lm.replies import (
    FILTERS,
    WRITE,
    Declined,
    Reply,
    continuation,
    error_message,
    read_reply,
    show_error,
    without_reasoning,
    word_chance,
)

logger = logging.getLogger(__name__)

KEY = "OPENAI_API_KEY"
SCORE, GENERATION = "score", "generation"
_WINDOW = 2048  # tokens of an endpoint's LM, where nobody says
_NO_KEY = "none"  # the client wants one; servers of one's own want none
_SHOWN = 120  # characters of what an endpoint said
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
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


class _Halted(BaseException):
    """A request that was skipped after another failed. Not an Exception, so it is not retried."""


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
        self._halt = threading.Event()
        self._client = _open_client(args, self._halt)
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
        """Return the same LM with its way chosen, by a few first calls where several are possible.

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
        self.answers.keep({key: CachedAnswer(json.dumps(vars(way)))}, model=self._model)
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
            counts = answer.num_prompt_tokens, answer.num_new_tokens
            done.append(Completion(text.split(stop, 1)[0], *counts))
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
    ) -> list[list[CachedAnswer]]:
        """Ask what is not on disk, equal prompts once; after a failure no other call starts."""
        lines = {tuple(question.key for question in line): line for line in questions}
        answers = self.answers.find([key for keys in lines for key in keys])
        new = [line for keys, line in lines.items() if not answers.keys() >= {*keys}]
        advance(len(lines) - len(new))
        before = Counter(self._spent)
        self._count(reused=len(answers))
        self._halt.clear()

        def ask(line: Sequence[_Question]) -> dict[str, CachedAnswer]:
            return {q.key: answers.get(q.key) or self._answer(q) for q in line}

        with ThreadPoolExecutor(self._args.max_parallel_calls, "pgra-call") as pool:
            futures = [pool.submit(ask, line) for line in new]
            try:
                for future in as_completed(futures):
                    answers = answers | future.result()
                    advance(1)
            except BaseException as error:
                self._halt.set()
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
        if not spent["calls"]:
            return
        logger.info("%s: %d calls, %d answers on disk", self.name, spent["calls"], spent["reused"])
        none = {reason: spent[reason] for reason in _REASONS if spent[reason]}
        if none:
            more = "; a model that reasons first needs more tokens (--max_new_tokens)"
            logger.warning(
                "%s: %d of %d answers are none (%s): they count as empty and are not kept, so that "
                "the next run asks again%s",
                self.name,
                sum(none.values()),
                spent["calls"] + spent["reused"],
                ", ".join(f"{count} {reason}" for reason, count in none.items()),
                more if "cut" in none else "",
            )

    def _answer(self, question: _Question) -> CachedAnswer:
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

    def _answer_of(self, reply: Reply, question: _Question) -> tuple[CachedAnswer, str]:
        """Return what is kept of a reply, and why it is no answer ("" where it is one)."""
        counts = reply.num_prompt_tokens, reply.num_new_tokens
        if question.word is not None:
            chance = word_chance(self.name, reply, question.prompt, question.word)
            return CachedAnswer("", *counts, chance), ""
        text, is_open = without_reasoning(reply.text)
        none = reply.none
        if not none and not text.strip():
            none = "cut" if is_open or reply.is_full else "empty"
        return CachedAnswer("" if none else text, *counts), none

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
        except openai.APIConnectionError as error:
            raise ModelError(
                f"{self.name} cannot be reached, or did not answer in --request_timeout "
                f"{self._args.request_timeout:g} s ({self._excerpt(str(error.__cause__ or error))})"
            ) from None
        except openai.APIStatusError as error:
            if error.code in FILTERS:
                return Reply("", 0, 0, none="filtered")
            if is_chat and error.status_code in (400, 422) and error.param in _OPTIONAL & {*sent}:
                self._unknown.add(str(error.param))
                if error.param == "temperature":
                    logger.warning(
                        "%s takes no temperature: it draws its answers, and another run may get "
                        "others",
                        self.name,
                    )
                return self._call(body)
            self._refuse(error, body)
        except openai.OpenAIError as error:
            raise ModelError(f"{self.name}: {self._excerpt(str(error))}") from None
        try:
            return read_reply(text, is_chat=is_chat)
        except ValueError:
            raise ModelError(
                f"{self.name} answered '{self._excerpt(text)}', which is no "
                f"{'chat completion' if is_chat else 'completion'}: is "
                "--base_url that of an OpenAI-compatible endpoint (it usually ends in /v1)?"
            ) from None

    def _refuse(self, error: Any, body: Mapping[str, Json]) -> NoReturn:
        status, headers = error.status_code, error.response.headers
        if status == 429 or status >= 500:
            way = f"try again later ({headers.get('retry-after', 'no time is given')})"
            if error.code == "insufficient_quota":
                way = "the account has no money left"
        elif status < 400:
            way = f"give {self._excerpt(headers.get('location', '?'))} as --base_url if it is right"
        elif status in (401, 403):
            way = f"see that {KEY} is set to a key that may use this model"
        elif status == 404:
            way = "see --base_url (it usually ends in /v1), the model's name, and --endpoint"
        elif "logprobs" in body:
            way = f"it may give no chances of tokens, or --lm_window is too large: {WRITE}"
        else:
            way = "see that --lm_window is no larger than the model's"
        said = self._excerpt(error_message(error.response.text))
        kind = Declined if status in _DECLINED else ModelError
        raise kind(f"{self.name} answered {status} '{said}': {way}") from None

    def _excerpt(self, text: str) -> str:
        """Shorten an endpoint's text to one line without the key."""
        key = self._client.api_key
        if key != _NO_KEY:
            text = text.replace(key, "***")
        text = " ".join(_KEY_LIKE.sub("***", text).split())
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _open_client(args: CompleterArguments, halt: threading.Event) -> Any:
    """Open OpenAI's client; no try starts once `halt` is set."""
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
        _check_address(base_url, with_key=bool(key))
    elif not key:
        raise ConfigError(
            f"--lm {args.lm} needs a key in the environment (export {KEY}=...), or --base_url URL "
            "of an endpoint that needs none"
        )

    def start(_: Any) -> None:
        if halt.is_set():
            raise _Halted

    http = openai.DefaultHttpxClient(
        follow_redirects=False,  # prompts go to the address that was given alone
        event_hooks={"request": [start], "response": [show_error]},
    )
    client = openai.OpenAI(
        api_key=key or _NO_KEY,
        base_url=base_url,
        timeout=args.request_timeout,
        max_retries=args.max_retries,
        http_client=http,
    )
    weakref.finalize(client, http.close)
    return client


def _check_address(base_url: str, *, with_key: bool) -> None:
    """Refuse an invalid address, or one with a secret, which files and messages would show."""
    if not re.fullmatch(r"https?://(\[[\da-f:]+\]|[^/:\s@?#]+)(:[1-9]\d*)?(/[^\s@?#]*)?", base_url):
        raise ConfigError(
            "--base_url must be http(s)://HOST[:PORT]/v1, without a user name, password or query, "
            f"which would be written down: give the key in {KEY}"
        )
    if with_key and base_url.startswith("http:") and urlsplit(base_url).hostname not in _LOOPBACK:
        logger.warning("the key goes to %s over plain http, for all on the way to read", base_url)


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
