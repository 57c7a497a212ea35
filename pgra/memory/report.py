"""What a memory is worth: accuracy of the streams, the gaps between systems, the choice of a gate.

Acc(u) is the accuracy of the understanding, Acc(y) that of the answer (Madaan et al. 2022, section
4). Systems are compared on the same steps, by seed, with McNemar's test.
"""

import logging
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from statistics import correlation, fmean
from typing import Any

from pgra.artifacts import write_text
from pgra.core import Json
from pgra.errors import DataError
from pgra.memory.families import Family
from pgra.memory.lookup import OpenLookup
from pgra.memory.memory import Memory
from pgra.memory.stream import Step, StepOutcome
from pgra.report.metrics import combine_p, mcnemar, mean_sd_interval
from pgra.report.tables import Cell, Table

logger = logging.getLogger(__name__)

SYSTEMS = ("no-mem", "grow", "mem")
LAST = 100  # steps at the end whose accuracy is reported apart
REPORT_FILE, FIGURE_FILE = "report.md", "running.png"
_SAMPLES = 6
_TITLES = {"no-mem": "NO-MEM", "grow": "GROW-PROMPT", "mem": "MEM-PROMPT"}


@dataclass(frozen=True)
class Variant:
    """One stream by a system of `SYSTEMS`, with a clarification probability (0 for no-mem).

    The seed is that of the user's draws, and of a stream that is shuffled.
    """

    system: str
    probability: float
    seed: int

    @property
    def name(self) -> str:
        part = "" if self.system == "no-mem" else f"-p{self.probability:g}"
        return f"{self.system}{part}-seed{self.seed}"

    @property
    def title(self) -> str:
        """Its name in tables, without the seed."""
        part = "" if self.system == "no-mem" else f", p = {self.probability:g}"
        return f"{_TITLES[self.system]}{part}"


@dataclass(frozen=True)
class StreamResult:
    """A variant with its steps, and the metrics of `measure` and `compare_with`."""

    variant: Variant
    metrics: dict[str, Any]
    outcomes: list[StepOutcome]

    def marks(self, name: str) -> list[bool]:
        """Return whether each step was `name`: "understood" or "answered"."""
        return [getattr(step, name) for step in self.outcomes]


# What a stream measured.


def running_accuracy(outcomes: Sequence[bool]) -> list[float]:
    """Return the accuracy of the steps up to each, (n,), as the paper plots it."""
    return [total / number for number, total in enumerate(accumulate(outcomes), 1)]


def correlate(first: Sequence[bool], second: Sequence[bool]) -> float | None:
    """Return the correlation of two outcomes (phi); None if either is constant."""
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return correlation(list(map(float, first)), list(map(float, second)))


def measure(outcomes: Sequence[StepOutcome]) -> dict[str, Json]:
    """Measure a whole stream, its steps in order.

    Accuracy of the understanding and of the answer (of all steps, of the last 100, and the area
    under the running curve); by type; tokens of prompts and outputs; of look-ups how many were
    used, and the shares of those whose question was understood (the paper's "effective", 97 %) and
    of those given for another type.
    """
    understood = [step.understood for step in outcomes]
    kinds = sorted({step.kind for step in outcomes})
    used = [step for step in outcomes if step.used_memory]
    return {
        "n": len(outcomes),
        "understood": fmean(understood),
        "understood_area": fmean(running_accuracy(understood)),
        f"understood_last_{LAST}": fmean(understood[-LAST:]),
        "understood_by_type": {
            kind: fmean(step.understood for step in outcomes if step.kind == kind) for kind in kinds
        },
        "answered": fmean(step.answered for step in outcomes),
        "answered_area": fmean(running_accuracy([step.answered for step in outcomes])),
        "clarifications": sum(step.clarified for step in outcomes),
        "prompt_tokens": _sum_known(step.num_prompt_tokens for step in outcomes),
        "new_tokens": _sum_known(step.num_new_tokens for step in outcomes),
        "lookups": {
            "used": len(used),
            "effective": fmean(step.understood for step in used) if used else None,
            "wrong_type": fmean(step.is_wrong_kind for step in used) if used else None,
        },
    }


def compare_with(outcomes: Sequence[StepOutcome], bare: Sequence[StepOutcome]) -> dict[str, Json]:
    """Compare the steps with a clarification with the same ones of NO-MEM (`bare`).

    Returns the shares of them that are understood only with it (helped), only without it (hurt),
    and the rest; None without such steps.
    """
    pairs = [
        (step.understood, other.understood)
        for step, other in zip(outcomes, bare, strict=True)
        if step.used_memory
    ]
    if not pairs:
        return {"helped": None, "hurt": None, "no_change": None}
    helped = fmean(now and not before for now, before in pairs)
    hurt = fmean(before and not now for now, before in pairs)
    return {"helped": helped, "hurt": hurt, "no_change": 1 - helped - hurt}


# How well a gate tells right from wrong feedback.


@dataclass(frozen=True)
class GateReport:
    """What a threshold does.

    Attributes:
        precision: Share of what passes that is right.
        recall: Share of the questions with a right key in the memory that get it; None: no such.
        f1: The harmonic mean of both; 0 where nothing is right.
    """

    threshold: float
    precision: float
    recall: float | None
    f1: float
    num_trials: int


def judge_thresholds(steps: Sequence[Step], open_lookup: OpenLookup) -> list[GateReport]:
    """Return a report of each score met, the largest first, used as the threshold.

    Each question is looked up among those before it, as if all of them had been clarified.
    """
    nearest, wanted, meanings = list[tuple[float, bool]](), 0, dict[int, str]()  # by entry
    with Memory(":memory:", lookup=open_lookup) as memory:
        for step in steps:
            wanted += step.meaning in meanings.values()
            for match in memory.search(step.question):
                nearest.append((match.score, meanings[match.id] == step.meaning))
            meanings[memory.add(step.question, step.feedback).id] = step.meaning
    reports = []
    for threshold in sorted({score for score, _ in nearest}, reverse=True):
        passed = [is_right for score, is_right in nearest if score >= threshold]
        right, f1 = sum(passed), 2 * sum(passed) / (len(passed) + wanted)
        recall = right / wanted if wanted else None
        reports.append(GateReport(threshold, right / len(passed), recall, f1, len(steps)))
    return reports


def choose_threshold(steps: Sequence[Step], open_lookup: OpenLookup) -> GateReport:
    """Choose the threshold with the largest F1, of equals the strictest.

    Raises:
        DataError: If no look-up found a right key, or all questions mean the same (as those of a
            family of answers, which have no types).
    """
    has_types = len({step.meaning for step in steps}) > 1
    reports = judge_thresholds(steps, open_lookup) if has_types else []
    best = max(reports, key=lambda report: report.f1, default=None)
    if best is None or not best.f1:
        raise DataError(
            f"no threshold can be chosen from {len(steps)} questions: no look-up finds a key of "
            "the same meaning and not of all; give a longer dev stream, of several types, or "
            "--threshold"
        )
    return best


# Is one system of a memory better than another?


def compare_methods(results: Iterable[StreamResult]) -> list[list[str]]:
    """Compare as the paper does: GROW with NO-MEM, MEM with both, each p with the next lower.

    Returns rows of a table over shared seeds: the pair; its gaps in accuracy of the understanding,
    over all steps and in area under the running curves; p of McNemar's tests, combined over seeds
    (`combine_p`); the ratio of prompt tokens.
    """
    rows, groups = [], dict[tuple[str, float], dict[int, StreamResult]]()
    for result in results:
        variant = result.variant
        groups.setdefault((variant.system, variant.probability), {})[variant.seed] = result
    for (system, p), mine in groups.items():
        others = [("no-mem", 0.0), ("grow", p)][: SYSTEMS.index(system)]
        lower = [q for other, q in groups if other == system and q < p]
        others += [(system, max(lower))] if lower else []
        for theirs in [groups[other] for other in others if other in groups]:
            pairs = [(mine[seed], theirs[seed]) for seed in sorted({*mine} & {*theirs})]
            final, area, tokens = (
                [[pair[side].metrics[name] for pair in pairs] for side in (0, 1)]
                for name in ("understood", "understood_area", "prompt_tokens")
            )
            ratio = None if None in chain(*tokens) else sum(tokens[0]) / max(1, sum(tokens[1]))
            tests = [mcnemar(a.marks("understood"), b.marks("understood")) for a, b in pairs]
            rows.append(
                [
                    f"{pairs[0][0].variant.title} - {pairs[0][1].variant.title}",
                    *(_with_sd(map(operator.sub, *both), "+.3f") for both in (final, area)),
                    f"{combine_p(tests):.2g}",
                    _number(ratio),
                ]
            )
    return rows


# Streams beside each other and the paper's numbers, as a table and a figure.


def write_report(
    folder: Path, family: Family, results: Sequence[StreamResult], *, gate: GateReport | None
) -> str:
    """Write the table and the figure; return the table's text.

    `gate` is how the threshold was chosen; None where it was given.
    """
    text = render_report(family, results, gate=gate)
    write_text(folder / REPORT_FILE, text)
    plot_running(folder / FIGURE_FILE, results)
    return text


def render_report(family: Family, results: Sequence[StreamResult], gate: GateReport | None) -> str:
    """Render the tables as Markdown: means over the seeds, and the paper's values below."""
    groups = _name_groups(results)
    parts = [
        f"# A memory of corrections: {family.name}, {results[0].metrics['n']} steps",
        _accuracy_table(family, groups),
    ]
    if family.situations is not None:  # how far answers are right where they are understood: 4.1.1
        cells = []
        for title, group in groups.items():
            understood, answered = (
                [mark for result in group for mark in result.marks(name)]
                for name in ("understood", "answered")
            )
            cells.append(f"{title} {_number(correlate(understood, answered)) or 'none'}")
        parts.append(
            f"Correlation of understanding and answer, question by question: {'; '.join(cells)}."
        )
    head = ["understood, gap of", "all", "area", "p (McNemar)", "prompt tokens, ratio"]
    parts.append(_markdown(head, compare_methods(results)))
    rows = [
        [
            title,
            f"{_mean(group, 'lookups', 'used') or 0.0:.0f}",
            *(_number(_mean(group, "lookups", name)) for name in ("effective", "wrong_type")),
            *(_number(_mean(group, "against_no_mem", name)) for name in ("helped", "hurt")),
        ]
        for title, group in groups.items()
        if group[0].variant.system == "mem"
    ]
    head = ["look-ups", "used", "understood after", "wrong type", "helped", "hurt"]
    parts.append(_markdown(head, rows))
    if gate is not None:
        parts.append(
            f"Gate: scores of at least {gate.threshold:.4g} pass, chosen on {gate.num_trials} "
            f"other questions (precision {_number(gate.precision)}, recall {_number(gate.recall)})."
        )
    parts.append(_sample_table(results))
    return "\n\n".join(part for part in parts if part) + "\n"


def _name_groups(results: Sequence[StreamResult]) -> dict[str, list[StreamResult]]:
    """Group results by the variant's title, over seeds."""
    groups = defaultdict[str, list[StreamResult]](list)
    for result in results:
        groups[result.variant.title].append(result)
    seeds = {title: f" ({len(group)} seeds)" for title, group in groups.items() if len(group) > 1}
    return {f"{title}{seeds.get(title, '')}": group for title, group in groups.items()}


def _accuracy_table(family: Family, groups: Mapping[str, Sequence[StreamResult]]) -> str:
    kinds, rows = family.kinds, []
    for title, group in groups.items():
        spreads = [
            _with_sd([result.metrics[name] for result in group], ".2f")
            for name in ("understood", "understood_area", f"understood_last_{LAST}", "answered")
        ]
        by_kind = [_number(_mean(group, "understood_by_type", kind)) for kind in kinds]
        tokens = _number(_mean(group, "prompt_tokens"), ",.0f")
        rows.append([title, *by_kind, *spreads, tokens])
    for system, printed in family.paper.items():
        cells = [_number(printed.get(kind)) for kind in (*kinds, "all")]
        rows.append([f"{_TITLES[system]}, paper (GPT-3)", *cells, "", "", "", ""])
    head = ["understood", *kinds, "all", "area", f"last {LAST}", "answered", "prompt tokens"]
    return _markdown(head, rows)


def _sample_table(results: Sequence[StreamResult]) -> str:
    """Show steps through time, as the paper's tables 6, 7 and 11 to 13."""
    mem = next((result for result in results if result.variant.system == "mem"), None)
    if mem is None:
        return ""
    used = [step for step in mem.outcomes if step.used_memory]
    bare = {
        step.step: step.generated
        for result in results
        for step in result.outcomes
        if (result.variant.system, result.variant.seed) == ("no-mem", mem.variant.seed)
    }
    rows = [
        [
            str(step.step),
            step.question,
            " / ".join(step.neighbors[:3]),
            step.expected,
            bare.get(step.step, ""),
            step.generated,
        ]
        for step in used[:: -(-len(used) // _SAMPLES) or 1]
    ]
    head = ["step", "question", "nearest in the memory", "expected", "NO-MEM", "MEM-PROMPT"]
    return _markdown(head, rows)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[Cell(text) for text in row] for row in rows]
    return Table("", columns, cells).to_markdown() if rows else ""


def _sum_known(counts: Iterable[int | None]) -> int | None:
    known = list(counts)
    return None if None in known else sum(filter(None, known))


def _number(value: float | None, style: str = ".2f") -> str:
    return "" if value is None else f"{value:{style}}"


def _with_sd(values: Iterable[float], style: str) -> str:
    spread = mean_sd_interval(list(values))
    sd = _number(spread.sd, style.removeprefix("+"))
    return f"{spread.mean:{style}}{sd and f' ± {sd}'}"


def _mean(group: Sequence[StreamResult], first: str, second: str = "") -> float | None:
    """Return the mean of a metric, or of one within it, over the results that have it."""
    found = [result.metrics.get(first) for result in group]
    values = [(value or {}).get(second) if second else value for value in found]
    known = [float(value) for value in values if value is not None]
    return fmean(known) if known else None


def plot_running(path: Path, results: Sequence[StreamResult]) -> None:
    """Draw the running accuracy of understanding and answer, means over the seeds, as a .png."""
    from matplotlib.figure import Figure

    from pgra.report.tables import save_figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    names = {"understood": "understanding", "answered": "answer"}
    for axes, (name, title) in zip(panels, names.items(), strict=True):
        for label, group in _name_groups(results).items():
            lines = [running_accuracy(result.marks(name)) for result in group]
            mean = [fmean(values) for values in zip(*lines, strict=False)]
            axes.plot(range(1, len(mean) + 1), mean, label=label)
        axes.set(title=f"running accuracy of the {title}", xlabel="step", ylim=(0, 1))
        axes.grid(visible=True, alpha=0.3)
    panels[0].legend(fontsize="small")
    save_figure(figure, path)
