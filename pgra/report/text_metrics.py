"""Metrics of written answers: exact match, BLEU, PARENT."""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from pgra.data.references import Reference
from pgra.data.tasks import GenerationTask

# Whether a written answer is right: exact match as open-domain question answering has it.


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower-case, then drop ASCII punctuation, English articles and spare spaces.

    SQuAD's official evaluation (Rajpurkar et al. 2016, section 6.1: "ignore punctuations and
    articles"), which DPR takes over; KATE (Liu et al. 2022, section 3.1) says the same.
    """
    plain = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def is_exact_match(prediction: str, answers: Sequence[str]) -> bool:
    """Say whether a prediction is one of the answers, both normalised.

    As in the official evaluation nothing may be left of either: an empty prediction matches the
    answer "A".

    Args:
        prediction: What was written.
        answers: All that are right.
    """
    return normalize_answer(prediction) in {normalize_answer(answer) for answer in answers}


def exact_matches(predictions: Sequence[str], answers: Sequence[Sequence[str]]) -> list[float]:
    """Give 1.0 for each prediction that is right and 0.0 for the others, (B,).

    Raises:
        ValueError: If the lengths differ.
    """
    pairs = zip(predictions, answers, strict=True)
    return [float(is_exact_match(prediction, right)) for prediction, right in pairs]


# Sentences that tell a table: BLEU, and PARENT, which counts what the table says as right too.
#
# PARENT is that of Dhingra et al. 2019, section 4, with the word overlap model, as ToTTo's
# evaluation uses it (Parikh et al. 2020): precision against the whole table, recall against the
# highlighted cells. Text is lower-cased and cut by sacrebleu's tokenizer 13a.


_ORDERS = (1, 2, 3, 4)
_SMALL = 1e-5  # in place of a 0 for pairs of words and longer: the released evaluation's

Tokens = tuple[str, ...]


@dataclass(frozen=True)
class TableText:
    """What a sentence about a table is compared with.

    Attributes:
        references: Sentences that are right, at least one.
        values: All that the table says, titles included.
        chosen: What of it is to be told.
    """

    references: Sequence[str]
    values: Sequence[str]
    chosen: Sequence[str]


@dataclass(frozen=True)
class Parent:
    """PARENT of one sentence, fractions.

    Attributes:
        precision: How much of it stands in the reference, or follows from the table.
        recall: How much of the reference and of the chosen cells it tells.
        f: Their harmonic mean.
    """

    precision: float
    recall: float
    f: float


def corpus_bleu(
    predictions: Sequence[str], references: Sequence[Sequence[str]], *, lowercase: bool = False
) -> float:
    """Give BLEU of all sentences together, a fraction, by sacrebleu with its defaults.

    Papineni et al. 2002; Post 2018. Sentences may have different numbers of references.

    Args:
        predictions: What was written, (B,).
        references: What is right for each, at least one.
        lowercase: As ToTTo's evaluation does, which lower-cases both sides.

    Raises:
        ValueError: If the lengths differ, there is nothing to measure, or a reference is missing.
    """
    from sacrebleu.metrics.bleu import BLEU

    _check(predictions, references)
    most = max(map(len, references))
    streams = [[own[i] if i < len(own) else None for own in references] for i in range(most)]
    score: float = BLEU(lowercase=lowercase).corpus_score(list(predictions), streams).score
    return score / 100


def bleu_counts(
    predictions: Sequence[str], references: Sequence[Sequence[str]], *, lowercase: bool = False
) -> list[list[int]]:
    """Give what BLEU is made of, for each sentence.

    Args:
        predictions: As `corpus_bleu`.
        references: Likewise.
        lowercase: Likewise.

    Returns:
        Rows of 10 numbers: its words, those of the reference of the nearest length, how many of its
        1- to 4-grams stand in a reference, and how many it has. Their sum gives `corpus_bleu`.
    """
    from sacrebleu.metrics.bleu import BLEU

    _check(predictions, references)
    bleu = BLEU(lowercase=lowercase, effective_order=True)  # or it warns; counts are the same
    scores = [bleu.sentence_score(*pair) for pair in zip(predictions, references, strict=True)]
    return [[one.sys_len, one.ref_len, *one.counts, *one.totals] for one in scores]


def bleu_of_counts(counts: Sequence[int]) -> float:
    """Give BLEU of added rows of `bleu_counts`, a fraction, by sacrebleu."""
    from sacrebleu.metrics.bleu import BLEU

    size, reference, *grams = map(int, counts)
    score: float = BLEU.compute_bleu(
        correct=grams[:4],
        total=grams[4:],
        sys_len=size,
        ref_len=reference,
        smooth_method="exp",  # as `corpus_bleu`, by sacrebleu's defaults
    ).score
    return score / 100


def parent_each(predictions: Sequence[str], tables: Sequence[TableText]) -> list[Parent]:
    """Give PARENT of each sentence, by the reference that gives it the best F.

    Raises:
        ValueError: If the lengths differ, there is nothing to measure, or a reference is missing.
    """
    _check(predictions, [table.references for table in tables])
    return [
        max((_against(tokenize(text), reference, table) for reference in table.references), key=_f)
        for text, table in zip(predictions, tables, strict=True)
    ]


def parent_corpus(each: Sequence[Parent]) -> Parent:
    """Give the means over sentences."""
    count = len(each)
    return Parent(
        sum(one.precision for one in each) / count,
        sum(one.recall for one in each) / count,
        sum(one.f for one in each) / count,
    )


@cache
def _cutter() -> Callable[[str], str]:
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    cutter: Callable[[str], str] = Tokenizer13a()
    return cutter


def tokenize(text: str) -> Tokens:
    """Cut a text into words, lower-cased, punctuation apart."""
    return tuple(_cutter()(text.strip().lower()).split())


def _check(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    if len(predictions) != len(references):
        raise ValueError(f"{len(predictions)} predictions, {len(references)} with references")
    if not predictions:
        raise ValueError("there is nothing to measure: no predictions")
    if not all(references):
        raise ValueError("a sentence has no reference")


def _f(parent: Parent) -> float:
    return parent.f


def _against(text: Tokens, reference_text: str, table: TableText) -> Parent:
    """Compare a sentence with one reference."""
    reference = tokenize(reference_text)
    said = frozenset(word for value in table.values for word in tokenize(value))
    chosen = [tokens for tokens in map(tokenize, table.chosen) if tokens]
    precision = _mean_over_orders(_precision(text, reference, said, n) for n in _ORDERS)
    of_reference = _mean_over_orders(_recall(text, reference, said, n) for n in _ORDERS) or _SMALL
    recall = of_reference
    if chosen:
        # Its section 4: the less of the table a reference tells, the more the table itself counts.
        weight = 1 - _mentioned(chosen, reference)
        of_table = _mentioned(chosen, text) or _SMALL
        recall = of_reference ** (1 - weight) * of_table**weight
    f = 2 * precision * recall / (precision + recall) if precision else 0.0
    return Parent(precision, recall, f)


def _follows(gram: Tokens, said: frozenset[str]) -> float:
    """Give the chance that words follow from the table: the share of them that stand in it.

    Only values count, not the names of columns: so does the released evaluation.
    """
    return sum(word in said for word in gram) / len(gram)


def _precision(text: Tokens, reference: Tokens, said: frozenset[str], n: int) -> float:
    """Give the share of n-grams that stand in the reference, or else follow from the table."""
    grams, right = _grams(text, n), _grams(reference, n)
    if not grams:
        return 0.0
    total = 0.0
    for gram, count in grams.items():
        found = min(count, right[gram])
        total += found + (count - found) * _follows(gram, said)
    return total / sum(grams.values())


def _recall(text: Tokens, reference: Tokens, said: frozenset[str], n: int) -> float:
    """Give the share of the reference's n-grams that are told, each as far as it follows."""
    grams, right = _grams(text, n), _grams(reference, n)
    weights = {gram: _follows(gram, said) for gram in right}
    total = sum(count * weights[gram] for gram, count in right.items())
    if not total:
        return 1.0
    return sum(min(count, grams[gram]) * weights[gram] for gram, count in right.items()) / total


def _grams(tokens: Tokens, n: int) -> Counter[Tokens]:
    return Counter(tokens[i : i + n] for i in range(len(tokens) - n + 1))


def _mean_over_orders(values: Iterable[float]) -> float:
    """Give the geometric mean; 0 if no single word is right, else a longer n-gram's 0 is small."""
    first, *others = values
    if not first:
        return 0.0
    found = [first, *(value or _SMALL for value in others)]
    return math.exp(sum(map(math.log, found)) / len(found))


def _mentioned(values: Sequence[Tokens], text: Tokens) -> float:
    """Give the mean share of each value's words that a text has in their order."""
    return sum(_common(value, text) / len(value) for value in values) / len(values)


def _common(one: Tokens, other: Tokens) -> int:
    """Count the words of the longest common subsequence."""
    best = [0] * (len(other) + 1)
    for word in one:
        before = 0
        for i, word_of_other in enumerate(other, 1):
            kept = best[i]
            best[i] = before + 1 if word == word_of_other else max(best[i], best[i - 1])
            before = kept
    return best[-1]


SUBSETS = ("overlap", "nonoverlap")


@dataclass(frozen=True)
class Written:
    """How good what was written is.

    Attributes:
        values: By name, fractions, the task's headline first. "bleu" and "parent" (its F, with
            "parent_precision" and "parent_recall") of ToTTo stand there for its two subsets too:
            "overlap/bleu".
        each: By name a fraction a query, for paired tests: "exact_match" and "parent" have such,
            BLEU has none.
        counts: What BLEU is made of, a row a query (`table_text.bleu_counts`); none without it.
    """

    values: Mapping[str, float]
    each: Mapping[str, list[float]]
    counts: Sequence[Sequence[int]] = ()


def measure_written(
    task: GenerationTask, predictions: Sequence[str], references: Sequence[Reference]
) -> Written:
    """Measure what an LM wrote.

    Args:
        task: Says which metrics.
        predictions: Texts, (B,); spaces around them do not count.
        references: What is right for each.

    Raises:
        ValueError: If the lengths differ, or there is nothing to measure.
    """
    texts = [text.strip() for text in predictions]
    if len(texts) != len(references) or not texts:
        raise ValueError(f"{len(texts)} predictions, {len(references)} queries")
    whole = _measure(task.metrics, texts, references)
    values = dict(whole.values)
    for name, wanted in zip(SUBSETS, (True, False), strict=True):
        rows = [
            i for i, own in enumerate(references) if own.table and own.table.is_overlap is wanted
        ]
        if rows:
            part = _measure(task.metrics, [texts[i] for i in rows], [references[i] for i in rows])
            values |= {f"{name}/{metric}": value for metric, value in part.values.items()}
    return Written(values, whole.each, whole.counts)


def _measure(
    metrics: Sequence[str], texts: Sequence[str], references: Sequence[Reference]
) -> Written:
    values: dict[str, float] = {}
    each: dict[str, list[float]] = {}
    counts: Sequence[Sequence[int]] = ()
    answers = [reference.answers for reference in references]
    for metric in metrics:
        if metric == "exact_match":
            each[metric] = exact_matches(texts, answers)
            values[metric] = sum(each[metric]) / len(texts)
        elif metric == "bleu":
            # ToTTo's evaluation lower-cases; so do we for every table.
            is_lower = references[0].table is not None
            values[metric] = corpus_bleu(texts, answers, lowercase=is_lower)
            counts = bleu_counts(texts, answers, lowercase=is_lower)
        else:
            found = parent_each(texts, [_compared(reference) for reference in references])
            each[metric] = [one.f for one in found]
            mean = parent_corpus(found)
            values[metric] = mean.f
            values |= {"parent_precision": mean.precision, "parent_recall": mean.recall}
    return Written(values, each, counts)


def _compared(reference: Reference) -> TableText:
    table = reference.table
    if table is None:
        raise ValueError("PARENT compares with a table, and there is none")
    return TableText(reference.answers, table.values, table.chosen_values)
