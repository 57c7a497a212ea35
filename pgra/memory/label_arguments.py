"""Arguments of a memory of corrected labels: which, how near, and what is done with it."""

from dataclasses import dataclass

from pgra.checks import argument as _arg
from pgra.checks import at_least, choose
from pgra.errors import ConfigError
from pgra.memory.opening import LookupArguments

USES = ("clarification", "exemplar")
MEMORY_WEIGHT = 0.6
"""Above a half, so that what a user said of a text decides when that text comes again."""


@dataclass(kw_only=True)
class LabelMemoryArguments:
    """Whose corrections are used, and how near they must be."""

    memory: str | None = _arg(
        None,
        "A memory of corrections (pgra memory add TEXT LABEL --task NAME): those of the task whose "
        "text is near an input are used for it.",
    )
    memory_lookup: str = _arg(
        "relative-edit",
        "How near texts are found: relative-edit (distance beside their lengths), edit (distance), "
        "encoder (cosine), or bm25.",
    )
    memory_threshold: float | None = _arg(
        None,
        "Smallest score that passes; higher is closer. relative-edit: 0 to 1, 1 the same (default "
        "0.85); edit: minus the distance, 0 the same (-5); encoder: a cosine, 1 the same (0.9); "
        "bm25: from 0 (1).",
    )
    memory_encoder: str = _arg(
        "sentence-transformers/all-MiniLM-L6-v2",
        "Encoder of --memory_lookup encoder: hub id, folder or bundled:NAME.",
    )
    memory_matches: int = _arg(1, "Most corrections used for an input, the nearest.")

    def __post_init__(self) -> None:
        """Refuse what is no look-up, and a threshold that is of another."""
        at_least("memory_matches", self.memory_matches, 1)
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
        """Give the look-up: texts are compared whole, for a <br> in a review opens no slot."""
        return LookupArguments(
            lookup=self.memory_lookup,
            threshold=self.memory_threshold,
            encoder=self.memory_encoder,
            key_form="whole",
        )


@dataclass(kw_only=True)
class PromptMemoryArguments(LabelMemoryArguments):
    """How corrections stand in a prompt."""

    memory_as: str = _arg(
        "exemplar",
        "exemplar (a corrected label or answer: an example before all others, in the place of the "
        "last) or clarification (any feedback: behind the query, '| clarification: ...').",
    )

    def __post_init__(self) -> None:
        """Refuse contradictions."""
        super().__post_init__()
        choose("memory_as", self.memory_as, USES)
