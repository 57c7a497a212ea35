"""TREC's files: queries by id, runs written and read, judgements measured; a run as first stage.

A run has six columns a line, `qid Q0 docno rank score tag`, each query's lines best first. A docno
is a passage's name in the field `corpus_id` of its corpus, or else its row. Runs and judgements are
read and measured by `ir-measures`, the extra `trec`.
"""

import io
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np

from pgra.arrays import Values
from pgra.artifacts import Inputs, digest, file_checksum, write_aside
from pgra.config import Arguments, arg
from pgra.data.corpus import Corpus
from pgra.data.irds import IRDS, irds_records, read_irds
from pgra.data.read import Record, check_file, read_lines, read_table
from pgra.errors import ConfigError, DataError, one_line, reading, show
from pgra.retrieval.base import IndexRequest, Retriever
from pgra.types import MISSING_ROW, Candidates, Fields

logger = logging.getLogger(__name__)

_BEIR_HEADER = ["query-id", "corpus-id", "score"]
_QUERY_KINDS = ("tsv", "jsonl", "csv")
_ID_HEADER = re.compile(r"\W*(_*id|(q|query|topic)[\W_]*(id|num|number)|query|topic)\W*", re.I)


@dataclass(kw_only=True)
class RunFileArguments(Arguments):
    """Which queries a run file is of."""

    GROUP = "Retriever"

    run_queries: str = arg(
        "", "The queries of --retriever run:FILE, as --queries takes them.", must_be_given=True
    )


def read_query_table(path: Path) -> dict[str, str]:
    """Read a run's queries: texts by id, in order.

    The file is a .tsv of two columns, id and text; or .jsonl or .csv with the fields id (or _id, as
    BEIR has it) and text; or the queries are those of irds:NAME.

    Raises:
        DataError: If it cannot be read, an id is missing, duplicate or not one word, or a text is
            empty.
    """
    queries: dict[str, str] = {}
    if str(path).startswith(IRDS):
        records = irds_records(str(path), "queries")
    elif check_file(path, _QUERY_KINDS) == "tsv":
        records = _pairs(path)
    else:
        records = read_table(path, _QUERY_KINDS)
    for record in records:
        name = "_id" if "_id" in record.fields else "id"
        query = record.word(name)
        text = record.text("text")
        if not text or query in queries:
            raise DataError(f"{record.where}: query '{query}' is a duplicate, or its text is empty")
        queries[query] = text
    return queries


def _pairs(path: Path) -> Iterator[Record]:
    for number, line in enumerate(read_lines(path), 1):
        where = f"{path}, line {number}"
        cells = line.strip("\r\n").split("\t")
        if number == 1 and _ID_HEADER.fullmatch(cells[0].strip()):
            logger.warning("%s: '%s' is a header and left out", where, " ".join(cells))
        elif len(cells) == 2:
            yield Record(dict(zip(("id", "text"), cells, strict=True)), where)
        elif cells != [""]:
            raise DataError(f"{where}: {len(cells)} columns, not two: an id, a tab, and a text")


def find_rows(corpus: Corpus, wanted: Collection[str | int]) -> dict[str, int]:
    """Return rows of passages by their names in a run, `MISSING_ROW` for one without text.

    `wanted` are names or rows of passages; unknown names are left out.

    Raises:
        DataError: If the corpus has no such field, or two passages have one name.
    """
    rows: dict[str, int] = {}
    for docno, row in corpus.names():
        if (docno in wanted or row in wanted) and rows.setdefault(docno, row) != row:
            raise DataError(
                f"two passages are called '{docno}' (rows {rows[docno]}, {row}): see --corpus_id"
            )
    return rows


def find_docnos(corpus: Corpus, candidates: Candidates) -> dict[int, str]:
    """Return the names of candidates in a run, by row. Raises as `find_rows`."""
    rows = set(np.unique(candidates.rows).tolist()) - {MISSING_ROW}
    return {row: docno for docno, row in find_rows(corpus, rows).items()}


def write_run(
    path: Path,
    queries: Iterable[str],
    candidates: Candidates,
    docnos: Mapping[int, str],
    *,
    tag: str,
) -> None:
    """Write a run file, whole or not at all; what was there is replaced.

    `queries` are ids, in the order of the candidates (B, K), of which missing ones have no line;
    `docnos` are names of passages by row, and `tag` is the system's name, one word.
    """
    lines = zip(queries, candidates.rows.tolist(), candidates.scores.tolist(), strict=True)
    with write_aside(path) as aside, aside.open("w", encoding="utf-8") as file:
        for query, rows, scores in lines:
            for rank, (row, score) in enumerate(zip(rows, scores, strict=True), 1):
                if row != MISSING_ROW:  # of a score nine digits are a float32, exactly
                    file.write(f"{query} Q0 {docnos[row]} {rank} {score:.9g} {tag}\n")


def read_qrels(path: Path) -> dict[str, dict[str, int]]:
    """Read judgements: relevance by query and passage.

    The file has four columns, `qid iteration docno relevance`, as TREC has it; or three under the
    header `query-id corpus-id score`, as BEIR has it; or the judgements are those of irds:NAME.

    Raises:
        ConfigError: If `ir-measures` is not installed.
        DataError: If it cannot be read, or a passage is judged twice for a query.
    """
    name = str(path)
    if name.startswith(IRDS):
        judged = read_irds(name, "qrels")
        lines = [(line.query_id, line.doc_id, line.relevance) for line in judged]
    else:
        lines = _read_lines(path, "read_trec_qrels")
    return _by_query(path, lines, 10_000)  # measures have a row a grade


def read_run(path: Path) -> dict[str, dict[str, float]]:
    """Read a run: scores by query and passage, its lines in any order.

    Raises:
        ConfigError: If `ir-measures` is not installed.
        DataError: If it cannot be read, a score is NaN or no float32, or a line is duplicate.
    """
    return _by_query(path, _read_lines(path, "read_trec_run"), float(np.finfo(np.float32).max))


def _read_lines(path: Path, reader: str) -> list[tuple[Any, ...]]:
    """Return the lines of a file: query, passage, value and more."""
    import ir_measures

    text = "".join(read_lines(path))
    first, _, rest = text.partition("\n")
    if first.split() == _BEIR_HEADER:  # it has no column of iterations
        text = re.sub(r"(?m)^(\S+)\s", r"\1 0 ", rest)
    with reading(path):
        return list(getattr(ir_measures, reader)(io.StringIO(text)))


def _by_query(path: Path, lines: list[tuple[Any, ...]], most: float) -> dict[str, dict[str, Any]]:
    """Return values by query and passage, and refuse what would give a wrong number."""
    table: dict[str, dict[str, Any]] = {}
    for query, docno, value, *_ in lines:
        values = table.setdefault(query, {})
        if docno in values:
            raise DataError(f"{path}: duplicate '{docno}' for '{query}'")
        if not abs(value) <= most:  # NaN too
            raise DataError(f"{path}: a value is {value}, beyond {most:g}")
        values[docno] = value
    return table


def measure_run(
    qrels: Mapping[str, Mapping[str, int]],
    queries: Sequence[str],
    candidates: Candidates,
    docnos: Mapping[int, str],
) -> dict[str, Values]:
    """Return measures of candidates, with `ir-measures`, of each judged query, (B,), in 0..1.

    They are nDCG@10, RR@10 (the mean is called MRR@10), P@1, P@10, R@10 (recall) and R@K.

    Args:
        qrels: By query and passage; other queries are ignored.
        queries: Their ids, in the order of the candidates.
        candidates: (B, K), measured in this order, also where scores are equal.
        docnos: Names of passages, by row.

    Raises:
        ConfigError: If `ir-measures` is not installed.
        DataError: If no query is judged.
    """
    import ir_measures as ir

    judged = {query: qrels[query] for query in queries if query in qrels}
    if not judged:
        raise DataError(f"no query is judged: the qrels have no query '{queries[0]}', for example")
    measures = [ir.nDCG @ 10, ir.RR @ 10, ir.P @ 1, ir.P @ 10]
    measures += [ir.R @ depth for depth in sorted({10, candidates.rows.shape[1]})]
    run = {}
    for query, rows in zip(queries, candidates.rows.tolist(), strict=True):
        # Scores that fall by rank: each measure would break ties in a way of its own.
        run[query] = {docnos[row]: -rank for rank, row in enumerate(rows) if row != MISSING_ROW}
    places = {query: place for place, query in enumerate(judged)}
    values = {str(measure): np.zeros(len(judged)) for measure in measures}
    for metric in ir.iter_calc(measures, judged, run):
        values[str(metric.measure)][places[metric.query_id]] = metric.value
    return values


def warn_of_unknown(corpus: Corpus, judged: Iterable[Mapping[str, int]]) -> None:
    """Warn of passages judged relevant that are not in the corpus, and so count as not found."""
    relevant: set[str] = set()
    for grades in judged:
        relevant |= {docno for docno, grade in grades.items() if grade > 0}
    rows = find_rows(corpus, relevant)
    unknown = [docno for docno in relevant if rows.get(docno, MISSING_ROW) == MISSING_ROW]
    if unknown:
        logger.warning(
            "%d of %d relevant passages are not in the corpus (such as '%s') and count as not "
            "found: dropped as duplicates or by --max_passages, or named by another --corpus_id",
            len(unknown),
            len(relevant),
            min(unknown),
        )


# Queries of a file for `pgra search`: a run is written and measured.


@dataclass(kw_only=True)
class QueryFileArguments(Arguments):
    """Queries of a file, and what becomes of what is found."""

    queries: str | None = arg(
        None,
        "File of queries instead of texts: a .tsv of id and text, or .jsonl or .csv with the "
        "fields id and text; or irds:NAME.",
    )
    trec: str | None = arg(
        None,
        "Write what is found for --queries as a TREC run file.",
        needs={"queries": True},
        writes=True,
    )
    qrels: str | None = arg(
        None,
        "Judgements (TREC's qrels, BEIR's .tsv, or irds:NAME) to measure what is found by.",
        needs={"queries": True},
    )
    drop_self: bool = arg(
        False, "Leave out a passage that is the query's own text, spaces aside (ArguAna)."
    )

    compare: list[str] | None = arg(
        None,
        "Measure several ways to search by --qrels, each tested against the first, such as: dense "
        "likelihood likelihood+dense cross-encoder:MODEL.",
        needs={"qrels": True},
        is_distinct=True,
    )

    def read(self, texts: Sequence[str]) -> dict[str, str]:
        """Return the queries by id: of the file, or these texts."""
        if self.queries is None:
            return {str(number): text for number, text in enumerate(texts, 1)}
        if texts:
            raise ConfigError("give texts, or --queries and a file, not both")
        return read_query_table(Path(self.queries))


def finish_run(
    args: QueryFileArguments,
    queries: Sequence[str],
    candidates: Candidates,
    corpus: Corpus,
    *,
    tag: str,
) -> str:
    """Write the run, measure it, and describe both.

    `queries` are ids. DataError if passages have no names, or no query is judged.
    """
    docnos = find_docnos(corpus, candidates)
    lines = [f"{len(queries):,} queries, up to {candidates.rows.shape[1]} passages each"]
    if args.qrels is not None:  # a fault in them is reported before a run is written
        qrels = read_qrels(Path(args.qrels))
        measured = measure_run(qrels, queries, candidates, docnos)
        judged = [qrels[query] for query in queries if query in qrels]
        warn_of_unknown(corpus, judged)
        lines.append(f"mean of {len(judged):,} judged queries:")
        lines += [f"  {name:<8} {values.mean():.4f}" for name, values in measured.items()]
    if args.trec is not None:
        write_run(Path(args.trec), queries, candidates, docnos, tag=tag)
        lines.append(f"run: {args.trec}")
    return "\n".join(lines)


class RunRetriever(Retriever):
    """Returns the candidates in a run file, whatever found them.

    A query is looked up by its text, white space aside. One without a candidate in the run is
    refused. Queries with fewer candidates than are asked for end in missing ones; ties go by row.
    """

    options_class = RunFileArguments

    def __init__(
        self,
        scores: Mapping[str, Mapping[int, float]],
        fingerprint: Fields,
        inputs: Inputs,
    ) -> None:
        self._scores = scores
        self.fingerprint = fingerprint
        self.inputs = [inputs]

    @classmethod
    def open(cls, request: IndexRequest) -> Self:
        """Read the run and its queries.

        Raises:
            ConfigError: If `ir-measures` is not installed.
            DataError: If a file cannot be read, a passage of the run is unknown or duplicate, or
                equal texts have different candidates.
        """
        options = request.options
        assert isinstance(options, RunFileArguments)  # its own
        path = Path(request.args.retriever.removeprefix("run:"))
        queries_path = Path(options.run_queries)
        corpus = request.corpus
        inputs = Inputs.of(file for file in (path, queries_path) if file.is_file())
        queries = read_query_table(queries_path)
        run = read_run(path)
        docnos = {*chain(*run.values())}
        rows = find_rows(corpus, docnos)
        if unknown := sorted(docnos - rows.keys()):
            raise DataError(f"{path}: passage '{unknown[0]}' is not in the corpus: see --corpus_id")
        scores: dict[str, dict[int, float]] = {}
        for query, text in queries.items():
            by_row = {rows[docno]: score for docno, score in run.get(query, {}).items()}
            by_row.pop(MISSING_ROW, None)
            if scores.setdefault(one_line(text), by_row) != by_row:
                raise DataError(f"{queries_path}: query '{query}' has another query's text")
        fingerprint = {
            **corpus.fingerprint,
            "run": file_checksum(path),
            "run_queries": digest(queries),
            "run_rows": digest(rows),
        }
        return cls(scores, fingerprint, inputs)

    def retrieve(self, queries: Sequence[str], k: int) -> Candidates:
        """Return each query's first k candidates of the run; a DataError if it has none of one."""
        best = Candidates.missing(len(queries), k)
        for line, query in enumerate(queries):
            scores = self._scores.get(one_line(query))
            if not scores:
                raise DataError(f"query {show(query)} has no candidate in the run")
            best.fill(line, [*scores], [*scores.values()])
        return best
