"""Label consistency of runs or of ways to rank, by pseudo-labels (Guo et al. 2023, 4.1).

DIR/consistency.json                  scores, and queries by number of consistent evidence
DIR/consistency.md, .tex, .csv        the same as tables (.csv: the scores)
DIR/counts-TASK.csv                   queries and accuracy by number of consistent evidence
DIR/counts-TASK.png, scores-TASK.png  the same drawn, also as .svg
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
    CrossEncoderArguments,
    PgraArguments,
)
from pgra.core import ALONE, Context, Json
from pgra.data.corpus import Corpus, open_corpus
from pgra.errors import ArtifactError, ConfigError, DataError, unknown_name
from pgra.methods.pgra import find_evidence, read_task
from pgra.reader.record import RECORD_FILE, Reader, ReaderRecord, find_reader, read_record
from pgra.report.compare import Study, compare_runs, load_reference
from pgra.report.consistency import (
    Consistency,
    count_table,
    measure_consistency,
    merge_seeds,
    plot_counts,
    plot_scores,
    require_matplotlib,
    score_table,
)
from pgra.report.results import METRICS_FILE, Group, Run, load_collection, read_object
from pgra.report.tables import Table
from pgra.rerank.similarity import SIMILARITIES
from pgra.run_folder import Found

# Pseudo-labels of evidence: what a plain reader of the task says of each text alone.
#
#     FOLDER/TASK-CHECKSUM.jsonl   a text and its labels' probabilities a line
#
# No text is read twice: not where several queries, runs or calls share it. A labeler is known by
# its folder's checksums, so that another one's labels are never mixed in.


logger = logging.getLogger(__name__)

SAMPLE = 1000  # passages of a corpus: a share then has a standard error of 1.6 points at most
_SEED = 0
_KEPT_EVERY = 10_000
_LEAST = sys.float_info.min  # a probability may be 0 in float32


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
        """Give the checksum of its record, which holds those of its weights."""
        return file_checksum(self.home / RECORD_FILE)

    @property
    def note(self) -> str:
        """Word how good it is, as far as that is known."""
        told = f"{self.record.task}: pseudo-labels are those of {self.folder}"
        if not self.measured:
            return f"{told}."
        metric, value = self.measured["metric"], float(self.measured["value"])
        return f"{told}, whose {metric} on test queries is {value:.3f}; on evidence it is unknown."

    def describe(self) -> dict[str, Json]:
        """Say which it is, and how good."""
        return {
            "folder": str(self.folder),
            "checksum": self.checksum,
            "metric": self.measured.get("metric"),
            "value": self.measured.get("value"),
        }


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
    measured = read_object(path) if path.is_file() else {}
    return Labeler(folder, home, record, measured)


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
        """Give the median of each label's log-probability over the sample; empty without one."""
        if not self.sample:
            return {}
        logs = [_logs(self.scores[text]) for text in self.sample]
        return {label: float(np.median([one[label] for one in logs])) for label in logs[0]}

    @cached_property
    def labels(self) -> Mapping[str, str]:
        """Give each text's label: of the highest log-probability above its median, if centred.

        With two labels half of the sample then has each: the threshold is the median odds. Ties go
        to the task's first label.
        """
        return {text: self._label(scores, self.medians) for text, scores in self.scores.items()}

    def _label(self, scores: Mapping[str, float], medians: Mapping[str, float]) -> str:
        logs = _logs(scores)
        return max(logs, key=lambda label: logs[label] - medians.get(label, 0.0))

    def shares(self, texts: Sequence[str], *, is_centred: bool = True) -> dict[str, Json]:
        """Give the share of texts by label, in the labeler's order of labels.

        Args:
            texts: Labelled ones.
            is_centred: Whether as centred; else by the highest probability.
        """
        medians = self.medians if is_centred else {}
        said = Counter(self._label(self.scores[text], medians) for text in texts)
        return {label: said[label] / len(texts) for label in self.scores[texts[0]]}

    def describe(self, texts: Sequence[str]) -> dict[str, Json]:
        """Tell how labels were made, and the labels' shares before and after centring.

        Args:
            texts: The distinct evidence.
        """
        told: dict[str, Json] = {"is_centred": bool(self.sample)}
        sets = {"evidence": texts, **({"corpus": self.sample} if self.sample else {})}
        for name, own in sets.items():
            told[f"{name}_texts"] = len(own)
            told[f"{name}_labels_uncentred"] = self.shares(own, is_centred=False)
            if self.sample:
                told[f"{name}_labels"] = self.shares(own)
        return {**told, **({"medians": dict(self.medians)} if self.sample else {})}

    def note(self, task: str, texts: Sequence[str]) -> str:
        """Word the same for a reader of the scores."""
        before = _percents(self.shares(texts, is_centred=False))
        if not self.sample:
            return (
                f"{task}: the labeler is not centred (the paper's way); of the evidence {before}."
            )
        return (
            f"{task}: the labeler is centred at its medians over {len(self.sample)} passages of "
            f"the corpus: there {_percents(self.shares(self.sample, is_centred=False))} before, "
            f"{_percents(self.shares(self.sample))} after; of the evidence {before} before, "
            f"{_percents(self.shares(texts))} after."
        )


def _logs(scores: Mapping[str, float]) -> dict[str, float]:
    return {label: math.log(max(value, _LEAST)) for label, value in scores.items()}


def _percents(shares: Mapping[str, Json]) -> str:
    return ", ".join(f"{label} {100 * float(str(value)):.1f} %" for label, value in shares.items())


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
) -> PseudoLabels:
    """Give texts the label that a plain reader decides for; a text fills the task's first input.

    Args:
        labeler: The reader.
        texts: Distinct ones.
        folder: Keeps what it said, for other calls.
        sample: Distinct passages that it is centred at; none: it is not.
        device: What it reads on.

    Raises:
        ArtifactError: If what it said before is damaged.
        ModelError: As `Reader.load`.
    """
    name = labeler.checksum.rpartition(":")[2][:12]
    path = folder / f"{labeler.record.task}-{name}.jsonl"
    known = _read_scores(path)
    missing = [text for text in dict.fromkeys([*texts, *sample]) if text not in known]
    logger.info(
        "labeler %s: %d distinct evidence texts of %s and %d passages to centre it, %d to read",
        labeler.folder,
        len(texts),
        labeler.record.task,
        len(sample),
        len(missing),
    )
    if missing:
        reader = Reader.load(labeler.home, device=device)
    for start in range(0, len(missing), _KEPT_EVERY):  # what is read stays when it is stopped
        part = missing[start : start + _KEPT_EVERY]
        decided = reader.predict(part, [], progress=True)
        known |= {text: dict(one.scores) for text, one in zip(part, decided, strict=True)}
        write_lines(path, [{"text": text, "scores": scores} for text, scores in known.items()])
    return PseudoLabels(known, len(missing), sample)


def distinct_evidence(
    runs: Sequence[Sequence[Mapping[str, Any]]], depth: int | None = None
) -> list[str]:
    """Give the texts of all evidence (or of each query's best), each once, in the order met.

    Args:
        runs: The lines of each one's `predictions.jsonl`.
        depth: How many of a query's best; None is all.
    """
    seen = (text for lines in runs for line in lines for text in line["evidence"][:depth])
    return list(dict.fromkeys(str(text["text"]) for text in seen))


def _read_scores(path: Path) -> dict[str, dict[str, float]]:
    if not path.is_file():
        return {}
    try:
        with path.open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        # An older version kept labels alone, which cannot be centred: such texts are read again.
        scored = [row for row in rows if "scores" in row]
        return {row["text"]: {k: float(v) for k, v in row["scores"].items()} for row in scored}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{path} is damaged ({error}): delete it and run again") from None


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


# Label consistency of what each way finds (Guo et al. 2023, section 4.1), with no reader trained.
#
# Similarities, prompts and corpora can so be compared in minutes: the LM's states are in the bank,
# and a plain reader that is there already labels each text once.


RANDOM, FIRST_STAGE = "random", "first stage"
_EXHAUSTIVE = "exhaustive "
Lines = Sequence[Mapping[str, Any]]


def ways_of(args: PgraArguments) -> dict[str, PgraArguments]:
    """Give the arguments of each way, by name: chance, the first stage, and each similarity.

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
    plain = CrossEncoderArguments()  # no flag of the reranker that is left out
    none = replace(
        args.rerank,
        reranker="none",
        cross_encoder=plain.cross_encoder,
        cross_encoder_tokens=plain.cross_encoder_tokens,
    )
    chance = replace(args.retriever, retriever="random")
    ways = {
        RANDOM: replace(args, retriever=chance, rerank=none),
        FIRST_STAGE: replace(args, rerank=none),
    }
    if args.rerank.reranker != "prompted":  # it has no states to compare in several ways
        return {**ways, args.rerank.reranker: args}
    everything = replace(args.retriever, retriever="exhaustive")
    for name in PAIR_SIMILARITIES if args.rerank.exemplars == "knn" else SIMILARITIES:
        own = replace(args, rerank=replace(args.rerank, similarity=name))
        ways[name] = own
        if args.rerank.bank == "full" and args.rerank.num_prefixes == 1:
            ways[_EXHAUSTIVE + name] = replace(own, retriever=everything)
    return ways


@dataclass(frozen=True)
class EvidenceStudy:
    """What was measured.

    Attributes:
        runs: By way and depth, in the order of the table.
        table: The same, with differences to the first stage.
    """

    runs: Sequence[Consistency]
    table: Table


def compare_evidence(
    args: PgraArguments,
    labeler: Path,
    output_dir: Path,
    *,
    depths: Sequence[int] = (),
    centre: bool = True,
    context: Context = ALONE,
) -> EvidenceStudy:
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
    found, lines = _find_all(args, context)
    labels = list(found.task.labels)
    if sorted(reader.record.words) != sorted(labels):
        raise ConfigError(
            f"{labeler} decides {', '.join(reader.record.words)}, and {found.task.name} has "
            f"{', '.join(labels)}: give a plain run of this task"
        )
    texts = distinct_evidence(list(lines.values()))
    corpora = [open_corpus(args.corpus, args.artifacts, is_quiet=True)] if centre else []
    known = label_texts(
        *(reader, texts, output_dir / "pseudo_labels"),
        sample=sample_corpora(corpora),
        device=args.runtime.device,
    )
    runs = [
        measure_consistency(way, found.task.name, told, known.labels, labels=labels, depth=depth)
        for depth in depths or (most,)
        for way, told in lines.items()
    ]
    tables = [
        score_table([r for r in runs if r.depth == depth], baseline=FIRST_STAGE, paper={})
        for depth in depths or (most,)
    ]
    notes = [*tables[0].notes, reader.note, known.note(found.task.name, texts)]
    rows = [row for table in tables for row in table.rows]
    table = replace(tables[0], rows=rows, notes=notes)
    write_text(output_dir / "evidence.md", table.to_markdown() + "\n")
    told: dict[str, Json] = {**reader.describe(), **known.describe(texts)}
    write_json(
        output_dir / "evidence.json",
        {"labeler": told, "ways": [_without_answers(run) for run in runs]},
    )
    return EvidenceStudy(runs, table)


def _without_answers(run: Consistency) -> dict[str, Any]:
    """Give what was measured; no reader decided anything."""
    return {key: value for key, value in run.as_json().items() if key != "by_count"}


def _find_all(args: PgraArguments, context: Context) -> tuple[Found, dict[str, Lines]]:
    lines: dict[str, Lines] = {}
    ways, task = ways_of(args), read_task(args)
    for way, own in ways.items():
        found = replace(task.copy(), candidates={}, evidence={})
        find_evidence(found, own, context, splits=("test",))
        told = zip(found.examples("test"), found.evidence_texts("test"), strict=True)
        lines[way] = [
            {
                "id": example.id,
                "label": example.label,
                "prediction": None,
                "evidence": [{"text": text} for text in texts],
            }
            for example, texts in told
        ]
    return task, lines
