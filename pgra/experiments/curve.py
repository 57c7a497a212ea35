"""What evidence is worth to readers of fewer labels: `pgra worth --num_labels`.

For each number of labels n and each draw of n training examples, the cheap reader and the LM's head
are fitted to these alone. Decided by the reader alone, by it joined with each way's vote, and with
the LM's opinion of the query itself, always with weights fitted to the test queries of other folds
(`pgra.experiments.added`). Pseudo-labels are by the head of the draw, and so is the evidence of
similarity `head`; what other ways find depends on no label. All states are in memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pgra.core import MISSING_ROW, Candidates, Json, Rows
from pgra.errors import ConfigError
from pgra.exemplars.selection import vote
from pgra.experiments.added import cross_fit
from pgra.report.metrics import Difference, compare_means
from pgra.report.tables import Cell, Table
from pgra.rerank.base import add_topic
from pgra.rerank.head import Doubles, Floats, Targets, affine, fit_head
from pgra.rerank.similarity import LabelHead

READER, OPINION = "reader", "LM's opinion"
_HEAD, _DOT = "head", "dot"
_MARGIN = 0.01  # accuracies nearer than a point are one
_LEAST = np.finfo(np.float32).tiny  # a chance may be 0 in float32
_SEED = 0


@dataclass(frozen=True, eq=False)
class Texts:
    """What models made of all texts; of pairs the first is of m training examples, then of n tests.

    Attributes:
        labels: Numbers of labels, (m,) and (n,).
        keys: Of queries (`query_key`), (m,) and (n,); those of training all differ.
        vectors: The encoder's, (m, D) and (n, D).
        states: The LM's, (m, H) and (n, H).
        drawn: The LM's of drawn passages, (p, H).
        rows: All passages that any way may give, rising, (P,).
        passages: The LM's of these, (P, H).
    """

    labels: tuple[Targets, Targets]
    keys: tuple[Rows, Rows]
    vectors: tuple[Floats, Floats]
    states: tuple[Floats, Floats]
    drawn: Floats
    rows: Rows
    passages: Floats


Way = Rows | Candidates
"""Each test query's evidence (n, d), best first, or candidates (1 or n, K) for a draw's head."""


def check_counts(counts: Sequence[int], num_examples: int, num_labels: int) -> None:
    """Refuse numbers of examples that cannot be drawn.

    Raises:
        ConfigError: If there are fewer examples, or more labels.
    """
    for count in counts:
        if not num_labels <= count <= num_examples:
            raise ConfigError(
                f"--num_labels {count}: a draw must hold each of {num_labels} labels, and there "
                f"are {num_examples} different training examples beside those in the prompt: give "
                f"{num_labels} to {num_examples}, or raise --max_train_samples"
            )


def draw_examples(labels: Targets, count: int, seed: int) -> Targets:
    """Draw some examples, labels in the proportion of all and each at least once: places, rising.

    A larger draw of the same seed holds the smaller.
    """
    order = np.random.default_rng(seed).permutation(len(labels))
    place = np.empty(len(labels))
    for label in np.unique(labels):
        own = order[labels[order] == label]
        place[own] = (np.arange(len(own)) + 0.5) / len(own)
        place[own[0]] = 0
    return np.sort(order[np.argsort(place[order], kind="stable")[:count]])


def centred(logits: npt.NDArray[np.floating]) -> Doubles:
    """Return log-odds: logits (n, C) less their mean over labels."""
    odds: Doubles = logits - logits.mean(axis=1, keepdims=True, dtype=np.float64)
    return odds


@dataclass(frozen=True, eq=False)
class Point:
    """Readers of one number of labels.

    Attributes:
        count: How many labels.
        right: Of each draw and test query whether it is decided rightly, (draws, n): by the reader
            alone, and joined with the LM's opinion and with each way.
        votes: The accuracy of the opinion's, and of each way's vote, alone, (draws,).
    """

    count: int
    right: Mapping[str, npt.NDArray[np.bool_]]
    votes: Mapping[str, Doubles]

    def gains(self) -> list[dict[str, Json]]:
        """Return of each draw and way what the reader gains, and how far the vote is ahead."""
        alone = self.right[READER].mean(axis=1)
        return [
            {
                "labels": self.count,
                "draw": draw,
                "way": way,
                "gain": float(self.right[way][draw].mean() - alone[draw]),
                "vote_ahead": float(votes[draw] - alone[draw]),
            }
            for way, votes in self.votes.items()
            if way != OPINION
            for draw in range(len(alone))
        ]

    def comparisons(self) -> list[tuple[str, str, Difference, int]]:
        """Compare the head's evidence with dot's and the opinion; also count draws above."""
        heads = [way for way in (_HEAD, f"exhaustive {_HEAD}") if way in self.right]
        pairs = [(way, other) for way in heads for other in (way.replace(_HEAD, _DOT), OPINION)]
        found = []
        for way, other in pairs:
            if other in self.right:
                a, b = (self.right[name].astype(np.float64) for name in (way, other))
                gap = compare_means(a.mean(axis=0), b.mean(axis=0), seed=_SEED)
                found.append((way, other, gap, int((a.mean(axis=1) > b.mean(axis=1)).sum())))
        return found

    def as_json(self) -> dict[str, Json]:
        """Return its numbers, means over draws."""
        comparisons = [
            {
                "way": way,
                "against": other,
                "difference": gap.difference,
                "interval_95": [gap.low, gap.high],
                "p": gap.p,
                "interval_90": list(_interval_90(gap)),
                "within_a_point": _is_within(gap),
                "draws_above": above,
            }
            for way, other, gap, above in self.comparisons()
        ]
        return {
            "labels": self.count,
            "draws": len(self.right[READER]),
            "accuracy_with_reader": {way: float(own.mean()) for way, own in self.right.items()},
            "accuracy_of_vote": {way: float(own.mean()) for way, own in self.votes.items()},
            "comparisons": comparisons,
        }


def _interval_90(gap: Difference) -> tuple[float, float]:
    low, high = np.percentile(gap.draws, [5, 95])
    return float(low), float(high)


def _is_within(gap: Difference) -> bool:
    """Whether both one-sided tests at 5 % say that two differ by less than a point."""
    low, high = _interval_90(gap)
    return low > -_MARGIN and high < _MARGIN


@dataclass(frozen=True, eq=False)
class Curve:
    """Readers of several numbers of labels."""

    points: Sequence[Point]

    def gains(self) -> list[dict[str, Json]]:
        """Return those of all points."""
        return [gain for point in self.points for gain in point.gains()]

    def rho(self) -> float | None:
        """Return Spearman's rho of gains and votes' leads; None if either is constant."""
        from scipy.stats import spearmanr  # half a second to import

        told = [[one[name] for one in self.gains()] for name in ("gain", "vote_ahead")]
        if any(len(set(values)) < 2 for values in told):
            return None
        return float(spearmanr(*told).statistic)

    def as_json(self) -> dict[str, Json]:
        """Return all figures."""
        return {
            "by_labels": [point.as_json() for point in self.points],
            "rho": self.rho(),
            "gains": self.gains(),
        }

    def to_text(self) -> str:
        """Return both tables, and rho in a sentence."""
        first, points = self.points[0], self.points
        names = {"reader alone": READER, **{f"reader + {way}": way for way in first.votes}}
        rows = [[Cell("draws"), *(Cell(str(len(point.right[READER]))) for point in points)]]
        alone = [Cell.of(100 * point.votes[OPINION].mean(), ".1f") for point in points]
        rows.append([Cell(f"{OPINION} alone"), *alone])
        for title, name in names.items():
            shares = [Cell.of(100 * point.right[name].mean(), ".1f") for point in points]
            rows.append([Cell(title), *shares])
        labels = [f"n = {point.count}" for point in points]
        note = "Mean over draws of n training examples; weights fitted to the other test queries."
        means = Table("Accuracy of a reader of n labels", ["", *labels], rows, [note])
        columns = ["points", "difference", "95 % interval", "p", "draws above", "90 % interval"]
        gaps = [
            _gap_row(f"n = {point.count}: {way} - {other}", gap, f"{above} of {len(right)}")
            for point in points
            for right in [point.right[READER]]
            for way, other, gap, above in point.comparisons()
        ]
        note = f"Equal is: the 90 % interval lies within {100 * _MARGIN:.0f} point of 0."
        parts = [means.to_text()]
        if gaps:
            title = "Readers with the head's evidence against others, paired over test queries"
            parts.append(Table(title, [*columns, "equal"], gaps, [note]).to_text())
        rho = self.rho()
        told = "is not defined: one of them is constant" if rho is None else f"is {rho:.2f}"
        pairs = f"over {len(self.gains())} draws and ways"
        parts.append(f"Spearman's rho of gain and (vote's - reader's accuracy) {told}, {pairs}")
        return "\n\n".join(parts)


def _gap_row(name: str, gap: Difference, above: str) -> list[Cell]:
    form, ends = "+z.1f", (100 * gap.low, 100 * gap.high)
    inner = [100 * end for end in _interval_90(gap)]
    told = [Cell.of(100 * gap.difference, form), Cell.interval(ends, form), Cell.of_p(gap.p)]
    equal = Cell("yes" if _is_within(gap) else "no")
    return [Cell(name), *told, Cell(above), Cell.interval(inner, form), equal]


def measure_curve(
    texts: Texts,
    ways: Mapping[str, Way],
    counts: Sequence[int],
    num_draws: int,
    *,
    depth: int,
    topic_weight: float = 0.0,
) -> Curve:
    """Measure what ways are worth to readers of fewer labels.

    Args:
        texts: What models made of all texts.
        ways: Evidence, or what the draw's head orders.
        counts: Numbers of labels.
        num_draws: Draws of each; of all training examples there is one.
        depth: How much evidence of what the head orders votes.
        topic_weight: Of the first stage's scores in what the head orders.

    Raises:
        ConfigError: If so many cannot be drawn, or there are too few test queries.
    """
    check_counts(counts, len(texts.labels[0]), len(np.unique(texts.labels[0])))
    points = []
    for count in counts:
        right: dict[str, list[npt.NDArray[np.bool_]]] = {}
        votes: dict[str, list[float]] = {}
        for draw in range(num_draws if count < len(texts.labels[0]) else 1):
            picked = draw_examples(texts.labels[0], count, draw)
            reader, said = _decide(texts, ways, picked, depth, topic_weight)
            for way, told in {
                READER: [],
                **{way: [odds] for way, (odds, _) in said.items()},
            }.items():
                decided = cross_fit([reader, *told], texts.labels[1]).argmax(axis=1)
                right.setdefault(way, []).append(decided == texts.labels[1])
            for way, (_, share) in said.items():
                votes.setdefault(way, []).append(share)
        stacked = {way: np.stack(own) for way, own in right.items()}
        points.append(Point(count, stacked, {way: np.array(own) for way, own in votes.items()}))
    return Curve(points)


def _decide(
    texts: Texts, ways: Mapping[str, Way], picked: Targets, depth: int, topic_weight: float
) -> tuple[Doubles, dict[str, tuple[Doubles, float]]]:
    """Return log-odds of test queries: the reader's; opinion's and ways', with their accuracy."""
    labels, test = texts.labels[0], texts.labels[1]
    num_labels = int(labels.max()) + 1
    cheap = fit_head(texts.vectors[0][picked], labels[picked], num_labels)
    scaled = (texts.vectors[1] - cheap.stats[0]) / cheap.stats[1]
    rising = picked[np.argsort(texts.keys[0][picked])]
    fitted = fit_head(texts.states[0][rising], labels[rising], num_labels)
    head = LabelHead.of_head(fitted, texts.keys[0][rising], texts.drawn)
    norms = np.empty(0, np.float32)  # it looks at none
    queries = head.of_queries(texts.states[1], norms, texts.keys[1])
    chances = head.of_passages(texts.passages, norms)
    odds = centred(head.logits(texts.passages, head.weights)) - centred(head.prior[None])
    opinion = centred(np.log(np.maximum(queries, _LEAST)))
    said = {OPINION: (opinion, float((opinion.argmax(axis=1) == test).mean()))}
    for name, way in ways.items():
        if isinstance(way, Candidates):
            at = np.searchsorted(texts.rows, np.maximum(way.rows, texts.rows[0]))
            scores = add_topic(np.vecdot(queries[:, None], chances[at]), way, topic_weight)
            rows = Candidates.best(np.broadcast_to(way.rows, scores.shape), scores, depth).rows
        else:
            rows = way
        said[name] = _vote(odds, texts.rows, rows, test)
    return centred(affine(scaled, cheap.weights)), said


def _vote(odds: Doubles, known: Rows, rows: Rows, test: Targets) -> tuple[Doubles, float]:
    """Return the mean log-odds of each query's evidence, and how often most of it is right."""
    votes, right = np.zeros((len(rows), odds.shape[1])), 0
    for query, own in enumerate(rows):
        mine = odds[np.searchsorted(known, own[own != MISSING_ROW])]
        if len(mine):  # without any it says nothing
            votes[query] = mine.mean(axis=0)
            right += next(iter(vote([*map(str, mine.argmax(axis=1))]))) == str(test[query])
    return votes, right / len(rows)
