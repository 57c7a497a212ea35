"""An LM at an OpenAI-compatible endpoint, of completions or of chats.

OpenAI's own client (the extra `openai`) retries, times out and pools connections. The key
comes from the environment alone; only the client has it, and it is removed from all that an
endpoint returns. An answer is on disk (`pgra.lm.cache`) before it is used, so a stopped run pays
again only for the few calls in flight.

A missing answer (filtered, refused, empty, or cut while the model reasons) counts as empty, is
reported, and is not kept: the next run asks again.
"""

import base64
import contextlib
import copy
import json
import logging
import math
import os
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from pgra.arrays import Scores
from pgra.artifacts import digest
from pgra.errors import ConfigError, ModelError, cut, show
from pgra.lm.base import (
    AUTO,
    CHAT,
    COMPLETIONS,
    REMOTE,
    Advance,
    CompleterArguments,
    Completion,
    Engine,
    LMArguments,
)
from pgra.lm.cache import AnswersCache
from pgra.types import Json

logger = logging.getLogger(__name__)

KEY = "OPENAI_API_KEY"
SCORE = "score"
GENERATION = "generation"
_MOST_RETRIES = 6  # after 429, 5xx, a time-out or a lost connection
_TIMEOUT = 120.0  # seconds without a byte
_STATES_TIMEOUT = 900.0  # a call waits for those before it: asked again, it would be read twice
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
_FILTERS = ("content_filter", "content_policy_violation", "refusal", "safety", "sensitive")
# How models that reason first mark it: DeepSeek R1, Qwen3 and most others; Magistral; gpt-oss.
_OPENED = re.compile(r"<(?:think|thinking|reasoning)>|\[THINK\]|<\|channel\|>analysis<\|message\|>")
_CLOSED = re.compile(r"</(?:think|thinking|reasoning)>|\[/THINK\]|<\|channel\|>final<\|message\|>")


class Declined(ModelError):
    """An endpoint does not support what it was asked."""


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
        self._args = args
        given = f"{args.server}/v1" if args.server else args.base_url
        self._client = _open_client(args.lm, given)
        self._base_url = str(self._client.base_url).rstrip("/")
        self.name = f"{args.lm} at {self._base_url}"
        self._counter_identity, self._counter = _open_counter(args.lm_tokenizer)
        self._spent: Counter[str] = Counter()
        self._unknown: set[str] = set()  # parameters that this model does not take
        self._way: Way | None = None

    @cached_property
    def _model(self) -> str:
        """The model's name there; a server is asked for that of its first."""
        if self._args.server is None:
            return self._args.lm.removeprefix(REMOTE)
        return StateServer(self._args).model

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
            raise ConfigError("decide_by score needs --endpoint completions: chats give no scores")
        if len(ways) == 1:
            return ways[0]
        place = {"base_url": self._base_url, "model": self._model}
        key = digest({**place, "ways": [vars(way) for way in ways]})
        if kept := self.answers.find([key]).get(key):
            return Way(**json.loads(kept.text))
        prompt, word = _TRIAL
        for way in ways:
            try:
                self._call(self._question(way, prompt, word if way.decide_by == SCORE else None))
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
        is_chat = self.way.endpoint == CHAT
        return {
            "lm": f"{REMOTE}{self._model}",
            "base_url": self._base_url,
            "window": self.window + 1,
            "tokens": self._counter_identity,
            **({"endpoint": CHAT, "instruction": _INSTRUCTION} if is_chat else {}),
        }

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of texts, (B,); in a chat including those of the instruction."""
        before = _INSTRUCTION if self.way.endpoint == CHAT else ""
        return self._counter([before + text for text in texts])

    def describe_spending(self) -> dict[str, Json]:
        """Return how it was asked, and calls and tokens since the last call of this method.

        Tokens are None where the endpoint did not report those of every call.
        """
        spent = Counter(self._spent)
        self._spent.clear()
        tokens = ("prompt_tokens", "completion_tokens")
        return {
            **vars(self.way),
            **{name: spent[name] for name in ("calls", "unanswered")},
            **{name: None if spent["uncounted"] else spent[name] for name in tokens},
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
        how: dict[str, Json] = {} if way.endpoint == CHAT else {"stop": [stop]}
        how["max_tokens"] = max_new_tokens
        questions = [[self._question(way, prompt, None, **how)] for prompt in prompts]
        done = []
        for prompt, [answer] in zip(prompts, self._ask(questions, advance), strict=True):
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
        return [[answer.chance for answer in line] for line in answers]

    def _question(
        self, way: Way, prompt: str, word: str | None = None, **parameters: Json
    ) -> _Question:
        if word is not None:
            parameters = {"echo": True, "logprobs": 1}
        shown: dict[str, Json] = {"prompt": prompt + (word or "")}
        if way.endpoint == CHAT:
            shown = {"messages": [{"role": "user", "content": _INSTRUCTION + prompt}]}
        # Beside a word one token is written, and left out: several servers refuse to write none.
        body = {"model": self._model, **shown, "temperature": 0, "max_tokens": 1, **parameters}
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

        def ask(line: Sequence[_Question]) -> dict[str, Completion]:
            return {q.key: self._answer(q) for q in line if q.key not in answers}

        asked = list[Completion]()
        with ThreadPoolExecutor(self._args.max_parallel_calls, "pgra-call") as pool:
            futures = [pool.submit(ask, line) for line in new]
            try:
                for future in as_completed(futures):
                    answers = answers | future.result()
                    asked += future.result().values()
                    advance(1)
            except BaseException as error:
                pool.shutdown(wait=False, cancel_futures=True)
                if not isinstance(error, ModelError):
                    raise
                raise ModelError(
                    f"{error}. What was answered is in {self.answers.path}: the same command "
                    "continues from there"
                ) from None
        self._count(asked)
        return [[answers[question.key] for question in line] for line in questions]

    def _count(self, answers: Sequence[Completion]) -> None:
        """Count what was paid, and report the answers that are none."""
        for answer in answers:
            tokens = answer.num_prompt_tokens, answer.num_new_tokens
            self._spent.update(calls=1, unanswered=_is_none(answer), uncounted=None in tokens)
            self._spent.update(prompt_tokens=tokens[0] or 0, completion_tokens=tokens[1] or 0)
        if num_none := sum(map(_is_none, answers)):
            logger.warning(
                "%s: %d of %d answers are none (filtered, refused, empty, or in need of more "
                "--max_new_tokens): they count as empty, and the next run asks again",
                *(self.name, num_none, len(answers)),
            )

    def _answer(self, question: _Question) -> Completion:
        """Ask one question, and keep its answer unless it is none."""
        answer = self._call(question)
        if not _is_none(answer):
            self.answers.keep({question.key: answer}, model=self._model)
        return answer

    def _call(self, question: _Question) -> Completion:
        import openai

        is_chat = "messages" in question.body
        api = self._client.chat.completions if is_chat else self._client.completions
        sent = {name: value for name, value in question.body.items() if name not in self._unknown}
        if "max_tokens" not in sent:
            sent["max_completion_tokens"] = question.body["max_tokens"]
        try:
            return self._read(api.create(**sent), question)
        except openai.APIStatusError as error:
            if error.code in _FILTERS:
                return Completion("", 0, 0)
            status = error.status_code
            if is_chat and error.param in {"max_tokens", "temperature"} & {*sent}:
                self._unknown.add(str(error.param))  # OpenAI's models that reason refuse both
                return self._call(question)
            way = f"see --base_url (it usually ends in /v1), --lm, --endpoint, --lm_window, {KEY}"
            if status == 429 or status >= 500:
                way = "try again later"
            kind = Declined if status in _DECLINED else ModelError
            reason = _excerpt(self._client, error.body)
            raise kind(f"{self.name} answered {status} '{reason}': {way}") from None
        except openai.OpenAIError as error:
            raise ModelError(
                f"{self.name} cannot be reached, or did not answer in {_TIMEOUT:g} s "
                f"({_excerpt(self._client, error.__cause__ or error)})"
            ) from None
        except (AttributeError, TypeError, ValueError) as error:
            raise ModelError(
                f"{self.name} answered what is no {'chat ' * is_chat}completion "
                f"({_excerpt(self._client, error)}): see --base_url (it usually ends in /v1)"
            ) from None

    def _read(self, reply: Any, question: _Question) -> Completion:
        """Return what is kept of a reply; an answer that is none has no text."""
        usage = reply.usage
        counts = (usage.prompt_tokens, usage.completion_tokens) if usage else (None, None)
        choice = next(iter(reply.choices), None)
        if question.word is not None:
            chance = word_chance(choice, question.prompt, question.word, counts[1])
            if chance is None:
                what = f"gives '{question.word}' no log-probability after an echoed prompt"
                raise Declined(f"{self.name} {what}: use --decide_by generation")
            return Completion("", counts[0], counts[1], chance)
        if choice is None or str(choice.finish_reason).casefold() in _FILTERS:
            return Completion("", *counts)
        is_chat = "messages" in question.body
        if is_chat and choice.message.refusal:
            return Completion("", *counts)
        text = choice.message.content if is_chat else choice.text
        # A server may cut a character in two.
        text = without_reasoning((text or "").encode(errors="replace").decode())
        return Completion(text if text.strip() else "", *counts)


def _excerpt(client: Any, text: object) -> str:
    """Shorten an endpoint's text to one line without the key."""
    text = str(text)
    if (key := client.api_key) != _NO_KEY:
        text = text.replace(key, "***")
    return cut(" ".join(_KEY_LIKE.sub("***", text).split()), _SHOWN)


def _is_none(answer: Completion) -> bool:
    return not answer.text and answer.log_probability is None


def _open_client(lm: str, base_url: str | None, timeout: float = _TIMEOUT) -> Any:
    import openai

    key = os.environ.get(KEY, "").strip()
    if not all("!" <= char <= "~" for char in key):  # the client would quote what no header holds
        raise ConfigError(f"{KEY} holds characters that no key has, such as a space: set it again")
    base_url = base_url or os.environ.get("OPENAI_BASE_URL") or None
    # A secret in the address would be written down and shown.
    address = r"https?://(\[[\da-f:]+\]|[^/:\s@?#]+)(:[1-9]\d*)?(/[^\s@?#]*)?"
    if base_url is not None and not re.fullmatch(address, base_url):
        raise ConfigError(
            f"{'--base_url' if lm.startswith(REMOTE) else '--lm'} must be http(s)://HOST[:PORT]/v1"
            f", without a user name, password or query: give the key in {KEY}"
        )
    if not key and base_url is None:
        raise ConfigError(
            f"--lm {lm} needs a key in the environment (export {KEY}=...), or --base_url URL of an "
            "endpoint that needs none"
        )
    http = openai.DefaultHttpxClient(
        follow_redirects=False,  # prompts go to the address that was given alone
        event_hooks={"response": [_mark_error]},
    )
    client = openai.OpenAI(
        api_key=key or _NO_KEY,
        base_url=base_url,
        timeout=timeout,
        max_retries=_MOST_RETRIES,
        http_client=http,
    )
    weakref.finalize(client, http.close)
    return client


def _mark_error(response: Any) -> None:
    """Give an error under status 200 the status of its code, so that the client retries it."""
    if response.status_code == 501:  # not implemented, nor will it be
        response.headers["x-should-retry"] = "false"
    response.read()
    try:
        reply = response.json()
    except RecursionError:  # too deep: let the client read it as text, as a page that is not JSON
        response.headers["content-type"] = "text/plain"
        return
    except ValueError:
        return
    with contextlib.suppress(AttributeError, TypeError):  # of what is not an object
        first: Any = next(iter(reply.get("choices") or ()), {})  # where some providers put it
        error = reply.get("error") or first.get("error")
        if error and response.is_success:
            code = str(error.get("code"))
            response.status_code = int(code) if re.fullmatch("[45][0-9]{2}", code) else 503


def _open_counter(name: str | None) -> tuple[str, Callable[[Sequence[str]], list[int]]]:
    """Return the identity of what counts tokens, and its function, special tokens included.

    `name` is a tokenizer's. None estimates from bytes, and never learns from an endpoint's counts:
    a resumed run must send the same prompts, or pay twice.
    """
    if name is None:
        return "estimate", lambda texts: [-(-len(t.encode()) // _BYTES_PER_TOKEN) for t in texts]
    from pgra.lm.load import find_model, read_tokenizer

    source = find_model(name)
    tokenizer = read_tokenizer(source)
    return source.identity, lambda texts: [
        len(tokenizer(text, verbose=False).input_ids) for text in texts
    ]


def without_reasoning(text: str) -> str:
    """Return the text after a model's reasoning; where that is not closed, the text before it.

    Where the prompt opens the block, the text holds its end alone.
    """
    if closed := [*_CLOSED.finditer(text)]:
        text = text[closed[-1].end() :]
    return _OPENED.split(text)[0]


def word_chance(choice: Any, prompt: str, word: str, num_written: int | None) -> float | None:
    """Return the log-probability of all tokens of a word after a prompt; None if it is not given.

    `choice` echoes prompt and word, with `num_written` tokens more (None: one). The word is
    searched from the end: servers differ in what opens a prompt, and in how they spell tokens.
    """
    scored = choice.logprobs
    if not scored or not choice.text.startswith(prompt + word):
        return None
    tokens = scored.tokens or ()
    chances = scored.token_logprobs or ()
    end = len(tokens) - (1 if num_written is None else num_written)
    start = _find_start(tokens, word, end)
    if start is None or len(tokens) != len(chances):
        return None
    chance = sum(math.nan if value is None else value for value in chances[start:end])
    return chance if math.isfinite(chance) else None


def _find_start(tokens: Sequence[str], word: str, end: int) -> int | None:
    """Return the first token of a word that ends before `end`, its space aside, or None."""
    bare = word.lstrip()
    tail = ""
    for start in range(end - 1, -1, -1):
        tail = tokens[start] + tail
        has_space_before = start > 0 and tokens[start - 1] + tail == word
        if tail == word or (tail == bare and not has_space_before):
            return start
        if len(tail) > len(word):
            return None
    return None


def continuation(prompt: str, text: str) -> str:
    """Return what a chat's message adds to its prompt.

    Models like to repeat the end of the prompt: "A: Rome", "Label: Positive". Where the message
    begins with the end of the prompt's last line, from some word on, that is left out.
    """
    text = text.lstrip()
    words = prompt.rstrip().rpartition("\n")[2].split()
    for start in range(len(words)):
        end = " ".join(words[start:])
        if text.startswith(f"{end} "):
            return text[len(end) :]
    return text


# States of token ids, from a server that runs an LM.


# By the owner that /v1/models names: where it says more, where states are, how to start it.
_ENGINES = {
    "vllm": ("/version", "/v1/embeddings", "vllm serve MODEL --runner pooling --convert embed"),
    "llamacpp": ("/props", "/embedding", "llama-server -m FILE --embeddings --pooling last"),
    "sglang": ("/get_server_info", "/generate", "sglang with --return-hidden-states-mode last"),
}
_OTHER = ("", "/v1/embeddings", "one that gives its last token's state, such as vLLM or llama.cpp")
# What states depend on, where a server says it: kept of all that it says.
_TOLD = ("version", "build_info", "dtype", "quantization", "kv_cache_dtype", "ftype", "n_params")
_LENGTHS = ("max_model_len", "context_length", "n_ctx")  # the window's names


class StateServer(Engine):
    """A server of vLLM, SGLang or llama.cpp; it gives the states and scores of its first LM."""

    num_prompts = 8

    def __init__(self, args: LMArguments) -> None:
        """Ask a server which LM it has; ModelError if it cannot be reached or has none."""
        self.name = args.lm
        self.parallel = args.max_parallel_calls
        self.about = {}
        self._client = _open_client(args.lm, args.server, _STATES_TIMEOUT)
        self.look()

    def look(self) -> None:
        listed = self._ask("/v1/models")
        with self._reading("the LM it serves"):
            served: dict[str, Any] = {**listed["data"][0]}
            self.model, engine = str(served["id"]), str(served.get("owned_by"))
            served |= served.get("meta") or {}
            self._where = _ENGINES.get(engine, _OTHER)
            if self._where[0]:
                more = self._ask(self._where[0])
                served |= {**more, **more.get("default_generation_settings", {})}
            lengths = [int(served[name]) for name in _LENGTHS if served.get(name)]
        told = {name: served[name] for name in _TOLD if served.get(name) is not None}
        about = {"engine": engine, "model": self.model, **told}
        if self.about not in ({}, about):
            was = (
                f"{show(about)}, was {show(self.about)}: start that one again, and the same command"
            )
            raise ModelError(f"{self.name} is another LM than before: {was} continues")
        self.about, self.window = about, min(lengths, default=None)
        self.tokenizer = served.get("tokenizer_path") or served.get("root")

    def tokenize(self, text: str) -> list[int] | None:
        asked = {"model": self.model, "content": text, "prompt": text, "add_special_tokens": False}
        try:
            found = self._ask("/tokenize", asked)
        except Declined:
            return None
        return found.get("tokens") if isinstance(found, dict) else None

    def states(self, prompts: Sequence[Sequence[int]]) -> Scores:
        ids = [list(prompt) for prompt in prompts]
        path = self._where[1]
        body: dict[str, Json] = {"model": self.model, "input": ids, "encoding_format": "base64"}
        body["use_activation"] = False  # vLLM's word for normalising
        if path == "/embedding":
            body = {"content": ids, "embd_normalize": -1}
        elif path == "/generate":
            how: dict[str, Json] = {"max_new_tokens": 1, "temperature": 0}
            body = {"input_ids": ids, "sampling_params": how, "return_hidden_states": "last"}
        try:
            reply = self._ask(path, body)
        except Declined as error:
            raise ModelError(f"{error}: for states start {self._where[2]}") from None
        with self._reading(f"the states of {len(ids)} prompts"):
            items = reply["data"] if isinstance(reply, dict) else reply
            return np.stack([_read_state(item) for item in _in_order(items, len(ids))])

    def score(self, prompt: Sequence[int], words: Sequence[Sequence[int]]) -> list[float]:
        asked = [[*prompt, *word] for word in words]
        how = {"model": self.model, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
        reply = self._ask("/v1/completions", {**how, "prompt": asked})
        with self._reading("the log-probabilities of an echoed prompt"):
            scores = []
            choices = _in_order(reply["choices"], len(asked))
            for ids, choice in zip(asked, choices, strict=True):
                line = choice["logprobs"]["token_logprobs"]
                chances = line[len(prompt) : len(ids)]
                score = math.fsum(chances)
                is_whole = len(line) - len(ids) in (0, 1)  # one token is written after it
                if not (is_whole and chances and math.isfinite(score)):
                    raise ValueError(f"{len(line)} for {len(ids)} tokens, their sum is {score}")
                scores.append(score)
            return scores

    def _ask(self, path: str, body: Mapping[str, Json] | None = None) -> Any:
        import openai

        try:
            if body is None:
                return self._client.get(path, cast_to=object)
            return self._client.post(path, cast_to=object, body=body)
        except openai.APIStatusError as error:
            kind = Declined if error.status_code in _DECLINED else ModelError
            said = _excerpt(self._client, error.body)
            raise kind(f"{self.name} answered {error.status_code} to {path} '{said}'") from None
        except (openai.OpenAIError, ValueError) as error:
            said = _excerpt(self._client, error.__cause__ or error)
            raise ModelError(
                f"{self.name} cannot be reached, or did not answer {path} whole ({said}): see --lm."
                " What was read is kept: the same command continues"
            ) from None

    @contextlib.contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        try:
            yield
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            said = _excerpt(self._client, f"{type(error).__name__}: {error}")
            raise ModelError(f"{self.name} did not answer with {what} ({said})") from None


def _in_order(items: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """Return a reply's items by their `index`, or as they come; an error if one is missing."""
    if len(items) != count:
        raise ValueError(f"there are {len(items)}")
    numbered = {item.get("index", number): item for number, item in enumerate(items)}
    return [numbered[number] for number in range(count)]


def _read_state(item: Mapping[str, Any]) -> Scores:
    """Return a state, (H,), in the form of OpenAI, llama.cpp or SGLang."""
    found = item["embedding"] if "embedding" in item else item["meta_info"]["hidden_states"]
    if isinstance(found, str):
        return np.frombuffer(base64.b64decode(found), "<f4")
    state: Scores = np.atleast_2d(np.asarray(found, np.float32))[-1]  # of all tokens, or the last
    return state
