"""Arguments of the words after `pgra memory`."""

from dataclasses import dataclass, field

from pgra.config import argument as _arg
from pgra.config import at_least
from pgra.errors import ConfigError
from pgra.memory.lookup import LookupArguments


@dataclass(kw_only=True)
class MemoryArguments:
    """Which memory."""

    memory: str = _arg("memory.sqlite", "The memory's file; add, import and stream make it.")


@dataclass(kw_only=True)
class FamilyArguments:
    """Of which family questions are, where it may be none."""

    family: str | None = _arg(
        None,
        "Name of a YAML in configs/memory, or the path of one, whose rule tells near keys; "
        "default: the rule for questions of any kind.",
    )


@dataclass(kw_only=True)
class AddArguments(FamilyArguments):
    """What is written."""

    question: str | None = _arg(None, "What was misunderstood; it may also stand first, bare.")
    feedback: str | None = _arg(
        None, "What was meant, or a text's right label; it may also stand second, bare."
    )
    task: str = _arg(
        "",
        "Which questions it is for, such as sst2 of a corrected label; default: all that share the "
        "memory.",
    )
    source: str = _arg("user", "Who says it.")

    def __post_init__(self) -> None:
        """Refuse to write nothing."""
        if self.question is None or self.feedback is None:
            raise ConfigError('there is nothing to add: pgra memory add "QUESTION" "WHAT I MEAN"')


@dataclass(kw_only=True)
class ListArguments(FamilyArguments):
    """What is shown."""

    log: bool = _arg(False, "Show every event instead of what is in the memory now.")
    verify: bool = _arg(False, "Read every byte, and compare the entries with the log.")
    collisions: bool = _arg(
        False, "Show entries whose keys a look-up by edit distance takes for each other."
    )


@dataclass(kw_only=True)
class QuestionArguments(FamilyArguments, LookupArguments):
    """What is looked up."""

    question: str | None = _arg(None, "A question; it may also stand first, bare.")
    num_matches: int = _arg(3, "Entries shown.")
    task: str = _arg("", "Which entries count.")
    device: str = _arg("auto", "Where the encoder runs.")

    def __post_init__(self) -> None:
        """Refuse to look nothing up."""
        super().__post_init__()
        at_least("num_matches", self.num_matches, 1)
        if self.question is None or not self.question.strip():
            raise ConfigError('there is nothing to look up: pgra memory lookup "QUESTION"')


@dataclass(kw_only=True)
class ChangeArguments:
    """Which entries change."""

    ids: list[int] = field(
        default_factory=list,
        metadata={"help": "Entries, as pgra memory list shows them; they may also stand first."},
    )
    feedback: str | None = _arg(None, "What was meant (correct); it may also stand second.")
    source: str = _arg("user", "Who says it.")


@dataclass(kw_only=True)
class FileArguments:
    """Which file."""

    file: str | None = _arg(None, "The file; it may also stand first, bare.")
    output: str | None = _arg(None, "The new memory (salvage).")

    def __post_init__(self) -> None:
        """Refuse a command without a file."""
        if self.file is None:
            raise ConfigError("no file is named: give it first, as in pgra memory export FILE")


@dataclass(kw_only=True)
class ChatArguments:
    """What a person talks to."""

    family: str = _arg("lexical", "Name of a YAML in configs/memory, or the path of one.")
    prompt: str | None = _arg(
        None, "Name of a YAML in configs/memory_prompts, or a path; default: the family's."
    )
    task: str = _arg("", "Which entries count, and under which name corrections are written.")
    source: str = _arg("user", "Who corrects.")
    max_new_tokens: int = _arg(64, "Most tokens of an answer.")
    max_prompt_tokens: int = _arg(2048, "Most tokens of a prompt, the LM's window permitting.")
    artifacts_dir: str = _arg("artifacts", "Where the LM's answers are kept.")
    device: str = _arg("auto", "auto (a GPU if there is one), cpu, cuda, ...")

    def __post_init__(self) -> None:
        """Refuse an answer or a prompt of no tokens."""
        at_least("max_new_tokens", self.max_new_tokens, 1)
        at_least("max_prompt_tokens", self.max_prompt_tokens, 1)
