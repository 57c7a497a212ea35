"""An LM's answers on disk, as they come: a stopped run asks nothing twice.

One SQLite file for all endpoints and models. An answer is committed by itself, in the moment it
comes: a killed process loses none, and what it was writing then is rolled back by whoever opens the
file next. Several processes and threads may share it. Prompts are not in it, only their digests.
"""

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pgra.artifacts import digest
from pgra.core import ALONE, Context, Json
from pgra.errors import ArtifactError
from pgra.lm.completion import Advance, Completer, Completion

FILE = "answers.sqlite"
FORMAT = 1
_APPLICATION = 0x70677261  # "pgra": tells our file from any other SQLite file
_PATIENCE = 60.0  # seconds to wait for another process that writes
_AT_ONCE = 500  # keys in one look-up; SQLite takes 999 and more
_TABLE = (
    "CREATE TABLE IF NOT EXISTS answers "
    "(digest TEXT PRIMARY KEY, model TEXT NOT NULL, answer TEXT NOT NULL) WITHOUT ROWID"
)


@dataclass(frozen=True)
class Answer:
    """What is kept of one call.

    Attributes:
        text: What the LM wrote; empty where only chances were asked.
        num_prompt_tokens: As the endpoint counted them; None where it does not.
        num_new_tokens: The same, of what it wrote.
        log_probability: Of the word that was scored; None where text was asked.
    """

    text: str
    num_prompt_tokens: int | None = None
    num_new_tokens: int | None = None
    log_probability: float | None = None


def answer_key(base_url: str, body: Mapping[str, Json]) -> str:
    """Give the digest of all that an answer depends on.

    Args:
        base_url: The endpoint.
        body: Model, prompt and parameters, as they are sent.
    """
    return digest({"base_url": base_url, "body": body})


class AnswersCache:
    """Answers by their key. Each use opens the file anew, which threads and forks survive.

    Attributes:
        path: The file; made by the first answer.
    """

    def __init__(self, folder: Path) -> None:
        """Keep answers in a folder, which need not exist yet."""
        self.path = folder / FILE
        self._turn = threading.Lock()  # SQLite's own waiting sleeps for up to 0.1 s at a time

    def find(self, keys: Sequence[str]) -> dict[str, Answer]:
        """Look answers up; a key without one is left out.

        Raises:
            ArtifactError: If the file is damaged, foreign or held by another process for a minute.
        """
        if not self.path.exists():
            return {}
        found: dict[str, Answer] = {}
        with self._open() as db:
            for start in range(0, len(keys), _AT_ONCE):
                part = list(keys[start : start + _AT_ONCE])
                marks = ",".join("?" * len(part))
                asked = f"SELECT digest, answer FROM answers WHERE digest IN ({marks})"
                found.update((key, self._read(told)) for key, told in db.execute(asked, part))
        return found

    def keep(self, key: str, answer: Answer, *, model: str) -> None:
        """Write an answer, durably before this returns; the first one of a key stands.

        Args:
            key: Of `answer_key`.
            answer: What came.
            model: Its name, for people who look into the file.

        Raises:
            ArtifactError: As `find`; also if the disk is full.
        """
        self.keep_all({key: answer}, model=model)

    def keep_all(self, answers: Mapping[str, Answer], *, model: str) -> None:
        """Write answers by key in one go, all or none; see `keep`."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [(key, model, _write(answer)) for key, answer in answers.items()]
        with self._turn, self._open() as db, db:  # the last one commits
            db.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?, ?)", lines)

    def __len__(self) -> int:
        """Count the answers."""
        if not self.path.exists():
            return 0
        with self._open() as db:
            return int(db.execute("SELECT COUNT(*) FROM answers").fetchone()[0])

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        # No write-ahead log: it needs shared memory, which network disks do not give.
        try:
            with contextlib.closing(sqlite3.connect(self.path, timeout=_PATIENCE)) as db:
                self._prepare(db)
                yield db
        except sqlite3.Error as error:
            raise ArtifactError(self._word(error)) from None

    def _prepare(self, db: sqlite3.Connection) -> None:
        """Make the table in a new file; refuse a file that is not ours."""
        # In this order: a file that another process makes in between has its mark by then.
        is_empty = _pragma(db, "schema_version") == 0
        mark = _pragma(db, "application_id")
        if is_empty and mark == 0:
            with db:
                # In one transaction with the marks: a file with half of it is never seen. Another
                # process may have been first, which changes nothing.
                db.execute("BEGIN IMMEDIATE")
                db.execute(_TABLE)
                db.execute(f"PRAGMA application_id = {_APPLICATION}")
                db.execute(f"PRAGMA user_version = {FORMAT}")
        elif mark != _APPLICATION:
            raise ArtifactError(
                f"{self.path} is no file of answers of pgra: move it away, or choose another "
                "--artifacts_dir"
            )
        made_as = _pragma(db, "user_version")
        if made_as != FORMAT:
            raise ArtifactError(
                f"{self.path} has format {made_as}, this pgra reads {FORMAT}: update pgra, or "
                "choose another --artifacts_dir"
            )

    def _read(self, told: str) -> Answer:
        try:
            return Answer(**json.loads(told))
        except (ValueError, TypeError) as error:
            raise ArtifactError(
                f"{self.path} is damaged ({error}): move it away, and its answers are asked again"
            ) from None

    def _word(self, error: sqlite3.Error) -> str:
        if isinstance(error, sqlite3.OperationalError):  # locked, full, read-only, ...
            return (
                f"{self.path} cannot be used ({error}): answers that came before are in it. See "
                "that its disk has space and locks and that no other job holds it, and run again"
            )
        return (
            f"{self.path} is damaged ({error}): move it away, and its answers are asked again, or "
            "put a copy in its place"
        )


def _write(answer: Answer) -> str:
    # A chance may be -inf, which Python's JSON has, as `-Infinity`.
    return json.dumps(asdict(answer), ensure_ascii=False)


def _pragma(db: sqlite3.Connection, name: str) -> int:
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])


# A local LM whose answers are kept on disk: a run that was stopped does not ask again.
#
# What a remote LM answers is kept by itself (`pgra.lm.remote`), in the same file. Several processes
# share prompts out, and read from that file what the others were answered.


_LOCAL = "local:"
_FIRST, _MOST = 32, 1024  # prompts that are asked before their answers are written
_SECONDS = 20.0  # of work that a stop may lose, about


class KeptCompleter:
    """A `Completer` that asks another one what it has not answered before.

    Attributes:
        inner: The LM.
        num_asked: Prompts that it was asked so far, by all processes.
        num_found: Prompts whose answers were there.
    """

    def __init__(
        self,
        inner: Completer,
        answers: AnswersCache,
        context: Context = ALONE,
    ) -> None:
        """Keep the answers of an LM.

        Args:
            inner: The LM.
            answers: Where they are kept.
            context: Who asks the same prompts in the same order, each an LM of its own; each is
                asked its share.
        """
        self.inner, self.window, self._answers = inner, inner.window, answers
        self._context = context
        self.num_asked = self.num_found = 0

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give the LM's."""
        return self.inner.fingerprint

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of texts, (B,)."""
        return self.inner.count_tokens(texts)

    def complete(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int,
        stop: str,
        advance: Advance | None = None,
    ) -> list[Completion]:
        """Go on with each prompt; see `Completer`."""
        asked: dict[str, Json] = {"max_new_tokens": max_new_tokens, "stop": stop}

        def ask(part: Sequence[str], tell: Advance | None) -> list[list[Answer]]:
            done = self.inner.complete(part, max_new_tokens=max_new_tokens, stop=stop, advance=tell)
            return [[Answer(c.text, c.num_prompt_tokens, c.num_new_tokens)] for c in done]

        found = self._find_or_ask(prompts, [asked], ask, advance)
        return [
            Completion(answer.text, answer.num_prompt_tokens or 0, answer.num_new_tokens or 0)
            for (answer,) in found
        ]

    def score(
        self, prompts: Sequence[str], words: Sequence[str], *, advance: Advance | None = None
    ) -> list[list[float]]:
        """Give the log-probability of each word after each prompt; see `Completer`."""

        def ask(part: Sequence[str], tell: Advance | None) -> list[list[Answer]]:
            lines = self.inner.score(part, words, advance=tell)
            return [[Answer("", log_probability=value) for value in line] for line in lines]

        found = self._find_or_ask(prompts, [{"word": word} for word in words], ask, advance)
        return [[float(answer.log_probability or 0.0) for answer in line] for line in found]

    def _find_or_ask(
        self,
        prompts: Sequence[str],
        questions: Sequence[Mapping[str, Json]],
        ask: Callable[[Sequence[str], Advance | None], list[list[Answer]]],
        advance: Advance | None,
    ) -> list[list[Answer]]:
        """Give each prompt's answers to the questions; equal prompts are asked once."""
        lm = dict(self.fingerprint)
        keys = {
            prompt: [answer_key(_LOCAL, {"lm": lm, "prompt": prompt, **q}) for q in questions]
            for prompt in dict.fromkeys(prompts)
        }
        known = self._answers.find([key for own in keys.values() for key in own])
        new = [prompt for prompt, own in keys.items() if any(key not in known for key in own)]
        self.num_found += len(keys) - len(new)
        self.num_asked += len(new)
        if advance is not None:
            advance(len(keys) - len(new))
        self._context.barrier()  # all have looked: they share the same prompts out
        worker = self._context.worker
        mine = worker.share(new)
        tell = _tell_of_all(advance, len(new), worker.world)
        start, size = 0, _FIRST
        while start < len(mine):
            part, began = mine[start : start + size], time.monotonic()
            told = {
                key: answer
                for prompt, answers in zip(part, ask(part, tell), strict=True)
                for key, answer in zip(keys[prompt], answers, strict=True)
            }
            self._answers.keep_all(told, model=str(lm.get("lm", "")))
            known.update(told)
            start += size
            if time.monotonic() - began < _SECONDS / 2:
                size = min(_MOST, 2 * size)
        self._context.barrier()
        if len(mine) < len(new):
            known.update(self._find_others([key for prompt in new for key in keys[prompt]]))
        return [[known[key] for key in keys[prompt]] for prompt in prompts]

    def _find_others(self, keys: Sequence[str]) -> dict[str, Answer]:
        """Read what all processes were answered."""
        found = self._answers.find(keys)
        if missing := sum(key not in found for key in keys):
            raise ArtifactError(
                f"{self._answers.path} lacks {missing} answers that other processes were given: "
                "all of them must see one --artifacts_dir"
            )
        return found


def _tell_of_all(advance: Advance | None, total: int, world: int) -> Advance | None:
    """Tell of the others' prompts as if they were as far as this process."""
    if advance is None or world == 1:
        return advance
    left = total

    def tell(count: int) -> None:
        nonlocal left
        step = min(left, count * world)
        left -= step
        advance(step)

    return tell
