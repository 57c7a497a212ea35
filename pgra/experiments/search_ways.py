"""Ways to search, compared on queries with judgements: `pgra search --compare`.

A way is a first stage (`dense`), a reranker of its candidates (`likelihood`, or with its model
`cross-encoder:NAME`), or one that adds a first stage's scores (`likelihood+dense`).
"""

import time
from collections.abc import Mapping
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
    find_docnos,
    measure_run,
    read_qrels,
)

_MAIN = "nDCG@10"
_MEASURES = (_MAIN, "RR@10", "P@1")
_SURE = 0.05


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
    measured = {}
    costs = {}
    for name in files.compare or ():
        stages = Stages.without_task(read_way(name, args), context, corpus)
        corpus = stages.corpus
        examples = stages.write_queries(list(queries.values()), drop_self=files.drop_self)
        stages.retriever.prepare(examples)  # its index is there before the time is taken
        start = time.perf_counter()
        _, best = stages.search(examples)
        seconds = time.perf_counter() - start
        stages.release()
        docnos = find_docnos(corpus, best)
        measured[name] = measure_run(qrels, list(queries), best, docnos)
        costs[name] = f"{seconds / len(queries):9.2f}{stages.cost.num_new:9,}"
    return describe_ways(measured, costs)


def describe_ways(measured: Mapping[str, Mapping[str, Values]], costs: Mapping[str, str]) -> str:
    """Describe ways by their measures of each judged query, and which is best in a sentence."""
    first = next(iter(measured))
    right = measured[first][_MAIN]
    gaps = {name: compare_means(of[_MAIN], right, seed=0) for name, of in measured.items()}
    p_values = holm([gap.p for name, gap in gaps.items() if name != first])
    tests = {}
    for (name, gap), p in zip(gaps.items(), [1.0, *p_values], strict=True):
        low, high = gap.interval
        tests[name] = f"{gap.difference:+.4f} ({low:+.4f} to {high:+.4f}), p {p:.3g}"
        tests[name] += ", beyond noise" if p < _SURE else ", within noise"
    head = "".join(f"{name:>9}" for name in (*_MEASURES, "s/query", "read"))
    lines = [f"{len(right):,} judged queries; {_MAIN} to {first} (95 %), Holm's p", " " * 32 + head]
    for name, of in measured.items():
        means = "".join(f"{of[measure].mean():9.4f}" for measure in _MEASURES)
        lines.append(f"{name:<32}{means}{costs[name]}   {tests[name]}")
    best = max(gaps, key=lambda name: gaps[name].difference)
    lines.append(f"best: {best}, {_MAIN} to {first} {tests[best]}")
    return "\n".join(lines)
