"""Label consistency of runs or of ways to rank, by pseudo-labels (Guo et al. 2023, 4.1).

DIR/consistency.json                  scores, and queries by number of consistent evidence
DIR/consistency.md, .tex, .csv        the same as tables (.csv: the scores)
DIR/counts-TASK.csv                   queries and accuracy by number of consistent evidence
DIR/counts-TASK.png, scores-TASK.png  the same drawn, also as .svg
DIR/pseudo_labels/TASK-CHECKSUM.jsonl a text and its labels' probabilities a line

A labeler is known by its folder's checksums, so that another one's labels are never mixed in.
"""

import json
import logging
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pgra.artifacts import file_checksum, write_json, write_lines, write_text
from pgra.config import (
    PAIR_SIMILARITIES,
    CorpusArguments,
    PgraArguments,
)
from pgra.core import ALONE, Context, Json
from pgra.data.corpus import Corpus, open_corpus
from pgra.errors import ArtifactError, ConfigError, DataError, unknown_name
from pgra.methods.stages import Stages
from pgra.reader.record import RECORD_FILE, Reader, ReaderRecord, find_reader, read_record
from pgra.report.compare import Study, compare_runs, load_reference
from pgra.report.consistency import (
    Consistency,
    count_table,
    measure_consistency,
    merge_seeds,
    plot_counts,
    plot_scores,
    score_table,
)
from pgra.report.results import (
    METRICS_FILE,
    Run,
    load_collection,
    read_lines,
    read_object,
)
from pgra.report.tables import Table
from pgra.rerank.similarity import SIMILARITIES

logger = logging.getLogger(__name__)

SAMPLE = 1000  # passages of a corpus: a share then has a standard error of 1.6 points at most
REPORT_FILE = "consistency.json"
TABLES_FILE = "consistency.md"
RANDOM, FIRST_STAGE = "random", "first stage"
_SEED = 0
_SAVED_EVERY = 10_000
_LEAST = sys.float_info.min  # a probability may be 0 in float32
_REFERENCE = "T10"
Row = tuple[str, str]
"""A task, and the name of a row."""


@dataclass(frozen=True)
class Labeler:
    """A plain reader that gives evidence its pseudo-labels.

    Attributes:
        folder: As it was named.
        home: Its reader's folder.
        record: What it was trained for.
        measured: The content of its run's `metrics.json`; empty where there is none.
    """

    folder: Path
    home: Path
    record: ReaderRecord
    measured: Mapping[str, Any]

    @property
    def checksum(self) -> str:
        """Checksum of its record, which holds those of its weights."""
        return file_checksum(self.home / RECORD_FILE)

    def describe(self, pseudo: "PseudoLabels", texts: Sequence[str]) -> dict[str, Json]:
        """Return which reader it is, how good, and how it labelled some texts."""
        measured = {name: self.measured.get(name) for name in ("metric", "value")}
        own = {"folder": str(self.folder), "checksum": self.checksum}
        return {**own, **measured, **pseudo.describe(texts)}

    def note(self) -> str:
        """Say how good it is, as far as that is known."""
        text = f"{self.record.task}: pseudo-labels are those of {self.folder}"
        if not self.measured:
            return f"{text}."
        metric, value = self.measured["metric"], float(self.measured["value"])
        return f"{text}, whose {metric} on test queries is {value:.3f}; on evidence it is unknown."


def open_labeler(folder: Path) -> Labeler:
    """Read which reader it is.

    Args:
        folder: A finished run of `--num_evidence 0`, or its reader's folder.

    Raises:
        ArtifactError: If there is no whole reader.
        ConfigError: If it reads evidence.
    """
    record = read_record(folder, verify=False)  # its weights are checked when they are loaded
    if record.num_evidence:
        raise ConfigError(
            f"{folder} reads {record.num_evidence} evidence texts a query: pseudo-labels come from "
            "a plain reader, so give a run of train.py --num_evidence 0"
        )
    home = find_reader(folder)
    path = (home.parent if home == folder else folder) / METRICS_FILE
    return Labeler(folder, home, record, read_object(path) if path.is_file() else {})


@dataclass(frozen=True)
class PseudoLabels:
    """Labels of texts.

    Attributes:
        scores: Probability by label, by text; of texts that were not asked for this time, too.
        num_read: Texts that were read now.
        sample: Passages of the corpus that the labeler is centred at; none: the paper's labels,
            those of the highest probability.
    """

    scores: Mapping[str, Mapping[str, float]]
    num_read: int
    sample: Sequence[str] = ()

    @cached_property
    def medians(self) -> Mapping[str, float]:
        """Median of each label's log-probability over the sample; empty without one."""
        logs = [_logs(self.scores[text]) for text in self.sample]
        labels = logs[0] if logs else ()
        return {label: float(np.median([row[label] for row in logs])) for label in labels}

    @cached_property
    def labels(self) -> Mapping[str, str]:
        """Each text's label: of the highest log-probability above its median, if centred.

        With two labels half of the sample then has each: the threshold is the median odds. Ties go
        to the task's first label.
        """
        return {text: _label(scores, self.medians) for text, scores in self.scores.items()}

    def shares(self, texts: Sequence[str], medians: Mapping[str, float]) -> dict[str, float]:
        """Return the share of texts by label, in the labeler's order of labels."""
        counts = Counter(_label(self.scores[text], medians) for text in texts)
        return {label: counts[label] / len(texts) for label in self.scores[texts[0]]}

    def describe(self, texts: Sequence[str]) -> dict[str, Any]:
        """Return how labels were made, and the labels' shares before and after centring.

        Args:
            texts: The distinct evidence.
        """
        facts: dict[str, Any] = {"is_centred": bool(self.sample)}
        for name, own in (("evidence", texts), ("corpus", self.sample)):
            if own:
                facts[f"{name}_texts"] = len(own)
                facts[f"{name}_labels_uncentred"] = self.shares(own, {})
            if own and self.sample:
                facts[f"{name}_labels"] = self.shares(own, self.medians)
        return {**facts, **({"medians": dict(self.medians)} if self.sample else {})}

    def note(self, task: str, texts: Sequence[str]) -> str:
        """Say the same in a sentence."""
        shares = {
            name: ", ".join(f"{label} {100 * share:.1f} %" for label, share in value.items())
            for name, value in self.describe(texts).items()
            if "_labels" in name
        }
        before = shares["evidence_labels_uncentred"]
        if not self.sample:
            return (
                f"{task}: the labeler is not centred (the paper's way); of the evidence {before}."
            )
        return (
            f"{task}: the labeler is centred at its medians over {len(self.sample)} passages of "
            f"the corpus: there {shares['corpus_labels_uncentred']} before, "
            f"{shares['corpus_labels']} after; of the evidence {before} before, "
            f"{shares['evidence_labels']} after."
        )


def _logs(scores: Mapping[str, float]) -> dict[str, float]:
    return {label: math.log(max(value, _LEAST)) for label, value in scores.items()}


def _label(scores: Mapping[str, float], medians: Mapping[str, float]) -> str:
    logs = _logs(scores)
    return max(logs, key=lambda label: logs[label] - medians.get(label, 0.0))


def sample_corpora(corpora: Sequence[Corpus], size: int = SAMPLE) -> list[str]:
    """Draw the passages that a labeler is centred at; the same ones each time.

    Args:
        corpora: As many of each.
        size: How many of each; all, if it has fewer.
    """
    drawn = []
    for corpus in corpora:
        rows = np.random.default_rng(_SEED).permutation(len(corpus))[:size]
        drawn += corpus.texts(np.sort(rows))
    return list(dict.fromkeys(drawn))


def label_texts(
    labeler: Labeler,
    texts: Sequence[str],
    folder: Path,
    *,
    sample: Sequence[str] = (),
    device: str = "auto",
    save_every: int = _SAVED_EVERY,
) -> PseudoLabels:
    """Give texts the label that a plain reader decides for; a text fills the task's first input.

    Args:
        labeler: The reader.
        texts: Distinct ones.
        folder: Keeps what it said, for other calls.
        sample: Distinct passages that it is centred at; none: it is not.
        device: What it reads on.
        save_every: How many texts are read between two savings; when stopped, these are read again.

    Raises:
        ArtifactError: If what it said before is damaged.
        ModelError: As `Reader.load`.
    """
    name = labeler.checksum.rpartition(":")[2][:12]
    path = folder / f"{labeler.record.task}-{name}.jsonl"
    known: dict[str, dict[str, float]] = {}
    try:
        for row in read_lines(path) if path.is_file() else ():
            known[row["text"]] = {label: float(value) for label, value in row["scores"].items()}
    except (ArtifactError, AttributeError, KeyError, TypeError, ValueError):
        raise ArtifactError(f"{path} is damaged: delete it and run again") from None
    missing = [text for text in dict.fromkeys([*texts, *sample]) if text not in known]
    logger.info(
        "labeler %s: %d distinct evidence texts of %s and %d passages to centre it, %d to read",
        *(labeler.folder, len(texts), labeler.record.task, len(sample), len(missing)),
    )
    if missing:
        reader = Reader.load(labeler.home, device=device)
    for start in range(0, len(missing), save_every):
        part = missing[start : start + save_every]
        decided = reader.predict(part, [], progress=True)
        known |= {text: dict(one.scores) for text, one in zip(part, decided, strict=True)}
        write_lines(path, [{"text": text, "scores": scores} for text, scores in known.items()])
    return PseudoLabels(known, len(missing), sample)


def distinct_evidence(
    runs: Sequence[Sequence[Mapping[str, Any]]], depth: int | None = None
) -> list[str]:
    """Return the texts of all evidence (or of each query's best), each once, in the order met.

    Args:
        runs: The lines of each one's `predictions.jsonl`.
        depth: How many of a query's best; None is all.
    """
    seen = (item for lines in runs for line in lines for item in line["evidence"][:depth])
    return list(dict.fromkeys(str(item["text"]) for item in seen))


@dataclass(frozen=True)
class ConsistencyReport:
    """Label consistency of several runs, or of several ways to rank.

    Attributes:
        runs: What was measured, in the order of the table; seeds are put together.
        tables: The scores; of runs also, for each task, queries by number of consistent evidence.
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
    notes: list[str] = []
    described: dict[str, Json] = {}
    num_read = 0
    by_task = _choose_labelers(study, labelers, rows)
    samples = {task: _sample(rows, task) if centre else [] for task in by_task}  # or refuse
    for task, labeler in by_task.items():
        own = {name: found for (of, name), found in rows.items() if of == task}
        lines = [run.predictions for found in own.values() for run in found]
        texts = distinct_evidence(lines, depth)
        folder = output_dir / "pseudo_labels"
        pseudo = label_texts(labeler, texts, folder, sample=samples[task], device=device)
        for name, found in own.items():
            seeds = [
                measure_consistency(
                    *(name, task, run.predictions, pseudo.labels),
                    labels=labeler.record.labels,
                    depth=depth,
                )
                for run in found
            ]
            measured.append(merge_seeds(seeds))
        notes.append(pseudo.note(task, texts))
        described[task] = labeler.describe(pseudo, texts)
        num_read += pseudo.num_read
    printed = load_reference(_REFERENCE)
    paper = {
        (task, name): value
        for (task, name), own_runs in rows.items()
        for value in printed.beside(own_runs[0], [], [task]).values()
    }
    notes += _notes(study, rows, by_task, is_centred=centre, has_paper=bool(paper))
    scores = score_table(measured, baseline=base, paper=paper, notes=notes)
    counts = {task: count_table([r for r in measured if r.task == task]) for task in by_task}
    for task, table in counts.items():
        write_text(output_dir / f"counts-{task}.csv", table.to_csv() + "\n")
        for plot, name in ((plot_counts, "counts"), (plot_scores, "scores")) if plots else ():
            plot([run for run in measured if run.task == task], output_dir / f"{name}-{task}")
    tables = [scores, *counts.values()]
    write_text(output_dir / "consistency.csv", scores.to_csv() + "\n")
    write_text(output_dir / "consistency.tex", "\n\n".join(t.to_latex() for t in tables) + "\n")
    write_text(output_dir / TABLES_FILE, "\n\n".join(t.to_markdown() for t in tables) + "\n")
    values = {"baseline": base, "labelers": described, "runs": [run.as_json() for run in measured]}
    write_json(output_dir / REPORT_FILE, values)
    return ConsistencyReport(measured, tables, num_read)


def _rows_with_evidence(study: Study) -> dict[Row, list[Run]]:
    """Return the runs that have evidence, by task and row, in a report's order."""
    found: dict[Row, list[Run]] = {}
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
    study: Study, folders: Sequence[Path], rows: Mapping[Row, Sequence[Run]]
) -> dict[str, Labeler]:
    """Give each task its labeler, as named or the task's own plain run."""
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
                f"no labeler is of task '{task}': give a finished run of train.py --task {task} "
                "--num_evidence 0 with --labeler, or put it among the runs"
            )
        labeler = chosen[task] = by_task[task]
        for run in runs:
            if run.labels != set(labeler.record.labels):
                raise DataError(
                    f"{run.folder} has the labels {', '.join(sorted(run.labels))}, its labeler "
                    f"{labeler.folder} {', '.join(sorted(labeler.record.labels))}: give a labeler "
                    "of the same task"
                )
    return chosen


def _sample(rows: Mapping[Row, Sequence[Run]], task: str) -> list[str]:
    """Draw passages of each corpus that a task's runs searched, so that all have one labeler."""
    corpora: dict[str, Corpus] = {}
    for run in (run for row, runs in rows.items() if row[0] == task for run in runs):
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


def _notes(
    study: Study,
    rows: Mapping[Row, Sequence[Run]],
    labelers: Mapping[str, Labeler],
    *,
    is_centred: bool,
    has_paper: bool,
) -> list[str]:
    """Say what a reader of the numbers must know."""
    notes = [labeler.note() for labeler in labelers.values()]
    for (task, name), runs in rows.items():
        own = labelers[task].record.fingerprints.get("train")
        if runs[0].metrics.get("fingerprints", {}).get("train") != own:
            notes.append(f"{name} was trained on other examples than its labeler, task {task}.")
    if has_paper:
        if is_centred:
            notes.append("The paper's labelers are not centred: --no_centre for its definition.")
        notes += load_reference(_REFERENCE).notes_on(list(labelers))
    if study.group.missing:
        names = dict.fromkeys(f"{gone.name} (seed {gone.seed})" for gone in study.group.missing)
        notes.append(f"Missing: {', '.join(names)}.")
    return notes


# Label consistency of what each way finds (Guo et al. 2023, section 4.1), with no reader trained.
#
# Similarities, prompts and corpora can so be compared in minutes: the LM's states are in the bank,
# and a plain reader that is there already labels each text once.


def ways_of(args: PgraArguments) -> dict[str, PgraArguments]:
    """Return the arguments of each way, by name: chance, the first stage, and each similarity.

    A similarity orders the k candidates, and with a bank of the whole corpus all of it too (but
    not by several prefixes, whose scores are averaged for candidates only). With a prefix a query
    only the similarities of two states alone are ways.

    Args:
        args: What the ways have in common.

    Raises:
        ConfigError: If there is nothing to compare.
    """
    if args.is_exhaustive or args.rerank.reranker == "none" or not args.rerank.num_evidence:
        raise ConfigError(
            "the ways are compared with a first stage, a reranker and evidence: leave out "
            "--retriever exhaustive, --reranker none and --num_evidence 0 (--bank full adds the "
            "exhaustive search)"
        )
    first = replace(args, rerank=replace(args.rerank, reranker="none"), rerank_options=None)
    chance = replace(args.retriever, retriever="random")
    everything = replace(args.retriever, retriever="exhaustive")
    ways = {
        RANDOM: replace(first, retriever=chance, retriever_options=None),
        FIRST_STAGE: first,
    }
    if args.rerank.reranker != "prompted":  # it has no states to compare in several ways
        return {**ways, args.rerank.reranker: args}
    for name in PAIR_SIMILARITIES if args.rerank.per_query else SIMILARITIES:
        ways[name] = replace(args, rerank=replace(args.rerank, similarity=name))
        if args.rerank.bank == "full" and args.rerank.num_prefixes == 1:
            ways[f"exhaustive {name}"] = replace(
                ways[name], retriever=everything, retriever_options=None
            )
    return ways


def compare_evidence(
    args: PgraArguments,
    labeler: Path,
    output_dir: Path,
    *,
    depths: Sequence[int] = (),
    centre: bool = True,
    context: Context = ALONE,
) -> ConsistencyReport:
    """Measure on the test split how consistent the evidence of each way is.

    Args:
        args: The task, corpus and models; d is the largest depth.
        labeler: A finished run of `--num_evidence 0`.
        output_dir: Gets `evidence.json` and `evidence.md`, and the pseudo-labels.
        depths: How many of a query's best are looked at; none means d alone.
        centre: Whether the labeler is centred at its medians over the corpus; else labels are the
            paper's.
        context: Who shares the LM's work.

    Raises:
        ConfigError: If a depth exceeds d, or the labeler has other labels than the task.
        PgraError: As the stages and `open_labeler` say.
    """
    reader = open_labeler(labeler)
    most = args.rerank.num_evidence
    for depth in depths:
        if not 1 <= depth <= most:
            raise ConfigError(f"depth is {depth}: it must lie between 1 and num_evidence, {most}")
    lines: dict[str, list[dict[str, Any]]] = {}
    for way, own in ways_of(args).items():
        stages = Stages.read(own, context)
        stages.find(("test",))
        pairs = zip(stages.data.examples("test"), stages.evidence_lines("test"), strict=True)
        lines[way] = [
            {
                "id": example.id,
                "label": example.label,
                "prediction": None,
                "evidence": [{"text": line.text} for line in evidence],
            }
            for example, evidence in pairs
        ]
        task, labels = stages.data.task.name, list(stages.data.labels)
    if sorted(reader.record.words) != sorted(labels):
        raise ConfigError(
            f"{labeler} decides {', '.join(reader.record.words)}, and {task} has "
            f"{', '.join(labels)}: give a plain run of this task"
        )
    texts = distinct_evidence(list(lines.values()))
    corpora = [open_corpus(args.corpus, args.artifacts, is_quiet=True)] if centre else []
    known = label_texts(
        *(reader, texts, output_dir / "pseudo_labels"),
        sample=sample_corpora(corpora),
        device=args.runtime.device,
    )
    runs: list[Consistency] = []
    tables: list[Table] = []
    for depth in depths or (most,):
        own_runs = [
            measure_consistency(way, task, own, known.labels, labels=labels, depth=depth)
            for way, own in lines.items()
        ]
        runs += own_runs
        tables.append(score_table(own_runs, baseline=FIRST_STAGE, paper={}))
    notes = [*tables[0].notes, reader.note(), known.note(task, texts)]
    table = replace(tables[0], rows=[row for part in tables for row in part.rows], notes=notes)
    write_text(output_dir / "evidence.md", table.to_markdown() + "\n")
    measured = [run.as_json() for run in runs]
    for values in measured:
        del values["by_count"]  # no reader decided anything
    values = {"labeler": reader.describe(known, texts), "ways": measured}
    write_json(output_dir / "evidence.json", values)
    return ConsistencyReport(runs, [table], known.num_read)
