"""Label consistency of runs, from their folders (Guo et al. 2023, section 4.1).

DIR/consistency.json                  scores, and queries by number of consistent evidence
DIR/consistency.md, .tex, .csv        the same as tables (.csv: the scores)
DIR/counts-TASK.csv                   queries and accuracy by number of consistent evidence
DIR/counts-TASK.png, scores-TASK.png  the same drawn, also as .svg
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pgra.config import CorpusArguments
from pgra.data.corpus import Corpus, open_corpus
from pgra.errors import ConfigError, DataError, unknown_name
from pgra.evaluation.comparison import Study, compare_runs
from pgra.evaluation.consistency import Consistency, measure_consistency, merge_seeds
from pgra.evaluation.consistency_plots import plot_counts, plot_scores, require_matplotlib
from pgra.evaluation.consistency_tables import count_table, score_table
from pgra.evaluation.reference import load_reference
from pgra.evaluation.runs import Group, Run, load_collection
from pgra.evaluation.tables import Table
from pgra.io import write_json, write_text
from pgra.pipelines.pseudo_labels import (
    Labeler,
    PseudoLabels,
    distinct_evidence,
    label_texts,
    open_labeler,
    sample_corpora,
)

logger = logging.getLogger(__name__)

REPORT_FILE = "consistency.json"
TABLES_FILE = "consistency.md"
_LABELING_SYSTEM = "plain"
_REFERENCE = "T10"
Place = tuple[str, str]
"""A task, and the name of a row."""


@dataclass(frozen=True)
class ConsistencyReport:
    """Label consistency of several runs.

    Attributes:
        folder: Where it was written.
        runs: What was measured, tasks and rows in a report's order; seeds are put together.
        tables: The scores, then for each task queries by number of consistent evidence.
        num_read: Texts that the labelers read now; the others were labelled before.
    """

    folder: Path
    runs: Sequence[Consistency]
    tables: Sequence[Table]
    num_read: int


def report_consistency(
    runs: Sequence[Path],
    output_dir: Path,
    *,
    labelers: Sequence[Path] = (),
    baseline: str | None = None,
    depth: int | None = None,
    centre: bool = True,
    device: str = "auto",
    plots: bool = True,
) -> ConsistencyReport:
    """Give the runs' evidence pseudo-labels, and measure how consistent it is with the queries.

    Args:
        runs: Finished runs, folders of them, or a grid. What has no evidence is left out.
        output_dir: Where everything goes.
        labelers: Finished runs of `--num_evidence 0`, one for each task; without any, each task's
            plain run of the lowest seed among `runs`.
        baseline: Name of the row to compare with; None takes a report's own, else the first.
        depth: Look at a query's best so many evidence only; None is all that the run read.
        centre: Whether labelers are centred at their medians over the runs' corpora; else labels
            are the paper's.
        device: What the labelers read on.
        plots: Whether to draw.

    Raises:
        ArtifactError: If a folder is no finished run, or runs of a task cannot be compared.
        ConfigError: If a labeler reads evidence, two are of one task, a task has none, or the
            baseline is no row with evidence.
        DataError: If a labeler's labels are not the runs', no run has evidence, or a corpus that
            a labeler is centred at cannot be read.
    """
    if plots:
        require_matplotlib()  # before anything long
    study = compare_runs(_load(runs))
    rows = _rows_with_evidence(study)
    baseline = _choose_baseline(study, rows, baseline)
    by_task = _choose_labelers(study, labelers, rows)
    texts = {task: _texts(rows, task, depth) for task in by_task}
    samples = {task: _sample(rows, task) if centre else [] for task in by_task}
    pseudo = {
        task: label_texts(
            *(labeler, texts[task], output_dir / "pseudo_labels"),
            sample=samples[task],
            device=device,
        )
        for task, labeler in by_task.items()
    }
    measured = [
        merge_seeds([_measure(run, place[1], by_task, pseudo, depth) for run in found])
        for place, found in rows.items()
    ]
    notes = [pseudo[task].note(task, texts[task]) for task in by_task]
    notes += _notes(study, rows, by_task, is_centred=centre)
    scores = score_table(measured, baseline=baseline, paper=_printed(rows), notes=notes)
    counts = {task: count_table([r for r in measured if r.task == task]) for task in by_task}
    if plots:
        _draw(output_dir, measured)
    _write(output_dir, scores, counts)
    told = {
        task: {**labeler.describe(), **pseudo[task].describe(texts[task])}
        for task, labeler in by_task.items()
    }
    values = {"baseline": baseline, "labelers": told, "runs": [run.as_json() for run in measured]}
    write_json(output_dir / REPORT_FILE, values)
    num_read = sum(labels.num_read for labels in pseudo.values())
    return ConsistencyReport(output_dir, measured, [scores, *counts.values()], num_read)


def _write(folder: Path, scores: Table, counts: Mapping[str, Table]) -> None:
    tables = [scores, *counts.values()]
    for task, table in counts.items():
        write_text(folder / f"counts-{task}.csv", table.to_csv() + "\n")
    write_text(folder / "consistency.csv", scores.to_csv() + "\n")
    write_text(folder / "consistency.tex", "\n\n".join(t.to_latex() for t in tables) + "\n")
    write_text(folder / TABLES_FILE, "\n\n".join(t.to_markdown() for t in tables) + "\n")


def _load(paths: Sequence[Path]) -> Group:
    groups = load_collection(paths).groups
    if len(groups) > 1:
        raise ConfigError(
            f"--runs holds {len(groups)} tables' runs ({'; '.join(g.title for g in groups)}): give "
            "one grid, or runs that are of none"
        )
    return groups[0]


def _rows_with_evidence(study: Study) -> dict[Place, list[Run]]:
    """Give the runs that have evidence, by task and row, in a report's order."""
    found: dict[Place, list[Run]] = {}
    for task in study.tasks:
        for row in study.rows:
            runs = study.results[row, task].runs if (row, task) in study.results else ()
            kept = [run for run in runs if any(line["evidence"] for line in run.predictions)]
            if kept:
                found[task, row] = kept
            elif runs:
                logger.info("%s on %s has no evidence: left out", row, task)
    if not found:
        raise DataError("no run has evidence to be consistent with: give runs of pgra or fid")
    return found


def _choose_baseline(study: Study, rows: Mapping[Place, Sequence[Run]], asked: str | None) -> str:
    names = list(dict.fromkeys(name for _, name in rows))
    if asked is not None and asked not in names:
        raise ConfigError(unknown_name("baseline", asked, names))
    return asked or (study.baseline if study.baseline in names else names[0])


def _choose_labelers(
    study: Study, folders: Sequence[Path], rows: Mapping[Place, Sequence[Run]]
) -> dict[str, Labeler]:
    """Give each task its labeler, as named or the task's own plain run."""
    named = [open_labeler(folder) for folder in folders]
    by_task = {labeler.record.task: labeler for labeler in named}
    if len(by_task) < len(named):
        raise ConfigError("two labelers are of the same task: give one for each task of the runs")
    tasks = dict.fromkeys(task for task, _ in rows)
    for task in tasks:
        own = [r for r in study.group.runs if (r.task, r.system) == (task, _LABELING_SYSTEM)]
        if task not in by_task and own:
            by_task[task] = open_labeler(min(own, key=lambda run: run.seed).folder)
        if task not in by_task:
            raise ConfigError(
                f"no labeler is of task '{task}': give a finished run of train.py --task {task} "
                "--num_evidence 0 with --labeler, or put it among the runs"
            )
        _check_labels(
            by_task[task], [run for place in rows if place[0] == task for run in rows[place]]
        )
    return {task: by_task[task] for task in tasks}


def _check_labels(labeler: Labeler, runs: Sequence[Run]) -> None:
    known = set(labeler.record.labels)
    for run in runs:
        asked = set(run.decisions.names)
        if asked != known:
            raise DataError(
                f"{run.folder} has the labels {', '.join(sorted(asked))}, its labeler "
                f"{labeler.folder} {', '.join(sorted(known))}: give a labeler of the same task"
            )


def _texts(rows: Mapping[Place, Sequence[Run]], task: str, depth: int | None) -> list[str]:
    own = [run for place, runs in rows.items() if place[0] == task for run in runs]
    return distinct_evidence([run.predictions for run in own], depth)


def _sample(rows: Mapping[Place, Sequence[Run]], task: str) -> list[str]:
    """Draw passages of each corpus that a task's runs searched, so that all have one labeler."""
    corpora: dict[str, Corpus] = {}
    for run in (run for place, runs in rows.items() if place[0] == task for run in runs):
        try:
            asked = run.arguments["corpus"]
            artifacts = Path(run.arguments["runtime"]["artifacts_dir"])
            name = json.dumps(asked, sort_keys=True)
            if name not in corpora:
                corpora[name] = open_corpus(CorpusArguments(**asked), artifacts)
        except (KeyError, TypeError):
            raise DataError(
                f"{run.folder} does not say which corpus its evidence is of, at which the labeler "
                "is centred: give --no_centre for the paper's definition"
            ) from None
        except DataError as error:
            raise DataError(
                f"{error}; the labeler is centred at this corpus of {run.folder}: put it there, or "
                "give --no_centre for the paper's definition"
            ) from None
    return sample_corpora(list(corpora.values()))


def _measure(
    run: Run,
    name: str,
    labelers: Mapping[str, Labeler],
    pseudo: Mapping[str, PseudoLabels],
    depth: int | None,
) -> Consistency:
    labels, known = labelers[run.task].record.labels, pseudo[run.task].labels
    return measure_consistency(name, run.task, run.predictions, known, labels=labels, depth=depth)


def _printed(rows: Mapping[Place, Sequence[Run]]) -> dict[Place, float]:
    """Give what the paper's Table 10 has for these runs."""
    table, found = load_reference(_REFERENCE), {}
    for (task, name), runs in rows.items():
        row = table.find_row(runs[0])
        value = None if row is None else table.value(row, task)
        if value is not None:
            found[task, name] = value
    return found


def _notes(
    study: Study,
    rows: Mapping[Place, Sequence[Run]],
    labelers: Mapping[str, Labeler],
    *,
    is_centred: bool,
) -> list[str]:
    """Say what a reader of the numbers must know."""
    notes = [labeler.note for labeler in labelers.values()]
    for (task, name), runs in rows.items():
        own = labelers[task].record.fingerprints.get("train")
        if runs[0].metrics.get("fingerprints", {}).get("train") != own:
            notes.append(f"{name} was trained on other examples than its labeler, task {task}.")
    if _printed(rows):
        if is_centred:
            notes.append("The paper's labelers are not centred: --no_centre for its definition.")
        notes += load_reference(_REFERENCE).told_of(list(labelers))
    if study.group.missing:
        names = dict.fromkeys(f"{gone.name} (seed {gone.seed})" for gone in study.group.missing)
        notes.append(f"Missing: {', '.join(names)}.")
    return notes


def _draw(folder: Path, measured: Sequence[Consistency]) -> None:
    for task in dict.fromkeys(run.task for run in measured):
        own = [run for run in measured if run.task == task]
        plot_counts(own, folder / f"counts-{task}")
        plot_scores(own, folder / f"scores-{task}")
