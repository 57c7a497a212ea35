"""Teach a small LM to do what clarifications ask for: `pgra memory finetune`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pgra.commands.common import quiet_libraries, say
from pgra.config import argument as _arg
from pgra.config import at_least, parse_arguments
from pgra.errors import ConfigError, DataError
from pgra.memory.lessons import Lessons, leave_out, load_lessons, word_of
from pgra.memory.stream import Words, read_stream, read_words

if TYPE_CHECKING:
    from pgra.memory.train import Course

EXAMPLE = """examples:
  pgra memory finetune --words lexical.jsonl --held_out linguistic_300.jsonl --output_dir runs/lm
  pgra memory finetune --lessons lexical scramble --max_steps 100 --bf16 --frozen_layers 10
  pgra memory stream --family lexical --stream linguistic_300.jsonl --lm runs/lm/lm

It learns with questions that no family of configs/memory asks, and with no word of the streams that
--held_out names. `pgra memory stream` refuses a stream that has any of what its LM learned with.
"""


@dataclass(kw_only=True)
class FinetuneArguments:
    """What an LM learns with, and how long."""

    lm: str = _arg("bundled:smollm2-135m", "A causal LM: hub id, folder or bundled:NAME.")
    lessons: list[str] = field(
        default_factory=lambda: ["lexical"],
        metadata={"help": "Names of YAMLs in configs/memory_training, or paths; each as often."},
    )
    words: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Word lists beside those of the lessons: jsonl with type, word and answer, or "
            "for scrambles a text file with a word a line."
        },
    )
    held_out: list[str] = field(
        default_factory=list,
        metadata={"help": "Streams that will be measured: none of their words is learned with."},
    )
    max_steps: int = _arg(80, "Training steps.")
    packs_per_step: int = _arg(4, "Sequences a step.")
    pack_tokens: int = _arg(512, "Most tokens of a sequence, which holds many lessons.")
    learning_rate: float = _arg(2e-4, "The highest; it rises over the first steps, then falls.")
    frozen_layers: int = _arg(0, "First layers that stay as they are (faster), embeddings too.")
    bf16: bool = _arg(False, "Multiply in bfloat16 (faster where the processor has it).")
    save_steps: int = _arg(20, "Steps that a stop may lose; the same command goes on.")
    seed: int = _arg(0, "Of the lessons that are drawn.")
    output_dir: str = _arg("runs/memory-lm", "Where it goes; the LM is in lm/.")
    device: str = _arg("auto", "auto (a GPU if there is one) or cpu.")

    def __post_init__(self) -> None:
        """Refuse numbers that say nothing."""
        for name in ("max_steps", "packs_per_step", "pack_tokens", "save_steps"):
            at_least(name, getattr(self, name), 1)
        at_least("frozen_layers", self.frozen_layers, 0)
        at_least("seed", self.seed, 0)
        if not 0 < self.learning_rate < 1:
            raise ConfigError(f"learning_rate is {self.learning_rate:g}: between 0 and 1")
        if not self.lessons:
            raise ConfigError("lessons names none: --lessons lexical")
        if self.device not in ("auto", "cpu"):
            raise ConfigError(f"device is '{self.device}': auto or cpu")


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the lessons, train, and say where the LM is."""
    (args,) = parse_arguments(
        [FinetuneArguments],
        argv,
        prog="pgra memory finetune",
        description="Teach a small LM to do what clarifications ask for.",
        epilog=EXAMPLE,
    )
    courses = read_courses(args)
    quiet_libraries()
    from pgra.memory.train import FinetuneSettings, train_lm

    settings = {name: getattr(args, name) for name in FinetuneSettings.__dataclass_fields__}
    trained = train_lm(
        args.lm,
        courses,
        pack_tokens=args.pack_tokens,
        settings=FinetuneSettings(**settings),
        folder=Path(args.output_dir),
    )
    say(
        f"{trained.folder}: learned with {trained.num_words:,} words and "
        f"{trained.num_questions:,} questions that are not measured; --lm {trained.folder}"
    )
    return 0


def read_courses(args: FinetuneArguments) -> "list[Course]":
    """Read what is taught, without what is held out.

    Raises:
        ConfigError: If a word list suits no lessons.
        DataError: If a file is not as it must be, or no word is left.
    """
    from pgra.memory.train import Course

    taught = [load_lessons(name) for name in dict.fromkeys(args.lessons)]
    left = dict.fromkeys(args.words)
    courses = []
    for lessons in taught:
        suffix = ".txt" if lessons.family.words == "scrambles" else ".jsonl"
        own = [path for path in left if suffix in Path(path).suffixes]
        words = _merge([lessons.words, *(read_words(Path(path), lessons.family) for path in own)])
        courses.append(Course(lessons, leave_out(words, _held_out(args.held_out, taught))))
        left = {path: None for path in left if path not in own}
    if left:
        raise ConfigError(
            f"words names {next(iter(left))}, which suits none of the lessons "
            f"{', '.join(args.lessons)}: relations take .jsonl, scrambles .txt"
        )
    return courses


def _merge(lists: Sequence[Words]) -> Words:
    merged: dict[str, dict[str, list[str]]] = {}
    for words in lists:
        for kind, own in words.items():
            into = merged.setdefault(kind, {})
            for word, answers in own.items():
                into[word] = [*into.get(word, []), *answers]
    return merged


def _held_out(paths: Sequence[str], taught: Sequence[Lessons]) -> set[str]:
    """Give the words of streams, each read as one of the first family whose types it has."""
    found: set[str] = set()
    for path in paths:
        faults = []
        for lessons in taught:
            try:
                steps = read_stream(Path(path), lessons.family)
            except DataError as error:
                faults.append(error)
            else:
                found |= {word_of(step, lessons.family) for step in steps}
                break
        else:
            raise faults[-1]
    return found
