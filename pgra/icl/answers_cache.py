"""Answers of an endpoint, kept on disk as they come, so that none is paid for twice.

One SQLite file for all endpoints and models. An answer is committed by itself, in the moment it
comes: a killed process loses none, and what it was writing then is rolled back by whoever opens the
file next. Several processes and threads may share it. Prompts are not in it, only their digests.
"""

import contextlib
import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pgra.errors import ArtifactError
from pgra.io import digest
from pgra.types import Json

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
