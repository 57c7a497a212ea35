"""Reports to look at: one HTML page with the verdict, tables, figures and a browser of examples.

Nothing in the page asks for anything outside: style and script stand in it, and its
Content-Security-Policy allows no other (by their sha256), nor any request. All text of runs is
escaped by Jinja2; the script gets it as JSON without `<`, and puts it into text nodes.
"""

import base64
import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from pgra.core import Json
from pgra.errors import ArtifactError, ConfigError
from pgra.report.compare import Study, detail_table, front_table, verdict
from pgra.report.figures import (
    Drawing,
    draw_losses,
    draw_ranks,
    draw_reliability,
    draw_values,
    number_axis,
    read_calibration,
    runs_of,
)
from pgra.report.metrics import RIGHT, WRONG
from pgra.report.results import (
    CONSISTENCY_FILE,
    PREDICTIONS_FILE,
    Group,
    Run,
    read_object,
    row_names,
)
from pgra.report.tables import Cell, Table

_ASSETS = Path(__file__).parent / "assets"
PAGES = (".html", ".htm")
_MOST_LABELS = 8
"""Of a confusion matrix that a phone shows; of more labels the most confused pairs are listed."""
_MOST_PAIRS = 10
_WIDTH = 160
"""Of the picture of an interval."""


# The page.


def page_title(studies: Sequence[Study]) -> str:
    """Return a grid's own title; of other runs their tasks and methods."""
    groups = [study.group for study in studies]
    if len(groups) == 1 and groups[0].points:
        return groups[0].title
    tasks = dict.fromkeys(task for study in studies for task in study.tasks)
    rows = list(dict.fromkeys(run.method for study in studies for run in _in_order(study)))
    few = " and ".join([", ".join(rows[:-1]), rows[-1]] if rows[1:] else rows)
    return f"{', '.join(tasks)}: {few if len(rows) < 5 else f'{len(rows)} methods'}"


def render_page(
    title: str,
    studies: Sequence[Study],
    consistency: Mapping[str, "ByRank"] | None = None,
    *,
    lead: str = "",
) -> str:
    """Return the page's text.

    Args:
        title: Of the page.
        studies: What it tells, in order.
        consistency: By task, as `read_consistency` reads it.
        lead: What stands above the verdict, its line breaks kept.

    Raises:
        ArtifactError: If a run's files are damaged.
        ConfigError: If a run is measured on texts: the page sorts examples into right and wrong.
    """
    from jinja2 import Environment, FileSystemLoader

    runs = [run for study in studies for run in study.group.runs]
    for run in runs:
        if run.decisions is None:
            raise ConfigError(
                f"--html shows which examples are right, and {run.task} of {run.folder} is a "
                "measure of texts that are neither: leave --html out, or that run"
            )
    style, script = ((_ASSETS / name).read_text("utf-8") for name in ("page.css", "page.js"))
    environment = Environment(
        loader=FileSystemLoader(_ASSETS), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters["numeric"] = numeric_columns
    notes = [
        note
        for study in studies
        for t in (front_table(study), detail_table(study))
        for note in t.notes
    ]
    data = browser_data([replace(study.group, runs=_in_order(study)) for study in studies])
    page = environment.get_template("page.html").render(
        title=title,
        lead=lead,
        facts=_facts(studies),
        style=style,
        style_hash=policy_hash(style),
        script=script,
        script_hash=policy_hash(script),
        parts=[_part(study, consistency or {}) for study in studies],
        notes=list(dict.fromkeys(notes)),
        width=_WIDTH,
        data=data,
    )
    # Half of a surrogate pair, which JSON may hold and UTF-8 may not, becomes a question mark.
    return page.encode("utf-8", "replace").decode("utf-8")


def policy_hash(text: str) -> str:
    """Return a text's hash as a Content-Security-Policy has it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def numeric_columns(table: Table) -> list[bool]:
    """Say which columns hold numbers, which stand to the right."""
    columns = zip(*table.rows, strict=True)
    return [
        number > 0 and all(re.match(r"[-+<\d ]|missing$|$", cell.text) for cell in column)
        for number, column in enumerate(columns)
    ]


def _in_order(study: Study) -> list[Run]:
    """Return a study's runs in the order of its table's rows, then of tasks and seeds."""
    return [run for row in study.rows for task in study.tasks for run in runs_of(study, row, task)]


def _facts(studies: Sequence[Study]) -> dict[str, str]:
    """Say what was run: task, sizes, models, seeds, when and with which code."""
    runs = [run for study in studies for run in _in_order(study)]
    tasks: dict[str, list[Run]] = {}
    for run in runs:
        tasks.setdefault(run.task, []).append(run)
    sizes = []
    for task, own in tasks.items():
        told = [f"{own[0].metrics['n']:,} {own[0].metrics.get('split', 'test')}"]
        for split in ("dev", "train"):
            counts = {run.metrics.get("sizes", {}).get(split) for run in own} - {None}
            told += [f"{_span(counts)} {split}"] if counts else []
        sizes.append((f"{task}: " if len(tasks) > 1 else "") + ", ".join(reversed(told)))
    missing = {gone.folder for study in studies for gone in study.group.missing}
    commits = _distinct_words(str(run.metrics.get("git_commit") or "")[:7] for run in runs)
    versions = _distinct_words(run.metrics.get("versions", {}).get("pgra") for run in runs)
    days = sorted(filter(None, (_day(run.metrics.get("date")) for run in runs)))
    facts = {
        "Task": ", ".join(f"{task} ({own[0].metric})" for task, own in tasks.items()),
        "Examples": "; ".join(sizes),
        "Corpus": ", ".join(_corpora(runs)),
        "Encoder": ", ".join(_models(runs, "encoder")),
        "Language model": ", ".join(_models(runs, "lm")),
        "Reader": ", ".join(_models(runs, "model_name_or_path")),
        "Seeds": ", ".join(map(str, sorted({run.seed for run in runs}))),
        "Runs": f"{len({run.folder for run in runs})}"
        + (f"; {len(missing)} more of the grid are missing" if missing else ""),
        "Date": " to ".join(dict.fromkeys(f"{day:%-d %B %Y}" for day in (days[:1] + days[-1:]))),
        "Code": " ".join(
            filter(
                None,
                [
                    f"pgra {', '.join(versions)}" if versions else "",
                    f"(commit {', '.join(commits)})" if commits else "",
                ],
            )
        ),
    }
    return {name: text for name, text in facts.items() if text}


def _span(counts: set[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _distinct_words(words: Any) -> list[str]:
    return list(dict.fromkeys(str(word) for word in words if word))


def _day(told: Json) -> datetime | None:
    try:
        return datetime.fromisoformat(str(told))
    except ValueError:
        return None


def _corpus(run: Run) -> str:
    """Return the corpus' name, without its folder."""
    named = run.setting("corpus.corpus")
    names = named if isinstance(named, list) else [named]
    return " + ".join(str(name).rstrip("/").rpartition("/")[2] for name in names)


def _corpora(runs: Sequence[Run]) -> list[str]:
    """Return each corpus that was searched and, where it is known, how many passages it has."""
    sizes: dict[str, set[int]] = {}
    for run in (run for run in runs if "corpus.corpus" in run.settings):
        index = run.metrics.get("fingerprints", {}).get("index")
        rows = index.get("rows") if isinstance(index, Mapping) else None
        sizes.setdefault(_corpus(run), set()).update([rows] if isinstance(rows, int) else [])
    return [f"{name} ({_span(n)} passages)" if n else name for name, n in sizes.items()]


def _models(runs: Sequence[Run], key: str) -> list[str]:
    """Return the distinct values of an argument that names a model, in any section."""
    found = (v for run in runs for n, v in run.settings.items() if n.rpartition(".")[2] == key)
    return _distinct_words(found)


# A study's part of the page.


@dataclass(frozen=True)
class Confusion:
    """Which labels one row took for which, all seeds together.

    Attributes:
        names: The labels, in the task's order.
        counts: True label by decided label.
        shades: Share of the true label's examples in tenths, of the same shape.
        recall: Of each true label, the share that was found, in hundredths.
        precision: Of each decided label, the share that is true; None where it was never decided.
        pairs: The most frequent mistakes: true label, decided label, how often.
    """

    names: Sequence[str]
    counts: Sequence[Sequence[int]]
    shades: Sequence[Sequence[int]]
    recall: Sequence[float | None]
    precision: Sequence[float | None]
    pairs: Sequence[tuple[str, str, int]]

    @property
    def is_small(self) -> bool:
        """Whether it is shown as a matrix."""
        return len(self.names) <= _MOST_LABELS


def count_confusion(runs: Sequence[Run]) -> Confusion | None:
    """Count a row's decisions; None where there are no labels but right and wrong."""
    known = [run.decisions for run in runs if run.decisions is not None]
    names = list(dict.fromkeys(name for one in known for name in one.names))
    if not known or set(names) <= {RIGHT, WRONG}:
        return None
    place = {name: number for number, name in enumerate(names)}
    counts = np.zeros((len(names), len(names)), np.int64)
    for one in known:
        for label, said in zip(one.labels, one.predicted, strict=True):
            counts[place[label], place[said]] += 1
    true, said = counts.sum(axis=1), counts.sum(axis=0)
    shades = np.rint(10 * counts / np.maximum(true, 1)[:, None]).astype(np.int64)
    wrong = np.argwhere((counts > 0) & ~np.eye(len(names), dtype=bool)).tolist()
    wrong.sort(key=lambda cell: -int(counts[cell[0], cell[1]]))
    pairs = [(names[i], names[j], int(counts[i, j])) for i, j in wrong[:_MOST_PAIRS]]
    diagonal = np.diagonal(counts)
    recall, precision = (
        [100 * int(right) / int(n) if n else None for right, n in zip(diagonal, of, strict=True)]
        for of in (true, said)
    )
    return Confusion(names, counts.tolist(), shades.tolist(), recall, precision, pairs)


def _part(study: Study, consistency: Mapping[str, "ByRank"]) -> dict[str, Any]:
    """Gather what the page tells of a study."""
    is_one = len(study.columns) == 1
    charts: list[Drawing] = []
    if not is_one or number_axis(study):
        charts += [draw_values(study, column) for column in study.columns]
    for task in study.tasks:
        charts += [found for found in [draw_losses(study, task)] if found]
        charts += [found for found in [_draw_consistency(study, task, consistency)] if found]
    mistakes = [card for task in study.tasks for card in _mistakes(study, task)]
    return {
        "title": study.group.title,
        "verdict": verdict(study),
        "caption": f"{study.columns[0]}, in hundredths" if is_one else "By task, in hundredths",
        "table": front_table(study),
        "pictures": _pictures(study, study.columns[0]) if is_one else {},
        "detail": detail_table(study),
        "charts": charts,
        "first": [card for card in mistakes if card["is_first"]],
        "others": [card for card in mistakes if not card["is_first"]],
        "evidence": _evidence_table(study),
        "cost": _cost_table(study),
    }


def _pictures(study: Study, column: str) -> dict[str, Any]:
    """Return by row where its interval, its mean and its seeds stand on one scale."""
    found = {
        row: study.results[row, column] for row in study.rows if (row, column) in study.results
    }
    values = [v for r in found.values() for v in (r.interval or ())]
    values += [run.value for r in found.values() for run in r.runs]
    low, high = min(values), max(values)

    def at(value: float) -> float:
        return round(6 + (_WIDTH - 12) * (value - low) / (high - low or 1.0), 1)

    base = found.get(study.baseline or "")
    return {
        row: {
            "ends": [at(end) for end in result.interval or (result.spread.mean,) * 2],
            "mean": at(result.spread.mean),
            "seeds": [at(run.value) for run in result.runs] if len(result.runs) > 1 else [],
            "base": base and at(base.spread.mean),
        }
        for row, result in found.items()
    }


@dataclass(frozen=True)
class ByRank:
    """Label consistency on a task by the evidence's rank.

    Attributes:
        shares: Of ranks 1, 2, ..., by row.
        majority: Share of the queries that have the commonest label.
    """

    shares: Mapping[str, Sequence[float]]
    majority: float


def read_consistency(folder: Path) -> dict[str, ByRank]:
    """Read what `pgra consistency` wrote to a folder, by task.

    Raises:
        ArtifactError: If it is missing, damaged, or of a version that kept no ranks.
    """
    path = folder / CONSISTENCY_FILE
    if not path.is_file():
        raise ArtifactError(f"{path} is not there: give the --output_dir of pgra consistency")
    tasks: dict[str, ByRank] = {}
    values = read_object(path)
    try:
        for run in values["runs"]:
            own = tasks.setdefault(str(run["task"]), ByRank({}, float(run["majority"])))
            ranks = {str(run["name"]): [float(share) for share in run["by_rank"]]}
            tasks[str(run["task"])] = replace(own, shares={**own.shares, **ranks})
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{path} lacks {error}: run pgra consistency again with --output_dir {folder}"
        ) from None
    return tasks


def _draw_consistency(study: Study, task: str, told: Mapping[str, ByRank]) -> Drawing | None:
    """Draw how consistent evidence is by its rank, of the rows that were measured."""
    known = told.get(task, ByRank({}, 0.0))
    shares = {row: known.shares[row] for row in study.rows if known.shares.get(row)}
    if not shares:
        return None
    title = f"{task}: evidence with the query's label, by rank (dashed: majority rate)"
    return draw_ranks(shares, title, {"majority rate": known.majority})


def _mistakes(study: Study, task: str) -> list[dict[str, Any]]:
    """Return what each row took for what, and how sure it was; the baseline and the best first."""
    values = {
        row: study.results[row, task].spread.mean
        for row in study.rows
        if (row, task) in study.results
    }
    best = sorted(values, key=lambda row: (row != study.baseline, -values[row]))[:2]
    cards = []
    for row in values:
        runs = runs_of(study, row, task)
        sure = read_calibration(runs)
        card = {
            "name": f"{row}, {task}" if len(study.tasks) > 1 else row,
            "seeds": len(runs),
            "confusion": count_confusion(runs),
            "reliability": None if sure is None else draw_reliability(sure),
            "is_first": task == study.tasks[0] and row in best,
        }
        if card["confusion"] or card["reliability"]:
            cards.append(card)
    return cards


def _evidence_table(study: Study) -> Table | None:
    """Say of each row's evidence what its reranker changed; None where nothing is read."""
    rows = []
    for row in study.rows:
        for task in study.tasks:
            for run in runs_of(study, row, task)[:1]:
                lists = [found for line in run.predictions if (found := line.get("evidence"))]
                ranks = [
                    (int(one["stage1_rank"]), len(found))
                    for found in lists
                    for one in found
                    if one.get("stage1_rank")
                ]
                if not ranks:
                    continue
                kept = sum(rank <= depth for rank, depth in ranks) / len(ranks)
                texts = len({one["text"] for found in lists for one in found})
                cells = [Cell(row), *([Cell(task)] if len(study.tasks) > 1 else [])]
                cells += [Cell(str(max(map(len, lists)))), Cell.of(100 * kept, ".0f")]
                cells += [Cell.of(float(np.median([rank for rank, _ in ranks])), ".0f")]
                cells.append(Cell(f"{texts:,} of {len(ranks):,}"))
                rows.append(cells)
    if not rows:
        return None
    columns = [*("method", "task")[: 1 + (len(study.tasks) > 1)], "evidence a query"]
    columns += ["% of it the first stage's best", "median rank there", "distinct texts"]
    return Table("", columns, rows)


def _cost_table(study: Study) -> Table | None:
    """Return the seconds of each stage of each row's first run; None where none are kept."""
    runs = {row: runs_of(study, row, study.tasks[0])[:1] for row in study.rows}
    kept = {row: own[0].metrics.get("seconds") or {} for row, own in runs.items() if own}
    stages = list(dict.fromkeys(stage for own in kept.values() for stage in own))
    rows = [
        [Cell(row), *(Cell.of(own.get(stage), ",.0f") for stage in stages)]
        for row, own in kept.items()
    ]
    return Table("", ["method", *stages], rows) if stages else None


# What the page's browser of examples looks through, as one value for JSON.
#
# Texts, and lists of evidence that several runs share (the seeds of one method do), stand there
# once: 10,000 queries of several runs stay a page that opens.


MOST_EVIDENCE = 16
"""How many of a query's evidence the page holds: the paper's d."""
_CHANCE_DIGITS = 5
_SCORE_DIGITS = 7  # dot products are in the thousands, and differ in the first decimal


def _numbering() -> "defaultdict[Any, int]":
    """Return a table that numbers what is looked up in it, from 0, as it is first met."""
    table: defaultdict[Any, int] = defaultdict()
    table.default_factory = table.__len__
    return table


def browser_data(groups: Sequence[Group], *, most_evidence: int = MOST_EVIDENCE) -> dict[str, Any]:
    """Gather all examples, with what each run read and said.

    Args:
        groups: Runs; those of one test set are laid side by side, whatever group they are of.
        most_evidence: How many of each query's evidence are kept, from the best.

    Returns:
        `{"texts": [...], "tasks": [...]}`, as `assets/page.js` describes it.

    Raises:
        ArtifactError: If a run's predictions are damaged.
    """
    sets: dict[tuple[str, str], dict[Path, tuple[str, Run]]] = {}
    for group in groups:
        for row, run in zip(row_names(group), group.runs, strict=True):
            known = sets.setdefault((run.task, run.examples), {})
            known.setdefault(run.folder.resolve(), (row, run))
    texts, tasks = _numbering(), []
    for name, runs in zip(_distinct([task for task, _ in sets]), sets.values(), strict=True):
        labels, lists, laid = _numbering(), _numbering(), []
        methods = [row for row, _ in runs.values()]
        names = [
            f"{row} (seed {run.seed})" if methods.count(row) > 1 else row
            for row, run in runs.values()
        ]
        for run_name, (row, run) in zip(_distinct(names), runs.values(), strict=True):
            try:
                own = _run_data(run.predictions, labels, lists, texts, most_evidence)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ArtifactError(
                    f"{run.folder / PREDICTIONS_FILE} is damaged ({type(error).__name__}: {error}):"
                    f" leave {run.folder} out, or run it again in another folder"
                ) from None
            laid.append({"name": run_name, "method": row, **own})
        lines = next(iter(runs.values()))[1].predictions
        task = {
            "name": name,
            "ids": [str(line["id"]) for line in lines],
            "queries": [texts[str(line["text"])] for line in lines],
            "gold": [-1 if line["label"] is None else labels[line["label"]] for line in lines],
        }
        tasks.append({**task, "labels": list(labels), "lists": list(lists), "runs": laid})
    return {"texts": list(texts), "tasks": tasks}


def _distinct(names: Sequence[str]) -> list[str]:
    """Number the names that stand there already: "sst2", "sst2 (2)"."""
    given: list[str] = []
    for name in names:
        number, mine = 1, name
        while mine in given:
            number += 1
            mine = f"{name} ({number})"
        given.append(mine)
    return given


def _run_data(
    lines: Sequence[Mapping[str, Any]],
    labels: "defaultdict[Any, int]",
    lists: "defaultdict[Any, int]",
    texts: "defaultdict[Any, int]",
    most: int,
) -> dict[str, Json]:
    answers, chances, evidence, attention = [], [], [], []
    for line in lines:
        scores, seen = line.get("scores") or {}, line.get("evidence") or []
        # Before the answer, for their order is the task's.
        chances.append([[labels[k], _rounded(v, _CHANCE_DIGITS)] for k, v in scores.items()])
        answers.append(labels[line["prediction"]])
        flat: list[float | int | None] = []
        for item in seen[:most]:
            flat += [texts[str(item["text"])], item.get("stage1_rank")]
            flat += [_rounded(item.get(k), _SCORE_DIGITS) for k in ("stage1_score", "score")]
        evidence.append(lists[tuple(flat)])
        attention.append([_rounded(item.get("attention"), _CHANCE_DIGITS) for item in seen[:most]])
    is_known = any(share is not None for shares in attention for share in shares)
    return {
        "answers": answers,
        "chances": chances,
        "evidence": evidence,
        "attention": attention if is_known else None,
        "read": max((len(line.get("evidence") or []) for line in lines), default=0),
    }


def _rounded(value: float | None, digits: int) -> float | None:
    """Keep as many digits as a person reads; None for what is no number."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")
