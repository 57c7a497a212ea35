"""Where a corpus' texts come from: a file, a file on the hub, a data set on the hub, a bundled one.

A source gives raw texts one after the other, never all at once; `pgra.data.corpus` makes passages.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from pgra.data.bundled import bundled_corpus_file
from pgra.data.hubfile import data_set_builder, fetch_file, hub_errors, hub_reason
from pgra.data.textfile import (
    PACKED,
    Position,
    Spoiled,
    check_file,
    is_utf8,
    read_lines,
    read_records,
)
from pgra.errors import DataError
from pgra.io import file_checksum

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
