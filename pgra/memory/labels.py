"""A memory of corrected labels: what users said is right, of inputs like this one.

    pgra memory add "a film so bad it is good" positive --task sst2

An entry of a task with labels is a labelled example: the input, and the label that is right. Where
answers are written its feedback is the right answer, the label feedback of Madaan et al. 2022,
App. D.3.
"""

import json
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from pgra.artifacts import digest
from pgra.config import Arguments, arg
from pgra.core import Context, Example, Json, Prediction
from pgra.data.text import text_key
from pgra.errors import ConfigError, DataError, unknown_name
from pgra.memory.log import Event, FeedbackLog, Part
from pgra.memory.lookup import (
    LOOKUPS,
    LookupArguments,
    OpenLookup,
    load_lookup,
    passing,
)

MEMORY_WEIGHT = 0.6
"""Above a half, so that what a user said of a text decides when that text comes again."""


@dataclass(kw_only=True)
class PromptMemoryArguments(Arguments):
    """Whose corrections are used, how near they must be, and how they stand in a prompt."""

    GROUP = "Memory"

    memory: str | None = arg(
        None,
        "A memory of corrections (pgra memory add TEXT LABEL --task NAME): those of the task whose "
        "text is near an input are used for it.",
        is_common=True,
    )
    memory_lookup: str = arg(
        "relative-edit",
        "How near texts are found: relative-edit (distance beside their lengths), edit (distance), "
        "encoder (cosine), or bm25.",
        choices=[name for name in LOOKUPS if name != "gud-ir"],  # whose generator is not named here
        is_open=True,
    )
    memory_threshold: float | None = arg(
        None,
        "Smallest score that passes; higher is closer. relative-edit: 0 to 1, 1 the same (default "
        "0.85); edit: minus the distance, 0 the same (-5); encoder: a cosine, 1 the same (0.9); "
        "bm25: from 0 (1).",
    )
    memory_encoder: str = arg(
        "sentence-transformers/all-MiniLM-L6-v2",
        "Encoder of --memory_lookup encoder: hub id, folder or bundled:NAME.",
    )
    memory_matches: int = arg(1, "Most corrections used for an input, the nearest.", least=1)
    memory_as: str = arg(
        "exemplar",
        "exemplar (a corrected label or answer: an example before all others, in the place of the "
        "last), clarification (any feedback: behind the query, '| clarification: ...') or override "
        "(as exemplar, and the correction of an equal text is the answer).",
        choices=("clarification", "exemplar", "override"),
    )
    memory_scope: str = arg(
        "", "Whose texts these are: corrections of this scope, and those of none, count."
    )

    def check(self) -> None:
        """Refuse what is no look-up, and a threshold that is of another."""
        self.lookup()

    def check_named(self) -> None:
        """Refuse a gate without a memory, which would seem to be used.

        Raises:
            ConfigError: If there is one.
        """
        if self.memory_threshold is not None and self.memory is None:
            raise ConfigError(
                f"memory_threshold is {self.memory_threshold:g}, and no memory is named: add "
                "--memory FILE, or leave it out"
            )

    def lookup(self) -> LookupArguments:
        """Return the look-up: texts are compared whole, for a <br> in a review opens no slot."""
        return LookupArguments(
            lookup=self.memory_lookup,
            threshold=self.memory_threshold,
            encoder=self.memory_encoder,
            key_form="whole",
        )


logger = logging.getLogger(__name__)

_SHOWN_CHARS = 60


@dataclass(frozen=True)
class Correction:
    """What a user said of an input that is near.

    Attributes:
        entry: As the memory has it.
        score: How near, as the look-up counts.
        example: The same as a labelled example, named "memory-ID".
        decides: Whether it is the answer, the input being the text that was corrected.
    """

    entry: Event
    score: float
    example: Example
    decides: bool = False

    def as_json(self) -> dict[str, Json]:
        """Return what predictions tell of it."""
        entry, score = self.entry, round(self.score, 6)
        told = {"entry": entry.id, "score": score, "key": entry.key, "feedback": entry.feedback}
        return told | ({"decides": True} if self.decides else {})


class LabelMemory(AbstractContextManager["LabelMemory"]):
    """The corrections of one task, and the look-up among them; a context, which closes the file.

    Attributes:
        num_entries: Corrections of the task, when it was opened.
        num_others: Entries of other tasks and scopes, which are not used.
    """

    def __init__(
        self,
        args: PromptMemoryArguments,
        *,
        task: str,
        inputs: Sequence[str],
        labels: Sequence[str] = (),
        device: str = "auto",
        open_lookup: OpenLookup | None = None,
    ) -> None:
        """Open a memory to read, and read the task's entries.

        Args:
            args: Which memory, look-up and gate.
            task: The task's name, under which its corrections were written.
            inputs: Its inputs.
            labels: Its labels; none where feedback may be any text.
            device: Where the look-up's encoder runs.
            open_lookup: The task's look-up where it has been loaded; None loads it.

        Raises:
            ArtifactError: If there is no such file, or it is damaged or no memory.
            DataError: If an entry of the task is no labelled example of it; it is named.
            ModelError: If the look-up's encoder cannot be found or loaded.
        """
        self._most, self._gate = args.memory_matches, args.lookup().gate
        self._inputs, self._labels = inputs, labels
        self._log = FeedbackLog.open(Path(args.memory or ""), is_writable=False)
        try:
            context, part = Context(device=device), Part(task, args.memory_scope)
            load = open_lookup or load_lookup(
                args.lookup(), context, task=part.task, scope=part.scope
            )
            self._lookup = load(self._log)
            entries = list(self._log.entries())
            own = [entry for entry in entries if part.holds(entry)]
            examples = [self._read(entry) for entry in own]
        except BaseException:
            self._log.close()
            raise
        self._digest = digest([[entry.key, entry.feedback] for entry in own])
        # Of equal texts the newest, and a scope's own before what all share.
        ranked = sorted(zip(own, examples, strict=True), key=lambda pair: pair[0].scope != "")
        same = {self._plain(pair[1].fields): pair for pair in ranked}
        self._same = same if args.memory_as == "override" else {}
        others = Counter(
            entry.task if entry.task != task else f"{task}, another scope"
            for entry in entries
            if not part.holds(entry)
        )
        self.num_entries, self.num_others = len(own), others.total()
        counts = ", ".join(f"{count:,} of '{name}'" for name, count in sorted(others.items()))
        unused = f"; not used: {counts}" if others else ""
        say = logger.info if own else logger.warning
        say("memory: %s holds %s corrections of task '%s'%s", args.memory, len(own), task, unused)

    def __exit__(self, *_: object) -> None:
        self._log.close()

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """All that decides what is recalled: the task's entries, the look-up and the gate."""
        return {
            "entries": self._digest,
            **self._lookup.fingerprint,
            "threshold": self._gate,
            "matches": self._most,
        }

    def recall(self, fields: Mapping[str, str]) -> list[Correction]:
        """Return the corrections that pass the gate for an input, the nearest first.

        One of the very same text is given too: that input is what the user corrected. To override,
        it stands first, whatever the look-up says, and decides.

        Args:
            fields: The task's inputs.

        Raises:
            DataError: If an entry that was written since is no labelled example of the task.
        """
        found = self._lookup.find(input_key(fields, self._inputs), self._most)
        near = [
            Correction(match.entry, match.score, self._read(match.entry))
            for match in passing(found, self._gate)
        ]
        if (same := self._same.get(self._plain(fields))) is None:
            return near
        entry, example = same
        scores = {match.entry.id: match.score for match in found}
        most = self._lookup.scores.most
        score = scores.get(entry.id, most if math.isfinite(most) else 0.0)
        others = [one for one in near if one.entry.id != entry.id]
        return [Correction(entry, score, example, decides=True), *others][: self._most]

    def _plain(self, fields: Mapping[str, str]) -> tuple[str, ...]:
        """Return what equal inputs share: their words, case, spaces and punctuation aside."""
        return tuple(text_key(fields[name]) for name in self._inputs)

    def _read(self, entry: Event) -> Example:
        """Read an entry as a labelled example; every text on one line, as a prompt shows it."""
        feedback = " ".join(entry.feedback.split())
        if self._labels and feedback not in self._labels:
            raise DataError(
                f"{self._log.path}, entry {entry.id}: "
                f"{unknown_name('label', _short(feedback), self._labels)} Mend it with pgra memory "
                f"correct {entry.id} LABEL --memory {self._log.path}, or forget it"
            )
        is_one = len(self._inputs) == 1
        try:
            fields = {self._inputs[0]: entry.key} if is_one else json.loads(entry.key)
            plain = {name: " ".join(str(fields[name]).split()) for name in self._inputs}
        except (ValueError, KeyError, TypeError):
            raise DataError(
                f"{self._log.path}, entry {entry.id}: the key '{_short(entry.key)}' is no JSON "
                f"object of the task's inputs {', '.join(self._inputs)}: forget it, and add one "
                f"such as {json.dumps(dict.fromkeys(self._inputs, '...'))}"
            ) from None
        return Example(f"memory-{entry.id}", plain, feedback)


def input_key(fields: Mapping[str, str], inputs: Sequence[str]) -> str:
    """Return an input as a memory's key: its text, or a JSON object where a task has several.

    Args:
        fields: The inputs by name.
        inputs: Their names, in the task's order.
    """
    if len(inputs) == 1:
        return fields[inputs[0]]
    return json.dumps({name: fields[name] for name in inputs}, ensure_ascii=False)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


def overrule(prediction: Prediction, found: Sequence[Correction]) -> Prediction:
    """Return what a correction decides that is of the input itself; else the prediction."""
    if not found or not found[0].decides:
        return prediction
    label = str(found[0].example.label)
    scores = {name: float(name == label) for name in prediction.scores}
    return Prediction(prediction.example_id, label, scores)


def mix_labels(prediction: Prediction, found: Sequence[Correction], *, weight: float) -> Prediction:
    """Mix a model's chances with the labels of near corrections, or let one decide.

    p = (1 - weight) p_model + weight p_memory, as kNN-LM mixes an LM with its neighbors (Khandelwal
    et al. 2020, section 2); p_memory is a label's share of the corrections. Above a half, those
    that agree decide; below, a model that is sure enough does.

    Args:
        prediction: The model's; given back as it is where nothing is near.
        found: Corrections that passed the gate.
        weight: From 0 to 1.
    """
    if not found or found[0].decides:
        return overrule(prediction, found)
    counts = Counter(correction.example.label for correction in found)
    scores = {
        label: (1 - weight) * chance + weight * counts[label] / len(found)
        for label, chance in prediction.scores.items()
    }
    return Prediction(prediction.example_id, max(scores, key=scores.__getitem__), scores)
