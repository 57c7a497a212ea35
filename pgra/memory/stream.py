"""MemPrompt's experiment (Madaan et al. 2022, section 4): questions, a simulated user, the systems.

If an answer shows a wrong understanding, the user says what was meant with the clarification
probability. Only failures are written. A stream is played for each system, probability and seed:

    RUN/run.json                    what decides every number here
    RUN/mem-p0.5-seed0/steps.jsonl  what happened at each step
    RUN/mem-p0.5-seed0/memory.sqlite
    RUN/mem-p0.5-seed0/metrics.json written last: the stream is done
    RUN/report.md, RUN/running.png  all of them beside each other: `pgra.memory.report`

The LM's answers are kept among the artifacts, so that an interrupted stream is replayed from its
start without asking the LM again.
"""

import math
import random
import shutil
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from pgra.artifacts import check_fingerprint, digest, lock_folder, write_lines, write_sealed
from pgra.config import arg
from pgra.context import Context
from pgra.data.read import read_table
from pgra.data.tasks import LABEL
from pgra.errors import ConfigError, DataError
from pgra.lm import open_lm
from pgra.lm.base import CompleterArguments, Completion, LanguageModel, add_up
from pgra.memory.families import (
    QUESTION,
    Family,
    FewShot,
    PromptExample,
    Step,
    load_family,
    load_few_shot,
    plain,
    read_stream,
    read_texts,
)
from pgra.memory.lookup import (
    DEFAULT_ENCODER,
    LookupArguments,
    Match,
    OpenLookup,
    in_form,
    passing,
)
from pgra.memory.memory import Memory
from pgra.progress import Bar
from pgra.report.metrics import is_exact_match
from pgra.run_folder import METRICS_FILE, read_lines, read_metrics, read_object, write_metrics
from pgra.types import Json

SYSTEMS = {"no-mem": "NO-MEM", "grow": "GROW-PROMPT", "mem": "MEM-PROMPT"}
_RUN_FILE = "run.json"
_STEPS_FILE = "steps.jsonl"
_FORMAT = 2  # of a step's line
_AHEAD = 16  # questions that an LM here is asked together
_SHOWN_CHARS = 80


@dataclass(kw_only=True)
class PromptedArguments(CompleterArguments):
    """Which LM is asked, what, and in which prompt."""

    family: str = arg(
        "any", "Of which family questions are: name of a YAML in configs/memory, or a path."
    )
    max_new_tokens: int = arg(64, "Most tokens of an answer.", least=1)
    max_prompt_tokens: int = arg(
        2048, "Most tokens of a prompt, within the LM's window.", least=1, group="Options"
    )
    artifacts_dir: str = arg("artifacts", "Where the LM's answers are kept.", decides=False)
    device: str = arg("auto", "auto (a GPU if there is one), cpu, cuda, ...", decides=False)

    @property
    def context(self) -> Context:
        return Context(artifacts=Path(self.artifacts_dir), device=self.device)

    def open_lm(self) -> "PromptedLM":
        family = load_family(self.family)
        return PromptedLM(
            family=family,
            few_shot=load_few_shot(family.prompt),
            completer=open_lm(self, self.context),
            max_new_tokens=self.max_new_tokens,
            max_prompt_tokens=self.max_prompt_tokens,
            num_ahead=1 if self.is_remote else _AHEAD,
        )


@dataclass(frozen=True, kw_only=True)
class PromptedLM:
    """An LM that is asked a family's questions after a few-shot prompt.

    At most `num_ahead` questions of a stream are asked together; 1 wastes no call of an endpoint.
    """

    family: Family
    few_shot: FewShot
    completer: LanguageModel
    max_new_tokens: int = 64
    max_prompt_tokens: int = 2048
    num_ahead: int = _AHEAD

    @property
    def budget(self) -> int:
        """Most tokens of a prompt; the LM's window may be the limit."""
        return min(self.max_prompt_tokens, self.completer.window - self.max_new_tokens)

    def complete(self, prompts: Sequence[str]) -> list[Completion]:
        """Complete prompts; none is cut: a DataError if one exceeds the budget."""
        for prompt, size in zip(prompts, self.completer.count_tokens(prompts), strict=True):
            if size > self.budget:
                question = prompt.split(self.few_shot.separator)[-2]
                raise DataError(
                    f"the question '{question[:_SHOWN_CHARS]}' makes a prompt of {size:,} "
                    f"tokens, and {self.budget:,} fit: shorten the prompt, or use another LM"
                )
        end = self.few_shot.end
        return self.completer.complete(prompts, max_new_tokens=self.max_new_tokens, stop=end)


# The systems.


@dataclass(frozen=True)
class BuiltPrompt:
    """A prompt, and what the memory gave for it.

    Attributes:
        matches: Of the look-up, the nearest first.
        num_used: How many of them, the first, stand in the prompt.
    """

    text: str
    matches: Sequence[Match] = ()
    num_used: int = 0


@dataclass(frozen=True)
class GrowPrompt:
    """GROW-PROMPT: the newest corrections as further examples, as many as fit (section 4).

    The release counts 1,300 words; here the LM's tokens count, as in the paper. With a user who
    never clarifies it is NO-MEM.
    """

    lm: PromptedLM
    added: list[PromptExample] = field(default_factory=list)  # the newest last

    def ask(self, question: str) -> BuiltPrompt:
        """Build the prompt, with the newest correction nearest the question."""

        def write(used: int) -> str:
            examples = self.lm.few_shot.examples_of(question)
            newest = self.added[len(self.added) - used :]
            return self.lm.few_shot.write(question, examples=[*examples, *newest])

        def size(used: int) -> int:
            return self.lm.completer.count_tokens([write(used)])[0]

        counts = range(1, len(self.added) + 1)
        return BuiltPrompt(write(bisect_right(counts, self.lm.budget, key=size)))

    def learn(self, step: Step) -> None:
        feedback = "" if step.kind == QUESTION else step.feedback  # there it is the answer itself
        self.added.append(PromptExample(step.question, step.expected[0], feedback))


@dataclass(frozen=True)
class MemPrompt:
    """MEM-PROMPT: the feedback nearest a question stands in its prompt, if it passes the gate.

    The memory's threshold is the gate. For most families it is the nearest clarification, beside
    the question. For label feedback (App. D.3) the nearest wrongly answered questions, with their
    right answers, replace as many of the prompt's own examples and stand after the rest, the
    nearest last.
    """

    lm: PromptedLM
    memory: Memory

    def ask(self, question: str) -> BuiltPrompt:
        family = self.lm.family
        few_shot = self.lm.few_shot
        matches = self.memory.search(question, family.num_remembered or 1, threshold=-math.inf)
        near = passing(matches, self.memory.threshold)
        if family.is_of_answers:
            more = [PromptExample(entry.question, entry.feedback) for entry in reversed(near)]
            examples = few_shot.examples_of(question)
            examples = examples[: max(0, len(examples) - len(more))]
            text = few_shot.write(question, examples=[*examples, *more])
        else:
            text = few_shot.write(question, feedback=near[0].feedback if near else "")
        return BuiltPrompt(text, matches, len(near))

    def learn(self, step: Step) -> None:
        self.memory.add(step.question, step.feedback)


# A stream.


@dataclass(frozen=True)
class StepOutcome:
    """What happened at one step.

    Attributes:
        step: Its number in the stream, from 1.
        generated: What the LM wrote, cut to its answer.
        understood: Acc(u) of this step.
        answered: Acc(y) of this step.
        clarified: Whether the user then said what was meant.
        neighbors: The questions whose feedback stood in the prompt, the nearest first.
        num_prompt_tokens: None where an endpoint does not report them; `num_new_tokens` likewise.
    """

    step: int
    kind: str
    question: str
    generated: str
    expected: str
    understood: bool
    answered: bool
    clarified: bool
    neighbors: list[str]
    num_prompt_tokens: int | None
    num_new_tokens: int | None


def judge_output(
    family: Family, kind: str, output: str, expected: Sequence[str]
) -> tuple[bool, bool]:
    """Return whether the intent was understood, Acc(u), and whether the output is right, Acc(y).

    `kind` is the type that was meant. For Acc(y) case, spaces and final punctuation do not count.
    """
    if family.is_of_answers:  # which state no understanding
        is_right = is_exact_match(output, expected)
        return is_right, is_right
    return family.is_understood(kind, output), plain(output) in map(plain, expected)


def play(
    lm: PromptedLM,
    steps: Sequence[Step],
    system: GrowPrompt | MemPrompt,
    *,
    probability: float,
    seed: int,
) -> Iterator[StepOutcome]:
    """Ask a stream's questions, in order; the system must be fresh, and learns.

    A user who was misunderstood says so with the probability; step t has the same draw in every
    system. Questions whose prompt a correction changes are asked again, so that asking ahead
    changes no outcome.

    Raises:
        DataError: If a question does not fit the LM's window.
    """
    draws = np.random.default_rng(seed).random(len(steps))
    answers = dict[str, Completion]()
    size = 1  # questions that are asked together: doubled until a correction changes prompts
    for row, step in enumerate(steps):
        prompt = system.ask(step.question)
        if prompt.text not in answers:
            texts = [system.ask(later.question).text for later in steps[row : row + size]]
            new = [text for text in dict.fromkeys(texts) if text not in answers]
            answers |= zip(new, lm.complete(new), strict=True)
        completion = answers[prompt.text]
        output = lm.few_shot.read_output(completion.text)
        understood, answered = judge_output(lm.family, step.kind, output, step.expected)
        used = prompt.matches[: prompt.num_used]
        outcome = StepOutcome(
            step=row + 1,
            kind=step.kind,
            question=step.question,
            generated=output,
            expected=step.expected[0],
            understood=understood,
            answered=answered,
            clarified=not understood and bool(draws[row] < probability),
            neighbors=[match.question for match in used],
            num_prompt_tokens=completion.num_prompt_tokens,
            num_new_tokens=completion.num_new_tokens,
        )
        size = min(2 * size, lm.num_ahead)
        if outcome.clarified:
            system.learn(step)
            size = 1
        yield outcome


def measure_stream(outcomes: Sequence[StepOutcome]) -> dict[str, Any]:
    """Measure a whole stream.

    Accuracy of the understanding (by type too) and of the answer; tokens of prompts and outputs;
    the look-ups used, and the share of them whose question was understood (the paper's
    "effective", 97 %).
    """
    used = [step.understood for step in outcomes if step.neighbors]
    metrics: dict[str, Any] = {
        "n": len(outcomes),
        "understood": fmean(step.understood for step in outcomes),
        "understood_by_type": {},
        "answered": fmean(step.answered for step in outcomes),
        "clarifications": sum(step.clarified for step in outcomes),
    }
    for kind in sorted({step.kind for step in outcomes}):
        marks = [step.understood for step in outcomes if step.kind == kind]
        metrics["understood_by_type"][kind] = fmean(marks)
    metrics["prompt_tokens"] = add_up([step.num_prompt_tokens for step in outcomes])
    metrics["new_tokens"] = add_up([step.num_new_tokens for step in outcomes])
    metrics["lookups"] = len(used)
    metrics["effective"] = fmean(used) if used else None
    return metrics


# The experiment.


@dataclass(frozen=True)
class Variant:
    """One stream by a system of `SYSTEMS`, with a clarification probability (0 for no-mem).

    The seed is that of the user's draws, and of a stream that is shuffled.
    """

    system: str
    probability: float
    seed: int

    @property
    def name(self) -> str:
        probability = "" if self.system == "no-mem" else f"-p{self.probability:g}"
        return f"{self.system}{probability}-seed{self.seed}"

    @property
    def title(self) -> str:
        """Its name in tables, without the seed."""
        probability = "" if self.system == "no-mem" else f", p = {self.probability:g}"
        return f"{SYSTEMS[self.system]}{probability}"


@dataclass(frozen=True)
class StreamResult:
    """A variant with its steps."""

    variant: Variant
    outcomes: list[StepOutcome]

    def marks(self, name: str) -> list[bool]:
        """Return whether each step was `name`: "understood" or "answered"."""
        return [getattr(step, name) for step in self.outcomes]


@dataclass(kw_only=True)
class StreamArguments(PromptedArguments):
    """Which questions, and which systems."""

    family: str = arg("lexical", "Name of a YAML in configs/memory, or the path of one.")
    stream: str = arg(
        "", "Questions in a jsonl file, as the paper's release has them.", must_be_given=True
    )
    num_steps: int | None = arg(
        None, "Steps of a stream; default: all of the file's.", least=1, group="Options"
    )
    shuffle: bool = arg(False, "Shuffle the file's questions, by each seed.")
    systems: list[str] = arg(
        list(SYSTEMS),
        "no-mem, grow (corrections grow the prompt) and mem (look-up).",
        choices=SYSTEMS,
    )
    clarification_probabilities: list[float] = arg(
        [0.5],
        "That a user who was misunderstood says what was meant.",
        above=0,
        most=1,
        is_distinct=True,
    )
    seeds: list[int] = arg(
        [0],
        "Of the user's draws, and of the stream where it is shuffled.",
        least=0,
        is_distinct=True,
    )
    prefix: str = arg(
        "fixed",
        "The prompt's examples: fixed, or kate (each question's nearest: prompts share nothing).",
        choices=("fixed", "kate"),
    )
    prefix_examples: int | None = arg(
        None,
        "With kate: how many (k); default: as many as the prompt has, half of them without a pool.",
        least=1,
        needs={"prefix": "kate"},
    )
    prefix_pool: str | None = arg(
        None,
        "With kate: further examples, a jsonl of question, answer (or answers), perhaps feedback.",
        needs={"prefix": "kate"},
    )
    output_dir: str | None = arg(None, "Where runs go; default: runs/memory-FAMILY.", decides=False)

    def plan(self) -> list[Variant]:
        """List the variants."""
        variants = []
        for seed in self.seeds:
            for system in filter(self.systems.__contains__, SYSTEMS):
                probabilities = self.clarification_probabilities if system != "no-mem" else [0.0]
                variants += [Variant(system, p, seed) for p in probabilities]
        return variants

    def read_questions(self, family: Family, seed: int) -> list[Step]:
        """Return the stream of a seed."""
        steps = read_stream(Path(self.stream), family)
        if self.shuffle:
            random.Random(seed).shuffle(steps)
        return steps[: self.num_steps]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What all streams share: the LM, the look-up and its threshold, and the folder."""

    folder: Path
    lm: PromptedLM
    open_lookup: OpenLookup
    threshold: float | None

    @property
    def identity(self) -> dict[str, Json]:
        """All that decides the numbers, but for the variant and the stream."""
        with Memory(":memory:", lookup=self.open_lookup) as memory:
            lookup = dict(memory.lookup.fingerprint)
        lm = self.lm
        return {
            "format": _FORMAT,
            "lm": dict(lm.completer.fingerprint),
            "family": lm.family.name,
            "family_digest": digest(asdict(lm.family))[:12],
            "prompt": lm.few_shot.name,
            "prompt_digest": digest(msgspec.to_builtins(lm.few_shot))[:12],
            "lookup": lookup,
            "threshold": self.threshold,
            "max_new_tokens": lm.max_new_tokens,
            "max_prompt_tokens": lm.max_prompt_tokens,
        }

    def run(self, streams: Mapping[int, list[Step]], plan: Sequence[Variant]) -> list[StreamResult]:
        """Run every variant of a plan that is not done; `streams` holds the questions by seed.

        Raises:
            ArtifactError: If the folder is another experiment's, or a result is damaged.
            DataError: If a question does not fit the LM's window.
        """
        results = []
        with lock_folder(self.folder):
            path = self.folder / _RUN_FILE
            if path.is_file() and any(self.folder.glob(f"*/{METRICS_FILE}")):
                check_fingerprint(self.folder, made=read_object(path), asked=self.identity)
            else:
                write_sealed(path, self.identity)
            for variant in plan:
                steps = streams[variant.seed]
                folder = self.folder / variant.name
                stream = digest([asdict(step) for step in steps])[:12]
                if (folder / METRICS_FILE).is_file():
                    finished = {"stream": read_metrics(folder)["stream"]}
                    check_fingerprint(folder, made=finished, asked={"stream": stream})
                    outcomes = [StepOutcome(**line) for line in read_lines(folder / _STEPS_FILE)]
                else:
                    outcomes = self._play(folder, variant, steps)
                    metrics = {**asdict(variant), "stream": stream, **measure_stream(outcomes)}
                    write_metrics(folder, metrics, [_STEPS_FILE])
                results.append(StreamResult(variant, outcomes))
        return results

    def _play(self, folder: Path, variant: Variant, steps: Sequence[Step]) -> list[StepOutcome]:
        shutil.rmtree(folder, ignore_errors=True)  # of a stream that was stopped
        memory = Memory(
            folder / "memory.sqlite",
            lookup=self.open_lookup,
            threshold=self.threshold,
            source="stream",
        )
        system = GrowPrompt(self.lm) if variant.system != "mem" else MemPrompt(self.lm, memory)
        with memory:
            played = play(
                self.lm, steps, system, probability=variant.probability, seed=variant.seed
            )
            outcomes = list(Bar(played, total=len(steps), desc=variant.name, unit="step"))
        write_lines(folder / _STEPS_FILE, [asdict(outcome) for outcome in outcomes])
        return outcomes


# KATE's prefix (section 4.2).


def read_pool(path: Path) -> list[PromptExample]:
    """Read examples to choose from.

    jsonl with `question`, `answer` (or `answers`, of which the first is shown), perhaps `feedback`.
    """
    pool = []
    for record in read_table(path, ("jsonl",)):
        name = "answer" if "answer" in record.fields else "answers"
        question, answer, *_ = read_texts(record, "question", name)
        feedback = read_texts(record, "feedback")[0] if "feedback" in record.fields else ""
        pool.append(PromptExample(question, answer, feedback))
    return pool


def choose_examples(
    few_shot: FewShot, questions: Sequence[str], args: StreamArguments, lookup: LookupArguments
) -> FewShot:
    """Return a prompt whose examples are each question's nearest, the nearest first: KATE.

    They come from the prompt's own and `prefix_pool`; a question never sees itself or a near copy
    (`LeakGuard`). If fewer share a word with it (BM25), the pool's first others follow. Questions
    are compared in the resolved look-up's key form, by its encoder. A question that is not among
    `questions` gets the prompt's own.

    Raises:
        ConfigError: If the pool holds fewer examples than asked for (the paper's k).
        ModelError: If the encoder cannot be found or loaded.
    """
    from pgra.exemplars.selector import ExemplarSelector
    from pgra.retrieval.neighbors import LeakGuard

    def compared(question: str) -> str:
        return in_form(question, str(lookup.key_form))

    num_shown = len(few_shot.examples)
    more = read_pool(Path(args.prefix_pool)) if args.prefix_pool else []
    pool = [*few_shot.examples, *more]
    count = args.prefix_examples or (num_shown if more else (num_shown + 1) // 2)
    guard = LeakGuard([e.question for e in pool], [e.answer for e in pool])
    distinct = guard.distinct.tolist()
    if len(distinct) < count:
        raise ConfigError(
            f"prefix_examples is {count}, the pool has {len(distinct)} different: lower it"
        )
    selector = ExemplarSelector(
        [{"text": compared(pool[row].question), LABEL: row} for row in distinct],
        encoder=lookup.encoder or DEFAULT_ENCODER,
        leak_guard=False,  # whole questions are guarded
        device=args.device,
    )
    texts = list(dict.fromkeys(questions))
    lines = selector.select(list(map(compared, texts)), len(pool))
    nearest = {}
    for text, line in zip(texts, lines, strict=True):
        is_leak = guard.leaks(text)
        ranked = dict.fromkeys([*(item[LABEL] for item in line), *distinct])
        rows = [row for row in ranked if not is_leak(row)]
        nearest[text] = tuple(pool[row] for row in rows[:count])
    return replace(few_shot, nearest=nearest)
