"""Label consistency of runs, by pseudo-labels (Guo et al. 2023, 4.1).

A plain reader of the same task, trained without evidence, gives each evidence its pseudo-label.
Evidence is *consistent* with a query if that is the query's true label. A query's consistency score
is the share of its evidence that is (section 4.3: 5 of 8 is 62.5 %), a run's the mean over its
queries (the paper's Table 10 and Figure 4). Two lines are printed beside it: the *majority rate*,
the score of evidence that all had the commonest label of the queries (69 % on CoLA, where the
paper's scores are 69.0 to 69.3 %), and *chance*, that of evidence unrelated to its query: the sum
of the labels' shares of the queries times their shares of the evidence. See docs/worth.md.

DIR/consistency.md, .csv              tables (.csv: the scores)
DIR/pseudo_labels/TASK-CHECKSUM.jsonl a text, its labels' probabilities and a digest a line; the
                                      checksum is the labeler's
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np

from pgra.arrays import Counts, Values
from pgra.artifacts import digest, file_checksum, set_aside, write_lines, write_text
from pgra.errors import ConfigError, DamageError, DataError
from pgra.reader.record import Reader, ReaderRecord, find_reader, read_record
from pgra.report.compare import AVERAGE, Study, compare_runs, load_reference
from pgra.report.metrics import bootstrap_mean, compare_means, interval_95
from pgra.report.results import FinishedRun, load_collection
from pgra.report.tables import Cell, Table, TableRow
from pgra.run_folder import RECORD_FILE, read_lines
from pgra.types import Json

logger = logging.getLogger(__name__)

TABLES_FILE = "consistency.md"
_SEED = 0
_SAVED_EVERY = 10_000
_MEANING = (
    "Consistency: mean share of a query's evidence whose pseudo-label is the query's label.",
    "Majority rate: the consistency of evidence that all had the commonest label of the queries.",
    "Chance: that of evidence with these pseudo-labels that had nothing to do with its query.",
    "Intervals and p are of a bootstrap over queries; if the interval holds 0, it may be noise.",
)
Lines = Sequence[Mapping[str, Any]]  # of a run's predictions.jsonl
Row = tuple[str, str]  # a task, and a row's name


@dataclass(frozen=True, eq=False)
class Consistency:
    """Label consistency of one run.

    Attributes:
        ids: Of the queries that have evidence, in the run's order.
        shares: Share of consistent evidence of each of these queries, in 0..1.
        queries: How many queries have 0, 1, ... d consistent evidence, (d + 1,).
        right: How many of these were decided rightly.
    """

    name: str
    task: str
    ids: Sequence[str]
    shares: Values
    queries: Counts
    right: Counts
    majority: float
    chance: float

    @property
    def depth(self) -> int:
        """The most evidence a query has, the paper's d."""
        return len(self.queries) - 1

    @property
    def score(self) -> float:
        """The mean share of consistent evidence, in 0..1."""
        return float(self.shares.mean())

    @property
    def interval(self) -> tuple[float, float]:
        """The score's 95 % interval over resamples of the queries (Efron 1979)."""
        return interval_95(bootstrap_mean(self.shares, seed=_SEED))


def measure_consistency(
    name: str, task: str, lines: Lines, pseudo_labels: Mapping[str, str]
) -> Consistency:
    """Compare the pseudo-labels of a run's evidence, by text, with its queries' labels.

    `lines` are those of `predictions.jsonl`; queries without evidence are left out.
    """
    lines = [line for line in lines if line["evidence"]]
    truth = [line["label"] for line in lines]
    evidence = [[pseudo_labels[passage["text"]] for passage in x["evidence"]] for x in lines]
    counts = np.array([seen.count(label) for seen, label in zip(evidence, truth, strict=True)])
    sizes = np.array([len(seen) for seen in evidence])
    is_right = np.array([line["prediction"] == line["label"] for line in lines])
    of_queries = Counter(truth)
    of_evidence = Counter(chain.from_iterable(evidence))
    num_bins = sizes.max() + 1
    return Consistency(
        name,
        task,
        ids=[line["id"] for line in lines],
        shares=counts / sizes,
        queries=np.bincount(counts, minlength=num_bins),
        right=np.bincount(counts[is_right], minlength=num_bins),
        majority=max(of_queries.values()) / len(lines),
        chance=sum(of_queries[x] * of_evidence[x] for x in of_queries)
        / (len(lines) * of_evidence.total()),
    )


def score_table(
    runs: Sequence[Consistency],
    *,
    baseline: str,
    paper: Mapping[tuple[str, str], float],
    notes: Sequence[str] = (),
) -> Table:
    """Return the scores (the paper's Table 10) in percent, with differences to the baseline.

    `paper` holds the paper's values by task (or `AVERAGE`) and name; it may be empty.
    """
    bases = {run.task: run for run in runs if run.name == baseline}
    rows: list[TableRow] = []
    scores: dict[str, list[float]] = {}
    for run in runs:
        score = 100 * run.score
        scores.setdefault(run.name, []).append(score)
        row: TableRow = {
            "run": run.name,
            "task": run.task,
            "d": run.depth,
            "queries": len(run.shares),
            "consistency": score,
            "low": 100 * run.interval[0],
            "high": 100 * run.interval[1],
            "paper": paper.get((run.task, run.name)),
            "majority rate": 100 * run.majority,
            "chance": 100 * run.chance,
        }
        base = bases.get(run.task, run)
        if base is not run and base.ids == run.ids:
            gap = compare_means(run.shares, base.shares, seed=_SEED)
            row |= {
                "difference": 100 * gap.difference,
                "difference_low": 100 * gap.interval[0],
                "difference_high": 100 * gap.interval[1],
                "p": gap.p,
            }
        rows.append(row)
    for name, values in scores.items():
        if len(values) > 1:  # table 10's last column
            mean = float(np.mean(values))
            printed = paper.get((AVERAGE, name))
            rows.append({"run": name, "task": AVERAGE, "consistency": mean, "paper": printed})
    title = f"Label consistency of evidence, and its difference to {baseline}"
    return Table.of(title, rows, _SCORES, [*_MEANING, *notes])


_SCORES = {  # how each number is shown
    "run": "",
    "task": "",
    "d": "",
    "queries": "",
    "consistency": ".1f",
    "low": ".1f",
    "high": ".1f",
    "paper": ".1f",
    "majority rate": ".1f",
    "chance": ".1f",
    "difference": "+.1f",
    "difference_low": "+.1f",
    "difference_high": "+.1f",
    "p": ".3f",
}


def count_table(runs: Sequence[Consistency]) -> Table:
    """Return queries and accuracy by number of consistent evidence (Figure 2)."""
    columns = ["consistent"]
    rows = [[Cell(str(number))] for number in range(max(run.depth for run in runs) + 1)]
    for run in runs:
        columns += [f"{run.name}: queries", f"{run.name}: accuracy"]
        for number, row in enumerate(rows):
            count = run.queries[number] if number <= run.depth else 0
            accuracy = Cell.of(100 * run.right[number] / count, ".1f") if count else Cell("-")
            row += [Cell(str(count)), accuracy]
    return Table(f"{runs[0].task}: by number of consistent evidence", columns, rows)


# Pseudo-labels, by a plain reader.


@dataclass(frozen=True)
class Labeler:
    """A plain reader that labels evidence, and its folder."""

    home: Path
    record: ReaderRecord


def open_labeler(folder: Path) -> Labeler:
    """Open a finished run of `--num_evidence 0`, or its reader's folder.

    Raises:
        ConfigError: If it reads evidence.
    """
    record = read_record(folder)
    if record.num_evidence:
        raise ConfigError(f"{folder} reads evidence: give a run of pgra train --num_evidence 0")
    return Labeler(find_reader(folder), record)


def label_texts(
    labeler: Labeler, texts: Sequence[str], folder: Path, *, device: str
) -> dict[str, str]:
    """Label texts by a plain reader; a text fills the task's first input.

    Labels are kept in `folder` for other calls, whose texts are returned too, and saved as they
    come.
    """
    checksum = file_checksum(labeler.home / RECORD_FILE)  # which holds those of its weights
    path = folder / f"{labeler.record.task}-{checksum[:12]}.jsonl"
    probabilities: dict[str, dict[str, float]] = {}
    if path.is_file():
        try:
            for row in read_lines(path):
                if row.pop("digest", None) != digest(row):
                    raise DamageError(f"{path} is damaged")
                probabilities[row["text"]] = row["scores"]
        except DamageError as error:
            set_aside(path, error.what)
            probabilities = {}
    missing = [text for text in dict.fromkeys(texts) if text not in probabilities]
    logger.info("labeler %s: %d texts, %d to read", labeler.home, len(texts), len(missing))
    if missing:
        reader = Reader.load(labeler.home, device=device)
    for start in range(0, len(missing), _SAVED_EVERY):
        batch = missing[start : start + _SAVED_EVERY]
        for text, prediction in zip(batch, reader.predict(batch, []), strict=True):
            probabilities[text] = dict(prediction.scores)
        lines: list[dict[str, Json]]
        lines = [{"text": text, "scores": scores} for text, scores in probabilities.items()]
        write_lines(path, [{**line, "digest": digest(line)} for line in lines])
    # Of equal chances the task's first label.
    return {text: max(scores, key=lambda x: scores[x]) for text, scores in probabilities.items()}


def report_consistency(
    runs: Sequence[Path], output_dir: Path, *, labelers: Sequence[Path], device: str
) -> None:
    """Label the runs' evidence, measure how consistent it is with the queries, and write both.

    Seeds of a reader share their evidence, so of several seeds the lowest is measured.

    Args:
        runs: Finished runs, folders of them, or a grid. Runs without evidence are left out.
        output_dir: Where everything goes.
        labelers: Finished runs of `--num_evidence 0`, one for each task; without any, each task's
            plain run of the lowest seed among `runs`.
        device: Where the labelers read.

    Raises:
        ArtifactError: If a folder is not a finished run, or runs of a task cannot be compared.
        ConfigError: If a labeler reads evidence, or a task has none.
        DataError: If a labeler's labels are not the runs', or no run has evidence.
    """
    groups = load_collection(runs)
    if len(groups) > 1:
        named = "; ".join(group.title for group in groups)
        raise ConfigError(f"--runs holds several tables' runs ({named}): give those of one")
    study = compare_runs(groups[0])
    rows = _rows_with_evidence(study)
    labelers_of = _choose_labelers(study, labelers, rows)
    measured: list[Consistency] = []
    for task, labeler in labelers_of.items():
        lines_of = {row: run.predictions for (of, row), run in rows.items() if of == task}
        lines = chain.from_iterable(lines_of.values())
        evidence = chain.from_iterable(line["evidence"] for line in lines)
        texts = [passage["text"] for passage in evidence]
        pseudo = label_texts(labeler, texts, output_dir / "pseudo_labels", device=device)
        for name, lines_of_row in lines_of.items():
            measured.append(measure_consistency(name, task, lines_of_row, pseudo))
    names = list(dict.fromkeys(name for _, name in rows))
    base = study.baseline if study.baseline in names else names[0]
    reference = load_reference("T10")
    paper: dict[Row, float] = {}
    for name in names:
        tasks = [task for task, other in rows if other == name]
        printed = reference.beside(rows[tasks[0], name], tasks, [*tasks, AVERAGE])
        paper |= {(column, name): value for column, value in printed.items()}
    notes = [f"{task}: pseudo-labels are those of {x.home}." for task, x in labelers_of.items()]
    if paper:
        notes += reference.notes_on(list(labelers_of))
    scores = score_table(measured, baseline=base, paper=paper, notes=notes)
    write_text(output_dir / "consistency.csv", scores.to_csv() + "\n")
    tables = [scores]
    for task in labelers_of:
        tables.append(count_table([run for run in measured if run.task == task]))
    text = "\n\n".join(table.to_markdown() for table in tables)
    write_text(output_dir / TABLES_FILE, text + "\n")


def _rows_with_evidence(study: Study) -> dict[Row, FinishedRun]:
    """Return the run of the lowest seed of each row with evidence, in a report's order."""
    runs = {}
    for task, row in product(study.tasks, study.rows):
        if (row, task) in study.results:
            run = study.results[row, task].runs[0]
            if any(line["evidence"] for line in run.predictions):
                runs[task, row] = run
    if not runs:
        raise DataError("no run has evidence to be consistent with: give runs of pgra or fid")
    return runs


def _choose_labelers(
    study: Study, folders: Sequence[Path], rows: Mapping[Row, FinishedRun]
) -> dict[str, Labeler]:
    """Return each task's labeler: as named, else the task's own plain run."""
    labelers = {labeler.record.task: labeler for labeler in map(open_labeler, folders)}
    if len(labelers) < len(folders):
        raise ConfigError("two labelers are of one task: give one for each task of the runs")
    for run in sorted(study.group.runs, key=lambda run: run.seed):
        if run.method == "plain" and run.task not in labelers:
            labelers[run.task] = open_labeler(run.folder)
    chosen: dict[str, Labeler] = {}
    for (task, _), run in rows.items():
        if task not in labelers:
            raise ConfigError(
                f"no labeler is of task '{task}': give its run of --num_evidence 0 by --labeler"
            )
        labeler = labelers[task]
        if run.labels != {*labeler.record.labels}:
            raise DataError(f"{labeler.home} has other labels than {run.folder}: give another one")
        chosen[task] = labeler
    return chosen
