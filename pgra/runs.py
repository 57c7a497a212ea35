"""A run: a method on a task with a seed, in a folder that can be resumed, measured and asked again.

runs/NAME/run.json           what determines the run; the same command goes on, another is refused
runs/NAME/arguments.json     all resolved arguments
runs/NAME/prompt.txt         the prompt as the LM sees it
runs/NAME/losses.jsonl       the loss and the learning rate of every step
runs/NAME/checkpoint-N/      the Trainer's
runs/NAME/training.json      what training gave on the dev set
runs/NAME/reader/            the best reader: a plain T5 folder with pgra.json and its model card
runs/NAME/predictions.jsonl, metrics.json
"""

import copy
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from pgra.artifacts import check_fingerprint, digest, write_json, write_text
from pgra.config import READER_SYSTEMS, SYSTEMS, PgraArguments
from pgra.core import ALONE, Context, Example, Json, Prediction
from pgra.errors import ArtifactError, ConfigError
from pgra.lm.load import choose_device, find_model, load_tokenizer
from pgra.memory.labels import Correction, LabelMemory, mix_labels
from pgra.methods.base import (
    Prepared,
    Trained,
    check_run,
    describe_reader,
    evidence_models,
    prepare_runs,
    run_notes,
)
from pgra.methods.pgra import (
    EvidenceSearch,
    find_evidence,
    label_decision,
    open_stages,
    read_inputs,
    read_task,
    task_verbalizer,
)
from pgra.publish import write_card
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.reader.fid import FusionReader
from pgra.reader.inputs import Query, TokenizedInputs
from pgra.reader.record import (
    READER_FOLDER,
    RECORD_FILE,
    Reader,
    ReaderRecord,
    check_reads_any,
    find_reader,
    read_record,
    write_record,
)
from pgra.reader.train import TrainResult, train_reader
from pgra.report.metrics import measure
from pgra.report.results import (
    METRICS_FILE,
    PREDICTIONS_FILE,
    EvidenceLine,
    RunRecord,
    add_attention,
    read_object,
    write_results,
)
from pgra.rerank import Reference
from pgra.run_folder import (
    ARGUMENTS_FILE,
    IDENTITY_FILE,
    TRAINING_FILE,
    Found,
    arguments_from,
    check_reader,
    check_same_inputs,
    check_same_run,
    check_writable,
    evidence_lines,
    load_run_arguments,
    read_training,
    reader_checksum,
    run_identity,
    task_identity,
    timed,
    write_training,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """A finished run.

    Attributes:
        folder: Where it is.
        metrics: The content of its `metrics.json`; empty if it was not measured on the test set.
        reused: Whether it was there already.
        training: The content of its `training.json`: the dev set's value, and when.
    """

    folder: Path
    metrics: Mapping[str, Any]
    reused: bool
    training: Mapping[str, Any] = field(default_factory=dict)


def train_run(
    args: PgraArguments,
    training: ReaderTrainingArguments,
    context: Context = ALONE,
) -> Outcome:
    """Find evidence, train a reader on it, and measure it on the test set.

    Args:
        args: Everything before the reader's training.
        training: The Trainer's arguments; `output_dir` is the run.
        context: Who shares the work.

    Raises:
        ArtifactError: If the folder holds another run.
        PgraError: As each stage says.
    """
    return run_reader(prepare_runs(args, [training], context), training)


def run_reader(
    prepared: Prepared, training: ReaderTrainingArguments, *, is_measured: bool = True
) -> Outcome:
    """Train a reader on evidence that is found, or take up what is there.

    Args:
        prepared: As `prepare_runs` gives it.
        training: The Trainer's arguments; `output_dir` is the run.
        is_measured: Whether it is measured on the test set too.

    Raises:
        ArtifactError: If the folder holds another run.
        PgraError: As training says.
    """
    args, context = prepared.args, prepared.context
    folder = Path(str(training.output_dir))
    found = prepared.found.copy()
    identity = run_identity(args, training, found, prepared.source)
    check_run(folder, identity, training)
    if (folder / METRICS_FILE).is_file() and (folder / READER_FOLDER / RECORD_FILE).is_file():
        return _reuse(folder, args)
    reader, is_reused = _trained_reader(prepared, training, identity)
    record = read_training(folder) or {}
    if not is_measured:
        return Outcome(folder, {}, is_reused, record)
    found.seconds["training"] = float(record["seconds"])
    found.fingerprints["run"] = digest(identity)
    reader = reader or prepared.open_reader(folder / READER_FOLDER).to(training.device)
    trained = prepared.trained(reader, training.seed)
    with timed(found, "calibration"):
        trained = trained.calibrated(prepared.inputs("dev"), context)
    if context.worker.is_main:
        described = describe_reader(trained, found, args, prepared.source)
        write_record(folder / READER_FOLDER, described)
    found.fingerprints["reader"] = reader_checksum(folder)
    metrics = _measure(trained, found, prepared.inputs("test"), "test", args, folder, context)
    if context.worker.is_main:
        write_card(folder)
    return Outcome(folder, metrics, reused=False, training=record)


def _trained_reader(
    prepared: Prepared, training: ReaderTrainingArguments, identity: Mapping[str, Json]
) -> tuple[FusionReader | None, bool]:
    """Train, unless that is done already: then there is no reader in memory."""
    args, context, found = prepared.args, prepared.context, prepared.found
    folder = Path(str(training.output_dir))
    if read_training(folder) is not None:
        logger.info("run: %s is trained (reused)", folder)
        return None, True
    inputs = {split: prepared.inputs(split) for split in ("train", "dev")}
    reader = prepared.open_reader()
    if args.reader.dropout_rate is not None:
        reader.set_dropout(args.reader.dropout_rate)
    if args.reader.lora_rank is not None:
        reader.add_adapters(args.reader, seed=training.seed)
    if context.worker.is_main:
        _begin(folder, identity, args, training, found)
    context.barrier()
    trained = prepared.trained(reader, training.seed)
    result = _train(trained, inputs, found, training)
    if context.worker.is_main:
        write_training(folder, result, training)
    context.barrier()
    return reader, False


def _reuse(folder: Path, args: PgraArguments) -> Outcome:
    """Take up a finished run."""
    check_reader(folder)
    logger.info("run: %s is finished (reused)", folder)
    if args.reader.evidence_attention and not _tells_attention(folder):
        logger.warning("attention: pgra evaluate --run %s --evidence_attention adds it", folder)
    metrics, training = read_object(folder / METRICS_FILE), read_training(folder) or {}
    return Outcome(folder, metrics, reused=True, training=training)


def _tells_attention(folder: Path) -> bool:
    with (folder / PREDICTIONS_FILE).open(encoding="utf-8") as lines:
        return '"attention": ' in lines.readline()


def _begin(
    folder: Path,
    identity: Mapping[str, Json],
    args: PgraArguments,
    training: ReaderTrainingArguments,
    found: Found,
) -> None:
    """Say in the run's folder what it is."""
    write_json(folder / IDENTITY_FILE, identity)
    write_json(folder / ARGUMENTS_FILE, resolved_arguments(args, training))
    query, prompt = found.splits.test[0], found.prompt
    told = found.reranker.prompts(query) if found.reranker else []
    told = told or [one.prefix + one.suffix(query.fields) for one in (prompt, *prompt.others)]
    write_text(folder / "prompt.txt", "\n\n--- the next prefix ---\n\n".join(told))


def _train(
    trained: Trained,
    inputs: Mapping[str, TokenizedInputs],
    found: Found,
    training: ReaderTrainingArguments,
) -> TrainResult:
    """Train in place, going on from the last whole checkpoint if the run was stopped."""
    labels, metric = found.task.labels, found.task.metric
    return train_reader(
        trained.classifier,
        inputs["train"],
        inputs["dev"],
        measure=lambda truth, decided: measure(metric, truth, decided, labels),
        metric=metric,
        arguments=training,
    )


def evaluate_run(
    run: Path,
    context: Context = ALONE,
    *,
    split: str = "test",
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    output_dir: Path | None = None,
) -> Outcome:
    """Measure a trained run again, on its own split or on another file.

    Args:
        run: A folder that `train_run` left.
        context: Who shares the work.
        split: "test" or "dev".
        changes: Arguments to change, by section, such as {"data": {"test_file": ...}}.
        output_dir: Where results go; default: the run.

    Raises:
        ArtifactError: If the folder holds no finished reader, a damaged one, or `output_dir` is
            another run's.
        PgraError: As each stage says.
    """
    folder = output_dir or run
    check_writable(folder)
    args, seed = load_run_arguments(run, changes or {})
    weights, record = check_reader(run), read_record(run, verify=False)
    check_reads_any(record)
    if folder != run and (folder / IDENTITY_FILE).is_file():
        raise ArtifactError(f"{folder} is a run of train.py itself: choose another --output_dir")
    tokenizer = load_tokenizer(find_model(str(run / READER_FOLDER)))
    found = read_task(args)
    open_stages(found, args)
    free = _free_fields(folder != run, split, changes or {})
    check_same_inputs(run, task_identity(args, found), free=free)  # before the long stages
    find_evidence(found, args, context, splits=(split,))
    check_same_inputs(run, task_identity(args, found), free=free)
    reader = FusionReader.from_name(str(run / READER_FOLDER))
    reader.to(choose_device(args.runtime.device))
    found.fingerprints["run"] = digest(read_object(run / IDENTITY_FILE))
    found.fingerprints["reader"] = weights
    if folder == run and (run / METRICS_FILE).is_file():  # it goes on telling what the run cost
        before = read_object(run / METRICS_FILE)
        found.fingerprints = {**before["fingerprints"], **found.fingerprints}
        found.seconds = {**found.seconds, **before["seconds"]}
    verbalizer, decision = task_verbalizer(found.task, args.reader), label_decision(args.reader)
    trained = Trained(reader, tokenizer, verbalizer, decision, seed)
    trained = trained.with_calibration(record.calibration)
    inputs = read_inputs(found, split, args, tokenizer, context)
    metrics = _measure(trained, found, inputs, split, args, folder, context)
    return Outcome(folder, metrics, reused=False)


def _free_fields(
    is_elsewhere: bool,  # noqa: FBT001 (private)
    split: str,
    changes: Mapping[str, Mapping[str, Any]],
) -> set[str]:
    """Give the fields of a run's identity in which a new measurement may differ from it."""
    free = {name for section in changes.values() for name in section}
    if is_elsewhere:
        free |= {split, f"candidates/{split}", f"evidence/{split}"}
    return free


def _measure(
    trained: Trained,
    found: Found,
    inputs: TokenizedInputs,
    split: str,
    args: PgraArguments,
    folder: Path,
    context: Context,
) -> dict[str, Any]:
    """Decide a split's examples and write what came out."""
    attention = args.reader.evidence_attention and found.depth > 0
    with timed(found, "evaluation"):
        decided = trained.decide(inputs, context, attention=attention)
    models = [args.reader.model_name_or_path, *evidence_models(args)]
    record = RunRecord(
        task=found.task.name,
        split=split,
        metric=found.task.metric,
        labels=found.task.labels,
        seed=trained.seed,
        seconds=found.seconds,
        fingerprints=found.fingerprints,
        notes=[*run_notes(args, found, models), *trained.notes],
        calibration=decided.calibration,
        system=args.system,
    )
    examples, lines = found.examples(split), found.evidence_lines(split, decided.best)
    if decided.shares is not None:
        lines = add_attention(lines, decided.shares)
    if context.worker.is_main:
        write_results(folder, record, examples, decided.predictions, lines)
    context.barrier()
    return read_object(folder / METRICS_FILE)


def resolved_arguments(args: PgraArguments, training: ReaderTrainingArguments) -> dict[str, Json]:
    """Give what `arguments.json` holds: all arguments by section, the Trainer's too."""
    return {**asdict(args), "training": training.to_dict()}


# A run of a system that trains nothing, in a folder like any other run's.
#
# runs/NAME/run.json           what determines the run; another is refused
# runs/NAME/arguments.json     all resolved arguments
# runs/NAME/predictions.jsonl, metrics.json


@dataclass(frozen=True)
class Decisions:
    """What a system that trains nothing gives.

    Attributes:
        predictions: One for each test example, in order.
        notes: What a reader of the numbers must know.
        dev: What the dev set decided, with its metric and value there; empty if nothing.
    """

    predictions: Sequence[Prediction]
    notes: Sequence[str] = ()
    dev: Mapping[str, Json] = field(default_factory=dict)


def run_untrained(
    args: PgraArguments,
    training: ReaderTrainingArguments,
    found: Found,
    decide: Callable[[], Decisions],
    *,
    settings: Mapping[str, Json],
    models: Sequence[str],
    context: Context = ALONE,
) -> Outcome:
    """Decide the test examples and write what came out, or take up what is there.

    Args:
        args: Everything but the training.
        training: Its `output_dir` is the run, its `seed` the run's.
        found: The task's examples.
        decide: Decides; called in every process, and only if the run is not there.
        settings: What decides predictions besides the examples.
        models: Names of all models used.
        context: Who shares the work; the main one writes.

    Raises:
        ArtifactError: If the folder holds another run.
        PgraError: As `decide`.
    """
    folder = Path(str(training.output_dir))
    identity = {
        "method": args.method,
        "task": found.task.name,
        "labels": list(found.task.labels),
        "metric": found.task.metric,
        **settings,
        "seed": training.seed,
        **found.fingerprints,
    }
    check_writable(folder)
    check_same_run(folder, identity)
    is_finished = (folder / METRICS_FILE).is_file() and (folder / IDENTITY_FILE).is_file()
    context.barrier()  # all have looked before the main process writes
    if is_finished:
        logger.info("run: %s is finished (reused)", folder)
        return _outcome(folder, reused=True)
    decided = decide()
    found.fingerprints["run"] = digest(identity)
    record = RunRecord(
        task=found.task.name,
        split="test",
        metric=found.task.metric,
        labels=found.task.labels,
        seed=training.seed,
        seconds=found.seconds,
        fingerprints=found.fingerprints,
        notes=[*run_notes(args, found, models), *decided.notes],
        system=args.system,
    )
    if context.worker.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / IDENTITY_FILE, identity)
        write_json(folder / ARGUMENTS_FILE, resolved_arguments(args, training))
        if decided.dev:
            write_json(folder / TRAINING_FILE, decided.dev)
        examples = found.examples("test")
        write_results(folder, record, examples, decided.predictions, [[] for _ in examples])
    context.barrier()
    return _outcome(folder, reused=False)


def _outcome(folder: Path, *, reused: bool) -> Outcome:
    has_dev = (folder / TRAINING_FILE).is_file()
    dev = read_object(folder / TRAINING_FILE) if has_dev else {}
    return Outcome(folder, read_object(folder / METRICS_FILE), reused, dev)


# Every system by name, behind one call: `train.py --system NAME`.
#
# Readers (pgra, exhaustive, fid, random, plain) are one pipeline: `PgraArguments` lets the system
# decide what tells them apart. Each other system is a file with a
# `run(args, training, processes) -> Outcome` of its own, imported when it is asked for.


READER_SEEDS = (
    "seeds of the reader (order of examples, dropout); data, prompt and evidence are alike"
)


@dataclass(frozen=True)
class OwnSystem:
    """A system with a pipeline of its own.

    Attributes:
        module: Where its `run` is; a run's folder has what `write_results` writes.
        seeds: What a seed changes, as `summary.json` tells it.
    """

    module: str
    seeds: str


OWN_SYSTEMS: Mapping[str, OwnSystem] = {
    "icl": OwnSystem(
        "pgra.methods.icl",
        "of no effect here: nothing is drawn but the exemplars (exemplar_seed), alike for all",
    ),
    "knn": OwnSystem("pgra.methods.knn", "of no effect here: nothing is drawn, nothing is trained"),
    "lm-bff": OwnSystem(
        "pgra.methods.lm_bff",
        "seeds of the few-shot split, its demonstrations, and the reader (order, dropout)",
    ),
    "rag": OwnSystem("pgra.methods.rag", READER_SEEDS),
}
assert {*OWN_SYSTEMS, *READER_SYSTEMS} == set(SYSTEMS)


def run_system(
    args: PgraArguments,
    training: ReaderTrainingArguments,
    context: Context = ALONE,
) -> Outcome:
    """Run the system that the arguments name, or take up its finished run.

    Args:
        args: Everything but the training; `args.runtime.system` is the system.
        training: The Trainer's arguments; `output_dir` is the run, and `seed` its seed.
        context: Who shares the work.

    Raises:
        ArtifactError: If the folder holds another run.
        PgraError: As each stage says.
    """
    own = OWN_SYSTEMS.get(args.runtime.system)
    if own is None:
        return train_run(args, training, context)
    outcome: Outcome = import_module(own.module).run(args, training, context)
    return outcome


def seeds_meaning(args: PgraArguments) -> str:
    """Say what a seed of a run changes."""
    own = OWN_SYSTEMS.get(args.runtime.system)
    return READER_SEEDS if own is None else own.seeds


def refuse_own(args: PgraArguments, what: str) -> None:
    """Refuse what only the trained reader's pipeline can do.

    Args:
        args: Which system.
        what: What is asked for, as the user writes it.

    Raises:
        ConfigError: If the system has a pipeline of its own.
    """
    if args.runtime.system in OWN_SYSTEMS:
        raise ConfigError(
            f"{what} is for readers ({', '.join(READER_SYSTEMS)}), not for system "
            f"'{args.runtime.system}': leave it out, or choose another --system"
        )


# Several seeds in one command: a run each, and how much they differ.
#
#     NAME/seed-N/            a run each, where the output folder's name holds no {seed}
#     NAME/summary.json       mean and spread
#
# The seeds are those of the reader: the order of examples, dropout, and what LoRA starts from.
# Data, prompt and evidence are the same for all. What they are of another system, `summary.json`
# tells.


SUMMARY_FILE = "summary.json"
SEED_PLACE = "{seed}"


@dataclass(frozen=True)
class Summary:
    """Runs that differ in their seed only.

    Attributes:
        folder: Where `summary.json` is.
        outcomes: By seed, in the order asked for.
        values: The content of `summary.json`.
    """

    folder: Path
    outcomes: Mapping[int, Outcome]
    values: Mapping[str, Any]


def variant(
    training: ReaderTrainingArguments, folder: Path, **changes: float
) -> ReaderTrainingArguments:
    """Give one of several runs' arguments.

    Args:
        training: What they share; not changed.
        folder: The run's.
        changes: Values by name, such as its seed.
    """
    mine = copy.copy(training)
    mine.output_dir = str(folder)
    mine.run_name = training.run_name and f"{training.run_name}-{folder.name}"
    mine.resume_from_checkpoint = None  # each goes on from its own last one
    for name, value in changes.items():
        setattr(mine, name, value)
    return mine


def check_series(training: ReaderTrainingArguments, root: Path) -> None:
    """Refuse what is for one run only, and a folder that is one.

    Raises:
        ArtifactError: If the folder of several runs is a run itself.
        ConfigError: If one checkpoint is named for all.
    """
    if str(training.resume_from_checkpoint or "").lower() not in ("", "false", "true"):
        raise ConfigError(
            f"resume_from_checkpoint ({training.resume_from_checkpoint}) is of one run, and "
            "several are asked for: leave it out, each goes on from its own last checkpoint"
        )
    if (root / IDENTITY_FILE).is_file():
        raise ArtifactError(
            f"{root} is a run itself, and several runs are asked for: choose another --output_dir"
        )


def series_folder(pattern: str, seeds: Sequence[int]) -> Path:
    """Give the folder of what several seeds share: their pattern with all of them, 0+1+2."""
    return Path(pattern.replace(SEED_PLACE, "+".join(str(seed) for seed in seeds)))


def seed_folder(pattern: str, seed: int) -> Path:
    """Give one seed's run: the pattern with the seed, or a folder inside it."""
    if SEED_PLACE in pattern:
        return Path(pattern.replace(SEED_PLACE, str(seed)))
    return Path(pattern) / f"seed-{seed}"


def train_seeds(
    args: PgraArguments,
    training: ReaderTrainingArguments,
    seeds: Sequence[int],
    context: Context = ALONE,
) -> Summary:
    """Train and measure once with each seed; what is finished is taken up.

    Args:
        args: Everything before the reader's training; it is done once.
        training: The Trainer's arguments; `output_dir` may hold `{seed}`.
        seeds: Different ones.
        context: Who shares the work.

    Raises:
        ArtifactError: If a folder holds another run.
        PgraError: As `train_run`.
    """
    pattern = str(training.output_dir)
    root = series_folder(pattern, seeds)
    check_series(training, root)
    runs = {s: variant(training, seed_folder(pattern, s), seed=s) for s in seeds}
    if args.runtime.system in OWN_SYSTEMS:
        outcomes = _run_each(runs, lambda mine: run_system(args, mine, context))
        return sum_up(outcomes, root, seeds_meaning(args), context)
    prepared = prepare_runs(args, list(runs.values()), context)
    return run_seeds(prepared, runs, root)


def run_seeds(
    prepared: Prepared,
    runs: Mapping[int, ReaderTrainingArguments],
    root: Path,
    done: Mapping[int, Outcome] | None = None,
) -> Summary:
    """Train and measure runs by seed, and write what they have in common.

    Args:
        prepared: What they share.
        runs: Arguments by seed.
        root: Where `summary.json` goes.
        done: What this command has run already.
    """
    known = done or {}
    outcomes = _run_each(runs, lambda mine: known.get(mine.seed) or run_reader(prepared, mine))
    return sum_up(outcomes, root, seeds_meaning(prepared.args), prepared.context)


def _run_each(
    runs: Mapping[int, ReaderTrainingArguments],
    run: Callable[[ReaderTrainingArguments], Outcome],
) -> dict[int, Outcome]:
    outcomes: dict[int, Outcome] = {}
    for seed, mine in runs.items():
        logger.info("seeds: seed %d (%d of %d)", seed, len(outcomes) + 1, len(runs))
        outcomes[seed] = run(mine)
    return outcomes


def sum_up(
    outcomes: Mapping[int, Outcome],
    root: Path,
    meaning: str,
    context: Context = ALONE,
) -> Summary:
    """Write what runs by seed have in common.

    Args:
        outcomes: By seed, in the order asked for.
        root: Where `summary.json` goes.
        meaning: What the seeds are of.
        context: The main one writes.
    """
    values = _summarise(outcomes, meaning)
    if context.worker.is_main:
        root.mkdir(parents=True, exist_ok=True)
        write_json(root / SUMMARY_FILE, values)
    context.barrier()
    return Summary(root, outcomes, values)


def _summarise(outcomes: Mapping[int, Outcome], meaning: str) -> dict[str, Json]:
    first = next(iter(outcomes.values())).metrics
    test = [float(outcome.metrics["value"]) for outcome in outcomes.values()]
    dev = [
        float(o.training["value"]) for o in outcomes.values() if o.training.get("value") is not None
    ]
    return {
        **{name: first[name] for name in ("task", "split", "metric")},
        "num_examples": first["n"],
        "seeds_are": meaning,
        "runs": [
            {
                "seed": seed,
                "folder": outcome.folder.name,
                "value": float(outcome.metrics["value"]),
                "dev_value": outcome.training.get("value"),
            }
            for seed, outcome in outcomes.items()
        ],
        **spread(test),
        "dev": spread(dev) if len(dev) == len(test) else None,
    }


def spread(values: Sequence[float]) -> dict[str, Json]:
    """Give mean, sample standard deviation (None for one value), count and ends."""
    return {
        "mean": statistics.fmean(values),
        "sd": statistics.stdev(values) if len(values) > 1 else None,
        "n": len(values),
        "min": min(values),
        "max": max(values),
    }


# A trained run on new queries: evidence by its own index, bank and prompt, then its reader.
#
# No training data is read: the reader's folder holds the prompt. Only with exemplars "knn" each new
# query has neighbors to be found, and the training data must be where it was. Corpus, index and LM
# must be those that the run was made with.


@dataclass(frozen=True)
class Answer:
    """What a run says of a query.

    Attributes:
        query: The query.
        prediction: The label, and the probability of each.
        evidence: What the reader read beside it, best first.
        corrections: What a memory gave for it, the nearest first.
        unaided: The prediction without them; None where there are none.
    """

    query: Example
    prediction: Prediction
    evidence: Sequence[EvidenceLine]
    corrections: Sequence[Correction] = ()
    unaided: Prediction | None = None

    def with_memory(self, memory: LabelMemory, weight: float) -> "Answer":
        """Give the same answer with a memory's corrections mixed in, if any are near.

        Args:
            memory: Of the run's task.
            weight: Theirs; see `pgra.memory.labels.mix_labels`.
        """
        found = memory.recall(self.query.fields)
        if not found:
            return self
        mixed = mix_labels(self.prediction, found, weight=weight)
        return replace(self, prediction=mixed, corrections=found, unaided=self.prediction)


class Predictor:
    """A trained run, loaded once for any number of queries.

    Attributes:
        reader: Its reader.
        search: Its stages; None for a plain T5, which searches nothing.
    """

    def __init__(self, reader: Reader, search: EvidenceSearch | None) -> None:
        self.reader, self.search = reader, search

    @classmethod
    def open(cls, folder: Path, *, artifacts_dir: str | None = None, device: str = "auto") -> Self:
        """Load a run.

        Args:
            folder: The run, or its reader's folder, wherever that was moved.
            artifacts_dir: Folder of its index and bank; None is where they were.
            device: What computes, whatever the run's was.

        Raises:
            ArtifactError: If the reader is not whole, or corpus, index or LM are not those that it
                was trained with; what differs is named.
            PgraError: As each stage says.
        """
        home = find_reader(folder)
        changes = {"device": device}
        if artifacts_dir is not None:
            changes["artifacts_dir"] = artifacts_dir
        reader = Reader.load(home, device=device)
        args = _arguments(home, reader.record, changes)
        if reader.num_evidence == 0:
            return cls(reader, None)
        return cls(reader, _open_search(home, reader.record, args))

    def answer(self, queries: Sequence[Query], *, attention: bool = False) -> list[Answer]:
        """Find evidence for queries and decide them.

        Args:
            queries: Texts, or mappings of the task's inputs to texts.
            attention: Whether to say what share of the reader's attention each evidence gets.

        Raises:
            PgraError: As `Reader.predict` and each stage.
        """
        examples = self.reader.examples(queries)
        lines: list[list[EvidenceLine]] = [[] for _ in examples]
        if self.search is not None and examples:
            ranked = self.search.find(examples)
            best = ranked.best.top(self.reader.num_evidence)
            lines = evidence_lines(self.search.corpus, ranked.first, best)
        fields = [example.fields for example in examples]
        texts = [[line.text for line in found] for found in lines]
        predictions = self.reader.predict(fields, texts)
        if attention:
            lines = add_attention(lines, self.reader.attention(fields, texts))
        return [Answer(*parts) for parts in zip(examples, predictions, lines, strict=True)]


def _arguments(home: Path, record: ReaderRecord, runtime: Mapping[str, Any]) -> PgraArguments:
    """Read a run's arguments; dtypes that depend on the device stay what they were."""
    changes: dict[str, dict[str, Any]] = {"runtime": dict(runtime)}
    lm = record.fingerprints.get("reranker")
    encoder = _encoder_fields(record) or _exemplar_encoder(lm)
    if isinstance(lm, Mapping) and "dtype" in lm:
        changes["rerank"] = {"lm_dtype": lm["dtype"]}
    if encoder is not None:
        changes["retriever"] = {"encoder_dtype": encoder["dtype"]}
    try:
        return arguments_from(record.arguments, changes)
    except (KeyError, TypeError) as error:
        raise ArtifactError(
            f"{home / RECORD_FILE} holds arguments that this version of pgra does not know "
            f"({error}): use the version that it names, or train again"
        ) from None


def _encoder_fields(record: ReaderRecord) -> Mapping[str, Json] | None:
    """Find what a run's index says of its encoder; None if it has none."""
    index = record.fingerprints.get("index")
    dense = index.get("dense", index) if isinstance(index, Mapping) else None
    return dense if isinstance(dense, Mapping) and "encoder" in dense else None


def _exemplar_encoder(lm: Json) -> Mapping[str, Json] | None:
    """Find what a run's reranker says of the first stage's encoder, where that finds exemplars.

    A first stage by words has none, so that its index does not tell.
    """
    told = lm.get("exemplar encoder") if isinstance(lm, Mapping) else None
    return told if isinstance(told, Mapping) and "part" not in told else None


def _open_search(home: Path, record: ReaderRecord, args: PgraArguments) -> EvidenceSearch:
    """Open the stages; refuse what is not the run's before anything long is begun."""
    assert record.prompt is not None  # it has evidence
    if not args.artifacts.is_dir():
        raise ArtifactError(
            f"{args.artifacts} does not exist, where the run's index and bank are looked for: name "
            "their folder with --artifacts_dir"
        )
    # Its own neighbors stand before each query: the training examples are the one thing that the
    # reader's folder does not hold. That they are the run's, the reranker's fingerprint tells.
    exemplars = read_task(args).exemplars if args.rerank.exemplars == "knn" else None
    made = record.fingerprints
    lm = made.get("reranker")
    reference = Reference(made=lm if isinstance(lm, Mapping) else {})
    search = EvidenceSearch(args, record.prompt, exemplars=exemplars, reference=reference)
    _check(home, "corpus", made.get("corpus"), search.corpus.fingerprint["corpus_sha256"])
    _check(home, "reranker", made.get("reranker"), dict(search.reranker.fingerprint))
    search.reranker.check()  # before an index would be built
    if args.is_exhaustive:
        return search
    encoder = _encoder_fields(record)
    if encoder is not None:  # its folder's digest tells before an index would be built with it
        _check(home, "encoder", encoder["encoder"], find_model(args.retriever.encoder).identity)
    _check(home, "index", made.get("index"), dict(search.retriever.fingerprint))
    return search


def _check(home: Path, stage: str, made: Json, asked: Json) -> None:
    """Refuse a stage that is not the run's; the first field that differs is named."""
    pair = [
        {f"{stage} {name}": field for name, field in value.items()}
        if isinstance(value, Mapping)
        else {stage: value}
        for value in (made, asked)
    ]
    try:
        check_fingerprint(home, made=pair[0], asked=pair[1])
    except ArtifactError as error:
        reason = str(error).removesuffix(": use another folder or build it again")
        reason = reason.replace("this run asks for", "what is there now is")
        raise ArtifactError(f"{reason}: restore it, or train again") from None
