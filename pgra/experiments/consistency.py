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
DIR/counts-TASK.csv                   queries and accuracy by number of consistent evidence
DIR/counts-TASK.png, scores-TASK.png  the same drawn, also as .svg
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
from pgra.core import Json
from pgra.errors import ConfigError, DamageError, DataError, unknown_name
from pgra.reader import RECORD_FILE
from pgra.reader.record import Reader, ReaderRecord, find_reader, read_record
from pgra.report.compare import AVERAGE, Study, compare_runs, load_reference
from pgra.report.figures import plain_text, save_figure
from pgra.report.metrics import Values, bootstrap_mean, compare_means, interval_95
from pgra.report.results import Trial, load_collection, read_lines
from pgra.report.tables import Cell, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

CONSISTENCY_FILE, TABLES_FILE = "consistency.json", "consistency.md"
_SEED = 0
_SAVED_EVERY = 10_000
_REFERENCE = "T10"
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
    """Label consistency of one run, or of one with several seeds.

    Attributes:
        ids: Of the queries that have evidence, in the run's order.
        shares: Share of consistent evidence of each of these queries, in 0..1; mean over seeds.
        queries: How many queries have 0, 1, ... d consistent evidence, of all seeds, (d + 1,).
        right: How many of these were decided rightly.
        pseudo_labels: Share of the evidence by pseudo-label, in the task's order of labels.
        without_evidence: Queries without any, which are left out.
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
    without_evidence: int
    seeds: int = 1

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

    def accuracy(self, number: int) -> float | None:
        """Return the accuracy on queries with so many consistent evidence; None without such."""
        return float(self.right[number] / self.queries[number]) if self.queries[number] else None

    def as_json(self) -> dict[str, Json]:
        """Return all of it but the single queries."""
        arrays = ("ids", "shares", "queries", "right")
        kept = {name: value for name, value in vars(self).items() if name not in arrays}
        ends = list(self.interval)
        return {**kept, "queries": len(self.shares), "score": self.score, "interval_95": ends}


def measure_consistency(
    name: str,
    task: str,
    seeds: Sequence[Lines],
    pseudo_labels: Mapping[str, str],
    *,
    labels: Sequence[str],
) -> Consistency:
    """Compare the pseudo-labels of a run's evidence, by text, with its queries' labels.

    `seeds` are the lines of each seed's `predictions.jsonl`. Seeds of the reader share their
    evidence: shares are averaged by query, all else is added up.

    Raises:
        DataError: If the run has no evidence, or its seeds have evidence for different queries.
    """
    most = {max((len(line["evidence"]) for line in lines), default=0) for lines in seeds}
    found = [[line for line in lines if line["evidence"]] for lines in seeds]
    ids = [[line["id"] for line in lines] for lines in found]
    if most == {0}:
        raise DataError(f"{name} has no evidence to be consistent with: leave it out of --runs")
    if len(most) > 1 or any(own != ids[0] for own in ids):
        raise DataError(f"the seeds of {name} have evidence for different queries")
    (depth,) = most
    lines = [line for own in found for line in own]
    said = [[pseudo_labels[seen["text"]] for seen in line["evidence"]] for line in lines]
    counts = np.array([own.count(line["label"]) for line, own in zip(lines, said, strict=True)])
    shares = counts / np.array([len(own) for own in said])
    is_right = np.array([line["prediction"] == line["label"] for line in lines])
    truth = Counter(line["label"] for line in lines)
    pseudo = Counter(label for own in said for label in own)
    return Consistency(
        name,
        task,
        ids[0],
        shares.reshape(len(seeds), -1).mean(axis=0),
        np.bincount(counts, minlength=depth + 1),
        np.bincount(counts[is_right], minlength=depth + 1),
        majority=max(truth.values()) / len(lines),
        chance=sum(truth[x] * pseudo[x] for x in labels) / (len(lines) * pseudo.total()),
        pseudo_labels={label: pseudo[label] / pseudo.total() for label in labels},
        without_evidence=len(seeds[0]) - len(found[0]),
        seeds=len(seeds),
    )


def score_table(
    runs: Sequence[Consistency],
    *,
    baseline: str,
    paper: Mapping[tuple[str, str], float],
    notes: Sequence[str] = (),
) -> Table:
    """Return the scores (the paper's Table 10) in hundredths, with differences to the baseline.

    `paper` holds the paper's values by task (or `AVERAGE`) and name; it may be empty.
    """
    columns = ["run", "task", "seeds", "d", "queries", "consistency", "95 % interval"]
    columns += [*(["paper"] if paper else []), "majority rate", "chance"]
    columns += [f"difference to {baseline}", "its 95 % interval", "p"]
    bases = {run.task: run for run in runs if run.name == baseline}
    rows = []
    for run in runs:
        numbers = (str(number) for number in (run.seeds, run.depth, len(run.shares)))
        cells = [Cell(run.name), Cell(run.task), *map(Cell, numbers), _percent(run.score)]
        cells.append(Cell.interval([100 * end for end in run.interval], ".1f"))
        cells += [Cell.of(paper.get((run.task, run.name)), ".1f")] if paper else []
        cells += [_percent(run.majority), _percent(run.chance)]
        base = bases.get(run.task)
        if base is None or run is base:
            cells += [Cell("")] * 3
        elif list(run.ids) != list(base.ids):
            cells += [Cell("other queries"), Cell(""), Cell("")]
        else:
            gap = compare_means(run.shares, base.shares, seed=_SEED)
            ends = [100 * gap.low, 100 * gap.high]
            cells += [_percent(gap.difference, "+.1f"), Cell.interval(ends, "+.1f")]
            cells.append(Cell.of(gap.p, ".3f"))
        rows.append(cells)
    for name in dict.fromkeys(run.name for run in runs):
        own = [run.score for run in runs if run.name == name]
        if len(own) > 1:  # table 10's last column
            told = {"run": Cell(name), "task": Cell(AVERAGE)}
            told["consistency"] = _percent(float(np.mean(own)))
            told["paper"] = Cell.of(paper.get((AVERAGE, name)), ".1f")
            rows.append([told.get(column, Cell("")) for column in columns])
    return Table("Label consistency of evidence", columns, rows, [*_MEANING, *notes])


def count_table(runs: Sequence[Consistency]) -> Table:
    """Return queries (mean over seeds) and accuracy by number of consistent evidence (Figure 2)."""
    kinds = ("queries", "accuracy")
    columns = ["consistent", *(f"{run.name}: {kind}" for run in runs for kind in kinds)]
    rows = []
    for number in range(max(run.depth for run in runs) + 1):
        cells = [Cell(str(number))]
        for run in runs:
            if number > run.depth:
                cells += [Cell(""), Cell("")]
                continue
            accuracy = run.accuracy(number)
            cells.append(Cell.of(float(run.queries[number] / run.seeds), ".4g"))
            cells.append(Cell("-") if accuracy is None else _percent(accuracy))
        rows.append(cells)
    notes = [
        f"Pseudo-labels of the evidence of {run.name}: "
        + ", ".join(f"{label} {100 * v:.1f}" for label, v in run.pseudo_labels.items())
        + (f"; {run.without_evidence} queries have none." if run.without_evidence else ".")
        for run in runs
    ]
    return Table(f"{runs[0].task}: by number of consistent evidence", columns, rows, notes)


def _percent(value: float, form: str = ".1f") -> Cell:
    return Cell.of(100 * value, form)


def plot_counts(runs: Sequence[Consistency]) -> "Figure":
    """Draw the `count_table` of a task's runs, a panel a run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4 * len(runs), 3.4), layout="constrained")
    panels = figure.subplots(1, len(runs), squeeze=False, sharey=True)[0]
    for axes, run in zip(panels, runs, strict=True):
        axes.bar(range(run.depth + 1), run.queries / run.seeds, color="0.8")
        title = f"{run.name}: {100 * run.score:.1f} % consistent"
        axes.set(xlabel=f"consistent evidence of {run.depth}", ylabel="queries (bars)", title=title)
        right = axes.twinx()
        numbers = np.flatnonzero(run.queries)
        accuracy = run.right[numbers] / run.queries[numbers]
        right.plot(numbers, accuracy, "o-", color="black", markersize=4)
        right.axhline(run.majority, color="0.4", linestyle="--", linewidth=1, label="majority rate")
        right.legend(loc="lower right", fontsize="small", frameon=False)
        right.set(ylim=(0, 1.05), ylabel="accuracy (line)")
    return figure


def plot_scores(runs: Sequence[Consistency]) -> "Figure":
    """Draw a task's scores, intervals, majority rate and chance."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1.2 + 0.5 * len(runs)), layout="constrained")
    axes = figure.subplots()
    for height, run in enumerate(reversed(runs)):
        axes.plot(run.interval, [height, height], color="0.6", linewidth=3)
        axes.plot(run.score, height, "o", color="black")
        axes.plot(run.chance, height, "|", color="black", markersize=14)
    axes.axvline(runs[0].majority, color="0.4", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(runs)), [run.name for run in reversed(runs)])
    axes.set_ylim(-0.6, len(runs) - 0.4)
    lines = "dashed: majority rate; |: chance"
    axes.set_xlabel(f"label consistency on {runs[0].task}, 95 % interval; {lines}")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


# Pseudo-labels, by a plain reader.


@dataclass(frozen=True)
class Labeler:
    """A plain reader that labels evidence; `folder` is as it was named, `home` the reader's own."""

    folder: Path
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
        raise ConfigError(
            f"{folder} reads {record.num_evidence} evidence texts a query: pseudo-labels come from "
            "a plain reader, so give a run of pgra train --num_evidence 0"
        )
    return Labeler(folder, find_reader(folder), record)


def label_texts(
    labeler: Labeler,
    texts: Sequence[str],
    folder: Path,
    *,
    device: str = "auto",
    save_every: int = _SAVED_EVERY,
) -> tuple[dict[str, str], int]:
    """Label distinct texts by a plain reader; a text fills the task's first input.

    Labels are kept in `folder` for other calls, and saved after every `save_every` texts.

    Returns:
        Labels by text, of earlier calls too, and how many texts were read now.
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
    logger.info(
        "labeler %s: %d distinct evidence texts of %s, %d to read",
        *(labeler.folder, len(texts), labeler.record.task, len(missing)),
    )
    if missing:
        reader = Reader.load(labeler.home, device=device)
    for start in range(0, len(missing), save_every):
        part = missing[start : start + save_every]
        decided = reader.predict(part, [])
        known |= {text: dict(one.scores) for text, one in zip(part, decided, strict=True)}
        lines: list[dict[str, Json]]
        lines = [{"text": text, "scores": scores} for text, scores in known.items()]
        write_lines(path, [{**line, "digest": digest(line)} for line in lines])
    # Of equal chances the task's first label.
    labels = {text: max(scores, key=lambda x: scores[x]) for text, scores in known.items()}
    return labels, len(missing)


def distinct_evidence(runs: Sequence[Lines]) -> list[str]:
    """Return the texts of all evidence, each once, in the order met."""
    seen = (item for lines in runs for line in lines for item in line["evidence"])
    return list(dict.fromkeys(str(item["text"]) for item in seen))


@dataclass(frozen=True)
class ConsistencyReport:
    """Label consistency of several runs.

    Attributes:
        runs: In the order of the table, one for all seeds.
        tables: The scores and, for each task, queries by number of consistent evidence.
        num_read: Texts that the labelers read now; the others were labelled before.
    """

    runs: Sequence[Consistency]
    tables: Sequence[Table]
    num_read: int


def report_consistency(
    runs: Sequence[Path],
    output_dir: Path,
    *,
    labelers: Sequence[Path] = (),
    baseline: str | None = None,
    device: str = "auto",
    plots: bool = True,
) -> ConsistencyReport:
    """Label the runs' evidence, and measure how consistent it is with the queries.

    Args:
        runs: Finished runs, folders of them, or a grid. Runs without evidence are left out.
        output_dir: Where everything goes.
        labelers: Finished runs of `--num_evidence 0`, one for each task; without any, each task's
            plain run of the lowest seed among `runs`.
        baseline: Name of the row to compare with; None takes a report's own, else the first.
        device: Where the labelers read.
        plots: Whether to draw.

    Raises:
        ArtifactError: If a folder is no finished run, or runs of a task cannot be compared.
        ConfigError: If a labeler reads evidence, two are of one task, a task has none, or the
            baseline is no row with evidence.
        DataError: If a labeler's labels are not the runs', or no run has evidence.
    """
    groups = load_collection(runs).groups
    if len(groups) > 1:
        raise ConfigError(
            f"--runs holds {len(groups)} tables' runs ({'; '.join(g.title for g in groups)}): give "
            "one grid, or runs that are of none"
        )
    study = compare_runs(groups[0])
    rows = _rows_with_evidence(study)
    names = list(dict.fromkeys(name for _, name in rows))
    if baseline is not None and baseline not in names:
        raise ConfigError(unknown_name("baseline", baseline, names))
    base = baseline or (study.baseline if study.baseline in names else None) or names[0]
    measured: list[Consistency] = []
    num_read = 0
    by_task = _choose_labelers(study, labelers, rows)
    for task, labeler in by_task.items():
        own = {name: found for (of, name), found in rows.items() if of == task}
        texts = distinct_evidence([run.predictions for found in own.values() for run in found])
        pseudo, read = label_texts(labeler, texts, output_dir / "pseudo_labels", device=device)
        num_read += read
        for name, found in own.items():
            seeds = [run.predictions for run in found]
            labels = labeler.record.labels
            measured.append(measure_consistency(name, task, seeds, pseudo, labels=labels))
    printed = load_reference(_REFERENCE)
    paper: dict[Row, float] = {}
    for name in names:
        tasks = [task for task, other in rows if other == name]
        numbers = printed.beside(rows[tasks[0], name][0], tasks, [*tasks, AVERAGE])
        paper |= {(column, name): value for column, value in numbers.items()}
    notes = _notes(study, rows, by_task, has_paper=bool(paper))
    tables = [score_table(measured, baseline=base, paper=paper, notes=notes)]
    write_text(output_dir / "consistency.csv", tables[0].to_csv() + "\n")
    for task in by_task:
        of_task = [run for run in measured if run.task == task]
        tables.append(count_table(of_task))
        write_text(output_dir / f"counts-{task}.csv", tables[-1].to_csv() + "\n")
        for plot, name in ((plot_counts, "counts"), (plot_scores, "scores")) if plots else ():
            with plain_text():
                figure = plot(of_task)
            save_figure(figure, *(output_dir / f"{name}-{task}.{kind}" for kind in ("png", "svg")))
    write_text(output_dir / TABLES_FILE, "\n\n".join(t.to_markdown() for t in tables) + "\n")
    checksums = {task: labeler.checksum for task, labeler in by_task.items()}
    values = {"baseline": base, "labelers": checksums, "runs": [run.as_json() for run in measured]}
    write_json(output_dir / CONSISTENCY_FILE, values)
    return ConsistencyReport(measured, tables, num_read)


def _rows_with_evidence(study: Study) -> dict[Row, list[Trial]]:
    """Return the runs that have evidence, by task and row, in a report's order."""
    found: dict[Row, list[Trial]] = {}
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


def _choose_labelers(
    study: Study, folders: Sequence[Path], rows: Mapping[Row, Sequence[Trial]]
) -> dict[str, Labeler]:
    """Return each task's labeler: as named, else the task's own plain run."""
    named = [open_labeler(folder) for folder in folders]
    by_task = {labeler.record.task: labeler for labeler in named}
    if len(by_task) < len(named):
        raise ConfigError("two labelers are of the same task: give one for each task of the runs")
    chosen: dict[str, Labeler] = {}
    for (task, _), runs in rows.items():
        plain = [r for r in study.group.runs if (r.task, r.method) == (task, "plain")]
        if task not in by_task and plain:
            by_task[task] = open_labeler(min(plain, key=lambda run: run.seed).folder)
        if task not in by_task:
            raise ConfigError(
                f"no labeler is of task '{task}': give a finished run of pgra train --task {task} "
                "--num_evidence 0 with --labeler, or put it among the runs"
            )
        labeler = chosen[task] = by_task[task]
        for run in runs:
            if run.labels != {*labeler.record.labels}:
                sides = [", ".join(sorted(own)) for own in (run.labels, labeler.record.labels)]
                raise DataError(
                    f"{run.folder} has the labels {sides[0]}, its labeler {labeler.folder} "
                    f"{sides[1]}: give a labeler of the same task"
                )
    return chosen


def _notes(
    study: Study,
    rows: Mapping[Row, Sequence[Trial]],
    labelers: Mapping[str, Labeler],
    *,
    has_paper: bool,
) -> list[str]:
    notes = [
        f"{task}: pseudo-labels are those of {labeler.folder}."
        for task, labeler in labelers.items()
    ]
    for (task, name), runs in rows.items():
        own = labelers[task].record.fingerprints.get("train")
        if runs[0].metrics.get("fingerprints", {}).get("train") != own:
            notes.append(f"{name} was trained on other examples than its labeler, task {task}.")
    if has_paper:
        notes += load_reference(_REFERENCE).notes_on(list(labelers))
    if study.group.missing:
        names = dict.fromkeys(f"{gone.name} (seed {gone.seed})" for gone in study.group.missing)
        notes.append(f"Missing: {', '.join(names)}.")
    return notes
