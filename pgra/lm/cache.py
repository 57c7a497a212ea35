"""An LM's answers on disk, in one SQLite file for all endpoints and models.

Several processes and threads may share it. An endpoint's answer is committed at once, a local LM's
256 prompts at a time. Prompts are stored as digests only. A damaged answer fails its
checksum and is asked again.
"""

import json
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import xxhash

from pgra.artifacts import DatabaseKind, digest, open_database
from pgra.context import ALONE, Context
from pgra.errors import ArtifactError
from pgra.lm.base import Advance, Completion, LanguageModel
from pgra.types import Fields, Json

logger = logging.getLogger(__name__)

FILE = "answers.sqlite"
_CHECKSUM_CHARS = 32


def _seal(key: str, answer: str) -> str:
    """Prepend a checksum of key and answer."""
    return xxhash.xxh3_128_hexdigest(f"{key} {answer}".encode()) + answer


ANSWERS = DatabaseKind(
    name="file of answers",
    application_id=0x70677261,  # "pgra"
    schema="CREATE TABLE answers "
    "(digest TEXT PRIMARY KEY, model TEXT NOT NULL, answer TEXT NOT NULL) WITHOUT ROWID",
    version=2,
    if_damaged="move it away, and its answers are asked again, or put a copy in its place",
)
PORTION = 256  # prompts that are asked before their answers are written


class AnswersCache:
    """Answers by key. Each use opens the file anew, which makes it safe for threads and forks."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._turn = threading.Lock()  # SQLite's own waiting sleeps for up to 0.1 s at a time

    def find(self, keys: Sequence[str]) -> dict[str, Completion]:
        """Return the answers that are there and undamaged.

        Raises:
            ArtifactError: If the file is damaged, foreign or locked by another process for long.
        """
        if not self.path.exists():
            return {}
        wanted = "SELECT value FROM json_each(?)"
        query = f"SELECT digest, answer FROM answers WHERE digest IN ({wanted})"
        with self._open() as db:
            rows = dict(db.execute(query, [json.dumps(list(keys))]))
        answers = {}
        for key, sealed in rows.items():
            if answer := _unseal(key, sealed):
                answers[key] = answer
        if num_damaged := len(rows) - len(answers):
            logger.warning("%s: %d answers are damaged, and asked again", self.path, num_damaged)
        return answers

    def find_or_ask(
        self,
        lines: Sequence[tuple[str, ...]],
        ask: Callable[[Mapping[str, Completion], list[int]], Mapping[str, Completion]],
        advance: Advance,
    ) -> list[list[Completion]]:
        """Return the answers of lines of keys; equal lines are asked once.

        `ask` gets what is there, and the rows of lines that lack an answer; it returns theirs.
        """
        rows = {line: row for row, line in enumerate(lines)}
        answers = self.find(list(chain.from_iterable(rows)))
        new = [row for line, row in rows.items() if not answers.keys() >= {*line}]
        advance(len(rows) - len(new))
        answers |= ask(answers, new)
        return [[answers[key] for key in line] for line in lines]

    def keep(self, answers: Mapping[str, Completion], *, model: str) -> None:
        """Write answers by key, all or none, durably; `model` is for people who read the file.

        Raises:
            ArtifactError: As `find`; also if the disk is full.
        """
        # A chance may be -inf, which Python's JSON has, as `-Infinity`.
        rows = [
            (key, model, _seal(key, json.dumps(asdict(answer), ensure_ascii=False)))
            for key, answer in answers.items()
        ]
        with self._turn, self._open() as db, db:  # the last one commits
            db.execute("BEGIN IMMEDIATE")
            db.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", rows)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        # Writable even to look something up: what a power cut left half written is rolled back.
        with ANSWERS.errors_of(self.path), closing(open_database(self.path, ANSWERS)) as db:
            yield db


def _unseal(key: str, sealed: object) -> Completion | None:
    """Return an answer, or None if it is damaged."""
    try:
        text = str(sealed)[_CHECKSUM_CHARS:]
        return Completion(**json.loads(text)) if _seal(key, text) == sealed else None
    except (ValueError, TypeError):  # not JSON, or not an answer's
        return None


class CachedLM(LanguageModel):
    """An LM that reuses its answers on disk; `pgra.lm.endpoint` stores an endpoint's itself."""

    def __init__(
        self,
        inner: LanguageModel,
        answers: AnswersCache,
        context: Context = ALONE,
        *,
        window: int | None = None,
    ) -> None:
        """Wrap an LM, whose window may be made shorter.

        The context's processes get the same prompts in the same order, each with its own LM; each
        answers its share and reads the others' answers from the file.
        """
        self.inner = inner
        self.window = min(window or inner.window, inner.window)
        self._answers = answers
        self._context = context

    @property
    def fingerprint(self) -> Fields:
        return self.inner.fingerprint

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of texts, (B,)."""
        return self.inner.count_tokens(texts)

    def complete(
        self, prompts: Sequence[str], *, max_new_tokens: int, stop: str, advance: Advance = int
    ) -> list[Completion]:
        """Continue each prompt; see `LanguageModel`."""

        def ask(batch: Sequence[str], advance: Advance) -> list[list[Completion]]:
            completions = self.inner.complete(
                batch, max_new_tokens=max_new_tokens, stop=stop, advance=advance
            )
            return [[completion] for completion in completions]

        question: dict[str, Json] = {"max_new_tokens": max_new_tokens, "stop": stop}
        return [answer for (answer,) in self._find_or_ask(prompts, [question], ask, advance)]

    def score(
        self, prompts: Sequence[str], words: Sequence[str], *, advance: Advance = int
    ) -> list[list[float]]:
        """Return the log-probability of each word after each prompt; see `LanguageModel`."""

        def ask(batch: Sequence[str], advance: Advance) -> list[list[Completion]]:
            lines = self.inner.score(batch, words, advance=advance)
            return [[Completion("", log_probability=value) for value in line] for line in lines]

        lines = self._find_or_ask(prompts, [{"word": word} for word in words], ask, advance)
        return [[answer.chance for answer in line] for line in lines]

    def _find_or_ask(
        self,
        prompts: Sequence[str],
        questions: Sequence[Fields],
        ask: Callable[[Sequence[str], Advance], list[list[Completion]]],
        advance: Advance,
    ) -> list[list[Completion]]:
        """Return each prompt's answers to the questions; equal prompts are asked once."""
        lm = dict(self.fingerprint)

        def make_key(prompt: str, question: Fields) -> str:
            return digest({"base_url": "local:", "body": {"lm": lm, "prompt": prompt, **question}})

        def ask_new(_: Mapping[str, Completion], rows: list[int]) -> dict[str, Completion]:
            logger.debug("the LM is asked %d prompts, not answered before", len(rows))
            self._context.barrier()  # all have looked: they share the same prompts out
            answers = dict[str, Completion]()
            share = self._context.worker.share(rows)
            for start in range(0, len(share), PORTION):
                batch = share[start : start + PORTION]
                batch_keys = chain.from_iterable(lines[row] for row in batch)
                replies = chain.from_iterable(ask([prompts[row] for row in batch], advance))
                written = dict(zip(batch_keys, replies, strict=True))
                self._answers.keep(written, model=str(lm.get("model", "")))
                answers |= written
            self._context.barrier()
            if len(share) < len(rows):
                advance(len(rows) - len(share))
                new_keys = list(chain.from_iterable(lines[row] for row in rows))
                answers |= self._answers.find(new_keys)
                if not answers.keys() >= {*new_keys}:
                    raise ArtifactError(
                        f"{self._answers.path} lacks others' answers: share one --artifacts_dir"
                    )
            return answers

        lines = [tuple(make_key(prompt, question) for question in questions) for prompt in prompts]
        return self._answers.find_or_ask(lines, ask_new, advance)
