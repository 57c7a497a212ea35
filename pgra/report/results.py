"""Finished runs: what a run leaves, reading it back with checks, what may stand in one table."""

import json
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pgra.artifacts import (
    MANIFEST,
    canonical_json,
    digest,
    package_versions,
    write_json,
    write_lines,
)
from pgra.core import UNDECIDED, Example, Json, Prediction
from pgra.errors import ArtifactError
from pgra.reader.fields import NOT_DECIDING
from pgra.report.metrics import METRICS, RIGHT, WRONG, Discordant, Gaps, bootstrap_interval, measure
from pgra.report.text_metrics import SUBSETS, bleu_of_counts

METRICS_FILE = "metrics.json"
PREDICTIONS_FILE = "predictions.jsonl"
_BOOTSTRAP_SEED = 0


@dataclass(frozen=True)
class EvidenceLine:
    """One evidence as `predictions.jsonl` tells it.

    Attributes:
        row: Of the corpus.
        text: The passage.
        stage1_rank: Its place among the first stage's candidates, from 1.
        stage1_score: The first stage's score.
        score: The second stage's; the first stage's where nothing was reranked.
        attention: Its share of the reader's cross-attention, of all evidence of the example; None
            where that was not asked for.
    """

    row: int
    text: str
    stage1_rank: int
    stage1_score: float
    score: float
    attention: float | None = None

    def as_json(self) -> dict[str, Json]:
        """Give what `predictions.jsonl` holds of it."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def add_attention(
    evidence: Sequence[Sequence[EvidenceLine]], shares: Sequence[Sequence[float]]
) -> list[list[EvidenceLine]]:
    """Give evidence its shares of attention; an example without evidence has none to give."""
    return [
        [replace(line, attention=share) for line, share in zip(lines, parts, strict=True)]
        if lines
        else []
        for lines, parts in zip(evidence, shares, strict=True)
    ]


@dataclass(frozen=True)
class RunRecord:
    """What is said of a run beside its predictions.

    Attributes:
        task: Name of the task.
        split: Which examples were decided.
        metric: The task's headline metric.
        labels: The task's labels, in order.
        seed: Of the training run.
        seconds: Wall-clock time by stage.
        fingerprints: Of all inputs, by stage.
        notes: What a reader of the numbers must know.
        calibration: The temperature, and what it changed on this split; None without one.
        system: What decided, as --system names it.
        more: Further entries of `metrics.json`.
    """

    task: str
    split: str
    metric: str
    labels: Sequence[str]
    seed: int
    seconds: Mapping[str, float]
    fingerprints: Mapping[str, Json]
    notes: Sequence[str] = ()
    calibration: Mapping[str, Json] | None = None
    system: str = "pgra"
    more: Mapping[str, Json] = field(default_factory=dict)


def write_results(
    folder: Path,
    record: RunRecord,
    examples: Sequence[Example],
    predictions: Sequence[Prediction],
    evidence: Sequence[Sequence[EvidenceLine]],
    *,
    more: Sequence[Mapping[str, Json]] | None = None,
) -> dict[str, Any]:
    """Write a run's predictions, then its metrics.

    Args:
        folder: The run.
        record: What is said of it.
        examples: The queries, labelled.
        predictions: One for each, in the same order.
        evidence: What the reader saw, for each; may be empty.
        more: Further entries of each one's line.

    Returns:
        The content of `metrics.json`.
    """
    lines: list[Json] = [
        {
            "id": example.id,
            "text": example.text,
            **({"fields": dict(example.fields)} if len(example.fields) > 1 else {}),
            "label": example.label,
            "prediction": prediction.label,
            "scores": dict(prediction.scores),
            "evidence": [line.as_json() for line in seen],
            **own,
        }
        for example, prediction, seen, own in zip(
            examples, predictions, evidence, more or [{}] * len(examples), strict=True
        )
    ]
    write_lines(folder / PREDICTIONS_FILE, lines)
    metrics = _summarise(record, examples, predictions)
    write_json(folder / METRICS_FILE, metrics)
    return metrics


def _summarise(
    record: RunRecord, examples: Sequence[Example], predictions: Sequence[Prediction]
) -> dict[str, Any]:
    labels = [example.label or "" for example in examples]
    decided = [prediction.label for prediction in predictions]
    values = measure(record.metric, labels, decided, record.labels)
    interval = bootstrap_interval(
        record.metric, labels, decided, record.labels, seed=_BOOTSTRAP_SEED
    )
    return describe_run(record, values, [interval.low, interval.high], n=len(examples))


def describe_run(
    record: RunRecord, values: Mapping[str, float], interval: Sequence[float] | None, *, n: int
) -> dict[str, Any]:
    """Give the content of `metrics.json`.

    Args:
        record: What is said of the run.
        values: Metrics by name, the headline among them.
        interval: Its 95 % interval over examples; None where there is none.
        n: How many examples were measured.
    """
    return {
        "system": record.system,
        "task": record.task,
        "split": record.split,
        "n": n,
        "metric": record.metric,
        "value": values[record.metric],
        "interval_95": None if interval is None else list(interval),
        "metrics": dict(values),
        "calibration": record.calibration,
        "seed": record.seed,
        "seconds": {name: round(value, 3) for name, value in record.seconds.items()},
        "fingerprints": dict(record.fingerprints),
        "versions": package_versions(),
        "git_commit": git_commit(),
        "notes": list(record.notes),
        **record.more,
    }


def git_commit() -> str | None:
    """Give the commit of this code, with "-dirty" if it was changed; None outside a checkout."""
    root = Path(__file__).parents[2]
    try:
        if not (root / ".git").exists():
            return None
        commit = _git(root, "rev-parse", "HEAD")
        return f"{commit}-dirty" if _git(root, "status", "--porcelain", "-uno") else commit
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


# The files of a finished run, read with checks: damage is told by file, with the way out.


_SIDES = (RIGHT, WRONG)
_TEXT = "text"


@dataclass(frozen=True)
class Decisions:
    """What a run decided, without evidence and probabilities.

    What was written freely is right or wrong: its labels are these two, and all should be right.
    Where it is neither (BLEU), all labels are "text", and nothing is decided.

    Attributes:
        labels: The true label of each example.
        predicted: The decided one, in the same order.
        names: The task's labels.
        examples: Digest of ids, texts and true labels, in order: equal for one test set only.
    """

    labels: Sequence[str]
    predicted: Sequence[str]
    names: Sequence[str]
    examples: str

    @property
    def correct(self) -> list[bool]:
        """Say of each example whether it was decided rightly."""
        return [a == b for a, b in zip(self.labels, self.predicted, strict=True)]


def read_decisions(path: Path) -> Decisions:
    """Read what `predictions.jsonl` says was decided.

    Raises:
        ArtifactError: If it is missing or damaged.
    """
    labels, predicted, examples = [], [], []
    names: dict[str, None] = {}
    for number, line in enumerate(read_lines(path), 1):
        try:
            label, decided, own = _decided(line)
            labels.append(label)
            predicted.append(decided)
            examples.append([line["id"], line.get("text"), line["label"]])
            names.update(dict.fromkeys(own))
        except KeyError as error:
            raise damaged(path, f"line {number} has no {error}") from None
    names.update(dict.fromkeys(sorted({*labels, *predicted})))
    return Decisions(labels, predicted, list(names), digest(examples))


def _decided(line: dict[str, Any]) -> tuple[str, str, Sequence[str]]:
    """Give a line's true label, its decided one, and labels that it names."""
    is_right = line.get("is_right")
    if is_right is not None:
        return RIGHT, RIGHT if is_right else WRONG, _SIDES
    if "answers" in line:
        return _TEXT, _TEXT, (_TEXT,)
    return str(line["label"]), str(line["prediction"]), tuple(line.get("scores") or ())


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read an object a line.

    Raises:
        ArtifactError: If the file is missing, or a line is no object.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                line = json.loads(text)
                if not isinstance(line, dict):
                    raise damaged(path, f"line {number} is no object")
                yield line
    except (OSError, ValueError) as error:
        raise damaged(path, error) from None


def read_optional(path: Path) -> dict[str, Any]:
    """Read a file of one object; an empty one if there is no file.

    Raises:
        ArtifactError: If it is damaged.
    """
    return read_object(path) if path.is_file() else {}


def read_object(path: Path) -> dict[str, Any]:
    """Read a file of one object.

    Raises:
        ArtifactError: If it is missing or damaged.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged(path, error) from None
    if not isinstance(values, dict):
        raise damaged(path, f"a {type(values).__name__}, not an object")
    return values


def damaged(path: Path, why: object) -> ArtifactError:
    """Word that a run's file is not what it should be."""
    said = f"no {why}" if isinstance(why, KeyError) else why
    return ArtifactError(
        f"{path} is damaged ({said}): delete {path.parent} and run its command again, "
        "or give another folder"
    )


# Runs that are measured on what was written, as reports compare them: BLEU and PARENT.
#
# Neither is a matter of right and wrong. BLEU (Papineni et al. 2002) is of all texts together and
# follows from the sum of each text's counts; PARENT's F (Dhingra et al. 2019) is the mean of each
# text's. So both follow from a row of numbers for each query, and a resample of the queries is a
# resample of rows: the paired bootstrap of Koehn 2004, which sacrebleu has for BLEU.


Each = npt.NDArray[np.float64]
TEXT_METRICS = ("bleu", "parent")
_KEYS = {"bleu": "bleu_counts", "parent": "parent"}
_DRAWS = 2000
_SEED = 0
_DIGITS = 12
_ROUNDING = 1e-6


def split_measures(run: "Run") -> list["Run"]:
    """Give a run as one for each of its measures, its task named "totto bleu"; others as they are.

    Raises:
        ArtifactError: If the run lacks each query's numbers, or its metrics are not theirs.
    """
    if run.metric not in TEXT_METRICS:
        return [run]
    lines = [dict(line) for line in run.predictions]
    names = [name for name in run.metrics["metrics"] if name.rpartition("/")[2] in TEXT_METRICS]
    return [_part(run, name, lines) for name in names]


def _part(run: "Run", name: str, lines: Sequence[Mapping[str, Any]]) -> "Run":
    subset, _, metric = name.rpartition("/")
    wanted = {"": None, SUBSETS[0]: True, SUBSETS[1]: False}[subset]
    own = [line for line in lines if wanted is None or line.get("is_overlap") is wanted]
    each, value = _read_each(run.folder, metric, own), float(run.metrics["metrics"][name])
    found = value_of(metric, each)
    if not abs(found - value) <= _ROUNDING:
        raise ArtifactError(
            f"{run.folder}/metrics.json is damaged ({name} is {value:.4f}, and {found:.4f} by its "
            f"predictions): delete {run.folder} and run its command again, or give another folder"
        )
    low, high = np.percentile(draws_of(metric, [each], seed=_SEED)[0], [2.5, 97.5])
    told = {"metric": metric, "value": value, "interval_95": [float(low), float(high)]}
    return replace(
        run, task=f"{run.task} {name}", metrics={**run.metrics, **told, "n": len(own)}, each=each
    )


def _read_each(folder: Path, metric: str, lines: Sequence[Mapping[str, Any]]) -> Each:
    if not lines or any(_KEYS[metric] not in line for line in lines):
        raise ArtifactError(
            f"{folder} does not say {metric} of each query, being made by an earlier version: "
            "delete its metrics.json and run its command again (what the LM answered is kept)"
        )
    return np.array([np.atleast_1d(line[_KEYS[metric]]) for line in lines], np.float64)


def value_of(metric: str, each: Each) -> float:
    """Give a measure of B queries' numbers, (B, S): BLEU's counts, or (B, 1) values."""
    if metric == "bleu":
        return bleu_of_counts(each.sum(axis=0).astype(np.int64).tolist())
    return float(each.mean())


def draws_of(metric: str, sides: Sequence[Each], *, seed: int, draws: int = _DRAWS) -> Each:
    """Give a measure of several runs in the same resamples of the queries, (S, draws).

    Args:
        metric: Of `TEXT_METRICS`.
        sides: Each run's numbers, of the same B queries.
        seed: Of the resampling.
        draws: How many resamples.
    """
    count = len(sides[0])
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=draws)
    sums = [drawn.astype(np.float64) @ side for side in sides]  # (draws, S) each
    if metric != "bleu":
        return np.stack([own[:, 0] / count for own in sums])
    return np.array([[bleu_of_counts(row) for row in np.rint(own).astype(int)] for own in sums])


def text_gaps(metric: str, a: Sequence[Each], b: Sequence[Each], *, seed: int) -> Gaps:
    """Compare two systems of several seeds, resampled together; see `statistics.paired_gaps`.

    Args:
        metric: Of `TEXT_METRICS`.
        a: Numbers of one system, for each of its seeds (B, S).
        b: Of the other.
        seed: Of the resampling.
    """
    values = draws_of(metric, [*a, *b], seed=seed)
    sides = [[value_of(metric, each) for each in side] for side in (a, b)]
    gaps = values[: len(a)].mean(axis=0) - values[len(a) :].mean(axis=0)
    apart = np.round(np.mean(a, axis=0) - np.mean(b, axis=0), _DIGITS)  # (B, S)
    parts = None if metric == "bleu" else apart[:, 0] / len(apart)  # BLEU is no mean over texts
    return Gaps(
        float(np.mean(sides[0]) - np.mean(sides[1])),
        np.round(gaps, _DIGITS),
        Discordant(int(apart.any(axis=1).sum()), parts),
    )


# Finished runs as reports read them: from a run, a folder of runs, several seeds, or a grid.
#
# A folder counts as a run when it holds `metrics.json`, and as a grid when it holds `grid.json`
# (`pgra ablate` writes it before anything runs, so that what is missing is known). Below either no
# other runs are looked for.


GRID_FILE = "grid.json"
TASK_AXIS = "data.task"
_ARGUMENTS_FILE = "arguments.json"
_IDENTITY_FILE = "run.json"
# Runs from before `--system` tell their method only.
_METHODS = {"t5": "plain", "fid": "fid", "pgra": "pgra", "pgra-exhaustive": "exhaustive"}


@dataclass(frozen=True)
class Run:
    """One finished run.

    Attributes:
        system: As `--system` names it, such as "pgra" or "fid".
        name: The folder's name; of a grid, the point's.
        task: The task's name.
        seed: Of the run.
        folder: Where it is.
        arguments: Content of `arguments.json`: values by section; empty where there is none.
        metrics: Content of `metrics.json`.
        decisions: What it decided.
        point: Values by axis where it is of a grid; else empty.
        each: Of a part of a run that is measured on texts: what its measure is made of, a row a
            query (`written_runs`); else None.
    """

    system: str
    name: str
    task: str
    seed: int
    folder: Path
    arguments: Mapping[str, Any]
    metrics: Mapping[str, Any]
    decisions: Decisions
    point: Mapping[str, Json] = field(default_factory=dict)
    each: Each | None = field(default=None, compare=False)

    @property
    def metric(self) -> str:
        """Give the name of the headline metric."""
        return str(self.metrics["metric"])

    @property
    def value(self) -> float:
        """Give the headline metric, a fraction."""
        return float(self.metrics["value"])

    @cached_property
    def predictions(self) -> list[dict[str, Any]]:
        """Give the lines of `predictions.jsonl`: read when asked for, evidence is long."""
        return list(read_lines(self.folder / PREDICTIONS_FILE))

    def setting(self, name: str) -> Json:
        """Give an argument by "section.name"; None where it is unknown."""
        section, _, key = name.partition(".")
        values = self.arguments.get(section)
        return values.get(key) if isinstance(values, Mapping) else None


@dataclass(frozen=True)
class Missing:
    """A run of a grid that is not there (yet).

    Attributes:
        name: The point's.
        task: Its task; None if the grid does not say it.
        seed: Its seed.
        folder: Where it would be.
    """

    name: str
    task: str | None
    seed: int
    folder: Path


@dataclass(frozen=True)
class Group:
    """Runs that belong in one table.

    Attributes:
        title: Of the table.
        runs: What is there.
        missing: What should be.
        axes: Of a grid: the arguments it varies, as "section.name"; else empty.
        labels: An axis' short name.
        reference: The paper's table that it stands beside; None if none is named.
        baseline: Values by axis of the point to compare with; None if none is named.
        points: Of a grid: values by axis of each of its points, by name, in order.
    """

    title: str
    runs: Sequence[Run]
    missing: Sequence[Missing] = ()
    axes: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    reference: str | None = None
    baseline: Mapping[str, Json] | None = None
    points: Mapping[str, Mapping[str, Json]] = field(default_factory=dict)


@dataclass(frozen=True)
class Collection:
    """All that was found.

    Attributes:
        groups: The grids, in order, then all other runs as one group.
        unfinished: Folders of runs that were begun and not measured, outside of grids.
    """

    groups: Sequence[Group]
    unfinished: Sequence[Path]


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """Read all runs that are found under some paths.

    Args:
        paths: Runs, folders of runs, folders of several seeds, grids.

    Raises:
        ArtifactError: As `load_collection`.
    """
    return [run for group in load_collection(paths).groups for run in group.runs]


def load_collection(paths: Sequence[Path]) -> Collection:
    """Read all runs and grids that are found under some paths; each folder counts once.

    Args:
        paths: Runs, folders of runs, folders of several seeds, grids.

    Raises:
        ArtifactError: If a path is not there, a file is damaged, or there is no finished run.
    """
    runs: dict[Path, Run] = {}
    grids: dict[Path, Group] = {}
    unfinished: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise ArtifactError(f"{path} is no folder: give a run, a folder of runs, or a grid")
        for folder in _find(path):
            key = folder.resolve()
            if (folder / GRID_FILE).is_file():
                grids.setdefault(key, load_grid(folder))
            elif (folder / METRICS_FILE).is_file():
                runs.setdefault(key, load_run(folder))
            else:
                unfinished.setdefault(key, folder)
    groups = list(grids.values())
    parts = [part for run in runs.values() for part in split_measures(run)]
    groups += [Group("Results", parts)] if parts else []
    if not any(group.runs for group in groups):
        where = ", ".join(str(path) for path in paths)
        raise ArtifactError(f"no finished run (with {METRICS_FILE}) in {where}: train one first")
    return Collection(groups, list(unfinished.values()))


def _find(folder: Path) -> Iterator[Path]:
    """Give grids and runs, in the order of names; nothing inside of either."""
    marks = (GRID_FILE, METRICS_FILE, _IDENTITY_FILE)
    if any((folder / name).is_file() for name in marks):
        yield folder
    elif not (folder / MANIFEST).is_file():  # an artefact holds no runs, and may be large
        for inner in sorted(folder.iterdir()):
            if inner.is_dir() and not inner.is_symlink():
                yield from _find(inner)


def load_run(
    folder: Path, *, name: str | None = None, point: Mapping[str, Json] | None = None
) -> Run:
    """Read a finished run.

    Args:
        folder: The run.
        name: Instead of the folder's.
        point: Values by axis, where it is of a grid.

    Raises:
        ArtifactError: If a file is missing or damaged, or `metrics.json` does not follow from
            `predictions.jsonl`.
    """
    metrics = read_object(folder / METRICS_FILE)
    arguments = read_optional(folder / _ARGUMENTS_FILE)
    try:
        system = str(metrics.get("system") or _old_system(folder))
        run = Run(
            system,
            name or folder.name,
            str(metrics["task"]),
            int(metrics["seed"]),
            folder,
            arguments,
            metrics,
            read_decisions(folder / PREDICTIONS_FILE),
            dict(point or {}),
        )
        _check_value(run)
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(folder / METRICS_FILE, error) from None
    return run


def _old_system(folder: Path) -> str:
    method = str(read_optional(folder / _IDENTITY_FILE).get("method", folder.name))
    return _METHODS.get(method, method)


def _check_value(run: Run) -> None:
    """Refuse metrics that were not measured on the predictions beside them."""
    decided = run.decisions
    if run.metrics["n"] != len(decided.labels):
        raise ValueError(f"n is {run.metrics['n']}, there are {len(decided.labels)} predictions")
    if run.metric in TEXT_METRICS:
        return  # `split_measures` looks at each of its measures
    if run.metric not in METRICS:
        raise ValueError(f"metric {run.metric} is unknown")
    value = METRICS[run.metric](decided.labels, decided.predicted, decided.names)
    if not abs(value - run.value) <= _ROUNDING:  # so that NaN is refused too
        raise ValueError(f"{run.metric} is {run.value:.4f}, and {value:.4f} by its predictions")


def load_grid(folder: Path) -> Group:
    """Read a grid: what is there of its points, and what is missing.

    A point stands once for each task, under one name.

    Raises:
        ArtifactError: If `grid.json` or a point is damaged.
    """
    grid = read_object(folder / GRID_FILE)
    runs: list[Run] = []
    missing: list[Missing] = []
    parts: dict[str | None, list[str | None]] = {}
    try:
        for point in grid["points"]:
            name, values = str(point["name"]), dict(point["values"])
            task = point.get("task") or values.get(TASK_AXIS)
            task = str(task).rpartition("/")[2].removesuffix(".yaml") if task else None
            for seed, place in point["seeds"].items():
                run = folder / place
                if (run / METRICS_FILE).is_file():
                    own = split_measures(load_run(run, name=name, point=values))
                    parts[task] = [part.task for part in own]
                    runs += own
                else:
                    missing.append(Missing(name, task, int(seed), run))
        return Group(
            str(grid.get("title") or grid["name"]),
            runs,
            [replace(one, task=name) for one in missing for name in parts.get(one.task, [one.task])]
            if any(run.each is not None for run in runs)
            else missing,
            tuple(grid["axes"]),
            dict(grid.get("labels") or {}),
            grid.get("reference"),
            grid.get("baseline"),
            {str(point["name"]): dict(point["values"]) for point in grid["points"]},
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(folder / GRID_FILE, error) from None


# Which runs may stand in one table, and in which row.


SYSTEMS = ("icl", "knn", "lm-bff", "plain", "rag", "fid", "random", "pgra", "exhaustive")
"""In the order of the paper's Table 2, then our own; others come after, by name."""
TASKS = ("sst2", "sst5", "cola", "trec", "cr", "mr", "mpqa", "subj")
"""In the paper's order; others come after, by name."""
UNSEEDED = (
    *("icl", "knn", "icl-farthest", "icl-fixed", "icl-knn", "icl-knn-mmr"),
    *("vote-farthest", "vote-knn", "vote-knn-mmr"),
)
"""Nothing is trained, and a seed decides nothing, but for a random order of exemplars."""
_TRAINED = {"knn", "plain", "rag", "fid", "random", "pgra", "exhaustive"}
_RULES = ("split_seed", "dev_fraction", "max_train_samples", "max_dev_samples")
_EXEMPLARS = ("num_exemplars", "exemplars", "exemplar_seed", "num_prefixes")
# Where, how fast and how loud: none of it decides a prediction.
_NOT_DECIDING = {
    *("data.task", "data.dataset_name", "data.train_file", "data.validation_file"),
    *("data.test_file", "retriever.encoder_batch_tokens", "retriever.index_dir"),
    *("retriever.shard_rows", "rerank.lm_batch_tokens", "rerank.bank_shard_rows", "rerank.bank"),
    *("rerank.prefix_sharing", "rerank.lm_device_map", "reader.evidence_attention"),
    "rerank.fast_kernels",
}
# Sections that a system does not look at, but for the names after them.
_UNUSED = {
    "plain": ("corpus", "retriever", "rerank"),
    "icl": ("corpus", "retriever", "training"),
    "knn": ("corpus", "rerank", "training"),
    "fid": ("rerank",),
    "random": ("rerank",),
}
_STILL_USED = (*_EXEMPLARS, "num_evidence")
# Where content is, which may have been moved meanwhile; runs go on by content, not by name.
_PLACES = {
    *("corpus.corpus", "retriever.encoder", "retriever.neighbor_encoder", "rerank.lm"),
    "reader.model_name_or_path",
}
# Of the few shots that one system alone is tuned on.
_SHOTS = {"num_shots", "exemplar_sets", "exemplar_share"}
_SEEDS = {"seed", "data_seed"}  # of one row's runs


def is_unseeded(run: Run) -> bool:
    """Say whether any other seed would give the same run again."""
    return run.system in UNSEEDED and run.setting("selection.order") != "random"


def check_comparable(group: Group) -> None:
    """Refuse runs that cannot stand in one table.

    Raises:
        ArtifactError: If two runs of a task have another metric, test set, or split rule, are the
            same system, setting and seed, or are seeds of one row with another setting or corpus;
            both are named.
    """
    first: dict[str, Run] = {}
    trained: dict[str, Run] = {}
    for run in group.runs:
        _refuse(first.setdefault(run.task, run), run, _other_test(first[run.task], run))
        if run.system in _TRAINED:
            before = trained.setdefault(run.task, run)
            _refuse(before, run, _other_rule(before, run, group.axes))
    _refuse_twins(group)
    _refuse_mixed_seeds(group)


def _refuse_mixed_seeds(group: Group) -> None:
    """Refuse a row whose seeds are no seeds of one thing: a grid was gone on with otherwise."""
    first: dict[tuple[str, str], Run] = {}
    for name, run in zip(row_names(group), group.runs, strict=True):
        before = first.setdefault((name, run.task), run)
        told = _other_setting(before, run)
        _refuse(before, run, told and f"two seeds of '{name}' with another {told}")


def _other_setting(a: Run, b: Run) -> str | None:
    ours, theirs = _settings(a), _settings(b)
    for name in sorted((ours.keys() & theirs.keys()) - _PLACES):
        if ours[name] != theirs[name]:
            return f"setting ({name.rpartition('.')[2]} {ours[name]}, {theirs[name]})"
    left, right = _fingerprint(a, "corpus"), _fingerprint(b, "corpus")
    if left and right and left != right:
        return f"corpus ({left[:8]}, {right[:8]})"
    return None


def _refuse(a: Run, b: Run, why: str | None) -> None:
    if why is not None:
        raise ArtifactError(
            f"{a.folder} and {b.folder} cannot stand in one table, task {a.task}: {why}; report "
            "them apart, or run one again"
        )


def _other_test(a: Run, b: Run) -> str | None:
    """Say why two runs of a task were not measured alike; None if they were."""
    for name in ("metric", "split"):
        if a.metrics.get(name) != b.metrics.get(name):
            return f"another {name} ({a.metrics.get(name)}, {b.metrics.get(name)})"
    if set(a.decisions.names) - {UNDECIDED} != set(b.decisions.names) - {UNDECIDED}:
        return f"other labels ({_listed(a.decisions.names)}; {_listed(b.decisions.names)})"
    if a.decisions.examples != b.decisions.examples:
        return f"another test set (fingerprint {_test_mark(a)}; {_test_mark(b)})"
    return None


def _test_mark(run: Run) -> str:
    return f"{run.decisions.examples[:8]}, n = {len(run.decisions.labels)}"


def _other_rule(a: Run, b: Run, axes: Sequence[str]) -> str | None:
    """Say why two systems do not stand on one division of the data; None if they were.

    What a grid varies may differ. The examples that stand in the prompt are left out of train, so
    training examples are compared only where the prompt's examples are chosen alike.
    """
    if any(axis.startswith("data.") and axis != TASK_AXIS for axis in axes):
        return None
    both_known = bool(a.arguments) and bool(b.arguments)
    for name in _RULES if both_known else ():
        left, right = a.setting(f"data.{name}"), b.setting(f"data.{name}")
        if left != right:
            return f"another split rule ({name} {left}, {right})"
    same_prompt = all(a.setting(f"rerank.{n}") == b.setting(f"rerank.{n}") for n in _EXEMPLARS)
    for split in ("dev", "train") if same_prompt else ("dev",):
        left, right = _fingerprint(a, split), _fingerprint(b, split)
        if left and right and left != right:
            return f"another split rule (other {split} examples: {left[:8]}, {right[:8]})"
    return None


def _fingerprint(run: Run, split: str) -> str:
    return str(run.metrics.get("fingerprints", {}).get(split) or "")


def _refuse_twins(group: Group) -> None:
    seen: dict[tuple[str, str, int], Run] = {}
    for name, run in zip(row_names(group), group.runs, strict=True):
        other = seen.setdefault((name, run.task, run.seed), run)
        if other is not run:
            raise ArtifactError(
                f"{other.folder} and {run.folder} are the same system, setting, task and seed "
                f"({name}, {run.task}, {run.seed}): leave one out"
            )


def row_names(group: Group) -> list[str]:
    """Give the name of each run's row, in the order of the runs.

    Of a grid it is the point's name; else the system's, with the settings in which runs of this
    system differ on one task.
    """
    if group.points:
        return [run.name for run in group.runs]
    settings = [_settings(run) for run in group.runs]
    kinds: dict[tuple[str, str], list[dict[str, Json]]] = {}
    for run, values in zip(group.runs, settings, strict=True):
        kinds.setdefault((run.system, run.task), []).append(values)
    varied: dict[str, set[str]] = {}
    for (system, _), values_of in kinds.items():
        varied.setdefault(system, set()).update(_varied([v for v in values_of if v]))
    words = _words(settings)
    return [
        " ".join([run.system, *_told(values, sorted(varied[run.system]), words)])
        for run, values in zip(group.runs, settings, strict=True)
    ]


def _words(settings: Sequence[Mapping[str, Json]]) -> dict[tuple[str, str], str]:
    """Word each argument's values: a path by its last part, whole where two would be alike."""
    values = {(name, canonical_json(v)): v for of_run in settings for name, v in of_run.items()}
    alike = Counter((name, _short(value)) for (name, _), value in values.items())
    return {
        place: _short(value) if alike[place[0], _short(value)] == 1 else str(value)
        for place, value in values.items()
    }


def _varied(settings: Sequence[Mapping[str, Json]]) -> set[str]:
    names = {name for values in settings for name in values}
    return {
        name for name in names if len({canonical_json(values.get(name)) for values in settings}) > 1
    }


def _told(
    values: Mapping[str, Json], names: Sequence[str], words: Mapping[tuple[str, str], str]
) -> list[str]:
    own = [name for name in names if name in values]
    return [f"{n.rpartition('.')[2]}={words[n, canonical_json(values[n])]}" for n in own]


def _short(value: Json) -> str:
    return value.rstrip("/").rpartition("/")[2] if isinstance(value, str) else str(value)


def _settings(run: Run) -> dict[str, Json]:
    """Give what decides a run's predictions, but for data, task and seed, by "section.name"."""
    flat: dict[str, Any] = {}
    for section, values in run.arguments.items():
        if isinstance(values, Mapping):
            for name, value in values.items():
                if _decides(run.system, section, name):
                    flat[f"{section}.{name}"] = value
    return flat


def _decides(system: str, section: str, name: str) -> bool:
    """Say whether an argument can change what a system predicts."""
    if section == "runtime" or f"{section}.{name}" in _NOT_DECIDING:
        return False
    if section in _UNUSED.get(system, ()) and name not in _STILL_USED:
        return False
    if section == "training" and name in _SHOTS:
        return system == "lm-bff"
    return section != "training" or name not in {*NOT_DECIDING, *_SEEDS}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(sorted(names))


def in_order(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Sort distinct names: those in a list by their place there, then the others by name."""
    place = {name: number for number, name in enumerate(known)}
    return sorted(set(names), key=lambda name: (place.get(name, len(known)), name))
