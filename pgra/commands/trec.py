"""Queries of a file for `pgra search` and `pgra rerank`: a TREC run is written and measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pgra.config import Arguments, arg
from pgra.errors import ConfigError

if TYPE_CHECKING:
    from pgra.core import Candidates
    from pgra.data.corpus import Corpus

NUM_CANDIDATES = 100  # passages of a query in a run, by default


@dataclass(kw_only=True)
class QueryFileArguments(Arguments):
    """Queries of a file, and what becomes of what is found."""

    queries: str | None = arg(
        None,
        "File of queries instead of texts: a .tsv of id and text, or .jsonl or .csv with the "
        "fields id and text.",
    )
    trec: str | None = arg(
        None,
        "Write what is found for --queries as a TREC run file.",
        needs={"queries": True},
        writes=True,
    )
    qrels: str | None = arg(
        None,
        "Judgements (TREC's qrels, or BEIR's .tsv) to measure what is found by: nDCG@10, MRR@10, "
        "recall. Needs pip install 'pgra[trec]'.",
        needs={"queries": True},
    )

    drop_self: bool = arg(
        False,
        "Leave out of a query's run the passage that has its id, as where queries are taken from "
        "the corpus (ArguAna).",
        needs={"queries": True},
    )

    def check(self) -> None:
        if self.drop_self and not self.is_run:
            raise ConfigError("drop_self is of a run: add --trec FILE or --qrels FILE")

    @property
    def is_run(self) -> bool:
        """Whether a run is made, rather than hits shown."""
        return bool(self.trec or self.qrels)


@dataclass(frozen=True)
class QueryFile:
    """Queries that were read, by id and in order; `qrels` is None where nothing is measured."""

    args: QueryFileArguments
    texts: Mapping[str, str]
    qrels: Mapping[str, Mapping[str, int]] | None

    @classmethod
    def read(cls, args: QueryFileArguments, texts: Sequence[str]) -> Self | None:
        """Read the queries and the judgements, None without a file, before anything long.

        Raises:
            ConfigError: If there are texts on the command line too.
            DataError: If a file cannot be read.
        """
        if args.queries is None:
            return None
        if texts:
            raise ConfigError("give texts, or --queries and a file, not both")
        from pgra.retrieval.trec import import_ir_measures, read_qrels, read_query_table

        queries, qrels = read_query_table(Path(args.queries)), None
        if args.qrels is not None:
            import_ir_measures()
            qrels = read_qrels(Path(args.qrels))
        return cls(args, queries, qrels)

    def finish(self, candidates: "Candidates", corpus: "Corpus", tag: str, *, depth: int) -> str:
        """Write the run with `depth` passages a query, measure it, and describe both.

        Raises:
            DataError: If passages have no names, or no query is judged.
        """
        from pgra.retrieval.trec import (
            drop_self,
            find_docnos,
            measure_run,
            warn_of_unknown,
            write_run,
        )

        queries, docnos = list(self.texts), find_docnos(corpus, candidates)
        if self.args.drop_self:
            candidates = drop_self(queries, candidates, docnos)
        candidates = candidates.top(depth)
        lines = [f"{len(queries):,} queries, up to {candidates.rows.shape[1]} passages each"]
        # A fault in the judgements is reported before a run is written.
        means = measure_run(self.qrels, queries, candidates, docnos) if self.qrels else {}
        if self.qrels:
            warn_of_unknown(corpus, [self.qrels.get(query, {}) for query in queries])
        if self.args.trec is not None:
            write_run(Path(self.args.trec), queries, candidates, docnos, tag=tag)
            lines.append(f"run: {self.args.trec}")
        if self.qrels is not None:
            judged = sum(query in self.qrels for query in queries)
            lines.append(f"mean of {judged:,} judged queries:")
            lines += [f"  {name:<8} {value:.4f}" for name, value in means.items()]
        return "\n".join(lines)
