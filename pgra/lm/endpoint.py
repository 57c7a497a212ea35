"""An LM at an OpenAI-compatible endpoint, of completions or of chats.

An answer is on disk (`pgra.lm.cache`) before it is used, so a stopped run pays again only for the
few calls in flight. A missing answer (filtered, refused, empty, or cut while the model reasons)
counts as empty, is reported, and is not kept: the next run asks again.
"""

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, Self

from pgra.artifacts import digest
from pgra.errors import ConfigError, ModelError
from pgra.lm.base import (
    AUTO,
    CHAT,
    COMPLETIONS,
    Advance,
    CompleterArguments,
    Completion,
    LanguageModel,
    add_up,
)
from pgra.lm.cache import AnswersCache
from pgra.lm.client import KEY, Client, Declined, Refused, call_all
from pgra.lm.names import REMOTE
from pgra.types import Fields, Json

logger = logging.getLogger(__name__)

SCORE = "score"
GENERATION = "generation"
_TIMEOUT = 120.0  # seconds without a byte
_WINDOW = 2048  # tokens of an endpoint's LM, where nobody says
_BYTES_PER_TOKEN = 3  # of UTF-8; English has 4 to 5, so that an estimate is rather too large
_INSTRUCTION = (
    "Continue the text below. Write only what comes next, in the manner of its examples.\n\n"
)
_TRIAL = ("Q: red\nA: warm\n\nQ: blue\nA:", " cold")  # a prompt and a word, to see what is offered
_ADVICE = f"see --base_url (it usually ends in /v1), --lm, --endpoint, --lm_window, {KEY}"
_FILTERS = ("content_filter", "content_policy_violation", "refusal", "safety", "sensitive")
# How models that reason first mark it: DeepSeek R1, Qwen3 and most others; Magistral; gpt-oss.
_OPENED = re.compile(r"<(?:think|thinking|reasoning)>|\[THINK\]|<\|channel\|>analysis<\|message\|>")
_CLOSED = re.compile(r"</(?:think|thinking|reasoning)>|\[/THINK\]|<\|channel\|>final<\|message\|>")


@dataclass(frozen=True)
class Endpoint:
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
    body: Fields
    prompt: str
    word: str | None = None


class EndpointLM(LanguageModel):
    """An LM at an endpoint; see `LanguageModel`. Messages begin with `name`.

    A server is asked for its first LM.
    """

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
        base_url = f"{args.server}/v1" if args.server else args.base_url
        self._client = Client(args.lm, base_url, _TIMEOUT, _ADVICE)
        self._base_url = str(self._client.openai.base_url).rstrip("/")
        self.name = self._client.name = f"{args.lm} at {self._base_url}"
        self._counter_identity, self._counter = _open_counter(args.lm_tokenizer)
        self._new: list[Completion] = []  # answers that were paid
        self._unknown: set[str] = set()  # parameters that this model does not take
        self._mode: Endpoint | None = None

    @cached_property
    def _model(self) -> str:
        if self._args.server is None:
            return self._args.lm.removeprefix(REMOTE)
        return str(self._client.first_model("/models")["id"])

    @property
    def mode(self) -> Endpoint:
        """How it is asked; chosen as by `resolve` for generated text if it was not."""
        if self._mode is None:
            self._mode = self._choose([GENERATION])
        return self._mode

    def resolve(self, decide_by: str | None) -> Self:
        """Resolve endpoint and scoring mode, by a few first calls where several are possible.

        The first that is offered wins: words are scored, or a label is written; for the latter,
        completions before chats. `decide_by` is one of a mode's; None chooses.

        Raises:
            ConfigError: If the arguments contradict each other.
            ModelError: If what is asked is not offered, or the endpoint cannot be reached.
        """
        self._mode = self._choose([decide_by] if decide_by else [SCORE, GENERATION])
        return self

    def _choose(self, decide_by: Sequence[str]) -> Endpoint:
        """Return the first mode that answers a one-token call; a single one is not tried.

        Chats give no scores.
        """
        named = self._args.endpoint
        modes = []
        for way in decide_by:
            for endpoint in (COMPLETIONS, CHAT) if named == AUTO else (named,):
                if (endpoint, way) != (CHAT, SCORE):
                    modes.append(Endpoint(endpoint, way))
        if not modes:
            raise ConfigError("decide_by score needs --endpoint completions: chats give no scores")
        if len(modes) == 1:
            return modes[0]
        prompt, word = _TRIAL
        for mode in modes:
            trial = self._question(mode, prompt, word if mode.decide_by == SCORE else None)
            try:
                if not self.answers.find([trial.key]):
                    self._answer(trial)
                break
            except Declined:
                if mode == modes[-1]:
                    raise
        return mode

    @property
    def fingerprint(self) -> Fields:
        """All that its answers depend on, besides the prompt; token counts decide its cut."""
        fields: dict[str, Json] = {
            "lm": f"{REMOTE}{self._model}",
            "base_url": self._base_url,
            "window": self.window + 1,
            "tokens": self._counter_identity,
        }
        if self.mode.endpoint == CHAT:
            fields |= {"endpoint": CHAT, "instruction": _INSTRUCTION}
        return fields

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of texts, (B,); in a chat including those of the instruction."""
        before = _INSTRUCTION if self.mode.endpoint == CHAT else ""
        return self._counter([before + text for text in texts])

    def describe_spending(self) -> dict[str, Json]:
        """Return how it was asked, and calls and tokens since the last call of this method.

        Tokens are None where the endpoint did not report those of every call.
        """
        new = self._new
        self._new = []
        return {
            **vars(self.mode),
            "calls": len(new),
            "unanswered": sum(map(_is_empty, new)),
            "prompt_tokens": add_up([answer.num_prompt_tokens for answer in new]),
            "completion_tokens": add_up([answer.num_new_tokens for answer in new]),
        }

    def complete(
        self, prompts: Sequence[str], *, max_new_tokens: int, stop: str, advance: Advance = int
    ) -> list[Completion]:
        """Continue each prompt greedily until `stop`.

        A chat is not sent `stop`: it could end a model's reasoning.

        Raises:
            ModelError: If a call failed for good; earlier answers are stored.
            ArtifactError: If answers cannot be stored.
        """
        is_chat = self.mode.endpoint == CHAT
        parameters: dict[str, Json] = {} if is_chat else {"stop": [stop]}
        parameters["max_tokens"] = max_new_tokens
        questions = [[self._question(self.mode, prompt, None, **parameters)] for prompt in prompts]
        completions = []
        for prompt, [answer] in zip(prompts, self._ask(questions, advance), strict=True):
            text = continuation(prompt, answer.text) if is_chat else answer.text
            # Some servers write the stop string too, or pass over it.
            completions.append(replace(answer, text=text.split(stop, 1)[0]))
        return completions

    def score(
        self, prompts: Sequence[str], words: Sequence[str], *, advance: Advance = int
    ) -> list[list[float]]:
        """Return the log-probability of all tokens of each word after each prompt, B lists of C.

        One call for each prompt and word, echoed. Raises as `complete`, also if the endpoint gives
        no log-probabilities.
        """
        mode = Endpoint(COMPLETIONS, SCORE)
        questions = [[self._question(mode, prompt, word) for word in words] for prompt in prompts]
        answers = self._ask(questions, advance)
        return [[answer.chance for answer in line] for line in answers]

    def _question(
        self, mode: Endpoint, prompt: str, word: str | None, **parameters: Json
    ) -> _Question:
        # Beside a word one token is written, and left out: several servers refuse to write none.
        body: dict[str, Json] = {"model": self._model, "temperature": 0, "max_tokens": 1}
        if mode.endpoint == CHAT:
            body["messages"] = [{"role": "user", "content": _INSTRUCTION + prompt}]
        else:
            body["prompt"] = prompt + (word or "")
        body |= parameters if word is None else {"echo": True, "logprobs": 1}
        # One text can be cut into a prompt and a word in several ways.
        key = digest({"base_url": self._base_url, "body": {**body, "word": word}})
        return _Question(key, body, prompt, word)

    def _ask(
        self, questions: Sequence[Sequence[_Question]], advance: Advance
    ) -> list[list[Completion]]:
        """Ask what is not on disk, equal prompts once; after a failure no other call starts."""

        def ask_new(known: Mapping[str, Completion], rows: list[int]) -> dict[str, Completion]:
            def ask(row: int) -> dict[str, Completion]:
                return {q.key: self._answer(q) for q in questions[row] if q.key not in known}

            parallel = self._args.max_parallel_calls
            try:
                replies = call_all(ask, rows, parallel=parallel, done=lambda _: advance(1))
            except ModelError as error:
                raise ModelError(
                    f"{error}. What was answered is in {self.answers.path}: the same command "
                    "continues from there"
                ) from None
            answers = dict(chain.from_iterable(reply.items() for reply in replies))
            self._new += answers.values()
            if num_empty := sum(map(_is_empty, answers.values())):
                logger.warning(
                    "%s: %d of %d answers are empty (filtered, refused, or in need of more "
                    "--max_new_tokens): they count as such, and the next run asks again",
                    self.name,
                    num_empty,
                    len(answers),
                )
            return answers

        lines = [tuple(question.key for question in line) for line in questions]
        return self.answers.find_or_ask(lines, ask_new, advance)

    def _answer(self, question: _Question) -> Completion:
        """Ask one question, and store its answer unless it is empty."""
        answer = self._call(question)
        if not _is_empty(answer):
            self.answers.keep({question.key: answer}, model=self._model)
        return answer

    def _call(self, question: _Question) -> Completion:
        is_chat = "messages" in question.body
        body = {name: value for name, value in question.body.items() if name not in self._unknown}
        if "max_tokens" not in body:
            body["max_completion_tokens"] = question.body["max_tokens"]
        try:
            reply = self._client.ask("/chat/completions" if is_chat else "/completions", body)
        except Refused as error:
            if error.code in _FILTERS:
                return Completion("", 0, 0)
            if is_chat and error.param in {"max_tokens", "temperature"} & {*body}:
                self._unknown.add(str(error.param))  # OpenAI's models that reason refuse both
                return self._call(question)
            raise
        with self._client.reading("a chat completion" if is_chat else "a completion"):
            return self._read(reply, question)

    def _read(self, reply: Mapping[str, Any], question: _Question) -> Completion:
        """Return what is stored of a reply; an answer that is filtered or refused has no text."""
        usage = reply.get("usage") or {}
        num_new_tokens = usage.get("completion_tokens")
        choice: Mapping[str, Any] = next(iter(reply["choices"]), {})
        chance = None
        text = ""
        if question.word is not None:
            chance = word_chance(choice, question.prompt, question.word, num_new_tokens)
            if chance is None:
                raise Declined(
                    f"{self.name} gives '{question.word}' no log-probability after an echoed "
                    "prompt: use --decide_by generation"
                )
        elif str(choice.get("finish_reason")).casefold() not in _FILTERS:
            message = choice.get("message") or {}
            if not message.get("refusal"):
                written = choice.get("text") or message.get("content") or ""
                # A server may cut a character in two.
                text = without_reasoning(written.encode(errors="replace").decode())
        text = text if text.strip() else ""
        return Completion(text, usage.get("prompt_tokens"), num_new_tokens, chance)


def _is_empty(answer: Completion) -> bool:
    return not answer.text and answer.log_probability is None


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


def word_chance(
    choice: Mapping[str, Any], prompt: str, word: str, num_written: int | None
) -> float | None:
    """Return the log-probability of all tokens of a word after a prompt; None if it is not given.

    `choice` echoes prompt and word, with `num_written` tokens more (None: one). The word is
    searched from the end: servers differ in what opens a prompt, and in how they spell tokens.
    """
    scored = choice.get("logprobs")
    if not scored or not choice["text"].startswith(prompt + word):
        return None
    tokens = scored.get("tokens") or ()
    chances = scored.get("token_logprobs") or ()
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
