"""PyTerrier: an index, a reranker and a reader in a pipeline of its own. Java is not needed."""

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from pgra.retrieval.trec import find_rows
from pgra.types import Hit

try:
    import pandas as pd
    import pyterrier as pt
except ImportError:
    raise ImportError("this needs pyterrier: pip install '.[integrations]'") from None

if TYPE_CHECKING:
    from pgra.reader.record import Reader
    from pgra.rerank.reranker import Reranker
    from pgra.retrieval.dense import Index


class PgraRetriever(pt.Transformer):
    """Finds each query's `num_results` best passages in a `pgra.Index`, with their texts.

    A docno is what runs call a passage: its row, or its name by `corpus_id`.
    """

    def __init__(self, index: "Index", num_results: int = 1000) -> None:
        self.index = index
        self.num_results = num_results

    def transform(self, inp: Any) -> Any:
        """Return a result frame of a query frame; a DataError if a query is blank or no text."""
        pt.validate.query_frame(inp, extra_columns=["query"])
        best = self.index.search(inp["query"].tolist(), self.num_results)
        wanted = {hit.index for hit in chain(*best)}
        docnos = {row: docno for docno, row in find_rows(self.index.corpus, wanted).items()}
        lines = []
        for topic, hits in zip(inp.itertuples(index=False), best, strict=True):
            lines += [(*topic, docnos[hit.index], hit.score, hit.text) for hit in hits]
        columns = [*inp, "docno", "score", "text"]
        return pt.model.add_ranks(pd.DataFrame(lines, columns=columns))


class PgraReranker(pt.Transformer):
    """Orders results by a `pgra.Reranker`, which adds their scores as its `topic_weight` says."""

    def __init__(self, reranker: "Reranker") -> None:
        self.reranker = reranker

    def transform(self, inp: Any) -> Any:
        """Return a copy with new scores and ranks; a PgraError as `pgra.Reranker.rank`."""
        pt.validate.result_frame(inp, extra_columns=["query", "score", "text"])
        scores = np.zeros(len(inp))
        for rows in inp.groupby("qid").indices.values():
            results = inp.iloc[rows]
            hits = list(map(Hit, rows.tolist(), results["score"], results["text"]))
            for hit in self.reranker.rank(results["query"].iloc[0], hits):
                scores[hit.index] = hit.score
        return pt.model.add_ranks(inp.assign(score=scores))


class PgraReader(pt.Transformer):
    """Decides each query by a `pgra.Reader` from the texts of its results: a `qanswer` each."""

    def __init__(self, reader: "Reader") -> None:
        self.reader = reader

    def transform(self, inp: Any) -> Any:
        """Return a frame of qid, query and qanswer; a PgraError as `pgra.Reader.predict`."""
        pt.validate.result_frame(inp, extra_columns=["query", "rank", "text"])
        ranked = inp.sort_values("rank", kind="stable").groupby(["qid", "query"], sort=False)
        answers = ranked["text"].agg(list).reset_index()
        texts = answers.pop("text")
        decided = self.reader.predict(answers["query"].tolist(), texts.tolist())
        return answers.assign(qanswer=[prediction.label for prediction in decided])
