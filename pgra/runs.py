"""A run: a method on a task with a seed, in a folder that can be resumed, measured and asked again.

`pgra.run_folder` lists its files. Several seeds: seed-N/ is a run each, unless the folder's name
holds {seed}. What is given from Python in memory becomes files of ARTIFACTS/given, since a run
reads them again later.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self, overload

from pgra.artifacts import (
    at_home,
    canonical_json,
    digest,
    lock_folder,
    user_cache,
    write_sealed,
    write_text,
)
from pgra.config import Arguments
from pgra.context import ALONE, Context
from pgra.data.corpus import Corpus, CorpusArguments, write_passages
from pgra.data.examples import ExampleRows, open_rows, read_split
from pgra.data.read import fetch_folder, is_on_hub
from pgra.data.tasks import AnyTask, load_any_task, measure_labels
from pgra.errors import ArtifactError, ConfigError, reading
from pgra.experiments.worth import measure_worth, take_evidence
from pgra.methods.arguments import SEED_FIELD, RunArguments, WorthArguments
from pgra.methods.base import Method, arguments_from, arguments_of, find_method, open_method
from pgra.model_card import push_run
from pgra.parallel import Turn
from pgra.progress import quiet_transformers
from pgra.reader.record import Reader, read_record
from pgra.report.metrics import no_better_than_one_label
from pgra.report.results import FREE, Answer, Decisions, write_results
from pgra.rerank import BaseReranker, ReadyReranker
from pgra.rerank.reranker import Reranker, make_ready
from pgra.retrieval.dense import Index
from pgra.run_folder import (
    ARGUMENTS_FILE,
    CARD_FILE,
    DECIDING_FILES,
    IDENTITY_FILE,
    METRICS_FILE,
    PROMPT_FILE,
    READER_FOLDER,
    RECORD_FILE,
    TRAINING_FILE,
    WEIGHTS_FILE,
    RunFolder,
    read_metrics,
    read_object,
)
from pgra.types import UNDECIDED, Fields, Json, Query, is_query, read_queries

logger = logging.getLogger(__name__)

_FEWEST = 20  # dev rows: of fewer, one label may do as well by chance
_PATHS = {  # arguments that may name a file or folder
    "artifacts_dir",
    "causal_reranker",
    "corpus",
    "cross_encoder",
    "dataset_name",
    "encoder",
    "index_dir",
    "lm",
    "model_name_or_path",
    "query_dataset_name",
    "reader_lm",
    "test_file",
    "train_file",
    "validation_file",
}


@dataclass(frozen=True, repr=False)
class Run(RunFolder):
    """A run in its folder, as `pgra.train` returns it, and `Run.load`.

    Attributes:
        folder: Where it is; `pgra evaluate`, `predict`, `report` and `push` take it too.
        args: All of its arguments, by section.
        context: Its device, and where its index and bank are.
        reused: Whether it was there already.
        reranker: The ready one that it was given instead of one by name.
        busy: Held by the thread that decides queries.
    """

    args: RunArguments
    context: Context = ALONE
    reused: bool = False
    reranker: ReadyReranker | None = None
    busy: Turn = field(default_factory=Turn, compare=False)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        device: str = "auto",
        artifacts_dir: str | Path | None = None,
        reranker: BaseReranker | Reranker | None = None,
    ) -> Self:
        """Open a finished run; its models are loaded when it first decides a query.

        Args:
            folder: The run, the `reader/` of a trained one, or the hub id that it was pushed to.
            device: What computes, whatever the run's was.
            artifacts_dir: Folder of its index and bank; None is where they were. For a reader from
                the hub they are made again, by default in the user's cache.
            reranker: The one that was given to `pgra.train`.

        Raises:
            ArtifactError: If there is no finished run, or it is damaged.
            ModelError: If the device is not there.
        """
        changes = {"device": device}
        home = fetch_folder("run", folder)
        if is_on_hub(folder):
            artifacts_dir = artifacts_dir or user_cache()
            Path(artifacts_dir).mkdir(parents=True, exist_ok=True)
        if artifacts_dir is not None:
            changes["artifacts_dir"] = str(artifacts_dir)
        args = read_arguments(home, changes)
        if (home / ARGUMENTS_FILE).is_file() and not RunFolder(home).is_finished:
            raise ArtifactError(f"{home} holds no finished run (no {METRICS_FILE}): run it again")
        ready = None if reranker is None else make_ready(reranker)
        return cls(home, args, args.place(ALONE), reused=True, reranker=ready)

    @property
    def metrics(self) -> dict[str, Any]:
        """Content of `metrics.json`: "value" of the headline "metric", "interval_95", ...

        Empty if it was not measured on the test set.
        """
        return self.read_if_there(METRICS_FILE)

    @cached_property
    def method(self) -> Method:
        """The method, loaded to decide new queries.

        Raises:
            PgraError: If what the run was made with is gone.
        """
        method = find_method(self.args.runtime.method)(self.args, self.context, self.reranker)
        if method.restore(self.folder):
            return method
        method.open()
        # Queries are other ones now.
        _check_same_inputs(self, method, free={"answers", "method", "test"})
        method.prepare(())
        method.load(self.folder)
        return method

    @property
    def reader(self) -> Reader:
        """The trained reader alone, which is given its evidence; an ArtifactError without one."""
        with quiet_transformers():
            return Reader.load(self.folder, device=self.context.device)

    @overload
    def predict(self, queries: Query) -> Answer: ...  # type: ignore[overload-overlap]
    @overload
    def predict(self, queries: Iterable[Query]) -> list[Answer]: ...
    def predict(self, queries: Query | Iterable[Query]) -> Answer | list[Answer]:
        """Decide new queries, with evidence found as for the test set.

        Args:
            queries: A text, or a mapping with the task's inputs (other keys are ignored); or a list
                of these, or a `datasets.Dataset`.

        Returns:
            An answer, with its `label`, `scores` and `evidence`; for several, one for each.

        Raises:
            PgraError: If a query does not fit the task, or the run's models or corpus are gone.
        """
        if is_query(queries):
            return self.predict([queries])[0]
        # The LM is loaded when it first has a text to read; threads take turns.
        with self.busy, quiet_transformers():
            examples = read_queries(queries, self.method.data.task.inputs)
            decided = self.method.decide(examples)
        return decided.answers(examples)

    def push_to_hub(self, repo_id: str, *, private: bool | None = None) -> str:
        """Upload the trained reader with its model card; return the address of the commit.

        `Reader.load` loads it. The token is HF_TOKEN, or the login's.

        Args:
            repo_id: OWNER/NAME; a name alone is your own.
            private: Of a new repository; None: as the hub does.

        Raises:
            ConfigError: If the hub refuses token, id or upload.
            ArtifactError: If the method trains no reader, or the run is damaged.
        """
        return push_run(self.folder, repo_id, private=private)

    def __repr__(self) -> str:
        metrics = self.metrics
        value = "not measured"
        if metrics:
            value = "{task} {split} {metric} {value:.4f}".format_map(metrics)
        return f"Run({str(self.folder)!r}: {self.args.method}, {value})"


def train(
    task: str | Path | AnyTask,
    train: ExampleRows | str | Path | None = None,
    *,
    validation: ExampleRows | str | Path | None = None,
    test: ExampleRows | str | Path | None = None,
    corpus: str | Path | Iterable[str] | Corpus | Index | None = None,
    reranker: str | type[BaseReranker] | BaseReranker | Reranker | None = None,
    artifacts_dir: str | Path | None = None,
    **arguments: Any,
) -> Run:
    """Train and measure a method on a task: the run that `pgra train` makes of the same arguments.

    A finished run is reused, an interrupted one resumes, and another run's folder is refused. Some
    methods train nothing (kate, icl, knn, ralm): they are measured.

    Args:
        task: A name (`pgra list` lists them), a YAML, or a task made with `pgra.Task(...)`.
        train: Rows: a `datasets.Dataset`, dicts with the task's inputs and "label", or pairs (text,
            label) where the task has one input; or a file. None: the task's own data set from the
            hub, or that of `dataset_name=`.
        validation: Likewise, to choose a checkpoint on. None: a part of train is held out.
        test: Likewise, to report on. None: a fifth of train is held out.
        corpus: What is searched: texts, a `datasets.Dataset`, an `Index`, a `Corpus`; or a file, a
            hub id or `bundled:NAME`, as `--corpus` takes them.
        reranker: As `--reranker`; or a class or an object of one: a `pgra.Reranker`, with its LM,
            prompt and similarity, or your own. A loaded LM is not saved with the run.
        artifacts_dir: Folder of indexes and banks, shared by runs; None: the user's cache
            (`~/.cache/pgra`).
        arguments: All others, by their names on the command line: `method="fid"` (or
            `"module:Class"`), `num_candidates=20`, `lm="bundled:smollm2-135m"`, `max_steps=50`,
            `output_dir=...`. `config="FILE.yaml"` and `profile="NAME"` are defaults below them.

    Raises:
        PgraError: If arguments, data or models cannot be used; if possible before any long work.
    """
    artifacts = (at_home(artifacts_dir) if artifacts_dir else user_cache()).absolute()
    home = artifacts / "given"
    values: dict[str, Any] = {"artifacts_dir": artifacts}
    if isinstance(task, str | Path):
        values["task"] = str(task)
        task = load_any_task(str(task))
    else:
        text = task.to_yaml()
        path = home / f"{task.name}-{digest(text)[:12]}" / f"{task.name}.yaml"
        values["task"] = _write_once(path, text)
    for split, rows in (("train", train), ("validation", validation), ("test", test)):
        if rows is not None:
            values[f"{split}_file"] = _rows_file(task, rows, split, home)
    ready = None
    if isinstance(reranker, BaseReranker | Reranker):
        ready = make_ready(reranker)
        values |= ready.arguments
    elif isinstance(reranker, type):
        values["reranker"] = f"{reranker.__module__}:{reranker.__qualname__}"
    elif reranker is not None:
        values["reranker"] = reranker
    if twice := sorted({*values} & {*arguments}):
        raise ConfigError(f"{twice[0]} is given twice, once by rows or an object: leave one out")
    first = arguments.get("retriever")
    if isinstance(corpus, Index) and first in ("bm25", "random"):
        raise ConfigError(f"retriever '{first}' searches no Index: give its texts (its .corpus)")
    if corpus is not None:
        field_ = str(arguments.get("corpus_field", CorpusArguments.corpus_field))
        values = {**_corpus_arguments(corpus, artifacts, field_), **values}
    values = {**values, **arguments}
    layers = []
    for name in ("profile", "config"):
        value = values.pop(name, None)
        if value is not None:
            layers += [f"--{name}", str(value)]
    args = arguments_of(values, layers, caller="pgra.train")
    with quiet_transformers():
        return run(args, reranker=ready)


def _rows_file(task: AnyTask, rows: ExampleRows | str | Path, split: str, home: Path) -> str:
    """Return the file of a split's rows, which are checked, and written as the task's files are."""
    if isinstance(rows, str | Path):
        return str(rows)
    raw = open_rows(task, rows, split)
    read_split(task, raw, split)
    names = {column: task.local.columns.get(name, name) for name, column in raw.columns.items()}
    target = task.local.columns.get(task.target, task.target)
    lines = []
    for row in raw.rows:
        columns = names if task.labels else row.fields
        values = {names.get(column, column): row.fields[column] for column in columns}
        label = values[target]
        if raw.classes and isinstance(label, int) and 0 <= label < len(raw.classes):
            values[target] = raw.classes[label]
        lines.append(f"{canonical_json(values)}\n")
    text = "".join(lines)
    return _write_once(home / task.name / f"{split}-{digest(text)[:12]}.jsonl", text)


def _write_once(path: Path, text: str) -> str:
    if not path.is_file():
        write_text(path, text)
    return str(path)


def _corpus_arguments(corpus: Any, artifacts: Path, field_: str) -> dict[str, Any]:
    """Return the arguments that name a corpus; an index gives its own too."""
    values: dict[str, Any] = {}
    if isinstance(corpus, Index):
        if corpus.keeper is not None:
            raise ConfigError("this index goes with its process: build it with path=FOLDER")
        values = _not_default(corpus.args)
        corpus = corpus.corpus
    if isinstance(corpus, Corpus):
        if corpus.made_by is None:
            raise ConfigError("this corpus was opened by its folder: give its file, or its texts")
        return {**values, **_not_default(corpus.made_by), "corpus": corpus.made_by.sources}
    if not isinstance(corpus, str | Path):
        corpus = write_passages(corpus, artifacts / "passages", field_)
    return {"corpus": str(corpus)}


def _not_default(arguments: Arguments) -> dict[str, Any]:
    values = vars(arguments)
    return {f.name: values[f.name] for f in fields(arguments) if values[f.name] != f.default}


def run(
    args: RunArguments,
    context: Context = ALONE,
    *,
    reranker: ReadyReranker | None = None,
) -> Run:
    """Run a method, or return its finished run; a ready `reranker` replaces the named one.

    Raises:
        ArtifactError: If the folder holds another run.
    """
    args = args.variant(args.folder, args.seed)
    return run_all({args.seed: args}, context, reranker=reranker)[args.seed]


def run_all(
    runs: Mapping[int, RunArguments],
    context: Context,
    *,
    reranker: ReadyReranker | None = None,
    may_lack_reader: bool = False,
) -> dict[int, Run]:
    """Run a method once for each seed; what the runs share is prepared once.

    They differ in folder, seed and training. A ready `reranker` replaces the named one. With
    `may_lack_reader` the weights of a finished run may have been deleted.
    """
    first = next(iter(runs.values()))
    context = first.place(context)
    notes = []
    if first[first.output_section].evidence == "auto":
        if reranker is not None:
            raise ConfigError("evidence 'auto' compares rerankers by name: leave reranker out")
        worth = measure_worth(first, WorthArguments())
        logger.info("evidence: %s", worth["why"])
        notes.append(worth["why"])
        runs = {seed: take_evidence(args, worth["changes"]) for seed, args in runs.items()}
    shared = open_method(next(iter(runs.values())), context, reranker)
    for args in runs.values():  # what would fail later is refused now
        method = shared.with_seed(args)
        method.check()
        _check_same_run(method)
    finished: dict[int, Run] = {}
    with ExitStack() as stack:
        for args in runs.values():
            stack.enter_context(lock_run(args.folder, context))
        shared.prepare()
        for seed, args in runs.items():
            if len(runs) > 1:
                logger.info("seeds: seed %d (%d of %d)", seed, len(finished) + 1, len(runs))
            method = shared.with_seed(args)
            finished[seed] = _make(method, notes, may_lack_reader=may_lack_reader)
    return finished


def _make(method: Method, notes: Sequence[str], *, may_lack_reader: bool) -> Run:
    """Make a run, or return what is there; see `run_all`."""
    args = method.args
    context = method.context
    run = RunFolder(args.folder)
    _check_same_run(method)
    is_done = run.is_finished and (run.has_reader or not args.trains)
    context.barrier()  # all have looked before the main process writes
    if is_done:
        read_metrics(run.folder)
        logger.info("run: %s is finished (reused)", run.folder)
    else:
        fields = identity(method)
        method.fingerprints["run"] = digest(fields)
        record = _fit(method, run, fields)
        if args.trains:
            method.fingerprints["reader"] = run.reader_checksum
        measure_run(method, run.folder, record, notes)
    has_weights = (run.reader_folder / WEIGHTS_FILE).is_file()
    needs_reader = args.trains and (has_weights or not may_lack_reader)
    if is_done and needs_reader:
        read_record(run.folder)  # refuses a damaged one
    if context.is_main:  # a kill after the measurement may have left this undone
        has_card = (run.reader_folder / CARD_FILE).is_file()
        if not is_done or (needs_reader and not has_card):
            method.finish(run.folder)
        if args.trains:
            run.remove_checkpoints()
    return Run(run.folder, args, context, reused=is_done, reranker=method.reranker)


def _fit(method: Method, run: RunFolder, fields: Fields) -> Mapping[str, Any]:
    """Train unless that is done; return the dev set's record, empty if nothing was decided."""
    record = run.training if run.has_reader else {}
    if record:
        logger.info("run: %s is trained (reused)", run.folder)
        method.load(run.folder)
    else:
        if method.context.is_main:
            write_sealed(run.folder / IDENTITY_FILE, fields)
            arguments = {**method.args.as_json(), "place": {"started_in": str(Path.cwd())}}
            write_sealed(run.folder / ARGUMENTS_FILE, arguments)
            prompt = method.sample_prompt()
            if prompt is not None:
                write_text(run.folder / PROMPT_FILE, prompt)
        method.context.barrier()
        fitted = method.fit(run.folder)
        if fitted is not None:
            record = dict(fitted)
            if method.context.is_main:
                write_sealed(run.folder / TRAINING_FILE, record)
        method.context.barrier()
    if "seconds" in record:
        method.seconds["training"] = float(str(record["seconds"]))
    return record


def identity(method: Method) -> dict[str, Json]:
    """Return all that decides a run's predictions, as far as it is known yet."""
    labels = list(method.data.labels)
    return {**_names(method), "labels": labels, **method.identity(), **method.fingerprints}


def _names(method: Method) -> dict[str, Json]:
    return {
        "method": method.name(method.args),
        "task": method.data.task.name,
        "metric": method.data.metric,
        "seed": method.seed,
    }


def _check_same_run(method: Method) -> None:
    """Raise an ArtifactError if a method's folder holds another run, or one without its record.

    It names the arguments that differ, if any do. A run without a checkpoint may be replaced.
    """
    args = method.args
    run = RunFolder(args.folder)
    if not run.is_begun:
        return
    fields = identity(method)
    way_out = "choose another --output_dir"
    try:
        run.check_identity(fields, way_out)
    except ArtifactError:
        before = run.read(ARGUMENTS_FILE)
        changes = []
        for section, new in args.as_json().items():
            old = before.get(section, {})
            for name in old.keys() & new.keys() - FREE - {"artifacts_dir", "device"}:
                if canonical_json(old[name]) != canonical_json(new[name]):
                    changes.append(f"--{name} {old[name]} (now {new[name]})")
        if not changes:
            raise
        raise ArtifactError(
            f"{run.folder} was made with {', '.join(sorted(changes))}: {way_out}"
        ) from None


def _check_same_inputs(run: RunFolder, method: Method, *, free: set[str]) -> None:
    """Raise an ArtifactError if a run's inputs changed; fields in `free` may differ."""
    way_out = "its data, task or models changed since; restore them, or run it again"
    run.check_identity(identity(method), way_out, free)


def lock_run(folder: Path, context: Context) -> AbstractContextManager[None]:
    """Hold the folder of a run in the main process; a BusyError if another job does."""
    return lock_folder(folder) if context.is_main else nullcontext()


def measure_run(
    method: Method,
    folder: Path,
    training: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> None:
    """Decide the test set, and write the results; `training` is the dev set's record."""
    examples = method.data.examples("test")
    with method.timed("evaluation"):
        decided = method.decide(examples)
    warnings = _nothing_learnt(method, decided, training)
    about: dict[str, Json] = {
        **_names(method),
        "split": "test",
        "sizes": {name: len(getattr(method.data, name)) for name in ("train", "dev", "set_aside")},
        "uses_seed": method.uses_seed(method.args),
        "seconds": {name: round(value, 3) for name, value in method.seconds.items()},
        "fingerprints": dict(method.fingerprints),
        "notes": [*warnings, *notes, *method.notes(), *decided.notes],
        **decided.metrics,
    }
    if method.context.is_main:
        write_results(folder, about, method.data.labels, examples, decided)
    method.context.barrier()


def _nothing_learnt(method: Method, decided: Decisions, training: Mapping[str, Any]) -> list[str]:
    """Return notes where all answers are one or wrong, or one label alone would do as well."""
    data = method.data
    metric = data.metric
    truth = {name: [str(e.label) for e in data.examples(name)] for name in ("test", "dev")}
    predicted = [prediction.label for prediction in decided.predictions]
    n = len(predicted)
    notes = []
    if len(set(predicted)) == 1 < n and predicted[0] != UNDECIDED:  # of that its method has a note
        notes.append(f"all {n} predictions are '{predicted[0]:.60}'")
    if decided.values is not None:
        if decided.values[metric] == 0 and n > 1:
            notes.append(f"none of the {n} predictions is right")
        return notes
    names = [*data.labels, UNDECIDED]
    values = {"test": measure_labels(metric, truth["test"], predicted, names)[metric]}
    value = training.get("value")
    if value is not None and training["metric"] == metric and len(truth["dev"]) >= _FEWEST:
        values["dev"] = float(value)
    warnings = []
    for name, value in values.items():
        warning = no_better_than_one_label(name, metric, value, truth[name], data.labels)
        if warning is not None:
            warnings.append(warning)
    if warnings and method.args.trains:
        rate = f"--learning_rate ({method.args['training'].learning_rate:g})"
        warnings[-1] += f": try another {rate}, more --max_steps or more training examples"
    return [*notes, *warnings]


def evaluate_run(
    folder: str | Path,
    context: Context = ALONE,
    *,
    output_dir: str | Path | None,
    changes: Mapping[str, Any] | None = None,
) -> Run:
    """Measure a finished run again, on its test set or on another file.

    `changes` are arguments, such as {"test_file": ...}. Results go to `output_dir`; None: the run.

    Raises:
        ArtifactError: If there is no finished run, its reader is damaged, or `output_dir` is
            another run.
    """
    run = RunFolder(Path(folder))
    target = Path(output_dir or folder)
    args = read_arguments(run.folder, changes or {})
    if args.trains:
        read_record(run.folder)  # refuses a run that was stopped before its end, or is damaged
    if target != run.folder and (target / IDENTITY_FILE).is_file():
        raise ArtifactError(f"{target} is a run of pgra train itself: choose another --output_dir")
    method = open_method(args, args.place(context))
    free: set[str] = set()
    if target != run.folder:
        free = {"answers", "test", "candidates/test", "evidence/test"}
    _check_same_inputs(run, method, free=free)  # before the long stages
    method.prepare(("test",))
    _check_same_inputs(run, method, free=free)
    method.load(run.folder)
    method.fingerprints["run"] = digest(run.read(IDENTITY_FILE))
    if args.trains:
        method.fingerprints["reader"] = run.reader_checksum
    if target == run.folder and run.is_finished:
        before = run.read(METRICS_FILE)  # all that it was made from, and what it cost
        method.fingerprints = {**before["fingerprints"], **method.fingerprints}
        method.seconds |= before["seconds"]
    with lock_run(target, method.context):
        measure_run(method, target, run.training if run.has_reader else {})
    return Run(target, args, method.context)


def read_arguments(folder: Path, changes: Mapping[str, Any]) -> RunArguments:
    """Read a run's arguments, with changes by name.

    A relative path is looked for where the run was started, then as it is.

    Raises:
        ArtifactError: If there are none, or they are damaged or of another version.
        ConfigError: If they contradict each other.
    """
    names = (ARGUMENTS_FILE, f"{READER_FOLDER}/{RECORD_FILE}", RECORD_FILE)
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise ArtifactError(f"{folder} is not a run: give the folder of a finished run")
    values = read_object(path)
    with reading(path, ArtifactError):
        sections = values.get("arguments", values)
        start = Path(sections.get("place", {}).get("started_in", ""))
        for section in sections.values():
            for name, value in section.items():
                if name in _PATHS or str(value).endswith(".yaml"):
                    section[name] = _from(start, value)
        args = arguments_from(sections, changes)
    if RunFolder(folder).is_finished:
        read_metrics(folder, DECIDING_FILES)
    return args


def _from(start: Path, value: Any) -> Any:
    if isinstance(value, list):
        return [_from(start, item) for item in value]
    return str(start / value) if value and (start / value).exists() else value


# Several seeds.


def run_seeds(args: RunArguments, seeds: Sequence[int], context: Context) -> dict[int, Run]:
    """Run once with each of different seeds, and return the runs; finished ones are reused.

    The folder's name may hold `{seed}`, else each seed has a folder inside it.

    Raises:
        ArtifactError: If a folder holds another run, or that of them all is a run itself.
    """
    folder = str(args.folder)
    if SEED_FIELD not in folder:
        if (args.folder / IDENTITY_FILE).is_file():
            raise ArtifactError(f"{folder} is one run, not several: choose another --output_dir")
        folder = f"{folder}/seed-{SEED_FIELD}"
    return run_all({seed: args.variant(folder, seed) for seed in seeds}, context)
