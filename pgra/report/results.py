"""Finished runs: what a run leaves, reading it back with checks, what may stand in one table.

A folder is a run if it holds `metrics.json`, and a grid if it holds `grid.json` (which `pgra
ablate` writes first, so that missing runs are known). Neither is searched for other runs.
"""

import datetime
import logging
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from pgra.artifacts import MANIFEST, canonical_json, digest, package_versions, write_lines
from pgra.config import find_class, rules
from pgra.data.answers import EXACT_MATCH, SUBSETS
from pgra.data.examples import DataArguments
from pgra.data.tasks import TEXT_METRICS, measure_labels
from pgra.errors import ArtifactError, DamageError, reading
from pgra.reader.arguments import ReaderArguments, TrainingArguments
from pgra.report.metrics import (
    LabelOutcomes,
    Outcomes,
    TextOutcomes,
    bootstrap,
    interval_95,
)
from pgra.rerank.base import RerankArguments
from pgra.retrieval.base import RetrieverArguments
from pgra.run_folder import (
    ARGUMENTS_FILE,
    DECIDING_FILES,
    IDENTITY_FILE,
    METRICS_FILE,
    PREDICTIONS_FILE,
    RunFolder,
    read_lines,
    read_metrics,
    read_object,
    write_metrics,
)
from pgra.types import UNDECIDED, Example, Fields, Json, Prediction

logger = logging.getLogger(__name__)

GRID_FILE = "grid.json"
_SEED = 0


@dataclass(frozen=True)
class EvidenceLine:
    """One evidence in `predictions.jsonl`: its row of the corpus, text, and ranking.

    `stage1_rank` counts from 1. `score` is the second stage's; the first's where nothing was
    reranked.
    """

    row: int
    text: str
    stage1_rank: int
    stage1_score: float
    score: float


@dataclass(frozen=True)
class Answer:
    """A run's decision on a new query.

    Attributes:
        label: Its label, or the text that was written.
        scores: The probability of each label.
        evidence: What was read beside it, best first.
        exemplars: The examples before it in a prompt, in the prompt's order.
        details: Further entries that the method gives it in `predictions.jsonl`.
    """

    query: Example
    label: str
    scores: Mapping[str, float]
    evidence: Sequence[EvidenceLine] = ()
    exemplars: Sequence[Example] = ()
    details: Mapping[str, Json] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The query's text."""
        return self.query.text


@dataclass(frozen=True)
class Decisions:
    """A method's predictions for B examples, in order; the lists are empty where there is nothing.

    Attributes:
        evidence: The passages that were read with each example.
        exemplars: The labelled examples in the prompt of each example.
        details: Further entries of each example's line in `predictions.jsonl`.
        notes: What a reader of the numbers must know.
        metrics: Further entries of `metrics.json`.
        values: Metrics by name, where labels alone do not give them.
        interval: Of the headline metric among `values`.
    """

    predictions: Sequence[Prediction]
    evidence: Sequence[Sequence[EvidenceLine]] = ()
    exemplars: Sequence[Sequence[Example]] = ()
    details: Sequence[Fields] = ()
    notes: Sequence[str] = ()
    metrics: Fields = field(default_factory=dict)
    values: Mapping[str, float] | None = None
    interval: Sequence[float] | None = None

    def answers(self, queries: Sequence[Example]) -> list[Answer]:
        """Return what was decided on each query, in the order of `predictions`."""
        answers = []
        columns = (self.predictions, self.evidence, self.exemplars, self.details)
        for query, decision, evidence, exemplars, details in zip_longest(queries, *columns):
            more = (evidence or (), exemplars or (), details or {})
            answers.append(Answer(query, decision.label, decision.scores, *more))
        return answers


def answer_line(answer: Answer) -> dict[str, Json]:
    """Return an answer's line of `predictions.jsonl`."""
    query = answer.query
    line: dict[str, Json] = {"id": query.id, "text": query.text}
    if len(query.fields) > 1:
        line["fields"] = dict(query.fields)
    line |= {
        "label": query.label,
        "prediction": answer.label,
        "scores": dict(answer.scores),
        "evidence": [asdict(passage) for passage in answer.evidence],
    }
    return {**line, **answer.details}


def write_results(
    folder: Path,
    about: Fields,
    labels: Sequence[str],
    examples: Sequence[Example],
    decided: Decisions,
) -> None:
    """Write a run's predictions, then its metrics, with the checksums of the run's other files.

    Args:
        folder: The run.
        about: Entries of `metrics.json` beside its numbers: "method", "task", "split", "metric",
            "seed", "uses_seed" (whether another seed could give another run), "seconds" by stage,
            "fingerprints" of all inputs, "notes", and more.
        labels: The task's, in order.
        examples: The queries, labelled.
        decided: Of each, in the same order.
    """
    lines = [answer_line(answer) for answer in decided.answers(examples)]
    write_lines(folder / PREDICTIONS_FILE, lines)
    metric = str(about["metric"])
    predicted = [p.label for p in decided.predictions]
    values = decided.values
    interval = decided.interval
    if values is None:
        names = [*labels, *({UNDECIDED} & set(predicted))]
        outcomes = LabelOutcomes(metric, [e.label or "" for e in examples], predicted, names)
        values = measure_labels(metric, outcomes.labels, predicted, names)
        interval = interval_95(bootstrap([outcomes], seed=_SEED)[0])
    metrics = {
        **about,
        "n": len(examples),
        "value": values[metric],
        "interval_95": None if interval is None else list(interval),
        "metrics": dict(values),
        "versions": package_versions(),
        "git_commit": git_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    write_metrics(folder, metrics, (PREDICTIONS_FILE, *DECIDING_FILES))


@cache
def git_commit() -> str | None:
    """Return the commit of this code, with "-dirty" if changed; None outside a checkout."""
    root = Path(__file__).parents[2]
    words = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        done = subprocess.run(words, cwd=root, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() if (root / ".git").exists() else None


# Reading with checks: damage is reported by file, with the way out.


@dataclass(frozen=True, kw_only=True)
class FinishedRun(RunFolder):
    """One finished run, or one measure of a run that wrote texts: a row of a table.

    Attributes:
        method: As `--method` names it, such as "pgra" or "fid".
        name: The folder's name; of a grid, the point's.
        task: The task's name; with the measure where texts were written ("totto bleu"), but for
            exact match.
        arguments: Content of `arguments.json`: values by section; empty where there is none.
        metrics: Content of `metrics.json`.
        examples: Digest of ids, texts and true labels, in order: equal for one test set only.
    """

    method: str
    name: str
    task: str
    seed: int = 0
    arguments: Mapping[str, Fields] = field(default_factory=dict)
    metrics: Mapping[str, Any]
    outcomes: Outcomes = field(compare=False)
    examples: str

    @property
    def metric(self) -> str:
        return self.outcomes.metric

    @property
    def value(self) -> float:
        """The headline metric, a fraction, recomputed from the predictions."""
        return self.outcomes.value

    @property
    def n(self) -> int:
        """How many examples were measured."""
        return len(self.outcomes.kinds)

    @cached_property
    def interval(self) -> tuple[float, float]:
        """Its 95 % interval, from the predictions."""
        return interval_95(bootstrap([self.outcomes], seed=_SEED)[0])

    @property
    def labels(self) -> set[str]:
        """The task's labels; empty where texts are measured."""
        return set(getattr(self.outcomes, "names", ())) - {UNDECIDED}

    @property
    def values(self) -> dict[str, Json]:
        """All arguments by name."""
        values: dict[str, Json] = {}
        for section in self.arguments.values():
            values |= section
        return values

    @property
    def is_seeded(self) -> bool:
        """Whether another seed could give another run: something is trained or drawn."""
        return bool(self.metrics.get("uses_seed", True))

    def fingerprint(self, name: str) -> str:
        """Return the beginning of an input's digest; "" where it has none."""
        return str(self.metrics.get("fingerprints", {}).get(name) or "")[:8]

    @cached_property
    def settings(self) -> dict[str, Json]:
        """What decides its predictions, but for data, task and seed, by name."""
        depth = self.values.get("num_evidence")
        unused = {"runtime", "data", "folder", "place"}
        if depth == 0:
            unused |= {"corpus", "rerank"}
            if self.method in ("plain", "ralm"):  # others may look at its encoder
                unused.add("retriever")
        if self.values.get("reranker") == "none":
            unused.add("rerank")
        used: dict[str, Json] = {}
        for section, values in self.arguments.items():
            if section not in unused:
                # The seeds of one row's runs differ.
                free = {*FREE, "seed"} if section == "training" else FREE
                used |= {name: value for name, value in values.items() if name not in free}
        return used if depth is None else {**used, "num_evidence": depth}


def load_measures(folder: Path, *, name: str | None = None) -> list[FinishedRun]:
    """Read a finished run: one, or one for each measure of the texts it wrote.

    `name` replaces the folder's.

    Raises:
        ArtifactError: If a file is missing or damaged.
    """
    metrics = read_metrics(folder)
    with reading(folder / PREDICTIONS_FILE, DamageError):
        lines = list(read_lines(folder / PREDICTIONS_FILE))
        labels = [str(line["label"]) for line in lines]
        predicted = [str(line["prediction"]) for line in lines]
        names: dict[str, None] = {}
        for line in lines:
            names |= dict.fromkeys(line.get("scores") or ())
        names |= dict.fromkeys(sorted({*labels, *predicted}))
        run = FinishedRun(
            folder,
            method=metrics["method"],
            name=name or folder.name,
            task=metrics["task"],
            seed=int(metrics["seed"]),
            arguments=RunFolder(folder).read_if_there(ARGUMENTS_FILE),
            metrics=metrics,
            outcomes=LabelOutcomes(metrics["metric"], labels, predicted, list(names)),
            examples=digest([[line["id"], line["text"], line["label"]] for line in lines]),
        )
        return _measures_of_texts(run, lines) if "answers" in lines[0] else [run]


def _measures_of_texts(run: FinishedRun, lines: Sequence[Mapping[str, Any]]) -> list[FinishedRun]:
    measures = []
    for name in run.metrics["metrics"]:
        subset, _, metric = name.rpartition("/")
        is_exact = metric == EXACT_MATCH
        key = "is_right" if is_exact else metric
        of_sum = None
        if f"{metric}_counts" in lines[0]:
            key = f"{metric}_counts"
            of_sum = find_class("metric", metric, TEXT_METRICS).of_sum
        if key in lines[0]:
            values = [
                np.atleast_1d(line[key])
                for line in lines
                if not subset or line["is_overlap"] is SUBSETS[subset]
            ]
            outcomes = TextOutcomes(metric, np.array(values, np.float64), of_sum)
            task = run.task if is_exact else f"{run.task} {name}"
            measures.append(replace(run, task=task, outcomes=outcomes))
    return measures


@dataclass(frozen=True)
class Missing:
    """A run of a grid that does not exist yet."""

    name: str
    task: str
    seed: int


@dataclass(frozen=True)
class Group:
    """Runs that belong in one table.

    Attributes:
        axes: Of a grid: the arguments it varies; else empty.
        reference: The paper's table to compare with; None if none is named.
        baseline: Values by axis of the point to compare with; None if none is named.
        points: Of a grid: values by axis of each of its points, by name, in order.
    """

    title: str
    runs: Sequence[FinishedRun]
    missing: Sequence[Missing] = ()
    axes: Sequence[str] = ()
    reference: str | None = None
    baseline: Fields | None = None
    points: Mapping[str, Fields] = field(default_factory=dict)


def load_collection(paths: Sequence[Path]) -> list[Group]:
    """Read all runs and grids below some paths: the grids, in order, then all other runs as one.

    Each folder counts once; unfinished runs outside of grids are left out, with a warning.

    Raises:
        ArtifactError: If a path is not a folder, a file is damaged, or there is no finished run.
    """
    folders: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise ArtifactError(f"{path} is not a folder: give a run, a folder of runs, or a grid")
        for folder in list(_find(path)) or [path]:  # a folder without any is named too
            folders.setdefault(folder.resolve(), folder)
    groups = []
    runs = []
    for folder in folders.values():
        if (folder / GRID_FILE).is_file():
            group = load_grid(folder)
            if group.runs:
                groups.append(group)
            else:
                logger.warning("report: %s has no finished run (yet), and is left out", folder)
        elif RunFolder(folder).is_finished:
            runs += load_measures(folder)
        else:
            logger.warning("report: %s is not measured (yet), and left out", folder)
    if runs:
        groups.append(Group("Results", runs))
    if not groups:
        where = ", ".join(map(str, paths))
        raise ArtifactError(f"no finished run (with {METRICS_FILE}) in {where}: train one first")
    return groups


def _find(folder: Path) -> Iterator[Path]:
    """Return grids and runs in the order of names, without searching inside of either."""
    marks = (GRID_FILE, METRICS_FILE, IDENTITY_FILE)
    if any((folder / name).is_file() for name in marks):
        yield folder
    elif not (folder / MANIFEST).is_file():  # an artifact holds no runs, and may be large
        for inner in sorted(folder.iterdir()):
            if inner.is_dir() and not inner.is_symlink():
                yield from _find(inner)


def load_grid(folder: Path) -> Group:
    """Read a grid's finished and missing runs. A point has one run for each task and seed."""
    grid = read_object(folder / GRID_FILE)
    runs: list[FinishedRun] = []
    missing: list[Missing] = []
    for point in grid["points"]:
        for seed, inner in point["seeds"].items():
            if RunFolder(folder / inner).is_finished:
                runs += load_measures(folder / inner, name=point["name"])
            else:
                missing.append(Missing(point["name"], point["task"], int(seed)))
    return Group(
        grid["title"],
        runs,
        missing,
        axes=grid["axes"],
        reference=grid["reference"],
        baseline=grid["baseline"],
        points={point["name"]: point["values"] for point in grid["points"]},
    )


# Which runs may stand in one table, and in which row.


# in the order of the paper's Table 2, then our own; others come after, by name
METHOD_ORDER = (
    "icl",
    "ralm",
    "knn",
    "plain",
    "fid",
    "random",
    "pgra",
    "head",
)
# in the paper's order; others come after, by name
TASK_ORDER = ("sst2", "sst5", "cola", "trec", "cr", "mr", "mpqa", "subj")
_RULES = ("split_seed", "dev_fraction", "max_train_samples", "max_dev_samples")
_EXEMPLARS = ("num_exemplars", "exemplars", "exemplar_seed")
_OF_RUNS = (ReaderArguments, RerankArguments, RetrieverArguments, TrainingArguments)
# Paths of content that may have moved since; runs are compared by content, not by name.
_PATHS = {"corpus", "encoder", "neighbor_encoder", "lm", "model_name_or_path", "reader_lm"}
_RULES_OF_RUNS = chain.from_iterable(rules(cls).items() for cls in _OF_RUNS)
FREE = {name for name, rule in _RULES_OF_RUNS if not rule.decides} - _PATHS


def check_comparable(group: Group) -> None:
    """Refuse runs that cannot stand in one table.

    Raises:
        ArtifactError: If two runs of a task differ in metric, test set or split rule, are the same
            method, setting and seed, or are seeds of one row with different settings or corpora;
            both are named.
    """
    first: dict[tuple[object, ...], tuple[FinishedRun, Mapping[str, object]]] = {}
    for name, run in zip(row_names(group), group.runs, strict=True):
        for shared, values in _must_agree(group, name, run).items():
            before, others = first.setdefault((shared, run.task), (run, values))
            for what in sorted(values.keys() & others.keys()):
                if values[what] != others[what]:
                    raise ArtifactError(
                        f"{before.folder} and {run.folder} cannot stand in one table, task "
                        f"{run.task}: {shared[0]} of another {what} ({others[what]}, "
                        f"{values[what]}); report them apart, or run one again"
                    )
        before, _ = first.setdefault((name, run.task, run.seed), (run, {}))
        if before is not run:
            raise ArtifactError(
                f"{before.folder} and {run.folder} are the same method, setting, task and seed "
                f"({name}, {run.task}, {run.seed}): leave one out"
            )


def _must_agree(
    group: Group, row: str, run: FinishedRun
) -> dict[tuple[object, ...], Mapping[str, object]]:
    """Return what must be the same in all runs of a task that share something, by what it is."""
    marks = {name: mark for name in ("dev", "train", "corpus") if (mark := run.fingerprint(name))}
    settings = {name: value for name, value in run.settings.items() if name not in _PATHS}
    alike: dict[tuple[object, ...], Mapping[str, object]] = {}
    alike["measures",] = {
        "metric": run.metric,
        "labels": ", ".join(sorted(run.labels)),
        "test set": f"{run.examples[:8]}, n = {run.n}",
    }
    alike[f"seeds of '{row}'",] = {**settings, **_only(marks, "corpus")}
    varies_data = {*group.axes} & {*rules(DataArguments)}
    if "dev" in marks and not varies_data:
        alike["division",] = {**_only(run.values, *_RULES), **_only(marks, "dev")}
        # The examples of an LM's prompt, its own or a control's, may be left out of training.
        is_whole = not run.metrics.get("sizes", {}).get("set_aside")
        prompt = tuple(_only(run.values, *_EXEMPLARS).items())
        alike["division", is_whole, prompt] = _only(marks, "train")
    return alike


def _only(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def row_names(group: Group) -> list[str]:
    """Return the name of each run's row, in the order of the runs.

    Of a grid it is the point's name; else the method's, with the settings in which its runs differ
    on one task.
    """
    if group.points:
        return [run.name for run in group.runs]
    first: dict[tuple[str, str, str], str] = {}
    varied: dict[str, set[str]] = {run.method: set() for run in group.runs}
    for run in group.runs:
        for name, value in run.settings.items():
            text = canonical_json(value)
            if first.setdefault((run.method, run.task, name), text) != text:
                varied[run.method].add(name)
    rows = []
    for run in group.runs:
        names = sorted(varied[run.method] & run.settings.keys())
        rows.append(" ".join([run.method, *(f"{name}={run.settings[name]}" for name in names)]))
    return rows


def in_order(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Sort distinct names: those in a list by their rank there, then the others by name."""
    rank = {name: number for number, name in enumerate(known)}
    return sorted(set(names), key=lambda name: (rank.get(name, len(known)), name))
