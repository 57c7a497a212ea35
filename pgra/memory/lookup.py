"""Look-ups M(x) and their gate (Madaan et al. 2022): the nearest stored feedback for a question.

Each follows the log: what another process adds, updates or deletes counts at the next question.
Higher scores are nearer. A user's question is looked up among their own entries and shared ones; of
equal scores their own come first, then the newest. The release returns the oldest of equally near
keys, and its semantic memory another key's.

The combiner C(x, M(x)) is a gate, a threshold on the score (section 3.4). Questions are compared
by their keys: `normalize_key` is the release's, `plain` is for questions of any kind.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
from rapidfuzz import process
from rapidfuzz.distance import OSA, Indel, Levenshtein

from pgra.arrays import Values, Vectors
from pgra.artifacts import digest
from pgra.config import Arguments, arg, find_class
from pgra.context import Context
from pgra.data.text import copy_key, drop_punctuation, strip_marks
from pgra.encoders import as_encoder
from pgra.errors import ConfigError, one_line
from pgra.memory.families import ANY, Family, plain
from pgra.memory.log import FeedbackLog, MemoryEntry
from pgra.types import Fields

LOOKUPS: Mapping[str, str] = {
    "edit": "pgra.memory.lookup:EditLookup",
    "encoder": "pgra.memory.lookup:EncoderLookup",
    "paraphrase": "pgra.memory.lookup:ParaphraseLookup",
    "relative-edit": "pgra.memory.lookup:RelativeEditLookup",
}
_ALIKE = 0.7  # from here on an exchanged word makes another question of one
_WHOLE = ("paraphrase", "relative-edit")  # what people ask, without slots
_BY_TEXT = ("edit", "relative-edit")  # without an encoder
DEFAULT_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
_LEAST_LETTERS = 4  # of a word that may hold a slip
_DIGITS = 5  # of a cosine


_SLOT = re.compile("<.*>", re.DOTALL)  # from the first < to the last >, as the release does


def in_form(question: str, form: str) -> str:
    """Return a question as it is compared: if `form` is "slotless" without <...>."""
    bare = one_line(_SLOT.sub(" ", question)) if form == "slotless" else ""
    return bare or question


@dataclass(kw_only=True)
class LookupArguments(Arguments):
    """How a question's nearest feedback is found, and when it is near enough."""

    GROUP = "Memory"

    lookup: str | None = arg(
        None,
        "relative-edit (the same question, but for a slip or a word more), paraphrase (by an "
        "encoder, in other words too), encoder (its cosine) or edit (the paper's); default: the "
        "family's, else paraphrase with an encoder, and relative-edit without.",
        choices=LOOKUPS,
        is_open=True,
        is_common=True,
    )
    threshold: float | None = arg(
        None,
        "Smallest score that passes; higher is nearer. Default: relative-edit 0.8, paraphrase "
        "0.65, encoder 0.9, edit -5; none for the family webquestions.",
        is_common=True,
    )
    encoder: str | None = arg(
        None,
        f"Of paraphrase and encoder: hub id, folder or bundled:NAME; default: {DEFAULT_ENCODER}.",
        is_common=True,
    )
    key_form: str | None = arg(
        None,
        "Compare slotless (without <...>) or whole; default: slotless where questions have slots.",
        choices=("slotless", "whole"),
    )

    def check(self) -> None:
        if self.lookup in _WHOLE and self.key_form == "slotless":
            raise ConfigError(f"lookup {self.lookup} compares whole questions: leave key_form out")

    def resolve(self, family: Family | None = None, *, is_encoder_shared: bool = False) -> Self:
        """Return a copy with everything chosen for a family; None: for any questions.

        `is_encoder_shared` says that the encoder has another use too: the look-up may have none.

        Raises:
            ConfigError: If no score of the look-up can reach the threshold, or all do; or if the
                look-up has no encoder.
        """
        family = family or ANY
        lookup = self.lookup or family.lookup
        if self.encoder is not None and not is_encoder_shared:
            if self.lookup is None and lookup == "relative-edit":
                lookup = "paraphrase"
            if lookup in _BY_TEXT:
                raise ConfigError(
                    f"lookup '{lookup}' has no encoder: use lookup paraphrase, or leave encoder out"
                )
        has_slots = family.has_slots and lookup not in _WHOLE
        form = self.key_form or ("slotless" if has_slots else "whole")
        scores: ScoreRange = find_class("lookup", lookup, LOOKUPS).scores
        threshold = self.threshold
        if threshold is None and family.is_gated:
            threshold = scores.gate
        if threshold is not None and not scores.least <= threshold <= scores.most:
            raise ConfigError(
                f"threshold is {threshold:g}: scores are from {scores.least:g} to {scores.most:g}"
            )
        return replace(self, lookup=lookup, key_form=form, threshold=threshold)


@dataclass(frozen=True, kw_only=True)
class Match(MemoryEntry):
    """An entry that was found, and its score: higher is nearer, see `Lookup.scores`."""

    score: float


@dataclass(frozen=True)
class ScoreRange:
    """A look-up's default threshold `gate`, and its smallest and largest score."""

    gate: float
    least: float
    most: float


def load_lookup(
    args: LookupArguments, context: Context, user: str = "", *, encoder: Any = None
) -> "OpenLookup":
    """Load a look-up of resolved arguments; see `Lookup.load`."""
    cls: type[Lookup] = find_class("lookup", str(args.lookup), LOOKUPS)
    return cls.load(args, user, context, encoder)


def passing(matches: Sequence[Match], threshold: float | None) -> list[Match]:
    """Return the matches whose score is at least the threshold; all if it is None."""
    if threshold is not None and math.isnan(threshold):
        raise ValueError("threshold is nan: give a number, or None")
    return [match for match in matches if threshold is None or match.score >= threshold]


def is_exchanged(key: str, other: str) -> bool:
    """Whether a word of one plain key is replaced in the other, as "close" by "open".

    Added words, slips of a letter within a word, and spaces do not count.
    """
    if key.replace(" ", "") == other.replace(" ", ""):
        return False
    words = [strip_marks(word) for word in key.split()]
    others = [strip_marks(word) for word in other.split()]
    edits = Levenshtein.editops(words, others)
    for edit in edits:
        if edit.tag == "replace" and not _is_slip(words[edit.src_pos], others[edit.dest_pos]):
            return True
    return {"insert", "delete"} <= {edit.tag for edit in edits}


def _is_slip(word: str, other: str) -> bool:
    is_long = min(len(word), len(other)) >= _LEAST_LETTERS and word.isalpha() and other.isalpha()
    return is_long and word[0] == other[0] and OSA.distance(word, other) <= 1


def _drop_exchanged(scores: Values, alike: Values, key: str, keys: Sequence[str]) -> Values:
    """Set 0 for rows similar to a key but for an exchanged word."""
    for row in np.flatnonzero(alike >= _ALIKE).tolist():
        if is_exchanged(key, keys[row]):
            scores[row] = 0.0
    return scores


class Lookup(ABC):
    """Finds a memory's entries by a question; it has a row an entry, and follows the log."""

    name: ClassVar[str]
    scores: ClassVar[ScoreRange]

    def __init__(self, log: FeedbackLog, user: str = "", *, form: str = "slotless") -> None:
        """Follow a log, of which a user's entries and shared ones; `form`: see `in_form`."""
        self._log = log
        self._user = user
        self._form = form
        self._through = 0  # the log's last event
        # By row, in the order of their ids.
        self._entries: list[MemoryEntry] = []
        self._keys: list[str] = []

    @classmethod
    def load(
        cls,
        args: LookupArguments,
        user: str,
        context: Context,  # noqa: ARG003 (of models)
        encoder: Any = None,  # noqa: ARG003
    ) -> "OpenLookup":
        """Load models once; return a function that opens the look-up of any log.

        It finds a user's entries and shared ones. `args` must be resolved; `encoder` replaces the
        one that they name, and runs on the context's device. A ModelError if a model cannot be
        loaded.
        """
        return partial(cls, user=user, form=str(args.key_form))

    @property
    def fingerprint(self) -> Fields:
        """All that its scores depend on, besides the memory and the question."""
        return {"lookup": self.name, "key_form": self._form}

    def key(self, entry: MemoryEntry) -> tuple[str, str]:
        """Return its user, and what all spellings of its question share: they change together."""
        return entry.user, self._normalize(plain(entry.question))

    def find(self, question: str, k: int = 1) -> list[Match]:
        """Return at most k entries, the nearest first; of those with one key only the first."""
        self._follow()
        if not self._entries:
            return []
        scores = self._score(self._normalize(question))
        order = np.lexsort((*self._ties, -scores))
        matches: dict[str, Match] = {}
        for row in order.tolist():
            if len(matches) == k:
                break
            match = Match(**vars(self._entries[row]), score=float(scores[row]))
            matches.setdefault(self._keys[row], match)
        return list(matches.values())

    @abstractmethod
    def _score(self, key: str) -> Values:
        """Return each row's score."""

    def _normalize(self, text: str) -> str:
        return in_form(text, self._form)

    def _follow(self) -> None:
        """Take over what the log's entries are now; new ones have larger ids."""
        last = self._log.last_id
        if last == self._through:
            return
        ids = self._log.entry_ids()
        in_force = set(ids)
        rows = [row for row, entry in enumerate(self._entries) if entry.id in in_force]
        later = self._log.get([entry_id for entry_id in ids if entry_id > self._through])
        new = [entry for entry in later if entry.user in ("", self._user)]
        keys = [self._normalize(entry.question) for entry in new]
        self._update(rows, new, keys)
        self._through = max([last, *ids[-1:]])

    def _update(self, rows: Sequence[int], new: Sequence[MemoryEntry], keys: Sequence[str]) -> None:
        """Keep these rows, and add new entries with their keys."""
        self._entries = [*(self._entries[row] for row in rows), *new]
        self._keys = [*(self._keys[row] for row in rows), *keys]
        # Of equal scores the user's own come first, then the newest.
        is_shared = [not entry.user for entry in self._entries]
        self._ties = (np.negative([entry.id for entry in self._entries]), np.array(is_shared))


OpenLookup = Callable[[FeedbackLog], Lookup]


class EditLookup(Lookup):
    """By the edit distance of normalised keys (the paper's closest memory; App. E)."""

    name = "edit"
    scores: ClassVar = ScoreRange(-5.0, -math.inf, 0.0)  # the release: below 6

    def _normalize(self, text: str) -> str:
        """Return lower case, NFC, single spaces, and no punctuation, as the release's memory."""
        return drop_punctuation(copy_key(super()._normalize(text)))

    def _score(self, key: str) -> Values:
        return 0.0 - _compare(key, self._keys, Levenshtein.distance)  # no -0.0


class RelativeEditLookup(EditLookup):
    """By the edit distance of whole questions relative to their lengths, from 0 to 1 (the same).

    1 - (letters to insert or delete) / (letters of both); 0 if only a word is exchanged
    (`is_exchanged`). Added words and slips keep two questions near; a short one is far from others.
    """

    name = "relative-edit"
    scores: ClassVar = ScoreRange(0.8, 0.0, 1.0)  # docs/memory.md shows what passes

    def _score(self, key: str) -> Values:
        scores = 1 - _compare(key, self._keys, Indel.normalized_distance)
        return _drop_exchanged(scores, scores, key, self._keys)

    def _normalize(self, text: str) -> str:
        return plain(text)


def _compare(key: str, keys: Sequence[str], scorer: Any) -> Values:
    distances: Values = process.cdist([key], keys, scorer=scorer, dtype=np.float64)[0]
    return distances


class EncoderLookup(Lookup):
    """By the cosine of a sentence encoder's vectors, which are stored in the memory's file."""

    name = "encoder"
    scores: ClassVar = ScoreRange(0.9, -1.0, 1.0)

    def __init__(
        self, log: FeedbackLog, encoder: Any, user: str = "", *, form: str = "whole"
    ) -> None:
        """Follow a log with a `pgra.Encoder` whose vectors have unit length; see `Lookup`."""
        super().__init__(log, user, form=form)
        self._encoder = encoder
        self._vectors: Vectors = np.empty((0, encoder.width), np.float32)

    @classmethod
    def load(
        cls, args: LookupArguments, user: str, context: Context, encoder: Any = None
    ) -> OpenLookup:
        if encoder is None:
            encoder = args.encoder or DEFAULT_ENCODER
        loaded = as_encoder(encoder, device=context.device)
        if not loaded.fingerprint["normalize"]:
            raise ValueError("encoder makes vectors of other lengths: open it with normalize")
        return partial(cls, encoder=loaded, user=user, form=str(args.key_form))

    @property
    def fingerprint(self) -> Fields:
        return {**super().fingerprint, **self._encoder.query_fingerprint}

    def _score(self, key: str) -> Values:
        query = self._encoder.encode([key], is_query=True)[0]
        cosines: Values = (self._vectors @ query).astype(np.float64)
        # Another batch moves the last digits of a vector: equal texts must stay equal.
        return np.round(cosines, _DIGITS)

    def _update(self, rows: Sequence[int], new: Sequence[MemoryEntry], keys: Sequence[str]) -> None:
        key_of = {entry.id: key for entry, key in zip(new, keys, strict=True)}
        stored_as = digest(self.fingerprint)
        vectors = self._log.vectors(stored_as, list(key_of))
        if missing := [entry_id for entry_id in key_of if entry_id not in vectors]:
            encoded = self._encoder.encode([key_of[entry_id] for entry_id in missing])
            computed = dict(zip(missing, encoded, strict=True))
            self._log.keep_vectors(stored_as, computed)
            vectors |= computed
        added = [vectors[entry_id] for entry_id in key_of]
        self._vectors = np.vstack([self._vectors[list(rows)], *added])
        super()._update(rows, new, keys)


class ParaphraseLookup(EncoderLookup):
    """By an encoder, for what people ask: finds other wordings, and no opposites.

    To an encoder "When do you open?" and "When do you close?" are paraphrases. The score is 0 where
    the letters are similar but a word is exchanged.
    """

    name = "paraphrase"
    scores: ClassVar = ScoreRange(0.65, -1.0, 1.0)

    def _score(self, key: str) -> Values:
        question = plain(key)
        keys = [plain(text) for text in self._keys]
        alike = 1 - _compare(question, keys, Indel.normalized_distance)
        return _drop_exchanged(super()._score(key), alike, question, keys)
