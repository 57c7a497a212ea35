"""MemPrompt's experiment: a stream for each system, clarification probability and seed.

    RUN/run.json                    what decides every number here
    RUN/mem-p0.5-seed0/steps.jsonl  what happened at each step
    RUN/mem-p0.5-seed0/memory.sqlite
    RUN/mem-p0.5-seed0/metrics.json written last: the stream is done
    RUN/report.md, RUN/running.png  all of them beside each other

The LM's answers are kept among the artifacts, so that an interrupted stream is replayed from its
start without asking the LM again.
"""

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pgra.artifacts import check_fingerprint, digest, lock_folder, write_json
from pgra.config import arg
from pgra.core import Example, Json
from pgra.data.read import read_table
from pgra.data.text import LEAK_JACCARD
from pgra.errors import ConfigError, DataError
from pgra.exemplars import SelectionArguments
from pgra.lm.remote import RemoteLM
from pgra.memory.families import Family, FewShot, PromptExample
from pgra.memory.lookup import LookupArguments, OpenLookup, in_form
from pgra.memory.memory import Memory
from pgra.memory.report import SYSTEMS, StreamResult, Variant, compare_with, measure
from pgra.memory.stream import (
    GrowPrompt,
    MemPrompt,
    PromptedArguments,
    Simulation,
    Step,
    StepOutcome,
    System,
    read_stream,
    read_texts,
)
from pgra.progress import Bar
from pgra.report.results import damaged, read_lines, read_metrics, read_object, write_metrics

RUN_FILE, STEPS_FILE, METRICS_FILE = "run.json", "steps.jsonl", "metrics.json"
MEMORY_FILE = "memory.sqlite"


@dataclass(kw_only=True)
class StreamArguments(PromptedArguments):
    """Which questions, which systems, and what an answer may cost."""

    stream: str = arg(
        "", "Questions in a jsonl file, as the paper's release has them.", must_be_given=True
    )
    num_steps: int | None = arg(None, "Steps of a stream; default: all of the file's.", least=1)
    shuffle: bool = arg(False, "Shuffle the file's questions, by each seed.")
    systems: list[str] = arg(
        list(SYSTEMS),
        "no-mem, grow (corrections grow the prompt) and mem (look-up).",
        choices=SYSTEMS,
    )
    clarification_probabilities: list[float] = arg(
        [0.5], "That a user who was misunderstood says what was meant.", above=0, most=1
    )
    seeds: list[int] = arg(
        [0], "Of the user's draws, and of the stream where it is shuffled.", least=0
    )
    prefix: str = arg(
        "fixed",
        "The prompt's examples: fixed (the same for all), or kate (each question's nearest; then "
        "prompts share nothing, and an LM here reads each whole).",
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
        "With kate: a jsonl file of further examples to choose from: question, answer (or answers) "
        "and perhaps feedback.",
        needs={"prefix": "kate"},
    )
    prefix_encoder: str | None = arg(
        None,
        "With kate: what compares questions, an encoder or bm25; default: --encoder.",
        needs={"prefix": "kate"},
    )
    max_added: int | None = arg(
        None,
        "Most corrections that grow shows (the release: 20); default: as many as fit.",
        least=0,
    )
    dev_stream: str | None = arg(
        None, "Other questions, on which the gate's threshold is chosen; instead of --threshold."
    )
    output_dir: str | None = arg(None, "Where runs go; default: runs/memory-FAMILY.", decides=False)

    def plan(self) -> list[Variant]:
        """List the variants: of each seed no-mem first, with which the others are compared."""
        clarified = list(dict.fromkeys(self.clarification_probabilities))
        return [
            Variant(system, p, seed)
            for seed in dict.fromkeys(self.seeds)
            for system in SYSTEMS
            if system in self.systems
            for p in ([0.0] if system == "no-mem" else clarified)
        ]

    def read_questions(self, family: Family, seed: int) -> list[Step]:
        """Return the stream of a seed."""
        steps = read_stream(Path(self.stream), family)
        if self.num_steps is not None and self.num_steps > len(steps):
            raise ConfigError(f"num_steps is {self.num_steps}, and {self.stream} has {len(steps)}")
        if self.shuffle:
            random.Random(seed).shuffle(steps)
        return steps[: self.num_steps]


def read_pool(path: Path) -> list[PromptExample]:
    """Read examples to choose from.

    jsonl with `question`, `answer` (or `answers`, of which the first is shown), perhaps `feedback`.

    Raises:
        DataError: If a line lacks a question or an answer, or there is no line.
    """
    pool = []
    for record in read_table(path, ("jsonl",)):
        named = "answer" if "answer" in record.fields else "answers"
        question, answer, *_ = read_texts(record, ["question", named])
        (feedback,) = read_texts(record, ["feedback"]) if "feedback" in record.fields else [""]
        pool.append(PromptExample(question, answer, feedback))
    if not pool:
        raise DataError(f"{path} holds no example")
    return pool


def choose_examples(
    few_shot: FewShot, questions: Sequence[str], args: StreamArguments, lookup: LookupArguments
) -> FewShot:
    """Return a prompt whose examples are each question's nearest, the nearest first: KATE.

    Madaan et al. 2022, section 4.2. They come from the prompt's own and `prefix_pool`; a question
    never sees itself or a near copy (`LeakGuard`). If fewer share a word with it (BM25), the pool's
    first others follow. Questions are compared in the settled look-up's key form, and by its
    encoder if `args` has none. A question that is not among `questions` gets the prompt's own.

    Raises:
        ConfigError: If the pool holds fewer examples than asked for (the paper's k).
        ModelError: If the encoder cannot be found or loaded.
    """
    from pgra.exemplars.selection import ExemplarPool, Nearest, open_similarity

    def in_key_form(examples: Sequence[Example]) -> list[Example]:
        return [
            replace(example, fields={"question": in_form(example.text, str(lookup.key_form))})
            for example in examples
        ]

    more = read_pool(Path(args.prefix_pool)) if args.prefix_pool else []
    pool, own = [*few_shot.examples, *more], len(few_shot.examples)
    count = args.prefix_examples or (own if more else (own + 1) // 2)
    root = args.context.artifacts / "neighbors" / f"memory-{few_shot.name}"
    examples = [
        Example(f"question-{i}", {"question": shown.question}, shown.answer)
        for i, shown in enumerate(pool)
    ]
    exemplars = ExemplarPool(examples, LEAK_JACCARD)
    distinct = exemplars.guard.distinct.tolist()
    if not 0 < count <= len(distinct):
        raise ConfigError(
            f"prefix_examples is {count}, and there are {len(distinct)} different examples to "
            "choose from: give another number, or more examples with --prefix_pool"
        )
    similarity = open_similarity(
        SelectionArguments(encoder=args.prefix_encoder or lookup.encoder),
        examples,
        root,
        device=args.device,
        key=in_key_form,
    )
    selector = Nearest(SelectionArguments(num_exemplars=count), exemplars, similarity)
    asked = list(dict.fromkeys(questions))
    queries = [Example(f"question-{i}", {"question": text}) for i, text in enumerate(asked)]
    chosen = selector.choose(queries)
    nearest = {}
    for i, question in enumerate(asked):
        rows, is_leak = chosen.of(i), exemplars.guard.leaks(question)
        others = (row for row in distinct if row not in rows and not is_leak(row))
        nearest[question] = tuple(pool[row] for row in [*rows, *others][:count])
    return replace(few_shot, nearest=nearest)


@dataclass(frozen=True, kw_only=True)
class Experiment(Simulation):
    """A stream, the user and the LM, and all else that its systems share.

    `threshold` and `max_added` are as in `MemPrompt` and `GrowPrompt`.
    """

    folder: Path
    open_lookup: OpenLookup
    threshold: float | None
    max_added: int | None = None

    @property
    def identity(self) -> dict[str, Json]:
        """All that decides the numbers, but for the variant and the stream."""
        with Memory(":memory:", lookup=self.open_lookup) as memory:
            lookup = dict(memory.lookup.fingerprint)
        family = asdict(self.family)
        for name in ("paper", "is_of_paper"):  # they decide no number here
            del family[name]
        return {
            "lm": dict(self.lm.completer.fingerprint),
            "family": self.family.name,
            "family_digest": digest(family)[:12],
            "prompt": self.lm.few_shot.name,
            "prompt_digest": digest(asdict(self.lm.few_shot))[:12],
            "lookup": lookup,
            "threshold": self.threshold,
            "max_new_tokens": self.lm.max_new_tokens,
            "max_prompt_tokens": self.lm.max_prompt_tokens,
            "max_added": self.max_added,
        }

    def run(self, streams: Mapping[int, list[Step]], plan: Sequence[Variant]) -> list[StreamResult]:
        """Run every variant of a plan that is not done, and compare memories with no-mem.

        `streams` holds the questions by seed.

        Raises:
            ArtifactError: If the folder is another experiment's.
            DataError: If a question does not fit the LM's window.
        """
        with lock_folder(self.folder):
            claim_folder(self.folder, self.identity)
            return self._run(streams, plan)

    def _run(
        self, streams: Mapping[int, list[Step]], plan: Sequence[Variant]
    ) -> list[StreamResult]:
        results: list[StreamResult] = []
        bare: dict[int, list[StepOutcome]] = {}
        for variant in plan:
            steps, folder = streams[variant.seed], self.folder / variant.name
            stream = digest([asdict(step) for step in steps])[:12]
            if (folder / METRICS_FILE).is_file():
                outcomes = _read_outcomes(folder, stream)
                paid = read_object(folder / METRICS_FILE).get("endpoint")
            else:
                outcomes = self._play(folder, variant, steps)
                lm = self.lm.completer
                paid = lm.describe_spending() if isinstance(lm, RemoteLM) else None
            metrics = measure(outcomes)
            if paid is not None:
                metrics["endpoint"] = paid
            if variant.system == "no-mem":
                bare[variant.seed] = outcomes
            elif variant.seed in bare:
                metrics["against_no_mem"] = compare_with(outcomes, bare[variant.seed])
            which: dict[str, Json] = {**asdict(variant), "stream": stream}
            write_metrics(folder, {**which, **metrics}, [STEPS_FILE])
            results.append(StreamResult(variant, metrics, outcomes))
        return results

    def _play(self, folder: Path, variant: Variant, steps: Sequence[Step]) -> list[StepOutcome]:
        shutil.rmtree(folder, ignore_errors=True)  # of a stream that was stopped
        folder.mkdir(parents=True)
        outcomes = []
        with (
            Memory(
                folder / MEMORY_FILE,
                lookup=self.open_lookup,
                threshold=self.threshold,
                source="stream",
            ) as memory,
            (folder / STEPS_FILE).open("w", encoding="utf-8") as file,
        ):
            most = 0 if variant.system == "no-mem" else self.max_added
            system: System = GrowPrompt(self.lm, max_added=most)
            if variant.system == "mem":
                system = MemPrompt(self.family, self.lm.few_shot, memory)
            played = self.play(steps, system, probability=variant.probability, seed=variant.seed)
            for outcome in Bar(played, total=len(steps), desc=variant.name, unit="step"):
                file.write(json.dumps(asdict(outcome), ensure_ascii=False) + "\n")
                file.flush()
                outcomes.append(outcome)
        return outcomes


def claim_folder(folder: Path, identity: Mapping[str, Json]) -> None:
    """Refuse a folder with another run's results; write `run.json` into a new one."""
    path = folder / RUN_FILE
    if path.is_file() and any(folder.glob(f"*/{METRICS_FILE}")):
        check_fingerprint(folder, made=read_object(path), asked=identity)
    else:
        write_json(path, identity)


def _read_outcomes(folder: Path, stream: str) -> list[StepOutcome]:
    made = {"stream": read_metrics(folder).get("stream")}
    check_fingerprint(folder, made=made, asked={"stream": stream})
    try:
        return [StepOutcome(**line) for line in read_lines(folder / STEPS_FILE)]
    except TypeError as error:
        raise damaged(folder / STEPS_FILE, error) from None
