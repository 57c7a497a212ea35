"""A memory of what users corrected: MemPrompt (Madaan et al. 2022).

    memory = pgra.Memory("memory.sqlite")
    memory.add("what is akin to quick?", "when I ask for akin to, I want a synonym")
    memory.search("What is akin to  quick")       # entries that are near enough, nearest first
    memory.prompt("What is akin to  quick")       # the feedback, then the question

`pgra memory` is made from it, and so are its streams, chat and page.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pgra.artifacts import write_lines
from pgra.context import ALONE
from pgra.errors import ConfigError, DataError
from pgra.memory.families import FewShot, fill_slots
from pgra.memory.log import FeedbackLog, Kind, MemoryEntry, check_length, now, read_events
from pgra.memory.lookup import LookupArguments, Match, OpenLookup, load_lookup, passing
from pgra.types import as_query, check_count

BEFORE = "clarification: {feedback}\n{question}"  # of Memory.prompt


class Memory(AbstractContextManager["Memory"]):
    """Keeps what users said of misunderstood questions, and finds it for similar ones.

    With a user (a group, a project) it holds that user's entries: it adds, iterates over, changes
    and exports these, and a search finds these and shared ones. Without one it is the
    administrator's: it adds shared entries, iterates over and changes everyone's, and a search
    finds shared ones alone.

    A write is on the disk when it returns. Threads may share one memory, and processes the file.

    Attributes:
        path: The file.
        user: Whose entries; "" for the administrator.
        source: Who writes.
        log: All events in the file, of everyone.
        lookup: What finds entries in it.
        threshold: The smallest score that passes; None if all do.
    """

    def __init__(
        self,
        path: str | Path = "memory.sqlite",
        *,
        lookup: str | OpenLookup | None = None,
        threshold: float | None = None,
        encoder: Any = None,
        user: str = "",
        source: str = "user",
        create: bool = True,
        admin: bool = True,
    ) -> None:
        """Open a memory.

        Args:
            path: The file; ":memory:" for one that is on no disk.
            lookup: relative-edit (letters: the same question with a slip or a word more),
                paraphrase (an encoder: also in other words), encoder (its cosine alone), edit (the
                paper's: edit distance), or module:Class; default: paraphrase where an encoder is
                given, else relative-edit. Or what `load_lookup` returns, whose models are loaded
                once for many memories.
            threshold: Smallest score that passes; higher is nearer. Default: the look-up's own
                (relative-edit 0.8, paraphrase 0.65, encoder 0.9, edit -5); of a loaded look-up
                all pass.
            encoder: Of paraphrase and encoder: hub id, folder, bundled:NAME, a `pgra.Encoder`, or
                another loaded model, as of `pgra.Encoder`, which takes a device.
            user: Whose entries; "" for the administrator, see the class.
            source: Who writes; kept with each event.
            create: Whether a missing file is made.
            admin: Whether one without a user is the administrator's; else it has the shared entries
                alone.

        Raises:
            ValueError: If user is not text.
            ConfigError: If the look-up is unknown or has no encoder, or the threshold is outside
                its range.
            ArtifactError: If the file is missing and not created, damaged, or not a memory.
            ModelError: If the encoder cannot be found or loaded.
        """
        if not isinstance(user, str):
            raise ValueError(f"user is {user!r}: give a text")
        self.path = Path(path)
        self.user = user
        self.source = source
        self._admin = admin
        if callable(lookup):
            if encoder is not None:
                raise ConfigError("a loaded look-up has its own encoder: leave encoder out")
            open_lookup = lookup
            self.threshold = threshold
        else:
            name = None if encoder is None else str(encoder)
            args = LookupArguments(lookup=lookup, threshold=threshold, encoder=name).resolve()
            self.threshold = args.threshold
            open_lookup = load_lookup(args, ALONE, user, encoder=encoder)
        self._lock = threading.RLock()
        self.log = FeedbackLog(self.path, create=create)
        self.lookup = open_lookup(self.log)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; `with` does it."""
        with self._lock:
            self.log.close()

    def __repr__(self) -> str:
        user = f", user={self.user!r}" if self.user else ""
        return f"Memory({str(self.path)!r}{user})"

    def __len__(self) -> int:
        """Count the entries; with a user, its own."""
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[MemoryEntry]:
        """Iterate over the entries, the oldest first; with a user, its own."""
        with self._lock:  # read at once: while a file is read, nothing can be erased from it
            entries = [entry for entry in self.log.entries() if self._owns(entry)]
        return iter(entries)

    def events(self) -> list[MemoryEntry]:
        """Return all that was ever written and not erased, in its order; with a user, its own."""
        with self._lock:
            return [event for event in self.log.events() if self._owns(event)]

    def get(self, entry_id: int) -> MemoryEntry:
        """Return an entry by its id; a DataError if there is none now, or it is another user's."""
        with self._lock:
            entries = self.log.get([entry_id])
        if not entries or not self._owns(entries[0]):
            raise self._missing(entry_id)
        return entries[0]

    def add(self, question: str, feedback: str) -> MemoryEntry:
        """Store what a user said of a question; it replaces earlier feedback on it.

        Args:
            question: As it was asked, at most 10,000 characters.
            feedback: What was meant, at most 2,000.

        Raises:
            DataError: If a text is empty, too long, not valid Unicode, or has control characters.
            ArtifactError: If the file cannot be written.
        """
        entry = MemoryEntry(
            question=question, feedback=feedback, time=now(), source=self.source, user=self.user
        )
        with self._lock:
            return self.log.append([entry])[0]

    def search(self, question: str, k: int = 1, *, threshold: float | None = None) -> list[Match]:
        """Return at most k entries for similar questions, with their scores.

        Those that pass the threshold (default: the memory's), nearest first, of equals the newest;
        [] where none does. A question is not blank, and has at most 10,000 characters (DataError).
        """
        check_count("k", k)
        question = as_query("question", question)
        check_length("question", question)
        with self._lock:
            matches = self.lookup.find(question, k)
        return passing(matches, self.threshold if threshold is None else threshold)

    def prompt(self, question: str, k: int = 1, *, template: str = BEFORE) -> str:
        r"""Return a question with the feedback on similar ones, for a model to read.

        Feedback is data: it stands on one line, and "|", "###" and END are altered in it, so that
        it adds no example or clarification to a prompt. The question stays, alone if none is near.

        Args:
            question: A text, as of `search`.
            k: Most feedback, the nearest next to the question.
            template: With {question} and {feedback}; the paper's is
                "{question} | clarification: {feedback}".

        Raises:
            ConfigError: If the template lacks a slot.
        """
        # The marks are those of the prompts in configs/memory_prompts.
        form = FewShot("", separator="###", end="END", clarified=template, examples=())
        prompt = question
        for entry in self.search(question, k):
            feedback = form.sanitize(entry.feedback)
            prompt = fill_slots(template, question=prompt, feedback=feedback)
        return prompt

    def update(self, entry_id: int, feedback: str) -> MemoryEntry:
        """Replace an entry's feedback; the returned entry has another id.

        Entries that the look-up holds for the same question are deleted.

        Raises:
            DataError: As `get` and `add`.
        """
        with self._lock, self.log.transaction():
            entry = self.get(entry_id)
            for other in self._alike(self, [entry]):
                if other.id != entry_id:
                    self._change(other, "delete")
            return self._change(entry, "update", feedback)

    def delete(self, *entry_ids: int) -> int:
        """Take entries out of the memory, all or none; the log keeps them (see `erase`).

        With them go those that the look-up holds for the same question, of the same user; in a
        family with slots these are all that differ in <...> alone. Returns how many went.

        Raises:
            DataError: As `get`.
        """
        with self._lock, self.log.transaction():
            entries = self._alike(self, [self.get(entry_id) for entry_id in entry_ids])
            for entry in entries:
                self._change(entry, "delete")
        return len(entries)

    def erase(self, *entry_ids: int) -> int:
        """Delete entries from the log too, all or none: no byte of their texts stays in its files.

        All that was ever said of an entry's question by its user is erased, in all spellings that
        the look-up holds for the same (see `delete`), also if it was updated or deleted; returns
        the number of events. The log records when, and by which source.
        Exports and copies are yours to delete.

        Raises:
            DataError: If one is not in the log, or is another user's; or if no entry is named.
            ArtifactError: If another process has the file open: bytes stay until it is closed.
        """
        with self._lock:
            with self.log.transaction():
                events = {event.id: event for event in self.events() if event.kind != "erase"}
                for entry_id in entry_ids:
                    if entry_id not in events:
                        raise self._missing(entry_id, " --log")
                if not entry_ids:
                    raise DataError(f"there is nothing to erase in {self!r}")
                named = [events[entry_id] for entry_id in entry_ids]
                erased = self._alike(events.values(), named)
                self.log.erase([event.id for event in erased], self.source)
            self.log.write_anew()
        return len(erased)

    def erase_all(self) -> int:
        """Erase all that was ever written in this memory by its user; see `erase`.

        Raises:
            DataError: If it has no user (delete the file instead), or there is nothing.
        """
        if not self.user:
            raise DataError("the memory is everyone's: name entries or a user, or delete the file")
        with self._lock:
            return self.erase(*(event.id for event in self.events() if event.kind != "erase"))

    def export(self, path: str | Path) -> int:
        """Write the log (only the user's events, if any) as jsonl; return how many events.

        Raises:
            DataError: If the file is the memory's own.
        """
        path = Path(path)
        files = [Path(f"{self.path.resolve()}{end}") for end in ("", "-wal", "-shm")]
        if any(path.exists() and file.exists() and path.samefile(file) for file in files):
            raise DataError(f"{path} is the memory itself: name another file")
        events = self.events()
        write_lines(path, [asdict(event) for event in events])
        return len(events)

    def import_(self, path: str | Path) -> int:
        """Append the events of a jsonl file, or of another memory, all or none; return how many.

        Of a damaged memory those that are left are read (see `read_events`). All get the memory's
        user, if it has one. Skips events that the log has already
        (all fields but the id), so that a file may be imported twice, and erasures, which belong to
        another log. Later lines win, whatever their time.

        Raises:
            DataError: If a line is not an event (names file and line).
        """
        events = [
            replace(event, id=0, user=self.user or event.user)
            for event in read_events(Path(path))
            if event.kind != "erase"
        ]
        with self._lock, self.log.transaction():
            logged = {replace(event, id=0) for event in self.log.events()}
            new = [self.log.insert(event) for event in events if event not in logged]
        return len(new)

    def verify(self) -> None:
        """Read the whole file; an ArtifactError if its entries are not what its log says."""
        with self._lock:
            self.log.verify()

    def _owns(self, event: MemoryEntry) -> bool:
        return event.user == self.user or (self._admin and not self.user)

    def _missing(self, entry_id: int, flag: str = "") -> DataError:
        of = f" of {self.user}" if self.user else ""
        return DataError(
            f"{self.path} has no entry {entry_id}{of}: pgra memory list{flag} shows those there are"
        )

    def _alike(
        self, events: Iterable[MemoryEntry], entries: Iterable[MemoryEntry]
    ) -> list[MemoryEntry]:
        """Return the events on the questions of these entries, as the look-up holds them."""
        keys = {self.lookup.key(entry) for entry in entries}
        return [event for event in events if self.lookup.key(event) in keys]

    def _change(self, entry: MemoryEntry, kind: Kind, feedback: str = "") -> MemoryEntry:
        event = replace(entry, kind=kind, feedback=feedback, source=self.source, time=now())
        return self.log.insert(event)
