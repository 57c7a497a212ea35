"""`pgra.train`: a run of a method on a task, from Python; and `pgra.Run`, a finished one.

It is the run that `pgra train` makes of the same arguments. Rows in memory are written once, as

    ARTIFACTS/given/TASK/train-DIGEST.jsonl     rows by split, the digest that of their content
    ARTIFACTS/given/TASK-DIGEST/TASK.yaml       a task without a file
    ARTIFACTS/passages/passages-DIGEST.jsonl    a corpus (`pgra.data.corpus.write_passages`)
    ARTIFACTS/given/index-DIGEST/               an index that had a temporary folder

so that an interrupted run resumes, and `pgra evaluate`, `predict` and `report` read its folder.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, overload

from pgra.artifacts import at_home, canonical_json, digest, user_cache, write_text
from pgra.core import ALONE
from pgra.data.bundled import BUNDLED
from pgra.data.corpus import Corpus, CorpusArguments, write_passages
from pgra.data.examples import RawSplit, Rows, open_rows, read_split
from pgra.data.tasks import GenerationTask, Task, load_any_task
from pgra.errors import ArtifactError, ConfigError, DataError
from pgra.methods.arguments import READERS, RunArguments
from pgra.methods.base import arguments_of
from pgra.progress import quiet_transformers
from pgra.publish import push_run
from pgra.reader.inputs import Query
from pgra.reader.record import Reader
from pgra.report.results import METRICS_FILE, PREDICTIONS_FILE, read_lines, read_object
from pgra.rerank import BaseReranker
from pgra.retrieval.dense import Index
from pgra.run_folder import TRAINING_FILE
from pgra.runs import Answer, Predictor, read_arguments, run, series_folder

Data = Rows | str | Path  # rows in memory, or a file's name


def train(
    task: str | Path | Task | GenerationTask,
    train: Data | None = None,
    *,
    validation: Data | None = None,
    test: Data | None = None,
    corpus: str | Path | Iterable[str] | Corpus | Index | None = None,
    method: str | None = None,
    reranker: str | type[BaseReranker] | BaseReranker | None = None,
    output_dir: str | Path | None = None,
    artifacts_dir: str | Path | None = None,
    **arguments: Any,
) -> "Run":
    """Train and measure a method on a task: the run that `pgra train` makes of the same arguments.

    A finished run is reused, an interrupted one resumes, and another run's folder is refused. Some
    methods train nothing (kate, icl, knn, ralm): they are measured.

    Args:
        task: A name (`pgra data` lists them), a YAML, or a task made with `pgra.Task(...)`.
        train: Rows: a `datasets.Dataset`, dicts with the task's inputs and "label", or pairs (text,
            label) where the task has one input; or a file. None: the task's own data set from the
            hub, or that of `dataset_name=`.
        validation: Likewise, to choose a checkpoint on. None: a part of train is held out.
        test: Likewise, to report on. None: a fifth of train is held out.
        corpus: What is searched: texts, a `datasets.Dataset`, an `Index`, a `Corpus`; or a file, a
            hub id or `bundled:NAME`, as `--corpus` takes them.
        method: As `--method`: pgra (the default), fid, plain, random, exhaustive, rag, ralm,
            lm-bff, icl, kate, knn, or a class of your own.
        reranker: As `--reranker`; or a class or an object of one: a `pgra.Reranker`, with its LM,
            prompt and similarity, or your own. A loaded LM is not saved with the run.
        output_dir: The run's folder; None: `runs/{task}-{method}-seed{seed}`.
        artifacts_dir: Folder of indexes and banks, shared by runs; None: the user's cache
            (`~/.cache/pgra`).
        arguments: All others, by their names on the command line: `num_candidates=20`,
            `lm="bundled:smollm2-135m"`, `max_steps=50`, ... `config="FILE.yaml"` and
            `profile="NAME"` are defaults below them.

    Raises:
        PgraError: If arguments, data or models cannot be used; if possible before any long work
            and before anything is written.
    """
    if not isinstance(artifacts_dir, str | Path | None):
        raise ConfigError(f"artifacts_dir is {artifacts_dir!r:.80}: give a folder")
    artifacts = (at_home(artifacts_dir) if artifacts_dir else user_cache()).absolute()
    known = _read_task(task)
    given = _Given(known, artifacts / "given")
    rows = {"train": train, "validation": validation, "test": test}
    values = {
        **given.take_rows({split: part for split, part in rows.items() if part is not None}),
        "task": given.take_task(task),
        "artifacts_dir": artifacts,
        **{n: v for n, v in (("method", method), ("output_dir", output_dir)) if v is not None},
    }
    context = ALONE
    if isinstance(reranker, BaseReranker):
        values |= reranker.arguments()
        context = replace(context, shared={"reranker": reranker})
    elif isinstance(reranker, type):
        values["reranker"] = f"{reranker.__module__}:{reranker.__qualname__}"
    elif reranker is not None:
        values["reranker"] = reranker
    if twice := sorted({*values} & {*arguments}):
        raise ConfigError(f"{twice[0]} is given twice, once by rows or an object: leave one out")
    values = {**_take_corpus(corpus, given.home, {**arguments, **values}), **arguments, **values}
    layers = [
        word
        for name in ("profile", "config")
        if (value := values.pop(name, None)) is not None
        for word in (f"--{name}", str(value))
    ]
    args = arguments_of(values, layers, caller="pgra.train")
    if corpus is not None and "corpus" not in args.sections:
        raise ConfigError(f"method '{args.runtime.method}' searches no corpus: leave corpus out")
    if corpus is not None and "corpus" not in values:
        column = args["corpus"].corpus_field
        file = write_passages(corpus, artifacts / "passages", column)
        args = args.change("corpus", corpus=str(file))
    given.write()
    folder = series_folder(str(args.folder), [args.seed])
    with quiet_transformers():
        args_there = args.change(args.home, output_dir=str(folder))
        outcome = run(args_there, context)
    return Run(outcome.folder, args)


@dataclass(frozen=True, repr=False)
class Run:
    """A finished run, as `pgra.train` returns it, and `Run.open` of its folder.

    Attributes:
        folder: Where it is; `pgra evaluate`, `predict`, `report` and `push` take it too.
        args: All of its arguments, by section.
    """

    folder: Path
    args: RunArguments

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Open a finished run.

        Raises:
            ArtifactError: If there is none.
        """
        if not isinstance(folder, str | Path):
            raise ConfigError(f"folder is {folder!r:.80}: give a run's folder")
        home = at_home(folder)
        args = read_arguments(home, {})
        if not (home / METRICS_FILE).is_file():
            raise ArtifactError(
                f"{home} holds no finished run (no {METRICS_FILE}): run its command again"
            )
        return cls(home, args)

    @property
    def metrics(self) -> dict[str, Any]:
        """Content of `metrics.json`: "value" of the headline "metric", "interval_95", ..."""
        return read_object(self.folder / METRICS_FILE)

    @property
    def training(self) -> dict[str, Any]:
        """Content of `training.json`: the dev set's value and its step; empty without training."""
        path = self.folder / TRAINING_FILE
        return read_object(path) if path.is_file() else {}

    @property
    def predictions(self) -> list[dict[str, Any]]:
        """Content of `predictions.jsonl`, a dict for each test example."""
        return list(read_lines(self.folder / PREDICTIONS_FILE))

    @cached_property
    def predictor(self) -> Predictor:
        """The run, loaded on first use to decide new queries."""
        with quiet_transformers():
            return Predictor.open(self.folder, device=self.args.runtime.device)

    @property
    def reader(self) -> Reader:
        """The trained reader alone, which is given its evidence.

        Raises:
            ConfigError: If the method trains none.
        """
        self._check_trained("reader")
        with quiet_transformers():
            return Reader.load(self.folder, device=self.args.runtime.device)

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
        if isinstance(queries, str | Mapping):
            return self.predict([queries])[0]
        if not isinstance(queries, Iterable):
            raise ConfigError(f"queries is {queries!r:.80}: give a text, or a list of texts")
        inputs = self.predictor.decider.data.task.inputs
        asked = [
            {name: query[name] for name in inputs if name in query}
            if isinstance(query, Mapping)
            else query
            for query in queries
        ]
        with quiet_transformers():  # the LM is loaded when it first has a text to read
            return self.predictor.answer(asked)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        token: str | None = None,
        private: bool | None = None,
        revision: str | None = None,
    ) -> str:
        """Upload the trained reader with its model card; return the address of the commit.

        `Reader.from_pretrained` loads it.

        Args:
            repo_id: OWNER/NAME; a name alone is your own.
            token: None: HF_TOKEN, or the login's.
            private: Of a new repository; None: as the hub does.
            revision: A branch; None: main.

        Raises:
            ConfigError: If the method trains no reader, or the hub refuses token, id or upload.
            ArtifactError: If the run is damaged.
        """
        self._check_trained("push_to_hub")
        return push_run(self.folder, repo_id, token=token, private=private, revision=revision)

    def _check_trained(self, what: str) -> None:
        if not self.args.trains:
            raise ConfigError(
                f"{what} is for trained readers, and method '{self.args.method}' trains none"
            )

    def __repr__(self) -> str:
        told = self.metrics
        value = f"{told['task']} {told['split']} {told['metric']} {told['value']:.4f}"
        return f"Run({str(self.folder)!r}: {told['method']}, {value}, n = {told['n']})"


# What is given in memory, as files.


def _read_task(task: Any) -> Task | GenerationTask:
    if isinstance(task, Task | GenerationTask):
        return task
    if not isinstance(task, str | Path):
        raise ConfigError(
            f"task is {task!r:.80}: give a name (pgra data lists them), a YAML, or pgra.Task(...)"
        )
    return load_any_task(str(task))


@dataclass
class _Given:
    """Files of a task to be written into `home` once all else is checked; `texts` by path."""

    task: Task | GenerationTask
    home: Path
    texts: dict[Path, str] = field(default_factory=dict)

    def take_task(self, task: str | Path | Task | GenerationTask) -> str:
        if isinstance(task, str | Path):
            return str(task)
        text = task.to_yaml()
        path = self.home / f"{task.name}-{digest(text)[:12]}" / f"{task.name}.yaml"
        self.texts[path] = text
        return str(path)

    def take_rows(self, given: Mapping[str, Data]) -> dict[str, str]:
        files = {}
        for split, rows in given.items():
            if isinstance(rows, str | Path):
                if str(rows).startswith(BUNDLED):
                    raise ConfigError(
                        f"{split} is '{rows}', a data set of several splits: give "
                        f"dataset_name='{rows}'"
                    )
                files[f"{split}_file"] = str(rows)
                continue
            text = _as_jsonl(self.task, open_rows(self.task, rows, split), split)
            path = self.home / self.task.name / f"{split}-{digest(text)[:12]}.jsonl"
            self.texts[path] = text
            files[f"{split}_file"] = str(path)
        return files

    def write(self) -> None:
        for path, text in self.texts.items():
            if not path.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(path, text)


def _as_jsonl(task: Task | GenerationTask, raw: RawSplit, split: str) -> str:
    """Check rows, and return them as jsonl of the task, in their order."""
    read_split(task, raw, split, is_quiet=True)
    lines = []
    for row in raw.rows:
        values: dict[str, Any] = dict(row.fields)
        if isinstance(task, Task) or task.kind == "question":
            values = {
                task.local.columns.get(name, name): values[column]
                for name, column in raw.columns.items()
            }
        target = task.local.columns.get(task.target, task.target)
        label = values.get(target)
        if raw.classes and isinstance(label, int) and 0 <= label < len(raw.classes):
            values[target] = raw.classes[label]
        try:
            lines.append(canonical_json(values))
        except TypeError as error:
            raise DataError(f"{row.place}: {error}") from None
    return "".join(f"{line}\n" for line in lines)


def _take_corpus(corpus: Any, home: Path, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that name a corpus; none of texts, which are written later."""
    if isinstance(corpus, str | Path):
        return {"corpus": str(corpus)}
    index = None
    if isinstance(corpus, Index):
        index = _keep_index(corpus, home)
        corpus = index.corpus
    if isinstance(corpus, Corpus):
        if corpus.made_by is None:
            raise ConfigError("this corpus was opened by its folder: give its file, or its texts")
        corpus = corpus.made_by
    if not isinstance(corpus, CorpusArguments):
        return {}
    values = {"corpus": corpus.sources, **_not_default(corpus)}
    decided = READERS.get(str(asked.get("method")), {}).get("retriever", "dense")
    if index is not None and asked.get("retriever", decided) == "dense":
        values |= _not_default(index.args)
    return values


def _keep_index(index: Index, home: Path) -> Index:
    """Return an index with a permanent folder."""
    if not index.is_temporary:
        return index
    kept = home / f"index-{digest(dict(index.fingerprint))[:12]}"
    if not kept.is_dir():
        index.save(kept)
    return Index.load(kept, encoder=index.encoder)


def _not_default(part: Any) -> dict[str, Any]:
    return {
        f.name: getattr(part, f.name)
        for f in fields(part)
        if f.name != "corpus" and getattr(part, f.name) != f.default
    }
