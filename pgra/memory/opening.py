"""Opens a look-up by its name, with its encoder, its vectors and its gate."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pgra.checks import argument as _arg
from pgra.checks import choose
from pgra.errors import ConfigError
from pgra.io import artifact_dir
from pgra.memory.families import Family
from pgra.memory.keys import strip_slot
from pgra.memory.log import FeedbackLog
from pgra.memory.lookup import (
    LOOKUPS,
    THRESHOLDS,
    Bm25Lookup,
    EditLookup,
    EncoderLookup,
    GeneratingLookup,
    Lookup,
    RelativeEditLookup,
)
from pgra.types import Json

if TYPE_CHECKING:
    from pgra.memory.vectors import TextEncoder
    from pgra.retrieval.exact import Vectors

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
        from pgra.models.encoder import Encoder

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
