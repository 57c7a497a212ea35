"""Look-ups M(x): which stored feedback is for a question like this one (Madaan et al. 2022, 3.4).

Each follows the log: what another process wrote, corrected or forgot counts at the next question.
Scores are higher for nearer keys, and of equals the newest wins, so that a key that was written
again gives its last feedback; the release's semantic memory gave that of another key then.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from rapidfuzz import process
from rapidfuzz.distance import Indel, Levenshtein

from pgra.memory.events import Entry, Event
from pgra.memory.keys import MAX_DISTANCE, MIN_LIKENESS, normalize_key, plain_key
from pgra.memory.log import FeedbackLog
from pgra.types import Json

if TYPE_CHECKING:
    from pgra.memory.vectors import KeyVectors

LOOKUPS = ("edit", "relative-edit", "encoder", "bm25", "gud-ir")
THRESHOLDS: Mapping[str, float] = {
    "edit": -MAX_DISTANCE,
    "relative-edit": MIN_LIKENESS,
    "encoder": 0.9,
    "bm25": 1.0,
}
"""The paper's gates: an edit distance below 6, a cosine above 0.9. The others are ours."""
_FIRST_ASKED = 8
_DEEPER = 8  # times as many are asked for, where those found were forgotten or of other tasks
_MANY = 100_000  # keys of one length, that are worth a second thread


@dataclass(frozen=True)
class Match:
    """A stored feedback and how near its key is.

    Attributes:
        entry: What is in the memory.
        score: Minus an edit distance, a likeness from 0 to 1, a cosine, or BM25's score: higher is
            nearer.
    """

    entry: Entry
    score: float


class Lookup(Protocol):
    """Finds entries by a question."""

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give all that its scores depend on, besides the memory and the question."""
        ...

    def find(self, question: str, k: int = 1) -> list[Match]:
        """Give the nearest k entries of its task, the nearest first; fewer where there are fewer.

        Args:
            question: As it was asked.
            k: How many.
        """
        ...


class EncoderLookup:
    """By the cosine of a sentence encoder's vectors: of keys, or of what the vectors are of."""

    def __init__(self, log: FeedbackLog, vectors: "KeyVectors", *, task: str = "") -> None:
        self._log, self._vectors, self._task = log, vectors, task

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give what its scores depend on: the encoder."""
        return {"lookup": "encoder", **self._vectors.fingerprint}

    def find(self, question: str, k: int = 1) -> list[Match]:
        """Give the nearest k entries; see `Lookup`."""
        self._vectors.follow(self._log)
        asked = max(k, _FIRST_ASKED)
        while True:
            near = self._vectors.search(question, asked)
            scores = dict(zip(near.ids, near.scores, strict=True))
            entries = [e for e in self._log.get(near.ids) if e.task == self._task]
            if len(entries) >= k or asked >= len(self._vectors):
                return [Match(entry, scores[entry.id]) for entry in entries[:k]]
            asked *= _DEEPER


class EditLookup:
    """By the edit distance of normalised keys (the paper's closest memory; App. E).

    Keys that are the same once normalised are one key, whose newest feedback counts. Of keys at the
    same distance the one that was written first is taken, as the release does. It can look among
    the stored feedback instead, whose texts then are what is called a key here (GUD-IR).
    """

    _equal = 0.0  # the score of equal keys

    def __init__(
        self,
        log: FeedbackLog,
        *,
        task: str = "",
        max_distance: int | None = None,
        is_whole: bool = False,
        of_feedback: bool = False,
    ) -> None:
        """Follow a log.

        Args:
            log: The memory.
            task: Which questions it is for.
            max_distance: Keys farther than this are not looked for; None looks at all.
            is_whole: Whether what stands in <...> is compared too.
            of_feedback: Whether a text is compared with the feedback instead of the keys.
        """
        self._log, self._task, self._limit = log, task, max_distance
        self._normalize: Callable[[str], str] = partial(normalize_key, is_whole=is_whole)
        self._form = key_form(is_whole=is_whole)
        self._said: dict[str, str] | None = {} if of_feedback else None  # feedback by raw key
        self._through = 0
        self._keys: dict[str, dict[str, int]] = {}  # normalised key: entries' ids by raw key
        self._lengths: dict[int, dict[str, int]] = defaultdict(dict)  # keys: first id, by length

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give what its scores depend on."""
        of_what = {} if self._said is None else {"of": "feedback"}
        return {"lookup": "edit", "max_distance": self._limit, **self._form, **of_what}

    def find(self, question: str, k: int = 1) -> list[Match]:
        """Give the nearest k keys' newest entries; see `Lookup`."""
        self._follow()
        key = self._normalize(question)
        found: list[tuple[float, int, str]] = []  # distance, first id, key
        for length, firsts in self._lengths.items():
            if self._limit is None or abs(length - len(key)) <= self._limit:
                found += self._near(key, firsts)
        nearest = sorted(found)[:k]
        scores = {max(self._keys[near].values()): self._equal - d for d, _, near in nearest}
        return [Match(entry, scores[entry.id]) for entry in self._log.get(list(scores))]

    def _near(self, key: str, firsts: Mapping[str, int]) -> list[tuple[float, int, str]]:
        names = list(firsts)
        workers = 2 if len(names) > _MANY else 1
        (distances,) = process.cdist(
            [key], names, scorer=Levenshtein.distance, score_cutoff=self._limit, workers=workers
        )
        limit = len(key) + max(map(len, names), default=0) if self._limit is None else self._limit
        near = np.flatnonzero(distances <= limit)
        return [(int(distances[i]), firsts[names[i]], names[i]) for i in near]

    def _follow(self) -> None:
        for event in self._log.events(after=self._through):
            self._through = event.id
            if event.task != self._task:
                continue
            new = self._compared(event)
            old = new if self._said is None else self._said.pop(event.key, None)
            if old is not None and (event.kind == "forget" or old != new):
                self._drop(old, event.key)
            if event.kind != "forget":
                self._keys.setdefault(new, {})[event.key] = event.id
                self._lengths[len(new)].setdefault(new, event.id)
                if self._said is not None:
                    self._said[event.key] = new

    def _compared(self, event: Event) -> str:
        return self._normalize(event.key if self._said is None else event.feedback)

    def _drop(self, key: str, raw_key: str) -> None:
        raw = self._keys.get(key, {})
        raw.pop(raw_key, None)
        if not raw:
            self._keys.pop(key, None)
            self._lengths[len(key)].pop(key, None)


class RelativeEditLookup(EditLookup):
    """By the edit distance of whole questions, held against their lengths: from 0 to 1, the same.

    1 - (letters to insert or delete) / (letters of both). That counts a word which is exchanged
    twice and one that is added once, so that "please" keeps two questions near and another name
    does not; and a short question is far from any other, where the release's distance of 5 is not.
    """

    _equal = 1.0

    def __init__(self, log: FeedbackLog, *, task: str = "") -> None:
        super().__init__(log, task=task)
        self._normalize = plain_key

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give what its scores depend on."""
        return {"lookup": "relative-edit"}

    def _near(self, key: str, firsts: Mapping[str, int]) -> list[tuple[float, int, str]]:
        names = list(firsts)
        workers = 2 if len(names) > _MANY else 1
        (far,) = process.cdist(
            [key], names, scorer=Indel.normalized_distance, dtype=np.float64, workers=workers
        )
        return [(float(far[i]), firsts[name], name) for i, name in enumerate(names)]


class Generator(Protocol):
    """Writes the feedback that a question may need."""

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give all that its texts depend on, besides the question."""
        ...

    def write(self, question: str) -> str:
        """Write a rough feedback; "" where there is none."""
        ...


class GeneratingLookup:
    """GUD-IR: by the stored feedback that is nearest to one written for the question (App. A.3)."""

    def __init__(self, generator: Generator, nearest: Lookup) -> None:
        """Join two look-ups.

        Args:
            generator: x to a rough feedback.
            nearest: Finds entries whose feedback is near a text.
        """
        self._generator, self._nearest = generator, nearest

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give what its scores depend on: the generator, and how its text is compared."""
        return {
            "lookup": "gud-ir",
            "generator": dict(self._generator.fingerprint),
            "nearest": dict(self._nearest.fingerprint),
        }

    def find(self, question: str, k: int = 1) -> list[Match]:
        """Give the k entries with the nearest feedback; see `Lookup`."""
        rough = self._generator.write(question)
        return self._nearest.find(rough, k) if rough else []


class Bm25Lookup:
    """By BM25 over the words of normalised keys, with an idf that is above 0 in a small memory too.

    The index is made again when the log has grown: it is for memories of thousands.
    """

    def __init__(self, log: FeedbackLog, *, task: str = "", is_whole: bool = False) -> None:
        self._log, self._task = log, task
        self._normalize = partial(normalize_key, is_whole=is_whole)
        self._form = key_form(is_whole=is_whole)
        self._through = -1
        self._entries: list[Entry] = []
        self._index: Any = None

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give what its scores depend on."""
        return {"lookup": "bm25", "k1": 1.5, "b": 0.75, "idf": "lucene", **self._form}

    def find(self, question: str, k: int = 1) -> list[Match]:
        """Give the best k entries that share a word with a question; see `Lookup`."""
        self._follow()
        if self._index is None:
            return []
        words = self._normalize(question).split()
        scores = self._index.get_scores_from_ids(self._index.get_tokens_ids(words))
        newest_first = np.lexsort((-np.arange(len(scores)), -scores))[:k]
        return [Match(self._entries[i], float(scores[i])) for i in newest_first if scores[i] > 0]

    def _follow(self) -> None:
        last = self._log.last_id
        if last == self._through:
            return
        self._through = last
        self._entries = [entry for entry in self._log.entries() if entry.task == self._task]
        words = [self._normalize(entry.key).split() for entry in self._entries]
        self._index = _index_words(words) if any(words) else None


def key_form(*, is_whole: bool) -> Mapping[str, Json]:
    """Give what a fingerprint tells of the keys' form; nothing where slots are left out."""
    return {"key_form": "whole"} if is_whole else {}


def _index_words(texts: list[list[str]]) -> Any:
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to DEBUG
    vocabulary: dict[str, int] = {}
    ids = [[vocabulary.setdefault(w, len(vocabulary)) for w in words] for words in texts]
    vocabulary.setdefault("", len(vocabulary))
    index = bm25s.BM25(k1=1.5, b=0.75, method="lucene", idf_method="lucene")
    index.index((ids, vocabulary), show_progress=False)
    return index
