"""Ways to search, compared on queries with judgements: `pgra search --compare`.

A way is a first stage (`dense`), a reranker of its candidates (`likelihood`, or with its model
`cross-encoder:NAME`), or one that adds a first stage's scores (`likelihood+dense`).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pgra.arrays import Values
from pgra.context import Context
from pgra.data.corpus import Corpus
from pgra.methods.arguments import RunArguments
from pgra.methods.stages import Stages
from pgra.report.metrics import compare_means, holm
from pgra.rerank import PAIR_RERANKERS, find_reranker
from pgra.retrieval.trec import (
    QueryFileArguments,
    drop_self,
    find_docnos,
    measure_run,
    read_qrels,
)

_MEASURES = ("nDCG@10", "RR@10", "P@1")  # the first decides
_SURE = 0.05


@dataclass(frozen=True)
class Measured:
    """A way's measures of each judged query, (B,), and its cost.

    `num_read` pairs were read now, others before; `seconds` are of all queries.
    """

    name: str
    values: Mapping[str, Values]
    seconds: float
    num_read: int


def read_way(name: str, args: RunArguments) -> RunArguments:
    """Return the arguments of a way to search; others are those given."""
    head, _, added = name.partition("+")
    reranker, _, model = head.partition(":")
    if reranker not in PAIR_RERANKERS:
        args = args.having(rerank_options=None).change("rerank", reranker="none")
        return args.change("retriever", retriever=name)
    cls: Any = find_reranker(reranker).options_class
    field = cls.FIELDS.get("lm")
    weight = args.rerank.topic_weight or 1.0
    args = args.having(rerank_options=cls(**{field: model}) if field and model else cls())
    if model and not field:
        args = args.change("rerank", lm=model)
    args = args.change("rerank", reranker=reranker, topic_weight=weight if added else 0.0)
    return args.change("retriever", retriever=added or args.retriever.retriever)


def compare_ways(
    files: QueryFileArguments,
    args: RunArguments,
    queries: Mapping[str, str],
    context: Context,
    corpus: Corpus | None,
) -> str:
    """Measure ways to search, test each against the first, and describe them.

    The tests are paired by query; Holm 1979 adjusts them together.

    Raises:
        PgraError: If a way, the queries or the judgements cannot be used.
    """
    qrels = read_qrels(Path(str(files.qrels)))
    ways = []
    for name in files.compare or ():
        stages = Stages.without_task(read_way(name, args), context, corpus)
        corpus = stages.corpus
        examples = stages.write_queries(list(queries.values()))
        stages.retriever.prepare(examples)  # its index is there before the time is taken
        start = time.perf_counter()
        _, best = stages.search(examples)
        seconds = time.perf_counter() - start
        stages.release()
        docnos = find_docnos(corpus, best)
        if files.drop_self:
            best = drop_self(list(queries), best, docnos)
        values = measure_run(qrels, list(queries), best, docnos)
        ways.append(Measured(name, values, seconds, stages.cost.num_new))
    return describe_ways(ways, len(queries))


def describe_ways(ways: Sequence[Measured], num_queries: int) -> str:
    """Describe measured ways in a table, and which is best in a sentence."""
    main = _MEASURES[0]
    first = ways[0].values[main]
    gaps = [compare_means(way.values[main], first, seed=0) for way in ways]
    p_values = [1.0, *holm([gap.p for gap in gaps[1:]])]
    head = "".join(f"{name:>9}" for name in (*_MEASURES, "s/query", "read"))
    lines = [
        f"{len(first):,} judged queries\n{'':<32}{head}   {main} to the first (95 %), Holm's p"
    ]
    for way, gap, p in zip(ways, gaps, p_values, strict=True):
        means = "".join(f"{way.values[name].mean():9.4f}" for name in _MEASURES)
        low, high = gap.interval
        lines.append(
            f"{way.name:<32}{means}{way.seconds / num_queries:9.2f}{way.num_read:9,}   "
            f"{gap.difference:+.4f} ({low:+.4f} to {high:+.4f}), p {p:.3g}"
        )
    best = max(range(len(ways)), key=lambda number: gaps[number].difference)
    low, high = gaps[best].interval
    if best == 0:
        lines.append(f"None is better than {ways[0].name}.")
    else:
        noise = "beyond noise" if p_values[best] < _SURE else "which may be noise"
        lines.append(
            f"{ways[best].name} is best: {main} {gaps[best].difference:+.4f} to {ways[0].name} "
            f"({low:+.4f} to {high:+.4f}, p {p_values[best]:.3g}), {noise}."
        )
    return "\n".join(lines)
