"""The paper's experiment with a memory: `pgra memory stream`."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pgra.commands.common import quiet_libraries, say
from pgra.config import argument as _arg
from pgra.config import at_least, choose, parse_arguments
from pgra.core import Context
from pgra.errors import ConfigError
from pgra.lm.base import CompleterArguments, open_lm
from pgra.memory.families import Family, check_has_types, load_family
from pgra.memory.lessons import check_unseen, read_seen
from pgra.memory.lookup import LookupArguments, lookup_opener
from pgra.memory.prompts import load_few_shot
from pgra.memory.stream import Step, make_stream, read_stream, read_words

if TYPE_CHECKING:
    from pgra.memory.prompts import FewShot

_PREFIXES = ("fixed", "kate")
_AHEAD = 16  # questions that an LM here is asked together
EXAMPLE = """examples:
  pgra memory stream --family lexical --stream linguistic_300.jsonl --lm bundled:smollm2-135m \\
      --clarification_probabilities 0.5 1 --seeds 0 1 2
  pgra memory stream --family scramble --words words.txt --num_steps 300 --lm bundled:smollm2-135m
  pgra memory stream --family lexical --stream linguistic_300.jsonl --prefix kate \\
      --prefix_examples 4 --encoder bundled:minilm-l6 --lm bundled:smollm2-135m
  pgra memory stream --family hindi --stream hin_300.jsonl --dev_stream hin_dev.jsonl \\
      --lookup encoder --encoder bundled:minilm-l6 --lm openai:MODEL
"""


@dataclass(kw_only=True)
class StreamArguments:
    """Which questions, which systems, and what an answer may cost."""

    family: str = _arg("lexical", "Name of a YAML in configs/memory, or the path of one.")
    stream: str | None = _arg(None, "Questions in a jsonl file, as the paper's release has them.")
    words: str | None = _arg(
        None,
        "A word list to make streams of: jsonl with type, word and answer, or for scrambles a text "
        "file with a word a line.",
    )
    num_steps: int | None = _arg(
        None, "Steps of a stream; default: all of the file's, 300 of a word list."
    )
    shuffle: bool = _arg(False, "Shuffle the file's questions, by each seed.")
    systems: list[str] = field(
        default_factory=lambda: ["no-mem", "grow", "mem"],
        metadata={"help": "no-mem, grow (corrections grow the prompt) and mem (look-up)."},
    )
    clarification_probabilities: list[float] = field(
        default_factory=lambda: [0.5],
        metadata={"help": "That a user who was misunderstood says what was meant."},
    )
    grow_probabilities: list[float] | None = field(
        default=None,
        metadata={"help": "The same for grow, which costs most; default: as the others."},
    )
    seeds: list[int] = field(
        default_factory=lambda: [0],
        metadata={"help": "Of the user's draws, and of the stream where it is made or shuffled."},
    )
    prompt: str | None = _arg(
        None, "Name of a YAML in configs/memory_prompts, or a path; default: the family's."
    )
    prefix: str = _arg(
        "fixed",
        "The prompt's examples: fixed (the same for all), or kate (each question's nearest; then "
        "prompts share nothing, and an LM here reads each whole).",
    )
    prefix_examples: int | None = _arg(
        None,
        "With kate: how many (k); default: as many as the prompt has, half of them without a pool.",
    )
    prefix_pool: str | None = _arg(
        None,
        "With kate: a jsonl file of further examples to choose from: question, answer (or answers) "
        "and perhaps feedback.",
    )
    prefix_encoder: str | None = _arg(
        None, "With kate: what compares questions, an encoder or bm25; default: --encoder."
    )
    max_new_tokens: int = _arg(64, "Most tokens of an answer.")
    max_prompt_tokens: int = _arg(2048, "Most tokens of a prompt, the LM's window permitting.")
    max_added: int | None = _arg(
        None, "Most corrections that grow shows (the release: 20); default: as many as fit."
    )
    dev_stream: str | None = _arg(
        None, "Other questions, on which the gate's threshold is chosen; instead of --threshold."
    )
    released_check: bool = _arg(
        False, "Tell the understanding as the paper's release does (a sentence needs a '[')."
    )
    output_dir: str | None = _arg(None, "Where the runs go; default: runs/memory-FAMILY.")
    artifacts_dir: str = _arg("artifacts", "Where the LM's answers are kept.")
    device: str = _arg("auto", "auto (a GPU if there is one), cpu, cuda, ...")

    def __post_init__(self) -> None:
        """Refuse contradictions."""
        if (self.stream is None) == (self.words is None):
            raise ConfigError(
                "give the questions: --stream FILE.jsonl, or --words FILE to make them of"
            )
        choose("prefix", self.prefix, _PREFIXES)
        for name in ("prefix_examples", "prefix_pool", "prefix_encoder"):
            if self.prefix == "fixed" and getattr(self, name) is not None:
                raise ConfigError(f"{name} is for --prefix kate: add it, or leave {name} out")
        for name in ("num_steps", "max_new_tokens", "max_prompt_tokens", "prefix_examples"):
            at_least(name, getattr(self, name), 1)
        at_least("max_added", self.max_added, 0)
        if not self.seeds or not self.systems or not self.clarification_probabilities:
            raise ConfigError("systems, seeds and clarification_probabilities each need a value")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the streams, and show them beside each other and the paper."""
    args, lookup, lm = parse_arguments(
        [StreamArguments, LookupArguments, CompleterArguments],
        argv,
        prog="pgra memory stream",
        description="Ask a stream of questions with a simulated user, with and without a memory.",
        epilog=EXAMPLE,
    )
    if args.dev_stream is not None and lookup.threshold is not None:
        raise ConfigError(
            "dev_stream chooses the threshold: leave --threshold out, or --dev_stream"
        )
    from pgra.experiments.memory import (
        Experiment,
        choose_gate,
        plan_variants,
        run_streams,
        write_report,
    )

    plan = plan_variants(
        args.systems,
        args.clarification_probabilities,
        args.seeds,
        grow_probabilities=args.grow_probabilities,
    )
    family = load_family(args.family)
    lookup = lookup.settle(family)
    if args.dev_stream is not None:
        check_has_types("dev_stream", family)
    few_shot = load_few_shot(args.prompt or family.prompt)
    streams = {seed: read_questions(args, family, seed) for seed in args.seeds}
    dev = read_stream(Path(args.dev_stream), family) if args.dev_stream else None
    _refuse_seen(lm, streams, family)
    quiet_libraries()
    if args.prefix == "kate":
        few_shot = _choose_examples(args, lookup, few_shot, streams.values())
    open_lookup = lookup_opener(lookup, device=args.device)
    gate = choose_gate(dev, open_lookup) if dev is not None else None
    folder = Path(args.output_dir or f"runs/memory-{family.name}")
    artifacts = Path(args.artifacts_dir)
    completer = open_lm(lm, Context(artifacts=artifacts, device=args.device))
    experiment = Experiment(
        folder=folder,
        family=family,
        few_shot=few_shot,
        completer=completer,
        open_lookup=open_lookup,
        threshold=lookup.gate_of(family) if gate is None else gate.threshold,
        max_new_tokens=args.max_new_tokens,
        max_prompt_tokens=args.max_prompt_tokens,
        max_added=args.max_added,
        as_released=args.released_check,
        num_ahead=1 if lm.is_remote else _AHEAD,
    )
    results = run_streams(experiment, streams, plan)
    say(write_report(folder, family, results, gate=gate).rstrip())
    say(f"\n{folder}: report.md, and a folder for each stream")
    return 0


def _choose_examples(
    args: StreamArguments,
    lookup: LookupArguments,
    few_shot: "FewShot",
    streams: Iterable[Sequence[Step]],
) -> "FewShot":
    """Choose each question's examples, of the prompt's own and the pool's."""
    from pgra.experiments.memory import open_question_similarity
    from pgra.memory.nearest_examples import as_examples, choose_examples, read_pool

    more = read_pool(Path(args.prefix_pool)) if args.prefix_pool else []
    pool = [*few_shot.examples, *more]
    own = len(few_shot.examples)
    count = args.prefix_examples or (own if more else (own + 1) // 2)
    root = Path(args.artifacts_dir) / "neighbors" / f"memory-{few_shot.name}"
    similarity = open_question_similarity(
        as_examples([shown.question for shown in pool]),
        encoder=args.prefix_encoder or lookup.encoder,
        key_form=str(lookup.key_form),
        device=args.device,
        root=root,
    )
    questions = [step.question for steps in streams for step in steps]
    return choose_examples(few_shot, pool, questions, similarity, count=count, root=root)


def _refuse_seen(lm: CompleterArguments, streams: dict[int, list[Step]], family: Family) -> None:
    """Refuse to measure an LM on what `pgra memory finetune` taught it."""
    seen = None if lm.is_remote else read_seen(lm.lm)
    if seen is None:
        return
    for steps in streams.values():
        check_unseen(seen, steps, family)


def read_questions(args: StreamArguments, family: Family, seed: int) -> list[Step]:
    """Give the stream of a seed: a file's, or one that is made of a word list.

    Raises:
        ConfigError: If more steps are asked for than the file has.
        DataError: If the file is not as it must be.
    """
    if args.words is not None:
        words = read_words(Path(args.words), family)
        return make_stream(family, words, num_steps=args.num_steps or 300, seed=seed)
    steps = read_stream(Path(str(args.stream)), family)
    if args.num_steps is not None and args.num_steps > len(steps):
        raise ConfigError(f"num_steps is {args.num_steps}, and {args.stream} has {len(steps)}")
    if args.shuffle:
        random.Random(seed).shuffle(steps)
    return steps[: args.num_steps]
