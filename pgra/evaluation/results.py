"""What a run leaves: `metrics.json`, `predictions.jsonl`, and the arguments that gave them."""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pgra.evaluation.metrics import bootstrap_interval, measure
from pgra.io import package_versions, write_json, write_lines
from pgra.types import Example, Json, Prediction

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
