"""The searched collection: where its passages come from, memory-mapped and fetched by row.

A passage is one line, or one value of a JSON or parquet field: white space around it is dropped,
and a line break inside a value becomes a space. With `passage_words` a line is a document, and its
passages are blocks of so many words that do not overlap (Karpukhin et al. 2020, section 4.1), the
last as long as what is left. Blank lines and missing values are dropped, and so are lines that are
not UTF-8, if they are at most one in a hundred. Of equal passages the first stays. All are counted;
`strict` refuses them. Several sources are one corpus: their passages in the order of the sources,
so that one more adds rows behind.
"""

import hashlib
import logging
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from tqdm import tqdm

from pgra.artifacts import Manifest, artifact_dir, build_once, file_checksum, read_manifest
from pgra.config import CorpusArguments
from pgra.core import Json, Rows
from pgra.data.bundled import bundled_corpus_file
from pgra.data.read import (
    PACKED,
    Position,
    Spoiled,
    check_file,
    data_set_builder,
    fetch_file,
    hub_errors,
    hub_reason,
    is_utf8,
    read_lines,
    read_records,
)
from pgra.errors import ArtifactError, DataError

# Where a corpus' texts come from: a file, a file on the hub, a data set on the hub, a bundled one.
#
# A source gives raw texts one after the other, never all at once; `pgra.data.corpus` makes
# passages.


BUNDLED = "bundled:"
KINDS = ("txt", "jsonl", "parquet")
_HUB_DATASET = re.compile(r"[\w.-]+/[\w.-]+(:[^:/\\]*){0,2}")
_READ_ROWS = 1 << 12


class Source(Protocol):
    """Texts from somewhere.

    Attributes:
        kind: "txt", "jsonl", "parquet" or "dataset".
        size: What there is to read, in `unit`.
        unit: "B" (bytes on disk) or "row".
        position: How much of it has been read.
        spoiled: Lines that were left out, as they are not UTF-8.
    """

    kind: str
    size: int
    unit: str
    position: Position
    spoiled: Spoiled

    @property
    def where(self) -> str:
        """The source in words, for messages."""
        ...

    @property
    def identity(self) -> str:
        """What the texts are, in fingerprints: a file's checksum, a data set's commit."""
        ...

    def texts(self, column: str) -> Iterator[str]:
        """Give the texts in order; a missing value of a table is an empty text.

        Args:
            column: The field that holds the text, where there are several.

        Raises:
            DataError: If it cannot be read to its end, or has no such field of text.
        """
        ...


def find_source(name: str) -> Source:
    """Find a corpus by name: a path, bundled:NAME, OWNER/SET/FILE or OWNER/SET[:CONFIG[:SPLIT]].

    Raises:
        DataError: If there is none, or it is of a kind that is not read.
    """
    if name.startswith(BUNDLED):
        return _open_file(bundled_corpus_file(name.removeprefix(BUNDLED)))
    path = Path(name).expanduser()
    parts = name.split("/")
    if path.exists() or not all(parts) or parts[0] in (".", "..", "~") or path.parent.is_dir():
        return _open_file(path)
    if len(parts) >= 3:
        return _open_file(_fetch_from_hub(name, "/".join(parts[:2]), "/".join(parts[2:])))
    suffixes = [s.lower().lstrip(".") for s in path.suffixes if s.lower() not in PACKED]
    if _HUB_DATASET.fullmatch(name) and (":" in name or not {*suffixes} & {*KINDS}):
        return _load_from_hub(name)
    return _open_file(path)


@dataclass
class _FileSource:
    path: Path
    kind: str
    size: int
    unit: str = "B"
    position: Position = field(default_factory=Position)
    spoiled: Spoiled = field(default_factory=Spoiled)

    @property
    def where(self) -> str:
        return str(self.path)

    @property
    def identity(self) -> str:
        return file_checksum(self.path)

    def texts(self, column: str) -> Iterator[str]:
        if self.kind == "parquet":
            return _parquet_texts(self, column)
        return _json_texts(self, column) if self.kind == "jsonl" else _line_texts(self)


@dataclass
class _DatasetSource:
    """A split of a hub data set, which `datasets` keeps on disk and memory-maps."""

    where: str
    identity: str
    table: Any
    size: int
    kind: str = "dataset"
    unit: str = "row"
    position: Position = field(default_factory=Position)
    spoiled: Spoiled = field(default_factory=Spoiled)

    def texts(self, column: str) -> Iterator[str]:
        _check_column(self.where, column, self.table.data.schema)
        rows = self.table.select_columns([column]).with_format("arrow")
        for batch in rows.iter(_READ_ROWS):
            for chunk in batch.column(column).chunks:
                yield from _column_texts(self.where, column, chunk, self.position.done)
                self.position.done += len(chunk)


def _open_file(path: Path) -> Source:
    kind = check_file(path, KINDS)
    if kind == "parquet" and path.suffix.lower() in PACKED:
        raise DataError(f"{path}: parquet is packed inside and is not read in another: unpack it")
    return _FileSource(path, kind, path.stat().st_size)


def _line_texts(source: _FileSource) -> Iterator[str]:
    num_lines, has_returns = 0, False
    for line in read_lines(source.path, source.position, spoiled=source.spoiled):
        num_lines, has_returns = num_lines + 1, has_returns or "\r" in line.text.strip()
        yield line.text.replace("\r", " ")  # a stray one is white space
    if num_lines == 1 and has_returns:
        raise DataError(
            f"{source.where} is one line with carriage returns inside, as files with CR line ends "
            "are: convert them to LF (tr '\\r' '\\n' < OLD > NEW)"
        )


def _json_texts(source: _FileSource, column: str) -> Iterator[str]:
    for record in read_records(source.path, source.position, spoiled=source.spoiled):
        value = record.fields.get(column)
        place = f"{source.where}, line {record.line}"
        if column not in record.fields:
            raise DataError(
                f"{place}: no field '{column}' (it has {', '.join(record.fields) or 'none'}): "
                "name another with --corpus_field"
            )
        if not isinstance(value, str):
            raise DataError(f"{place}: '{column}' is a {type(value).__name__}, not text")
        yield _one_line(value, place, column)


def _parquet_texts(source: _FileSource, column: str) -> Iterator[str]:
    try:
        with pq.ParquetFile(source.path) as file:
            _check_column(source.where, column, file.schema_arrow)
            num_rows, done = max(1, file.metadata.num_rows), 0
            for batch in file.iter_batches(_READ_ROWS, columns=[column]):
                yield from _column_texts(source.where, column, batch.column(0), done)
                done += len(batch)
                source.position.done = source.size * done // num_rows
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{source.where} is damaged or is not parquet ({reason})") from None


def _check_column(where: str, column: str, schema: Any) -> None:
    if column not in schema.names:
        raise DataError(
            f"{where}: no field '{column}' (it has {', '.join(schema.names) or 'none'}): "
            "name another with --corpus_field"
        )
    kind = schema.field(column).type
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_text = pa.types.is_string(plain) or pa.types.is_large_string(plain)
    if not is_text and not pa.types.is_string_view(plain):
        raise DataError(
            f"{where}: '{column}' is {kind}, not text: name another with --corpus_field"
        )


def _column_texts(where: str, column: str, values: Any, start: int) -> Iterator[str]:
    """Give a column's texts; rows are counted from `start`, messages from 1."""
    for number, scalar in enumerate(values, start + 1):
        place = f"{where}, row {number}"
        try:
            value = scalar.as_py()
        except UnicodeDecodeError:
            raise DataError(f"{place}: '{column}' is not UTF-8") from None
        yield "" if value is None else _one_line(value, place, column)


def _one_line(value: str, place: str, column: str) -> str:
    if not is_utf8(value):
        raise DataError(f"{place}: '{column}' holds a NUL or half a surrogate pair")
    return " ".join(value.split("\n"))


def _fetch_from_hub(name: str, repo: str, file: str) -> Path:
    try:
        return fetch_file(repo, file)
    except hub_errors() as error:
        raise _not_found(name, error) from None


def _not_found(name: str, error: BaseException) -> DataError:
    return DataError(
        f"cannot find corpus '{name}': there is no such file here, and the hub says: "
        f"{hub_reason(error)} Give a local .txt, .jsonl or .parquet file, a data set's file or "
        "OWNER/SET:CONFIG, or a bundled: name (pgra data lists them)."
    )


def _load_from_hub(name: str) -> Source:
    from datasets.exceptions import DatasetGenerationError, DatasetsError

    repo, _, rest = name.partition(":")
    config, _, split = rest.partition(":")
    try:
        builder = data_set_builder(repo, config or None)
        builder.download_and_prepare()
        tables = builder.as_dataset()
    except hub_errors(DatasetsError, ValueError, RuntimeError) as error:
        is_vague = isinstance(error, DatasetGenerationError)  # its cause is not
        raise _not_found(name, (error.__cause__ if is_vague else None) or error) from None
    split = _choose_split(name, split, tables)
    identity = f"{repo}@{builder.hash}/{builder.config.name}/{split}"
    table = tables[split]
    return _DatasetSource(f"data set '{name}', split '{split}'", identity, table, len(table))


def _choose_split(name: str, split: str, tables: Mapping[str, Any]) -> str:
    """Take the split that is asked for, or the only one, or train."""
    chosen = split or (next(iter(tables)) if len(tables) == 1 else "train")
    if chosen not in tables:
        raise DataError(
            f"data set '{name}' has no split '{chosen}' (it has {', '.join(tables)}): name one, as "
            "OWNER/SET:CONFIG:SPLIT"
        )
    return chosen


# Which texts came before, in memory that does not grow with their number.
#
# Hashes of 128 bits lie in sorted runs; a run that is full goes to a file without a name, which the
# system removes with the process, and is memory-mapped.


_RUN_ROWS = 1 << 23
"""Hashes in a full run, 128 MB. A look into one takes 8 ms for 16,384 texts (one core of a shared
machine), so that a billion texts, 120 runs in the end, take 8 hours in all."""

_Keys = npt.NDArray[np.uint64]  # (2, n): the halves of n hashes, sorted by the first


class SeenTexts:
    """Tells new texts from those that came before; equal means an equal xxh3-128."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: list[_Keys] = []  # the full ones first, then ever shorter ones

    def add(self, texts: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Take texts in, and say which are new.

        Args:
            texts: In their order: of equal ones the first is new.

        Returns:
            (n,) bool.

        Raises:
            OSError: If a full run cannot be written.
        """
        joined = b"".join(xxhash.xxh3_128_digest(text.encode()) for text in texts)
        halves = np.frombuffer(joined, dtype=np.uint64).reshape(-1, 2)
        order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: the first of equals stays first
        keys = np.ascontiguousarray(halves[order].T)
        is_new = np.ones(len(texts), dtype=np.bool_)
        is_new[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
        for run in self._runs:
            is_new &= ~_is_in(run, keys)
        self._keep(keys[:, is_new])
        answer = np.empty_like(is_new)
        answer[order] = is_new
        return answer

    def _keep(self, keys: _Keys) -> None:
        """Take a sorted run in; runs of like length become one, so that there are few."""
        while self._runs and self._runs[-1].shape[1] <= 2 * keys.shape[1] < _RUN_ROWS:
            both = np.concatenate([self._runs.pop(), keys], axis=1)
            keys = both[:, np.argsort(both[0], kind="stable")]
        if keys.shape[1] >= _RUN_ROWS // 2:
            self._runs.insert(0, self._write(keys))
        elif keys.shape[1]:
            self._runs.append(keys)

    def _write(self, keys: _Keys) -> _Keys:
        with tempfile.TemporaryFile(dir=self._folder) as file:
            file.write(keys.tobytes())
            file.flush()
            return np.memmap(file, dtype=np.uint64, mode="r", shape=keys.shape)


def _is_in(run: _Keys, keys: _Keys) -> npt.NDArray[np.bool_]:
    # Two hashes that share their first 64 bits but not the rest would hide the second one; among
    # a billion texts that is one chance in forty, and then costs a duplicate that is kept.
    places = np.minimum(np.searchsorted(run[0], keys[0]), run.shape[1] - 1)
    found: npt.NDArray[np.bool_] = (run[:, places] == keys).all(axis=0)
    return found


logger = logging.getLogger(__name__)

STAGE = "corpus"
COUNTS = ("rows", "blank", "duplicates", "not_utf8")
_FILE = "corpus.arrow"
_BATCH_ROWS = 1 << 14
_SCHEMA = pa.schema([("text", pa.large_string())])


@dataclass(frozen=True)
class Corpus:
    """Passages on disk. Nothing of the text is in memory but what is asked for.

    Attributes:
        folder: The artefact that holds them.
        fingerprint: {"corpus_sha256", "rows"}: the sha256 of the passages, one a line.
        counts: {"rows", "blank", "duplicates", "not_utf8"}: kept, and what the source held beside.
        batches: The memory-mapped text, `_BATCH_ROWS` rows each but the last.
        made_by: How it was asked for; None where it was opened by its folder.
    """

    folder: Path
    fingerprint: Mapping[str, Json]
    counts: Mapping[str, int]
    batches: Sequence[Any]
    made_by: CorpusArguments | None = None

    def __len__(self) -> int:
        """Count the passages."""
        return self.counts["rows"]

    def __getitem__(self, row: int) -> str:
        """Give one passage.

        Raises:
            IndexError: If there is no such row.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of a corpus of {len(self)} passages")
        return str(self.batches[row // _BATCH_ROWS].column(0)[row % _BATCH_ROWS].as_py())

    def texts(self, rows: Sequence[int] | Rows) -> list[str]:
        """Give the passages of these rows, in the order asked, repeats included.

        Raises:
            IndexError: If a row is outside the corpus, such as `MISSING_ROW`.
        """
        wanted = np.asarray(rows, dtype=np.int64).reshape(-1)
        if not len(wanted):
            return []
        if wanted.min() < 0 or wanted.max() >= len(self):
            wrong = wanted[(wanted < 0) | (wanted >= len(self))][0]
            raise IndexError(f"row {wrong} of a corpus of {len(self)} passages")
        order = np.argsort(wanted, kind="stable")
        homes = wanted[order] // _BATCH_ROWS
        starts = np.flatnonzero(np.r_[True, homes[1:] != homes[:-1]])
        found: list[str] = []
        for start, stop in zip(starts, [*starts[1:], len(wanted)], strict=True):
            inside = wanted[order[start:stop]] % _BATCH_ROWS
            found += self.batches[homes[start]].column(0).take(pa.array(inside)).to_pylist()
        given = [""] * len(wanted)
        for place, text in zip(order.tolist(), found, strict=True):
            given[place] = text
        return given

    def slice(self, start: int, stop: int) -> list[str]:
        """Give the passages from `start` up to `stop`, which may lie past the end."""
        return self.texts(np.arange(max(start, 0), min(stop, len(self))))

    def batched(self, size: int) -> Iterator[list[str]]:
        """Give all passages in order, `size` at a time."""
        for start in range(0, len(self), size):
            yield self.slice(start, start + size)


def open_corpus(args: CorpusArguments, artifacts: Path, *, is_told: bool = True) -> Corpus:
    """Open a corpus by name, reading its source into `artifacts/corpora` the first time.

    The folder's name holds the source's checksum, so a changed source is read again.

    Args:
        args: Which corpus, and the rules for its lines.
        artifacts: Root of all products.
        is_told: Whether to say what was read; the user did not ask for every corpus there is.

    Raises:
        DataError: If a source is missing, of an unknown kind, empty, damaged or not UTF-8; with
            `strict`, if it holds lines that were dropped.
        ArtifactError: If what was read before is damaged.
    """
    sources = [find_source(name) for name in args.sources]
    kinds, identities = [s.kind for s in sources], [s.identity for s in sources]
    fields: dict[str, Json] = {
        "source": identities[0] if len(sources) == 1 else identities,
        "kind": kinds[0] if len(sources) == 1 else kinds,
        "field": None if {*kinds} == {"txt"} else args.corpus_field,
        "max_passages": args.max_passages,
        "drop_duplicates": args.drop_duplicates,
    }
    if args.passage_words is not None:  # folders of corpora made without it keep their names
        fields["passage_words"] = args.passage_words
    name = Path(args.sources[0].removeprefix(BUNDLED)).name.split(".")[0].replace(":", "-")
    folder = artifact_dir(artifacts / "corpora", name, fields)
    built = build_once(
        folder,
        stage=STAGE,
        fingerprint=fields,
        build=lambda aside: _CorpusWriter(args, sources, is_told=is_told).write(aside),
        verify=False,  # it may be large
    )
    corpus = replace(_open(folder, built.manifest), made_by=args)
    if args.strict:
        _refuse_dropped(corpus, args)
    return corpus


def _refuse_dropped(corpus: Corpus, args: CorpusArguments) -> None:
    names = {"blank": "blank lines", "not_utf8": "lines that are not UTF-8"}
    if args.drop_duplicates:
        names["duplicates"] = "duplicates"
    told = [f"{corpus.counts[key]:,} {what}" for key, what in names.items() if corpus.counts[key]]
    if told:
        raise DataError(
            f"{', '.join(args.sources)} holds {', '.join(told)}, and --strict refuses them: mend "
            "the file, or leave --strict out to drop and count them"
        )


def changed_sources(args: CorpusArguments, folder: Path) -> list[str]:
    """Name the sources that are not, or no more, what a corpus was read from.

    Args:
        args: How the corpus was asked for.
        folder: Where it was read into.

    Raises:
        DataError: If a source is missing.
        ArtifactError: If the folder is missing, unfinished or damaged.
    """
    made = read_manifest(folder, stage=STAGE, verify=False).fingerprint["source"]
    checksums = made if isinstance(made, list) else [made]
    pairs = zip(args.sources, checksums, strict=True)
    return [name for name, checksum in pairs if find_source(name).identity != checksum]


def load_corpus(folder: Path) -> Corpus:
    """Open a corpus that was read before.

    Raises:
        ArtifactError: If the folder is missing, unfinished or damaged.
    """
    return _open(folder, read_manifest(folder, stage=STAGE, verify=False))


def _open(folder: Path, manifest: Manifest) -> Corpus:
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(folder / _FILE)))
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
    except (pa.ArrowInvalid, OSError) as error:
        raise ArtifactError(
            f"{folder / _FILE} cannot be read ({error}): delete {folder} and run again"
        ) from None
    counts = {name: int(str(manifest.counts.get(name, 0))) for name in COUNTS}
    fingerprint = {"corpus_sha256": manifest.counts["sha256"], "rows": counts["rows"]}
    return Corpus(folder, fingerprint, counts, batches)


class _CorpusWriter:
    """Streams sources into an Arrow file, in memory that does not grow with them."""

    def __init__(self, args: CorpusArguments, sources: Sequence[Source], *, is_told: bool) -> None:
        self.args = args
        self.is_told = is_told
        self.sources = sources
        self.where = ", ".join(source.where for source in sources)
        self.sha256 = hashlib.sha256()
        self.rows = self.blank = self.duplicates = self.cut = 0

    def write(self, folder: Path) -> Mapping[str, Json]:
        with pa.OSFile(str(folder / _FILE), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as sink:
            batch: list[str] = []
            for kept in self._kept(SeenTexts(folder)):
                batch += kept
                while len(batch) >= _BATCH_ROWS:
                    self._flush(sink, batch[:_BATCH_ROWS])
                    del batch[:_BATCH_ROWS]
            self._flush(sink, batch)
        for source in self.sources:
            source.spoiled.check()
        if not self.rows:
            raise DataError(f"{self.where} holds no passage: all of its lines are blank")
        self._tell()
        return {
            "rows": self.rows,
            "blank": self.blank,
            "duplicates": self.duplicates,
            "not_utf8": sum(source.spoiled.count for source in self.sources),
            "sha256": self.sha256.hexdigest(),
        }

    def _tell(self) -> None:
        if self.args.passage_words is not None and not self.cut:
            logger.warning(
                "corpus %s: no line has more than %d words, so passage_words cuts nothing; a line "
                "must be a document",
                self.where,
                self.args.passage_words,
            )
        logger.log(
            logging.INFO if self.is_told else logging.DEBUG,
            "corpus %s: %d passages, %d blank lines dropped, %d duplicates %s",
            self.where,
            self.rows,
            self.blank,
            self.duplicates,
            "dropped" if self.args.drop_duplicates else "kept",
        )
        for source in self.sources:
            if source.spoiled.count:
                told = source.spoiled
                logger.warning("corpus: %d lines dropped, as %s", told.count, told.first)

    def _flush(self, sink: Any, batch: list[str]) -> None:
        if batch:
            sink.write_batch(pa.record_batch([pa.array(batch, pa.large_string())], schema=_SCHEMA))
            self.sha256.update("".join(f"{passage}\n" for passage in batch).encode())
            self.rows += len(batch)

    def _kept(self, seen: SeenTexts) -> Iterator[list[str]]:
        """Give what is kept, some passages at a time; no more is read than is needed for them."""
        passages, rest = self._passages(), self.args.max_passages or sys.maxsize
        with self._bar() as bar:
            num_seen = 0
            while batch := list(islice(passages, min(_BATCH_ROWS, rest))):
                is_new = seen.add(batch)
                self.duplicates += len(batch) - int(is_new.sum())
                if self.args.drop_duplicates:
                    kept = [text for text, new in zip(batch, is_new, strict=True) if new]
                else:
                    kept = batch
                yield kept
                rest -= len(kept)
                num_seen += len(batch)
                self._show(bar, num_seen)

    def _bar(self) -> Any:
        """Make a bar of what is read of the source; a short corpus shows none."""
        units = {source.unit for source in self.sources}
        return tqdm(
            total=sum(source.size for source in self.sources),
            desc="read",
            unit=units.pop() if len(units) == 1 else "",
            unit_scale=True,
            delay=2,
            disable=not self.is_told,
        )

    def _show(self, bar: Any, num_seen: int) -> None:
        seconds = bar.format_dict["elapsed"]
        speed = f"{num_seen / seconds:,.0f} texts/s" if seconds else ""
        bar.set_postfix_str(f"{num_seen:,} texts, {speed}", refresh=False)
        bar.update(sum(source.position.done for source in self.sources) - bar.n)

    def _passages(self) -> Iterator[str]:
        for source in self.sources:
            for text in source.texts(self.args.corpus_field):
                yield from self._cut(text)

    def _cut(self, text: str) -> list[str]:
        document = text.strip()
        if not document:
            self.blank += 1
            return []
        if self.args.passage_words is None:
            return [document]
        blocks = cut_words(document, self.args.passage_words)
        self.cut += len(blocks) > 1
        return blocks


def cut_words(text: str, num_words: int) -> list[str]:
    """Cut a text into blocks of so many words, one space between two; the last holds the rest."""
    words = text.split()
    starts = range(0, len(words), num_words)
    return [" ".join(words[start : start + num_words]) for start in starts]
