"""A run: a method on a task with a seed, in a folder that can be resumed, measured and asked again.

run.json              what decides the run; the same command continues, another is refused
arguments.json        all arguments
prompt.txt            a prompt as the LM sees it
losses.jsonl          the loss and the learning rate of every step
checkpoint-N/         to resume from, until the run is finished
training.json         what was decided on the dev set
reader/               the best reader: a plain model folder with pgra.json and its model card
predictions.jsonl, metrics.json

Several seeds: seed-N/ is a run each, unless the folder's name holds {seed}; and summary.json.
"""

import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from pgra.artifacts import (
    digest,
    lock_folder,
    user_cache,
    write_json,
    write_text,
)
from pgra.core import ALONE, UNDECIDED, Context, Example, Json, Prediction
from pgra.errors import ArtifactError, PgraError
from pgra.methods.arguments import RunArguments
from pgra.methods.base import (
    Decisions,
    Method,
    arguments_from,
    find_method,
    open_method,
)
from pgra.reader import READER_FOLDER, RECORD_FILE
from pgra.reader.inputs import Query, read_queries
from pgra.reader.record import fetch_reader, find_reader, is_on_hub
from pgra.report.metrics import measure, no_better_than_one_label
from pgra.report.results import (
    DECIDING_FILES,
    METRICS_FILE,
    SUMMARY_FILE,
    EvidenceLine,
    damaged,
    read_metrics,
    read_object,
    write_results,
)
from pgra.run_folder import (
    ARGUMENTS_FILE,
    CARD_FILE,
    IDENTITY_FILE,
    PROMPT_FILE,
    TRAINING_FILE,
    WEIGHTS_FILE,
    check_reader,
    check_same_inputs,
    check_same_run,
    check_writable,
    read_training,
    reader_checksum,
    remove_checkpoints,
)

logger = logging.getLogger(__name__)

SEED_FIELD = "{seed}"


@dataclass(frozen=True)
class Outcome:
    """A finished run.

    Attributes:
        metrics: The content of `metrics.json`; empty if it was not measured on the test set.
        reused: Whether it was there already.
        training: The content of `training.json`: the dev set's value, and when.
    """

    folder: Path
    metrics: Mapping[str, Any]
    reused: bool
    training: Mapping[str, Any] = field(default_factory=dict)


def run(args: RunArguments, context: Context = ALONE) -> Outcome:
    """Run a method, or return its finished run.

    Raises:
        ArtifactError: If the folder holds another run.
    """
    return run_all({args.seed: args}, context)[args.seed]


def run_all(
    runs: Mapping[int, RunArguments], context: Context, *, may_lack_reader: bool = False
) -> dict[int, Outcome]:
    """Run a method once for each seed; what the runs share is prepared once.

    They differ in folder, seed and training. With `may_lack_reader` the weights of a finished run
    may have been deleted.
    """
    outcomes: dict[int, Outcome] = {}
    prepared = Prepared(next(iter(runs.values())), context, list(runs.values()))
    for seed, args in runs.items():
        if len(runs) > 1:
            logger.info("seeds: seed %d (%d of %d)", seed, len(outcomes) + 1, len(runs))
        outcomes[seed] = prepared.run(args, may_lack_reader=may_lack_reader)
    return outcomes


class Prepared:
    """A method on a task, opened once for all runs that share what precedes their training."""

    def __init__(
        self, args: RunArguments, context: Context, runs: Sequence[RunArguments] = ()
    ) -> None:
        """Open the method; refuse what would fail in `runs`, those that will follow."""
        self.context = _context_of(args, context)
        for one in runs:
            check_writable(one.folder)
        self._method = open_method(args, self.context)
        for one in runs:
            method = self._method.with_seed(one)
            method.check()
            _check_run(method, is_whole=False)
        self._is_prepared = False

    def run(self, args: RunArguments, *, may_lack_reader: bool = False) -> Outcome:
        """Make a run, or return what is there; see `run_all`."""
        if not self._is_prepared:
            self._method.prepare()
            self._is_prepared = True
        method, folder = self._method.with_seed(args), args.folder
        with lock_run(folder, self.context):
            named = identity(method)
            _check_run(method)
            done = is_finished(folder, trains=args.trains)
            self.context.barrier()  # all have looked before the main process writes
            if done:
                lacks = not (folder / READER_FOLDER / WEIGHTS_FILE).is_file()
                has_reader = args.trains and not (may_lack_reader and lacks)
                outcome = _reuse(folder, has_reader=has_reader)
                if self.context.is_main:  # what a kill after the last measurement left undone
                    if has_reader and not (folder / READER_FOLDER / CARD_FILE).is_file():
                        method.finish(folder)
                    drop_checkpoints(args)
                return outcome
            method.fingerprints["run"] = digest(named)
            record = self._fit(method, folder, named)
            if args.trains:
                method.fingerprints["reader"] = reader_checksum(folder)
            metrics = measure_run(method, folder, "test", record)
            if self.context.is_main:
                method.finish(folder)
                drop_checkpoints(args)
            return Outcome(folder, metrics, reused=False, training=record)

    def _fit(self, method: Method, folder: Path, named: Mapping[str, Json]) -> Mapping[str, Any]:
        """Train unless that is done; return the dev set's record."""
        record = read_training(folder) if method.args.trains else None
        if record is not None:
            logger.info("run: %s is trained (reused)", folder)
            method.load(folder)
        else:
            if self.context.is_main:
                write_json(folder / IDENTITY_FILE, named)
                write_json(folder / ARGUMENTS_FILE, method.args.as_json())
                prompt = method.sample_prompt()
                if prompt is not None:
                    write_text(folder / PROMPT_FILE, prompt)
            self.context.barrier()
            fitted = method.fit(folder)
            if fitted is not None:
                record = dict(fitted)
                if self.context.is_main:
                    write_json(folder / TRAINING_FILE, record)
            self.context.barrier()
        if record is not None and "seconds" in record:
            method.seconds["training"] = float(str(record["seconds"]))
        return record or {}


def drop_checkpoints(args: RunArguments) -> None:
    """Delete a finished run's checkpoints, unless more than one was asked for."""
    if args.trains and args["training"].save_total_limit == 1:
        remove_checkpoints(args.folder)


def identity(method: Method) -> dict[str, Json]:
    """Return all that decides a run's predictions, as far as it is known yet."""
    return {
        "method": method.name(method.args),
        "task": method.data.task.name,
        "labels": list(method.data.labels),
        "metric": method.data.metric,
        "seed": method.seed,
        **method.identity(),
        **{name: value for name, value in method.fingerprints.items() if name != "run"},
    }


def _check_run(method: Method, *, is_whole: bool = True) -> None:
    check_same_run(method.args.folder, identity(method), is_whole=is_whole)


@contextmanager
def lock_run(folder: Path, context: Context) -> Iterator[None]:
    """Hold the folder of a run, or of several, in the main process; an ArtifactError if in use."""
    check_writable(folder)
    if not context.is_main:
        yield
        return
    with lock_folder(folder):
        yield


def measure_run(
    method: Method, folder: Path, split: str, training: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Decide a split's examples, write the results, and return what `metrics.json` holds."""
    with method.timed("evaluation"):
        decided = method.decide(method.data.examples(split))
    about: dict[str, Json] = {
        "method": method.name(method.args),
        "task": method.data.task.name,
        "split": split,
        "metric": method.data.metric,
        "sizes": {name: len(getattr(method.data, name)) for name in ("train", "dev", "set_aside")},
        "calibration": decided.calibration,
        "seed": method.seed,
        "uses_seed": method.uses_seed(method.args),
        "seconds": {name: round(value, 3) for name, value in method.seconds.items()},
        "fingerprints": dict(method.fingerprints),
        "notes": [
            *_nothing_learnt(method, split, decided, training or {}),
            *method.notes(),
            *decided.notes,
        ],
        **decided.metrics,
    }
    if method.context.is_main:
        write_results(
            folder,
            about,
            method.data.labels,
            method.data.examples(split),
            decided.predictions,
            decided.evidence,
            more=decided.details,
            values=decided.values,
            interval=decided.interval,
        )
    method.context.barrier()
    return read_object(folder / METRICS_FILE)


def _nothing_learnt(
    method: Method, split: str, decided: Decisions, training: Mapping[str, Any]
) -> list[str]:
    """Return notes on a split, and on the dev set, where one label alone would do as well."""
    data, metric = method.data, method.data.metric
    if decided.values is not None or len(data.labels) < 2:
        return []
    truth = {name: [str(e.label) for e in data.examples(name)] for name in {split, "dev"}}
    predicted, names = [p.label for p in decided.predictions], [*data.labels, UNDECIDED]
    measured = {split: measure(metric, truth[split], predicted, names)[metric]}
    if training.get("metric") == metric and training.get("value") is not None:
        measured["dev"] = float(training["value"])
    found = [
        no_better_than_one_label(name, metric, value, truth[name], data.labels)
        for name, value in measured.items()
    ]
    notes = [note for note in found if note is not None]
    if notes and method.args.trains:
        rate = f"--learning_rate ({method.args['training'].learning_rate:g})"
        notes[-1] += f": try another {rate}, more --max_steps or more training examples"
    return notes


def is_finished(folder: Path, *, trains: bool) -> bool:
    """Whether a run was measured, and has its reader if it trains one."""
    names = [METRICS_FILE, IDENTITY_FILE]
    if trains:
        names.append(f"{READER_FOLDER}/{RECORD_FILE}")
    return all((folder / name).is_file() for name in names)


def _reuse(folder: Path, *, has_reader: bool) -> Outcome:
    if has_reader:
        check_reader(folder)
    logger.info("run: %s is finished (reused)", folder)
    training = folder / TRAINING_FILE
    record = read_object(training) if training.is_file() else {}
    return Outcome(folder, read_metrics(folder), reused=True, training=record)


def evaluate_run(
    folder: str | Path,
    context: Context = ALONE,
    *,
    split: str = "test",
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    output_dir: str | Path | None = None,
) -> Outcome:
    """Measure a finished run again, on its split "test" or "dev", or on another file.

    `changes` are arguments by section, such as {"data": {"test_file": ...}}. Results go to
    `output_dir`, by default the run.

    Raises:
        ArtifactError: If there is no finished run, its reader is damaged, or `output_dir` is
            another run.
    """
    folder = Path(folder)
    target = Path(output_dir or folder)
    check_writable(target)
    if folder.is_dir() and not (folder / ARGUMENTS_FILE).is_file():
        raise ArtifactError(
            f"{folder / ARGUMENTS_FILE} is missing, and a run is measured by it: give the folder "
            "of a whole run, or run its command again"
        )
    args = read_arguments(folder, changes or {})
    if args.trains:
        find_reader(folder)  # refuses a run that was stopped before its end
        check_reader(folder)
    if target != folder and (target / IDENTITY_FILE).is_file():
        raise ArtifactError(f"{target} is a run of pgra train itself: choose another --output_dir")
    method = open_method(args, _context_of(args, context))
    free = {name for section in (changes or {}).values() for name in section}
    free |= {f"reader.{name}" for name in free}
    if target != folder:
        free |= {split, f"candidates/{split}", f"evidence/{split}"}
    check_same_inputs(folder, identity(method), free=free)  # before the long stages
    method.prepare((split,))
    check_same_inputs(folder, identity(method), free=free)
    method.load(folder)
    made = read_object(folder / IDENTITY_FILE)
    method.fingerprints["run"] = digest(made)
    if args.trains:
        method.fingerprints["reader"] = reader_checksum(folder)
    if target == folder:  # its metrics say all that it was made from, and what it cost
        before: Mapping[str, Any] = {name: value for name, value in made.items() if "/" in name}
        if (folder / METRICS_FILE).is_file():
            metrics = read_object(folder / METRICS_FILE)
            before, method.seconds = metrics["fingerprints"], method.seconds | metrics["seconds"]
        method.fingerprints = {**before, **method.fingerprints}
    with lock_run(target, method.context):
        metrics = measure_run(method, target, split, read_training(folder))
        return Outcome(target, metrics, reused=False)


def open_run(
    folder: Path,
    context: Context = ALONE,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
) -> Method:
    """Open a finished run, or the `reader/` of one wherever it was moved, to decide new examples.

    `changes` are arguments by section.

    Raises:
        ArtifactError: If there is no finished run, or what it was made with is gone.
    """
    args = read_arguments(folder, changes or {})
    restored = find_method(args.runtime.method).restore(folder, args, context)
    if restored is not None:
        return restored
    method = open_method(args, _context_of(args, context))
    # Queries are other ones now.
    check_same_inputs(folder, identity(method), free=("answers", "method", "test"))
    method.prepare(())
    method.load(folder)
    return method


@dataclass(frozen=True)
class Answer:
    """What a run says of a new query.

    Attributes:
        prediction: The label or the text that was written, and the probability of each label.
        evidence: What was read beside it, best first.
        exemplars: The examples before it in a prompt, in the prompt's order.
        details: What else the method says of it, as in `predictions.jsonl`.
    """

    query: Example
    prediction: Prediction
    evidence: Sequence[EvidenceLine] = ()
    exemplars: Sequence[Example] = ()
    details: Mapping[str, Json] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The label, or the text that was written."""
        return self.prediction.label

    @property
    def scores(self) -> Mapping[str, float]:
        """The probability of each label."""
        return self.prediction.scores

    @property
    def text(self) -> str:
        """The query's text."""
        return self.query.text


@dataclass
class Predictor:
    """A finished run, loaded once for any number of queries."""

    decider: Method

    @classmethod
    def open(
        cls,
        folder: Path | str,
        *,
        artifacts_dir: str | Path | None = None,
        device: str = "auto",
    ) -> Self:
        """Load a run.

        Args:
            folder: The run, the `reader/` of a trained one, or the hub id that it was pushed to.
            artifacts_dir: Folder of its index and bank; None is where they were. For a reader from
                the hub they are made again, by default in the user's cache.
            device: What computes, whatever the run's was.

        Raises:
            ArtifactError: If the run is not whole, or what it was made with is gone.
        """
        context = Context(device=device)  # refuses a device that is not there
        name, is_fetched = str(folder), is_on_hub(folder)
        folder = fetch_reader(folder)
        if is_fetched:
            artifacts_dir = str(artifacts_dir or user_cache())
            Path(artifacts_dir).mkdir(parents=True, exist_ok=True)
        runtime = {"device": device}
        if artifacts_dir is not None:
            runtime["artifacts_dir"] = str(artifacts_dir)
        changes: dict[str, Mapping[str, Any]] = {"runtime": runtime}
        try:
            decider = open_run(folder, context, changes)
        except PgraError as error:
            if not is_fetched:
                raise
            raise type(error)(
                f"{error} [the reader '{name}' came from the hub without its corpus and LM: put "
                "them here under their names; with evidence of your own: "
                f"pgra.Reader.from_pretrained('{name}')]"
            ) from None
        return cls(decider)

    def answer(self, queries: Sequence[Query]) -> list[Answer]:
        """Decide queries: texts, or mappings of the task's inputs to texts.

        Raises:
            ConfigError: If one is not what the task takes.
        """
        task = self.decider.data.task
        examples = read_queries(queries, task=task.name, inputs=task.inputs)
        decided = self.decider.decide(examples)
        return [
            Answer(
                example,
                prediction,
                decided.evidence[i] if decided.evidence else (),
                decided.exemplars[i] if decided.exemplars else (),
                decided.details[i] if decided.details else {},
            )
            for i, (example, prediction) in enumerate(
                zip(examples, decided.predictions, strict=True)
            )
        ]


def _context_of(args: RunArguments, context: Context) -> Context:
    return replace(context, artifacts=Path(args.runtime.artifacts_dir), device=args.runtime.device)


def read_arguments(folder: Path, changes: Mapping[str, Mapping[str, Any]]) -> RunArguments:
    """Read a run's arguments, with changes by section.

    Raises:
        ArtifactError: If there are none, or they are damaged or of another version.
        ConfigError: If they contradict each other.
    """
    names = (ARGUMENTS_FILE, f"{READER_FOLDER}/{RECORD_FILE}", RECORD_FILE)
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise ArtifactError(f"{folder} is no run: give the folder of a finished run")
    values = read_object(path)
    values = values.get("arguments", values)
    try:
        args = arguments_from(values, changes)
    except (KeyError, TypeError) as error:
        raise ArtifactError(
            f"{path} holds arguments that this version of pgra does not know ({error}): use the "
            "version that made it, or run it again"
        ) from None
    except (AttributeError, ValueError) as error:
        raise damaged(path, error) from None
    if (folder / METRICS_FILE).is_file():
        read_metrics(folder, DECIDING_FILES)
    return args


# Several seeds.


@dataclass(frozen=True)
class Summary:
    """Runs that differ in their seed only; `values` is the content of `summary.json`."""

    folder: Path
    outcomes: Mapping[int, Outcome]
    values: Mapping[str, Any]


def run_seeds(args: RunArguments, seeds: Sequence[int], context: Context = ALONE) -> Summary:
    """Run once with each of different seeds; finished runs are reused.

    The folder's name may hold `{seed}`.

    Raises:
        ArtifactError: If a folder holds another run, or that of them all is a run itself.
    """
    pattern = str(args.folder)
    root = series_folder(pattern, seeds)
    check_series(root)
    runs = {seed: variant(args, seed_folder(pattern, seed), seed=seed) for seed in seeds}
    is_run = root in (run.folder for run in runs.values())  # of one seed: it holds itself
    with nullcontext() if is_run else lock_run(root, context):
        return sum_up(run_all(runs, context), root, args, context)


def variant(args: RunArguments, folder: Path, **changes: float | None) -> RunArguments:
    """Return the arguments of one of several runs; `changes` are of the section with its folder."""
    return args.change(args.home, output_dir=str(folder), **changes)


def check_series(root: Path) -> None:
    """Raise an ArtifactError if the folder of several runs is a run itself."""
    if (root / IDENTITY_FILE).is_file():
        raise ArtifactError(
            f"{root} is a run itself, and several runs are asked for: choose another --output_dir"
        )


def series_folder(pattern: str, seeds: Sequence[int]) -> Path:
    """Return the folder that several seeds share: the pattern with all of them, 0+1+2."""
    return Path(pattern.replace(SEED_FIELD, "+".join(str(seed) for seed in seeds)))


def seed_folder(pattern: str, seed: int) -> Path:
    """Return one seed's run: the pattern with the seed, or a folder inside it."""
    if SEED_FIELD in pattern:
        return Path(pattern.replace(SEED_FIELD, str(seed)))
    return Path(pattern) / f"seed-{seed}"


def sum_up(
    outcomes: Mapping[int, Outcome], root: Path, args: RunArguments, context: Context
) -> Summary:
    """Summarize runs by seed; the main process writes `summary.json` into `root`."""
    first = next(iter(outcomes.values())).metrics
    dev = [outcome.training.get("value") for outcome in outcomes.values()]
    values = {
        **{name: first[name] for name in ("task", "split", "metric")},
        "num_examples": first["n"],
        "seeds_are": find_method(args.runtime.method).SEEDS,
        "runs": [
            {
                "seed": seed,
                "folder": outcome.folder.name,
                "value": float(outcome.metrics["value"]),
                "dev_value": outcome.training.get("value"),
            }
            for seed, outcome in outcomes.items()
        ],
        **spread([float(outcome.metrics["value"]) for outcome in outcomes.values()]),
        "dev": None if None in dev else spread([float(str(value)) for value in dev]),
    }
    if context.is_main:
        root.mkdir(parents=True, exist_ok=True)
        write_json(root / SUMMARY_FILE, values)
    context.barrier()
    return Summary(root, outcomes, values)


def spread(values: Sequence[float]) -> dict[str, Json]:
    """Return mean, sample standard deviation (None for one value), count, minimum and maximum."""
    return {
        "mean": statistics.fmean(values),
        "sd": statistics.stdev(values) if len(values) > 1 else None,
        "n": len(values),
        "min": min(values),
        "max": max(values),
    }
