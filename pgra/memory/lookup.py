"""Look-ups M(x) and their gate (Madaan et al. 2022): the nearest stored feedback for a question.

Each follows the log: what another process adds, updates or deletes counts at the next question.
Higher scores are nearer. A user's question is looked up among their own entries and shared ones; of
equal scores their own come first, then the newest (`nearest_first`). The release returns the oldest
of equally near keys, and its semantic memory another key's.

The combiner C(x, M(x)) is a gate, a threshold on the score (section 3.4). Questions are compared
by their keys: `normalize_key` is the release's, `plain_key` is for questions of any kind.
"""

import math
import re
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Protocol, Self, cast

import numpy as np
import numpy.typing as npt
from rapidfuzz import process
from rapidfuzz.distance import OSA, Indel, Levenshtein

from pgra.artifacts import digest
from pgra.config import Arguments, arg, find_class
from pgra.core import Context, Json, Rows
from pgra.data.text import WORDS, copy_key, drop_punctuation, split_words, strip_marks
from pgra.errors import ConfigError
from pgra.memory.families import Family
from pgra.memory.log import SHARED, FeedbackLog, MemoryEntry, Part

LOOKUPS: Mapping[str, str] = {
    "bm25": "pgra.memory.lookup:Bm25Lookup",
    "edit": "pgra.memory.lookup:EditLookup",
    "encoder": "pgra.memory.lookup:EncoderLookup",
    "gud-ir": "pgra.memory.lookup:GeneratingLookup",
    "paraphrase": "pgra.memory.lookup:ParaphraseLookup",
    "relative-edit": "pgra.memory.lookup:RelativeEditLookup",
}
MAX_DISTANCE = 5  # the release accepts distances below 6
MIN_LIKENESS = 0.8  # of RelativeEditLookup; docs/memory.md shows what passes
_ALIKE = 0.7  # from here on an exchanged word makes another question of one
_WHOLE = ("paraphrase", "relative-edit")  # what people ask, without slots
MAX_QUESTION_TOKENS = 512  # read by GUD-IR's generator
MAX_FEEDBACK_TOKENS = 64  # written by it
_SLOT = re.compile(r"<.*>", re.DOTALL)  # from the first < to the last >, as the release has it
_FORMS = {"slotless": {}, "whole": {"key_form": "whole"}, "feedback": {"of": "feedback"}}
_K1, _B = 1.5, 0.75  # as BM25 of the first stage has them
_LEAST_LETTERS = 4  # of a word that may hold a slip
_CHUNK = 8192  # texts encoded and kept at once; a stop loses no more
_DIGITS = 5  # of a cosine
_MOST_WRITTEN = 65_536  # generated feedback kept by question
Floats = npt.NDArray[np.float64]
_Slot = tuple[str, str]  # user and question


def strip_slot(question: str) -> str:
    """Remove <...>, the word that a question is about."""
    return " ".join(_SLOT.sub(" ", question).split())


def in_form(question: str, form: str) -> str:
    """Return a question as an encoder reads it: if `form` is "slotless" without <...>."""
    return (strip_slot(question) or question) if form == "slotless" else question


def normalize_key(question: str, *, is_whole: bool = False) -> str:
    """Return a question as edit distance compares it (Madaan et al. 2022, the release's memory).

    Lower case, NFC, single spaces, without punctuation and without <...>; if `is_whole`, what
    stands in <...> stays, such as a review's <br>.
    """
    text = question if is_whole else _SLOT.sub(" ", question)
    return drop_punctuation(copy_key(text))


def plain_key(question: str) -> str:
    """Return a question without its case, extra spaces and surrounding punctuation."""
    return strip_marks(copy_key(question))


@dataclass(kw_only=True)
class LookupArguments(Arguments):
    """How a question's nearest feedback is found, and when it is near enough."""

    GROUP = "Memory"

    lookup: str | None = arg(
        None,
        "edit (distance of normalised keys: the paper's, for few phrasings and for languages "
        "without an encoder), relative-edit (distance of whole questions beside their lengths: for "
        "questions of any kind), paraphrase (an encoder: also in other words), encoder (its cosine "
        "alone), bm25, or gud-ir (the stored feedback nearest to "
        "one that a model writes for the question); default: edit for the families of "
        "configs/memory and those that ask with <...>, else relative-edit.",
        choices=LOOKUPS,
        is_open=True,
        is_common=True,
    )
    threshold: float | None = arg(
        None,
        "Smallest score that passes; higher is closer. edit: minus the distance, 0 the same "
        "(default -5); relative-edit: 0 to 1, 1 the same (0.8); encoder: a cosine, 1 the same "
        "(0.9; paraphrase 0.65); bm25: from 0 (1); gud-ir: a cosine (0.9). Label feedback of "
        "configs/memory has no gate unless one is given.",
        is_common=True,
    )
    encoder: str = arg(
        "sentence-transformers/all-MiniLM-L6-v2",
        "Encoder of --lookup paraphrase, encoder or gud-ir: hub id, folder or bundled:NAME. pgra "
        "memory train-similarity makes a folder.",
        is_common=True,
    )
    key_form: str | None = arg(
        None,
        "What is compared of a question: slotless (without <...>), or whole; default: slotless for "
        "families that ask with <...>, else whole. relative-edit and paraphrase compare whole "
        "questions.",
        choices=("slotless", "whole"),
    )
    generator: str | None = arg(
        None,
        "Seq2seq model of --lookup gud-ir, which writes the feedback: a folder of pgra memory "
        "train-gud-ir, or any that was trained so.",
        needs={"lookup": "gud-ir"},
    )

    def check(self) -> None:
        if self.lookup in _WHOLE and self.key_form == "slotless":
            raise ConfigError(
                f"lookup {self.lookup} compares whole questions: leave --key_form slotless out, or "
                "use --lookup edit"
            )
        if self.lookup == "gud-ir" and self.generator is None:
            raise ConfigError(
                "lookup gud-ir writes a feedback with a model: name it with --generator FOLDER "
                "(pgra memory train-gud-ir makes one)"
            )
        if self.threshold is not None and self.lookup is not None:  # else `settle` fills it in
            scores = self._scored_by.scores
            if not scores.least <= self.threshold <= scores.most:
                raise ConfigError(
                    f"threshold is {self.threshold:g}: scores of {self.lookup} are from "
                    f"{scores.least:g} to {scores.most:g}, and its own threshold is {scores.gate:g}"
                )

    def settle(self, family: Family | None = None) -> Self:
        """Return a copy with look-up and key form chosen for a family; None: for any questions."""
        release = family is not None and family.follows_release
        edit = release or self.key_form == "slotless"
        lookup = self.lookup or ("edit" if edit else "relative-edit")
        has_slots = family is not None and family.has_slots and lookup not in _WHOLE
        form = self.key_form or ("slotless" if has_slots else "whole")
        return replace(self, lookup=lookup, key_form=form)

    @property
    def _scored_by(self) -> "type[Lookup]":
        cls: type[Lookup] = find_class("lookup", self.lookup or "relative-edit", LOOKUPS)
        return cls

    @property
    def gate(self) -> float:
        """The threshold: the one given, else the look-up's own."""
        return self._scored_by.scores.gate if self.threshold is None else self.threshold

    def gate_of(self, family: Family | None) -> float | None:
        """Return a family's threshold; the paper's label feedback has none by default."""
        is_open = family is not None and family.is_of_paper and family.is_of_answers
        return self.threshold if is_open else self.gate


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


class Lookup(Protocol):
    """Finds a memory's entries by a question."""

    scores: ClassVar[ScoreRange]

    @classmethod
    def load(cls, args: LookupArguments, part: Part, context: Context) -> "OpenLookup":
        """Load models once; return a function that opens the look-up of any log for a part of it.

        `args` must be settled; an encoder runs on the context's device.

        Raises:
            ModelError: If a model cannot be found or loaded.
        """
        ...

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """All that its scores depend on, besides the memory and the question."""
        ...

    def find(self, question: str, k: int = 1) -> list[Match]:
        """Return at most k entries, the nearest first."""
        ...


OpenLookup = Callable[[FeedbackLog], Lookup]


def load_lookup(args: LookupArguments, context: Context, part: Part = SHARED) -> OpenLookup:
    """Load a look-up by its name (see `Lookup.load`); open arguments are settled for no family."""
    args = args.settle()
    cls: type[Lookup] = find_class("lookup", str(args.lookup), LOOKUPS)
    return cls.load(args, part, context)


def passing(matches: Sequence[Match], threshold: float | None) -> list[Match]:
    """Return the matches whose score is at least the threshold; all if it is None."""
    return [match for match in matches if threshold is None or match.score >= threshold]


def is_exchanged(key: str, other: str) -> bool:
    """Whether a word of one plain key is replaced in the other, as "close" by "open".

    Added words, slips of a letter within a word, and spaces do not count.
    """
    if key.replace(" ", "") == other.replace(" ", ""):
        return False
    words, others = ([strip_marks(word) for word in text.split()] for text in (key, other))
    edits = Levenshtein.editops(words, others)
    for edit in edits:
        if edit.tag == "replace" and not _is_slip(words[edit.src_pos], others[edit.dest_pos]):
            return True
    return {"insert", "delete"} <= {edit.tag for edit in edits}


def _is_slip(word: str, other: str) -> bool:
    is_long = min(len(word), len(other)) >= _LEAST_LETTERS and word.isalpha() and other.isalpha()
    return is_long and word[0] == other[0] and OSA.distance(word, other) <= 1


def _drop_exchanged(scores: Floats, likeness: Floats, key: str, keys: Sequence[str]) -> Floats:
    """Set 0 for rows similar to a key but for an exchanged word."""
    for row in np.flatnonzero(likeness >= _ALIKE).tolist():
        if is_exchanged(key, keys[row]):
            scores[row] = 0.0
    return scores


def nearest_first(scores: Floats, is_own: npt.ArrayLike, ids: npt.ArrayLike) -> Rows:
    """Return the rows by score, then the user's own, then newest (largest id)."""
    return np.lexsort((-np.asarray(ids), -np.asarray(is_own, np.int8), -scores))


class LogLookup(ABC):
    """Shared by look-ups by text: a row an entry, following the log, the order."""

    def __init__(self, log: FeedbackLog, part: Part = SHARED, *, form: str = "slotless") -> None:
        """Follow a log; `form`: compare "slotless" or "whole" keys, or the "feedback"."""
        self._log, self._part, self._form = log, part, form
        self._clear()

    @classmethod
    def load(cls, args: LookupArguments, part: Part, context: Context) -> OpenLookup:  # noqa: ARG003
        form = str(args.key_form)
        return cast(OpenLookup, lambda log: cls(log, part, form=form))

    def find(self, question: str, k: int = 1) -> list[Match]:
        self._follow()
        scores, ids = self._score(question), np.array(self._ids, np.int64)
        scores[ids == 0] = -np.inf
        nearest: dict[str | int, int] = {}
        for row in nearest_first(scores, self._is_own, ids).tolist():
            if len(nearest) == k or scores[row] == -np.inf:
                break
            nearest.setdefault(self._name(row), row)
        found = {int(ids[row]): float(scores[row]) for row in nearest.values()}
        entries = self._log.get(list(found))
        return [Match(**vars(entry), score=found[entry.id]) for entry in entries]

    @abstractmethod
    def _score(self, question: str) -> Floats:
        """Return each row's score; minus infinity where it is not found."""

    def _name(self, row: int) -> str | int:
        """Return what is found once."""
        return row

    def _normalize(self, text: str) -> str:
        return normalize_key(text, is_whole=self._form == "whole")

    def _clear(self) -> None:
        self._through = 0
        self._rows: dict[_Slot, int] = {}
        # By row; the id of what is no longer there is 0.
        self._ids, self._is_own, self._texts = array("q"), array("b"), list[str]()

    def _follow(self) -> None:
        """Take in new events; all again after an erasure."""
        news: Iterable[MemoryEntry] = self._log.events(after=self._through)
        if self._through:
            news = list(news)
            if any(event.kind == "erase" for event in news):
                self._clear()
                news = self._log.events()
        for event in news:
            self._through = event.id
            if event.kind == "erase" or not self._part.holds(event):
                continue
            slot = (event.user, event.question)
            if (old := self._rows.pop(slot, None)) is not None:
                self._drop(old)
            if event.kind != "delete":
                self._rows[slot] = len(self._ids)
                self._take(event)

    def _take(self, event: MemoryEntry) -> None:
        self._ids.append(event.id)
        self._is_own.append(event.user != "")
        text = event.feedback if self._form == "feedback" else event.question
        self._texts.append(self._normalize(text))

    def _drop(self, row: int) -> None:
        self._ids[row], self._texts[row] = 0, ""


class EditLookup(LogLookup):
    """By the edit distance of normalised keys (the paper's closest memory; App. E).

    Keys that are equal once normalised are found once.
    """

    scores: ClassVar = ScoreRange(-MAX_DISTANCE, -math.inf, 0.0)
    _equal: ClassVar[float] = 0.0  # the score of equal keys
    _scorer: ClassVar[Any] = staticmethod(Levenshtein.distance)

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        return {"lookup": "edit", **_FORMS[self._form]}

    def _score(self, question: str) -> Floats:
        key = self._normalize(question)
        distances = process.cdist([key], self._texts, scorer=self._scorer, dtype=np.float64)[0]
        return np.asarray(self._equal - distances)

    def _name(self, row: int) -> str:
        return self._texts[row]


class RelativeEditLookup(EditLookup):
    """By the edit distance of whole questions relative to their lengths, from 0 to 1 (the same).

    1 - (letters to insert or delete) / (letters of both); 0 if only a word is exchanged
    (`is_exchanged`). Added words and slips keep two questions near; a short one is far from others.
    """

    scores: ClassVar = ScoreRange(MIN_LIKENESS, 0.0, 1.0)
    _equal: ClassVar[float] = 1.0
    _scorer: ClassVar[Any] = staticmethod(Indel.normalized_distance)

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        return {"lookup": "relative-edit", "exchanged": 0}

    def _score(self, question: str) -> Floats:
        likeness = super()._score(question)
        return _drop_exchanged(likeness, likeness, self._normalize(question), self._texts)

    def _normalize(self, text: str) -> str:
        return plain_key(text)


class Bm25Lookup(LogLookup):
    """By BM25 over the words of keys, with Lucene's idf, which is positive in small memories too.

    tf / (tf + k1 (1 - b + b length / mean length)) times ln(1 + (N - n + 0.5) / (n + 0.5)). Words
    are weighed at each question, so that scores equal those of a fresh index.
    """

    scores: ClassVar = ScoreRange(1.0, 0.0, math.inf)

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        return {
            "lookup": "bm25",
            "k1": _K1,
            "b": _B,
            "idf": "lucene",
            "words": WORDS,
            **_FORMS[self._form],
        }

    def _normalize(self, text: str) -> str:
        return text if self._form == "whole" else _SLOT.sub(" ", text)

    def _score(self, question: str) -> Floats:
        scores = np.zeros(len(self._ids))
        num_entries = len(self._rows)
        mean = self._num_words / max(1, num_entries)
        for word in split_words(self._normalize(question)):
            if count := self._counts.get(word):
                rows, often = (np.array(values) for values in self._found[word])
                sizes = np.frombuffer(self._sizes)[rows]
                idf = math.log(1 + (num_entries - count + 0.5) / (count + 0.5))
                scores[rows] += idf * often / (often + _K1 * (1 - _B + _B * sizes / mean))
        return np.where(scores > 0, scores, -np.inf)

    def _clear(self) -> None:
        super()._clear()
        self._sizes = array("d")  # words, by row
        self._found: dict[str, tuple[array[int], array[float]]] = {}  # by word: rows, how often
        self._counts: Counter[str] = Counter()  # by word: entries now
        self._num_words = 0

    def _take(self, event: MemoryEntry) -> None:
        super()._take(event)
        words = Counter(split_words(self._texts[-1], singles=True))
        for word, count in words.items():
            rows, often = self._found.setdefault(word, (array("q"), array("d")))
            rows.append(len(self._ids) - 1)
            often.append(count)
        self._counts.update(words.keys())
        self._sizes.append(words.total())
        self._num_words += words.total()

    def _drop(self, row: int) -> None:
        words = split_words(self._texts[row], singles=True)
        self._counts.subtract(set(words))
        self._num_words -= len(words)
        super()._drop(row)


class EncoderLookup(LogLookup):
    """By the cosine of a sentence encoder's vectors, which are stored in the memory's file."""

    scores: ClassVar = ScoreRange(0.9, -1.0, 1.0)

    def __init__(
        self, log: FeedbackLog, encoder: Any, part: Part = SHARED, *, form: str = "whole"
    ) -> None:
        """Follow a log with a `pgra.Encoder` whose vectors have unit length; see `LogLookup`."""
        self._encoder = encoder
        self.fingerprint: Mapping[str, Json] = {
            "lookup": "encoder",
            **encoder.query_fingerprint,
            "key_form": form,
        }
        self._kept_as = digest(dict(self.fingerprint))
        self._vectors: npt.NDArray[np.float32]
        super().__init__(log, part, form=form)

    @classmethod
    def load(
        cls, args: LookupArguments, part: Part, context: Context, *, of_feedback: bool = False
    ) -> OpenLookup:
        from pgra.encoders.encoder import Encoder

        form = "feedback" if of_feedback else str(args.key_form)
        encoder = Encoder.load(args.encoder, device=context.device)
        return lambda log: cls(log, encoder, part, form=form)

    def _score(self, question: str) -> Floats:
        if not self._ids:
            return np.empty(0)
        self._encode_new()
        query = self._encoder.encode([self._normalize(question)], is_query=True)[0]
        cosines: Floats = (self._vectors @ query).astype(np.float64)
        # Another batch moves the last digits of a vector: equal texts must stay equal.
        return np.round(cosines, _DIGITS)

    def _encode_new(self) -> None:
        while (start := len(self._vectors)) < len(self._ids):
            rows = slice(start, start + _CHUNK)
            texts = dict(zip(self._ids[rows], self._texts[rows], strict=True))
            vectors = self._log.vectors(self._kept_as, list(texts))
            new = [entry_id for entry_id in texts if entry_id and entry_id not in vectors]
            if new:
                made = self._encoder.encode([texts[entry_id] for entry_id in new])
                vectors |= dict(zip(new, made, strict=True))
                self._log.keep_vectors(self._kept_as, {n: vectors[n] for n in new})
            gone = np.zeros(self._encoder.width, np.float32)
            block = [vectors.get(entry_id, gone) for entry_id in self._ids[rows]]
            self._vectors = np.concatenate([self._vectors, np.stack(block)])

    def _normalize(self, text: str) -> str:
        return in_form(text, self._form)

    def _clear(self) -> None:
        super()._clear()
        self._vectors = np.empty((0, self._encoder.width), np.float32)


class ParaphraseLookup(EncoderLookup):
    """By an encoder, for what people ask: finds other wordings, and no opposites.

    To an encoder "When do you open?" and "When do you close?" are paraphrases. The score is 0 where
    the letters are similar but a word is exchanged.
    """

    scores: ClassVar = ScoreRange(0.65, -1.0, 1.0)

    def __init__(
        self, log: FeedbackLog, encoder: Any, part: Part = SHARED, *, form: str = "whole"
    ) -> None:
        super().__init__(log, encoder, part, form=form)
        self.fingerprint = {**self.fingerprint, "lookup": "paraphrase"}

    def _score(self, question: str) -> Floats:
        key, keys = plain_key(question), [plain_key(text) for text in self._texts]
        distances = process.cdist([key], keys, scorer=Indel.normalized_distance, dtype=np.float64)
        return _drop_exchanged(super()._score(question), 1 - distances[0], key, keys)


class GeneratingLookup:
    """GUD-IR: by the stored feedback nearest to one written for the question (App. A.3)."""

    scores: ClassVar = EncoderLookup.scores

    def __init__(self, write: Callable[[str], str], identity: Json, nearest: Lookup) -> None:
        self._write, self._nearest = write, nearest
        told = {"generator": identity, "max_new_tokens": MAX_FEEDBACK_TOKENS}
        self.fingerprint: Mapping[str, Json] = {
            "lookup": "gud-ir",
            "generator": told,
            "nearest": dict(nearest.fingerprint),
        }

    @classmethod
    def load(cls, args: LookupArguments, part: Part, context: Context) -> OpenLookup:
        how = load_generator(str(args.generator), device=context.device)
        nearest = EncoderLookup.load(args, part, context, of_feedback=True)
        return lambda log: cls(*how, nearest(log))

    def find(self, question: str, k: int = 1) -> list[Match]:
        rough = self._write(question)
        return self._nearest.find(rough, k) if rough else []


def load_generator(name: str, *, device: str = "auto") -> tuple[Callable[[str], str], str]:
    """Load GUD-IR's generator (hub id, folder or bundled:NAME) in float32.

    Returns a cached function that writes a question's feedback on one line, greedily ("" if the
    model writes nothing), and the model's identity.

    Raises:
        ModelError: If it cannot be found or loaded, or is no encoder-decoder.
    """
    import torch
    from transformers import AutoModelForSeq2SeqLM

    from pgra.lm.load import choose_device, find_model, load_pretrained, load_tokenizer

    place, source = choose_device(device), find_model(name)
    load = AutoModelForSeq2SeqLM.from_pretrained
    model = load_pretrained(load, source, dtype=torch.float32).to(place).eval()
    tokenizer = load_tokenizer(source)

    @lru_cache(_MOST_WRITTEN)
    def write(question: str) -> str:
        inputs = tokenizer(
            plain_input(question),
            truncation=True,
            max_length=MAX_QUESTION_TOKENS,
            return_tensors="pt",
        ).to(model.device)
        (tokens,) = model.generate(  # which keeps no gradients
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=MAX_FEEDBACK_TOKENS,
            do_sample=False,
            num_beams=1,
        )
        return " ".join(tokenizer.decode(tokens, skip_special_tokens=True).split())

    return write, source.identity


def plain_input(question: str) -> str:
    """Return a question as the generator reads it: one line, with () for <>, unknown to T5."""
    return " ".join(question.replace("<", "(").replace(">", ")").split())
