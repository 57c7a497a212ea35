"""Reading data files: lines (plain, gzip, zstd), tables (jsonl, csv, tsv) and hub data sets."""

import csv
import io
import json
import logging
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

import numpy as np
import pyarrow as pa

from pgra.errors import DataError, cut, like_names, show, unknown_name

_MOST_DIGITS = 18  # of what fits into 64 bits
_CODECS = {".gz": "gzip", ".zst": "zstd"}
PACKED = tuple(_CODECS)
TABLES = ("jsonl", "csv", "tsv")
_TOLD_LINES = 1024


@dataclass
class Reading:
    """How far a file is read, and how many lines were left out because they are not UTF-8.

    Attributes:
        MOST: If more than one line in so many is not, the file is in another encoding.
        done: Bytes of the file on disk, packed as it may be.
        lines: Lines read so far, these included.
        count: How many were left out.
        first: What is wrong with the first of them.
    """

    MOST: ClassVar[int] = 100
    done: int = 0
    lines: int = 0
    count: int = 0
    first: DataError | None = None

    def check(self) -> None:
        """Raise the first line's DataError if the file is in another encoding."""
        if self.first is not None and self.count * self.MOST > self.lines:
            raise self.first


@dataclass(frozen=True)
class Line:
    """One line of a file with its line break; numbers count from 1."""

    number: int
    text: str


@dataclass(frozen=True)
class Record:
    """One row of a source: a JSON object, a line of a table, a row of a data set.

    Attributes:
        line: The line it stands on, from 1; of a data set its row, from 0.
        place: Where it stands, in words.
    """

    line: int
    fields: Mapping[str, object]
    place: str

    def text(self, name: str) -> str:
        """Return a field's text, stripped; a DataError if it is missing or no text."""
        if name not in self.fields:
            raise self.lacks(name)
        return clean_text(self.place, name, self.fields[name])

    def lacks(self, name: str) -> DataError:
        """Return the error of a missing field, with the nearest that is there."""
        found = [str(field) for field in self.fields]
        near = like_names(name, found)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        names = cut(", ".join(found)) or "none"
        return DataError(f"{self.place}: no column '{name}'.{hint} Found: {names}.")


def check_file(path: Path, kinds: Sequence[str]) -> str:
    """Return a file's kind: its suffix without the dot and without `.gz` or `.zst`.

    Raises:
        DataError: If it is missing, no plain file, empty, or its kind is not in `kinds`.
    """
    if path.is_dir():
        raise DataError(f"{path} is a folder: give a file inside it")
    if not path.exists():
        raise DataError(f"{path} does not exist")
    if not path.is_file():
        raise DataError(f"{path} is a device or a pipe: give a plain file")
    suffixes = [s.lower().lstrip(".") for s in path.suffixes if s.lower() not in PACKED]
    kind = suffixes[-1] if suffixes else ""
    if kind not in kinds:
        accepted = ", ".join(f".{k}" for k in kinds)
        raise DataError(
            f"{path} has a suffix that is not read here: use {accepted}, or those with .gz or .zst"
        )
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty")
    return kind


def read_table(
    path: Path,
    kinds: Sequence[str] = TABLES,
    columns: Iterable[str] = (),
    reading: Reading | None = None,
) -> Iterator[Record]:
    """Open a table of one of `kinds`, and yield its rows one at a time.

    A csv or tsv has a header; in a tsv a quote mark is a character. `columns` are those that are
    read of a tsv, `reading` is as in `read_lines`.

    Raises:
        DataError: At once, if it is missing, empty or of another kind; later, if a line is no JSON
            object, a row's cells do not match the header, or a tsv cell in `columns` is quoted.
    """
    kind = check_file(path, kinds)
    return _objects(path, reading) if kind == "jsonl" else _rows(path, kind, columns)


def whole_number(text: str) -> int | None:
    """Return the number of up to 18 ASCII digits; None for any other text."""
    is_one = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
    return int(text) if is_one else None


def read_lines(path: Path, reading: Reading | None = None) -> Iterator[Line]:
    """Yield a file's lines, one at a time; a byte order mark is dropped.

    `reading` is kept up to date, and lines that are not UTF-8 are left out; None refuses them.

    Raises:
        DataError: If it is cut short, not gzip or zstd, binary or not UTF-8 (line and byte named).
    """
    codec = _CODECS.get(path.suffix.lower())
    try:
        with path.open("rb") as raw, _unpack(raw, codec) if codec else raw as file:
            for number, data in enumerate(file, 1):
                if reading is not None:
                    reading.lines = number
                    if number % _TOLD_LINES == 0:
                        reading.done = raw.tell()
                if b"\0" in data:
                    raise DataError(
                        f"{path}, line {number}: a NUL byte, so this is a binary or UTF-16 file; "
                        "save it as UTF-8 text"
                    )
                try:
                    text = data.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    wrong = DataError(
                        f"{path}, line {number}, byte {error.start + 1}: "
                        f"0x{data[error.start]:02x} is not UTF-8; convert the file "
                        "(iconv -f ENCODING -t UTF-8)"
                    )
                    if reading is None:
                        raise wrong from None
                    reading.count, reading.first = reading.count + 1, reading.first or wrong
                else:
                    yield Line(number, text)
    except OSError as error:
        if codec and error.errno is None:  # pyarrow's own: the system's have a number
            raise DataError(
                f"{path} is cut short or is not {codec} ({error}): fetch it again"
            ) from None
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None


def _unpack(raw: BinaryIO, codec: str) -> BinaryIO:
    packed = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), codec)
    return cast(BinaryIO, io.BufferedReader(packed, 1 << 20))


def is_utf8(text: str) -> bool:
    """Whether a text can be kept as UTF-8: it holds no NUL and no half surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def _objects(path: Path, reading: Reading | None) -> Iterator[Record]:
    """Yield a jsonl file's objects; blank lines are skipped."""
    for line in read_lines(path, reading):
        if not line.text.strip():
            continue
        place = f"{path}, line {line.number}"
        try:
            value = parse_json(line.text)
        except ValueError as error:
            raise DataError(f"{place}: not JSON ({error})") from None
        if not isinstance(value, dict):
            raise DataError(f"{place}: a {type(value).__name__}, not a JSON object")
        yield Record(line.number, value, place)


def parse_json(text: str) -> Any:
    """Read JSON; a ValueError if it is invalid, nested too deeply or has a duplicate key."""
    try:
        return _JSON.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: Path) -> Any:
    """Read a JSON file; an OSError, or a ValueError as in `parse_json`."""
    return parse_json(path.read_text(encoding="utf-8"))


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"duplicate key {show(twice)}")
    return found


_JSON = json.JSONDecoder(object_pairs_hook=_distinct)


def clean_name(place: str, name: str, value: object) -> str:
    """Return the name of a query or passage, one word or a whole number; else a DataError."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    text = str(value) if is_number else clean_text(place, name, value)
    if len(text.split()) != 1:
        raise DataError(f"{place}: '{name}' must be one word to be a name: {show(text)}")
    return text


def clean_text(place: str, name: str, value: object) -> str:
    """Return a text, stripped; a DataError if it is no text, or cannot be kept as UTF-8."""
    if not isinstance(value, str):
        raise DataError(f"{place}: '{name}' is {show(value)}, not text")
    if not is_utf8(value):
        raise DataError(f"{place}: '{name}' holds a NUL or half a surrogate pair")
    return value.strip()


def read_label(
    row: Record,
    column: str,
    *,
    labels: Collection[str] = (),
    classes: Sequence[str] | None = None,
) -> str:
    """Return a row's label, by its name: of a number its digits.

    Without `labels` any text is one. With `classes` (names by number) a number is a place among
    these, and -1 a hidden label.

    Raises:
        DataError: If it has no label (nothing, NaN or a blank text), or one that is not known.
    """
    if column not in row.fields:
        raise row.lacks(column)
    value = row.fields[column]
    value = value.item() if isinstance(value, np.generic) else value
    is_place = classes is not None and type(value) is int
    if _is_missing(value) or (is_place and value == -1):
        raise DataError(f"{row.place} has no label")
    if classes is not None and type(value) is int:
        if not 0 <= value < len(classes):
            raise DataError(
                f"{row.place}: '{column}' is {show(value)}, and its classes are numbered 0 to "
                f"{len(classes) - 1} ({cut(', '.join(classes))})"
            )
        value = classes[value]
    if not isinstance(value, str) and type(value) is not int:
        raise DataError(
            f"{row.place}: '{column}' is {show(value)}, a {type(value).__name__}, not a label's "
            "name: write it as text"
        )
    text = clean_text(row.place, column, str(value))
    if labels and text not in labels:
        hint = " A number is a class's place only in a data set's ClassLabel column: write names."
        is_number = whole_number(text.removeprefix("-")) is not None
        message = unknown_name("label", text, labels)
        raise DataError(f"{row.place}: {message}{hint if is_number else ''}")
    return text


def _is_missing(value: object) -> bool:
    """Whether a value stands for none: None, NaN, pandas' NA and NaT, a blank text."""
    if isinstance(value, str):
        return not value.strip()
    is_nan = isinstance(value, float) and math.isnan(value)
    return value is None or is_nan or type(value).__name__ in ("NAType", "NaTType")


def _rows(path: Path, kind: str, columns: Iterable[str]) -> Iterator[Record]:
    csv.field_size_limit(sys.maxsize)
    lines = (line.text for line in read_lines(path))
    if kind == "csv":
        reader = csv.reader(lines, strict=True)
    else:
        reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    columns = list(columns)

    try:
        header = [name.strip() for name in next(reader, [])]
        _refuse_twins(path, header)
        for cells in reader:
            place = f"{path}, line {reader.line_num}"
            if not cells:
                continue
            if len(cells) != len(header):
                raise DataError(
                    f"{place}: {len(cells)} cells under a header of {len(header)} "
                    f"({', '.join(header)})"
                )
            values = dict(zip(header, cells, strict=True))
            for name in columns if kind == "tsv" else ():
                cell = values.get(name, "").strip()  # refused where quoting would change it
                if '""' in cell and cell.startswith('"') and cell.endswith('"'):
                    raise DataError(
                        f"{place}: '{name}' is quoted ({cell[:40]}), but tsv is read without "
                        "quoting: use csv for quoted cells"
                    )
            yield Record(reader.line_num, values, place)
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not valid {kind} ({error})") from None


def _refuse_twins(path: Path, header: Sequence[str]) -> None:
    named = [name for name in header if name]
    twin = next((name for name in named if named.count(name) > 1), None)
    if twin is not None:
        raise DataError(f"{path}: two columns are named {show(twin)}: rename one")


# Files of a hub data set, and the ways in which asking a hub fails.


logger = logging.getLogger(__name__)

PARQUET_BRANCH = "refs/convert/parquet"  # the hub's own copy of a data set


def hub_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Return all errors that a hub's client raises, and `others`, for an except clause."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # The errors of its client are of the kind that its own begin with, or an OSError; the client
    # is httpx or httpx2, by version.
    client_error = HfHubHTTPError.__bases__[0]
    return (client_error, HFValidationError, OSError, *others)


def hub_reason(error: BaseException) -> str:
    """Return a hub's error as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return f"{type(error).__name__}."
    # A bare status, or what was looked at, and then what it means.
    if len(lines) > 1 and (hasattr(error, "response") or lines[0].endswith(":")):
        lines = [" ".join(lines[:2])]
    return lines[0] if lines[0].endswith((".", "!")) else f"{lines[0]}."


def load_data_set(
    repo: str, config: str | None, revision: str | None = None
) -> tuple[Any, Mapping[str, Any]]:
    """Load a hub data set or a local folder; return its `DatasetBuilder`, and its tables by split.

    No code of it is run. `config` None is the only or default one. `revision` None is the main
    branch or, where that holds only a loading script, the hub's own conversion to Parquet.

    Raises:
        DataError: If there is none, or it cannot be loaded.
    """
    from datasets.exceptions import DatasetGenerationError, DatasetsError

    try:
        builder = _open_builder(repo, config, revision)
        builder.download_and_prepare()
        return builder, builder.as_dataset()
    except hub_errors(DatasetsError, ValueError, RuntimeError) as error:
        is_vague = isinstance(error, DatasetGenerationError)  # its cause is not
        reason = hub_reason((error.__cause__ if is_vague else None) or error)
        raise DataError(
            f"cannot load data set '{repo}': it is no file or folder here, and the hub says: "
            f"{reason} Give files of your own, a local folder, or a bundled: name"
        ) from None


def _open_builder(repo: str, config: str | None, revision: str | None) -> Any:
    from datasets import load_dataset_builder

    try:
        return load_dataset_builder(repo, config, revision=revision)
    except RuntimeError as error:
        if revision is not None or "scripts are no longer supported" not in str(error):
            raise
        logger.info("%s: a loading script, not run; read from %s", repo, PARQUET_BRANCH)
        return load_dataset_builder(repo, config, revision=PARQUET_BRANCH)
