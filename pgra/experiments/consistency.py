"""Label consistency of runs, by pseudo-labels (Guo et al. 2023, 4.1).

A plain reader of the same task, trained without evidence, gives each evidence its pseudo-label.
Evidence is *consistent* with a query if that is the query's true label. A query's consistency score
is the share of its evidence that is (section 4.3: 5 of 8 is 62.5 %), a run's the mean over its
queries (the paper's Table 10 and Figure 4). Two lines are printed beside it: the *majority rate*,
the score of evidence that all had the commonest label of the queries (69 % on CoLA, where the
paper's scores are 69.0 to 69.3 %), and *chance*, that of evidence unrelated to its query: the sum
of the labels' shares of the queries times their shares of the evidence. See docs/worth.md.

DIR/consistency.json                  scores
DIR/consistency.md, .csv              the same as tables (.csv: the scores)
DIR/counts-TASK.png, scores-TASK.png  the same drawn
DIR/pseudo_labels/TASK-CHECKSUM.jsonl a text, its labels' probabilities and a digest a line; the
                                      checksum is the labeler's
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pgra.artifacts import digest, file_checksum, set_aside, write_json, write_lines, write_text
from pgra.errors import ConfigError, DamageError, DataError
from pgra.reader import RECORD_FILE
from pgra.reader.record import Reader, ReaderRecord, find_reader, read_record
from pgra.report.compare import AVERAGE, Study, compare_runs, load_reference
from pgra.report.metrics import Values, bootstrap_mean, compare_means, interval_95
from pgra.report.results import Trial, load_collection, read_lines
from pgra.report.tables import Cell, Table, save_figure
from pgra.types import Json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

CONSISTENCY_FILE = "consistency.json"
TABLES_FILE = "consistency.md"
_SEED = 0
_SAVED_EVERY = 10_000
_MEANING = (
    "Consistency: mean share of a query's evidence whose pseudo-label is the query's label.",
    "Majority rate: the consistency of evidence that all had the commonest label of the queries.",
    "Chance: that of evidence with these pseudo-labels that had nothing to do with its query.",
    "Intervals and p are of a bootstrap over queries; a difference whose interval holds 0 is none.",
)
_Counts = npt.NDArray[np.int64]
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
        pseudo_labels: Share of the evidence by pseudo-label, in the task's order of labels.
    """

    name: str
    task: str
    ids: Sequence[str]
    shares: Values
    queries: _Counts
    right: _Counts
    majority: float
    chance: float
    pseudo_labels: Mapping[str, float]

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

    def as_json(self) -> dict[str, Json]:
        """Return all of it but the single queries."""
        arrays = ("ids", "shares", "queries", "right")
        kept = {name: value for name, value in vars(self).items() if name not in arrays}
        ends = list(self.interval)
        return {**kept, "queries": len(self.shares), "score": self.score, "interval_95": ends}


def measure_consistency(
    name: str, task: str, lines: Lines, pseudo_labels: Mapping[str, str], *, labels: Sequence[str]
) -> Consistency:
    """Compare the pseudo-labels of a run's evidence, by text, with its queries' labels.

    `lines` are those of `predictions.jsonl`; queries without evidence are left out.
    """
    lines = [line for line in lines if line["evidence"]]
    said = [[pseudo_labels[seen["text"]] for seen in line["evidence"]] for line in lines]
    depth = max(map(len, said))
    counts = np.array([own.count(line["label"]) for line, own in zip(lines, said, strict=True)])
    shares = counts / np.array([len(own) for own in said])
    is_right = np.array([line["prediction"] == line["label"] for line in lines])
    truth = Counter(line["label"] for line in lines)
    pseudo = Counter(label for own in said for label in own)
    return Consistency(
        name,
        task,
        [line["id"] for line in lines],
        shares,
        np.bincount(counts, minlength=depth + 1),
        np.bincount(counts[is_right], minlength=depth + 1),
        majority=max(truth.values()) / len(lines),
        chance=sum(truth[x] * pseudo[x] for x in labels) / (len(lines) * pseudo.total()),
        pseudo_labels={label: pseudo[label] / pseudo.total() for label in labels},
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
    rows: list[dict[str, float | str | None]] = []
    for run in runs:
        base, (low, high) = bases.get(run.task), run.interval
        row: dict[str, float | str | None] = {
            **{"run": run.name, "task": run.task, "d": run.depth, "queries": len(run.shares)},
            **{"consistency": 100 * run.score, "low": 100 * low, "high": 100 * high},
            "paper": paper.get((run.task, run.name)),
            **{"majority rate": 100 * run.majority, "chance": 100 * run.chance},
        }
        if base is not None and base is not run and list(base.ids) == list(run.ids):
            gap = compare_means(run.shares, base.shares, seed=_SEED)
            low, high = gap.interval
            row |= {"difference": 100 * gap.difference, "p": gap.p}
            row |= {"difference_low": 100 * low, "difference_high": 100 * high}
        rows.append(row)
    for name in dict.fromkeys(run.name for run in runs):
        own = [100 * run.score for run in runs if run.name == name]
        if len(own) > 1:  # table 10's last column
            mean = float(np.mean(own))
            printed = paper.get((AVERAGE, name))
            rows.append({"run": name, "task": AVERAGE, "consistency": mean, "paper": printed})
    title = f"Label consistency of evidence, and its difference to {baseline}"
    return Table.of(title, rows, _SCORES, [*_MEANING, *notes])


_SCORES = {  # how each number is shown
    **{"run": "", "task": "", "d": "", "queries": "", "consistency": ".1f", "low": ".1f"},
    **{"high": ".1f", "paper": ".1f", "majority rate": ".1f", "chance": ".1f"},
    **{"difference": "+.1f", "difference_low": "+.1f", "difference_high": "+.1f", "p": ".3f"},
}


def count_table(runs: Sequence[Consistency]) -> Table:
    """Return queries and accuracy by number of consistent evidence (Figure 2)."""
    kinds = ("queries", "accuracy")
    columns = ["consistent", *(f"{run.name}: {kind}" for run in runs for kind in kinds)]
    rows = []
    for number in range(max(run.depth for run in runs) + 1):
        cells = [Cell(str(number))]
        for run in runs:
            queries, right = (sum(own[number : number + 1]) for own in (run.queries, run.right))
            cells.append(Cell(str(queries)))
            cells.append(Cell.of(100 * right / queries, ".1f") if queries else Cell("-"))
        rows.append(cells)
    return Table(f"{runs[0].task}: by number of consistent evidence", columns, rows)


def plot_counts(runs: Sequence[Consistency]) -> "Figure":
    """Draw the `count_table` of a task's runs, a panel a run (Figure 2)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4 * len(runs), 3.4), layout="constrained")
    panels = figure.subplots(1, len(runs), squeeze=False, sharey=True)[0]
    for axes, run in zip(panels, runs, strict=True):
        axes.bar(range(run.depth + 1), run.queries, color="0.8")
        title = f"{run.name}: {100 * run.score:.1f} % consistent"
        axes.set(xlabel=f"consistent evidence of {run.depth}", ylabel="queries (bars)", title=title)
        right = axes.twinx()
        numbers = np.flatnonzero(run.queries)
        right.plot(numbers, run.right[numbers] / run.queries[numbers], "o-", color="black")
        right.axhline(run.majority, color="0.4", linestyle="--", label="majority rate")
        right.legend(loc="lower right", fontsize="small", frameon=False)
        right.set(ylim=(0, 1.05), ylabel="accuracy (line)")
    return figure


def plot_scores(runs: Sequence[Consistency]) -> "Figure":
    """Draw a task's scores, intervals, majority rate and chance (Figure 4)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1.2 + 0.5 * len(runs)), layout="constrained")
    axes = figure.subplots()
    for height, run in enumerate(reversed(runs)):
        axes.plot(run.interval, [height, height], color="0.6", linewidth=3)
        axes.plot(run.score, height, "o", color="black")
        axes.plot(run.chance, height, "|", color="black", markersize=14)
    axes.axvline(runs[0].majority, color="0.4", linestyle="--")
    axes.set_yticks(range(len(runs)), [run.name for run in reversed(runs)])
    lines = "95 % interval; dashed: majority rate; |: chance"
    axes.set_xlabel(f"label consistency on {runs[0].task}, {lines}")
    return figure


# Pseudo-labels, by a plain reader.


@dataclass(frozen=True)
class Labeler:
    """A plain reader that labels evidence, and its folder."""

    home: Path
    record: ReaderRecord

    @property
    def checksum(self) -> str:
        """Checksum of its record, which holds those of its weights."""
        return file_checksum(self.home / RECORD_FILE)


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
    labeler: Labeler, texts: Sequence[str], folder: Path, *, device: str = "auto"
) -> dict[str, str]:
    """Label texts by a plain reader; a text fills the task's first input.

    Labels are kept in `folder` for other calls, whose texts are returned too, and saved as they
    come.
    """
    path = folder / f"{labeler.record.task}-{labeler.checksum[:12]}.jsonl"
    known: dict[str, dict[str, float]] = {}
    try:
        for row in read_lines(path) if path.is_file() else ():
            if row.pop("digest", None) != digest(row):
                raise DamageError(f"{path} is damaged")
            known[row["text"]] = row["scores"]
    except DamageError as error:
        set_aside(path, error.what)
        known = {}
    missing = [text for text in dict.fromkeys(texts) if text not in known]
    logger.info("labeler %s: %d texts, %d to read", labeler.home, len(texts), len(missing))
    if missing:
        reader = Reader.load(labeler.home, device=device)
    for start in range(0, len(missing), _SAVED_EVERY):
        part = missing[start : start + _SAVED_EVERY]
        decided = reader.predict(part, [])
        known |= {text: dict(one.scores) for text, one in zip(part, decided, strict=True)}
        lines: list[dict[str, Json]]
        lines = [{"text": text, "scores": scores} for text, scores in known.items()]
        write_lines(path, [{**line, "digest": digest(line)} for line in lines])
    # Of equal chances the task's first label.
    return {text: max(scores, key=lambda x: scores[x]) for text, scores in known.items()}


def distinct_evidence(runs: Sequence[Lines]) -> list[str]:
    """Return the texts of all evidence, each once, in the order met."""
    seen = (item for lines in runs for line in lines for item in line["evidence"])
    return list(dict.fromkeys(str(item["text"]) for item in seen))


def report_consistency(
    runs: Sequence[Path],
    output_dir: Path,
    *,
    labelers: Sequence[Path] = (),
    device: str = "auto",
    plots: bool = True,
) -> list[Consistency]:
    """Label the runs' evidence, measure how consistent it is with the queries, and write both.

    Seeds of a reader share their evidence, so of several seeds the lowest is measured.

    Args:
        runs: Finished runs, folders of them, or a grid. Runs without evidence are left out.
        output_dir: Where everything goes.
        labelers: Finished runs of `--num_evidence 0`, one for each task; without any, each task's
            plain run of the lowest seed among `runs`.
        device: Where the labelers read.
        plots: Whether to draw.

    Returns:
        One for each row with evidence on each task.

    Raises:
        ArtifactError: If a folder is no finished run, or runs of a task cannot be compared.
        ConfigError: If a labeler reads evidence, or a task has none.
        DataError: If a labeler's labels are not the runs', or no run has evidence.
    """
    groups = load_collection(runs)
    if len(groups) > 1:
        named = "; ".join(group.title for group in groups)
        raise ConfigError(f"--runs holds several tables' runs ({named}): give those of one")
    study = compare_runs(groups[0])
    rows = _rows_with_evidence(study)
    names = list(dict.fromkeys(name for _, name in rows))
    base = study.baseline if study.baseline in names else names[0]
    measured: list[Consistency] = []
    by_task = _choose_labelers(study, labelers, rows)
    for task, labeler in by_task.items():
        own = {name: run.predictions for (of, name), run in rows.items() if of == task}
        texts = distinct_evidence(list(own.values()))
        pseudo = label_texts(labeler, texts, output_dir / "pseudo_labels", device=device)
        labels = labeler.record.labels
        measured += [
            measure_consistency(name, task, lines, pseudo, labels=labels)
            for name, lines in own.items()
        ]
    printed = load_reference("T10")
    paper: dict[Row, float] = {}
    for name in names:
        tasks = [task for task, other in rows if other == name]
        numbers = printed.beside(rows[tasks[0], name], tasks, [*tasks, AVERAGE])
        paper |= {(column, name): value for column, value in numbers.items()}
    notes = [f"{task}: pseudo-labels are those of {one.home}." for task, one in by_task.items()]
    notes += printed.notes_on(list(by_task)) if paper else []
    tables = [score_table(measured, baseline=base, paper=paper, notes=notes)]
    write_text(output_dir / "consistency.csv", tables[0].to_csv() + "\n")
    for task in by_task:
        of_task = [run for run in measured if run.task == task]
        tables.append(count_table(of_task))
        for plot, name in ((plot_counts, "counts"), (plot_scores, "scores")) if plots else ():
            save_figure(plot(of_task), output_dir / f"{name}-{task}.png")
    write_text(output_dir / TABLES_FILE, "\n\n".join(t.to_markdown() for t in tables) + "\n")
    checksums = {task: labeler.checksum for task, labeler in by_task.items()}
    values = {"baseline": base, "labelers": checksums, "runs": [run.as_json() for run in measured]}
    write_json(output_dir / CONSISTENCY_FILE, values)
    return measured


def _rows_with_evidence(study: Study) -> dict[Row, Trial]:
    """Return the run of the lowest seed of each row with evidence, in a report's order."""
    firsts = {
        (task, row): study.results[row, task].runs[0]
        for task in study.tasks
        for row in study.rows
        if (row, task) in study.results
    }
    found = {key: run for key, run in firsts.items() if any(e["evidence"] for e in run.predictions)}
    if not found:
        raise DataError("no run has evidence to be consistent with: give runs of pgra or fid")
    return found


def _choose_labelers(
    study: Study, folders: Sequence[Path], rows: Mapping[Row, Trial]
) -> dict[str, Labeler]:
    """Return each task's labeler: as named, else the task's own plain run."""
    known = {labeler.record.task: labeler for labeler in map(open_labeler, folders)}
    if len(known) < len(folders):
        raise ConfigError("two labelers are of one task: give one for each task of the runs")
    chosen: dict[str, Labeler] = {}
    for (task, _), run in rows.items():
        plain_runs = [r for r in study.group.runs if (r.task, r.method) == (task, "plain")]
        if task not in known and plain_runs:
            known[task] = open_labeler(min(plain_runs, key=lambda run: run.seed).folder)
        if task not in known:
            raise ConfigError(
                f"no labeler is of task '{task}': give its run of --num_evidence 0 by --labeler"
            )
        labeler = chosen[task] = known[task]
        if run.labels != {*labeler.record.labels}:
            raise DataError(f"{labeler.home} has other labels than {run.folder}: give another one")
    return chosen
