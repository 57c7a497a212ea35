"""Metrics of written answers: exact match, BLEU, PARENT.

Exact match is that of open-domain question answering (SQuAD's official evaluation). PARENT is that
of Dhingra et al. 2019, section 4, with the word overlap model, as in ToTTo's evaluation (Parikh et
al. 2020): precision against the whole table, recall against the highlighted cells, of text that is
lower-cased and split by sacrebleu's tokenizer 13a.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from pgra.data.examples import AnsweredExample
from pgra.data.tasks import GenerationTask

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ORDERS = (1, 2, 3, 4)
_SMALL = 1e-5  # in place of a 0 for pairs of words and longer: the released evaluation's
SUBSETS = ("overlap", "nonoverlap")

Tokens = tuple[str, ...]


def normalize_answer(text: str) -> str:
    """Lower-case, then drop ASCII punctuation, English articles and extra spaces.

    As SQuAD (Rajpurkar et al. 2016, section 6.1), DPR and KATE (Liu et al. 2022, section 3.1).
    """
    plain = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def is_exact_match(prediction: str, answers: Sequence[str]) -> bool:
    """Whether a prediction is one of the right answers, both normalised.

    As in the official evaluation, an empty prediction matches the answer "A".
    """
    return normalize_answer(prediction) in {normalize_answer(answer) for answer in answers}


def bleu_counts(
    predictions: Sequence[str], references: Sequence[Sequence[str]], *, lowercase: bool = False
) -> list[list[int]]:
    """Return what BLEU is made of, for each of B sentences with at least one reference each.

    Rows of 10 numbers: its words, those of the reference of the nearest length, how many of its 1-
    to 4-grams stand in a reference, and how many it has. ToTTo's evaluation sets `lowercase`.
    """
    from sacrebleu.metrics.bleu import BLEU

    bleu = BLEU(lowercase=lowercase, effective_order=True)  # or it warns; counts are the same
    scores = [bleu.sentence_score(*pair) for pair in zip(predictions, references, strict=True)]
    return [[score.sys_len, score.ref_len, *score.counts, *score.totals] for score in scores]


def bleu_of_counts(counts: Sequence[int]) -> float:
    """Return BLEU of the sum of rows of `bleu_counts`, a fraction, by sacrebleu with its defaults.

    Papineni et al. 2002; Post 2018.
    """
    from sacrebleu.metrics.bleu import BLEU

    size, reference, *grams = map(int, counts)
    score: float = BLEU.compute_bleu(
        correct=grams[:4],
        total=grams[4:],
        sys_len=size,
        ref_len=reference,
        smooth_method="exp",
    ).score
    return score / 100


class Parent(NamedTuple):
    """PARENT of one sentence, fractions; `f` is the harmonic mean.

    `precision` is how much of it stands in the reference, or follows from the table; `recall` how
    much of the reference and of the chosen cells it states.
    """

    precision: float
    recall: float
    f: float


def parent(
    text: str, references: Sequence[str], values: Sequence[str], chosen: Sequence[str]
) -> Parent:
    """Return PARENT of a sentence, by the reference that gives it the best F.

    `values` are all of the table's cells, titles included, `chosen` the highlighted ones.
    """
    tokens = tokenize(text)
    known = frozenset(word for value in values for word in tokenize(value))
    cells = [cell for cell in map(tokenize, chosen) if cell]
    found = (_against(tokens, tokenize(reference), known, cells) for reference in references)
    return max(found, key=lambda one: one.f)


@cache
def _cutter() -> Callable[[str], str]:
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    cutter: Callable[[str], str] = Tokenizer13a()
    return cutter


def tokenize(text: str) -> Tokens:
    """Split a text into lower-case words and punctuation."""
    return tuple(_cutter()(text.strip().lower()).split())


def _against(
    text: Tokens, reference: Tokens, known: frozenset[str], chosen: Sequence[Tokens]
) -> Parent:
    """Compare with one reference; `known`: the table's words, without column names as released."""
    precisions, recalls = [], []
    for n in _ORDERS:
        grams, right = _grams(text, n), _grams(reference, n)
        # The share of n-grams that stand in the reference, or else follow from the table.
        told = 0.0
        for gram, count in grams.items():
            both = min(count, right[gram])
            told += both + (count - both) * _follows(gram, known)
        precisions.append(told / sum(grams.values()) if grams else 0.0)
        # The share of the reference's n-grams in the text, each weighted by how far it follows.
        weights = {gram: _follows(gram, known) for gram in right}
        total = sum(count * weights[gram] for gram, count in right.items())
        told = sum(min(count, grams[gram]) * weights[gram] for gram, count in right.items())
        recalls.append(told / total if total else 1.0)
    precision, recall = _mean_over_orders(precisions), _mean_over_orders(recalls) or _SMALL
    if chosen:
        # Its section 4: the less of the table a reference tells, the more the table itself counts.
        weight = 1 - _mentioned(chosen, reference)
        recall = recall ** (1 - weight) * (_mentioned(chosen, text) or _SMALL) ** weight
    f = 2 * precision * recall / (precision + recall) if precision else 0.0
    return Parent(precision, recall, f)


def _follows(gram: Tokens, known: frozenset[str]) -> float:
    return sum(word in known for word in gram) / len(gram)


def _grams(tokens: Tokens, n: int) -> Counter[Tokens]:
    return Counter(tokens[i : i + n] for i in range(len(tokens) - n + 1))


def _mean_over_orders(values: Iterable[float]) -> float:
    """Return the geometric mean: 0 without a right word; a longer n-gram's 0 is `_SMALL`."""
    first, *others = values
    if not first:
        return 0.0
    found = [first, *(value or _SMALL for value in others)]
    return math.exp(sum(map(math.log, found)) / len(found))


def _mentioned(values: Sequence[Tokens], text: Tokens) -> float:
    """Return the mean share of each value's words that a text has in their order."""
    return sum(_common(value, text) / len(value) for value in values) / len(values)


def _common(a: Tokens, b: Tokens) -> int:
    """Count the words of the longest common subsequence."""
    best = [0] * (len(b) + 1)
    for word in a:
        before = 0
        for i, other in enumerate(b, 1):
            kept = best[i]
            best[i] = before + 1 if word == other else max(best[i], best[i - 1])
            before = kept
    return best[-1]


@dataclass(frozen=True)
class Written:
    """Metrics of written answers.

    Attributes:
        values: By name, fractions, the task's headline first. "bleu" and "parent" (its F, with
            "parent_precision" and "parent_recall") of ToTTo also by subset: "overlap/bleu".
        each: By name a fraction a query, for paired tests: of "exact_match" and "parent".
        counts: Of BLEU, a row a query; empty without it.
    """

    values: Mapping[str, float]
    each: Mapping[str, list[float]]
    counts: Sequence[Sequence[int]] = ()


def measure_written(
    task: GenerationTask, predictions: Sequence[str], references: Sequence[AnsweredExample]
) -> Written:
    """Measure what an LM wrote, (B,), by the task's metrics; spaces around a text do not count.

    Raises:
        ValueError: If the lengths differ, or there is nothing to measure.
    """
    if len(predictions) != len(references) or not predictions:
        raise ValueError(f"{len(predictions)} predictions, {len(references)} queries")
    pairs = [(text.strip(), own) for text, own in zip(predictions, references, strict=True)]
    each: dict[str, list[float]] = {}
    counts: list[list[int]] = []
    for metric in task.metrics:
        if metric == "exact_match":
            each[metric] = [float(is_exact_match(text, own.answers)) for text, own in pairs]
        elif metric == "bleu":
            # ToTTo's evaluation lower-cases; so do we for every table.
            is_lower = references[0].table is not None
            texts, answers = zip(*((text, own.answers) for text, own in pairs), strict=True)
            counts = bleu_counts(texts, answers, lowercase=is_lower)
            each[metric] = []
        else:
            found = [
                parent(text, own.answers, own.table.values, own.table.chosen_values)
                for text, own in pairs
                if own.table is not None  # each has one: the task says what it is of
            ]
            each[metric] = [score.f for score in found]
            each["parent_precision"] = [score.precision for score in found]
            each["parent_recall"] = [score.recall for score in found]
    kinds = [own.table.is_overlap if own.table else None for own in references]
    subsets = {"": list(range(len(pairs)))}
    for subset, wanted in zip(SUBSETS, (True, False), strict=True):
        rows = [i for i, kind in enumerate(kinds) if kind is wanted]
        subsets |= {f"{subset}/": rows} if rows else {}
    values = {
        f"{subset}{name}": bleu_of_counts(np.sum([counts[i] for i in rows], axis=0).tolist())
        if name == "bleu"
        else sum(own[i] for i in rows) / len(rows)
        for subset, rows in subsets.items()
        for name, own in each.items()
    }
    kept = {name: own for name, own in each.items() if name in ("exact_match", "parent")}
    return Written(values, kept, counts)
