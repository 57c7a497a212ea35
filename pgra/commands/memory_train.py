"""Trains what looks feedback up: `pgra memory train-gud-ir` and `pgra memory train-similarity`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pgra.commands.common import quiet_libraries, say
from pgra.config import argument as _arg
from pgra.config import parse_arguments
from pgra.errors import ConfigError
from pgra.memory.families import load_family
from pgra.memory.stream import Pair, read_pairs

_GENERATOR_EXAMPLE = """example:
  pgra memory train-gud-ir pairs.jsonl --model bundled:t5-small-titles --output_dir gud-ir
  pgra memory lookup "what is akin to < pretty > ?" --lookup gud-ir --generator gud-ir
"""
_SIMILARITY_EXAMPLE = """example:
  pgra memory train-similarity pairs.jsonl --encoder bundled:minilm-l6 --output_dir similar
  pgra memory lookup "what is akin to < pretty > ?" --family lexical --lookup encoder \\
      --encoder similar
"""


@dataclass(kw_only=True)
class PairsArguments:
    """Which questions with feedback, and where the model goes."""

    pairs: str | None = _arg(
        None,
        "jsonl with question and feedback (and type), a log of pgra memory export, or a memory; "
        "it may also stand first, bare.",
    )
    family: str | None = _arg(
        None, "The file is a stream of this family (configs/memory), such as ert_nl."
    )
    output_dir: str | None = _arg(None, "New folder of the model.")
    device: str = _arg("auto", "auto (a GPU if there is one), cpu, cuda, ...")

    def __post_init__(self) -> None:
        """Refuse to learn from nothing, or for nothing."""
        if self.pairs is None or self.output_dir is None:
            raise ConfigError(
                "give questions with feedback, and a new folder: FILE --output_dir FOLDER"
            )


def train_gud_ir(argv: Sequence[str]) -> int:
    """Train the seq2seq model of --lookup gud-ir."""
    quiet_libraries()
    from pgra.memory.train import GeneratorArguments, train_generator

    args, how = _parse(
        argv,
        GeneratorArguments,
        word="train-gud-ir",
        about="Train a seq2seq model to write the feedback that a question may need.",
        example=_GENERATOR_EXAMPLE,
    )
    pairs = _read(args)
    done = train_generator(pairs, Path(args.output_dir), how, device=args.device)
    say(f"{done.folder}: {len(pairs):,} pairs, {done.steps:,} steps, {done.seconds:.0f} s")
    say(f"mean loss {done.loss:.4f}; look up with --lookup gud-ir --generator {done.folder}")
    return 0


def train_similarity(argv: Sequence[str]) -> int:
    """Train an encoder of --lookup encoder."""
    quiet_libraries()
    from pgra.memory.trained_head import SimilarityArguments, train_encoder

    args, how = _parse(
        argv,
        SimilarityArguments,
        word="train-similarity",
        about="Train an encoder whose cosines of questions follow those of their feedback.",
        example=_SIMILARITY_EXAMPLE,
    )
    pairs = _read(args)
    done = train_encoder(pairs, Path(args.output_dir), how, device=args.device)
    say(f"{done.folder}: {len(pairs):,} questions, {done.steps:,} steps, {done.seconds:.0f} s")
    say(
        f"mean loss {done.loss:.4f}; look up with --lookup encoder --encoder {done.folder} "
        f"--key_form {how.key_form}"
    )
    return 0


def _parse(
    argv: Sequence[str], arguments: type, *, word: str, about: str, example: str
) -> tuple[Any, ...]:
    words = list(argv)
    if words and not words[0].startswith("--"):
        words.insert(0, "--pairs")
    return parse_arguments(
        [PairsArguments, arguments],
        words,
        prog=f"pgra memory {word}",
        description=about,
        epilog=example,
    )


def _read(args: PairsArguments) -> list[Pair]:
    family = None if args.family is None else load_family(args.family)
    return read_pairs(Path(str(args.pairs)), family)
