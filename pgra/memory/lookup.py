"""Look-ups M(x), their gate, and their opening by name (Madaan et al. 2022).

Each follows the log: what another process wrote, corrected or forgot counts at the next question.
Scores are higher for nearer keys, and of equals the newest wins, so that a key that was written
again gives its last feedback; the release's semantic memory gave that of another key then.
"""

import json
import logging
import math
import re
import string
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from rapidfuzz import process
from rapidfuzz.distance import Indel, Levenshtein

from pgra.artifacts import artifact_dir
from pgra.config import argument as _arg
from pgra.config import choose
from pgra.core import Json
from pgra.errors import ConfigError, DataError
from pgra.memory.families import Family
from pgra.memory.log import Event, FeedbackLog

if TYPE_CHECKING:
    from pgra.memory.vectors import KeyVectors, TextEncoder
    from pgra.retrieval.faiss import Vectors


# Keys as the paper's closest memory compares them, and keys that are near but mean otherwise.


MAX_DISTANCE = 5
"""The release accepts a key at an edit distance of less than 6."""
MIN_LIKENESS = 0.85
"""Texts at least so alike are taken for the same; `docs/memory.md` tells what that lets through."""
_END_MARKS = " ?.!"
_SLOT = re.compile(r"<.*>", re.DOTALL)  # from the first < to the last >, as the release has it
_DROPPED = str.maketrans("", "", string.punctuation)


def strip_slot(question: str) -> str:
    """Take out what stands in <...>: the word that a question is about."""
    return " ".join(_SLOT.sub(" ", question).split())


def normalize_key(question: str, *, is_whole: bool = False) -> str:
    """Give a question as edit distance compares it (Madaan et al. 2022, the release's memory).

    What stands in <...> and punctuation are dropped, letters are lower-cased, spaces collapse.

    Args:
        question: As it was asked.
        is_whole: Whether what stands in <...> stays: a review's <br> opens no slot.
    """
    told = question if is_whole else _SLOT.sub(" ", question)
    return " ".join(told.lower().translate(_DROPPED).split())


def plain_key(question: str) -> str:
    """Give a question as people may ask it again: any case, other spaces, no mark at its end."""
    told = " ".join(question.casefold().split())
    return told.rstrip(_END_MARKS) or told


@dataclass(frozen=True)
class Collision:
    """Two near keys whose feedback is not the same: "what is like" and "what is unlike".

    Attributes:
        first: Place of one in what was given.
        second: Place of the other, which is larger.
        distance: Edit distance of the keys as they are compared.
    """

    first: int
    second: int
    distance: int


def find_collisions(
    keys: Sequence[str], meanings: Sequence[str], *, is_relative: bool = False
) -> list[Collision]:
    """Find pairs of keys that look-up by edit distance would take for each other, wrongly.

    Args:
        keys: Questions (n,).
        meanings: What each is meant as: its feedback, or its type.
        is_relative: Whether the edit distance is held against the keys' lengths, as among questions
            of any kind; else the release's rule decides.

    Returns:
        Pairs of different normalised keys with different meanings, and those of one normalised key
        with different meanings (distance 0), in the order of keys. A pair of normalised keys is
        told once, with the last place of each, for the newest is what a look-up would give.
    """
    compared = plain_key if is_relative else normalize_key
    latest = {(compared(key), meanings[i]): i for i, key in enumerate(keys)}
    distinct = sorted(latest.items(), key=lambda item: item[1])
    found = []
    for (mine, first), (theirs, second) in combinations(distinct, 2):
        if mine[1] == theirs[1]:
            continue
        pair = (mine[0], theirs[0])
        if _is_alike(*pair) if is_relative else _is_within(*pair):
            found.append(Collision(first, second, Levenshtein.distance(*pair)))
    return found


def _is_alike(one: str, other: str) -> bool:
    return Indel.normalized_similarity(one, other, score_cutoff=MIN_LIKENESS) >= MIN_LIKENESS


def _is_within(one: str, other: str) -> bool:
    return Levenshtein.distance(one, other, score_cutoff=MAX_DISTANCE) <= MAX_DISTANCE


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

    entry: Event
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
        self._entries: list[Event] = []
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


# The combiner C(x, M(x)): a gate that lets no far-off feedback through (Madaan et al. 2022, 3.4).
#
# A threshold on the look-up's score. It can be chosen on a stream of questions whose meanings are
# known: each question looks among those before it, as if every one of them had been clarified.


def passing(matches: Sequence[Match], threshold: float | None) -> list[Match]:
    """Give the matches whose score is at least the threshold; all where there is none."""
    return [match for match in matches if threshold is None or match.score >= threshold]


def pass_gate(matches: Sequence[Match], threshold: float | None) -> Match | None:
    """Give the nearest match, if its score is at least the threshold."""
    near = passing(matches[:1], threshold)
    return near[0] if near else None


@dataclass(frozen=True)
class Trial:
    """What a look-up gave for one question of a dev stream.

    Attributes:
        score: Of the nearest key; None where nothing was found.
        is_right: Whether that key meant what the question means.
        has_right: Whether any key in the memory did.
    """

    score: float | None
    is_right: bool
    has_right: bool


@dataclass(frozen=True)
class GateReport:
    """What a threshold does.

    Attributes:
        threshold: Scores of at least this pass.
        precision: Share of what passes that is right; None where nothing passes.
        recall: Share of the questions with a right key in the memory that get one.
        num_passed: Questions that get a feedback.
        num_trials: All questions.
    """

    threshold: float
    precision: float | None
    recall: float | None
    num_passed: int
    num_trials: int


def try_lookup(
    log: FeedbackLog,
    lookup: Lookup,
    questions: Sequence[str],
    meanings: Sequence[str],
    *,
    feedbacks: Sequence[str] | None = None,
) -> list[Trial]:
    """Look each question up among those before it, then write it.

    Args:
        log: An empty memory.
        lookup: Follows this log.
        questions: In the order they are asked (n,).
        meanings: What each means: its type, or its feedback.
        feedbacks: What is written for each; None writes the meanings.

    Raises:
        ValueError: If the memory is not empty.
    """
    if log.last_id:
        raise ValueError(f"{log.path} is not empty: a gate is chosen with a memory of its own")
    trials, seen, written = [], set[str](), dict[int, str]()
    told = zip(questions, meanings, meanings if feedbacks is None else feedbacks, strict=True)
    for question, meaning, feedback in told:
        found = lookup.find(question)
        is_right = bool(found) and written[found[0].entry.id] == meaning
        trials.append(Trial(found[0].score if found else None, is_right, meaning in seen))
        seen.add(meaning)
        written[log.write(question, feedback, source="dev").id] = meaning
    return trials


def judge_threshold(trials: Sequence[Trial], threshold: float) -> GateReport:
    """Say what a threshold does to these trials."""
    passed = [t for t in trials if t.score is not None and t.score >= threshold]
    right = sum(trial.is_right for trial in passed)
    wanted = sum(trial.has_right for trial in trials)
    return GateReport(
        threshold,
        right / len(passed) if passed else None,
        right / wanted if wanted else None,
        len(passed),
        len(trials),
    )


def choose_threshold(trials: Sequence[Trial]) -> GateReport:
    """Choose the threshold with the largest F1, of equals the strictest.

    Candidates are the scores that were met.

    Raises:
        DataError: If no look-up ever found a right key.
    """
    scores = sorted({trial.score for trial in trials if trial.score is not None}, reverse=True)
    reports = [judge_threshold(trials, score) for score in scores]
    best = max(reports, key=_f1, default=None)
    if best is None or not _f1(best):
        raise DataError(
            f"no threshold can be chosen from {len(trials)} questions: no look-up found a key of "
            "the same meaning; give a longer dev stream, or --threshold"
        )
    return best


def _f1(report: GateReport) -> float:
    precision, recall = report.precision or 0.0, report.recall or 0.0
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


# Opens a look-up by its name, with its encoder, its vectors and its gate.


KEY_FORMS = ("whole", "slotless")
FEEDBACK_BY = ("encoder", "edit")
RELATIVE = "relative-edit"
_SCORES = {
    "edit": (-math.inf, 0.0, "an edit distance counts below 0"),
    RELATIVE: (0.0, 1.0, "a relative edit distance is from 0 to 1, which is the same"),
    "encoder": (-1.0, 1.0, "a cosine is from -1 to 1"),
    "bm25": (0.0, math.inf, "BM25's scores are above 0"),
}
_FEEDBACK = "feedback"  # the form of vectors of feedback, which is read whole


@dataclass(kw_only=True)
class LookupArguments:
    """How a question's nearest feedback is found, and when it is near enough."""

    lookup: str | None = _arg(
        None,
        "edit (distance of normalised keys: the paper's, for few phrasings and for languages "
        "without an encoder), relative-edit (distance of whole questions beside their lengths: for "
        "questions of any kind), encoder (cosine), bm25, or gud-ir (the stored feedback nearest to "
        "one that a model writes for the question); default: edit for the families of "
        "configs/memory and those that ask with <...>, else relative-edit.",
    )
    threshold: float | None = _arg(
        None,
        "Smallest score that passes; higher is closer. edit: minus the distance, 0 the same "
        "(default -5); relative-edit: 0 to 1, 1 the same (0.85); encoder: a cosine, 1 the same "
        "(0.9); bm25: from 0 (1); gud-ir: as --feedback_by. Label feedback of configs/memory has "
        "no gate unless one is given.",
    )
    encoder: str = _arg(
        "sentence-transformers/all-MiniLM-L6-v2",
        "Encoder of --lookup encoder or gud-ir: hub id, folder or bundled:NAME. pgra memory "
        "train-similarity makes a folder.",
    )
    key_form: str | None = _arg(
        None,
        "What is compared of a question: slotless (without <...>), or whole; default: slotless for "
        "families that ask with <...>, else whole. relative-edit compares whole questions.",
    )
    generator: str | None = _arg(
        None,
        "Seq2seq model of --lookup gud-ir, which writes the feedback: a folder of pgra memory "
        "train-gud-ir, or any that was trained so.",
    )
    feedback_by: str = _arg(
        "encoder", "How gud-ir compares feedback: encoder (cosine) or edit (distance)."
    )

    def __post_init__(self) -> None:
        """Refuse what is no look-up, and a threshold that is of another."""
        if self.lookup is not None:
            choose("lookup", self.lookup, LOOKUPS)
        if self.key_form is not None:
            choose("key_form", self.key_form, KEY_FORMS)
        choose("feedback_by", self.feedback_by, FEEDBACK_BY)
        if (self.lookup, self.key_form) == ("relative-edit", "slotless"):
            raise ConfigError(
                "lookup relative-edit compares whole questions: leave --key_form slotless out, or "
                "use --lookup edit"
            )
        if (self.lookup == "gud-ir") != (self.generator is not None):
            raise ConfigError(
                "lookup gud-ir writes a feedback with a model: name it with --generator FOLDER "
                "(pgra memory train-gud-ir makes one), and for no other look-up"
            )
        self._check_threshold()

    def _check_threshold(self) -> None:
        value = self.threshold
        if value is None:
            return
        if not math.isfinite(value):
            raise ConfigError(f"threshold is {value:g}: give a number that a score can reach")
        if self.lookup is None:  # `settle` tells which scores there are
            return
        if self._score == "edit" and value > 0:
            raise ConfigError(
                f"threshold is {value:g}, and an edit distance counts below 0: give -{value:g}"
            )
        low, high, told = _SCORES[self._score]
        if not low <= value <= high:
            raise ConfigError(f"threshold is {value:g}: {told}")

    def settle(self, family: Family | None = None) -> Self:
        """Give the same with what was left open, as it is for a family of questions.

        Args:
            family: None for questions of any kind.

        Raises:
            ConfigError: If the threshold is none of the look-up's.
        """
        release = family is not None and family.follows_release
        lookup = self.lookup or ("edit" if release or self.key_form == "slotless" else RELATIVE)
        has_slots = family is not None and family.has_slots and lookup != RELATIVE
        return replace(
            self, lookup=lookup, key_form=self.key_form or ("slotless" if has_slots else "whole")
        )

    @property
    def gate(self) -> float:
        """Give the threshold: the one asked for, else the look-up's own."""
        return THRESHOLDS[self._score] if self.threshold is None else self.threshold

    def gate_of(self, family: Family | None) -> float | None:
        """Give the threshold for a family: the paper's label feedback has none of its own."""
        is_open = family is not None and family.is_of_paper and family.is_of_answers
        return self.threshold if is_open else self.gate

    @property
    def _score(self) -> str:
        return self.feedback_by if self.lookup == "gud-ir" else self.lookup or RELATIVE


class KeyEncoder:
    """A sentence encoder that reads texts whole, or without what stands in <...>.

    Attributes:
        width: D.
    """

    def __init__(self, name: str, form: str, *, device: str) -> None:
        """Load it.

        Args:
            name: Hub id, folder or bundled:NAME.
            form: One of `KEY_FORMS`, or "feedback": whole, and told apart in fingerprints.
            device: Where.

        Raises:
            ModelError: If it cannot be found or loaded.
        """
        from pgra.encoders.encoder import Encoder

        self._encoder = Encoder.from_name(name, device=device)
        self._form = form
        self.width = self._encoder.width

    @property
    def query_fingerprint(self) -> Mapping[str, Json]:
        """Give what the vectors depend on, besides the text."""
        return {**self._encoder.query_fingerprint, "key_form": self._form}

    def encode(self, texts: Sequence[str], *, is_query: bool = False) -> "Vectors":
        """Give the vectors (n, D) float32, of unit length."""
        told = [strip_slot(text) or text for text in texts] if self._form == "slotless" else texts
        return self._encoder.encode(told, is_query=is_query)


OpenLookup = Callable[[FeedbackLog], Lookup]


def lookup_opener(args: LookupArguments, *, device: str = "auto", task: str = "") -> OpenLookup:
    """Load what a look-up needs, once for any number of memories.

    Args:
        args: Which look-up; what is open there is as for questions of any kind.
        device: Where its encoder runs.
        task: Which entries count.

    Returns:
        What opens the look-up of a log. Vectors lie beside the log, a folder for each encoder: one
        that was made by another is never read.

    Raises:
        ModelError: If the encoder or the generator cannot be found or loaded.
    """
    args = args.settle()
    if args.lookup == "gud-ir":
        return _generating_opener(args, device=device, task=task)
    is_whole = args.key_form == "whole"
    if args.lookup == "edit":
        return lambda log: EditLookup(log, task=task, is_whole=is_whole)
    if args.lookup == RELATIVE:
        return lambda log: RelativeEditLookup(log, task=task)
    if args.lookup == "bm25":
        return lambda log: Bm25Lookup(log, task=task, is_whole=is_whole)
    form = "whole" if is_whole else "slotless"
    return _encoder_opener(args.encoder, form, device=device, task=task)


def _generating_opener(args: LookupArguments, *, device: str, task: str) -> OpenLookup:
    from pgra.memory.generator import FeedbackGenerator

    generator = FeedbackGenerator.from_name(str(args.generator), device=device)
    if args.feedback_by == "edit":
        return lambda log: GeneratingLookup(generator, EditLookup(log, task=task, of_feedback=True))
    nearest = _encoder_opener(args.encoder, _FEEDBACK, device=device, task=task)
    return lambda log: GeneratingLookup(generator, nearest(log))


def _encoder_opener(name: str, form: str, *, device: str, task: str) -> OpenLookup:
    from pgra.memory.vectors import KeyVectors

    encoder = KeyEncoder(name, form, device=device)

    def open_lookup(log: FeedbackLog) -> Lookup:
        folder = vectors_folder(log.path, name, encoder)
        vectors = KeyVectors(folder, encoder, of_feedback=form == _FEEDBACK)
        return EncoderLookup(log, vectors, task=task)

    return open_lookup


def vectors_folder(path: Path, name: str, encoder: "TextEncoder") -> Path:
    """Give the folder of a memory's vectors by one encoder."""
    short = Path(name.removeprefix("bundled:").partition("@")[0]).name
    root = path.with_name(f"{path.name}.vectors")
    return artifact_dir(root, short, dict(encoder.query_fingerprint))


# Entries that a look-up may take for a new one, though they mean something else.


_COMPARED = 10_000  # entries; of larger memories `pgra memory list --collisions` tells


@dataclass(frozen=True)
class Near:
    """An entry of a near key and another feedback.

    Attributes:
        distance: Edit distance of the keys as they are compared.
        entry: The entry.
    """

    distance: int
    entry: Event


def find_near(log: FeedbackLog, entry: Event, *, is_relative: bool, most: int = 3) -> list[Near]:
    """Give the entries of the same task that an entry collides with, the nearest first.

    Args:
        log: The memory, which the entry is in.
        entry: The new one.
        is_relative: As `find_collisions` has it.
        most: How many are told.

    Returns:
        None of a memory of more than 10,000 entries.
    """
    if len(log) > _COMPARED:
        return []
    near = []
    for one in log.entries():
        if one.id == entry.id or one.task != entry.task:
            continue
        meanings = [one.feedback, entry.feedback]
        found = find_collisions([one.key, entry.key], meanings, is_relative=is_relative)
        near += [Near(pair.distance, one) for pair in found]
    return sorted(near, key=lambda told: (told.distance, -told.entry.id))[:most]


# Kept texts as people see them: in full, with nothing in them that could hide or move a part.
#
# What a user typed, or an LM wrote, may hold characters that are not seen: those that turn the
# direction of text around, have no width, or steer a terminal. They are told by their numbers.


_UNSEEN = {"Cc", "Cf", "Co", "Cs", "Zl", "Zp"}
_JOINERS = "\u200c\u200d"  # Hindi and Punjabi are written with them


def visible(text: str) -> str:
    """Give a text with a number for each character that is not seen; line breaks and tabs stay."""
    return "".join(_number(char) if _is_unseen(char) else char for char in text)


def _is_unseen(char: str) -> bool:
    return char not in "\n\t" and char not in _JOINERS and unicodedata.category(char) in _UNSEEN


def _number(char: str) -> str:
    code = ord(char)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def quoted(text: str) -> str:
    """Give a text in quotes on one line, so that it is seen where it ends."""
    return visible(json.dumps(text, ensure_ascii=False))


def show_entry(entry: Event) -> str:
    """Give a key and its feedback in full, each in quotes."""
    return f"{quoted(entry.key)} -> {quoted(entry.feedback)}"


def show_near(near: Near) -> str:
    """Word that an entry has a near key and another feedback."""
    return (
        f"note: entry {near.entry.id} has a key at edit distance {near.distance} and another "
        f"feedback, so that one may be found for the other: {show_entry(near.entry)}"
    )
