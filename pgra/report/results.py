"""Finished runs: what a run leaves, reading it back with checks, what may stand in one table.

A folder is a run if it holds `metrics.json`, and a grid if it holds `grid.json` (which `pgra
ablate` writes first, so that missing runs are known). Neither is searched for other runs.
"""

import datetime
import json
import subprocess
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pgra.artifacts import (
    MANIFEST,
    canonical_json,
    digest,
    find_damage,
    package_versions,
    record_files,
    write_json,
    write_lines,
)
from pgra.config import rules
from pgra.core import UNDECIDED, Example, Json, Prediction
from pgra.errors import ArtifactError, ConfigError, DamageError, reading
from pgra.reader.arguments import LOSSES_FILE, ReaderArguments, TrainingArguments
from pgra.report.metrics import (
    RIGHT,
    WRONG,
    LabelOutcomes,
    Outcomes,
    TextOutcomes,
    bootstrap,
    interval_95,
    measure,
)
from pgra.report.text_metrics import SUBSETS
from pgra.rerank.base import RerankArguments
from pgra.retrieval.base import RetrieverArguments

METRICS_FILE = "metrics.json"
PREDICTIONS_FILE = "predictions.jsonl"
GRID_FILE = "grid.json"
TASK_AXIS = "data.task"
_ARGUMENTS_FILE = "arguments.json"
_IDENTITY_FILE = "run.json"
# of a run: what was decided before its predictions
DECIDING_FILES = (
    *(_IDENTITY_FILE, _ARGUMENTS_FILE, "training.json", LOSSES_FILE),
    "reader/pgra.json",  # which has the checksums of the reader's files
)
_SEED = 0
_TEXT_KEYS = {"bleu": "bleu_counts", "parent": "parent"}


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

    def as_json(self) -> dict[str, Json]:
        return asdict(self)


def write_results(
    folder: Path,
    about: Mapping[str, Json],
    labels: Sequence[str],
    examples: Sequence[Example],
    predictions: Sequence[Prediction],
    evidence: Sequence[Sequence[EvidenceLine]] = (),
    *,
    more: Sequence[Mapping[str, Json]] = (),
    values: Mapping[str, float] | None = None,
    interval: Sequence[float] | None = None,
) -> None:
    """Write a run's predictions, then its metrics, with the checksums of the run's other files.

    Args:
        folder: The run.
        about: Entries of `metrics.json` beside its numbers: "method", "task", "split", "metric",
            "seed", "uses_seed" (whether another seed could give another run), "seconds" by stage,
            "fingerprints" of all inputs, "notes", and more.
        labels: The task's, in order.
        examples: The queries, labelled.
        predictions: One for each, in the same order.
        evidence: What the reader saw, for each; empty where nothing was read.
        more: Further entries of each one's line; empty for none.
        values: Metrics by name, where labels alone do not give them.
        interval: Of the headline metric among `values`.
    """
    nothing: list[Any] = [()] * len(examples)
    lines: list[Json] = [
        {
            "id": example.id,
            "text": example.text,
            **({"fields": dict(example.fields)} if len(example.fields) > 1 else {}),
            "label": example.label,
            "prediction": prediction.label,
            "scores": dict(prediction.scores),
            "evidence": [line.as_json() for line in seen],
            **dict(own),
        }
        for example, prediction, seen, own in zip(
            examples, predictions, evidence or nothing, more or nothing, strict=True
        )
    ]
    write_lines(folder / PREDICTIONS_FILE, lines)
    metric, predicted = str(about["metric"]), [p.label for p in predictions]
    if values is None:
        names = [*labels, *({UNDECIDED} & set(predicted))]
        decided = LabelOutcomes(metric, [e.label or "" for e in examples], predicted, names)
        values = measure(metric, decided.labels, predicted, names)
        interval = interval_95(bootstrap([decided], seed=_SEED)[0])
    metrics = {
        **{name: about[name] for name in ("method", "task", "split")},
        "n": len(examples),
        "metric": metric,
        "value": values[metric],
        "interval_95": None if interval is None else list(interval),
        "metrics": dict(values),
        **about,
        "versions": package_versions(),
        "git_commit": git_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    write_metrics(folder, metrics, (PREDICTIONS_FILE, *DECIDING_FILES))


def write_metrics(folder: Path, metrics: Mapping[str, Json], names: Sequence[str]) -> None:
    """Write `metrics.json`, always last, with the checksums of these files, if they exist."""
    files = record_files(folder, [name for name in names if (folder / name).is_file()])
    write_json(folder / METRICS_FILE, {**metrics, "files": files})


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


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read an object a line; a DamageError if a line is no object."""
    with path.open(encoding="utf-8") as file, reading(path, DamageError):
        for number, text in enumerate(file, 1):
            line = json.loads(text)
            if not isinstance(line, dict):
                raise ValueError(f"line {number} is no object")
            yield line


class _Record(dict[str, Any]):
    """A record in which a missing field is damage."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._path = path

    def __missing__(self, name: str) -> Any:
        raise damaged(self._path, KeyError(name))


def read_object(path: Path) -> dict[str, Any]:
    """Read a record.

    Raises:
        ArtifactError: If it is missing.
        DamageError: If it cannot be read; later, if a missing field is asked for.
    """
    if not path.is_file():
        raise ArtifactError(f"{path} is missing: give its run's command again, or another folder")
    with reading(path, DamageError):
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"a {type(values).__name__}, not an object")
        return _Record(path, values)


def read_metrics(folder: Path, names: Container[str] | None = None) -> dict[str, Any]:
    """Read `metrics.json`, and check its checksums of the files beside it (`names`; None: all).

    Raises:
        ArtifactError: If one is damaged, missing, or of another run; it is named.
    """
    metrics = read_object(folder / METRICS_FILE)
    with reading(folder / METRICS_FILE, DamageError):
        known = metrics.get("files") or {}
        files = {name: known[name] for name in known if names is None or name in names}
        for name, what in find_damage(folder, files):
            raise DamageError(f"{folder / name} {what}, by {METRICS_FILE}")
    return metrics


def damaged(path: Path, why: object) -> DamageError:
    reason = f"no {why}" if isinstance(why, KeyError) else why
    return DamageError(f"{path} is damaged ({reason})")


@dataclass(frozen=True)
class Trial:
    """One finished run, or one measure of a run that wrote texts.

    Attributes:
        method: As `--method` names it, such as "pgra" or "fid".
        name: The folder's name; of a grid, the point's.
        task: The task's name; with the measure where texts were written: "totto bleu".
        arguments: Content of `arguments.json`: values by section; empty where there is none.
        metrics: Content of `metrics.json`.
        examples: Digest of ids, texts and true labels, in order: equal for one test set only.
    """

    method: str
    name: str
    task: str
    seed: int
    folder: Path
    arguments: Mapping[str, Any]
    metrics: Mapping[str, Any]
    outcomes: Outcomes = field(compare=False)
    examples: str

    @property
    def metric(self) -> str:
        return str(self.metrics["metric"])

    @property
    def value(self) -> float:
        """The headline metric, a fraction, recomputed from the predictions."""
        return self.outcomes.value

    @cached_property
    def interval(self) -> tuple[float, float]:
        """Its 95 % interval, from the predictions."""
        return interval_95(bootstrap([self.outcomes], seed=_SEED)[0])

    @property
    def decisions(self) -> LabelOutcomes | None:
        """Decided labels; None where texts are measured."""
        return self.outcomes if isinstance(self.outcomes, LabelOutcomes) else None

    @property
    def labels(self) -> set[str]:
        """The task's labels, as far as decisions name them."""
        return set(self.decisions.names if self.decisions else ()) - {UNDECIDED}

    @cached_property
    def predictions(self) -> list[dict[str, Any]]:
        """The lines of `predictions.jsonl`, read on first use."""
        return list(read_lines(self.folder / PREDICTIONS_FILE))

    def setting(self, name: str) -> Json:
        """Return an argument by "section.name"; None where it is unknown."""
        section, _, key = name.partition(".")
        values = self.arguments.get(section)
        return values.get(key) if isinstance(values, Mapping) else None

    @property
    def sets_aside(self) -> bool:
        """Whether examples of an LM's prompt, its own or a control's, are left out of training."""
        return bool(self.metrics.get("sizes", {}).get("set_aside"))

    @property
    def is_divided(self) -> bool:
        """Whether it learns from the task's train and dev set, not from a few shots of both."""
        marks = self.metrics.get("fingerprints", {})
        return "dev" in marks and "demonstrations" not in marks

    @property
    def is_seeded(self) -> bool:
        """Whether another seed could give another run: something is trained or drawn."""
        return bool(self.metrics.get("uses_seed", True))

    @cached_property
    def settings(self) -> dict[str, Json]:
        """What decides its predictions, but for data, task and seed, by "section.name"."""
        has_evidence = self.setting("rerank.num_evidence") != 0
        still_used = {"rerank.num_evidence", *(_EXEMPLARS if self.sets_aside else ())}
        unused = {"runtime", "data", "folder"}
        unused |= set() if has_evidence else {"corpus", "rerank"}
        unused |= set() if has_evidence or self.method in _OF_NEIGHBORS else {"retriever"}
        unused |= {"rerank"} if self.setting("rerank.reranker") == "none" else set()
        return {
            f"{section}.{name}": value
            for section, values in self.arguments.items()
            for name, value in (values.items() if isinstance(values, Mapping) else ())
            if section not in unused or f"{section}.{name}" in still_used
            if f"{section}.{name}" in _PATHS or name not in _FREE
            if section != "training" or name != "seed"  # of one row's runs
        }


def load_run(folder: Path, *, name: str | None = None) -> Trial:
    """Read a finished run; of one that wrote texts its first measure: see `load_measures`."""
    return load_measures(folder, name=name)[0]


def load_measures(folder: Path, *, name: str | None = None) -> list[Trial]:
    """Read a finished run: one, or one for each measure of the texts it wrote.

    `name` replaces the folder's.

    Raises:
        ArtifactError: If a file is missing or damaged.
    """
    metrics = read_metrics(folder)
    path = folder / _ARGUMENTS_FILE
    arguments = read_object(path) if path.is_file() else {}
    labels, predicted, examples, texts = [], [], [], []
    names: dict[str, None] = {}
    path = folder / PREDICTIONS_FILE
    for number, line in enumerate(read_lines(path), 1):
        try:
            examples.append([line["id"], line.get("text"), line["label"]])
            is_right = line.get("is_right")
            if is_right is not None:
                labels.append(RIGHT)
                predicted.append(RIGHT if is_right else WRONG)
                names |= {RIGHT: None, WRONG: None}
            elif "answers" in line:
                texts.append(line)
            else:
                labels.append(str(line["label"]))
                predicted.append(str(line["prediction"]))
                names |= dict.fromkeys(line.get("scores") or ())
        except KeyError as error:
            raise damaged(path, f"line {number} has no {error}") from None
    names |= dict.fromkeys(sorted({*labels, *predicted}))
    try:
        metrics["n"] = len(examples)
        run = Trial(
            str(metrics["method"]),
            name or folder.name,
            str(metrics["task"]),
            int(metrics["seed"]),
            folder,
            arguments,
            metrics,
            LabelOutcomes(str(metrics["metric"]), labels, predicted, list(names)),
            digest(examples),
        )
        if texts:
            return _measures_of_texts(run, texts)
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise damaged(folder / METRICS_FILE, error) from None
    return [run]


def _measures_of_texts(run: Trial, lines: Sequence[Mapping[str, Any]]) -> list[Trial]:
    wanted = {"": (True, False, None), SUBSETS[0]: (True,), SUBSETS[1]: (False,)}
    measures = []
    for name in run.metrics["metrics"]:
        subset, _, metric = name.rpartition("/")
        if metric in _TEXT_KEYS:
            own = [line for line in lines if line.get("is_overlap") in wanted[subset]]
            each = [np.atleast_1d(line[_TEXT_KEYS[metric]]) for line in own]
            outcomes = TextOutcomes(metric, np.array(each, np.float64))
            own_metrics = {**run.metrics, "metric": metric, "n": len(own)}
            task = f"{run.task} {name}"
            measures.append(replace(run, task=task, metrics=own_metrics, outcomes=outcomes))
    return measures


@dataclass(frozen=True)
class Missing:
    """A run of a grid that does not exist yet; `task` is None if the grid does not record it."""

    name: str
    task: str | None
    seed: int
    folder: Path


@dataclass(frozen=True)
class Group:
    """Runs that belong in one table.

    Attributes:
        axes: Of a grid: the arguments it varies, as "section.name"; else empty.
        labels: Short names of axes.
        reference: The paper's table to compare with; None if none is named.
        baseline: Values by axis of the point to compare with; None if none is named.
        points: Of a grid: values by axis of each of its points, by name, in order.
    """

    title: str
    runs: Sequence[Trial]
    missing: Sequence[Missing] = ()
    axes: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    reference: str | None = None
    baseline: Mapping[str, Json] | None = None
    points: Mapping[str, Mapping[str, Json]] = field(default_factory=dict)


@dataclass(frozen=True)
class Collection:
    """All that was found: the grids, in order, then all other runs as one group.

    Attributes:
        unfinished: Folders of unfinished runs outside of grids, and paths without any run.
    """

    groups: Sequence[Group]
    unfinished: Sequence[Path]


def load_collection(paths: Sequence[Path]) -> Collection:
    """Read all runs and grids below some paths; each folder counts once.

    Raises:
        ArtifactError: If a path is no folder, a file is damaged, or there is no finished run.
    """
    folders: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise ArtifactError(f"{path} is no folder: give a run, a folder of runs, or a grid")
        for folder in list(_find(path)) or [path]:  # a folder without any is named too
            folders.setdefault(folder.resolve(), folder)
    groups, runs, unfinished = [], [], []
    for folder in folders.values():
        if (folder / GRID_FILE).is_file():
            groups.append(load_grid(folder))
        elif (folder / METRICS_FILE).is_file():
            runs += load_measures(folder)
        else:
            unfinished.append(folder)
    if runs:
        groups.append(Group("Results", runs))
    if not any(group.runs for group in groups):
        where = ", ".join(str(path) for path in paths)
        raise ArtifactError(f"no finished run (with {METRICS_FILE}) in {where}: train one first")
    return Collection(groups, unfinished)


def _find(folder: Path) -> Iterator[Path]:
    """Return grids and runs in the order of names, without searching inside of either."""
    if any((folder / name).is_file() for name in (GRID_FILE, METRICS_FILE, _IDENTITY_FILE)):
        yield folder
    elif not (folder / MANIFEST).is_file():  # an artifact holds no runs, and may be large
        for inner in sorted(folder.iterdir()):
            if inner.is_dir() and not inner.is_symlink():
                yield from _find(inner)


def load_grid(folder: Path) -> Group:
    """Read a grid's finished and missing runs. A point has one run for each task and seed."""
    grid = read_object(folder / GRID_FILE)
    runs: list[Trial] = []
    gone: list[Missing] = []
    measures: dict[str | None, list[str]] = {}  # of a task: each is missing
    try:
        points = {str(point["name"]): dict(point["values"]) for point in grid["points"]}
        for point in grid["points"]:
            name = str(point["name"])
            task = point.get("task") or points[name].get(TASK_AXIS)
            task = str(task).rpartition("/")[2].removesuffix(".yaml") if task else None
            for seed, inner in point["seeds"].items():
                if (folder / inner / METRICS_FILE).is_file():
                    found = load_measures(folder / inner, name=name)
                    measures[task] = [run.task for run in found]
                    runs += found
                else:
                    gone.append(Missing(name, task, int(seed), folder / inner))
        return Group(
            str(grid.get("title") or grid["name"]),
            runs,
            [replace(m, task=t) for m in gone for t in measures.get(m.task, [m.task])],
            tuple(grid["axes"]),
            dict(grid.get("labels") or {}),
            grid.get("reference"),
            grid.get("baseline"),
            points,
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(folder / GRID_FILE, error) from None


# Which runs may stand in one table, and in which row.


# in the order of the paper's Table 2, then our own; others come after, by name
METHOD_ORDER = (
    *("icl", "ralm", "knn", "lm-bff", "plain", "rag", "fid", "random", "pgra", "exhaustive"),
)
# in the paper's order; others come after, by name
TASK_ORDER = ("sst2", "sst5", "cola", "trec", "cr", "mr", "mpqa", "subj")
_RULES = ("split_seed", "dev_fraction", "max_train_samples", "max_dev_samples")
_EXEMPLARS = ("rerank.num_exemplars", "rerank.exemplars", "rerank.exemplar_seed")
_OF_NEIGHBORS = ("knn", "lm-bff")  # which look at the first stage's encoder, and at no evidence
_OF_RUNS = (ReaderArguments, RerankArguments, RetrieverArguments, TrainingArguments)
_FREE = {name for cls in _OF_RUNS for name, rule in rules(cls).items() if not rule.decides}
# Paths of content that may have moved since; runs are compared by content, not by name.
_PATHS = {
    *("corpus.corpus", "retriever.encoder", "retriever.neighbor_encoder", "rerank.lm"),
    *("reader.model_name_or_path", "reader.reader_lm"),
}


def check_comparable(group: Group) -> None:
    """Refuse runs that cannot stand in one table.

    Raises:
        ArtifactError: If two runs of a task differ in metric, test set or split rule, are the same
            method, setting and seed, or are seeds of one row with different settings or corpora;
            both are named.
    """
    first: dict[str, Trial] = {}
    trained: dict[str, Trial] = {}
    seeds: dict[tuple[str, str, int], Trial] = {}
    rows: dict[tuple[str, str], Trial] = {}
    for name, run in zip(row_names(group), group.runs, strict=True):
        before = first.setdefault(run.task, run)
        _refuse(before, run, _other_test(before, run))
        if run.is_divided:
            before = trained.setdefault(run.task, run)
            _refuse(before, run, _other_rule(before, run, group.axes))
        before = seeds.setdefault((name, run.task, run.seed), run)
        if before is not run:
            raise ArtifactError(
                f"{before.folder} and {run.folder} are the same method, setting, task and seed "
                f"({name}, {run.task}, {run.seed}): leave one out"
            )
        before = rows.setdefault((name, run.task), run)  # a grid was gone on with otherwise
        setting = _other_setting(before, run)
        _refuse(before, run, setting and f"two seeds of '{name}' with another {setting}")


def _refuse(a: Trial, b: Trial, why: str | None) -> None:
    if why is not None:
        raise ArtifactError(
            f"{a.folder} and {b.folder} cannot stand in one table, task {a.task}: {why}; report "
            "them apart, or run one again"
        )


def _other_test(a: Trial, b: Trial) -> str | None:
    """Return why two runs of a task were not measured alike; None if they were."""
    for name in ("metric", "split"):
        if a.metrics.get(name) != b.metrics.get(name):
            return f"another {name} ({a.metrics.get(name)}, {b.metrics.get(name)})"
    if a.labels != b.labels:
        return f"other labels ({'; '.join(', '.join(sorted(run.labels)) for run in (a, b))})"
    if a.examples != b.examples:
        marks = [f"{run.examples[:8]}, n = {run.metrics['n']}" for run in (a, b)]
        return f"another test set (fingerprint {'; '.join(marks)})"
    return None


def _other_rule(a: Trial, b: Trial, axes: Sequence[str]) -> str | None:
    """Return why two methods' data are not split alike; None if they are, or the grid varies it."""
    if any(axis.startswith("data.") and axis != TASK_AXIS for axis in axes):
        return None
    for name in _RULES if a.arguments and b.arguments else ():
        ours, theirs = a.setting(f"data.{name}"), b.setting(f"data.{name}")
        if ours != theirs:
            return f"another split rule ({name} {ours}, {theirs})"
    same_prompt = all(a.setting(name) == b.setting(name) for name in _EXEMPLARS)
    same_prompt &= a.sets_aside == b.sets_aside
    for split in ("dev", "train") if same_prompt else ("dev",):
        if marks := _other_fingerprint(a, b, split):
            return f"another split rule (other {split} examples: {marks})"
    return None


def _other_setting(a: Trial, b: Trial) -> str | None:
    for name in sorted((a.settings.keys() & b.settings.keys()) - _PATHS):
        if a.settings[name] != b.settings[name]:
            return f"setting ({name.rpartition('.')[2]} {a.settings[name]}, {b.settings[name]})"
    marks = _other_fingerprint(a, b, "corpus")
    return f"corpus ({marks})" if marks else None


def _other_fingerprint(a: Trial, b: Trial, stage: str) -> str | None:
    ours, theirs = (str(run.metrics.get("fingerprints", {}).get(stage) or "") for run in (a, b))
    return f"{ours[:8]}, {theirs[:8]}" if ours and theirs and ours != theirs else None


def row_names(group: Group) -> list[str]:
    """Return the name of each run's row, in the order of the runs.

    Of a grid it is the point's name; else the method's, with the settings in which its runs differ
    on one task.
    """
    if group.points:
        return [run.name for run in group.runs]
    kinds: dict[tuple[str, str], list[dict[str, Json]]] = {}
    for run in group.runs:
        kinds.setdefault((run.method, run.task), []).append(run.settings)
    varied: dict[str, set[str]] = {}
    for (method, _), settings in kinds.items():
        values: dict[str, set[str]] = {}
        for name, value in (pair for own in settings for pair in own.items()):
            values.setdefault(name, set()).add(canonical_json(value))
        found = {name for name, known in values.items() if len(known) > 1}
        varied[method] = varied.get(method, set()) | found
    rows = []
    for run in group.runs:
        names = sorted(varied[run.method] & run.settings.keys())
        told = [f"{name.rpartition('.')[2]}={run.settings[name]}" for name in names]
        rows.append(" ".join([run.method, *told]))
    return rows


def in_order(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Sort distinct names: those in a list by their rank there, then the others by name."""
    rank = {name: number for number, name in enumerate(known)}
    return sorted(set(names), key=lambda name: (rank.get(name, len(known)), name))
