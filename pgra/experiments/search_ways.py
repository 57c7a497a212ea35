"""Ways to search, compared on queries with judgements: `pgra search --compare`.

A way is a first stage (`dense`), a reranker of its candidates (`likelihood`, or with its model
`cross-encoder:NAME`), or one that adds a first stage's scores (`likelihood+dense`).
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pgra.context import Context
from pgra.data.corpus import Corpus
from pgra.methods.arguments import RunArguments
from pgra.methods.stages import Stages
from pgra.report.metrics import compare_means, holm
from pgra.report.tables import Table
from pgra.rerank import PAIR_RERANKERS, find_reranker
from pgra.retrieval import find_retriever
from pgra.retrieval.trec import QueryFileArguments, find_docnos, measure_run, read_qrels

_MAIN = "nDCG@10"
_FORMS = {
    "way": "",
    _MAIN: ".4f",
    "RR@10": ".4f",
    "P@1": ".4f",
    "s/query": ".2f",
    "read": ",",
    "gain": "+.4f",
    "low": "+.4f",
    "high": "+.4f",
    "p": ".3g",
}
_MEANING = (
    f"gain: in {_MAIN}, to the first way, low to high its 95 % interval over queries, p adjusted "
    "for all ways (Holm); read: pairs that a model read now, others were kept"
)
_SURE = 0.05


def read_way(name: str, args: RunArguments) -> RunArguments:
    """Return the arguments of a way to search; a ConfigError if there is none of that name."""
    head, _, added = name.partition("+")
    reranker, _, model = head.partition(":")
    changes: dict[str, Any] = {"reranker": "none"}
    options = None
    if reranker in PAIR_RERANKERS:
        cls: Any = find_reranker(reranker).options_class
        field = cls.FIELDS.get("lm")
        options = cls(**{field: model}) if field and model else cls()
        weight = args.rerank.topic_weight or 1.0
        changes = {"reranker": reranker, "topic_weight": weight if added else 0.0}
        if model and not field:
            changes["lm"] = model
        name = added or args.retriever.retriever
    find_retriever(name)  # an unknown one is refused before another is run
    args = args.having(rerank_options=options).change("retriever", retriever=name)
    return args.change("rerank", **changes)


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
    ways = {name: read_way(name, args) for name in files.compare or ()}
    rows = []
    for name, way_args in ways.items():
        stages = Stages.without_task(way_args, context, corpus)
        corpus = stages.corpus
        examples = stages.write_queries(list(queries.values()), drop_self=files.drop_self)
        _ = stages.retriever  # its index is there before the time is taken
        start = time.perf_counter()
        _, best = stages.search(examples)
        seconds = (time.perf_counter() - start) / len(queries)
        stages.release()
        docnos = find_docnos(corpus, best)
        values = measure_run(qrels, list(queries), best, docnos)
        cost = {"s/query": seconds, "read": stages.cost.num_new}
        rows.append({"way": name, "values": values, **cost})
    return compare_rows(rows).to_text()


def compare_rows(rows: Sequence[dict[str, Any]]) -> Table:
    """Compare ways by their "values" of each judged query; the last note names the best."""
    first = rows[0]["values"][_MAIN]
    for row in rows:
        gap = compare_means(row["values"][_MAIN], first, seed=0)
        low, high = gap.interval
        row |= {"gain": gap.difference, "low": low, "high": high, "p": gap.p}
        row |= {name: values.mean() for name, values in row["values"].items()}
    for row, p in zip(rows[1:], holm([row["p"] for row in rows[1:]]), strict=True):
        row["p"] = p
    best = max(rows, key=lambda row: row["gain"])
    noise = "beyond noise" if best["p"] < _SURE else "within noise"
    interval = f"{best['low']:+.4f} to {best['high']:+.4f}"
    test = f"{best['gain']:+.4f} to {rows[0]['way']} ({interval}, p {best['p']:.3g})"
    why = f"best: {best['way']}, {_MAIN} {test}, {noise}"
    return Table.of(f"{len(first):,} judged queries", rows, _FORMS, [_MEANING, why])
