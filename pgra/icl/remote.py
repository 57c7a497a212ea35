"""An LM behind an OpenAI-compatible completions endpoint: calls side by side, answers kept.

What was answered once is never asked again, in this run or another (`pgra.icl.answers_cache`); an
answer is on disk before anybody sees it. So a run that was stopped, by whatever, goes on without
paying twice, but for the few calls that were on their way.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace

from pgra.errors import ModelError, PgraError
from pgra.icl.answers_cache import Answer, AnswersCache, answer_key
from pgra.icl.completion import Advance, Completion
from pgra.icl.echoed import word_chance
from pgra.icl.endpoint import Endpoint, Reply
from pgra.icl.pacing import Halted, Pace
from pgra.icl.spending import CountTokens, Prices, Spending, TokenCounter, estimate_tokens
from pgra.types import Json

logger = logging.getLogger(__name__)

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
        window: Most tokens of prompt and answer together, as the user says.
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
            window: Most tokens of prompt and answer together.
            counter: What counts the tokens of texts; None estimates them.
            max_parallel_calls: Calls under way at a time.
            max_retries: Tries of a call after the first.
            requests_per_minute: Most calls a minute, tries included; None has no limit.
            prices: Of tokens.
        """
        self.window = window
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
            "window": self.window,
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
