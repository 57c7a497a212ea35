"""All metrics of a generation task, for all queries together and for each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pgra.data.generation import GenerationTask
from pgra.data.references import Reference
from pgra.evaluation.answers import exact_matches
from pgra.evaluation.table_text import (
    TableText,
    bleu_counts,
    corpus_bleu,
    parent_corpus,
    parent_each,
)

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
