"""A memory of what users corrected, inside an application: MemPrompt (Madaan et al. 2022).

    memory = pgra.Memory("memory.sqlite")
    memory.add("what is akin to quick?", "when I ask for akin to, I want a synonym")
    memory.lookup("What is akin to  quick")       # entries that are near enough, nearest first
    memory.prompt("What is akin to  quick")       # the feedback, then the question

File, look-ups and prompts are those of `pgra memory`.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pgra.config import from_values
from pgra.core import Context
from pgra.errors import DataError
from pgra.memory.log import Event, FeedbackLog, Part, export_log, import_events, read_events
from pgra.memory.lookup import (
    EncoderLookup,
    Lookup,
    LookupArguments,
    ParaphraseLookup,
    load_lookup,
    passing,
)
from pgra.memory.prompts import as_data, fill

BEFORE = "clarification: {feedback}\n{question}"  # of Memory.prompt
_SEPARATOR, _END = "###", "END"  # of the prompts in configs/memory_prompts
_SLOTS = ("{question}", "{feedback}")


@dataclass(frozen=True, kw_only=True)
class MemoryEntry:
    """What a user said of a question.

    Attributes:
        id: Its number; a correction has a new one.
        feedback: What was meant.
        score: Of the look-up, higher is nearer; None without one.
        scope: Whose it is; "" for an entry that all share.
        time: When it was written, UTC, ISO 8601.
        source: Who said it.
    """

    id: int
    question: str
    feedback: str
    score: float | None = None
    scope: str = ""
    time: str = ""
    source: str = "user"


class Memory(AbstractContextManager["Memory"]):
    """Keeps what users said of misunderstood questions, and finds it for similar ones.

    With a scope it belongs to one user (group, project): it writes, lists, changes and exports that
    scope's entries, and look-ups find these and shared ones. Without one it is the administrator's:
    it lists and changes every entry, writes shared ones, and look-ups find these alone.

    A write is on the disk when it returns. Threads may share one memory, and processes the file.

    Attributes:
        path: The file.
        scope: Whose entries; "" for shared ones.
        task: Of which task; "" for none.
        threshold: The smallest score that passes.
    """

    def __init__(
        self,
        path: str | Path = "memory.sqlite",
        *,
        lookup: str | None = None,
        threshold: float | None = None,
        encoder: Any = None,
        scope: str = "",
        task: str = "",
        device: str = "auto",
    ) -> None:
        """Open a memory; the file is created where it is missing.

        Args:
            path: The file.
            lookup: relative-edit (letters: the same question with a slip or a word more),
                paraphrase (an encoder: also in other words), encoder (its cosine alone), edit (the
                paper's: edit distance), bm25, or module:Class; default: paraphrase where an encoder
                is given, else relative-edit.
            threshold: Smallest score that passes; higher is nearer. Default: the look-up's own
                (relative-edit 0.8, paraphrase 0.65, encoder 0.9, edit -5, bm25 1).
            encoder: Of paraphrase and encoder: hub id, folder, bundled:NAME or a `pgra.Encoder`.
            scope: Whose entries; see the class.
            task: Which questions it is for; "" for those of no task.
            device: Where an encoder runs.

        Raises:
            ValueError: If an argument is of a wrong type, or the look-up has no encoder.
            ConfigError: If the look-up is unknown, or the threshold outside its range.
            ArtifactError: If the file is damaged, no memory, or cannot be written.
            ModelError: If the encoder cannot be found or loaded.
        """
        context = Context(device=device)
        self.path = _path(path)
        if self.path.is_dir():
            raise ValueError(
                f"path is the folder {path}: give a file, such as {path}/memory.sqlite"
            )
        self.scope, self.task = _text("scope", scope), _text("task", task)
        if lookup is not None:
            _text("lookup", lookup)
        elif encoder is not None:
            lookup = "paraphrase"
        if encoder is not None and lookup not in ("encoder", "paraphrase"):
            raise ValueError(f"encoder is given, and lookup is '{lookup}': use lookup='paraphrase'")
        if isinstance(threshold, bool) or not isinstance(threshold, int | float | None):
            raise ValueError(f"threshold is {threshold!r}: give a number")
        name = str(encoder) if isinstance(encoder, str | Path) else None
        values = {"lookup": lookup, "threshold": threshold, "encoder": name}
        args = from_values(LookupArguments, {k: v for k, v in values.items() if v is not None})
        args = args.settle()
        self.threshold = args.gate
        part = Part(self.task, self.scope)
        if encoder is None or name is not None:
            load = load_lookup(args, context, task=part.task, scope=part.scope)
        else:
            _check_unit_length(encoder)
            kind = EncoderLookup if lookup == "encoder" else ParaphraseLookup
            load = lambda log: kind(log, encoder, part)  # noqa: E731
        self._lock, self._is_open = threading.RLock(), True
        self._log = FeedbackLog.open(self.path)
        self._lookup: Lookup = load(self._log)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._log.close()
            self._is_open = False

    def __repr__(self) -> str:
        scope = f", scope={self.scope!r}" if self.scope else ""
        return f"Memory({str(self.path)!r}{scope})"

    def __len__(self) -> int:
        """Count the entries; with a scope, its own."""
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[MemoryEntry]:
        """Iterate over the entries, the oldest first; with a scope, its own."""
        with self._mine():  # read at once: while a file is read, nothing can be erased from it
            entries = [_entry(event) for event in self._log.entries() if self._owns(event)]
        return iter(entries)

    def add(self, question: str, feedback: str, *, source: str = "user") -> MemoryEntry:
        """Store what a user said of a question; it replaces earlier feedback on it.

        Args:
            question: As it was asked, at most 10,000 characters.
            feedback: What was meant, at most 2,000.
            source: Who said it.

        Raises:
            DataError: If a text is empty, too long, not valid Unicode, or has control characters.
            ArtifactError: If the file cannot be written.
        """
        texts = _text("question", question), _text("feedback", feedback)
        names = {"source": _text("source", source), "task": self.task, "scope": self.scope}
        with self._mine():
            return _entry(self._log.write(*texts, **names))

    def lookup(self, question: str, k: int = 1) -> list[MemoryEntry]:
        """Return at most k entries for similar questions.

        Those that pass the threshold, nearest first, of equals the newest; [] where none does.

        Raises:
            ValueError: If the question is no text, or k no number above 0.
        """
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"k is {k!r}: give a whole number above 0")
        with self._mine():
            found = self._lookup.find(_text("question", question), k)
        return [_entry(m.entry, score=m.score) for m in passing(found, self.threshold)]

    def prompt(self, question: str, k: int = 1, *, template: str = BEFORE) -> str:
        r"""Return a question with the feedback on similar ones, for a model to read.

        Feedback is data: it stands on one line, and "|", "###" and END are altered in it, so that
        it adds no example or clarification to a prompt. The question stays, alone if none is near.

        Args:
            question: Any text.
            k: Most feedback, the nearest next to the question.
            template: With {question} and {feedback}; the paper's is
                "{question} | clarification: {feedback}".

        Raises:
            ValueError: If an argument is of a wrong type, or the template lacks a slot.
        """
        if not all(slot in _text("template", template) for slot in _SLOTS):
            raise ValueError(f"template is {template!r}: it needs {' and '.join(_SLOTS)}")
        shown = question
        for entry in self.lookup(question, k):
            said = as_data(entry.feedback, clarified=template, separator=_SEPARATOR, end=_END)
            shown = fill(template, question=shown, feedback=said)
        return shown

    def correct(self, entry_id: int, feedback: str, *, source: str = "user") -> MemoryEntry:
        """Replace an entry's feedback; the returned entry has another id.

        Raises:
            DataError: If there is no such entry now, it is of another scope, or as `add`.
        """
        feedback, source = _text("feedback", feedback), _text("source", source)
        with self._mine():
            self._check_own([entry_id])
            return _entry(self._log.correct(entry_id, feedback, source=source))

    def forget(self, *entry_ids: int, source: str = "user") -> None:
        """Take entries out of the memory, all or none; the log keeps them (see `erase`).

        Raises:
            DataError: If one is not there now, or of another scope.
        """
        with self._mine():
            self._check_own(entry_ids)
            self._log.forget(*entry_ids, source=_text("source", source))

    def erase(self, *entry_ids: int, source: str = "user") -> int:
        """Delete entries from the log too, all or none: no byte of their texts stays in its files.

        All that was ever said of an entry's question in its scope is deleted, also if it was
        corrected or forgotten; returns the number of events. The log records when, and by which
        source. Exports and copies are yours to delete.

        Raises:
            DataError: If one is not in the log, or is of another scope.
            ArtifactError: If another process has the file open: bytes stay until it is closed.
        """
        with self._mine():
            self._check_own(entry_ids)
            return self._log.erase(*entry_ids, source=_text("source", source))

    def erase_all(self, *, source: str = "user") -> int:
        """Erase all that was ever written in this memory's scope; see `erase`.

        Raises:
            ValueError: If it has none: delete the file instead.
            DataError: If there is nothing.
        """
        if not self.scope:
            raise ValueError("this memory has no scope: name one, or delete the file")
        with self._mine():
            return self._log.erase_scope(self.scope, source=_text("source", source))

    def export(self, path: str | Path) -> int:
        """Write the log (only the memory's scope, if any) as jsonl; return how many events."""
        with self._mine():
            return export_log(self._log, _path(path), scope=self.scope or None)

    def import_(self, path: str | Path) -> int:
        """Append the events of a jsonl file, all into the memory's scope, if any; return how many.

        Raises:
            DataError: If a line is no event; nothing is written then.
        """
        events = read_events(_path(path))
        with self._mine():
            return import_events(self._log, events, scope=self.scope or None)

    @contextmanager
    def _mine(self) -> Iterator[None]:
        """Lock the file: a transaction is one thread's."""
        with self._lock:
            if not self._is_open:
                raise ValueError(f"the memory {self.path} is closed: open it again")
            yield

    def _owns(self, event: Event) -> bool:
        return not self.scope or event.scope == self.scope

    def _check_own(self, entry_ids: Sequence[int]) -> None:
        """Refuse what is no id, and entries of other scopes; the log refuses missing ones."""
        if not entry_ids:
            raise ValueError("no entry is named: give the ids of entries")
        for entry_id in entry_ids:
            if isinstance(entry_id, bool) or not isinstance(entry_id, int):
                raise ValueError(f"entry id is {entry_id!r}: give an entry's number, its .id")
            if not 0 < entry_id < 1 << 63:
                raise DataError(f"{self.path} has no entry {entry_id}")
            event = self._log.event(entry_id)
            if event is not None and event.kind != "erase" and not self._owns(event):
                raise DataError(f"{self.path}: entry {entry_id} is not of scope '{self.scope}'")


def _entry(event: Event, *, score: float | None = None) -> MemoryEntry:
    return MemoryEntry(
        id=event.id,
        question=event.key,
        feedback=event.feedback,
        score=score,
        scope=event.scope,
        time=event.time,
        source=event.source,
    )


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}: give text")
    return value


def _path(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError(f"path is {value!r}: give a file as text or a Path")
    return Path(value)


def _check_unit_length(encoder: Any) -> None:
    """Refuse what is no encoder, or one whose dot products are no cosines."""
    if not hasattr(encoder, "encode") or not hasattr(encoder, "query_fingerprint"):
        raise ValueError(
            f"encoder is {encoder!r:.80}: give a hub id, a folder, bundled:NAME or a pgra.Encoder"
        )
    if abs(float(np.linalg.norm(encoder.encode(["a text"])[0])) - 1) > 1e-3:
        raise ValueError(
            "encoder makes vectors that are not of unit length: open it with normalize"
        )
