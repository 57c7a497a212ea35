"""TREC's files: queries by id, runs written and read, judgements measured; a run as first stage.

A run has six columns a line, `qid Q0 docno rank score tag`, each query's lines best first. A docno
is a passage's name in the field `corpus_id` of its corpus, or else its row.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from pgra.artifacts import digest, file_checksum, write_aside
from pgra.config import Arguments as _Arguments
from pgra.config import arg
from pgra.core import MISSING_ROW, Candidates, Json
from pgra.data.corpus import Corpus, passage_ids
from pgra.data.read import Record, check_file, read_lines, read_records, table_rows, whole_number
from pgra.errors import ConfigError, DataError, show
from pgra.retrieval.base import IndexIdentity, IndexRequest, Retriever, check_num_candidates

logger = logging.getLogger(__name__)

RUN = "run"
"""The retriever's name; its file follows a colon."""
_RUN_COLUMNS = "qid Q0 docno rank score tag"
_QRELS_COLUMNS = "qid iteration docno relevance"
_BEIR_COLUMNS = "query-id corpus-id score"
_QUERY_KINDS = ("tsv", "jsonl", "csv")
_EXCERPT = 60
_MOST_SCORE = float(np.finfo(np.float32).max)


@dataclass(kw_only=True)
class RunFileArguments(_Arguments):
    """Which queries a run file is of."""

    GROUP = "Retriever"

    run_queries: str = arg(
        "",
        "The queries of --retriever run:FILE, by whose texts its candidates are looked up: a .tsv "
        "of id and text, or .jsonl or .csv with the fields id and text.",
        must_be_given=True,
    )


def read_queries(path: Path) -> dict[str, str]:
    """Read the queries of a run: their texts by their ids, in order.

    Args:
        path: A .tsv of two columns without a header, id and text; or .jsonl or .csv with the fields
            id (or _id, as BEIR has it) and text.

    Raises:
        DataError: If it cannot be read, or an id is missing, not one word, or there twice; or a
            text is empty.
    """
    kind = check_file(path, _QUERY_KINDS)
    lines: Iterable[Record]
    if kind == "jsonl":
        lines = read_records(path)
    else:
        lines = table_rows(path, kind, ("id", "text")) if kind == "csv" else _pairs(path)
    queries: dict[str, str] = {}
    for record in lines:
        name = "_id" if "_id" in record.fields else "id"
        value = record.fields.get(name)
        is_number = isinstance(value, int) and not isinstance(value, bool)
        query = str(value) if is_number else record.text(name)
        if len(query.split()) != 1:
            raise DataError(
                f"{record.place}: the id of a query must be one word, it is {show(query)}"
            )
        if query in queries:
            raise DataError(f"{record.place}: query '{query}' is there twice")
        queries[query] = record.text("text")
        if not queries[query]:
            raise DataError(f"{record.place}: the text of query '{query}' is empty")
    if not queries:
        raise DataError(f"{path} holds no query")
    return queries


def _pairs(path: Path) -> Iterator[Record]:
    for line in read_lines(path):
        place, cells = f"{path}, line {line.number}", line.text.strip("\r\n").split("\t")
        if cells == [""]:
            continue
        if len(cells) != 2:
            raise DataError(f"{place}: {len(cells)} columns, not two: an id, a tab, and a text")
        yield Record(line.number, {"id": cells[0], "text": cells[1]}, place)


def find_docnos(corpus: Corpus, candidates: Candidates) -> dict[int, str]:
    """Return what candidates are called in a run, by row.

    Raises:
        DataError: If the corpus has no such field, or two of them have one name.
    """
    wanted = set(np.unique(candidates.rows).tolist()) - {MISSING_ROW}
    found: dict[int, str] = {}
    row_of: dict[str, int] = {}
    for row, docno in enumerate(passage_ids(corpus)):
        if row in wanted:
            _refuse_twice(row_of, docno, row)
            found[row] = docno
            if len(found) == len(wanted):
                break
    return found


def find_rows(corpus: Corpus, docnos: Collection[str]) -> dict[str, int]:
    """Return the rows of passages by what they are called in a run; unknown ones are left out.

    Raises:
        DataError: As `find_docnos`.
    """
    rows: dict[str, int] = {}
    for row, docno in enumerate(passage_ids(corpus)):
        if docno in docnos:
            _refuse_twice(rows, docno, row)
    return rows


def _refuse_twice(rows: dict[str, int], docno: str, row: int) -> None:
    if rows.setdefault(docno, row) != row:
        raise DataError(
            f"two passages are called '{docno}', rows {rows[docno]} and {row}: name another field "
            "with --corpus_id, or leave it out to call passages by their rows"
        )


def write_run(
    path: Path,
    queries: Iterable[str],
    candidates: Candidates,
    docnos: Mapping[int, str],
    *,
    tag: str,
) -> None:
    """Write a run file; it is there whole or not at all.

    Args:
        path: Where; what was there is replaced.
        queries: Their ids, in the order of the candidates.
        candidates: (B, K); missing ones have no line.
        docnos: What passages are called, by row.
        tag: The name of what found them, one word.

    Raises:
        OSError: If it cannot be written.
    """
    with write_aside(path) as aside, aside.open("w", encoding="utf-8") as file:
        for query, docno, rank, score in _entries(queries, candidates, docnos):
            file.write(f"{query} Q0 {docno} {rank} {score:.9g} {tag}\n")  # a float32, exactly


def _entries(
    queries: Iterable[str], candidates: Candidates, docnos: Mapping[int, str]
) -> Iterator[tuple[str, str, int, float]]:
    lines = zip(queries, candidates.rows.tolist(), candidates.scores.tolist(), strict=True)
    for query, rows, scores in lines:
        for rank, (row, score) in enumerate(zip(rows, scores, strict=True), 1):
            if row != MISSING_ROW:
                yield query, docnos[row], rank, score


def read_qrels(path: Path) -> dict[str, dict[str, int]]:
    """Read judgements: by query and passage, how relevant it is.

    Args:
        path: Of four columns, `qid iteration docno relevance`, as TREC has it; or of three under
            the header `query-id corpus-id score`, as BEIR has it.

    Raises:
        DataError: If a line has other columns, a relevance is no whole number, or a passage is
            judged twice for a query.
    """
    if not path.is_file():
        check_file(path, ("qrels",))  # which says that it is missing, and what lies near
    judged: dict[str, dict[str, int]] = {}
    wanted = _QRELS_COLUMNS
    for number, cells in _read_columns(path):
        if number == 1 and " ".join(cells) == _BEIR_COLUMNS:
            wanted = _BEIR_COLUMNS
            continue
        place = f"{path}, line {number}"
        _check_count(place, cells, wanted)
        query, docno, relevance = cells[0], cells[-2], cells[-1]
        grade = whole_number(relevance.removeprefix("-"))
        if grade is None:
            raise DataError(f"{place}: the relevance is {show(relevance)}, not a whole number")
        of_query = judged.setdefault(query, {})
        if docno in of_query:
            raise DataError(f"{place}: passage '{docno}' is judged twice for query '{query}'")
        of_query[docno] = -grade if relevance.startswith("-") else grade
    if not judged:
        raise DataError(f"{path} holds no judgement")
    return judged


def measure_run(
    qrels: Mapping[str, Mapping[str, int]],
    queries: Sequence[str],
    candidates: Candidates,
    docnos: Mapping[int, str],
) -> dict[str, float]:
    """Measure candidates by judgements, with `ir-measures`.

    Args:
        qrels: By query and passage; queries that are not asked are left out.
        queries: Their ids, in the order of the candidates.
        candidates: (B, K), ties as the library has them: trec_eval's, not by row.
        docnos: What passages are called, by row.

    Returns:
        The means over the queries that are judged, in 0..1: nDCG@10, RR@10 (the mean is called
        MRR@10), P@10, R@10 (recall) and R@K.

    Raises:
        ConfigError: If `ir-measures` is not installed.
        DataError: If no query is judged.
    """
    ir = import_ir_measures()
    judged = {query: dict(qrels[query]) for query in queries if query in qrels}
    if not judged:
        raise DataError(
            f"no query is judged: the qrels name queries such as '{next(iter(qrels))}', these are "
            f"such as '{queries[0]}'"
        )
    depths = sorted({10, candidates.rows.shape[1]})
    measures = [ir.nDCG @ 10, ir.RR @ 10, ir.P @ 10, *(ir.R @ depth for depth in depths)]
    run: dict[str, dict[str, float]] = {query: {} for query in judged}
    for query, docno, _, score in _entries(queries, candidates, docnos):
        if query in judged:
            run[query][docno] = score
    if not any(judged[query].keys() & found.keys() for query, found in run.items()):
        logger.warning(
            "no passage that was found is judged: the qrels call passages such as '%s'; name the "
            "field of such names with --corpus_id",
            next(iter(next(iter(judged.values())))),
        )
    means = ir.calc_aggregate(measures, judged, run)
    return {str(measure): float(means[measure]) for measure in measures}


def import_ir_measures() -> Any:
    """Import `ir-measures`.

    Raises:
        ConfigError: If it is not installed.
    """
    try:
        import ir_measures
    except ImportError:
        raise ConfigError("--qrels needs ir-measures: pip install 'pgra[trec]'") from None
    return ir_measures


def _read_columns(path: Path) -> Iterator[tuple[int, list[str]]]:
    for line in read_lines(path):
        if cells := line.text.split():
            yield line.number, cells


def _check_count(place: str, cells: Sequence[str], wanted: str) -> None:
    if len(cells) != len(wanted.split()):
        raise DataError(f"{place}: {len(cells)} columns, not {len(wanted.split())}: {wanted}")


@dataclass(frozen=True)
class _Line:
    number: int
    docno: str
    score: float


def _read_run(path: Path) -> dict[str, list[_Line]]:
    """Read a run's lines by query, best first."""
    if not path.is_file():
        check_file(path, ("txt",))  # which says that it is missing, and what lies near
    found: dict[str, dict[str, _Line]] = {}
    last: dict[str, _Line] = {}
    for number, cells in _read_columns(path):
        place = f"{path}, line {number}"
        _check_count(place, cells, _RUN_COLUMNS)
        query, _, docno, rank, told, _ = cells
        if not rank.isdecimal():
            raise DataError(f"{place}: the rank is '{rank}', not a number: {_RUN_COLUMNS}")
        line = _Line(number, docno, _read_score(place, told))
        of_query = found.setdefault(query, {})
        if docno in of_query:
            raise DataError(
                f"{place}: passage '{docno}' is there twice for query '{query}', first on line "
                f"{of_query[docno].number}"
            )
        if of_query and line.score > last[query].score:
            raise DataError(
                f"{place}: the score of query '{query}' rises from {last[query].score:g} (line "
                f"{last[query].number}) to {line.score:g}: its lines must stand best first"
            )
        of_query[docno] = last[query] = line
    if not found:
        raise DataError(f"{path} holds no candidate")
    return {query: list(lines.values()) for query, lines in found.items()}


def _read_score(place: str, told: str) -> float:
    try:
        score = float(told)
    except ValueError:
        score = float("nan")
    if not abs(score) <= _MOST_SCORE:  # NaN too
        raise DataError(f"{place}: the score is '{told}', not a number")
    return score


class RunRetriever(Retriever):
    """Gives the candidates that a run file holds, whatever found them.

    A query is looked up by its text, white space aside, among the run's queries. One that is not
    there, or has no candidate in the run, is refused. Queries with fewer candidates than are asked
    for end in missing ones.
    """

    Arguments = RunFileArguments

    def __init__(
        self,
        path: Path,
        queries_path: Path,
        found: Mapping[str, Candidates],
        fingerprint: Mapping[str, Json],
        num_passages: int,
    ) -> None:
        self.fingerprint = fingerprint
        self._path, self._queries_path = path, queries_path
        self._found, self._num_passages = found, num_passages

    @classmethod
    def open(cls, request: IndexRequest) -> Self:
        """Read the run and its queries.

        Raises:
            ConfigError: If no file is named.
            DataError: If a file cannot be read; if a query or a passage of the run is unknown, or
                has two lines; or if equal texts have different candidates. The line is named.
        """
        name = request.args.retriever.partition(":")[2]
        if not name:
            raise ConfigError(f"retriever '{RUN}' is of no file: give --retriever {RUN}:FILE")
        options = request.options or RunFileArguments()
        assert isinstance(options, RunFileArguments)  # its own
        path, queries_path, corpus = Path(name), Path(options.run_queries), request.corpus
        queries, run = read_queries(queries_path), _read_run(path)
        for query, lines in run.items():
            if query not in queries:
                raise DataError(
                    f"{path}, line {lines[0].number}: query '{query}' is not in {queries_path}"
                )
        rows = find_rows(corpus, {line.docno for lines in run.values() for line in lines})
        found: dict[str, Candidates] = {}
        for query, text in queries.items():
            candidates = _as_candidates(path, corpus, run.get(query, []), rows)
            known = found.setdefault(_key(text), candidates)
            if known.rows.tolist() != candidates.rows.tolist():
                raise DataError(
                    f"{queries_path}: query '{query}' has the text of another query, and other "
                    "candidates: queries are looked up by their texts, so keep one of the two"
                )
        most = max(len(lines) for lines in run.values())
        if most < request.args.num_candidates:
            logger.warning(
                "%s holds %d candidates a query or fewer, and num_candidates is %d",
                path,
                most,
                request.args.num_candidates,
            )
        fingerprint: dict[str, Json] = {
            **corpus.fingerprint,
            "run": file_checksum(path),
            "run_queries": file_checksum(queries_path),
            "run_rows": digest(rows),
        }
        return cls(path, queries_path, found, fingerprint, len(corpus))

    @classmethod
    def identify(cls, request: IndexRequest) -> IndexIdentity:
        """Return what the files hold; there is no index."""
        return IndexIdentity(cls.open(request).fingerprint)

    @classmethod
    def folders(cls, request: IndexRequest) -> list[Path]:
        """Refuse: whatever found the candidates had the index.

        Raises:
            ConfigError: Always.
        """
        name = request.args.retriever
        raise ConfigError(f"retriever '{name}' has no index: there is nothing to build")

    def retrieve(self, queries: Sequence[str], k: int) -> Candidates:
        """Return each query's first k candidates of the run.

        Raises:
            ConfigError: If k exceeds the corpus.
            DataError: If a query is not in the run.
        """
        check_num_candidates(k, self._num_passages)
        rows = np.full((len(queries), k), MISSING_ROW, dtype=np.int64)
        scores = np.full((len(queries), k), -np.inf, dtype=np.float32)
        for line, query in enumerate(queries):
            found = self._found.get(_key(query))
            if found is None:
                raise DataError(f"query {_excerpt(query)} is not in {self._queries_path}")
            if not found.rows.size:
                raise DataError(f"query {_excerpt(query)} has no candidate in {self._path}")
            best = found.top(k)
            rows[line, : best.rows.shape[1]] = best.rows[0]
            scores[line, : best.rows.shape[1]] = best.scores[0]
        return Candidates(rows, scores)


def _as_candidates(
    path: Path, corpus: Corpus, lines: Sequence[_Line], rows: Mapping[str, int]
) -> Candidates:
    for line in lines:
        if line.docno not in rows:
            name = corpus.made_by and corpus.made_by.corpus_id
            way = (
                f"no passage has it in the field '{name}'; was it dropped as a duplicate?"
                if name
                else f"it is no row (0 to {len(corpus) - 1}); name the field of such names with "
                "--corpus_id"
            )
            raise DataError(
                f"{path}, line {line.number}: passage '{line.docno}' is not in the corpus: {way}"
            )
    found = np.array([[rows[line.docno] for line in lines]], dtype=np.int64)
    scores = np.array([[line.score for line in lines]], dtype=np.float32)
    return Candidates.best(found, scores, len(lines))


def _key(text: str) -> str:
    return " ".join(text.split())


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}...")
