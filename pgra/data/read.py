"""Reading data files: lines (plain, gzip, zstd), tables (jsonl, csv, tsv) and hub data sets."""

import csv
import io
import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from pgra.artifacts import at_home
from pgra.errors import (
    ArtifactError,
    ConfigError,
    DataError,
    cut,
    one_line,
    reading,
    show,
    unknown_name,
)
from pgra.types import as_text

_MOST_DIGITS = 18  # of what fits into 64 bits
PACKED = (".gz", ".zst")
TABLES = ("jsonl", "csv", "tsv")
_LONGEST_REASON = 300
_QUOTED = re.compile('".*"".*"|""')  # a cell that quoting changed


@dataclass(frozen=True)
class Record:
    """One row of a source: a JSON object, a line of a table, a row of a data set.

    Attributes:
        where: Where it stands, in words.
    """

    fields: Mapping[str, object]
    where: str

    def value(self, name: str) -> object:
        """Return a field's value; a DataError, with the nearest name, if there is no such field."""
        if name not in self.fields:
            message = unknown_name("column", name, map(str, self.fields))
            raise DataError(f"{self.where}: {message}")
        return self.fields[name]

    def text(self, name: str) -> str:
        """Return a field's text, stripped; a DataError if it is missing or not text."""
        return clean_text(self.where, name, self.value(name))

    def word(self, name: str) -> str:
        """Return the name of a query or passage, one word or a whole number; else a DataError."""
        value = self.value(name)
        text = clean_text(self.where, name, str(value) if type(value) is int else value)
        if len(text.split()) != 1:
            raise DataError(f"{self.where}: '{name}' must be one word to be a name: {show(text)}")
        return text


@dataclass(frozen=True)
class RawSplit:
    """One split of a source, to be read.

    Attributes:
        columns: Column by field of the task, and by "label" or "answers".
        where: The source, in words.
        classes: Label names in the order of the source's numbers; None: it has names.
        is_standard: Whether it is the task's own split, whose size is known.
    """

    rows: Iterable[Record]
    columns: Mapping[str, str]
    where: str
    classes: Sequence[str] | None = None
    is_standard: bool = False


def file_kind(path: Path) -> str:
    """Return a file's suffix without the dot, and without `.gz` or `.zst`."""
    kinds = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in PACKED]
    return kinds[-1].lstrip(".") if kinds else ""


def check_file(path: Path, kinds: Sequence[str]) -> str:
    """Return a file's kind; a DataError if it is not a plain file of one of `kinds`."""
    if not path.exists():
        raise DataError(f"{path} does not exist")
    if not path.is_file():
        raise DataError(f"{path} is a folder, a device or a pipe: give a plain file")
    if file_kind(path) not in kinds:
        accepted = ", ".join(f".{kind}" for kind in kinds)
        raise DataError(f"{path} is of another kind than {accepted}, or those with .gz or .zst")
    return file_kind(path)


def read_table(path: Path, kinds: Sequence[str] = TABLES) -> Iterator[Record]:
    """Open a table of one of `kinds`, and yield its rows one at a time.

    A csv or tsv has a header; in a tsv a quote mark is a character, and a quoted cell refused.

    Raises:
        DataError: At once, if it is missing or of another kind; later, if a line is not a JSON
            object, or a row's cells do not match the header.
    """
    kind = check_file(path, kinds)
    return _objects(path) if kind == "jsonl" else _rows(path, kind)


def whole_number(text: str) -> int | None:
    """Return the number of up to 18 ASCII digits; None for any other text."""
    is_number = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
    return int(text) if is_number else None


def read_lines(path: Path) -> Iterator[str]:
    """Yield a file's lines with their breaks, one at a time; a byte order mark is dropped.

    Raises:
        DataError: If it is cut short, not gzip or zstd, binary or not UTF-8 (the line is named).
    """
    with reading(path), _open_bytes(path) as stream:
        for number, data in enumerate(stream, 1):
            if b"\0" in data:
                raise DataError(f"{path}, line {number}: a NUL byte: save the file as UTF-8 text")
            try:
                yield data.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"{path}, line {number}: {error}; convert it to UTF-8") from None


def _open_bytes(path: Path) -> BinaryIO:
    if path.suffix not in PACKED:
        return path.open("rb", buffering=1 << 20)
    import pyarrow as pa

    unpacked = pa.input_stream(str(path), compression="detect")
    return cast("BinaryIO", io.BufferedReader(unpacked, 1 << 20))


def _objects(path: Path) -> Iterator[Record]:
    """Yield a jsonl file's objects; blank lines are skipped."""
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = parse_json(line)
        except ValueError as error:
            raise DataError(f"{where}: not JSON ({error})") from None
        if not isinstance(value, dict):
            raise DataError(f"{where}: a {type(value).__name__}, not a JSON object")
        yield Record(value, where)


def _rows(path: Path, kind: str) -> Iterator[Record]:
    csv.field_size_limit(sys.maxsize)
    lines = read_lines(path)
    if kind == "csv":
        rows = csv.DictReader(lines, strict=True)
    else:
        rows = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    try:
        rows.fieldnames = header = [name.strip() for name in rows.fieldnames or ()]
        if len({*header} - {""}) < len(header) - header.count(""):
            raise DataError(f"{path}: two columns have one name ({', '.join(header)}): rename one")
        for values in rows:
            where = f"{path}, line {rows.line_num}"
            if None in values or None in values.values():
                raise DataError(f"{where}: not {len(header)} cells as in {', '.join(header)}")
            if kind == "tsv" and any(_QUOTED.fullmatch(cell.strip()) for cell in values.values()):
                raise DataError(
                    f"{where}: a cell is quoted, but tsv has no quoting: save the file as csv"
                )
            yield Record(values, where)
    except csv.Error as error:
        number = rows.reader.line_num  # that of `rows` itself is the last line read whole
        raise DataError(f"{path}, line {number}: not valid {kind} ({error})") from None


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
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"duplicate key {show(name)}")
        values[name] = value
    return values


_JSON = json.JSONDecoder(object_pairs_hook=_distinct)


def clean_text(where: str, name: str, value: object) -> str:
    """Return a text, stripped; a DataError if it is not text, or cannot be kept as UTF-8."""
    return as_text(f"{where}: '{name}'", value).strip()


def read_label(
    row: Record, column: str, *, labels: Collection[str], classes: Sequence[str] | None
) -> str:
    """Return a row's label, by its name: of a number its digits.

    Without `labels` any text is one. With `classes` (names by number) a number is an index of
    these; any other, such as -1, is a hidden label.

    Raises:
        DataError: If it has no label (nothing, NaN or a blank text), or one that is not known.
    """
    value = row.value(column)
    if classes is not None and type(value) is int:
        value = classes[value] if 0 <= value < len(classes) else None
    is_name = isinstance(value, str) or type(value) is int
    text = clean_text(row.where, column, str(value)) if is_name else ""
    if not text:
        raise DataError(f"{row.where} has no label: '{column}' is {show(value)}, not a name")
    if labels and text not in labels:
        raise DataError(f"{row.where}: {unknown_name('label', text, labels)}")
    return text


# Files of a hub data set, and the ways in which asking a hub fails.


def hub_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Return all errors that a hub's client raises, and `others`, for an except clause."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # The errors of its client are of the kind that its own begin with, or an OSError; the client
    # is httpx or httpx2, by version.
    client_error = HfHubHTTPError.__bases__[0]
    return (client_error, HFValidationError, OSError, *others)


def hub_reason(error: BaseException) -> str:
    """Return a hub's error as one line."""
    reason = one_line(error) or type(error).__name__
    return f"{cut(reason, _LONGEST_REASON).rstrip('.')}."


_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@\S+)?")


def is_on_hub(name: str | Path) -> bool:
    """Return whether a name is OWNER/NAME, and not a path here."""
    path = at_home(name)
    here = path.exists() or path.parent.is_dir()
    return not here and _HUB_ID.fullmatch(str(name)) is not None


def fetch_folder(kind: str, name: str | Path) -> Path:
    """Find a run, a reader or an index by its folder, or download it from the hub.

    `name` is a folder, or OWNER/NAME or OWNER/NAME@REVISION; it returns the folder, or the snapshot
    in the hub's cache, where a stopped download resumes.

    Raises:
        ArtifactError: If the hub has none, or cannot be reached; `kind` is what it would be.
    """
    if not is_on_hub(name):
        return at_home(name)
    from huggingface_hub import snapshot_download

    repo, _, revision = str(name).partition("@")
    try:
        return Path(snapshot_download(repo, revision=revision or None))
    except hub_errors() as error:
        raise ArtifactError(
            f"there is no {kind} '{name}': no such folder here, and none on the hub, where names "
            f"are OWNER/NAME ({cut(hub_reason(error))})"
        ) from None


def push_folder(
    origin: Path, folder: Path, repo: str, message: str, *, private: bool | None
) -> str:
    """Upload a folder; return the address of the commit. Files that are there already stay.

    Raises:
        ConfigError: If there is no token, or the hub refuses it, the id or the upload of `origin`.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        repo = api.create_repo(repo, private=private, exist_ok=True).repo_id
        commit = api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
    except hub_errors(ValueError) as error:
        raise ConfigError(
            f"cannot push {origin} to '{repo}': the hub says: {hub_reason(error)} Is the id "
            "OWNER/NAME, are you logged in (hf auth login, or HF_TOKEN), and may you write there?"
        ) from None
    return str(commit.commit_url)


def load_data_set(
    repo: str, config: str | None, revision: str | None = None
) -> tuple[Any, Mapping[str, Any]]:
    """Load a hub data set or a local folder; return its `DatasetBuilder`, and its tables by split.

    No code of it is run. `config` None is the only or default one, `revision` None the main branch.

    Raises:
        DataError: If there is none, or it cannot be loaded.
    """
    from datasets import load_dataset_builder
    from datasets.exceptions import DatasetsError

    try:
        builder = load_dataset_builder(repo, config, revision=revision)
        builder.download_and_prepare()
        return builder, builder.as_dataset()
    except hub_errors(DatasetsError, ValueError, RuntimeError) as error:
        reason = hub_reason(error.__cause__ or error)  # its own words may be vague
        raise DataError(
            f"cannot load data set '{repo}': it is not a folder here, and the hub says: {reason}"
        ) from None
