"""An LM behind an OpenAI-compatible endpoint, of completions or of chats.

Servers differ in what they offer. `Way` says how one is asked: over which endpoint, and how it
decides between label words. Where nobody names it, a few first calls of one token tell.

OpenAI's own client (`pip install 'pgra[openai]'`) speaks, and tries again what may pass. The key
comes from the environment alone; only the client has it, and it is struck out of all that an
endpoint says. What was answered once is never asked again, in this run or another
(`pgra.lm.cache`); an answer is on disk before anybody sees it. So a run that was stopped, by
whatever, goes on without paying twice, but for the few calls that were on their way.
"""

import copy
import json
import logging
import math
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn, Self
from urllib.parse import urlsplit

from pgra.artifacts import at_home, digest
from pgra.core import Json
from pgra.data.read import longest_line, parse_json
from pgra.errors import ConfigError, ModelError, PgraError
from pgra.lm.base import (
    AUTO,
    CHAT,
    COMPLETIONS,
    REMOTE,
    Advance,
    CompleterArguments,
    Completion,
)
from pgra.lm.cache import Answer, AnswersCache

logger = logging.getLogger(__name__)

KEY = "OPENAI_API_KEY"
_WINDOW = 2048  # tokens of an endpoint's LM, where nobody says
_NO_KEY = "none"  # the client wants one; servers of one's own want none
_SHOWN = 120  # characters of what an endpoint said
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_MAY_PASS = (408, 409, 429)  # and all from 500: what the client tries again
_LONGEST_PAUSE = 120.0  # seconds; where an endpoint asks for more, the client gives up
_STRUCK = "***"
_KEY_LIKE = re.compile(r"\bsk-[\w*-]+")  # as endpoints quote keys, with their middle left out
_BYTES_PER_TOKEN = 3  # of UTF-8; English has 4 to 5, so that an estimate is rather too large
_INSTEAD = "use --decide_by first_token or generation"
_WRITE = "use --decide_by generation"
SCORE, FIRST_TOKEN, GENERATION = "score", "first_token", "generation"
_MOST_TOKENS = (20, 5)  # whose chances endpoints tell at most: of chats, of OpenAI's completions
_INSTRUCTION = (
    "Continue the text below. Write only what comes next, in the manner of its examples.\n\n"
)
_TRIAL = ("Q: red\nA: warm\n\nQ: blue\nA:", " cold")  # a prompt and a word, to see what is offered
_ABSENT = (404, 405, 501)  # there is no such endpoint, or it does not have this model
_DECLINED = (400, 403, 415, 422, *_ABSENT)  # what is asked is not offered; another way may be
_OPTIONAL = ("max_tokens", "stop", "temperature")  # that some chat models do not take
_CHOICE_RULE = 1
"""Raise it when ways are chosen otherwise, so that those chosen before are not taken up."""


@dataclass(frozen=True)
class Way:
    """How an endpoint is asked.

    Attributes:
        endpoint: `COMPLETIONS`, or `CHAT`: the prompt is then one message of a user, behind a line
            that asks to continue it.
        decide_by: How it decides between label words: `SCORE`, the chances of all tokens of each
            word, echoed; `FIRST_TOKEN`, the chances of the one token that is written; `GENERATION`,
            what is written.
        num_top: Tokens whose chances are asked for (`FIRST_TOKEN`).
    """

    endpoint: str
    decide_by: str
    num_top: int = 0

    def __str__(self) -> str:
        """Word it for a log."""
        how = {
            SCORE: "the chances of whole words",
            FIRST_TOKEN: f"the chances of a first token, of which it tells {self.num_top}",
            GENERATION: "what is written",
        }
        return f"{self.endpoint}, labels by {how[self.decide_by]}"


@dataclass(frozen=True)
class Reply(Answer):
    """What an endpoint answered: its text stands behind the prompt where that was to be echoed.

    Attributes:
        tokens: Text of each token, where chances were asked and given.
        chances: Log-probability of each; None for a first one.
        top: The likeliest first tokens of what was written with their log-probabilities, where
            these were asked and given.
        is_cut: Whether it ended for want of room.
    """

    tokens: tuple[str, ...] = ()
    chances: tuple[float | None, ...] = ()
    top: tuple[tuple[str, float], ...] = ()
    is_cut: bool = False


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

    def as_json(self) -> dict[str, Json]:
        """Return what `metrics.json` holds of it; reused are answers that were on disk."""
        return {
            "calls": self.num_calls,
            "reused": self.num_kept,
            "retries": self.num_retries,
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_new_tokens,
            "is_estimated": self.is_estimated,
            "cost": self.cost,
        }


@dataclass(frozen=True)
class _Question:
    """One call: its key on disk, what is sent, and the word at its prompt's end that is scored.

    With `is_first` it is the chances of the first token that are kept, not the text.
    """

    key: str
    body: Mapping[str, Json]
    prompt: str
    word: str | None
    is_first: bool


class _Declined(ModelError):
    """An endpoint does not do what it was asked to."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Halted(BaseException):
    """A request that was not made, because another one failed for good.

    No Exception: the client would try again.
    """


class TooLong(BaseException):
    """An answer without end. No Exception: the client would ask for it again."""


class Gate:
    """Lets tries start: so many at a time, fewer once they time out, and so many a minute.

    Attributes:
        limit: Tries that may be under way at a time.
        halt: Set where none shall start any more.
    """

    def __init__(self, limit: int, per_minute: float | None) -> None:
        self.limit, self.halt = limit, threading.Event()
        self._gap = 60.0 / (per_minute or math.inf)
        self._num_under_way, self._next_start, self._lowered = 0, 0.0, 0.0
        self._free = threading.Condition()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for a turn, and hold it until the block ends.

        Raises:
            Halted: If none shall start any more.
        """
        with self._free:
            while self._num_under_way >= self.limit and not self.halt.is_set():
                self._free.wait(0.1)
            self._num_under_way += 1
            now = time.monotonic()
            start = max(now, self._next_start)
            self._next_start = start + self._gap
        try:
            if self.halt.wait(start - now):
                raise Halted
            yield
        finally:
            with self._free:
                self._num_under_way -= 1
                self._free.notify()

    def lower(self, began: float) -> bool:
        """Halve the limit, as a try that began then timed out; say whether that changed it.

        Those that were under way together count as one.
        """
        with self._free:
            if self.limit == 1 or began < self._lowered:
                return False
            self.limit //= 2
            self._lowered = time.monotonic()
        return True


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
        self._gate = Gate(args.max_parallel_calls, args.requests_per_minute)
        self._client = _open_client(args, self._model, self._send)
        self._base_url = str(self._client.base_url).rstrip("/")
        self.name = f"{args.lm} at {self._base_url}"
        self._counter_identity, self._counter = open_counter(args.tokenizer)
        self._lock = threading.Lock()
        self._spent: Counter[str] = Counter()
        self._taken: Counter[str] = Counter()
        self._told: set[str] = set()  # what was told once, and is not again
        self._unknown: set[str] = set()  # parameters that this model does not take
        self._way: Way | None = None
        self._choices: dict[str, Answer] = {}
        self._choice: Mapping[str, Answer] = {}

    # How it is asked.

    @property
    def way(self) -> Way:
        """How it is asked; where nobody chose, as `settle` chooses for texts."""
        if self._way is None:
            self._way = self._choose((GENERATION,))
        return self._way

    def settle(
        self, decide_by: str | None, words: Sequence[str] = (), *, needs_chances: bool = False
    ) -> Self:
        """Return the same LM with its way chosen, by a few first calls where nobody names it.

        What they told is kept with the answers, so that it is not asked again. The first is taken
        that is offered: whole words are scored, first tokens are, a label is written; of each,
        completions before chats.

        Args:
            decide_by: One of a way's; None chooses.
            words: The label words.
            needs_chances: Whether a label that is written will not do.

        Raises:
            ConfigError: If the arguments contradict each other, or two words begin alike and
                `decide_by` is their first token.
            ModelError: If what is asked is not offered, or the endpoint cannot be reached.
        """
        every: Sequence[str] = (SCORE, FIRST_TOKEN, GENERATION)
        asked = every if decide_by is None else (decide_by,)
        if FIRST_TOKEN in asked and (alike := _begin_alike(words)):
            if decide_by is not None:
                raise ConfigError(
                    f"prompt words '{alike[0]}' and '{alike[1]}' begin alike, so their first token "
                    f"does not tell them apart: {_WRITE}, or choose other prompt_words"
                )
            asked = [how for how in asked if how != FIRST_TOKEN]
        if needs_chances:
            asked = [how for how in asked if how != GENERATION]
        settled = copy.copy(self)
        settled._way = settled._choose(asked)
        return settled

    def _choose(self, asked: Sequence[str]) -> Way:
        """Choose the first way that is offered; where there is but one, it is not tried."""
        named = self._args.endpoint
        ends = (COMPLETIONS, CHAT) if named == AUTO else (named,)
        ways = [
            Way(end, how, count)
            for how in asked
            for end in ends
            for count in (_MOST_TOKENS if how == FIRST_TOKEN else (0,))
            if (end, how) != (CHAT, SCORE)
        ]
        if not ways:
            raise ConfigError(
                "decide_by score needs a prompt's chances, and chats give none: leave --endpoint "
                f"out, or {_INSTEAD}"
            )
        if len(ways) == 1:
            return ways[0]
        fields = {"endpoint": named, "decide_by": list(asked), "rule": _CHOICE_RULE}
        place = {"base_url": self._base_url, "model": self._model}
        key = digest({**place, "choice": fields})
        kept = self._choices.get(key) or self.answers.find([key]).get(key)
        if kept:
            way, why = Way(**json.loads(kept.text)), ["as before"]
        else:
            way, why = self._try_ways(ways)
        self._choices[key] = Answer(json.dumps(vars(way)))  # on disk once it has worked
        self._choice = {key: self._choices[key]}
        if self._is_first(f"way {way}"):
            reason = f" ({'; '.join(why)})" if why else ""
            logger.info("%s is asked by %s%s", self.name, way, reason)
        return way

    def _try_ways(self, ways: Sequence[Way]) -> tuple[Way, list[str]]:
        """Find the first way that an endpoint offers, and why it is not one before."""
        self._gate.halt.clear()
        why: list[str] = []
        out: set[str | tuple[str, str]] = set()  # endpoints, and what they do not do
        failure: ModelError | None = None
        for way in ways:
            kind = (way.endpoint, way.decide_by)
            if out & {way.endpoint, kind}:
                continue
            if way == ways[-1] and way.decide_by == GENERATION:  # if it fails, its first call tells
                return way, why
            prompt, word = _TRIAL
            try:
                self._try(self._question(way, prompt, word if way.decide_by == SCORE else None))
            except _Declined as error:
                failure, is_absent = error, error.status in _ABSENT
                out |= {way.endpoint} if is_absent else set()
                reason = f"no {way.endpoint}: {error.status}" if is_absent else ""
            except _Useless as error:
                failure, reason = error, ""
                out.add(kind)
            else:
                return way, why
            reason = reason or f"{way.endpoint} not by {way.decide_by}"
            why += [reason] if reason not in why else []
        assert failure is not None
        raise ModelError(str(failure))

    def _try(self, question: _Question) -> None:
        """Ask once, to see whether it is answered; what is answered counts, and is not kept."""
        reply = self._call(question.body)
        self._pay(reply, question)
        self._answer_of(reply, question)

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """All that its answers depend on, besides the prompt; what counts tokens cuts it."""
        endpoint = self.way.endpoint if self._args.endpoint == AUTO else self._args.endpoint
        return {
            "lm": self._args.lm,
            "base_url": self._base_url,
            "window": self.window + 1,
            "tokens": self._counter_identity,
            # Of completions nothing, so that runs of before there were others stay what they are.
            **({"endpoint": CHAT, "instruction": _INSTRUCTION} if endpoint == CHAT else {}),
        }

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of texts, (B,): in a chat those of the line before them too."""
        is_chat = self._args.endpoint == CHAT or (self._way and self._way.endpoint == CHAT)
        return self._counter([_INSTRUCTION + text for text in texts] if is_chat else texts)

    @property
    def spending(self) -> Spending:
        """What was asked and paid so far."""
        return self._spending(self._spent)

    def describe_spending(self) -> dict[str, Json]:
        """Return how it was asked, and what was paid since this was last called, for a file."""
        with self._lock:
            more = self._spent - self._taken
            self._taken.update(more)
        way = {name: value for name, value in vars(self.way).items() if value}
        return {**way, **self._spending(more).as_json()}

    def _spending(self, counts: Counter[str]) -> Spending:
        price, cost = self._args.price_per_million_input, None
        new_price = self._args.price_per_million_output
        if price is not None and new_price is not None:
            paid = counts["num_prompt_tokens"] * price + counts["num_new_tokens"] * new_price
            cost = paid / 1e6
        given: dict[str, Any] = {**counts, "is_estimated": counts["is_estimated"] > 0}
        return Spending(**given, cost=cost)

    def _send(self, request: Any, send: Callable[[], Any]) -> Any:
        """Send a request of the HTTP client in its turn, each try of it.

        Raises:
            Halted: If none shall start any more.
        """
        with self._gate.turn():
            self._count(num_retries=int(request.headers["x-stainless-retry-count"]) > 0)
            began = time.monotonic()
            try:
                response = send()
            except Exception as error:
                # By its name: the client's HTTP library is not ours to choose.
                is_late = any(kind.__name__ == "TimeoutException" for kind in type(error).__mro__)
                if is_late and self._gate.lower(began) and self._is_first("late"):
                    logger.warning(
                        "%s: calls time out (--request_timeout %g): from now on %d are under way "
                        "at a time, not %d, and fewer if that is not enough",
                        self.name,
                        self._args.request_timeout,
                        self._gate.limit,
                        self._args.max_parallel_calls,
                    )
                raise
            # The client tries no more where an account has no money left.
            if response.status_code == 429 and b"insufficient_quota" in response.read():
                response.headers["x-should-retry"] = "false"
            return response

    def _is_first(self, what: str) -> bool:
        """Say whether something is to be told, which is told once."""
        with self._lock:
            is_first = what not in self._told
            self._told.add(what)
        return is_first

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
        way, parameters = self.way, {"max_tokens": max_new_tokens, "stop": [stop]}
        questions = [self._question(way, prompt, parameters=parameters) for prompt in prompts]
        answers = self._ask([[question] for question in questions], advance)
        done = []
        for prompt, [answer] in zip(prompts, answers, strict=True):
            text = _continuation(prompt, answer.text) if way.endpoint == CHAT else answer.text
            # Some servers write the stop string too, or pass over it.
            done.append(Completion(text.split(stop, 1)[0], *self._counts(answer, prompt)))
        return done

    def score(
        self, prompts: Sequence[str], words: Sequence[str], *, advance: Advance = int
    ) -> list[list[float]]:
        """Return the log-probability of all tokens of each word after each prompt, B lists of C.

        One call for each prompt and word, which the endpoint echoes with the chance of each token;
        by first tokens one for each prompt. There a word that is not among the tokens told has the
        least of their chances, for its own is no larger; where none is, all have -inf.

        Raises:
            ModelError: As `complete`; also if the endpoint gives no chances of given words.
            ArtifactError: If answers cannot be kept.
        """
        way = self._way or Way(COMPLETIONS, SCORE)
        if way.decide_by == FIRST_TOKEN:
            asked = [[self._question(way, prompt)] for prompt in prompts]
            told = [json.loads(answer.text) for [answer] in self._ask(asked, advance)]
            return [first_chances(self.name, top, words) for top in told]
        questions = [[self._question(way, prompt, word) for word in words] for prompt in prompts]
        answers = self._ask(questions, advance)
        return [[float(answer.log_probability or 0.0) for answer in line] for line in answers]

    def _question(
        self,
        way: Way,
        prompt: str,
        word: str | None = None,
        *,
        parameters: Mapping[str, Json] | None = None,
    ) -> _Question:
        """Write a call: for a text with `parameters`, else for chances, of a word or a token."""
        is_chat, is_first = way.endpoint == CHAT, False
        if parameters is None:
            parameters = {"max_tokens": 1}
            if word is not None:
                # One token is written, and left out: several servers refuse to write none.
                parameters |= {"echo": True, "logprobs": 1}
            elif is_first := way.decide_by == FIRST_TOKEN:
                top = {"logprobs": True, "top_logprobs": way.num_top}
                parameters |= top if is_chat else {"logprobs": way.num_top}
        whole = prompt + (word or "")
        shown: dict[str, Json] = {"prompt": whole}
        if is_chat:
            shown = {"messages": [{"role": "user", "content": _INSTRUCTION + whole}]}
        body = {"model": self._model, **shown, "temperature": 0, **parameters}
        # One text can be cut into a prompt and a word in several ways.
        key = digest({"base_url": self._base_url, "body": {**body, "word": word}})
        return _Question(key, body, prompt, word, is_first)

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
        self._gate.halt.clear()
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
                self._gate.halt.set()
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
        if self._gate.halt.is_set():
            raise Halted
        try:
            # Another process may have asked it meanwhile.
            kept = self.answers.find([question.key])
            if kept:
                self._count(num_kept=1)
                return kept[question.key]
            reply = self._call(question.body)
            self._pay(reply, question)
            answer = self._answer_of(reply, question)
            if reply.is_cut and not reply.text.strip() and self._is_first("empty"):
                logger.warning(
                    "%s used up the tokens of an answer before it wrote any of it: a model that "
                    "reasons first needs more (--max_new_tokens)",
                    self.name,
                )
            self.answers.keep({question.key: answer, **self._choice}, model=self._model)
        except BaseException:
            self._gate.halt.set()
            raise
        return answer

    def _pay(self, reply: Reply, question: _Question) -> None:
        """Count a call that was answered."""
        prompt_tokens, new_tokens = self._counts(reply, question.prompt)
        self._count(
            num_calls=1,
            num_prompt_tokens=prompt_tokens,
            num_new_tokens=new_tokens,
            is_estimated=None in (reply.num_prompt_tokens, reply.num_new_tokens),
        )

    def _answer_of(self, reply: Reply, question: _Question) -> Answer:
        """Return what is kept of a reply.

        Raises:
            ModelError: If it lacks what was asked.
        """
        counts = reply.num_prompt_tokens, reply.num_new_tokens
        if question.word is not None:
            chance = word_chance(self.name, reply, question.prompt, question.word)
            return Answer("", *counts, chance)
        if question.is_first:
            if not reply.top:
                raise _Useless(f"{self.name} tells no chances of tokens: {_WRITE}")
            return Answer(json.dumps(reply.top, ensure_ascii=False), *counts)
        return Answer(reply.text, *counts)

    def _counts(self, answer: Answer, prompt: str) -> list[int]:
        """Return the endpoint's own counts, and ours where it gives none."""
        given = answer.num_prompt_tokens, answer.num_new_tokens
        own = [0, 0]
        if None in given:
            own = [*self.count_tokens([prompt]), *self._counter([answer.text])]
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
        is_chat = "messages" in body
        api = self._client.chat.completions if is_chat else self._client.completions
        sent = self._fitted(body) if is_chat else body
        try:
            raw = api.with_raw_response.create(**sent)
        except TooLong:
            raise ModelError(
                f"{self.name} answered with more than {longest_line() >> 20} MB, which is not read "
                "(--max_line_mb raises that)"
            ) from None
        except openai.APITimeoutError:
            raise ModelError(
                f"{self.name} did not answer in {self._args.request_timeout:g} s "
                f"(--request_timeout) {tries}"
            ) from None
        except openai.APIConnectionError as error:
            reason = self._excerpt(str(error.__cause__ or error))
            raise ModelError(f"{self.name} cannot be reached ({reason}) {tries}") from None
        except openai.APIStatusError as error:
            if (
                is_chat
                and error.status_code in (400, 422)
                and error.param in {*_OPTIONAL} & {*sent}
            ):
                self._learn(str(error.param))
                return self._call(body)  # which has one parameter less now
            self._refuse(error, tries, body)
        except openai.OpenAIError as error:
            raise ModelError(f"{self.name}: {self._excerpt(str(error))}") from None
        return self._read(raw.text, is_chat=is_chat)

    def _fitted(self, body: Mapping[str, Json]) -> dict[str, Json]:
        """Leave out of a chat's body what the model does not take."""
        sent = {name: value for name, value in body.items() if name not in self._unknown}
        if "max_tokens" not in sent:
            sent["max_completion_tokens"] = body["max_tokens"]
        return sent

    def _learn(self, parameter: str) -> None:
        """Note that a model does not take a parameter, of which it said so."""
        with self._lock:
            self._unknown.add(parameter)
        self._count(num_retries=1)
        if parameter == "temperature" and self._is_first("temperature"):
            logger.warning(
                "%s takes no temperature: it draws its answers, and another run may get others",
                self.name,
            )

    def _refuse(self, error: Any, tries: str, body: Mapping[str, Json]) -> NoReturn:
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
        elif status in range(300, 400):
            way = f", elsewhere: {self._excerpt(error.response.headers.get('location', '?'))}; if "
            way += "that is right, give it as --base_url"
        elif status in (401, 403):
            way = f": see that {KEY} is set to a key that may use this model"
        elif status == 404:
            way = ": see --base_url (it usually ends in /v1) and the model's name"
            if "prompt" in body:
                way += "; a model for chats alone has no completions: --endpoint chat"
        elif "logprobs" in body and "echo" not in body:
            way = f": it may tell no chances of tokens: {_WRITE}"
        elif "echo" in body:
            way = (
                ": it does not score given words, or the prompt is too long for it (--lm_window): "
                + _INSTEAD
            )
        else:
            way = ": see that --lm_window is no larger than the model's"
        message = f"{self.name} answered {status} '{said}'{way}"
        if status in _DECLINED:
            raise _Declined(message, status) from None
        raise ModelError(message) from None

    def _read(self, text: str, *, is_chat: bool) -> Reply:
        """Read an answer; what is not needed of it may be missing."""
        try:
            reply = parse_json(text)
            choice = reply["choices"][0]
            usage, scored = reply.get("usage") or {}, choice.get("logprobs") or {}
            num_prompt_tokens, num_new_tokens = (
                count if isinstance(count := usage.get(name), int) and count >= 0 else None
                for name in ("prompt_tokens", "completion_tokens")
            )
            written = choice["message"]["content"] or "" if is_chat else choice["text"]
            chances = scored.get("token_logprobs") or ()
            if not isinstance(written, str):
                raise TypeError
            return Reply(
                _without_halves(written),
                num_prompt_tokens,
                num_new_tokens,
                tokens=tuple(map(_without_halves, scored.get("tokens") or ())),
                chances=tuple(None if value is None else _chance(value) for value in chances),
                top=_read_top(scored),
                is_cut=choice.get("finish_reason") == "length",
            )
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise ModelError(
                f"{self.name} answered '{self._excerpt(text)}', which is no "
                f"{'chat completion' if is_chat else 'completion'}: is "
                "--base_url that of an OpenAI-compatible endpoint (it usually ends in /v1)?"
            ) from None

    def _excerpt(self, text: str) -> str:
        """Shorten what an endpoint said to one line without the key."""
        key = self._client.api_key
        if key != _NO_KEY:
            text = text.replace(key, _STRUCK)
        text = " ".join(_KEY_LIKE.sub(_STRUCK, text).split())
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _open_client(
    args: CompleterArguments, model: str, send: Callable[[Any, Callable[[], Any]], Any]
) -> Any:
    """Open the client; `send` sends each try of a request, which it is given with what does."""
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

    class Client(openai.DefaultHttpxClient):  # type: ignore[misc]  # what it is stands in no stub
        def send(self, request: Any, **how: Any) -> Any:
            # Bodies are read in it too, so that it ends when a try has.
            how["stream"] = True  # none is read before its length is known
            how["follow_redirects"] = False  # prompts go to the address that was given alone
            return send(request, lambda: _read_bounded(super(Client, self).send(request, **how)))

        def __del__(self) -> None:  # as the library's own client has
            with suppress(Exception):
                self.close()

    return openai.OpenAI(
        api_key=key or _NO_KEY,
        base_url=base_url,
        timeout=args.request_timeout,
        max_retries=args.max_retries,
        http_client=Client(),
    )


def _read_bounded(response: Any) -> Any:
    """Read an answer of the HTTP client, unpacked, of at most `longest_line` bytes.

    Raises:
        TooLong: If it is longer; the rest is not read.
    """
    body, longest = bytearray(), longest_line()
    try:
        for part in response.iter_bytes():
            body += part
            if len(body) > longest:
                raise TooLong
    finally:
        response.close()
    packing = ("content-encoding", "content-length", "transfer-encoding")
    headers = [(k, v) for k, v in response.headers.multi_items() if k.lower() not in packing]
    return type(response)(
        response.status_code, headers=headers, content=bytes(body), request=response.request
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


class _Useless(ModelError):
    """An endpoint answered without what it was asked for."""


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
        raise _Useless(f"{name} does not echo a prompt, so it cannot score given words: {_INSTEAD}")
    total = len(reply.tokens)
    if not reply.chances or len(reply.chances) != total:
        raise _Useless(f"{name} gives no log-probabilities of a prompt's tokens: {_INSTEAD}")
    # The prompt's tokens end before what was written, or where all do.
    written = 1 if reply.num_new_tokens is None else reply.num_new_tokens
    for end in (total - written, total):
        start = _find_start(reply.tokens, word, end)
        if start is not None:
            chances = reply.chances[start:end]
            chance = sum(math.nan if value is None else value for value in chances)
            if not math.isfinite(chance):
                raise _Useless(f"{name} gives '{word}' no finite log-probability: {_INSTEAD}")
            return chance
    raise _Useless(
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
            "prompt_words".format(name, *shared, _WRITE)
        )
    least = min(value for _, value in top) if any(sums) else -math.inf
    return [math.log(chance) if chance else least for chance in sums]


def _bare(text: str) -> str:
    """Return a token or word without case and space, however tokenizers spell that."""
    return text.strip(" \t\r\n▁Ġ").casefold()


def _begin_alike(words: Sequence[str]) -> tuple[str, str] | None:
    """Return two words whose first tokens are surely one: their first words are."""
    seen: dict[str, str] = {}
    for word in words:
        first = _bare(word).split(" ")[0]
        if first in seen:
            return seen[first], word.strip()
        seen[first] = word.strip()
    return None


def _continuation(prompt: str, text: str) -> str:
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
    from pgra.lm.load import ModelSource, find_model, read_tokenizer, tokenizer_identity

    folder = at_home(name)
    source = ModelSource(name, str(folder), None, "") if folder.is_dir() else find_model(name)
    tokenizer = read_tokenizer(source)

    def count(texts: Sequence[str]) -> list[int]:
        return (
            [len(ids) for ids in tokenizer(list(texts), verbose=False).input_ids] if texts else []
        )

    return tokenizer_identity(tokenizer), count
