"""Label consistency of runs, from their folders (Guo et al. 2023, section 4.1).

DIR/consistency.json, consistency.md    scores, and queries by number of consistent evidence
DIR/counts-TASK.png, scores-TASK.png    the same drawn, also as .svg
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pgra.errors import ConfigError, DataError
from pgra.evaluation.consistency import (
    Consistency,
    as_percent,
    count_table,
    measure_consistency,
    score_table,
)
from pgra.evaluation.consistency_plots import plot_counts, plot_scores, require_matplotlib
from pgra.evaluation.report import System, load_system
from pgra.evaluation.results import METRICS_FILE
from pgra.io import write_json, write_text
from pgra.pipelines.pseudo_labels import (
    Labeler,
    PseudoLabels,
    distinct_evidence,
    label_texts,
    open_labeler,
)

logger = logging.getLogger(__name__)

REPORT_FILE = "consistency.json"
TABLES_FILE = "consistency.md"


@dataclass(frozen=True)
class ConsistencyReport:
    """Label consistency of several runs.

    Attributes:
        folder: Where it was written.
        runs: What was measured, in the order asked.
        tables: As Markdown.
        num_read: Texts that the labelers read now; the others were labelled before.
    """

    folder: Path
    runs: Sequence[Consistency]
    tables: str
    num_read: int


def report_consistency(
    labelers: Sequence[Path],
    runs: Sequence[Path],
    output_dir: Path,
    *,
    depth: int | None = None,
    device: str = "auto",
    plots: bool = True,
) -> ConsistencyReport:
    """Give the runs' evidence pseudo-labels, and measure how consistent it is with the queries.

    Args:
        labelers: Finished runs of `--num_evidence 0`, one for each task of the runs.
        runs: Finished runs with evidence, or folders of such; of each task the first one is what
            the others are compared with.
        output_dir: Where everything goes.
        depth: Look at a query's best so many evidence only; None is all that the run read.
        device: What the labelers read on.
        plots: Whether to draw.

    Raises:
        ArtifactError: If a folder is no finished run.
        ConfigError: If a labeler reads evidence, or two are of one task.
        DataError: If runs cannot be compared; each is named with the reason.
    """
    if plots:
        require_matplotlib()  # before anything long
    by_task = {labeler.record.task: labeler for labeler in map(open_labeler, labelers)}
    if len(by_task) < len(labelers):
        raise ConfigError("two labelers are of the same task: give one for each task of the runs")
    systems = _load_runs(runs)
    _check_comparable(systems, by_task)
    pseudo = _label(systems, by_task, output_dir / "pseudo_labels", depth=depth, device=device)
    measured = [
        measure_consistency(
            system.name,
            _task(system),
            system.predictions,
            pseudo[_task(system)].labels,
            labels=by_task[_task(system)].record.labels,
            depth=depth,
        )
        for system in systems
    ]
    tables = _tables(measured, _notes(systems, by_task))
    _write(output_dir, measured, by_task, tables, plots=plots)
    num_read = sum(labels.num_read for labels in pseudo.values())
    return ConsistencyReport(output_dir, measured, tables, num_read)


def _label(
    systems: Sequence[System],
    labelers: Mapping[str, Labeler],
    folder: Path,
    *,
    depth: int | None,
    device: str,
) -> dict[str, PseudoLabels]:
    """Give each task's evidence its pseudo-labels."""
    pseudo = {}
    for task in dict.fromkeys(_task(system) for system in systems):
        own = [system for system in systems if _task(system) == task]
        texts = distinct_evidence(own, depth)
        pseudo[task] = label_texts(labelers[task], texts, folder, device=device)
    return pseudo


def _load_runs(paths: Sequence[Path]) -> list[System]:
    """Load runs; of a folder of runs, those that have evidence."""
    found: dict[Path, str] = {}
    for path in paths:
        inside = sorted(p.parent for p in path.rglob(METRICS_FILE))
        if (path / METRICS_FILE).is_file() or not inside:
            found[path] = path.name
        else:
            found |= {run: str(run.relative_to(path.parent)) for run in inside}
    is_unique = len(set(found.values())) == len(found)
    systems = [load_system(name if is_unique else str(run), run) for run, name in found.items()]
    kept = [s for s in systems if s.folder in paths or any(p["evidence"] for p in s.predictions)]
    for system in systems:
        if system not in kept:
            logger.info("%s has no evidence: left out", system.folder)
    if not kept:
        raise DataError(f"no run with evidence in {', '.join(map(str, paths))}")
    return kept


def _task(system: System) -> str:
    return str(system.metrics["task"])


def _check_comparable(systems: Sequence[System], labelers: Mapping[str, Labeler]) -> None:
    firsts: dict[str, System] = {}
    wrong = []
    for system in systems:
        task = _task(system)
        reason = _reason(system, labelers.get(task), firsts.setdefault(task, system))
        wrong += [f"{system.folder}: {reason}"] if reason else []
    if wrong:
        raise DataError(f"{len(wrong)} of {len(systems)} runs cannot be used; {'; '.join(wrong)}")


def _reason(system: System, labeler: Labeler | None, first: System) -> str | None:
    if labeler is None:
        return f"it is of task '{_task(system)}', and no labeler is (--labeler takes several)"
    if not any(line["evidence"] for line in system.predictions):
        return "it has no evidence to be consistent with"
    asked, known = set(system.predictions[0]["scores"]), set(labeler.record.labels)
    if asked != known:
        return (
            f"its labels are {', '.join(sorted(asked))}, the labeler's {', '.join(sorted(known))}"
        )
    if _examples(system) != _examples(first):
        return f"it was measured on other examples than {first.folder}"
    return None


def _examples(system: System) -> list[tuple[str, str, str]]:
    return [(line["id"], line["text"], line["label"]) for line in system.predictions]


def _notes(systems: Sequence[System], labelers: Mapping[str, Labeler]) -> list[str]:
    """Say what a reader of the numbers must know of the pseudo-labels."""
    notes = []
    for task, labeler in labelers.items():
        if labeler.measured:
            metric, value = labeler.measured["metric"], float(labeler.measured["value"])
            notes.append(
                f"{task}: pseudo-labels are of {labeler.folder}, whose {metric} on the queries' "
                f"own test set is {value:.3f}; on evidence it is not known"
            )
    for system in systems:
        own = labelers[_task(system)].record.fingerprints.get("train")
        if system.metrics["fingerprints"].get("train") != own:
            notes.append(f"{system.folder} was trained on other examples than its labeler")
    return notes


def _tables(measured: Sequence[Consistency], notes: Sequence[str]) -> str:
    parts = ["# Label consistency", score_table(measured)]
    parts += [
        "Consistency: mean share of a query's evidence whose pseudo-label is the query's label, in "
        "percent. Majority rate: what evidence that all had the commonest label would have. "
        "Chance: what evidence with these pseudo-labels would have if it had nothing to do with "
        "its query."
    ]
    for task in dict.fromkeys(run.task for run in measured):
        own = [run for run in measured if run.task == task]
        told = [
            f"{run.name}: "
            + ", ".join(f"{label} {as_percent(v)}" for label, v in run.pseudo_labels.items())
            for run in own
        ]
        parts += [
            f"## {task}, by number of consistent evidence",
            count_table(own),
            f"Pseudo-labels of the evidence, in percent: {'; '.join(told)}.",
        ]
    parts += ["\n".join(f"- {note}" for note in notes)] if notes else []
    return "\n\n".join(parts) + "\n"


def _write(
    folder: Path,
    measured: Sequence[Consistency],
    labelers: Mapping[str, Labeler],
    tables: str,
    *,
    plots: bool,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for task in dict.fromkeys(run.task for run in measured) if plots else ():
        own = [run for run in measured if run.task == task]
        for kind in ("png", "svg"):
            plot_counts(own, folder / f"counts-{task}.{kind}")
            plot_scores(own, folder / f"scores-{task}.{kind}")
    write_text(folder / TABLES_FILE, tables)
    values = {
        "labelers": {task: labeler.describe() for task, labeler in labelers.items()},
        "runs": [run.as_json() for run in measured],
    }
    write_json(folder / REPORT_FILE, values)
