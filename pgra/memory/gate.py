"""The combiner C(x, M(x)): a gate that lets no far-off feedback through (Madaan et al. 2022, 3.4).

A threshold on the look-up's score. It can be chosen on a stream of questions whose meanings are
known: each question looks among those before it, as if every one of them had been clarified.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pgra.errors import DataError
from pgra.memory.log import FeedbackLog
from pgra.memory.lookup import Lookup, Match


def passing(matches: Sequence[Match], threshold: float | None) -> list[Match]:
    """Give the matches whose score is at least the threshold; all where there is none."""
    return [match for match in matches if threshold is None or match.score >= threshold]


def pass_gate(matches: Sequence[Match], threshold: float | None) -> Match | None:
    """Give the nearest match, if its score is at least the threshold."""
    near = passing(matches[:1], threshold)
    return near[0] if near else None


@dataclass(frozen=True)
class Trial:
    """What a look-up gave for one question of a dev stream.

    Attributes:
        score: Of the nearest key; None where nothing was found.
        is_right: Whether that key meant what the question means.
        has_right: Whether any key in the memory did.
    """

    score: float | None
    is_right: bool
    has_right: bool


@dataclass(frozen=True)
class GateReport:
    """What a threshold does.

    Attributes:
        threshold: Scores of at least this pass.
        precision: Share of what passes that is right; None where nothing passes.
        recall: Share of the questions with a right key in the memory that get one.
        num_passed: Questions that get a feedback.
        num_trials: All questions.
    """

    threshold: float
    precision: float | None
    recall: float | None
    num_passed: int
    num_trials: int


def try_lookup(
    log: FeedbackLog,
    lookup: Lookup,
    questions: Sequence[str],
    meanings: Sequence[str],
    *,
    feedbacks: Sequence[str] | None = None,
) -> list[Trial]:
    """Look each question up among those before it, then write it.

    Args:
        log: An empty memory.
        lookup: Follows this log.
        questions: In the order they are asked (n,).
        meanings: What each means: its type, or its feedback.
        feedbacks: What is written for each; None writes the meanings.

    Raises:
        ValueError: If the memory is not empty.
    """
    if log.last_id:
        raise ValueError(f"{log.path} is not empty: a gate is chosen with a memory of its own")
    trials, seen, written = [], set[str](), dict[int, str]()
    told = zip(questions, meanings, meanings if feedbacks is None else feedbacks, strict=True)
    for question, meaning, feedback in told:
        found = lookup.find(question)
        is_right = bool(found) and written[found[0].entry.id] == meaning
        trials.append(Trial(found[0].score if found else None, is_right, meaning in seen))
        seen.add(meaning)
        written[log.write(question, feedback, source="dev").id] = meaning
    return trials


def judge_threshold(trials: Sequence[Trial], threshold: float) -> GateReport:
    """Say what a threshold does to these trials."""
    passed = [t for t in trials if t.score is not None and t.score >= threshold]
    right = sum(trial.is_right for trial in passed)
    wanted = sum(trial.has_right for trial in trials)
    return GateReport(
        threshold,
        right / len(passed) if passed else None,
        right / wanted if wanted else None,
        len(passed),
        len(trials),
    )


def choose_threshold(trials: Sequence[Trial]) -> GateReport:
    """Choose the threshold with the largest F1, of equals the strictest.

    Candidates are the scores that were met.

    Raises:
        DataError: If no look-up ever found a right key.
    """
    scores = sorted({trial.score for trial in trials if trial.score is not None}, reverse=True)
    reports = [judge_threshold(trials, score) for score in scores]
    best = max(reports, key=_f1, default=None)
    if best is None or not _f1(best):
        raise DataError(
            f"no threshold can be chosen from {len(trials)} questions: no look-up found a key of "
            "the same meaning; give a longer dev stream, or --threshold"
        )
    return best


def _f1(report: GateReport) -> float:
    precision, recall = report.precision or 0.0, report.recall or 0.0
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0
